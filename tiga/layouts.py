"""How the reference path holds the edges of a range of destinations: as a block of pairs with a mask, or as a list.

Both answer the same questions - a node's field at its edges, folds over segments, edge numbers - so that an interpreter
of programs need not know which it runs on. Blocks make inner products and weighted sums matrix products; lists touch
nothing but edges.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga import passes

BUDGET = 1 << 24  # elements of all edge values that are alive at once
RUN = 64  # edges that are added one after another
FEW = 4096  # products that are not worth a matrix product
FAR_AWAY = 1 << 62


class Far(NamedTuple):
    """A node's field, not yet brought to the edges: (rows, *features)."""

    tensor: Tensor
    place: str


class Product(NamedTuple):
    """a * b, not yet multiplied: a fold over it may be a matrix product."""

    a: Any
    b: Any


def add_rows(out: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """out[rows] += x, in the order of x on every device."""
    if out.device.type == "cpu":
        return out.index_add_(0, rows, x)
    return out.index_put_((rows,), x, accumulate=True)


def _runs(rows: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """The run of each edge and the row of each run: sums of sums of RUN edges keep rounding from growing."""
    counts = torch.bincount(rows, minlength=count)
    if rows.shape[0] <= RUN or int(counts.max()) <= RUN:
        return None
    order = torch.argsort(rows, stable=True)
    rank = torch.empty_like(rows)
    rank[order] = torch.arange(rows.shape[0], device=rows.device) - (counts.cumsum(0) - counts)[rows[order]]
    many = (counts + RUN - 1) // RUN
    return (many.cumsum(0) - many)[rows] + rank // RUN, torch.repeat_interleave(
        torch.arange(counts.shape[0], device=rows.device), many
    )


def pieces(rows: int, width: int) -> list[tuple[int, int]]:
    """Ranges of rows, at least one, of at most a quarter of BUDGET elements each where a row has `width`."""
    step = max(1, BUDGET // max(1, 4 * width))
    return [(a, min(a + step, rows)) for a in range(0, max(1, rows), step)]


class Layout:
    """lead: how many leading dimensions stand for the edges.

    rows, cols: the range of destinations and of sources; pairs: how many it holds.
    """

    lead: int
    visit: str  # the pass that visits it
    pairs: int
    rows: tuple[int, int]

    def edge(self, x: Any) -> Tensor:
        """A field at the edges: (*lead, *features)."""
        if isinstance(x, Far):
            return self.from_src(x.tensor) if x.place == "src" else self.from_dst(x.tensor)
        if isinstance(x, Product):
            return self.edge(x.a) * self.edge(x.b)
        return x

    def from_src(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def from_dst(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Listed(Layout):
    """Edges one after another: source, destination (counted from rows[0]) and number of each."""

    lead = 1
    visit = "interpret-listed"

    def __init__(self, rows: tuple[int, int], dst: Tensor, src: Tensor, number: Tensor) -> None:
        self.rows, self.dst, self.src, self.numbers = rows, dst, src, number
        self.pairs = dst.shape[0]
        self._runs: dict[str, tuple[Tensor, Tensor] | None] = {}

    @property
    def number(self) -> Tensor:
        return self.numbers

    def from_src(self, x: Tensor) -> Tensor:
        return x[self.src]

    def from_dst(self, x: Tensor) -> Tensor:
        return x[self.dst]

    def from_edge(self, x: Tensor) -> Tensor:
        return x[self.numbers]

    def full(self, x: Tensor) -> Tensor:
        return x.expand(self.dst.shape[0], *x.shape[1:])

    def inner(self, a: Any, b: Any) -> Tensor:
        return (self.edge(a) * self.edge(b)).sum(-1)

    def sum(self, x: Any) -> Tensor:
        x = self.full(self.edge(x))
        return self._add(x.new_zeros((self.rows[1] - self.rows[0], *x.shape[1:])), "dst", x)

    def sum_to_src(self, x: Any, out: Tensor) -> None:
        self._add(out, "src", self.full(self.edge(x)))

    def _add(self, out: Tensor, end: str, x: Tensor) -> Tensor:
        """out[row] += the sum of the row's edges."""
        rows = self.dst if end == "dst" else self.src
        if end not in self._runs:
            self._runs[end] = _runs(rows, out.shape[0])
        found = self._runs[end]
        if found is not None:
            run, rows = found
            x = add_rows(x.new_zeros((rows.shape[0], *x.shape[1:])), run, x)
        return add_rows(out, rows, x)

    def flat(self, x: Any) -> Tensor:
        return self.full(self.edge(x))

    def weighted(self, weight: Tensor, x: Any) -> Tensor:
        if not isinstance(x, Far):
            return self.sum(weight * self.edge(x))
        field, at = (x.tensor, self.src) if x.place == "src" else (x.tensor, self.dst)
        total = field.new_zeros(
            (self.rows[1] - self.rows[0], *torch.broadcast_shapes(weight.shape[1:], field.shape[1:]))
        )
        weight = self.full(weight)
        for a, b in pieces(self.dst.shape[0], total[:1].numel()):
            add_rows(total, self.dst[a:b], weight[a:b] * field[at[a:b]])
        return total

    def only(self, x: Tensor) -> Tensor:
        return x

    def spread(self, y: Tensor) -> Tensor:
        return y[self.dst]

    def count(self) -> Tensor:
        return torch.bincount(self.dst, minlength=self.rows[1] - self.rows[0])

    def amax(self, x: Any) -> Tensor:
        return self._fold(self.full(self.edge(x)), "amax", -torch.inf)

    def _fold(self, x: Tensor, how: str, empty: Any) -> Tensor:
        out = x.new_full((self.rows[1] - self.rows[0], *x.shape[1:]), empty)
        at = self.dst.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
        return out.scatter_reduce_(0, at, x, how, include_self=False)

    def first(self, x: Any, how: str) -> tuple[Tensor, Tensor]:
        x = self.full(self.edge(x))
        wide = x.to(torch.int64) if x.dtype == torch.bool else x
        best = self._fold(wide, how, 0)
        hit = wide == best[self.dst]
        if x.is_floating_point():
            hit |= torch.isnan(x) & torch.isnan(best[self.dst])
        number = self.numbers.view(-1, *[1] * (x.dim() - 1)).expand_as(hit)
        found = self._fold(torch.where(hit, number, FAR_AWAY), "amin", -1)
        return best.to(x.dtype), found

    def store(self, out: Tensor, x: Any) -> None:
        out[self.numbers] = self.full(self.edge(x)).to(out.dtype)

    def listed(self) -> Listed:
        return self

    def scan(self, reverse: bool, begin: list, values: list, step: Any) -> tuple[list, list]:
        """Visit each segment's edges in order; step(states, values) -> (states, results)."""
        passes.ran("segment-scan")
        counts = self.count()
        order = torch.argsort(counts, descending=True, stable=True)
        starts = (counts.cumsum(0) - counts)[order]
        by_count = counts[order]
        states = [s[order] for s in begin]
        results: list[Tensor] = []
        for k in range(int(by_count[0]) if by_count.shape[0] else 0):
            active = int((by_count > k).sum())
            at = starts[:active] + (by_count[:active] - 1 - k if reverse else k)
            new, outs = step([s[:active] for s in states], [x[at] for x in values])
            if not results:
                results = [o.new_zeros((self.dst.shape[0], *o.shape[1:])) for o in outs]
            for held, o in zip(results, outs):  # before the states move on: a result may be an old state
                held[at] = o
            for held, s in zip(states, new):
                held[:active] = s
        back = torch.argsort(order)
        return [s[back] for s in states], results


class Blocked(Layout):
    """All pairs of a range of destinations and a range of sources; mask (rows, cols) says which are edges, None all."""

    lead = 2
    visit = "interpret-blocked"

    def __init__(self, rows: tuple[int, int], cols: tuple[int, int], mask: Tensor | None, numbers: Any) -> None:
        self.rows, self.cols, self.mask, self._numbers = rows, cols, mask, numbers
        self.pairs = (rows[1] - rows[0]) * (cols[1] - cols[0])
        self._finite: dict[int, bool] = {}

    def listed(self) -> Listed:
        """The same edges one after another."""
        mask = self.mask
        if mask is None:
            mask = torch.ones(self.number.shape, dtype=torch.bool, device=self.number.device)
        dst, src = mask.nonzero().unbind(1)
        return Listed(self.rows, dst, src + self.cols[0], self.number[mask])

    @property
    def number(self) -> Tensor:
        if not isinstance(self._numbers, Tensor):
            self._numbers = self._numbers()
        return self._numbers

    def from_src(self, x: Tensor) -> Tensor:
        return x[self.cols[0] : self.cols[1]].unsqueeze(0)

    def from_dst(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1)

    def from_edge(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_zeros((*self.number.shape, *x.shape[1:]))
        if self.mask is None:
            return x[self.number]
        return x[torch.where(self.mask & (self.number < x.shape[0]), self.number, 0)]

    def _live(self, x: Tensor) -> Tensor | None:
        return None if self.mask is None else self.mask.view(*self.mask.shape, *[1] * (x.dim() - 2))

    def only(self, x: Tensor) -> Tensor:
        live = self._live(x)
        return x if live is None else torch.where(live, x, 0)

    def full(self, x: Tensor) -> Tensor:
        return x.expand(self.rows[1] - self.rows[0], self.cols[1] - self.cols[0], *x.shape[2:])

    def inner(self, a: Any, b: Any) -> Tensor:
        """sum over the last feature of src * dst: a matrix product a head."""
        if isinstance(b, Far) and b.place == "src":
            a, b = b, a
        if not (isinstance(a, Far) and isinstance(b, Far) and a.place == "src" and b.place == "dst"):
            return (self.edge(a) * self.edge(b)).sum(-1)
        x, y = a.tensor[self.cols[0] : self.cols[1]], b.tensor
        if x.numel() * y.shape[0] <= FEW:
            return (self.edge(a) * self.edge(b)).sum(-1)
        if x.dim() != y.dim() or x.shape[-1] != y.shape[-1] or x.dtype != y.dtype or not x.is_floating_point():
            return (self.edge(a) * self.edge(b)).sum(-1)
        passes.ran("inner-products-as-matmul")
        return torch.matmul(y.movedim(0, -2), x.movedim(0, -2).transpose(-1, -2)).movedim((-2, -1), (0, 1))

    def _matrix(self, x: Any, far: str) -> Tensor | None:
        """The other end's field as (*features, cols or rows, width) where a zero weight is harmless to it."""
        if not isinstance(x, Far) or x.place != far:
            return None
        t = x.tensor[self.cols[0] : self.cols[1]] if far == "src" else x.tensor
        if self.mask is not None and t.is_floating_point() and not bool(t.isfinite().all()):
            return None
        return t

    def _contract(self, weight: Tensor, x: Any, far: str) -> Tensor | None:
        if (
            weight.dim() < 3
            or weight.shape[-1] != 1
            or weight.shape[:2] != (self.rows[1] - self.rows[0], self.cols[1] - self.cols[0])
        ):
            return None
        t = self._matrix(x, far)
        if t is None or t.dim() != weight.dim() - 1 or t.dtype != weight.dtype or not t.is_floating_point():
            return None
        w = self.only(weight).squeeze(-1).movedim((0, 1), (-2, -1))
        if far == "dst":
            w = w.transpose(-1, -2)
        passes.ran("weighted-sums-as-matmul")
        return torch.matmul(w, t.movedim(0, -2)).movedim(-2, 0)

    def _product(self, x: Any, far: str) -> Tensor | None:
        if isinstance(x, Product):
            for weight, field in ((x.a, x.b), (x.b, x.a)):
                if isinstance(weight, Tensor):
                    out = self._contract(weight, field, far)
                    if out is not None:
                        return out
        return None

    def sum(self, x: Any) -> Tensor:
        out = self._product(x, "src")
        return self.only(self.full(self.edge(x))).sum(1) if out is None else out

    def sum_to_src(self, x: Any, out: Tensor) -> None:
        part = self._product(x, "dst")
        out[self.cols[0] : self.cols[1]] += self.only(self.full(self.edge(x))).sum(0) if part is None else part

    def flat(self, x: Any) -> Tensor:
        x = self.full(self.edge(x))
        return x.flatten(0, 1) if self.mask is None else x[self.mask]

    def weighted(self, weight: Tensor, x: Any) -> Tensor:
        weight, field = self.full(weight), self.edge(x)
        out = self._contract(weight, x, "src")
        if out is not None:
            return out
        parts = []
        for a, b in pieces(weight.shape[0], math.prod(torch.broadcast_shapes(weight.shape[1:], field.shape[1:]))):
            product = weight[a:b] * (field if field.shape[0] == 1 else field[a:b])
            live = self._live(product)
            parts.append((product if live is None else torch.where(live[a:b], product, 0)).sum(1))
        return torch.cat(parts)

    def spread(self, y: Tensor) -> Tensor:
        return y.unsqueeze(1)

    def count(self) -> Tensor:
        if self.mask is not None:
            return self.mask.sum(1)
        return torch.full((self.rows[1] - self.rows[0],), self.cols[1] - self.cols[0], device=self.number.device)

    def amax(self, x: Any) -> Tensor:
        return self._fold(self.full(self.edge(x)), "amax", -torch.inf)

    def _fold(self, x: Tensor, how: str, empty: Any) -> Tensor:
        if x.shape[1] == 0:
            return x.new_full((x.shape[0], *x.shape[2:]), empty)
        live = self._live(x)
        return getattr(x if live is None else torch.where(live, x, empty), how)(1)

    def first(self, x: Any, how: str) -> tuple[Tensor, Tensor]:
        x = self.full(self.edge(x))
        wide = x.to(torch.int64) if x.dtype == torch.bool else x
        low = (
            (-torch.inf if how == "amax" else torch.inf)
            if wide.is_floating_point()
            else getattr(torch.iinfo(wide.dtype), "min" if how == "amax" else "max")
        )
        best = self._fold(wide, how, low)
        hit = wide == best.unsqueeze(1)
        if x.is_floating_point():
            hit |= torch.isnan(x) & torch.isnan(best.unsqueeze(1))
        live = self._live(x)
        hit = hit if live is None else hit & live
        number = self.number.view(*self.number.shape, *[1] * (x.dim() - 2))
        found = self._fold(torch.where(hit, number, FAR_AWAY), "amin", FAR_AWAY)
        none = found == FAR_AWAY
        return torch.where(none, 0, best).to(x.dtype), torch.where(none, -1, found)

    def store(self, out: Tensor, x: Any) -> None:
        at = self.number.flatten() if self.mask is None else self.number[self.mask]
        out[at] = self.flat(x).to(out.dtype)
