"""Graphs as sets of pairs: lists, masks, transposes, block diagonals, intersections and unions.

Functions of graphs that return the payload (kind, ints, tensors) of a new one, in the orientation it is used in.
Implicit kinds stay implicit where they can: a band becomes a block, any implicit kind becomes row intervals, and edges
are listed only where more than two intervals a row would be needed or an operand is itself a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tiga import relations
from tiga.errors import TigaError
from tiga.graph_checks import can_read
from tiga.relations import Interval, Ints, Tensors

if TYPE_CHECKING:
    from tiga.graph import Graph

Payload = tuple[str, Ints, Tensors]


def known_edges(graph: Graph) -> Any:
    """Number of edges if no read is needed, else -1."""
    return graph.ints[2] if graph.kind in ("blocks", "intervals") else graph.num_edges


def csr_of(dst: Tensor, src: Tensor, numbers: Tensor | None, num_dst: Any, num_src: Any, ordered: bool) -> Payload:
    """CSR by destination of listed edges, in the given order within a row; `ordered` says that dst ascends already.

    An edge whose dst lies outside 0..num_dst - 1 falls outside rowptr[0]..rowptr[num_dst] and belongs to no row.
    """
    if not ordered:
        dst, order = torch.sort(dst, stable=True)
        src, numbers = src[order], order if numbers is None else numbers[order]
    rows = torch.arange(num_dst + 1, dtype=dst.dtype, device=dst.device)
    rowptr = torch.searchsorted(dst.contiguous(), rows)
    return "csr", (num_dst, num_src), (rowptr, src) if numbers is None else (rowptr, src, numbers)


def listed(graph: Graph) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dst, src, numbers) of every edge in the orientation the graph is used in; numbers None: they are 0, 1, 2, ...

    A csr entry that names no row (possible only where nothing was checked) has dst = src = -1.
    """
    if graph.kind == "csr":
        rowptr, col = graph.tensors[:2]
        entry = torch.arange(col.shape[0], dtype=rowptr.dtype, device=col.device)
        dst = torch.searchsorted(rowptr, entry, right=True).to(col.dtype) - 1
        valid = (dst >= 0) & (dst < graph.num_dst) & (col >= 0) & (col < graph.num_src)
        numbers = graph.tensors[2] if len(graph.tensors) == 3 else None
        return torch.where(valid, dst, -1), torch.where(valid, col, -1), numbers
    edges = known_edges(graph)
    if edges < 0 and can_read(*graph.tensors):
        edges = graph.num_edges
    if edges < 0:
        raise TigaError(
            f"listing the edges of a {graph.kind} graph: their number is not known while compiling, exporting or "
            "capturing. Build the list outside."
        )
    intervals = base_intervals(graph)
    dst, src = expand([start for start, _ in intervals], [stop for _, stop in intervals], edges)
    return (src, dst, None) if graph.reversed else (dst, src, None)


def expand(starts: Sequence[Tensor], stops: Sequence[Tensor], edges: Any) -> tuple[Tensor, Tensor]:
    """(dst, src) of ascending row intervals, ordered by destination, then source."""
    start, stop = torch.stack(list(starts), 1).flatten(), torch.stack(list(stops), 1).flatten()
    counts = stop - start
    pieces = torch.arange(counts.shape[0], device=counts.device)
    piece = torch.repeat_interleave(pieces, counts, output_size=edges)
    rank = torch.arange(edges, device=counts.device) - (counts.cumsum(0) - counts)[piece]
    return piece // len(starts), start[piece] + rank


def base_intervals(graph: Graph) -> tuple[Interval, ...]:
    """Row intervals in the base orientation, whether or not the graph is reversed."""
    return relations.row_intervals(graph.kind, graph.ints, graph.tensors, 0, graph.ints[0], graph.device)


def used_intervals(graph: Graph) -> tuple[Interval, ...] | None:
    """Row intervals in the orientation the graph is used in; None for a list, and for reversed intervals."""
    if graph.kind == "csr" or (graph.reversed and graph.kind == "intervals"):
        return None
    if not graph.reversed:
        return base_intervals(graph)
    dst, src, low, high = (column(part, graph.device) for part in zip(*[block_columns(graph, 0, 0)]))
    zero = src.new_zeros(1)
    turned = (torch.cat([zero, src]), torch.cat([zero, dst]), -high, -low)
    return relations.row_intervals("blocks", (graph.num_dst, graph.num_src, -1), turned, 0, graph.num_dst, graph.device)


def block_columns(graph: Graph, row: Any, source: Any) -> tuple[Any, Any, Any, Any]:
    """(last rows, last sources, low, high) of a band or blocks graph that begins at (row, source)."""
    if graph.kind == "blocks":
        dst, src, low, high = graph.tensors
        return dst[1:].to(torch.int64) + row, src[1:].to(torch.int64) + source, low, high
    band = relations.RELATIONS[graph.kind].band
    assert band is not None
    return (row + graph.ints[0], source + graph.ints[1], *band(graph.ints))


def column(parts: Sequence[Any], device: Any) -> Tensor:
    """One int64 tensor of numbers and tensors in turn, with as few small tensors as possible."""
    pieces: list[Tensor] = []
    run: list[Any] = []
    for part in parts:
        if not isinstance(part, Tensor):
            run.append(part)
            continue
        if run:
            pieces.append(_numbers(run, device))
            run = []
        pieces.append(part)
    if run or not pieces:
        pieces.append(_numbers(run, device))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _numbers(values: list[Any], device: Any) -> Tensor:
    if device is None:
        return torch.tensor(values, dtype=torch.int64)
    # straight onto a device it would wait for the device
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def to_csr(graph: Graph) -> Payload:
    if graph.kind == "csr":
        return graph.kind, graph.ints, graph.tensors
    dst, src, numbers = listed(graph)
    return csr_of(dst, src, numbers, graph.num_dst, graph.num_src, ordered=not graph.reversed)


def transposed(graph: Graph) -> Payload:
    """Of a csr graph: its edges by source, with the numbers they had."""
    dst, src, numbers = listed(graph)
    return csr_of(src, dst, numbers, graph.num_src, graph.num_dst, ordered=False)


def to_mask(graph: Graph) -> Tensor:
    """mask[i, j] says whether j reaches i: bool (num_dst, num_src)."""
    if graph.kind == "csr":
        dst, src, _ = listed(graph)
        mask = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.bool, device=dst.device)
        valid = dst >= 0
        mask[dst[valid].long(), src[valid].long()] = True
        return mask
    j = torch.arange(graph.ints[1], device=graph.device)
    first, *second = ((j >= start[:, None]) & (j < stop[:, None]) for start, stop in base_intervals(graph))
    mask = first | second[0] if second else first
    return mask.T.contiguous() if graph.reversed else mask


def total(sizes: Sequence[Any]) -> Any:
    """Their sum. Dynamo makes `sum` an operation that torch.export cannot save."""
    result = 0
    for part in sizes:
        result = result + part
    return result


def cat(parts: Sequence[Graph], device: Any) -> Payload:
    """Block diagonal of at least one part, none of them a reversed implicit graph."""
    kinds = {graph.kind for graph in parts}
    num_dst, num_src = total([g.num_dst for g in parts]), total([g.num_src for g in parts])
    if "csr" in kinds:
        return _cat_lists(parts, num_dst, num_src)
    edges = [known_edges(graph) for graph in parts]
    ints = (num_dst, num_src, -1 if any(e < 0 for e in edges) else total(edges))
    if "intervals" in kinds:
        return "intervals", ints, _cat_intervals(parts, device)
    corners, row, source = [], 0, 0
    for graph in parts:
        corners.append(block_columns(graph, row, source))
        row, source = row + graph.num_dst, source + graph.num_src
    dst, src, low, high = zip(*corners)
    boundaries = column([0, *dst], device), column([0, *src], device)
    return "blocks", ints, (*boundaries, column(low, device), column(high, device))


def _cat_lists(parts: Sequence[Graph], num_dst: Any, num_src: Any) -> Payload:
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    row = source = first = 0
    for graph in parts:
        dst, src, numbers = listed(graph)
        if numbers is None:
            numbers = torch.arange(dst.shape[0], device=dst.device)
        valid = dst >= 0
        # 64-bit before adding: the sum of sizes may pass what a part's own dtype holds
        dst, src = (torch.where(valid, x.to(torch.int64) + base, -1) for x, base in ((dst, row), (src, source)))
        columns.append((dst, src, numbers + first))
        row, source, first = row + graph.num_dst, source + graph.num_src, first + dst.shape[0]
    dst, src, numbers = (torch.cat(column) for column in zip(*columns))
    return csr_of(dst, src, numbers, num_dst, num_src, ordered=False)


def _cat_intervals(parts: Sequence[Graph], device: Any) -> Tensors:
    columns, source = [], 0
    for graph in parts:
        rows = relations.row_intervals(graph.kind, graph.ints, graph.tensors, 0, graph.ints[0], device)
        columns.append([bound + source for interval in rows for bound in interval])
        source = source + graph.num_src
    if max(len(bounds) for bounds in columns) == 4:
        # an empty second interval stands where the first stops
        columns = [bounds if len(bounds) == 4 else [*bounds, bounds[1], bounds[1]] for bounds in columns]
    return tuple(torch.cat(bounds) for bounds in zip(*columns))


def intersect(a: Graph, b: Graph) -> Payload:
    rows_a, rows_b = used_intervals(a), used_intervals(b)
    if rows_a is not None and rows_b is not None:
        pieces = [
            (torch.maximum(start, start2), torch.maximum(torch.maximum(start, start2), torch.minimum(stop, stop2)))
            for start, stop in rows_a
            for start2, stop2 in rows_b
        ]
        return _fewest(pieces, len(rows_a) + len(rows_b) - 1, a, b)
    if rows_a is not None:
        a, b = b, a
    dst, src = _pairs(a)
    if b.kind == "csr":
        dst2, src2 = _pairs(b)
        keys = torch.cat([dst * a.num_src + src, dst2 * a.num_src + src2]).sort()[0]
        # the pairs of each operand are distinct, so two equal neighbours come one from each
        both = keys[:-1][keys[1:] == keys[:-1]]
        dst, src = both // max(a.num_src, 1), both % max(a.num_src, 1)
    else:
        keep = _contains(b, dst, src)
        dst, src = dst[keep], src[keep]
    return csr_of(dst, src, None, a.num_dst, a.num_src, ordered=True)


def union(a: Graph, b: Graph) -> Payload:
    rows_a, rows_b = used_intervals(a), used_intervals(b)
    if rows_a is not None and rows_b is not None:
        return _fewest([*rows_a, *rows_b], len(rows_a) + len(rows_b), a, b)
    (dst, src), (dst2, src2) = _pairs(a), _pairs(b)
    keys = torch.cat([dst * a.num_src + src, dst2 * a.num_src + src2]).unique()
    width = max(a.num_src, 1)
    return csr_of(keys // width, keys % width, None, a.num_dst, a.num_src, ordered=True)


def _pairs(graph: Graph) -> tuple[Tensor, Tensor]:
    """Distinct pairs (dst, src), int64, ordered by destination, then source."""
    dst, src, _ = listed(graph)
    valid = dst >= 0
    keys = (dst[valid].to(torch.int64) * graph.num_src + src[valid]).unique()
    width = max(graph.num_src, 1)
    return keys // width, keys % width


def _contains(graph: Graph, dst: Tensor, src: Tensor) -> Tensor:
    row, column = (src, dst) if graph.reversed else (dst, src)
    inside = torch.zeros_like(row, dtype=torch.bool)
    for start, stop in base_intervals(graph):
        inside |= (column >= start[row]) & (column < stop[row])
    return inside


def _fewest(pieces: Sequence[Interval], most: int, a: Graph, b: Graph) -> Payload:
    """Merges row intervals in any order into disjoint ascending ones: intervals up to two a row, else a list."""
    num_src = a.num_src
    start, stop = (torch.stack(bounds, 1) for bounds in zip(*pieces))
    empty = start >= stop
    start, order = torch.where(empty, num_src, start).sort(1)
    stop = torch.where(empty, num_src, stop).gather(1, order)
    full = start < stop
    reach = torch.cat([torch.full_like(stop[:, :1], -1), stop.cummax(1)[0][:, :-1]], 1)
    run = ((start > reach) & full).cumsum(1)
    if can_read(start):
        most = int(run[:, -1].max()) if run.shape[0] else 0
    elif most > 2:
        raise TigaError(
            f"& or | of a {a.kind} and a {b.kind} graph: how many intervals a row has is not known while compiling, "
            "exporting or capturing. Combine them outside."
        )
    starts, stops = [], []
    for k in range(1, max(most, 1) + 1):
        mine = full & (run == k)
        first = torch.where(mine, start, num_src).amin(1)
        starts.append(first)
        stops.append(torch.maximum(torch.where(mine, stop, 0).amax(1), first))
    edges = int(sum((y - x).sum() for x, y in zip(starts, stops))) if can_read(start) else -1
    if most <= 2:
        bounds = [bound for interval in zip(starts, stops) for bound in interval]
        return "intervals", (a.num_dst, num_src, edges), tuple(bounds)
    dst, src = expand(starts, stops, edges)
    return csr_of(dst, src, None, a.num_dst, num_src, ordered=True)
