"""Listed relations: from edge lists and boundaries to CSR, its transpose, its work list, and sets of pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiga import graph_algebra, graph_build
from tiga.errors import TigaError
from tiga.graph import Graph
from tiga.graph_checks import integers, one_device
from tiga.graph_checks import number as number_of
from tiga.ops.friendly import declare

Csr = tuple[Tensor, Tensor]
Numbered = tuple[Tensor, Tensor, Tensor]


def _integers(asked: str, rank: int = 1, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and integers(t, name, asked, rank) is not t:
            raise TypeError(f"{asked}: {name} is {t.dtype}, but must be int32 or int64. Write {name}.to(torch.int64).")
    one_device(asked, **tensors)


def _csr_entries(asked: str, rowptr: Tensor, col: Tensor, number: Tensor | None = None) -> None:
    _integers(asked, rowptr=rowptr, col=col, number=number)
    if rowptr.shape[0] == 0:
        raise TigaError(f"{asked}: rowptr is empty. No destinations are written as [0].")
    if number is not None and number.shape[0] != col.shape[0]:
        raise TigaError(
            f"{asked}: number has {number_of(number.shape[0])} entries, col {number_of(col.shape[0])}. "
            "Each edge has one of both."
        )


def _edge_list(edge_index: Tensor, num_dst: Any) -> None:
    asked = "tiga::coo_to_csr"
    _integers(asked, rank=2, edge_index=edge_index)
    if edge_index.shape[0] != 2:
        raise TigaError(
            f"{asked}: edge_index has {number_of(edge_index.shape[0])} rows, but must have 2: sources, then "
            "destinations. Write edge_index.T if they are columns."
        )


def _coo_to_csr_fake(edge_index: Tensor, num_dst: Any) -> Numbered:
    _edge_list(edge_index, num_dst)
    edges = edge_index.shape[1]
    return (
        edge_index.new_empty(num_dst + 1, dtype=torch.int64),
        edge_index.new_empty(edges),
        edge_index.new_empty(edges, dtype=torch.int64),
    )


@declare(
    "coo_to_csr(Tensor edge_index, SymInt num_dst) -> (Tensor rowptr, Tensor col, Tensor number)", _coo_to_csr_fake
)
def coo_to_csr(edge_index: Tensor, num_dst: int) -> Numbered:
    """number[rowptr[i]:rowptr[i + 1]] = {e: edge_index[1, e] = i}, ascending; col = edge_index[0, number].

    edge_index (2, num_edges), row 0 sources, row 1 destinations, int32 or int64. Result rowptr [num_dst + 1] and
    number [num_edges], int64, and col [num_edges] in the dtype given. The order of equal destinations is kept (a
    stable sort): deterministic. Values are not checked: an edge whose destination is none of num_dst stands outside
    all rows, with col -1. Repeated pairs stay separate edges.

    >>> import tiga, torch
    >>> [t.tolist() for t in torch.ops.tiga.coo_to_csr(torch.tensor([[0, 1, 2], [1, 0, 1]]), 2)]
    [[0, 1, 3], [1, 0, 2], [1, 0, 2]]
    """
    _edge_list(edge_index, num_dst)
    src, dst = edge_index[0], edge_index[1]
    # an edge whose destination does not exist belongs to no row: its source must not be taken for another row's
    src = torch.where((dst >= 0) & (dst < num_dst), src, -1)
    _, _, (rowptr, col, number) = graph_algebra.csr_of(dst, src, None, num_dst, 0, ordered=False)
    return rowptr, col, number


def _csr_transpose_fake(rowptr: Tensor, col: Tensor, number: Tensor | None, num_src: Any) -> Numbered:
    _csr_entries("tiga::csr_transpose", rowptr, col, number)
    edges = col.shape[0]
    numbers = col.new_empty(edges, dtype=torch.int64 if number is None else number.dtype)
    return rowptr.new_empty(num_src + 1, dtype=torch.int64), col.new_empty(edges), numbers


@declare(
    "csr_transpose(Tensor rowptr, Tensor col, Tensor? number, SymInt num_src) "
    "-> (Tensor rowptr, Tensor col, Tensor number)",
    _csr_transpose_fake,
)
def csr_transpose(rowptr: Tensor, col: Tensor, number: Tensor | None, num_src: int) -> Numbered:
    """{(j, i): (i, j) in the relation}: CSR by source; every edge keeps its number.

    rowptr [num_dst + 1], col [num_edges], number [num_edges], or None: the edge in entry e has number e. Result
    rowptr [num_src + 1], int64; col, whose entries are destinations, in col's dtype; number in number's (int64 for
    None). Within a source edges keep their order (a stable sort): deterministic. Values are not checked: entries that
    name no row or no source stand outside all rows, with col -1.

    >>> import tiga, torch
    >>> [t.tolist() for t in torch.ops.tiga.csr_transpose(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0]), None, 2)]
    [[0, 2, 3], [0, 1, 0], [0, 2, 1]]
    """
    _csr_entries("tiga::csr_transpose", rowptr, col, number)
    tensors = (rowptr, col) if number is None else (rowptr, col, number)
    _, _, (by_source, dst, numbers) = graph_algebra.transposed(Graph("csr", (rowptr.shape[0] - 1, num_src), tensors))
    return by_source, dst, numbers


def _work_sizes(rowptr: Tensor, num_edges: Any, split: Any) -> tuple[Any, Any]:
    """Items and merges at most. A row of d > 0 edges has 1 + (d - 1) // split items, an empty one has one."""
    asked = "tiga::work_list"
    _integers(asked, rowptr=rowptr)
    if rowptr.shape[0] == 0 or split < 1:
        raise TigaError(
            f"{asked}: rowptr has {number_of(rowptr.shape[0])} entries, split is {number_of(split)}. "
            "Both are at least 1."
        )
    return rowptr.shape[0] - 1 + num_edges // split, num_edges // (split + 1)


def _work_list_fake(rowptr: Tensor, num_edges: Any, split: Any) -> Csr:
    items, merges = _work_sizes(rowptr, num_edges, split)
    return rowptr.new_empty(items, 4), rowptr.new_empty(merges, 3)


@declare("work_list(Tensor rowptr, SymInt num_edges, SymInt split) -> (Tensor items, Tensor merges)", _work_list_fake)
def work_list(rowptr: Tensor, num_edges: int, split: int) -> Csr:
    """items = {(row, start, end, slot)}: every row, cut evenly into pieces of at most `split` edges, longest first.

    rowptr [num_dst + 1] of num_edges edges. items [num_dst + num_edges // split, 4]: slot -1 means the whole row, the
    empty too; the pieces of a cut row have consecutive slots, from 0, fewer than 2 num_edges / split in all, and
    merges [num_edges // (split + 1), 3] holds (row, first slot, slot after the last) of each cut row, ascending. Both
    are padded with row -1, in rowptr's dtype. The sizes follow from the arguments, no value is read: nothing waits
    for the device. Deterministic. Entries of rowptr outside 0..num_edges, or decreasing, are taken to the nearest
    that are not.

    >>> import tiga, torch
    >>> items, merges = torch.ops.tiga.work_list(torch.tensor([0, 1, 6]), 6, 3)
    >>> items.tolist(), merges.tolist()
    ([[1, 1, 4, 0], [1, 4, 6, 1], [0, 0, 1, -1], [-1, 6, 6, -1]], [[1, 0, 2]])
    """
    num_items, num_merges = _work_sizes(rowptr, num_edges, split)
    rows, device = rowptr.shape[0] - 1, rowptr.device
    bounds = rowptr.to(torch.int64).clamp(0, num_edges).cummax(0).values
    if split > num_edges:  # no row is cut
        lengths, row = bounds.diff().sort(descending=True, stable=True)
        start = bounds[row]
        items = torch.stack([row, start, start + lengths, torch.full_like(row, -1)], 1)
        return items.to(rowptr.dtype), rowptr.new_empty(0, 3)
    pieces = ((bounds.diff() + split - 1) // split).clamp_min(1)
    cut = pieces > 1
    before, slots_before = _totals(pieces), _totals(torch.where(cut, pieces, 0))
    # row `rows`, one past the last, stands for padding: it starts where it ends
    at = torch.arange(num_items, device=device)
    row = torch.searchsorted(before[1:], at, right=True)
    after = (row + 1).clamp_max(rows)
    count = (before[after] - before[row]).clamp_min(1)
    piece = at - before[row]
    length = (bounds[after] - bounds[row] + count - 1) // count
    start = torch.minimum(bounds[row] + piece * length, bounds[after])
    end = torch.minimum(start + length, bounds[after])
    slot = torch.where(count > 1, slots_before[row] + piece, -1)
    items = torch.stack([torch.where(row < rows, row, -1), start, end, slot], 1)
    # padding is as short as an empty row, and stays behind it: the sort is stable
    items = items[(end - start).sort(descending=True, stable=True).indices]
    row = torch.searchsorted(_totals(cut.to(torch.int64))[1:], torch.arange(1, num_merges + 1, device=device))
    after = (row + 1).clamp_max(rows)
    merges = torch.stack([torch.where(row < rows, row, -1), slots_before[row], slots_before[after]], 1)
    return items.to(rowptr.dtype), merges.to(rowptr.dtype)


def _totals(counts: Tensor) -> Tensor:
    """Running totals, from 0."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _cu_seqlens_fake(boundaries: Tensor, causal: bool = True, num_dst: Any = None) -> Csr:
    _integers("tiga::cu_seqlens_to_csr", boundaries=boundaries)
    size = torch.library.get_ctx().new_dynamic_size
    entries = size(min=1) if num_dst is None else num_dst + 1
    return boundaries.new_empty(entries, dtype=torch.int64), boundaries.new_empty(size(), dtype=torch.int64)


@declare(
    "cu_seqlens_to_csr(Tensor boundaries, bool causal=True, SymInt? num_dst=None) -> (Tensor rowptr, Tensor col)",
    _cu_seqlens_fake,
)
def cu_seqlens_to_csr(boundaries: Tensor, causal: bool = True, num_dst: int | None = None) -> Csr:
    """{(i, j) of one segment: j <= i if causal}, as CSR by destination, ordered by (i, j).

    boundaries [segments + 1] integers, running totals of the lengths from 0. num_dst, which is num_src too, defaults
    to the last; rows after it have no edges. Result rowptr [num_dst + 1] and col [num_edges], int64; their size is
    found at run time. Deterministic. Raises TigaError for boundaries that do not start at 0, or decrease.
    Graph.cu_seqlens is the same relation without the list.

    >>> import tiga, torch
    >>> [t.tolist() for t in torch.ops.tiga.cu_seqlens_to_csr(torch.tensor([0, 1, 3]))]
    [[0, 1, 2, 4], [0, 1, 1, 2]]
    """
    _integers("tiga::cu_seqlens_to_csr", boundaries=boundaries)
    rowptr, col = Graph(*graph_build.cu_seqlens(boundaries, causal, None, None, num_dst, None)).to_csr().tensors
    return rowptr, col


def _two_relations(asked: str, rowptr: Tensor, col: Tensor, rowptr2: Tensor, col2: Tensor) -> None:
    _csr_entries(asked, rowptr, col)
    _csr_entries(asked, rowptr2, col2)
    one_device(asked, rowptr=rowptr, rowptr2=rowptr2)
    if rowptr.shape[0] != rowptr2.shape[0]:
        raise TigaError(
            f"{asked}: rowptr has {number_of(rowptr.shape[0] - 1)} rows, rowptr2 {number_of(rowptr2.shape[0] - 1)}. "
            "Combine relations of equal sizes."
        )


def _pairs_fake(asked: str) -> Any:
    def fake(rowptr: Tensor, col: Tensor, rowptr2: Tensor, col2: Tensor, num_src: Any) -> Csr:
        _two_relations(asked, rowptr, col, rowptr2, col2)
        edges = torch.library.get_ctx().new_dynamic_size()
        return torch.empty_like(rowptr, dtype=torch.int64), col.new_empty(edges, dtype=torch.int64)

    return fake


def _combined(operation: Any, rowptr: Tensor, col: Tensor, rowptr2: Tensor, col2: Tensor, num_src: int) -> Csr:
    ints = (rowptr.shape[0] - 1, num_src)
    _, _, (combined, sources) = operation(Graph("csr", ints, (rowptr, col)), Graph("csr", ints, (rowptr2, col2)))
    return combined, sources


@declare(
    "intersect(Tensor rowptr, Tensor col, Tensor rowptr2, Tensor col2, SymInt num_src) -> (Tensor rowptr, Tensor col)",
    _pairs_fake("tiga::intersect"),
)
def intersect(rowptr: Tensor, col: Tensor, rowptr2: Tensor, col2: Tensor, num_src: int) -> Csr:
    """{(i, j) in both relations}, each pair once, as CSR by destination, ordered by (i, j).

    rowptr, rowptr2 [num_dst + 1], col, col2: integers, entries of a row in any order; those outside num_src are left
    out. Result int64; the number of edges is found at run time. Deterministic.

    >>> import tiga, torch
    >>> rowptr = torch.tensor([0, 2, 3])
    >>> col, col2 = torch.tensor([0, 1, 0]), torch.tensor([2, 1, 1])
    >>> [t.tolist() for t in torch.ops.tiga.intersect(rowptr, col, rowptr, col2, 3)]
    [[0, 1, 1], [1]]
    """
    _two_relations("tiga::intersect", rowptr, col, rowptr2, col2)
    return _combined(graph_algebra.intersect, rowptr, col, rowptr2, col2, num_src)


@declare(
    "union(Tensor rowptr, Tensor col, Tensor rowptr2, Tensor col2, SymInt num_src) -> (Tensor rowptr, Tensor col)",
    _pairs_fake("tiga::union"),
)
def union(rowptr: Tensor, col: Tensor, rowptr2: Tensor, col2: Tensor, num_src: int) -> Csr:
    """{(i, j) in either relation}, each pair once, as CSR by destination, ordered by (i, j).

    Arguments and result as of intersect.

    >>> import tiga, torch
    >>> rowptr = torch.tensor([0, 2, 3])
    >>> col, col2 = torch.tensor([0, 1, 0]), torch.tensor([2, 1, 1])
    >>> [t.tolist() for t in torch.ops.tiga.union(rowptr, col, rowptr, col2, 3)]
    [[0, 3, 5], [0, 1, 2, 0, 1]]
    """
    _two_relations("tiga::union", rowptr, col, rowptr2, col2)
    return _combined(graph_algebra.union, rowptr, col, rowptr2, col2, num_src)
