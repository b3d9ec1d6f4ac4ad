"""From a constructor's arguments to the payload (kind, ints, tensors) of a graph, with every check on the way.

Plain Python over torch operations that Dynamo inlines; values are read only where graph_checks.should_read allows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiga import graph_algebra, graph_checks, graph_inputs, relations
from tiga.errors import TigaError
from tiga.graph_algebra import Payload
from tiga.graph_checks import integers, number, should_read, size

ALIGNMENTS = ("bottom-right", "top-left")


def sizes(asked: str, num_dst: Any, num_src: Any) -> tuple[Any, Any]:
    num_dst = size(num_dst, "num_dst", asked)
    return num_dst, num_dst if num_src is None else size(num_src, "num_src", asked)


def dense(num_dst: Any, num_src: Any) -> Payload:
    return "dense", sizes("Graph.dense", num_dst, num_src), ()


def triangular(num_dst: Any, num_src: Any, offset: Any) -> Payload:
    asked = "Graph.triangular"
    n, m = sizes(asked, num_dst, num_src)
    if offset is None and num_src is not None and n != m:
        raise TigaError(
            f"{asked}: {number(n)} destinations and {number(m)} sources without an offset: j <= i + offset is not "
            "defined. Write offset=num_src - num_dst to align the last rows, or offset=0 to align the first."
        )
    return "triangular", (n, m, 0 if offset is None else graph_checks.integer(offset, "offset", asked)), ()


def window(num_dst: Any, left: Any, right: Any, num_src: Any, offset: Any) -> Payload:
    asked = "Graph.window"
    n, m = sizes(asked, num_dst, num_src)
    left, right = size(left, "left", asked), size(right, "right", asked)
    return "window", (n, m, left, right, graph_checks.integer(offset, "offset", asked)), ()


def cu_seqlens(
    boundaries: Any, causal: bool, src_boundaries: Any, align: str | None, num_dst: Any, num_src: Any
) -> Payload:
    asked = "Graph.cu_seqlens"
    if align is not None and (align not in ALIGNMENTS or not causal):
        raise TigaError(
            f"{asked}: align={align!r} with causal={causal}, but align is one of {ALIGNMENTS} and belongs to "
            "causal=True."
        )
    same = src_boundaries is None or src_boundaries is boundaries
    num_dst, dst, dst_values = _boundaries(asked, boundaries, "boundaries", num_dst, "num_dst")
    if same and num_src is None:
        src_boundaries, num_src = boundaries, num_dst
    src, src_values = dst, dst_values
    if not same or num_src is not num_dst:
        source = ("boundaries", boundaries) if same else ("src_boundaries", src_boundaries)
        num_src, src, src_values = _boundaries(asked, source[1], source[0], num_src, "num_src")
    graph_checks.one_device(asked, boundaries=dst, src_boundaries=src)
    if dst.shape[0] != src.shape[0]:
        raise TigaError(
            f"{asked}: boundaries has {number(dst.shape[0] - 1)} segments, but src_boundaries has "
            f"{number(src.shape[0] - 1)}. Give one pair of boundaries a segment."
        )
    if causal and align is None and not same:
        _check_equal_segments(asked, dst_values, src_values)
    low, high = segment_band(dst, src, causal, align)
    edges = -1
    if dst_values is not None and src_values is not None and graph_checks.can_read(dst, src):
        host = (_host(dst, dst_values).diff(), _host(src, src_values).diff())
        edges = int(relations.band_counts(*host, *_band_of(*host, causal, align)).sum())
    return "blocks", (num_dst, num_src, edges), (dst, src, low, high)


def _boundaries(asked: str, given: Any, name: str, rows: Any, rows_name: str) -> tuple[Any, Tensor, list[int] | None]:
    tensor = integers(given, name, asked)
    if tensor.shape[0] == 0:
        raise TigaError(f"{asked}: {name} is empty. No segments are written as [0].")
    if rows is not None:
        rows = size(rows, rows_name, asked)
    values = graph_checks.boundary_values(given, tensor, complete=rows is not None)
    if values is None and rows is None:
        raise graph_checks.needs_size(rows_name, asked)
    if values is not None:
        graph_checks.check_boundaries(values, name, asked, rows, rows_name)
    return (rows if rows is not None else values[-1] if values is not None else 0), tensor, values


def _check_equal_segments(asked: str, dst: list[int] | None, src: list[int] | None) -> None:
    instead = 'Write align="bottom-right" (the last rows meet) or align="top-left" (the first rows meet).'
    if dst is None or src is None:
        raise TigaError(
            f"{asked}: causal=True with src_boundaries and no align: whether segments are equal is not read while "
            f"compiling, exporting or capturing, nor from a device when sizes are given. {instead}"
        )
    for b in range(len(dst) - 1):
        n, m = dst[b + 1] - dst[b], src[b + 1] - src[b]
        if n != m:
            raise TigaError(
                f"{asked}: causal=True, but segment {b} has {n} destinations (boundaries) and {m} sources "
                f"(src_boundaries). {instead}"
            )


def _host(tensor: Tensor, values: list[int]) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.to(torch.int64)
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def segment_band(dst: Tensor, src: Tensor, causal: bool, align: str | None) -> tuple[Tensor, Tensor]:
    if not causal or align != "bottom-right" or dst is src:
        # the same of every segment, whatever its length: two launches on a device, where lengths take more
        segments = (dst.shape[0] - 1,)
        high = dst.new_full(segments, 0 if causal else relations.UNBOUNDED, dtype=torch.int64)
        return dst.new_full(segments, -relations.UNBOUNDED, dtype=torch.int64), high
    return _band_of(dst.to(torch.int64).diff(), src.to(torch.int64).diff(), causal, align)


def _band_of(num_dst: Tensor, num_src: Tensor, causal: bool, align: str | None) -> tuple[Tensor, Tensor]:
    """(low, high) of every segment from its sizes."""
    low = torch.full_like(num_dst, -relations.UNBOUNDED)
    if not causal:
        return low, torch.full_like(num_dst, relations.UNBOUNDED)
    return low, num_src - num_dst if align == "bottom-right" else torch.zeros_like(num_dst)


def intervals(start: Any, stop: Any, num_src: Any, start2: Any, stop2: Any) -> Payload:
    asked = "Graph.intervals"
    num_src = size(num_src, "num_src", asked)
    if (start2 is None) != (stop2 is None):
        given, missing = ("start2", "stop2") if stop2 is None else ("stop2", "start2")
        raise TigaError(f"{asked}: {given} without {missing}. Give both ends of the second interval, or neither.")
    arguments = {"start": start, "stop": stop, "start2": start2, "stop2": stop2}
    bounds = {name: integers(value, name, asked) for name, value in arguments.items() if value is not None}
    graph_checks.one_device(asked, **bounds)
    tensors = tuple(bounds.values())
    rows = tensors[0].shape[0]
    for name, tensor in bounds.items():
        if tensor.shape[0] != rows:
            raise TigaError(
                f"{asked}: {name} has {number(tensor.shape[0])} rows, but start has {number(rows)}. "
                "Each bound has one entry for every destination."
            )
    edges = -1
    if graph_checks.can_read(*tensors):
        # one interval is two with an empty second
        edges = graph_checks.check_intervals(
            asked, num_src, *(tensors if len(tensors) == 4 else (*tensors, *tensors[:1] * 2))
        )
    return "intervals", (rows, num_src, edges), tensors


def from_edge_index(edge_index: Any, num_src: Any, num_dst: Any) -> Payload:
    asked, name = "Graph.from_edge_index", "edge_index"
    edge_index, num_src, num_dst = graph_inputs.edge_list(edge_index, num_src, num_dst)
    edges = integers(edge_index, name, asked, rank=2)
    if edges.shape[0] != 2:
        raise TigaError(
            f"{asked}: {name} must have shape (2, num_edges): row 0 sources, row 1 destinations; got "
            f"({number(edges.shape[0])}, {number(edges.shape[1])})."
            + (" Write edge_index.T." if edges.shape[1] == 2 else "")
        )
    num_src = None if num_src is None else size(num_src, "num_src", asked)
    num_dst = None if num_dst is None else size(num_dst, "num_dst", asked)
    src, dst = edges[0], edges[1]
    if should_read(num_src is not None and num_dst is not None, edges):
        num_src, num_dst, ordered = _read_edges(asked, edges, num_src, num_dst)
        return graph_algebra.csr_of(dst, src.clone(), None, num_dst, num_src, ordered)
    for size_name, rows in (("num_src", num_src), ("num_dst", num_dst)):
        if rows is None:
            raise graph_checks.needs_size(size_name, asked)
    return "csr", (num_dst, num_src), tuple(torch.ops.tiga.coo_to_csr(edges, num_dst))


def _read_edges(asked: str, edges: Tensor, num_src: Any, num_dst: Any) -> tuple[Any, Any, bool]:
    """Sizes, and whether destinations ascend already, by one read; raises for a row that does not exist."""
    if edges.shape[1] == 0:
        return num_src or 0, num_dst or 0, True
    (low_src, low_dst), (high_src, high_dst) = edges.amin(1), edges.amax(1)
    falls = (edges[1, 1:] < edges[1, :-1]).any().to(edges.dtype)
    low_src, high_src, low_dst, high_dst, falls = torch.stack([low_src, high_src, low_dst, high_dst, falls]).tolist()
    num_src = high_src + 1 if num_src is None else num_src
    num_dst = high_dst + 1 if num_dst is None else num_dst
    graph_checks.check_entries(asked, "edge_index", "source", low_src, high_src, num_src, "num_src")
    graph_checks.check_entries(asked, "edge_index", "destination", low_dst, high_dst, num_dst, "num_dst")
    return num_src, num_dst, not falls


def from_csr(rowptr: Any, col: Any, num_src: Any, num_dst: Any) -> Payload:
    asked = "Graph.from_csr"
    rowptr, col = integers(rowptr, "rowptr", asked), integers(col, "col", asked)
    graph_checks.one_device(asked, rowptr=rowptr, col=col)
    if rowptr.shape[0] == 0:
        raise TigaError(f"{asked}: rowptr is empty. No destinations are written as [0].")
    rows = rowptr.shape[0] - 1
    if num_dst is not None and size(num_dst, "num_dst", asked) != rows:
        raise TigaError(
            f"{asked}: num_dst is {number(num_dst)}, but rowptr has {number(rows + 1)} entries, one more than "
            f"{number(rows)} rows. Leave num_dst out."
        )
    num_src = None if num_src is None else size(num_src, "num_src", asked)
    if should_read(num_src is not None, rowptr, col):
        num_src = _read_csr(asked, rowptr, col, num_src)
    if num_src is None:
        raise graph_checks.needs_size("num_src", asked)
    return "csr", (rows, num_src), (rowptr, col)


def _read_csr(asked: str, rowptr: Tensor, col: Tensor, num_src: Any) -> Any:
    """Number of sources by one read; raises for a rowptr that is not one, or a source that does not exist."""
    edges = col.shape[0]
    falls = (rowptr[1:] < rowptr[:-1]).to(torch.int64)
    ends = [falls.argmax(), falls.max()] if len(falls) else [rowptr.new_zeros(())] * 2
    ends += col.aminmax() if edges else [rowptr.new_zeros(())] * 2
    first, last, row, fall, low, high = torch.stack(
        [t.to(torch.int64) for t in (rowptr[0], rowptr[-1], *ends)]
    ).tolist()
    if first != 0 or last != edges:
        raise TigaError(
            f"{asked}: rowptr runs from {first} to {last}, but must run from 0 to the {edges} entries of col."
        )
    if fall:
        raise TigaError(
            f"{asked}: rowptr decreases after row {row}. Row i is col[rowptr[i]:rowptr[i + 1]]: write running totals."
        )
    num_src = (high + 1 if edges else 0) if num_src is None else num_src
    if edges:
        graph_checks.check_entries(asked, "col", "source", low, high, num_src, "num_src")
    return num_src


def from_sparse(matrix: Any) -> Payload:
    entries, num_src, num_dst = graph_inputs.sparse(matrix)
    if entries.edges is not None:
        return from_edge_index(entries.edges, num_src, num_dst)
    return from_csr(entries.rowptr, entries.col, num_src, num_dst)
