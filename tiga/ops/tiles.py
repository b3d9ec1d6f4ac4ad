"""Programs on the tiles skeleton: kernels over nodes and edges; work on nodes that fits no kernel is left to torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiga import passes, relations
from tiga.codegen.calls import Call, Prepared, span_of
from tiga.codegen.nodes import Planner
from tiga.codegen.steps import launch
from tiga.codegen.tape import Tape
from tiga.codegen.tiles import Refused, Tiles
from tiga.ops.nodes import Whole
from tiga.program import Line, Program
from tiga.reference import Run
from tiga.reference_ops import fold_rows
from tiga.relations import is_implicit
from tiga.schedule import schedule
from tiga.types import DTYPES, compute_dtype


@functools.lru_cache(4096)
def planned(p: Program) -> tuple[Tiles | None, tuple[Prepared, ...], str]:
    """(plan, kernels, why not): kernels is empty where the skeleton does not fit."""
    if not is_implicit(p.kind):
        return None, (), f"a {p.kind} relation"
    try:
        plan = Planner(p, schedule(p)[0]).plan()
    except Refused as e:
        return None, (), str(e)
    kernels = []
    for work in plan.works:
        span = span_of(p, work)
        # the reach of a tile of columns is known for whole rows
        work = dataclasses.replace(work, packed=None) if span[:4] == "cols" or work.tile or work.within else work
        kernels.append(Prepared(plan.axes, work, span))
    return plan, tuple(kernels), ""


def run(
    p: Program,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    scalars: Sequence[float],
    outputs: list[Tensor],
    tape: Tape | None = None,
) -> str:
    """Fill `outputs` and give "", or say why no kernel fits."""
    plan, kernels, reason = planned(p)
    if plan is None:
        return reason
    if p.pruned:  # maps of tiles are read as they were made
        tensors = [t.contiguous() if t.dtype == torch.uint8 else t for t in tensors]
    call = Call(p, tensors, tuple(ints), scalars, outputs, tape)
    try:
        ran = visit(plan, kernels, call, tensors, scalars)
    except Refused as e:
        return str(e)
    passes.launched("launch-tiles", ran)
    return ""


def visit(
    plan: Tiles, kernels: tuple[Prepared, ...], call: Call, tensors: Any, scalars: Any, start: Any = launch
) -> tuple[str, ...]:
    """Fill the outputs of a call; the texts that ran. start: what is done with one work."""
    p, tape = call.p, call.tape
    by_torch = None
    if plan.early or plan.late or any(r not in _results(kernels) for r in range(len(p.returns))):
        by_torch = _Nodes(p, tensors, call.ints, scalars, call.outputs)
        if tape is not None:
            for name in p.scalars:
                tape.filled(by_torch.fields[name], name)
        for line in plan.early:
            by_torch.node(line)
        call.tensors.update(by_torch.stored(plan))
    ran: tuple[str, ...] = ()
    for ready in kernels:
        for o in ready.work.outputs:
            if o.result is None:
                call.tensors[o.ref] = _buffer(call, ready, o)
        ran += start(ready, call, spans)
    if tape is not None:
        tape.ran("launch-tiles", ran)
    if by_torch is not None:
        by_torch.take({o.ref: call.tensors[o.ref] for k in kernels for o in k.work.outputs if o.result is None})
        for ready in kernels:
            for o in ready.work.tables.values():
                by_torch.take({o.ref: _table(plan, call, o)})
        for line in plan.late:
            by_torch.node(line)
        for k, (out, ref) in enumerate(zip(call.outputs, p.returns)):
            if k not in _results(kernels):
                x = by_torch.value(ref, by_torch.whole)
                out.copy_(x.expand(out.shape) if x.dim() == out.dim() else x)
    return ran


@functools.lru_cache(4096)
def _results(kernels: tuple[Prepared, ...]) -> frozenset:
    """The numbers of the program's results that kernels fill."""
    every = [o for k in kernels for o in (*k.work.outputs, *k.work.edge_outputs, *k.work.maps)]
    return frozenset([o.result for o in every if o.result is not None])


def _table(plan: Tiles, call: Call, o: Any) -> Tensor:
    """Sums into a table over all tiles of owners, and over the heads that it has not."""
    x, dims = call.tensors["table " + o.ref].sum(0), list(o.dims)
    rest = [a for a in plan.axes.dims(o.ref)[1:] if a != 1]
    for a in [a for a in dims[:-1] if a not in rest]:
        x = x.sum(dims.index(a))
        dims.remove(a)
    x = x.permute(-1, *[dims.index(a) for a in rest])
    return x.reshape([call.size(s) for s in call.p.types[o.ref].sizes])


def _buffer(call: Call, ready: Prepared, o: Any) -> Tensor:
    """Memory of a node value between kernels: numbers of one head lie side by side, for the tiles that read them."""
    t = call.p.types[o.ref]
    rows = call.rows(ready.work.owner)
    sizes = [call.size(s) for s in t.sizes]
    dtype = DTYPES[t.dtype if o.vector is not None and ready.span == "nodes" else compute_dtype(t.dtype)]
    dtype = torch.float32 if dtype == torch.float64 else dtype
    if o.vector is not None:
        return torch.empty((rows, *sizes), dtype=dtype, device=call.device)
    wide = -(-rows // 16) * 16  # so that no number of rows makes another alignment, nor another kernel
    return torch.empty((*sizes, wide), dtype=dtype, device=call.device)[..., :rows].movedim(-1, 0)


class _Nodes(Run):
    """Work on nodes by torch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.whole = Whole(self.num_dst)

    def node(self, line: Line) -> None:
        out = line.outs[0]
        if out in self.shape_only:
            return
        if line.op == "reduce":
            self.fields[out] = fold_rows(line, [self.value(a, self.whole) for a in line.args], self.p, self.zeros(out))
        else:
            self.take({out: self.compute(line, self.whole)})

    def take(self, values: dict[str, Tensor]) -> None:
        for ref, x in values.items():
            (self.here if self.p.types[ref].place == "dst" else self.fields)[ref] = x

    def stored(self, plan: Tiles) -> dict[str, Tensor]:
        """What kernels read of these values: matrix products 16 bits where the program says so."""
        found = {}
        made = {o for line in plan.early for o in line.outs}
        for work in plan.works:
            for x in work.inputs:
                if x.ref in made:
                    t = self.here[x.ref] if x.ref in self.here else self.fields[x.ref]
                    wide = DTYPES[x.dtype] if x.mode == "vector" else t.dtype
                    found[x.ref] = t.to(torch.float32 if wide == torch.float64 else wide)
        return found


# What a kernel is told of its relation.


def spans(ready: Prepared, call: Call, block_m: int) -> dict[str, Any]:
    """Arguments by "&" + name + block_m."""
    p, work, ints = call.p, ready.work, call.ints
    found: dict[str, Any] = {}
    if ready.span == "band":
        band = relations.RELATIONS[p.kind].band
        assert band is not None
        # beyond any pair, and within int32, which keeps a mask in half the registers
        far = ints[0] + ints[1] + 1
        low, high = (relations.largest(-far, relations.least(far, x)) for x in band(ints))
        rows = (work.owner == "dst") != p.reverse
        found["low"], found["high"] = (low, high) if rows else (-high, -low)
    if work.reads_numbers:
        found["first"] = relations.edge_offsets(p.kind, ints, call.relation, call.device)
    return {f"&{k}{block_m}": v for k, v in found.items()}
