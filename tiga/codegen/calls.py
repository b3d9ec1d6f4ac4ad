"""A call of a program's work, and the launches that were prepared for it: how they are made again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import passes
from tiga.codegen.emit_nodes import RowEmitter, Source
from tiga.codegen.emit_tiles import Emitter
from tiga.codegen.kernels import Runner, float32_setting
from tiga.codegen.plan import Plan
from tiga.codegen.tape import Tape
from tiga.codegen.tiles import Axes, Work
from tiga.program import Program, evaluate_size


@dataclass(frozen=True, eq=False)
class Prepared:
    """A work with its sources: what a program needs, whatever the sizes."""

    axes: Axes
    work: Work
    span: str

    def source(self, stage: str = "whole") -> Source:
        return _source(self, stage)


@functools.lru_cache(4096)
def _source(ready: Prepared, stage: str) -> Source:
    passes.ran("emit-tiles")
    emitter = RowEmitter if ready.span == "nodes" else Emitter
    return emitter(ready.axes, ready.work, ready.span, stage).source()


def span_of(p: Program, work: Work) -> str:
    if not work.folds and not work.edge_outputs:
        return "nodes"
    if p.kind in ("dense", "triangular", "window"):
        return "band"
    if p.kind == "blocks":
        return "blocks"
    rows = (work.owner == "dst") != p.reverse
    return ("rows" if rows else "cols") + ("2" if p.relation_tensors == 4 else "1")


class Call:
    """One call of a program: what its kernels read and fill. `key`: all that decides launches, but addresses."""

    def __init__(
        self,
        p: Program,
        tensors: Any,
        ints: tuple,
        scalars: Any,
        outputs: list[Tensor],
        tape: Tape | None = None,
    ) -> None:
        self.p, self.ints, self.outputs, self.tape = p, ints, outputs, tape
        self.tensors: dict[str, Tensor] = {o.ref: t for o, t in zip(p.operands, tensors)}
        self.relation = tuple(tensors[len(p.operands) :])
        self.tensors.update({f"relation{k}": t for k, t in enumerate(self.relation)})
        self.scalars = dict(zip(p.scalars, scalars))
        self.device = tensors[0].device
        self.num_dst, self.num_src = (ints[1], ints[0]) if p.reverse else (ints[0], ints[1])
        self.given, self.shapes = tensors, tuple([t.shape for t in tensors])

    @functools.cached_property
    def key(self) -> tuple:
        kinds = tuple([(t.stride(), t.dtype, t.data_ptr() & 15) for t in self.given])
        return (self.shapes, kinds, self.ints, self.device, float32_setting())

    def size(self, size: Any) -> int:
        return evaluate_size(size, self.shapes, self.p.operands)

    def rows(self, place: str) -> int:
        return self.num_dst if place == "dst" else self.num_src


@dataclass(frozen=True)
class Record:
    """A launch as it was prepared: all arguments but those that change from call to call."""

    text: str
    runner: Runner
    arguments: tuple
    tensors: tuple[tuple[int, str], ...]  # (position, name)
    scalars: tuple[tuple[int, str], ...]
    outputs: tuple[tuple[int, int], ...]
    descriptors: tuple[tuple[int, Callable[[Call], Any]], ...] = ()


@dataclass(frozen=True)
class Steps:
    """The launches of one work: the kernel, or parts of the sources and their merge. states: shapes and dtypes."""

    records: tuple[Record, ...]
    states: tuple[tuple[str, tuple, torch.dtype], ...]
    plan: Plan | None = None
    timed: bool = False
    noted: tuple[str, ...] = ()  # passes

    @property
    def spilled(self) -> int:
        return sum([record.runner.spilled for record in self.records])

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        return tuple([record.text for record in self.records])


def execute(steps: Steps, ready: Prepared, call: Call, spans: Any) -> None:
    for name, shape, dtype in steps.states:
        call.tensors[name] = torch.empty(shape, dtype=dtype, device=call.device)
    told: dict[str, Any] = {}
    for record in steps.records:
        run(record, ready, call, spans, told)


def run(record: Record, ready: Prepared, call: Call, spans: Any, told: dict[str, Any]) -> None:
    arguments = list(record.arguments)
    for at, name in record.tensors:
        if name[0] == "&":
            if name not in told:
                told.update(spans(ready, call, arguments[at]))
            arguments[at] = told[name]
        else:
            arguments[at] = call.tensors[name]
    for at, name in record.scalars:
        arguments[at] = call.scalars[name]
    for at, k in record.outputs:
        arguments[at] = call.outputs[k]
    for at, make in record.descriptors:
        arguments[at] = make(call)
        if call.tape is not None:
            call.tape.compute(arguments[at], described(make, call))
    if call.tape is None:
        record.runner.run(*arguments)
    else:
        call.tape.launch(record.runner, arguments, dict(record.scalars))


def described(make: Any, call: Call) -> Callable[[list[Tensor]], Any]:
    """What makes the descriptor of an operand for another call like this one."""
    p, ints, scalars = call.p, call.ints, tuple(call.scalars.values())
    return lambda tensors: make(Call(p, tensors, ints, scalars, []))


def stride(t: Tensor, dims: tuple, axis: Any, has_rows: bool) -> int:
    """The stride of a feature dimension; 0 where there is none, or its size is 1."""
    for a, s, n in zip(dims, t.stride()[int(has_rows) :], t.shape[int(has_rows) :]):
        if a == axis and n != 1:
            return s
    return 0
