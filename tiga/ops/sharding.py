"""How DTensor shards the operator: along features that a program maps one by one, as heads; rows stay whole."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import torch

from tiga.parser import parse
from tiga.primitives import PRIMITIVES
from tiga.program import Line, Program

_MAPPED = ("to", "unsqueeze", "squeeze", "spread", "permute", "expand_like", "zeros_like")
_FOLDED = ("sum", "amax", "amin")
_REDUCERS = ("sum", "mean", "count", "max", "min", "softmax")
_installed = False


def install() -> None:
    """Register the rule, once, as soon as DTensor is there. Its registry is private: without it DTensor refuses."""
    global _installed
    if _installed or "torch.distributed.tensor" not in sys.modules:
        return
    _installed = True
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
        torch.ops.tiga.propagate.default, strategy, RuntimeSchemaInfo(0, needs_pytree=True)
    )


@functools.lru_cache(4096)
def layouts(text: str) -> tuple[tuple[tuple[int | None, ...], tuple[int | None, ...]], ...]:
    """For each axis that may be cut: its dimension in each operand, and in each result; None where it is not."""
    from tiga.codegen.tiles import Axes  # imported where a sharded tensor is met, not before

    p = parse(text)
    axes = Axes(p)
    found = dict.fromkeys([a for o in p.operands for a in axes.of(o.ref) if not isinstance(a, int)])
    for line in p.lines:
        for a in _whole(p, axes, line):
            found.pop(a, None)
    return tuple([(_dims(p, axes, a, [o.ref for o in p.operands]), _dims(p, axes, a, p.returns)) for a in found])


def _whole(p: Program, axes: Any, line: Line) -> list[Any]:
    """The axes that a line needs whole."""
    if line.op in _MAPPED or (line.op in PRIMITIVES and PRIMITIVES[line.op].elementwise):
        return []
    if line.op == "reduce" and line.attrs[1] in _REDUCERS:
        return []
    if line.op in _FOLDED:
        return [axes.dims(line.args[0])[int(line.attrs[0])]]
    return [a for ref in (*line.args, *line.outs) for a in axes.of(ref)]


def _dims(p: Program, axes: Any, axis: Any, refs: Any) -> tuple[int | None, ...]:
    """The tensor's dimension that is this axis, of each value."""
    return tuple(
        [
            axes.dims(ref).index(axis) + (p.types[ref].place != "shared") if axis in axes.dims(ref) else None
            for ref in refs
        ]
    )


def strategy(schema: Any) -> Any:
    """Every way to give each dimension of the mesh one axis, or none; what is not cut is whole on each device."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    text, tensors = schema.args_schema[0], schema.args_schema[1].children
    p, mesh = parse(text), tensors[0].strategies[0].output_spec.mesh
    more = (None,) * p.relation_tensors
    ways: list[tuple] = [((None,) * len(tensors), (None,) * len(p.returns))]
    ways += [((*read, *more), made) for read, made in layouts(text) if _divides(tensors, read, mesh.size())]

    def spec(dims: tuple, meta: Any = None) -> Any:
        placements = tuple([Replicate() if d is None else Shard(d) for d in dims])
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    found = []
    for chosen in itertools.product(ways, repeat=mesh.ndim):
        reads = [spec(dims, t.strategies[0].output_spec.tensor_meta) for dims, t in zip(_by(chosen, 0), tensors)]
        costs = [generate_redistribute_costs(t, read) for t, read in zip(tensors, reads)]
        made = tuple([spec(dims) for dims in _by(chosen, 1)])
        found.append(OpSpec(output_specs=made, input_specs=reads, redistribute_cost=costs))
    return OpStrategy(found)


def _by(chosen: tuple, which: int) -> list[tuple]:
    """For each tensor, its dimension of each dimension of the mesh."""
    return list(zip(*[way[which] for way in chosen]))


def _divides(tensors: Any, dims: tuple, parts: int) -> bool:
    """Whether each device has as much of the axis, and more than one: a program is another for a size of one."""
    sizes = [t.strategies[0].output_spec.tensor_meta.shape[d] for t, d in zip(tensors, dims) if d is not None]
    return all(size % parts == 0 and size > parts for size in sizes)
