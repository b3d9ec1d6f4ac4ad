"""Radius and nearest-neighbour searches in torch operations: a cell list, batched, any device and dimension.

Nodes are sorted by the cell they lie in, over the (at most three) widest dimensions; the candidates of a node are a
few runs of that order, found by searchsorted, and are measured in all dimensions. A chunk of candidates at a time, so
that memory is O(nodes + edges) plus a constant. On CUDA, in
at most three dimensions, codegen.neighbours searches instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tiga.errors import TigaError
from tiga.graph_checks import integers, number

CHUNK = 2**20
"""Coordinates of candidate pairs measured at a time."""

GRID_DIMENSIONS = 3

KEYS = 2**62
"""Cells that may be told apart; dimensions beyond that are left to the measuring."""

PAIRS = 2**22
"""Pairs measured at a time where every pair is."""

KERNEL_DEVICES = {"cuda"}

SAMPLES = 16
"""Nodes that a nearest-neighbour search lets look at all others: to find the scale to begin at, and the last ones."""


@dataclass(frozen=True)
class Grid:
    """Nodes in the order of their cells: `keys` ascends and `nodes` goes with it; `key_of` is by node."""

    keys: Tensor
    nodes: Tensor
    key_of: Tensor
    runs: tuple[int, ...]
    """Key distances from a cell to the middles of the runs of three cells around it."""


def check_points(positions: Any, batch: Any, asked: str) -> Tensor | None:
    """Raises unless positions are (num_nodes, dim) floating point and batch one integer a node; returns batch."""
    if not isinstance(positions, Tensor) or not positions.dtype.is_floating_point:
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{asked}: positions must be a floating-point tensor, got {kind}. Write positions.float().")
    if positions.dim() != 2 or positions.shape[1] == 0:
        raise TigaError(
            f"{asked}: positions must have shape (num_nodes, dim) with dim >= 1, got "
            f"{tuple(positions.shape)}. Points on a line are positions[:, None]."
        )
    if batch is None:
        return None
    given = isinstance(batch, Tensor)
    batch = integers(batch, "batch", asked)
    if not given:
        batch = batch.to(positions.device)
    if batch.shape[0] != positions.shape[0]:
        raise TigaError(
            f"{asked}: batch has {number(batch.shape[0])} entries, but positions has {number(positions.shape[0])} "
            "nodes. Give the number of its sample for every node."
        )
    if batch.device != positions.device:
        raise TigaError(
            f"{asked}: positions is on {positions.device}, but batch is on {batch.device}. Move them to one device."
        )
    return batch


def check_cutoff(cutoff: Any) -> Any:
    if isinstance(cutoff, bool) or not isinstance(cutoff, (int, float, Real, torch.SymFloat)):
        raise TypeError(
            f"Graph.radius: cutoff must be a Python number, got {type(cutoff).__name__}. Write float(cutoff)."
        )
    cutoff = float(cutoff)
    # written so that nan fails too
    if not cutoff >= 0:
        raise TigaError(f"Graph.radius: cutoff is {cutoff}, but a distance is 0 or more.")
    return cutoff


def radius_edges(
    positions: Tensor, cutoff: float, batch: Tensor | None = None, loop: bool = False, max_neighbors: int | None = None
) -> tuple[Tensor, Tensor]:
    """{(i, j): |x_j - x_i| <= cutoff}, as (rowptr [num_nodes + 1], col [num_edges]), int64, ordered by (i, j).

    j = i only with loop; pairs of different batch never. Raises for positions that are not finite, and for a node
    with more than max_neighbors.
    """
    batch = check_points(positions, batch, "Graph.radius")
    cutoff = check_cutoff(cutoff)
    by_kernels = kernels(positions)
    if by_kernels is not None:
        return by_kernels.radius(positions, cutoff, batch, loop, max_neighbors)[:2]
    check_finite(positions, "Graph.radius")
    num_nodes = positions.shape[0]
    nodes = torch.arange(num_nodes, device=positions.device)
    found = [(dst, src) for dst, src, _ in pairs(positions, cutoff, batch, nodes, loop)]
    dst, src = (torch.cat(part) for part in zip(*found)) if found else (nodes[:0], nodes[:0])
    rowptr = torch.searchsorted(dst, torch.arange(num_nodes + 1, device=dst.device))
    check_most(rowptr, cutoff, max_neighbors)
    return rowptr, src


def check_most(rowptr: Tensor, cutoff: float, max_neighbors: int | None) -> None:
    """Raises where a node has more neighbours than were allowed."""
    if max_neighbors is None or rowptr.shape[0] == 1:
        return
    most, node = rowptr.diff().max(0)
    if most > max_neighbors:
        raise TigaError(
            f"Graph.radius: node {int(node)} has {int(most)} neighbours within {cutoff}, more than max_neighbors="
            f"{max_neighbors}. The result is never cut: raise max_neighbors, lower the cutoff, or use Graph.knn."
        )


def kernels(positions: Tensor) -> Any:
    """What searches by kernels, where they can: on such a device, in at most three dimensions."""
    if positions.device.type not in KERNEL_DEVICES or positions.shape[1] > GRID_DIMENSIONS or not _has_triton():
        return None
    return importlib.import_module("tiga.codegen.neighbours")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def bound(cutoff: float, dtype: torch.dtype) -> float:
    """The largest squared distance within the cutoff. Two points 0.1 apart in float32 are within 0.1, a float64."""
    rounded = float(torch.tensor(cutoff, dtype=dtype, device="cpu"))
    return (max(cutoff, rounded) if math.isfinite(rounded) else cutoff) ** 2


def squared(difference: Tensor) -> Tensor:
    """Squared lengths in float64, added one dimension after another: the same numbers wherever they are computed."""
    squares = difference.to(torch.float64).square()
    total = squares[:, 0]
    for d in range(1, difference.shape[1]):
        total = total + squares[:, d]
    return total


def knn_edges(positions: Tensor, k: int, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """{(i, j): j among the k nearest to i, j != i}, as (rowptr [num_nodes + 1], col), int64, ordered by (i, j).

    Of equally near nodes the lower; fewer than k where the batch has no more. In at most three dimensions the search
    radius doubles for the nodes that have not found enough; in more every pair of a batch is measured.
    """
    batch = check_points(positions, batch, "Graph.knn")
    by_kernels = kernels(positions)
    if by_kernels is not None:
        return by_kernels.knn(positions, k, batch)
    check_finite(positions, "Graph.knn")
    if positions.shape[1] > GRID_DIMENSIONS:
        return _nearest_of_all(positions, k, batch)
    num_nodes, device = positions.shape[0], positions.device
    pending = torch.arange(num_nodes, device=device)
    available = _batch_sizes(batch, num_nodes, device) - 1
    wanted = available.clamp_max(k)
    pending = pending[wanted > 0]
    cutoff, diagonal = _first_radius(positions, k, batch)
    found: list[tuple[Tensor, Tensor]] = []
    while pending.numel():
        if cutoff > 2 * diagonal or pending.numel() <= SAMPLES:
            cutoff = math.inf
        enough = torch.zeros(num_nodes, dtype=torch.bool, device=device)
        for dst, src, apart in pairs(positions, cutoff, batch, pending, loop=False):
            dst, src, count = _nearest(dst, src, apart, wanted)
            complete = count == wanted[dst]
            enough[dst[complete]] = True
            found.append((dst[complete], src[complete]))
        pending, cutoff = pending[~enough[pending]], 2 * cutoff
    dst, src = (torch.cat(part) for part in zip(*found)) if found else (pending, pending)
    order = (dst * num_nodes + src).argsort()
    return torch.searchsorted(dst[order], torch.arange(num_nodes + 1, device=device)), src[order]


def _nearest_of_all(positions: Tensor, k: int, batch: Tensor | None) -> tuple[Tensor, Tensor]:
    """knn_edges by every pair of a batch, some rows at a time: in many dimensions cells leave nothing out."""
    num_nodes, device = positions.shape[0], positions.device
    wanted = (_batch_sizes(batch, num_nodes, device) - 1).clamp_max(k)
    ordered, nodes = (wanted, torch.arange(num_nodes, device=device)) if batch is None else batch.sort(stable=True)
    ends = [num_nodes] if batch is None else ordered.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    found: list[tuple[Tensor, Tensor]] = []
    for first, last in pairwise([0, *ends]) if k and num_nodes else ():
        others = nodes[first:last]
        for rows in others.split(max(PAIRS // len(others), 1)):
            apart = torch.zeros(len(rows), len(others), dtype=torch.float64, device=device)
            for d in range(positions.shape[1]):
                apart += (positions[others, d] - positions[rows, d, None]).to(torch.float64).square()
            apart.masked_fill_(rows[:, None] == others, math.inf)
            count = wanted[rows, None]
            nearest = apart.topk(min(k, len(others)), largest=False)[0].gather(1, (count - 1).clamp_min(0))
            closer, level = apart < nearest, apart == nearest
            taken = closer | (level & (level.cumsum(1) <= count - closer.sum(1, keepdim=True)))
            row, other = taken.nonzero(as_tuple=True)
            found.append((rows[row], others[other]))
    dst, src = (torch.cat(part) for part in zip(*found)) if found else (nodes[:0], nodes[:0])
    dst, order = dst.sort(stable=True)
    return torch.searchsorted(dst, torch.arange(num_nodes + 1, device=device)), src[order]


def check_finite(positions: Tensor, asked: str) -> None:
    finite = positions.isfinite().all(1)
    if not finite.all():
        refuse_position(positions, int((~finite).to(torch.int8).argmax()), asked)


def refuse_position(positions: Tensor, node: int, asked: str) -> None:
    raise TigaError(f"{asked}: positions of node {node} are {positions[node].tolist()}, but must be finite.")


def _batch_sizes(batch: Tensor | None, num_nodes: int, device: torch.device) -> Tensor:
    """Number of nodes of each node's batch."""
    if batch is None:
        return torch.full((num_nodes,), num_nodes, device=device)
    _, which, counts = batch.unique(return_inverse=True, return_counts=True)
    return counts[which]


def _grid(positions: Tensor, cutoff: float, batch: Tensor | None) -> Grid:
    """Cells at least as wide as the cutoff, so that neighbours lie in adjacent cells of every dimension."""
    points = positions.to(torch.float64)
    low, high = points.aminmax(dim=0)
    extent = high - low
    # A difference is rounded in the dtype of positions: the margin covers what rounding can bring inside the cutoff.
    reach = cutoff * (1 + 1e-5 + 2 * torch.finfo(positions.dtype).eps)
    limits = torch.finfo(torch.float64)
    # At most 2^32 cells a dimension, so that a cell is found to 1e-6 of its width.
    width = (extent / 2**32).clamp_min(max(min(reach, limits.max), limits.tiny))
    cell = torch.where(extent.isfinite(), (points - low) / width, 0).floor().to(torch.int64)
    key = torch.zeros_like(cell[:, 0]) if batch is None else batch.unique(return_inverse=True)[1]
    cells, steps = int(key.max()) + 1, [0]
    for d in extent.argsort(descending=True)[:GRID_DIMENSIONS].tolist():
        place = _without_gaps(cell[:, d])
        count = int(place.max()) + 2
        if cells * count >= KEYS:
            break
        key, cells = key * count + place, cells * count
        steps = [step * count + move for step, move in product(steps, (-1, 0, 1))]
    keys, nodes = key.sort(stable=True)
    # The last dimension's three cells follow one another: one run.
    return Grid(keys, nodes, key, tuple(steps[1::3]))


def _without_gaps(cell: Tensor) -> Tensor:
    """Cells counted from 1 with runs of empty ones shortened to one: adjacent cells stay so, and no others become so.

    A cluster far from the rest then costs no keys. The empty cell before the first, and after the last, is what a
    step over the side lands in: it never wraps into the row, or the sample, beside it.
    """
    values, which = cell.unique(return_inverse=True)
    places = torch.cat([values.new_ones(1), values.diff().clamp_max(2)]).cumsum(0)
    return places[which]


def pairs(
    positions: Tensor, cutoff: float, batch: Tensor | None, rows: Tensor, loop: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Chunks of (dst, src, squared distance) within the cutoff, ordered by (dst, src); no row is divided."""
    if rows.numel() == 0:
        return
    grid = _grid(positions, cutoff, batch)
    limit = bound(cutoff, positions.dtype)
    runs = torch.tensor(grid.runs, device=rows.device)
    chunk = max(CHUNK // positions.shape[1], 1)
    for some in rows.split(chunk):
        middle = grid.key_of[some][:, None] + runs
        first = torch.searchsorted(grid.keys, middle - 1)
        counts = torch.searchsorted(grid.keys, middle + 1, right=True) - first
        ends = counts.sum(1).cumsum(0)
        # Where the running number of candidates passes each multiple of `chunk`.
        marks = torch.arange(0, int(ends[-1]), chunk, device=rows.device)[1:]
        cuts = sorted({0, *torch.searchsorted(ends, marks).tolist(), len(some)})
        for begin, end in pairwise(cuts):
            piece = slice(begin, end)
            yield _measured(positions, grid, limit, some[piece], first[piece], counts[piece], loop)


def _measured(
    positions: Tensor, grid: Grid, limit: float, rows: Tensor, first: Tensor, counts: Tensor, loop: bool
) -> tuple[Tensor, Tensor, Tensor]:
    flat, num_runs = counts.flatten(), counts.shape[1]
    run = torch.repeat_interleave(torch.arange(len(flat), device=rows.device), flat)
    rank = torch.arange(len(run), device=rows.device) - (flat.cumsum(0) - flat)[run]
    src = grid.nodes[first.flatten()[run] + rank]
    dst = rows[run // num_runs]
    # Subtract first, in the dtype given: what edge.displacement is, and the same wherever the points are moved.
    apart = squared(positions[src] - positions[dst])
    near = apart <= limit
    if not loop:
        near &= src != dst
    dst, src, apart = dst[near], src[near], apart[near]
    order = (dst * positions.shape[0] + src).argsort()
    return dst[order], src[order], apart[order]


def _nearest(dst: Tensor, src: Tensor, apart: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first `wanted[i]` of each row by (distance, source), with the number kept of their row beside each."""
    order = apart.argsort(stable=True)
    order = order[dst[order].argsort(stable=True)]
    dst, src = dst[order], src[order]
    rows, which, counts = dst.unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(dst), device=dst.device) - (counts.cumsum(0) - counts)[which]
    keep = rank < wanted[dst]
    return dst[keep], src[keep], torch.minimum(counts, wanted[rows])[which][keep]


def _first_radius(positions: Tensor, k: int, batch: Tensor | None) -> tuple[float, float]:
    """(radius that holds the k nearest of most nodes, by a sample; the diagonal of the box of all nodes)."""
    num_nodes = positions.shape[0]
    if num_nodes == 0:
        return 0.0, 0.0
    low, high = positions.to(torch.float64).aminmax(dim=0)
    diagonal = float((high - low).norm())
    distances = []
    for node in range(0, num_nodes, max(num_nodes // SAMPLES, 1)):
        apart = squared(positions - positions[node])
        if batch is not None:
            apart = apart[batch == batch[node]]
        distances.append(apart.kthvalue(min(k + 1, apart.shape[0]))[0])
    typical = float(torch.stack(distances).median().sqrt())
    return max(1.25 * typical, diagonal * 2**-32), diagonal
