"""One row a reducer: what it gives, what it means on one segment, its adjoint and its tangent as edge expressions.

`segments` is how a reference path folds: `sum(x)`, `amax(x)`, `amin(x)` fold an edge value over each segment,
`spread(y)` reads a segment's value at its edges, `weighted(w, x)` is sum(w * x), `number` are the edge numbers.
`adjoint(b, place, args, results, grads)` speaks program values: `results` are the saved results before the epilogue,
read at the segment's place; it returns one edge cotangent (or None) an argument. `tangent` gives the results' tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tiga.errors import TigaError
from tiga.types import Total, Type, broadcast_sizes, is_one

Results = tuple


@dataclass(frozen=True)
class ReducerRow:
    """A cotangent may be wider than its argument, where that was broadcast: the caller sums it down.

    reference: None where it folds to shared alone: a sum over rows needs no segments. places: where it may fold to.
    keeps: the names of its results; the first is the value. accumulator: the number of the result in whose dtype it
    accumulates. in_pieces: arguments that, as fields of sources, are never brought to all edges at once.
    """

    name: str
    arity: int
    keeps: tuple[str, ...]
    rule: Callable[[str, tuple, Callable], tuple[Type, ...]]
    reference: Callable[..., Results] | None
    adjoint: Callable[..., tuple] | None
    tangent: Callable[..., tuple] | None = None
    places: tuple[str, ...] = ("dst",)
    accumulator: int = 0
    in_pieces: tuple[int, ...] = ()


def _strong(t: Type, place: str, dtype: str | None = None, sizes: Any = None) -> Type:
    return Type(
        place, dtype or ("f32" if t.weak and t.dtype == "f64" else t.dtype), t.sizes if sizes is None else sizes
    )


def _accumulate(dtype: str) -> str:
    return "i64" if dtype in ("bool", "u8", "i8", "i16", "i32") else dtype


def _sum_rule(place, types, unify):
    t = _strong(types[0], place)
    return (Type(place, _accumulate(t.dtype), t.sizes),)


def _extreme_rule(place, types, unify):
    t = _strong(types[0], place)
    return (t, Type(place, "i64", t.sizes))


def _count_rule(place, types, unify):
    return (Type(place, "i64", ()),)


def _softmax_rule(place, types, unify):
    score, value = types
    if len(score.sizes) != len(value.sizes):
        raise TigaError(
            f"softmax of a score with {len(score.sizes)} and a value with {len(value.sizes)} feature dimensions"
        )
    sizes = broadcast_sizes((score.sizes, value.sizes), unify)
    lse = "f64" if "f64" in (score.dtype if not score.weak else "", value.dtype if not value.weak else "") else "f32"
    dtype = _strong(value, place).dtype
    return (Type(place, dtype if value.floating else "f32", sizes), Type(place, lse, score.sizes))


def _pruned_rule(place, types, unify):
    """Softmax's, then of each row: the certificate, tiles visited, tiles skipped; of each tile: whether it was kept,
    and its gap below the running maximum."""
    score, _value, limit = types[:3]
    out, lse = _softmax_rule(place, types[:2], unify)
    joined = broadcast_sizes((score.sizes, limit.sizes), unify)
    if [is_one(s) for s in joined] != [is_one(s) for s in score.sizes]:
        raise TigaError(f"a limit with features {limit.sizes} for a score with {score.sizes}")
    count = Type(place, "i32", score.sizes)
    tiles = (*score.sizes, Total("tiles", ("dst",)), Total("tiles", ("src",)))
    return out, lse, Type(place, "f32", score.sizes), count, count, *[Type("shared", t, tiles) for t in ("u8", "f32")]


def _dot_rule(place, types, unify):
    g, x = types
    for a, b in zip(g.sizes[:-1], x.sizes[:-1]):
        unify(a, b)
    return (Type(place, g.dtype, (g.sizes[-1], x.sizes[-1])),)


def _scatter_rule(place, types, unify):
    g, _i, table = types
    return (Type(place, g.dtype, table.sizes),)


# Meaning on one block of segments.


def _softmax(segments, score, value):
    """m + log sum exp(score - m), and value's mean under exp(score - m): without finite m 0 and -inf."""
    score = segments.edge(score)
    peak = segments.amax(score)
    safe = torch.where(peak == -torch.inf, 0.0, peak)
    weight = torch.exp(score - segments.spread(safe))
    weight = segments.only(weight)
    total = segments.sum(weight)
    out = segments.weighted(weight, value)
    none = total == 0
    out = torch.where(none, 0.0, out / torch.where(none, 1.0, total))
    return out, safe + torch.log(total)


def _extreme(fold):
    def meaning(segments, x):
        best, number = segments.first(x, fold)
        return best, number

    return meaning


# Adjoints: edge cotangents of the arguments.


def _sum_adjoint(b, place, args, results, grads):
    return (grads[0],)


def _sum_tangent(b, place, args, results, tangents):
    return (b.fold_edges(place, tangents[0]),)


def _extreme_adjoint(b, place, args, results, grads):
    if grads[0] is None:
        return (None,)
    return (b.emit("where", (b.emit("eq", (b.emit("number", ()), results[1])), grads[0], 0.0)),)


def softmax_weight(b, score, lse):
    """exp(score - lse); 0 in a segment whose lse is -inf, where every score is -inf as well."""
    none = b.emit("eq", (lse, float("-inf")))
    return b.emit("exp", (score - b.emit("where", (none, float("inf"), lse)),))


def _softmax_adjoint(b, place, args, results, grads, weight=None):
    """p = exp(score - lse); d value = p grad; d score = p (<grad, value> - delta), delta = <grad, out> - grad_lse."""
    score, value = args
    out, lse = results
    grad, grad_lse = grads
    weight = softmax_weight(b, score, lse) if weight is None else weight
    inner = delta = None
    if grad is not None:
        grad = b.widen(grad, lse.type.dtype)
        inner, delta = b.fold(grad * value, out, score), b.fold(grad * out, out, score)
    if grad_lse is not None:
        delta = -grad_lse if delta is None else delta - grad_lse
    change = None if delta is None else -delta if inner is None else inner - delta
    return (None if change is None else weight * change, None if grad is None else weight * grad)


def _softmax_tangent(b, place, args, results, tangents):
    """d out = sum p dvalue + sum p dscore (value - out); d lse = sum p dscore."""
    score, value = args
    out, lse = results
    dscore, dvalue = tangents
    weight = softmax_weight(b, score, lse)
    dout = dlse = None
    if dscore is not None:
        slope = weight * dscore
        dlse = b.fold_edges(place, slope)
        dout = b.fold_edges(place, slope * value) - dlse * out
    if dvalue is not None:
        part = b.fold_edges(place, weight * dvalue)
        dout = part if dout is None else dout + part
    return dout, dlse


def _extreme_tangent(b, place, args, results, tangents):
    return b.fold_edges(
        place, b.emit("where", (b.emit("eq", (b.emit("number", ()), results[1])), tangents[0], 0.0))
    ), None


def _dot_adjoint(b, place, args, results, grads):
    """sum_e g[e] x[e]^T: each argument's cotangent is the other times the grad, one matrix product an edge."""
    g, x = args
    return (b.emit("linear", (x, grads[0])), b.emit("linear", (g, b.emit("permute", (grads[0],), ("-1", "-2")))))


def _scatter_adjoint(b, place, args, results, grads):
    return (b.emit("gather", (grads[0], args[1])), None, None)


def _dot_tangent(b, place, args, results, tangents):
    parts = [
        b.reduce(place, "dot", pair)[0]
        for pair, moved in (((tangents[0], args[1]), tangents[0]), ((args[0], tangents[1]), tangents[1]))
        if moved is not None
    ]
    return (parts[0] if len(parts) == 1 else parts[0] + parts[1],)


def _scatter_tangent(b, place, args, results, tangents):
    return (None if tangents[0] is None else b.reduce(place, "scatter", (tangents[0], args[1], args[2]))[0],)


def _kept_weight(b, args, results):
    """softmax's weight over the pairs of tiles that were not skipped."""
    weight = softmax_weight(b, args[0], results[1])
    return b.emit("where", (b.emit("kept", (results[5],), (args[3].ref, args[4].ref)), weight, 0.0))


def _pruned_adjoint(b, place, args, results, grads):
    """Softmax's over the pairs that were kept; the choice of tiles has no gradient."""
    if args[5].ref != "1":
        raise TigaError(
            "a gradient of a pruned online_softmax was asked for, and pruning skips tiles in the forward alone. Pass "
            "prune_backward=True for the exact gradient of the pruned result, or run it inside torch.no_grad()."
        )
    change = _softmax_adjoint(b, place, args[:2], results[:2], grads[:2], _kept_weight(b, args, results))
    return (*change, None, None, None, None)


def _pruned_tangent(b, place, args, results, tangents):
    raise TigaError("forward mode through a pruned online_softmax is not defined; leave pruning out, or use backward.")


PRUNED = {"softmax_by_peak": "block_prune_threshold", "softmax_by_mass": "prune_mass"}
"""Softmax that skips tiles of sources, of scores far below the running maximum, or of little mass in every row; and the
option that asks for it.

Arguments: score, value, the limit (the log of the threshold, or of the odds of the mass), the tile's destinations and
sources, 1 where a gradient may be taken.
"""
_PRUNED_KEEPS = ("value", "lse", "certificate", "visited", "skipped", "kept", "gaps")

# fmt: off
_ROWS = (
    # name, arity, keeps, rule, reference, adjoint, tangent
    ReducerRow("sum", 1, ("value",), _sum_rule, lambda segments, x: (segments.sum(x),), _sum_adjoint, _sum_tangent,
               places=("dst", "src", "shared")),
    ReducerRow("count", 0, ("value",), _count_rule, lambda segments: (segments.count(),),
               lambda b, place, args, results, grads: (), None),
    ReducerRow("max", 1, ("value", "number"), _extreme_rule, _extreme("amax"), _extreme_adjoint, _extreme_tangent),
    ReducerRow("min", 1, ("value", "number"), _extreme_rule, _extreme("amin"), _extreme_adjoint, _extreme_tangent),
    ReducerRow("softmax", 2, ("value", "lse"), _softmax_rule, _softmax, _softmax_adjoint, _softmax_tangent,
               accumulator=1, in_pieces=(1,)),
    *[ReducerRow(name, 6, _PRUNED_KEEPS, _pruned_rule, None, _pruned_adjoint, _pruned_tangent) for name in PRUNED],
    ReducerRow("dot", 2, ("value",), _dot_rule, None, _dot_adjoint, _dot_tangent, places=("shared",)),
    ReducerRow("scatter", 3, ("value",), _scatter_rule, None, _scatter_adjoint, _scatter_tangent,
               places=("shared",)),
)
# fmt: on
REDUCERS = {row.name: row for row in _ROWS}
