"""Programs on the tiles skeleton: work on nodes by torch, the edges by one kernel a direction."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiga import passes
from tiga.codegen.launch import Prepared, launch, prepare
from tiga.codegen.tiles import Analysis, Refused
from tiga.program import Line, Program, evaluate_size
from tiga.reference import Run
from tiga.reference_ops import fold_rows
from tiga.relations import is_implicit
from tiga.schedule import schedule
from tiga.types import DTYPES, compute_dtype


@functools.lru_cache(4096)
def planned(p: Program) -> tuple[Any, tuple[Prepared, ...], str]:
    """(analysis, kernels, why not): kernels is empty where the skeleton does not fit."""
    if not is_implicit(p.kind):
        return None, (), f"a {p.kind} relation"
    analysis = Analysis(p, schedule(p)[0])
    try:
        passes = analysis.passes()
        return analysis, tuple([prepare(p, work, analysis.uses_number) for work in passes]), ""
    except Refused as e:
        return None, (), str(e)


def run(
    p: Program, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float], outputs: list[Tensor]
) -> str:
    """Fill `outputs` and give "", or say why no kernel fits."""
    _, kernels, reason = planned(p)
    if not kernels:
        return reason
    try:
        _Tiles(p, tensors, ints, scalars, outputs).run()
    except Refused as e:
        return str(e)
    return ""


class _Whole:
    """All destinations at once: node values need no ranges."""

    lead = 1

    def __init__(self, rows: int) -> None:
        self.rows = (0, rows)


class _Tiles(Run):
    def run(self) -> None:
        p, whole = self.p, _Whole(self.num_dst)
        analysis, kernels, _ = planned(p)
        folded = {f.line for k in kernels for f in k.work.folds}
        lines = [line for line in p.lines if line.outs[0] not in self.shape_only]
        after: set[str] = {o for line in folded for o in line.outs}
        early, late = [], []
        for line in lines:
            if line in folded or p.types[line.outs[0]].place == "edge":
                continue
            if line.op == "reduce" or any(a in after for a in line.args):
                after.update(line.outs)
                late.append(line)
            else:
                early.append(line)
        for line in early:
            self.node(line, whole)
        for k in kernels:
            self.edges(k, analysis)
        passes.launched("launch-tiles", tuple([k.source.text for k in kernels]))
        for line in late:
            self.node(line, whole)
        for out, ref in zip(self.outputs, p.returns):
            x = self.value(ref, whole)
            out.copy_(x.expand(out.shape) if x.dim() == out.dim() else x)

    def node(self, line: Line, whole: Any) -> None:
        out = line.outs[0]
        place = self.p.types[out].place
        if line.op == "reduce":
            self.fields[out] = self.fold_all(line, whole)
        else:
            x = self.compute(line, whole)
            (self.here if place == "dst" else self.fields)[out] = x

    def fold_all(self, line: Line, whole: Any) -> Tensor:
        """A sum over nodes: no edge takes part."""
        return fold_rows(line, [self.value(a, whole) for a in line.args], self.p, self.zeros(line.outs[0]))

    def edges(self, ready: Prepared, analysis: Any) -> None:
        fields = {}
        for x in ready.source.inputs:
            held = self.here.get(x.ref)
            t = held if held is not None else self.fields[x.ref]
            # matrix products read 16 bits where the program says so
            fields[x.ref] = t.to(DTYPES[x.dtype]) if x.vector is not None else t
        results = {}
        rows = self.num_dst if ready.work.owner == "dst" else self.num_src
        for f in ready.work.folds:
            for o in f.line.outs:
                kind = self.p.types[o]
                sizes = [evaluate_size(s, self.shapes, self.p.operands) for s in kind.sizes]
                results[o] = torch.empty((rows, *sizes), dtype=DTYPES[compute_dtype(kind.dtype)], device=self.device)
        launch(self.p, ready, fields, results, self.shapes, self.ints, self.relation, analysis)
        (self.here if ready.work.owner == "dst" else self.fields).update(results)
