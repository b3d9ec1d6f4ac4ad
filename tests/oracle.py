"""What message passing means, in plain torch: gather along explicit edges, the user's edge function on ordinary
tensors, one destination after another.

Nothing here knows of programs. Every tensor has one row an edge, then one more row a destination, in which only
destination fields, uniform arguments and what a reducer gave are meaningful: results are read there. So work after a
reducer, and second passes over the edges, need no rule of their own.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

import tiga as tg


class Edges:
    """The edges src[e] -> dst[e], in the order of their numbers."""

    def __init__(self, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> None:
        self.src, self.dst, self.num_src, self.num_dst = src.long(), dst.long(), num_src, num_dst
        self.rows = torch.cat([self.dst, torch.arange(num_dst)])
        self.of = [(self.dst == i).nonzero().flatten() for i in range(num_dst)]

    @property
    def num_edges(self) -> int:
        return len(self.src)

    def padded(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_ones(self.num_dst, *x.shape[1:])])

    def fold(self, fold, *values: Tensor) -> Tensor:
        """Each destination's edges folded; every row is given its destination's result."""
        results = [fold(*[x[e] for x in values]) for e in self.of]
        return (torch.stack(results) if results else fold(*[x[:0] for x in values])[None][:0])[self.rows]

    def at_dst(self, x: Tensor) -> Tensor:
        """Destination fields at all rows.

        On a destination's own row an edge value is computed too, of nothing: its gradient, 0 or 0 * inf, is dropped.
        """
        own = x.clone()
        if own.requires_grad:
            own.register_hook(torch.nan_to_num)
        return torch.cat([x.index_select(0, self.dst), own])


def total(x: Tensor) -> Tensor:
    """Added edge after edge, as scatter does; 16-bit sums are left to torch, which accumulates them in float32."""
    if torch.finfo(x.dtype).bits < 32:
        return x.sum(0)
    return x.new_zeros(1, *x.shape[1:]).index_add(0, torch.zeros(len(x), dtype=torch.long), x)[0]


def average(x: Tensor) -> Tensor:
    return total(x) / max(1, len(x))


def largest(x: Tensor) -> Tensor:
    """The first of the largest, so that it alone gets the gradient; 0 of none."""
    if len(x) == 0:
        return x.sum(0)
    number = torch.arange(len(x)).reshape(-1, *[1] * (x.dim() - 1))
    first = torch.where(x == x.amax(0), number, len(x)).amin(0, keepdim=True)
    return x.gather(0, first)[0]


def smallest(x: Tensor) -> Tensor:
    return -largest(-x)


def softmax(score: Tensor, value: Tensor) -> Tensor:
    score = score.reshape(*score.shape, *[1] * (value.dim() - score.dim()))
    if len(score) == 0:
        return total(score * value).to(value.dtype)
    peak = score.detach().amax(0)
    none = peak == -torch.inf
    weight = (score - torch.where(none, 0.0, peak)).exp()
    return (total(weight * value) / torch.where(none, 1.0, total(weight))).to(value.dtype)


def lse(score: Tensor) -> Tensor:
    return score.logsumexp(0)


FOLDS = {"Sum": total, "Mean": average, "Max": largest, "Min": smallest}


class Reducer:
    """A tiga reducer's meaning on explicit edges."""

    def __init__(self, edges: Edges, reducer: tg.Reducer) -> None:
        self.edges, self.reducer = edges, reducer

    def __call__(self, *values):
        e = self.edges
        values = [x if isinstance(x, Tensor) else torch.full((len(e.rows),), float(x)) for x in values]
        if hasattr(self.reducer, "combine"):
            return self.monoid(values)
        if not isinstance(self.reducer, tg.OnlineSoftmaxReducer):
            return e.fold(FOLDS[type(self.reducer).__name__], *values)
        out = e.fold(softmax, *values)
        return (out, e.fold(lse, values[0])) if self.reducer.return_lse else out

    def monoid(self, values):
        """combine(... combine(combine(identity, first), second) ..., last), in the order of the edges' numbers."""
        r = self.reducer
        lifted = r.lift(*values)

        def states(*edges: Tensor) -> tuple:
            found = tuple(torch.full_like(x.sum(0), i) for x, i in zip(edges, r.identity))
            for e in range(len(edges[0])):
                found = r.combine(found, tuple(x[e] for x in edges))
            return found

        return r.finalize(
            tuple(self.edges.fold(lambda *edges, k=k: states(*edges)[k], *lifted) for k in range(len(r.identity)))
        )


class Module:
    """The user's module as its edge function sees it, with reducers that fold explicit edges."""

    def __init__(self, module: tg.MessagePassing, edges: Edges) -> None:
        self.module, self.edges = module, edges

    def __getattr__(self, name: str):
        found = getattr(self.module, name)
        return Reducer(self.edges, found) if isinstance(found, tg.Reducer) else found


def message_passing(
    module: tg.MessagePassing,
    edges: Edges,
    places: tuple,
    src: dict,
    dst: dict,
    edge: dict,
    uniform: dict,
    positions=None,
) -> list:
    """The outputs of the module's edge function, as a list; places: whether each belongs to destinations or edges."""
    number = torch.arange(edges.num_edges)
    at_edge = {"number": edges.padded(number), **{name: edges.padded(x) for name, x in edge.items()}}
    if positions is not None:
        difference = edges.padded(positions[edges.src] - positions[edges.dst])
        at_edge.update(displacement=difference, distance=difference.square().sum(-1).sqrt())
    out = type(module).edge(
        Module(module, edges),
        SimpleNamespace(**{name: edges.padded(x.index_select(0, edges.src)) for name, x in src.items()}),
        SimpleNamespace(**{name: edges.at_dst(x) for name, x in dst.items()}),
        SimpleNamespace(**at_edge),
        **uniform,
    )
    return [x[edges.num_edges :] if place == "dst" else x[: edges.num_edges] for x, place in zip(flat(out), places)]


def flat(out) -> list:
    """A tensor, or a tuple or dictionary of them (nested), as a list."""
    if isinstance(out, Tensor):
        return [out]
    return [x for part in (out.values() if isinstance(out, dict) else out) for x in flat(part)]
