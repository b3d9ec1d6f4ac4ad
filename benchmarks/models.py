"""Small models written once, with the part that tiga or a peer computes left open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiga as tg


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src: Any, dst: Any, edge: Any, scale: float) -> Any:
        return self.reducer((src.key * dst.query).sum(dim=-1) * scale, src.value)


class Gatv2(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src: Any, dst: Any, edge: Any, att: Tensor) -> Any:
        return self.reducer((F.leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


class EdgeNetwork(tg.MessagePassing):
    reducer = tg.online_softmax()

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = tg.nn.trace(network)

    def edge(self, src: Any, dst: Any, edge: Any) -> Any:
        return self.reducer(self.network(src.x, dst.x).squeeze(-1), src.h)


class Block(nn.Module):
    """x + out(gate * attention(rotary(norm(q)), rotary(norm(k)), v)) of rows (tokens, width), packed one after another.

    attend: (q, k, v) -> result, all (tokens, heads, width of a head).
    """

    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm = nn.RMSNorm(width)
        self.norm_q, self.norm_k = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.project, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.project(y).view(len(x), 3, self.heads, -1).unbind(1)
        out = self.attend(turned(self.norm_q(q), cos, sin), turned(self.norm_k(k), cos, sin), v)
        return x + self.out(out.reshape(x.shape) * self.gate(y).sigmoid())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: (tokens, heads, width) by angles (tokens, 1, width)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def angles(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device) / width)
    turns = (positions[:, None] * rates).repeat(1, 2)[:, None]
    return turns.cos().to(dtype), turns.sin().to(dtype)


class Layers(nn.Module):
    """Two layers over listed edges: project, mix the projections of sources and destinations, bias, elu."""

    def __init__(self, width: int, heads: int, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.mix = heads, mix
        for name, shape in (("left", (width, width)), ("right", (width, width)), ("att", (heads, width // heads))):
            for k in range(2):
                self.register_parameter(f"{name}{k}", nn.Parameter(torch.randn(shape) * width**-0.5))
        self.bias = nn.Parameter(torch.zeros(2, width))

    def forward(self, x: Tensor) -> Tensor:
        for k in range(2):
            left, right = (
                (x @ self.get_parameter(f"{name}{k}")).view(len(x), self.heads, -1) for name in ("left", "right")
            )
            x = F.elu(self.mix(left, right, self.get_parameter(f"att{k}")).flatten(1) + self.bias[k])
        return x


class EdgeModel(nn.Module):
    """Attention whose score is a network of both ends: relu(linear(x)) + mix(x, h, network)."""

    def __init__(self, width: int, hidden: int, make: Callable[[nn.Module], Callable[..., Tensor]]) -> None:
        super().__init__()
        network = nn.Sequential(nn.Linear(2 * width, hidden), nn.ReLU(), nn.Linear(hidden, 1, bias=False))
        self.network, self.value, self.skip = network, nn.Linear(width, width), nn.Linear(width, width)
        self.mix = make(network)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x)) + self.mix(x, self.value(x))


def segment_softmax(score: Tensor, value: Tensor, dst: Tensor, rows: int) -> Tensor:
    """Plain torch: softmax over each row's edges of scores (edges, *heads), then the weighted sum of values."""
    peak = score.new_full((rows, *score.shape[1:]), -torch.inf)
    peak = peak.index_reduce(0, dst, score.detach(), "amax")
    weight = (score - peak[dst]).exp()
    total = torch.zeros_like(peak).index_add(0, dst, weight)
    weight = weight / total[dst]
    return value.new_zeros(rows, *value.shape[1:]).index_add(0, dst, weight[..., None] * value)
