"""Cutting a relation into ranges of destinations, each held as a block of pairs or as a list of edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tiga import layouts as held
from tiga.layouts import FAR_AWAY, Blocked, Listed
from tiga.preparation import directions
from tiga.relations import edge_offsets, is_implicit, row_intervals


def layouts(kind: str, ints: tuple, tensors: tuple, reverse: bool, device: Any, width: int) -> Iterator[Any]:
    """Ranges of destinations that together hold each edge once. width: elements of edge values a pair needs."""
    if not is_implicit(kind):
        yield from _listed_csr(ints, tensors, device, width)
    elif reverse:
        yield from _reversed(kind, ints, tensors, device, width)
    else:
        yield from _implicit(kind, ints, tensors, device, width)


def _cuts(offsets: Tensor, width: int) -> list[int]:
    """Row boundaries with about BUDGET / width edges between them; a heavier row stands alone."""
    rows, edges = offsets.shape[0] - 1, int(offsets[-1])
    most = max(1, held.BUDGET // max(1, width))
    if edges <= most:
        return [0, rows]
    marks = torch.arange(most, edges, most, device=offsets.device)
    cut = torch.searchsorted(offsets, marks, right=True) - 1
    both = torch.cat([cut, cut + 1]).clamp(0, rows)
    return torch.unique(torch.cat([both, both.new_tensor([0, rows])])).tolist()


def _listed_csr(ints: tuple, tensors: tuple, device: Any, width: int) -> Iterator[Listed]:
    num_dst, num_src = ints[0], ints[1]
    edges, numbers = tensors[1].shape[0], directions(tensors)[0].number
    # rows that were never checked may be anything: they are made to increase and to stay inside col
    rowptr = tensors[0].to(torch.int64).clamp(0, edges).cummax(0).values if num_dst else tensors[0].to(torch.int64)
    cuts = _cuts(rowptr, width)
    starts = rowptr[torch.tensor(cuts, device=device)].tolist()
    for a, b, first, last in zip(cuts, cuts[1:], starts, starts[1:]):
        counts = rowptr[a + 1 : b + 1] - rowptr[a:b]
        dst = torch.repeat_interleave(torch.arange(b - a, device=device), counts, output_size=last - first)
        src = tensors[1][first:last].to(torch.int64)
        number = torch.arange(first, last, device=device) if numbers is None else numbers[first:last].to(torch.int64)
        good = (src >= 0) & (src < num_src) & (number >= 0) & (number < edges)
        if not bool(good.all()):
            dst, src, number = dst[good], src[good], number[good]
        yield Listed((a, b), dst, src, number)


def _spans(kind: str, ints: tuple, tensors: tuple, device: Any) -> tuple:
    return row_intervals(kind, ints, tensors, 0, ints[0], device)


def _implicit(kind: str, ints: tuple, tensors: tuple, device: Any, width: int) -> Iterator[Any]:
    num_dst = ints[0]
    spans = _spans(kind, ints, tensors, device)
    first = edge_offsets(kind, ints, tensors, device)
    step, ranges = _block_rows(num_dst, spans, width)
    if step == 0:
        yield from _listed_implicit(spans, first, device, width)
        return
    for a, (lo, hi, whole) in zip(range(0, num_dst, step), ranges):
        b = min(a + step, num_dst)
        cut = tuple([(s[a:b], e[a:b]) for s, e in spans])
        j = torch.arange(lo, hi, device=device)
        mask = None if whole else _inside(j, cut)
        yield Blocked((a, b), (lo, hi), mask, _Numbers(j, cut, first[a:b]))


def _block_rows(num_dst: int, spans: tuple, width: int) -> tuple[int, list]:
    """Rows a block, each block's (first source, last source, no mask); 0 rows: far more pairs than edges."""
    if num_dst == 0:
        return 1, []
    edges = int(sum((e - s).sum() for s, e in spans))
    for step in (2048, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        if step >= 2 * num_dst and step > 1:
            continue
        ranges = _ranges(num_dst, spans, step)
        pairs = step * sum(hi - lo for lo, hi, _ in ranges)
        most = step * max([hi - lo for lo, hi, _ in ranges], default=0)
        if most * width <= held.BUDGET and (pairs <= 4 * edges + 4096):
            return step, ranges
    return (0, []) if pairs > 8 * edges else (step, ranges)


def _ranges(num_dst: int, spans: tuple, step: int) -> list:
    count = -(-num_dst // step)
    low, high, inner_low, inner_high = [], [], [], []
    for s, e in spans:
        empty = s >= e
        low.append(_chunked(torch.where(empty, FAR_AWAY, s), step, count, FAR_AWAY).amin(1))
        high.append(_chunked(torch.where(empty, -1, e), step, count, -1).amax(1))
        inner_low.append(_chunked(s, step, count, -1).amax(1))
        inner_high.append(_chunked(torch.where(empty, -1, e), step, count, FAR_AWAY).amin(1))
    lo, hi = torch.stack(low).amin(0), torch.stack(high).amax(0)
    whole = (inner_low[0] == lo) & (inner_high[0] == hi) if len(spans) == 1 else torch.zeros_like(lo, dtype=torch.bool)
    none = hi < 0
    return list(zip(torch.where(none, 0, lo).tolist(), torch.where(none, 0, hi).tolist(), whole.tolist()))


def _chunked(x: Tensor, step: int, count: int, fill: int) -> Tensor:
    pad = count * step - x.shape[0]
    return (torch.cat([x, x.new_full((pad,), fill)]) if pad else x).view(count, step)


def _inside(j: Tensor, spans: tuple) -> Tensor:
    mask = None
    for s, e in spans:
        m = (j >= s[:, None]) & (j < e[:, None])
        mask = m if mask is None else mask | m
    assert mask is not None
    return mask


class _Numbers:
    """Edge numbers of a block, made when asked for: first[i] + rank of j among the sources of i."""

    def __init__(self, j: Tensor, spans: tuple, first: Tensor) -> None:
        self.j, self.spans, self.first = j, spans, first

    def __call__(self) -> Tensor:
        (s, e), rest = self.spans[0], self.spans[1:]
        rank = self.j - s[:, None]
        for s2, _ in rest:
            rank = torch.where(self.j >= s2[:, None], self.j - s2[:, None] + (e - s)[:, None], rank)
        return self.first[:, None] + rank


def _listed_implicit(spans: tuple, first: Tensor, device: Any, width: int) -> Iterator[Listed]:
    cuts = _cuts(first, width)
    starts = first[torch.tensor(cuts, device=device)].tolist()
    for a, b, begin, end in zip(cuts, cuts[1:], starts, starts[1:]):
        counts = first[a + 1 : b + 1] - first[a:b]
        dst = torch.repeat_interleave(torch.arange(b - a, device=device), counts, output_size=end - begin)
        number = torch.arange(begin, end, device=device)
        rank = number - first[a:b][dst]
        src = spans[0][0][a:b][dst] + rank
        for s, _ in spans[1:]:
            before = (spans[0][1] - spans[0][0])[a:b][dst]
            src = torch.where(rank >= before, s[a:b][dst] + rank - before, src)
        yield Listed((a, b), dst, src, number)


def _reversed(kind: str, ints: tuple, tensors: tuple, device: Any, width: int) -> Iterator[Blocked]:
    """Destinations are the base's sources: a block holds all base rows that reach into the range."""
    base_rows, base_cols = ints[0], ints[1]
    spans = _spans(kind, ints, tensors, device)
    first = edge_offsets(kind, ints, tensors, device)
    step = int(max(1, min(base_cols, 512, held.BUDGET // max(1, width * max(1, base_rows)))))
    for a in range(0, base_cols, step):
        b = min(a + step, base_cols)
        reach = torch.stack([(s < b) & (e > a) & (e > s) for s, e in spans]).any(0).nonzero()
        lo, hi = (int(reach[0]), int(reach[-1]) + 1) if reach.shape[0] else (0, 0)
        cut = tuple([(s[lo:hi], e[lo:hi]) for s, e in spans])
        j = torch.arange(a, b, device=device)
        numbers = _Numbers(j, cut, first[lo:hi])
        yield Blocked((a, b), (lo, hi), _inside(j, cut).t(), lambda numbers=numbers: numbers().t())
