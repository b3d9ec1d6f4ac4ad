"""Neighbour searches by kernels, in at most three dimensions: cells, their order, and the two launches of a search.

Everything stays on the device but one read, of how many edges there are and of what is wrong with the values given;
and before it one of the cells, where there are some: what is known of them here is not asked of every node there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from tiga import neighbours, periodic
from tiga.codegen import device_neighbours as device

RUNS, BLOCK = 16, 32
"""Runs of cells that are found, and candidates that are looked at, together by a warp."""

LONGEST = 512
"""Neighbours of a node that are put in order by comparing each with each; longer lists are sorted."""

PLACE_BITS = 20
KEY_BITS = 62
DIMENSIONS = 3
SAMPLES = 16

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True)
class Grid:
    """Nodes in the order of their cells. places: (3, num_nodes), x: (3, num_nodes), both in that order."""

    keys: Tensor
    nodes: Tensor
    places: Tensor
    x: Tensor
    sizes: Tensor

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return self.keys, self.nodes, self.places, self.x

    @property
    def counts(self) -> tuple[int, int]:
        """Of nodes, and of the steps that halving takes among them."""
        num = self.nodes.shape[0]
        return num, num.bit_length()


@dataclass(frozen=True)
class Boxes:
    """wraps: (num_nodes, 3), boxes between a node and its own; which: its cell; of every cell its bins and rings."""

    wraps: Tensor
    which: Tensor
    bins: Tensor
    rings: Tensor
    cell: Tensor


def radius(
    positions: Tensor, cutoff: float, batch: Tensor | None, loop: bool, max_neighbors: int | None, cell: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As periodic.periodic_edges; without a cell the images are empty."""
    num_nodes, dim = positions.shape
    if num_nodes == 0:
        return _none(positions)
    x, finite = _cleaned(positions)
    wrong = [_first(~finite)]
    system, _ = _systems(batch, num_nodes, x.device)
    boxes = None
    if cell is None:
        reach = _number(_reach(positions, cutoff), x)
        grid = _grid(x, _open_places(x, reach, _most_places(batch)), system)
    else:
        form = periodic.geometry(_padded(cell).cpu())
        periodic.check_cells(form, cell, cutoff)
        grid, boxes = _boxed(x, positions.dtype, form, cell, cutoff, batch, system)
        wrong += _batch_ends(cell, batch)
    unused = torch.empty(0, dtype=torch.int64, device=x.device)
    box = (boxes.wraps, boxes.which, boxes.bins, boxes.rings, boxes.cell) if boxes else (grid.places,) * 4 + (x,)
    limit = _number(neighbours.bound(cutoff, positions.dtype), x)
    fixed = (limit, *grid.arrays, *box, grid.sizes, *grid.counts)
    options = {"LOOP": bool(loop), "DTYPE": TYPES[positions.dtype], "PERIODIC": boxes is not None}
    options |= {"R": RUNS, "BLOCK": BLOCK, "num_warps": 1, "enable_fp_fusion": False}
    counts = torch.empty(num_nodes, dtype=torch.int64, device=x.device)
    with _on(x):
        device.near[(num_nodes,)](counts, unused, unused, *fixed, FILL=False, **options)
    rowptr = F.pad(counts.cumsum(0), (1, 0))
    edges, most, *values = torch.stack([n.to(torch.float64) for n in (rowptr[-1], counts.amax(), *wrong)]).tolist()
    _refuse(positions, cell, values)
    if max_neighbors is not None and most > max_neighbors:
        neighbours.check_most(rowptr, cutoff, max_neighbors)
    found = torch.empty(int(edges), dtype=torch.int64, device=x.device)
    with _on(x):
        device.near[(num_nodes,)](counts, rowptr, found, *fixed, FILL=True, **options)
    return rowptr, *_ordered(found, rowptr, int(most), boxes, dim)


def knn(positions: Tensor, k: int, batch: Tensor | None) -> tuple[Tensor, Tensor]:
    """As neighbours.knn_edges."""
    num_nodes = positions.shape[0]
    if num_nodes == 0 or k == 0:
        rowptr, col, _ = _none(positions)
        return rowptr.new_zeros(num_nodes + 1), col
    x, finite = _cleaned(positions)
    system, others = _systems(batch, num_nodes, x.device)
    wanted = (others - 1).clamp_max(k)
    width = _typical(x, k, batch)
    grid = _grid(x, _open_places(x, width, _most_places(batch)), system)
    rowptr = F.pad(wanted.cumsum(0), (1, 0))
    edges, bad = torch.stack([rowptr[-1], _first(~finite)]).tolist()
    if bad >= 0:
        neighbours.refuse_position(positions, bad, "Graph.knn")
    found = torch.empty(edges, dtype=torch.int64, device=x.device)
    # what lies outside of a ring of cells is farther than the ring is wide, but for rounding
    sure = width * (1 - 1e-5 - 2 * torch.finfo(positions.dtype).eps)
    options = {"DTYPE": TYPES[positions.dtype], "R": RUNS, "BLOCK": BLOCK, "num_warps": 1, "enable_fp_fusion": False}
    farthest = grid.sizes.amax().to(torch.int32)
    with _on(x):
        device.nearest[(num_nodes,)](
            wanted, rowptr, found, sure, farthest, *grid.arrays, grid.sizes, *grid.counts, **options
        )
    return rowptr, _ordered(found, rowptr, k, None, 0)[0]


def _number(value: float, x: Tensor) -> Tensor:
    """Without waiting for the device."""
    return torch.full((), value, dtype=torch.float64, device=x.device)


def _none(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    col = torch.empty(0, dtype=torch.int64, device=positions.device)
    return col.new_zeros(1), col, col.to(torch.int32).reshape(0, positions.shape[1])


def _on(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else torch.no_grad()


def _first(wrong: Tensor) -> Tensor:
    """The first that is wrong, or -1, as a tensor."""
    return torch.where(wrong.any(), wrong.to(torch.int8).argmax(), -1)


def _cleaned(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Three coordinates in float32 or float64, 0 where a node has one that is not finite; which nodes are finite."""
    finite = positions.isfinite().all(1)
    wide = torch.float64 if positions.dtype == torch.float64 else torch.float32
    x = torch.where(finite[:, None], positions, 0).to(wide)
    return F.pad(x, (0, DIMENSIONS - x.shape[1])).contiguous(), finite


def _padded(cell: Tensor) -> Tensor:
    more = DIMENSIONS - cell.shape[-1]
    return F.pad(cell.detach(), (0, more, 0, more))


def _reach(positions: Tensor, cutoff: float) -> float:
    # what a difference rounded in the dtype of positions can bring inside the cutoff
    reach = cutoff * (1 + 1e-5 + 2 * torch.finfo(positions.dtype).eps)
    limits = torch.finfo(torch.float64)
    return max(min(reach, limits.max), limits.tiny)


def _systems(batch: Tensor | None, num_nodes: int, where: torch.device) -> tuple[Tensor, Tensor]:
    """The rank of each node's batch among all, and its number of nodes."""
    if batch is None:
        zeros = torch.zeros(num_nodes, dtype=torch.int64, device=where)
        return zeros, zeros + num_nodes
    ordered, node = batch.sort(stable=True)
    rank = F.pad((ordered[1:] != ordered[:-1]).to(torch.int64).cumsum(0), (1, 0))
    system = torch.empty_like(rank).scatter_(0, node, rank)
    return system, torch.zeros_like(rank).scatter_add_(0, rank, torch.ones_like(rank))[system]


def _open_places(u: Tensor, width: Tensor, most: int) -> Tensor:
    """Cells of coordinates, (num_nodes, 3), from 1, gaps closed to one empty cell; at most `most` in a direction.

    At most 2^32 before gaps are closed, so that a cell is found to 1e-6 of its width.
    """
    u = u.to(torch.float64)
    low, high = u.aminmax(dim=0)
    extent = high - low
    side = torch.maximum(extent / 2**32, width)
    cell = torch.where(extent.isfinite(), (u - low) / side, 0).floor().to(torch.int64).t()
    ordered, node = cell.sort(dim=1)
    place = F.pad(ordered.diff(dim=1).clamp_max(2).cumsum(1), (1, 0)) + 1
    place = torch.empty_like(place).scatter_(1, node, place).t()
    # merged where they are too many: cells that lie side by side still do
    return (place - 1) // (place.amax(0) // most + 1) + 1


def _most_places(batch: Tensor | None) -> int:
    """In a direction, so that a system and three places are a key."""
    bits = PLACE_BITS if batch is None else (KEY_BITS - batch.shape[0].bit_length()) // DIMENSIONS
    return 2 ** min(bits, PLACE_BITS) - 2


def _grid(x: Tensor, place: Tensor, system: Tensor) -> Grid:
    """Nodes in the order of (system, place)."""
    sizes = place.amax(0) + 2
    key = ((system * sizes[0] + place[:, 0]) * sizes[1] + place[:, 1]) * sizes[2] + place[:, 2]
    keys, nodes = key.sort(stable=True)
    return Grid(keys, nodes, place[nodes].t().to(torch.int32).contiguous(), x[nodes].t().contiguous(), sizes)


def _boxed(
    x: Tensor,
    dtype: torch.dtype,
    form: periodic.Geometry,
    cell: Tensor,
    cutoff: float,
    batch: Tensor | None,
    system: Tensor,
) -> tuple[Grid, Boxes]:
    """Bins at most as wide as the reach along each period, and as many to either side as it reaches over.

    form: in the host's memory.
    """
    rows, most = _padded(cell).reshape(-1, DIMENSIONS, DIMENSIONS), _most_places(batch)
    # in 16 bits, far from the origin, a rounding alone could pass what a key holds
    passed = (periodic.MOST_IMAGES + 1) / max(float(form.thin.amax()), torch.finfo(torch.float64).tiny)
    reach = periodic.margin(x, dtype, rows, cutoff).clamp_max(passed)
    dual, period, thin = (t.to(x.device, non_blocking=True) for t in (form.dual, form.periodic, form.thin))
    bins = (1 / (thin * reach)).floor().clamp(1, most)
    rings = torch.where(period, (thin * reach * bins).ceil().clamp_min(1), 1)
    which = periodic.cell_of(cell, batch, x.shape[0])
    many = slice(None) if len(rows) == 1 else which  # one cell is all nodes'
    along = (dual[many] * x.to(torch.float64)[:, None]).sum(-1)
    if form.periodic.all():
        wrap = along.floor()
        place = ((along - wrap) * bins[many]).floor().clamp_min(0)
    else:
        wrap = torch.where(period[many], along.floor(), 0)
        beside = torch.where(period[many], 0, along)
        beside = _open_places(beside, reach.clamp_min(torch.finfo(torch.float64).tiny), most)
        place = torch.where(period[many], ((along - wrap) * bins[many]).floor().clamp_min(0), beside)
    # no bin of an open direction is in another image
    place = torch.where(period[many], torch.minimum(place, bins[many] - 1), place).to(torch.int64)
    bins = torch.where(period, bins, 2**PLACE_BITS)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    wraps, which, bins, rings = (
        t.to(torch.int32).contiguous() for t in (wrap.clamp(-(2.0**30), 2.0**30), which, bins, rings)
    )
    return _grid(x, place, system), Boxes(wraps, which, bins, rings, rows.to(dtype).to(wide).contiguous())


def _batch_ends(cell: Tensor, batch: Tensor | None) -> list[Tensor]:
    return list(batch.aminmax()) if batch is not None and cell.dim() == 3 else []


def _refuse(positions: Tensor, cell: Any, values: list[float]) -> None:
    """Raises for what the read showed to be wrong."""
    bad, *ends = values
    if bad >= 0:
        neighbours.refuse_position(positions, int(bad), periodic.ASKED)
    if ends and (ends[0] < 0 or ends[1] >= cell.shape[0]):
        periodic.refuse_batch(int(ends[0]), int(ends[1]), cell.shape[0])


def _ordered(found: Tensor, rowptr: Tensor, most: int, boxes: Boxes | None, dim: int) -> tuple[Tensor, Tensor]:
    """(col, image) of the keys of each row, from the least to the greatest."""
    num_nodes, edges = rowptr.shape[0] - 1, found.shape[0]
    col = torch.empty_like(found)
    image = torch.empty(edges if boxes else 0, DIMENSIONS, dtype=torch.int32, device=found.device)
    if most > LONGEST:
        dst = torch.repeat_interleave(torch.arange(num_nodes, device=found.device), rowptr.diff(), output_size=edges)
        order = found.argsort(stable=True)
        order = order[dst[order].argsort(stable=True)]
        found = found[order]
        col = found >> 30
        if boxes:
            bits = torch.stack([found >> 20, found >> 10, found], 1) & 1023
            image = (bits - device.IMAGES.value + boxes.wraps[dst] - boxes.wraps[col]).to(torch.int32)
        return col, image[:, :dim].contiguous()
    if edges:
        with _on(found):
            device.order[(num_nodes,)](
                found, rowptr, col, image, boxes.wraps if boxes else rowptr, PERIODIC=boxes is not None, BLOCK=64,
                OTHERS=16, num_warps=1,
            )  # fmt: skip
    return col, image[:, :dim].contiguous()


def _typical(x: Tensor, k: int, batch: Tensor | None) -> Tensor:
    """A radius that holds the k nearest of most nodes, by a sample."""
    num_nodes = x.shape[0]
    some = torch.arange(0, num_nodes, max(num_nodes // SAMPLES, 1), device=x.device)
    apart = (x.to(torch.float64) - x[some, None].to(torch.float64)).square().sum(-1)
    if batch is not None:
        apart = apart.masked_fill(batch != batch[some, None], torch.inf)
    kth = apart.kthvalue(min(k + 1, num_nodes), dim=1)[0]
    kth = torch.where(kth.isfinite(), kth, apart.masked_fill(apart.isinf(), 0).amax(1))
    low, high = x.to(torch.float64).aminmax(dim=0)
    least = (high - low).amax() * 2.0**-32 + torch.finfo(torch.float64).tiny
    return torch.maximum(1.25 * kth.median().sqrt(), least)
