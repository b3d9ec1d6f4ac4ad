"""Finding neighbours: radius, periodic and nearest, beside torch_cluster and tiga's own torch operations."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Line, Setting, Table, a_call, figure, of_each, peak_mib
from tiga import neighbours, periodic

CHECKED = 256  # nodes whose neighbours are found by measuring all others
Lists = tuple[Tensor, ...]


@dataclass(frozen=True)
class Search:
    """apart: squared distances of some nodes to all; limit: of squared distances; cluster: the peer's call."""

    positions: Tensor
    find: Callable[[], Lists]
    apart: Callable[[Tensor], Tensor]
    limit: float | int
    cluster: Callable[[], Tensor] | None

    def check(self, found: Lists) -> None:
        """Some rows list exactly the nodes within the limit, or the `limit` nearest."""
        rowptr, col = found[:2]
        rows = torch.randperm(len(self.positions), device=col.device)[:CHECKED]
        apart = self.apart(rows)
        apart[torch.arange(len(rows)), rows] = math.inf
        if isinstance(self.limit, int):
            near = torch.zeros_like(apart, dtype=torch.bool).scatter(1, apart.topk(self.limit, largest=False)[1], True)
        else:
            near = apart <= self.limit
        counts = rowptr.diff()[rows]
        place = torch.arange(int(counts.sum()), device=col.device) - (counts.cumsum(0) - counts).repeat_interleave(
            counts
        )
        listed = col[rowptr[rows].repeat_interleave(counts) + place]
        if not torch.equal(near.nonzero()[:, 1], listed) or not torch.equal(near.sum(1), counts):
            raise AssertionError("not the neighbours that measuring every pair finds")


def squared(positions: Tensor, rows: Tensor, side: float = 0.0) -> Tensor:
    """In the dtype given, then in float64; side: of a periodic box."""
    difference = positions - positions[rows, None]
    if side:
        difference = difference - side * (difference / side).round()
    return difference.double().square().sum(-1)


def cloud(setting: Setting, nodes: int, degree: float) -> tuple[Tensor, float]:
    """Nodes in a cube in which a ball of radius 1 holds `degree` of them, and its side."""
    rows = setting.rows(nodes)
    side = (rows / degree * 4 / 3 * math.pi) ** (1 / 3)
    return side * torch.rand(rows, 3, device=setting.device), side


def open_search(nodes: int, setting: Setting) -> Search:
    x, _ = cloud(setting, nodes, 50)
    peer = partial(_cluster("radius_graph"), x, 1.0, max_num_neighbors=1000) if _cluster("radius_graph") else None
    return Search(x, lambda: neighbours.radius_edges(x, 1.0), lambda rows: squared(x, rows), 1.0, peer)


def periodic_search(nodes: int, setting: Setting) -> Search:
    x, side = cloud(setting, nodes, 50)
    cell = side * torch.eye(3, device=x.device)
    cutoff = min(1.0, 0.49 * side)
    find = lambda: periodic.periodic_edges(x, cutoff, cell)
    return Search(x, find, lambda rows: squared(x, rows, side), cutoff**2, None)


def batched_search(samples: int, nodes: int, setting: Setting) -> Search:
    rows = setting.rows(samples * nodes)
    x, of = 3.5 * torch.rand(rows, 3, device=setting.device), torch.arange(rows, device=setting.device) // nodes
    apart = lambda some: squared(x, some).masked_fill(of != of[some, None], math.inf)
    cluster = _cluster("radius_graph")
    peer = partial(cluster, x, 1.0, batch=of, max_num_neighbors=1000) if cluster else None
    return Search(x, lambda: neighbours.radius_edges(x, 1.0, of), apart, 1.0, peer)


def nearest_search(nodes: int, k: int, setting: Setting) -> Search:
    x, _ = cloud(setting, nodes, 50)
    k = min(k, len(x) - 1)
    peer = partial(_cluster("knn_graph"), x, k) if _cluster("knn_graph") else None
    return Search(x, lambda: neighbours.knn_edges(x, k), lambda rows: squared(x, rows), k, peer)


def _cluster(name: str) -> Callable | None:
    if importlib.util.find_spec("torch_cluster") is None:
        return None
    return getattr(importlib.import_module("torch_cluster"), name)


SEARCHES: dict[str, Callable[[Setting], Search]] = {
    "radius, 100k nodes, 50 neighbours": partial(open_search, 100_000),
    "radius, 100k nodes, 50 neighbours, periodic": partial(periodic_search, 100_000),
    "radius, 1000 samples of 64 nodes": partial(batched_search, 1000, 64),
    "nearest 16 of 100k nodes": partial(nearest_search, 100_000, 16),
}


def by_torch(search: Search) -> Lists:
    kept = set(neighbours.KERNEL_DEVICES)
    neighbours.KERNEL_DEVICES.clear()
    try:
        return search.find()
    finally:
        neighbours.KERNEL_DEVICES.update(kept)


def line(setting: Setting, make: Callable[[Setting], Search]) -> Line:
    search = make(setting)
    found = search.find()
    search.check(found)
    runs = {"tiga": search.find, "torch operations": partial(by_torch, search)}
    if search.cluster is not None:
        runs["torch_cluster"] = search.cluster
    calls = {"calls": 10, "batches": 5} if setting.on_gpu else {"calls": 1, "batches": 1}
    timed, why = of_each(runs, lambda name: a_call(runs[name], setting, **calls) / 1000, setting)
    cells = [figure(timed[name]) if name in timed else "" for name in ("tiga", "torch operations", "torch_cluster")]
    return Line((*cells, str(len(found[1])), figure(peak_mib(search.find, setting)), why))


def table(setting: Setting) -> Table:
    says = (
        "float32, milliseconds of a call, host and device, the reading of the number of edges included. Some rows are "
        "checked by measuring all nodes. torch operations: how tiga searches on other devices."
    )
    columns = ("tiga", "torch operations", "torch_cluster", "edges", "peak MiB", "remarks")
    return Table(
        "Neighbours", says, columns, {n: lambda make=make: line(setting, make) for n, make in SEARCHES.items()}
    )
