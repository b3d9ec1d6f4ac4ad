"""Programs over listed relations on the rows skeleton: a kernel a direction, other work on nodes by torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import passes
from tiga.codegen import launch_rows
from tiga.codegen.launch_rows import Prepared, launch, prepare
from tiga.codegen.rows import Analysis, Pass, Refused, read_args
from tiga.program import Line, Program, evaluate_size
from tiga.reference import Run
from tiga.reference_ops import fold_rows
from tiga.types import DTYPES, compute_dtype


@dataclass(frozen=True, eq=False)
class Planned:
    """The passes of a program, and the node lines that torch computes before and after them; or why there are none."""

    passes: tuple[Prepared, ...] = ()
    early: tuple[Line, ...] = ()
    late: tuple[Line, ...] = ()
    read: frozenset[str] = frozenset()
    reason: str = ""


@functools.lru_cache(4096)
def planned(p: Program) -> Planned:
    if p.kind != "csr":
        return Planned(reason=f"a {p.kind} relation")
    try:
        analysis = Analysis(p)
        works = analysis.passes()
        ready = tuple([prepare(analysis, work) for work in works])
    except Refused as e:
        return Planned(reason=str(e))
    return Planned(ready, *around(analysis, works))


def around(analysis: Analysis, works: Sequence[Pass]) -> tuple[tuple[Line, ...], tuple[Line, ...], frozenset[str]]:
    """What passes leave to torch: the node lines before them, those after, and what the latter read."""
    p = analysis.p
    made = {r for work in works for r in (*work.results, *work.stored, *[f.outs[0] for f in work.shared])}
    wanted = {*p.returns, *[r for work in works for r in work.inputs]}
    lines: list[Line] = []
    for line in reversed(analysis.lines):
        if any(o in wanted and o not in made for o in line.outs):
            lines.insert(0, line)
            wanted.update(read_args(line))
    early = tuple([line for line in lines if line.outs[0] not in analysis.late])
    late = tuple([line for line in lines if line.outs[0] in analysis.late])
    return early, late, frozenset([a for line in late for a in read_args(line)])


def run(
    p: Program, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float], outputs: list[Tensor]
) -> str:
    """Fill `outputs` and give "", or say why no kernel fits."""
    plan = planned(p)
    if plan.reason:
        return plan.reason
    try:
        _Rows(p, tensors, ints, scalars, outputs, plan).run()
    except Refused as e:
        return str(e)
    return ""


class _Whole:
    """All destinations at once: node values need no ranges."""

    lead = 1

    def __init__(self, rows: int) -> None:
        self.rows = (0, rows)


class _Rows(Run):
    def __init__(self, p: Program, tensors: Any, ints: Any, scalars: Any, outputs: list[Tensor], plan: Planned) -> None:
        super().__init__(p, tensors, ints, (), outputs)
        self.numbers = dict(zip(p.scalars, scalars))
        self.plan, self.whole = plan, _Whole(self.num_dst)

    def run(self) -> None:
        for line in self.plan.early:
            self.node(line)
        for k in self.plan.passes:
            self.edges(k)
        passes.launched("launch-rows", tuple([k.main.text for k in self.plan.passes]))
        for line in self.plan.late:
            self.node(line)
        self.store()

    def value(self, ref: str, layout: Any) -> Tensor:
        if ref in self.numbers and ref not in self.fields:
            self.fields[ref] = torch.full((), self.numbers[ref], dtype=torch.float64, device=self.device)
        return super().value(ref, layout)

    def node(self, line: Line) -> None:
        out = line.outs[0]
        if line.op == "reduce":
            rows = [self.value(a, self.whole) for a in line.args]
            self.fields[out] = fold_rows(line, rows, self.p, self.zeros(out))
        else:
            x = self.compute(line, self.whole)
            (self.here if self.p.types[out].place == "dst" else self.fields)[out] = x

    def held(self, ref: str) -> Tensor:
        t = self.here.get(ref)
        return self.fields[ref] if t is None else t

    def edges(self, ready: Prepared) -> None:
        work, p = ready.work, self.p
        tensors: dict[tuple, Any] = {}
        for ref in work.inputs:
            if ref in self.numbers:
                tensors["scalar", ref] = self.numbers[ref]
            else:
                tensors["field", ref] = self.held(ref)
        rows = self.num_dst if work.owner == "dst" else self.num_src
        for ref in work.results:
            tensors["out", ref] = self.result(ref, rows)
        for ref in work.stored:
            # an edge that no row holds is visited by nobody
            tensors["out", ref] = self.outputs[p.returns.index(ref)].zero_()
        launch(p, ready, tensors, self.shapes, launch_rows.listed(p, self.ints, self.relation, work), rows)
        for f in work.shared:
            parts = tensors.get(("parts", f.outs[0]))
            self.fields[f.outs[0]] = self.zeros(f.outs[0]) if parts is None else parts.sum(0)
        for ref in (*work.results, *work.stored):
            (self.here if p.types[ref].place == "dst" else self.fields)[ref] = tensors["out", ref]

    def result(self, ref: str, rows: int) -> Tensor:
        """An output where it is one, else memory: rows that later lines read are not rounded."""
        t = self.p.types[ref]
        wide = DTYPES[compute_dtype(t.dtype)]
        if ref in self.p.returns:
            out = self.outputs[self.p.returns.index(ref)]
            if out.dtype == wide or ref not in self.plan.read:
                return out
        sizes = [evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]
        return torch.empty((rows, *sizes), dtype=wide, device=self.device)

    def store(self) -> None:
        for out, ref in zip(self.outputs, self.p.returns):
            x = self.held(ref) if ref in self.here or ref in self.fields else self.value(ref, self.whole)
            if x is not out:
                out.copy_(x.expand(out.shape) if x.dim() == out.dim() else x)
