"""How full each cell of a coarse picture of a graph is, counted exactly and without a mask of all pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiga import graph_algebra, relations

if TYPE_CHECKING:
    from tiga.graph import Graph

OVERLAPS = 2**20
"""Overlaps of rows with cells that are held at once."""


def density(graph: Graph, rows: int, columns: int) -> Tensor:
    """share[r, c] = pairs that are edges / pairs, of destinations i with floor(i rows / num_dst) = r and sources alike.

    1 <= rows <= num_dst, 1 <= columns <= num_src. Float64 (rows, columns), on the host. A pair that is listed several
    times counts once. Memory O(num_edges of a list + rows x columns).
    """
    counts = _listed(graph, rows, columns) if graph.kind == "csr" else _implicit(graph, rows, columns)
    high, wide = cell_bounds(graph.num_dst, rows).diff(), cell_bounds(graph.num_src, columns).diff()
    return counts.cpu().to(torch.float64) / (high[:, None] * wide)


def cell_bounds(size: int, cells: int) -> Tensor:
    """First row of every cell, and the end: int64 [cells + 1]."""
    return torch.tensor([-(-k * size // cells) for k in range(cells + 1)], device="cpu")


def _listed(graph: Graph, rows: int, columns: int) -> Tensor:
    dst, src, _ = graph_algebra.listed(graph)
    valid = dst >= 0
    pairs = (dst[valid].to(torch.int64) * graph.num_src + src[valid]).unique()
    row, column = pairs // graph.num_src, pairs % graph.num_src
    cell = (row * rows // graph.num_dst) * columns + column * columns // graph.num_src
    return torch.bincount(cell, minlength=rows * columns).reshape(rows, columns)


def _implicit(graph: Graph, rows: int, columns: int) -> Tensor:
    """Counted in the base orientation, row by row of it: overlaps of its intervals with the columns' cells."""
    num_dst, num_src = graph.ints[:2]
    if graph.reversed:
        rows, columns = columns, rows
    bounds = cell_bounds(num_src, columns).to(graph.device or "cpu")
    counts = bounds.new_zeros(rows, columns)
    step = max(1, OVERLAPS // columns)
    for first in range(0, num_dst, step):
        last = min(first + step, num_dst)
        row = torch.arange(first, last, device=bounds.device) * rows // num_dst
        for start, stop in relations.row_intervals(graph.kind, graph.ints, graph.tensors, first, last, bounds.device):
            low = torch.maximum(start[:, None], bounds[:-1])
            high = torch.minimum(stop[:, None], bounds[1:])
            counts.index_add_(0, row, (high - low).clamp_min(0))
    return counts.T if graph.reversed else counts
