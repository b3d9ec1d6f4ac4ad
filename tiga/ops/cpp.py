"""Programs on the CPU as C++: a loop a direction, other work on nodes by torch; and when that is worth a compiler."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import passes, relations
from tiga.codegen import launch_cpp
from tiga.codegen.emit_cpp import Listed, Source
from tiga.codegen.rows import Analysis, Pass, Refused
from tiga.ops.rows import _Rows, around
from tiga.program import Line, Program, evaluate_size
from tiga.types import DTYPES, NAMES, compute_dtype

LEAST = 1 << 22
"""Numbers at edges, from which on seconds of a compiler are soon won back: a call on torch takes tens of milliseconds."""
WHEN = {"always": 0, "never": math.inf}
"""TIGA_CPP=always or never, instead."""
GROUPS = 256  # of rows, a thread at a time
PARTS = 16 << 20  # bytes of sums over all edges, of all groups


@dataclass(frozen=True, eq=False)
class Planned:
    """The passes of a program, what torch does around them, or why there are none."""

    analysis: Analysis | None = None
    works: tuple[Pass, ...] = ()
    early: tuple[Line, ...] = ()
    late: tuple[Line, ...] = ()
    read: frozenset[str] = frozenset()
    reason: str = ""


@functools.lru_cache(4096)
def planned(p: Program) -> Planned:
    try:
        analysis = Analysis(p)
        works = analysis.passes()
    except Refused as e:
        return Planned(reason=str(e))
    return Planned(analysis, works, *around(analysis, works))


def run(
    p: Program, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float], outputs: list[Tensor]
) -> str:
    """Fill `outputs` and give "", or say why torch operations are taken."""
    least = WHEN.get(os.environ.get("TIGA_CPP", ""), LEAST)
    if least:
        numbers = at_edges(p, tensors, ints)
        if numbers < least:
            return f"{numbers} numbers at edges, fewer than {least}"
    plan = planned(p)
    if plan.reason:
        return plan.reason
    try:
        _Cpp(p, tensors, ints, scalars, outputs, plan).run()
    except Refused as e:
        return str(e)
    return ""


def at_edges(p: Program, tensors: Sequence[Tensor], ints: Sequence[int]) -> int:
    """Edges times the widest value that one holds: what torch would materialise."""
    count = relations.num_edges(p.kind, tuple(ints), tuple(tensors[len(p.operands) :]))
    shapes = tuple([tuple(t.shape) for t in tensors])
    widths = [
        math.prod([evaluate_size(s, shapes, p.operands) for s in t.sizes])
        for t in p.types.values()
        if t.place == "edge"
    ]
    return count * max([1, *widths])


@functools.lru_cache(4096)
def source(analysis: Analysis, work: Pass, shapes: tuple, forms: tuple) -> Source:
    passes.ran("emit-cpp")
    return Listed(analysis, work, shapes, dict(forms)).source()


class _Cpp(_Rows):
    def __init__(self, p: Program, tensors: Any, ints: Any, scalars: Any, outputs: list[Tensor], plan: Planned) -> None:
        super().__init__(p, tensors, ints, scalars, outputs, plan)  # type: ignore[arg-type]
        features = tuple(
            [s if o.place == "shared" else (0, *s[1:]) for o, s in zip(p.operands, self.shapes)]
        )
        self.directions = [direction(p, self.ints, self.relation, work) for work in plan.works]
        self.sources = [
            source(plan.analysis, work, features, lists.forms()) for work, lists in zip(plan.works, self.directions)
        ]
        launch_cpp.load(tuple([s.text for s in self.sources]))

    def run(self) -> None:
        for line in self.plan.early:
            self.node(line)
        for work, made, lists in zip(self.plan.works, self.sources, self.directions):
            self.visit_edges(work, made, lists)
        passes.launched("launch-cpp", tuple([s.text for s in self.sources]))
        for line in self.plan.late:
            self.node(line)
        self.store()

    def visit_edges(self, work: Pass, made: Source, lists: Any) -> None:
        p = self.p
        rows = self.num_dst if work.owner == "dst" else self.num_src
        kept: list[Tensor] = []
        tensors: list[Tensor] = []
        ints: list[int] = []
        numbers: list[float] = []
        outs = {ref: self.result(ref, rows) for ref in work.results}
        outs.update({ref: self.outputs[p.returns.index(ref)].zero_() for ref in work.stored})
        size = sum([math.prod(self.zeros(f.outs[0]).shape) * 8 for f in work.shared])
        groups = max(1, min(GROUPS, PARTS // max(1, size), rows))
        parts = {
            f.outs[0]: torch.zeros((groups, *(z := self.zeros(f.outs[0])).shape), dtype=z.dtype) for f in work.shared
        }
        fields: dict[str, Tensor] = {}

        def field(ref: str) -> Tensor:
            if ref not in fields:
                fields[ref] = together(self.held(ref), p.types[ref].place == "shared")
            return fields[ref]

        counts = {"num_rows": rows, "num_far": lists.num_far, "num_edges": lists.num_edges, "groups": groups}
        for name, what, ref in made.arguments:
            if what == "scalar":
                numbers.append(self.numbers[ref])
            elif what == "int":
                ints.append(counts[ref])
            elif what == "row":
                ints.append(field(ref).stride(0))
            else:
                tensors.append(
                    field(ref) if what == "field" else outs[ref] if what == "out" else parts[ref]
                    if what == "parts" else lists.tensors[ref] if what == "list" else self.other(what, ref)
                )
        launch_cpp.call(made.text, tensors, ints, numbers, torch.get_num_threads())
        for ref, x in parts.items():
            self.fields[ref] = x.sum(0)
        for ref, x in outs.items():
            (self.here if p.types[ref].place == "dst" else self.fields)[ref] = x

    def other(self, what: str, ref: str) -> Tensor:
        if what == "transposed":
            return self.held(ref).t().contiguous()
        raise AssertionError(what)


@dataclass(frozen=True)
class Lists:
    """One direction of a listed relation."""

    tensors: dict[str, Tensor]
    num_far: int
    num_edges: int

    def forms(self) -> tuple:
        return tuple([(name, NAMES[t.dtype]) for name, t in self.tensors.items()])


def direction(p: Program, ints: tuple, relation: tuple, work: Pass) -> Lists:
    if p.kind != "csr":
        raise Refused(f"a {p.kind} relation")
    rowptr, col = relation[:2]
    number = relation[2] if len(relation) > 2 else None
    num_far = ints[1]
    if (work.owner == "dst") == p.reverse:
        rowptr, col, number = torch.ops.tiga.csr_transpose(rowptr, col, number, ints[1])
        num_far = ints[0]
    tensors = {"rowptr": rowptr.contiguous(), "col": col.contiguous()}
    if number is not None:
        tensors["number_of"] = number.contiguous()
    return Lists(tensors, num_far, col.shape[0])


def together(t: Tensor, shared: bool) -> Tensor:
    """The features of a row beside each other; rows where they are."""
    wide = t.contiguous() if shared or not t[:1].is_contiguous() else t
    return wide
