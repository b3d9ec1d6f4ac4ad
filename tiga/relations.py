"""Which sources j reach destination i, one row of a table a kind: pure functions of integers and tensors.

Everything a relation needs is derived from two facts: the source intervals of a range of destinations (at most two a
row) and the number of edges. A "band" low <= j - i <= high describes dense, triangular and window alike, and one block
of `blocks`; only its two numbers differ. No function reads a value from a tensor, except `num_edges` where the number
was never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga.errors import TigaError

UNBOUNDED = 2**62
"""Half-width of a band without a limit: far beyond any size, and i + UNBOUNDED still fits int64."""

Ints = tuple[Any, ...]
Tensors = tuple[Tensor, ...]
Interval = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Relation:
    """One kind: its payload, the band of (i, j) it stands for if it is one, and what explain says of it."""

    kind: str
    int_names: tuple[str, ...]
    tensor_names: tuple[tuple[str, ...], ...]
    band: Callable[[Ints], tuple[Any, Any]] | None
    formula: str
    rows: Callable[..., tuple[Interval, ...]] | None
    num_edges: Callable[[Ints, Tensors], Any]

    @property
    def is_implicit(self) -> bool:
        return self.rows is not None

    @property
    def tensor_counts(self) -> tuple[int, ...]:
        return tuple(len(names) for names in self.tensor_names)


def row_intervals(kind: str, ints: Ints, tensors: Tensors, first: Any, last: Any, device: Any) -> tuple[Interval, ...]:
    """Sources of the base destinations first <= i < last, as one or two pairs (start, stop), each int64 [last - first].

    0 <= start <= stop <= num_src whatever the tensors hold; a second interval lies after the first, so that the rank of
    an edge within its row follows the source. Raises for csr, whose sources are listed.
    """
    rows = RELATIONS[kind].rows
    if rows is None:
        raise TigaError(f"row_intervals of a {kind} graph: its sources are listed in col[rowptr[i]:rowptr[i + 1]].")
    return rows(kind, ints, tensors, torch.arange(first, last, device=device, dtype=torch.int64))


def edge_offsets(kind: str, ints: Ints, tensors: Tensors, device: Any) -> Tensor:
    """offsets[i] = number of edges of the base destinations before i: int64 [num_dst + 1], in the order of numbers.

    For csr it is rowptr: positions in col, which differ from the user's numbers where the edges were given unsorted.
    """
    num_dst, num_src = ints[0], ints[1]
    if kind == "csr":
        return tensors[0].to(device=device, dtype=torch.int64)
    i = torch.arange(num_dst + 1, device=device, dtype=torch.int64)
    if kind == "dense":
        return i * num_src
    if kind == "triangular" and is_square_triangle(ints):
        return i * (i + 1) // 2
    counts = _row_counts(kind, ints, tensors, device)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def num_edges(kind: str, ints: Ints, tensors: Tensors) -> Any:
    """Number of edges: arithmetic on the sizes, the stored number, or, where none is stored, one read."""
    return RELATIONS[kind].num_edges(ints, tensors)


def is_implicit(kind: str) -> bool:
    """Whether the edges are a formula (numbered by destination, then source) and not a list."""
    return RELATIONS[kind].is_implicit


def is_square_triangle(ints: Ints) -> bool:
    """Whether row i of a triangular relation has exactly i + 1 sources, so that numbers are i (i + 1) / 2 + j."""
    return bool(ints[2] == 0 and ints[0] == ints[1])


def edges_below(num_dst: Any, num_src: Any, offset: Any) -> Any:
    """Number of pairs with j <= i + offset: S(num_dst + offset) - S(offset), S(t) = sum of clip(v, 0, num_src), v <= t.

    Arithmetic on ints or SymInts, without a branch, so that no size is specialised.
    """
    return _clipped_sum(num_dst + offset, num_src) - _clipped_sum(offset, num_src)


def band_counts(num_dst: Tensor, num_src: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Number of pairs low <= j - i <= high of many blocks at once, each int64 [blocks]."""
    low, high = (torch.minimum(torch.maximum(x, -num_dst - 1), num_src) for x in (low - 1, high))

    def below(offset: Tensor) -> Tensor:
        top, bottom = num_dst + offset, offset
        return _clipped_sum_of(top, num_src) - _clipped_sum_of(bottom, num_src)

    return (below(high) - below(low)).clamp_min(0)


def _clipped_sum(t: Any, most: Any) -> Any:
    inside = largest(0, least(t, most))
    return inside * (inside + 1) // 2 + largest(t - most, 0) * most


def largest(a: Any, b: Any) -> Any:
    # Dynamo turns the builtin into sym_max, which before torch 2.12 it does not trace by name
    return max(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_max(a, b)


def least(a: Any, b: Any) -> Any:
    return min(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_min(a, b)


def _clipped_sum_of(t: Tensor, most: Tensor) -> Tensor:
    inside = torch.minimum(t, most).clamp_min(0)
    return inside * (inside + 1) // 2 + (t - most).clamp_min(0) * most


def _row_counts(kind: str, ints: Ints, tensors: Tensors, device: Any) -> Tensor:
    total = None
    for start, stop in row_intervals(kind, ints, tensors, 0, ints[0], device):
        total = stop - start if total is None else total + (stop - start)
    assert total is not None
    return total


def _band_rows(kind: str, ints: Ints, tensors: Tensors, i: Tensor) -> tuple[Interval, ...]:
    band = RELATIONS[kind].band
    assert band is not None
    low, high = band(ints)
    num_src = ints[1]
    start = (i + low).clamp(0, num_src)
    return ((start, torch.maximum((i + high + 1).clamp(0, num_src), start)),)


def _block_rows(kind: str, ints: Ints, tensors: Tensors, i: Tensor) -> tuple[Interval, ...]:
    num_src = ints[1]
    dst, src, low, high = (t.to(device=i.device, dtype=torch.int64) for t in tensors)
    blocks = low.shape[0]
    if blocks == 0:
        return ((torch.zeros_like(i), torch.zeros_like(i)),)
    found = torch.searchsorted(dst, i, right=True) - 1
    block = found.clamp(0, blocks - 1)
    # Boundaries that were never read may be anything: a row outside its block has no edges, all results stay in range.
    inside = (found == block) & (i < dst[block + 1])
    shift = src[block] + i - dst[block]
    first, past = src[block].clamp(0, num_src), src[block + 1].clamp(0, num_src)
    start = torch.minimum(torch.maximum(shift + low[block], first), past)
    stop = torch.minimum(torch.maximum(shift + high[block] + 1, first), past)
    stop = torch.where(inside, torch.maximum(start, stop), start)
    return ((start, stop),)


def _interval_rows(kind: str, ints: Ints, tensors: Tensors, i: Tensor) -> tuple[Interval, ...]:
    num_src = ints[1]
    parts = [t.to(i.device)[i].to(torch.int64).clamp(0, num_src) for t in tensors]
    start, stop = parts[0], torch.maximum(parts[0], parts[1])
    if len(parts) == 2:
        return ((start, stop),)
    start2, stop2 = parts[2], torch.maximum(parts[2], parts[3])
    swap = start2 < start
    (start, start2), (stop, stop2) = _swapped(swap, start, start2), _swapped(swap, stop, stop2)
    # Only intervals that were never checked can overlap; a pair then still counts once.
    start2 = torch.maximum(start2, stop)
    return ((start, stop), (start2, torch.maximum(start2, stop2)))


def _swapped(swap: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(swap, b, a), torch.where(swap, a, b)


def _stored_edges(kind: str) -> Callable[[Ints, Tensors], Any]:
    def stored(ints: Ints, tensors: Tensors) -> Any:
        if ints[2] >= 0:
            return ints[2]
        return int(_row_counts(kind, ints, tensors, tensors[0].device).sum())

    return stored


def _window_edges(ints: Ints, tensors: Tensors) -> Any:
    num_dst, num_src, left, right, offset = ints
    return edges_below(num_dst, num_src, offset + right) - edges_below(num_dst, num_src, offset - left - 1)


_LISTED = (("rowptr", "col"), ("rowptr", "col", "number"))
_WORK = ("items", "merges")
_MADE = ((), _WORK, (*_WORK, "back_rowptr", "back_col", "back_number", "back_items", "back_merges"))

RELATIONS = {
    row.kind: row
    for row in (
        Relation(
            "dense",
            ("num_dst", "num_src"),
            ((),),
            lambda ints: (-UNBOUNDED, UNBOUNDED),
            "every pair",
            _band_rows,
            lambda ints, tensors: ints[0] * ints[1],
        ),
        Relation(
            "triangular",
            ("num_dst", "num_src", "offset"),
            ((),),
            lambda ints: (-UNBOUNDED, ints[2]),
            "j <= i + offset",
            _band_rows,
            lambda ints, tensors: edges_below(ints[0], ints[1], ints[2]),
        ),
        Relation(
            "window",
            ("num_dst", "num_src", "left", "right", "offset"),
            ((),),
            lambda ints: (ints[4] - ints[2], ints[4] + ints[3]),
            "i + offset - left <= j <= i + offset + right",
            _band_rows,
            _window_edges,
        ),
        Relation(
            "blocks",
            ("num_dst", "num_src", "num_edges"),
            (("dst_boundaries", "src_boundaries", "low", "high"),),
            None,
            "block diagonal, low[b] <= (j - src_boundaries[b]) - (i - dst_boundaries[b]) <= high[b]",
            _block_rows,
            _stored_edges("blocks"),
        ),
        Relation(
            "intervals",
            ("num_dst", "num_src", "num_edges"),
            (("start", "stop"), ("start", "stop", "start2", "stop2")),
            None,
            "start[i] <= j < stop[i], or in the second interval",
            _interval_rows,
            _stored_edges("intervals"),
        ),
        Relation(
            "csr",
            ("num_dst", "num_src"),
            tuple([(*listed, *made) for made in _MADE for listed in _LISTED]),
            None,
            "col[rowptr[i]:rowptr[i + 1]]",
            None,
            lambda ints, tensors: tensors[1].shape[0],
        ),
    )
}

RUNS_ON = {
    "implicit": "CUDA: kernels over tiles; CPU: C++ where the work is large, else torch operations, by ranges of rows",
    "listed": "CUDA: kernels over rows; CPU: C++ where the work is large, else torch operations, edge by edge",
}
"""What runs a relation, for explain(); a program that these do not fit runs in torch operations."""
