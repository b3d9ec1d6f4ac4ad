"""Graphs that graph layers are run on, as lists of edges by destination, made of random numbers or of geometry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tiga as tg
from benchmarks.measure import Setting


@dataclass(frozen=True)
class Listed:
    """Edge src[e] -> dst[e], dst ascending; with positions the graph has displacements, of which shift is a part."""

    src: Tensor
    dst: Tensor
    num_nodes: int
    graph: tg.Graph
    positions: Tensor | None = None
    shift: Tensor | None = None


def of_edges(src: Tensor, dst: Tensor, num_nodes: int) -> Listed:
    dst, order = dst.sort(stable=True)
    src = src[order]
    rowptr = torch.searchsorted(dst, torch.arange(num_nodes + 1, device=dst.device))
    return Listed(src, dst, num_nodes, tg.Graph.from_csr(rowptr.int(), src.int(), num_nodes))


def of_graph(graph: tg.Graph, positions: Tensor) -> Listed:
    rowptr, col = graph.tensors[:2]
    rows = torch.arange(graph.num_dst, device=col.device)
    dst = torch.repeat_interleave(rows, rowptr.diff())
    return Listed(col, dst, graph.num_dst, graph, positions, graph.shift)


def _random(setting: Setting) -> torch.Generator:
    return torch.Generator(setting.device).manual_seed(0)


def _rank_law(rows: int, exponent: float, draw: torch.Generator):
    """Draws rows, of which the r-th, in a random order, is as likely as r ** -exponent."""
    weight = torch.arange(1, rows + 1, dtype=torch.float64, device=draw.device) ** -exponent
    total = weight[torch.randperm(rows, generator=draw, device=draw.device)].cumsum(0)
    uniform = lambda count: torch.rand(count, generator=draw, dtype=torch.float64, device=draw.device)
    return lambda count: torch.searchsorted(total, uniform(count) * total[-1]).clamp_max(rows - 1)


def power_law(setting: Setting, nodes: int, edges: int, exponent: float) -> Listed:
    rows = setting.rows(nodes)
    draw = _rank_law(rows, exponent, _random(setting))
    count = edges * rows // nodes
    return of_edges(draw(count), draw(count), rows)


def hub(setting: Setting, nodes: int, edges: int, largest: int) -> Listed:
    """A third of the rows empty, one of `largest` edges, at least one edge in each of the others."""
    rows, random = setting.rows(nodes), _random(setting)
    edges, largest = edges * rows // nodes, largest * rows // nodes
    some = torch.randperm(rows, generator=random, device=setting.device)[: 2 * rows // 3]
    rest = max(edges - largest - len(some) + 1, 0)
    more = some[_rank_law(len(some), 0.4, random)(rest)]
    dst = torch.cat([some[:1].expand(largest), some[1:], more])
    return of_edges(_rank_law(rows, 0.5, random)(len(dst)), dst, rows)


def points(setting: Setting, nodes: int, cutoff: float) -> Listed:
    """Within the cutoff of one another in the unit cube; fewer nodes lie as densely, in a smaller one."""
    rows = setting.rows(nodes)
    positions = torch.rand(rows, 3, generator=_random(setting), device=setting.device) * (rows / nodes) ** (1 / 3)
    positions.requires_grad_()
    return of_graph(tg.Graph.radius(positions, cutoff), positions)


def crystal(setting: Setting, atoms: int, cutoff: float) -> Listed:
    """Copper (face-centred cubic, 3.61 A), its atoms a little off their places, periodic: a box of cubic cells."""
    side = max(round((setting.rows(atoms) / 4) ** (1 / 3)), 1)
    base = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]], device=setting.device) / 2
    cells = torch.cartesian_prod(*[torch.arange(side, device=setting.device)] * 3).reshape(-1, 3)
    positions = 3.61 * (cells[:, None] + base).reshape(-1, 3)
    noise = torch.randn(positions.shape, generator=_random(setting), device=setting.device)
    positions = (positions + 0.05 * noise).requires_grad_()
    return of_graph(
        tg.Graph.radius(positions, cutoff, cell=3.61 * side * torch.eye(3, device=setting.device)), positions
    )


def icosphere(setting: Setting, level: int) -> tuple[Listed, Tensor]:
    """The triangles of a sphere and of all coarser ones, both ways, with (displacement, length) an edge."""
    while 10 * 4**level + 2 > setting.rows(10 * 4**level + 2):
        level -= 1
    golden = (1 + 5**0.5) / 2
    signs = torch.tensor([[s, t] for s in (-1.0, 1.0) for t in (-golden, golden)])
    corners = torch.cat([torch.nn.functional.pad(signs, (1, 0)).roll(k, 1) for k in range(3)])
    edge = torch.cdist(corners, corners).sub(2).abs() < 1e-3
    i, j, k = torch.cartesian_prod(*[torch.arange(12)] * 3).t()
    faces = torch.stack([i, j, k], 1)[(i < j) & (j < k) & edge[i, j] & edge[j, k] & edge[i, k]]
    at, levels = torch.nn.functional.normalize(corners, dim=1), []
    for step in range(level + 1):
        sides = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).sort(1)[0]
        sides, which = sides.unique(dim=0, return_inverse=True)
        levels += [sides, sides.flip(1)]
        if step < level:
            middle = len(at) + which.view(3, -1).t()
            at = torch.cat([at, torch.nn.functional.normalize(at[sides].mean(1), dim=1)])
            (a, b, c), (ab, bc, ca) = faces.t(), middle.t()
            corners_of = [(a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca)]
            faces = torch.cat([torch.stack(corner, 1) for corner in corners_of])
    src, dst = torch.cat(levels).to(setting.device).t()
    listed, at = of_edges(src, dst, len(at)), at.to(setting.device)
    apart = at[listed.src] - at[listed.dst]
    return listed, torch.cat([apart, apart.norm(dim=1, keepdim=True)], 1)
