"""What a user would write on lists of edges today: gather, work on every edge, segment softmax, scatter.

PyG's softmax and scatter where it is installed, torch's own operations else. And the published kernel of one layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ANEMOI = Path(".peers/anemoi/gt.py")
"""models/src/anemoi/models/triton/gt.py of github.com/ecmwf/anemoi-core, put there by whoever measures."""


@dataclass(frozen=True)
class Edges:
    """Edge src[e] -> dst[e], and how their values are weighed and summed by destination."""

    src: Tensor
    dst: Tensor
    num_dst: int
    softmax: Callable[[Tensor, Tensor, int], Tensor]
    scatter: Callable[[Tensor, Tensor, int], Tensor]

    def total(self, value: Tensor) -> Tensor:
        return self.scatter(value, self.dst, self.num_dst)

    def attend(self, score: Tensor, value: Tensor) -> Tensor:
        weight = self.softmax(score, self.dst, self.num_dst)
        return self.total(weight.reshape(*weight.shape, *[1] * (value.dim() - weight.dim())) * value)


def plain_scatter(value: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    return value.new_zeros(num_dst, *value.shape[1:]).index_add(0, dst, value)


def plain_softmax(score: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    where = dst.reshape(-1, *[1] * (score.dim() - 1)).expand_as(score)
    peak = score.new_full((num_dst, *score.shape[1:]), -torch.inf).scatter_reduce(0, where, score.detach(), "amax")
    weight = (score - peak[dst]).exp()
    return weight / plain_scatter(weight, dst, num_dst)[dst]


def has_pyg() -> bool:
    return importlib.util.find_spec("torch_geometric") is not None


def edges(src: Tensor, dst: Tensor, num_dst: int, exact: bool = False) -> Edges:
    """exact: by torch's own operations, as the reference is computed."""
    if exact or not has_pyg():
        return Edges(src, dst, num_dst, plain_softmax, plain_scatter)
    from torch_geometric.utils import scatter, softmax

    return Edges(
        src,
        dst,
        num_dst,
        lambda score, where, rows: softmax(score, where, num_nodes=rows),
        lambda value, where, rows: scatter(value, where, 0, rows, reduce="sum"),
    )


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, dynamic=False)


def anemoi(src: Tensor, dst: Tensor, num_nodes: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """ECMWF's graph-transformer kernel: of (query, key, value, projected edge attributes), edges by destination."""
    if not ANEMOI.exists():
        raise FileNotFoundError(f"{ANEMOI} is not there")
    spec = importlib.util.spec_from_file_location("anemoi_gt", ANEMOI)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = torch.arange(num_nodes + 1, device=src.device)
    colptr, (by_src, number) = torch.searchsorted(dst, rows), src.sort(stable=True)
    rowptr = torch.searchsorted(by_src, rows)
    run = module.graph_transformer_attention
    return lambda q, k, v, e: run(q, k, v, e, src, colptr, rowptr, number, dst)[0]
