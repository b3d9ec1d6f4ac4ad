"""Periodic boxes: images of nodes, the search among them in torch operations, and what an image adds to a displacement.

The image n of node j lies at x_j + sum_k n_k a_k, a_k the rows of the cell; a row of zeros is a direction without
period. Candidates are looked for in float64 among nodes moved into their box; an edge is decided by the displacement
that a program computes: (x_j - x_i) + sum_k n_k a_k in the dtype of positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import neighbours
from tiga.errors import TigaError
from tiga.graph_checks import number

ASKED = "Graph.radius"

MOST_IMAGES = 500
"""Boxes that a cutoff may reach over; kernels keep ten bits for the image in each direction."""

FLATTEST = 1e-10
"""Of unit vectors along the rows of a cell, the least squared volume: flatter ones count as dependent."""


@dataclass(frozen=True)
class Geometry:
    """Of every cell. dual: coordinate k of x is <dual[k], x>, which a step along row k raises by 1."""

    dual: Tensor
    """(cells, dim, dim) float64; where row k is no period, a vector at right angles to all periods, of at most 1."""
    periodic: Tensor
    """(cells, dim): whether row k is a period."""
    thin: Tensor
    """(cells, dim): 1 / (distance of the planes x and x + a_k); 0 without period."""
    wrong: Tensor
    """(cells): whether it is not finite or its rows are dependent."""


def check_cell(cell: Any, positions: Tensor, batch: Tensor | None) -> Tensor:
    """(dim, dim) or, with a batch, (samples, dim, dim), floating point, on the device of positions."""
    if not isinstance(cell, Tensor):
        cell = torch.as_tensor(cell, device=positions.device)
        cell = cell if cell.is_floating_point() else cell.to(positions.dtype)
    if not cell.dtype.is_floating_point:
        raise TypeError(f"{ASKED}: cell must be floating point, got {cell.dtype}. Write cell.to(positions.dtype).")
    dim = positions.shape[1]
    if cell.dim() not in (2, 3) or cell.shape[-1] != dim or cell.shape[-2] != dim:
        raise TigaError(
            f"{ASKED}: cell has shape {tuple(cell.shape)}, but positions have {number(dim)} coordinates. Give "
            f"({number(dim)}, {number(dim)}), a row a period (torch.diag(lengths) for a box), or one such for every "
            "sample of the batch."
        )
    if cell.dim() == 3 and batch is None:
        raise TigaError(
            f"{ASKED}: cell holds {number(cell.shape[0])} cells, but there is no batch. Give batch, the number of its "
            "cell for every node, or one cell of two dimensions."
        )
    if cell.device != positions.device:
        raise TigaError(
            f"{ASKED}: positions is on {positions.device}, but cell is on {cell.device}. Move them to one device."
        )
    return cell


def geometry(cell: Tensor) -> Geometry:
    rows = cell.detach().to(torch.float64).reshape(-1, *cell.shape[-2:])
    finite = rows.isfinite().all(-1).all(-1)
    rows = torch.where(finite[:, None, None], rows, 0)
    length = rows.square().sum(-1).sqrt()
    periodic = length > 0
    unit = rows / torch.where(periodic, length, 1)[..., None]
    one = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    gram = (unit[:, :, None] * unit[:, None]).sum(-1) + one * (~periodic)[..., None]
    inverse, failed = torch.linalg.inv_ex(gram)
    wrong = ~finite | (failed != 0) | ~(torch.linalg.det(gram) > FLATTEST)
    dual = (inverse[..., None] * unit[:, None]).sum(2)
    # what is left of the axes at right angles to all periods
    beside = one - (unit[..., None] * dual[:, :, None]).sum(1)
    dual = torch.where(periodic[..., None], dual / torch.where(periodic, length, 1)[..., None], beside)
    dual = torch.where(wrong[:, None, None], one, dual)
    thin = torch.where(periodic, dual.square().sum(-1).sqrt(), 0)
    return Geometry(dual, periodic, thin, wrong)


def cell_of(cell: Tensor, batch: Tensor | None, num_nodes: Any) -> Tensor:
    """The number of its cell for every node; one that does not exist is another, and has_all says so."""
    if cell.dim() == 2 or batch is None:
        return torch.zeros(num_nodes, dtype=torch.int64, device=cell.device)
    return batch.to(torch.int64).clamp(0, max(cell.shape[0] - 1, 0))


def margin(points: Tensor, dtype: torch.dtype, cell: Tensor, cutoff: float) -> Tensor:
    """A reach that no rounding, in the dtype of positions, of a displacement within the cutoff passes."""
    eps = torch.finfo(dtype).eps
    far = points.detach().to(torch.float64).abs().amax() + cell.detach().to(torch.float64).abs().amax()
    return cutoff * (1 + 1e-5 + 2 * eps) + 16 * eps * far


def vectors(image: Tensor, cell: Tensor, dtype: torch.dtype, which: Tensor | None = None) -> Tensor:
    """sum_k image[:, k] cell[k], in the order of k, in `dtype` (16 bits: by way of float32); which: a cell an edge."""
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    rows, n = cell.to(dtype).to(wide), image.to(wide)
    total: Any = 0
    for k in range(image.shape[1]):
        row = rows[..., k, :]
        total = total + n[:, k, None] * (row if which is None else row[which])
    return total.to(dtype)


def shift(rowptr: Tensor, image: Tensor, cell: Tensor, batch: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What edge.displacement is of beside x_j - x_i: (num_edges, dim), differentiable in the cell."""
    if cell.dim() == 2 or batch is None:
        return vectors(image, cell, dtype)
    nodes = cell_of(cell, batch, batch.shape[0])
    return vectors(image, cell, dtype, torch.repeat_interleave(nodes, rowptr.diff(), output_size=image.shape[0]))


def refuse_cell(cell: Tensor, which: int) -> None:
    rows = cell.reshape(-1, *cell.shape[-2:])[which].tolist()
    named = "cell" if cell.dim() == 2 else f"cell {which}"
    raise TigaError(
        f"{ASKED}: {named} is {rows}, whose rows are not finite or not independent. A row is a period; a direction "
        "without one is a row of zeros."
    )


def refuse_thin(cutoff: float, images: float) -> None:
    raise TigaError(
        f"{ASKED}: the cutoff {cutoff} reaches over {images:.3g} periods of a cell, more than {MOST_IMAGES}. "
        "Lower the cutoff, or leave that direction without period."
    )


def refuse_batch(lowest: int, highest: int, cells: int) -> None:
    wrong = lowest if lowest < 0 else highest
    raise TigaError(
        f"{ASKED}: batch has the entry {wrong}, but cell holds {cells} cells. With a cell a sample, batch numbers them "
        f"from 0 to {cells - 1}."
    )


def periodic_edges(
    positions: Tensor,
    cutoff: float,
    cell: Tensor,
    batch: Tensor | None = None,
    loop: bool = False,
    max_neighbors: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """{(i, j, n): |(x_j - x_i) + sum_k n_k a_k| <= cutoff}: (rowptr, col, image [num_edges, dim] int32), by (i, j, n).

    (i, i, 0) only with loop. Otherwise as neighbours.radius_edges.
    """
    batch = neighbours.check_points(positions, batch, ASKED)
    cutoff, cell = neighbours.check_cutoff(cutoff), check_cell(cell, positions, batch)
    if cell.dim() == 3 and cell.shape[0] == 0 and positions.shape[0] > 0:
        raise TigaError(f"{ASKED}: cell holds 0 cells, but there are nodes. Give a cell for every number in batch.")
    kernels = neighbours.kernels(positions)
    if kernels is not None:
        return kernels.radius(positions, cutoff, batch, loop, max_neighbors, cell)
    neighbours.check_finite(positions, ASKED)
    num_nodes, dim = positions.shape
    form = geometry(cell)
    check_cells(form, cell, cutoff)
    if cell.dim() == 3 and batch is not None and batch.numel():
        low, high = (int(end) for end in batch.aminmax())
        if low < 0 or high >= cell.shape[0]:
            refuse_batch(low, high, cell.shape[0])
    if num_nodes == 0:
        empty = torch.zeros(0, dtype=torch.int64, device=positions.device)
        return empty.new_zeros(1), empty, empty.to(torch.int32).reshape(0, dim)
    which = cell_of(cell, batch, num_nodes)
    reach = float(margin(positions, positions.dtype, cell, cutoff))
    points, boxes = positions.to(torch.float64), cell.to(torch.float64).reshape(-1, dim, dim)[which]
    along = (form.dual[which] * points[:, None]).sum(-1)
    wrap = torch.where(form.periodic[which], along.floor(), 0)
    points = points - (wrap[..., None] * boxes).sum(1)
    node, image = _images(along - wrap, form, which, reach)
    ghosts = points[node] + (image[..., None] * boxes[node]).sum(1)
    samples = None if batch is None else torch.cat([batch, batch[node]])
    found: list[tuple[Tensor, ...]] = []
    rows = torch.arange(num_nodes, device=positions.device)
    for dst, ghost, _ in neighbours.pairs(torch.cat([points, ghosts]), reach, samples, rows, loop=True):
        dst, ghost = dst[ghost >= num_nodes], ghost[ghost >= num_nodes] - num_nodes
        src = node[ghost]
        n = (image[ghost] + wrap[dst] - wrap[src]).to(torch.int32)
        added = vectors(n, cell, positions.dtype, None if cell.dim() == 2 else which[dst])
        near = neighbours.squared(positions[src] - positions[dst] + added) <= neighbours.bound(cutoff, positions.dtype)
        if not loop:
            near &= (src != dst) | (n != 0).any(1)
        found.append((dst[near], src[near], n[near]))
    dst, src, n = (torch.cat(part) for part in zip(*found))
    rowptr = torch.searchsorted(dst, torch.arange(num_nodes + 1, device=dst.device))
    neighbours.check_most(rowptr, cutoff, max_neighbors)
    return rowptr, src, n


def check_cells(form: Geometry, cell: Tensor, cutoff: float) -> None:
    """Raises for a cell that is none, and for a cutoff that reaches over too many periods."""
    if form.wrong.any():
        refuse_cell(cell, int(form.wrong.to(torch.int8).argmax()))
    most = float((form.thin * cutoff).nan_to_num(0, math.inf).amax()) if form.thin.numel() else 0.0
    if most > MOST_IMAGES:
        refuse_thin(cutoff, most)


def _images(inside: Tensor, form: Geometry, which: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """(node, image) of all that lie in a box or within reach of it, by (node, image): image as float64."""
    node = torch.arange(len(inside), device=inside.device)
    image = inside.new_zeros(len(inside), 0)
    for k in range(inside.shape[1]):
        at, deep = inside[node, k], form.thin[which, k][node] * reach
        first, last = (-deep - at).ceil(), (1 + deep - at).floor()
        first, last = (torch.where(form.periodic[which, k][node], end, 0) for end in (first, last))
        counts = (last - first + 1).clamp_min(0).to(torch.int64)
        piece = torch.repeat_interleave(torch.arange(len(node), device=node.device), counts)
        rank = torch.arange(len(piece), device=node.device) - (counts.cumsum(0) - counts)[piece]
        image = torch.cat([image[piece], (first[piece] + rank)[:, None]], 1)
        node = node[piece]
    return node, image
