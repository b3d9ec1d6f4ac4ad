"""Programs over listed relations on the rows skeleton: a kernel a direction, other work on nodes by torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tiga import passes
from tiga.codegen.apart_rows import Few, few
from tiga.codegen.launch_rows import Lists, Prepared, launch, layout_key, prepare
from tiga.codegen.rows import Analysis, Refused, around, read_args
from tiga.codegen.tape import Tape
from tiga.ops.nodes import Nodes, Whole
from tiga.program import Line, Program, evaluate_size
from tiga.types import DTYPES, compute_dtype


@dataclass(frozen=True, eq=False)
class Planned:
    """The passes of a program, and the node lines that torch computes before and after them; or why there are none.

    refs: the operands, and whether each is a number. filled: the output that a kernel fills with a value. rounded: of
    outputs that are a sum over all edges in fewer bits, that sum.
    """

    passes: tuple[Prepared, ...] = ()
    early: tuple[Line, ...] = ()
    late: tuple[Line, ...] = ()
    refs: tuple[tuple[str, bool], ...] = ()
    filled: dict[str, int] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        return tuple([k.main.text for k in self.passes])


@functools.lru_cache(4096)
def planned(p: Program, maps: Few = ()) -> Planned:
    """maps: what apart_rows.few says of the operands' shapes."""
    if p.kind != "csr":
        return Planned(reason=f"a {p.kind} relation")
    try:
        analysis = Analysis(p, maps)
        works = analysis.passes()
        ready = tuple([prepare(analysis.view(work.owner), work) for work in works])
    except Refused as e:
        return Planned(reason=str(e))
    early, late = around(analysis, works)
    read = {a for line in late for a in read_args(line)}
    results = {r for work in works for r in work.results}
    filled = {r: p.returns.index(r) for work in works for r in work.stored}
    for k, ref in enumerate(p.returns):
        t = p.types[ref]
        if ref in results and ref not in filled and (compute_dtype(t.dtype) == t.dtype or ref not in read):
            filled[ref] = k  # else memory of its own: rows that later lines read are not rounded
    sums = {f.outs[0] for work in works for f in work.shared}
    rounded = {
        line.outs[0]: line.args[0]
        for line in late
        if line.op == "to" and line.args[0] in sums and line.outs[0] in p.returns and line.outs[0] not in read
    }
    late = tuple([line for line in late if line.outs[0] not in rounded])
    refs = tuple([(o.ref, o.flag == "number") for o in p.operands])
    return Planned(ready, early, late, refs, filled, rounded)


def run(
    p: Program,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    scalars: Sequence[float],
    outputs: list[Tensor],
    tape: Tape | None = None,
) -> str:
    """Fill `outputs` and give "", or say why no kernel fits."""
    plan = planned(p, few(p, [t.shape for t in tensors[: len(p.operands)]]))
    if plan.reason:
        return plan.reason
    try:
        Rows(p, tensors, ints, scalars, outputs, plan, tape).run()
    except Refused as e:
        return str(e)
    passes.launched("launch-rows", plan.texts)
    return ""


class Rows(Nodes):
    """One call: its values as far as they are known, by name."""

    def __init__(
        self,
        p: Program,
        tensors: Any,
        ints: Any,
        scalars: Any,
        outputs: list[Tensor],
        plan: Planned,
        tape: Tape | None = None,
    ) -> None:
        self.p, self.ints, self.outputs, self.plan, self.tape = p, ints, outputs, plan, tape
        self.num_dst, self.num_src = ints[:2]
        count = len(p.operands)
        self.shapes = tuple([t.shape for t in tensors[:count]])
        self.device = tensors[0].device
        self.fields = {ref: t.reshape(()) if number else t for (ref, number), t in zip(plan.refs, tensors)}
        self.here = {}
        self.numbers = dict(zip(p.scalars, scalars))
        self.whole = Whole(self.num_dst)
        self.lists = Lists(tuple(tensors[count:]), ints)
        self.given = tensors

    @functools.cached_property
    def key(self) -> tuple:
        return layout_key(self.p, self.given, self.shapes, self.lists)

    def run(self) -> None:
        for line in self.plan.early:
            self.node(line)
        for k in self.plan.passes:
            self.edges(k)
        if self.tape is not None:
            self.tape.ran("launch-rows", self.plan.texts)
        for line in self.plan.late:
            self.node(line)
        for at, (out, ref) in enumerate(zip(self.outputs, self.p.returns)):
            if self.plan.filled.get(ref) != at:
                ref = self.plan.rounded.get(ref, ref)
                x = self.held(ref) if ref in self.here or ref in self.fields else self.value(ref, self.whole)
                out.copy_(x.expand(out.shape) if x.dim() == out.dim() else x)

    def edges(self, ready: Prepared) -> None:
        work, p, filled = ready.work, self.p, self.plan.filled
        tensors: dict[tuple, Any] = {}
        for ref in work.inputs:
            if ref in self.numbers:
                tensors["scalar", ref] = self.numbers[ref]
            else:
                tensors["field", ref] = self.held(ref)
        for ref in work.results:
            tensors["out", ref] = self.outputs[filled[ref]] if ref in filled else self.memory(ref)
        for ref in work.stored:
            # an edge that no row holds is visited by nobody
            tensors["out", ref] = self.outputs[filled[ref]].zero_()
        self.start(ready, tensors)
        for f in work.shared:
            parts = tensors.get(("parts", f.outs[0]))
            self.fields[f.outs[0]] = self.zeros(f.outs[0]) if parts is None else parts.sum(0)
        for ref in (*work.results, *work.stored):
            (self.here if p.types[ref].place == "dst" else self.fields)[ref] = tensors["out", ref]

    def start(self, ready: Prepared, tensors: dict) -> None:
        lists = self.lists.of(ready.work)
        if self.tape is not None and not self.lists.there(ready.work):
            self.tape.whole = False
        launch(self.p, ready, tensors, self.shapes, lists, self.key, self.tape)

    def memory(self, ref: str) -> Tensor:
        t = self.p.types[ref]
        rows = self.num_dst if t.place == "dst" else self.num_src
        sizes = [evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]
        return torch.empty((rows, *sizes), dtype=DTYPES[compute_dtype(t.dtype)], device=self.device)
