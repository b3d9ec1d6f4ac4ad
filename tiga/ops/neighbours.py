"""tiga::radius, radius_periodic and knn: neighbour searches, whose number of edges only the positions tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiga import neighbours, periodic
from tiga.ops.friendly import declare


def _listed(positions: Tensor, edges: Any) -> tuple[Tensor, Tensor]:
    return positions.new_empty(positions.shape[0] + 1, dtype=torch.int64), positions.new_empty(edges, dtype=torch.int64)


def _radius_fake(
    positions: Tensor, cutoff: float, batch: Tensor | None = None, loop: bool = False, max_neighbors: Any = None
) -> tuple[Tensor, Tensor]:
    neighbours.check_points(positions, batch, "Graph.radius")
    neighbours.check_cutoff(cutoff)
    return _listed(positions, torch.library.get_ctx().new_dynamic_size())


@declare(
    "radius(Tensor positions, float cutoff, Tensor? batch=None, bool loop=False, SymInt? max_neighbors=None) "
    "-> (Tensor rowptr, Tensor col)",
    _radius_fake,
)
def radius(
    positions: Tensor,
    cutoff: float,
    batch: Tensor | None = None,
    loop: bool = False,
    max_neighbors: int | None = None,
) -> tuple[Tensor, Tensor]:
    """{(i, j): |x_j - x_i| <= cutoff, j != i unless loop, batch[i] == batch[j]}, ordered by (i, j).

    CSR by destination: rowptr [num_nodes + 1] and col [num_edges], int64; num_edges is found at run time. positions
    (num_nodes, dim), floating point, in the unit of cutoff; batch [num_nodes] integers, in any order. No nodes give no
    edges. O(nodes + edges) at uniform density; deterministic. It has no derivative: what is computed of the positions
    of the pairs has. Raises TigaError for positions that are not finite, a cutoff that is nan or negative, and a node
    with more than max_neighbors: the result is never cut.

    >>> import tiga, torch
    >>> [t.tolist() for t in torch.ops.tiga.radius(torch.tensor([[0.0], [1.0], [3.0]]), 1.0)]
    [[0, 1, 2, 2], [1, 0]]
    """
    return neighbours.radius_edges(positions, cutoff, batch, loop, max_neighbors)


def _radius_periodic_fake(
    positions: Tensor,
    cutoff: float,
    cell: Tensor,
    batch: Tensor | None = None,
    loop: bool = False,
    max_neighbors: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    periodic.check_cell(cell, positions, neighbours.check_points(positions, batch, "Graph.radius"))
    rowptr, col = _radius_fake(positions, cutoff, batch, loop, max_neighbors)
    return rowptr, col, positions.new_empty((col.shape[0], positions.shape[1]), dtype=torch.int32)


@declare(
    "radius_periodic(Tensor positions, float cutoff, Tensor cell, Tensor? batch=None, bool loop=False, "
    "SymInt? max_neighbors=None) -> (Tensor rowptr, Tensor col, Tensor image)",
    _radius_periodic_fake,
)
def radius_periodic(
    positions: Tensor,
    cutoff: float,
    cell: Tensor,
    batch: Tensor | None = None,
    loop: bool = False,
    max_neighbors: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """{(i, j, n): |x_j - x_i + sum_k n_k cell[k]| <= cutoff, (j, n) != (i, 0) unless loop}, ordered by (i, j, n).

    rowptr, col and errors of radius; image [num_edges, dim], int32, is n. cell (dim, dim), a row a period and zeros for
    none, or (samples, dim, dim), numbered by batch. Raises TigaError too for a cell that is flat, or that the cutoff
    reaches over more than 500 times. Deterministic; no derivative.

    >>> import tiga, torch
    >>> [t.tolist() for t in torch.ops.tiga.radius_periodic(torch.tensor([[0.0], [1.0]]), 1.0, torch.tensor([[3.0]]))]
    [[0, 1, 2], [1, 0], [[0], [0]]]
    """
    return periodic.periodic_edges(positions, cutoff, cell, batch, loop, max_neighbors)


def _knn_fake(positions: Tensor, k: Any, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    neighbours.check_points(positions, batch, "Graph.knn")
    nodes = positions.shape[0]
    if batch is None:
        return _listed(positions, nodes * torch.sym_min(k, torch.sym_max(nodes - 1, 0)))
    # samples of a batch may have fewer than k others
    return _listed(positions, torch.library.get_ctx().new_dynamic_size())


@declare("knn(Tensor positions, SymInt k, Tensor? batch=None) -> (Tensor rowptr, Tensor col)", _knn_fake)
def knn(positions: Tensor, k: int, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """{(i, j): j is one of the k nearest to i, other than i, of its batch}, as CSR by destination, ordered by (i, j).

    Shapes, dtypes and errors of radius. Of nodes equally near the lower is taken; a sample of at most k nodes gives
    fewer. Deterministic; no derivative.

    >>> import tiga, torch
    >>> [t.tolist() for t in torch.ops.tiga.knn(torch.tensor([[0.0], [1.0], [3.0]]), 1)]
    [[0, 1, 2, 3], [1, 0, 1]]
    """
    return neighbours.knn_edges(positions, k, batch)
