"""Small modules and one graph of each kind, shared by the tests of the compiler, export and function transforms."""

from __future__ import annotations

import torch
from torch import Tensor

import tiga as tg

SIZE = 6
KINDS = ("dense", "triangular", "window", "blocks", "intervals", "csr")


def graph_of(kind: str, n: int = SIZE) -> tg.Graph:
    """A graph of n destinations and n sources."""
    row = torch.arange(n)
    makers = {
        "dense": lambda: tg.Graph.dense(n),
        "triangular": lambda: tg.Graph.triangular(n),
        "window": lambda: tg.Graph.window(n, 2, 1),
        "blocks": lambda: tg.Graph.cu_seqlens(torch.tensor([0, n // 2, n])),
        "intervals": lambda: tg.Graph.intervals(row // 2, row + 1, n),
        "csr": lambda: tg.Graph.from_edge_index(torch.stack([(7 * row) % n, (row + 3) % n]), num_src=n, num_dst=n),
    }
    return makers[kind]()


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale=0.5):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def attend(program: tg.MessagePassing, graph: tg.Graph, query: Tensor, key: Tensor, value: Tensor, **uniform) -> Tensor:
    return program(graph=graph, src={"key": key, "value": value}, dst={"query": query}, **uniform)


def plain_attention(mask: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float = 0.5) -> Tensor:
    """Dense attention in plain torch; a row without sources gives 0."""
    score = torch.einsum("ihd,jhd->hij", query, key) * scale
    weight = score.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0)
    return torch.einsum("hij,jhd->ihd", torch.where(mask.any(-1)[:, None], weight, 0), value)


def fields(
    n: int = SIZE, heads: int = 2, width: int = 4, dtype: torch.dtype = torch.float32, grad: bool = False
) -> list[Tensor]:
    """Query, key and value."""
    return [torch.randn(n, heads, width, dtype=dtype, requires_grad=grad) for _ in range(3)]


def edge_list(num_edges: int, n: int = SIZE) -> Tensor:
    """Sources and destinations, the latter unsorted from two edges on, with repetitions from a few on."""
    e = torch.arange(num_edges)
    return torch.stack([(5 * e * e + 1) % n, (-e - 1) % n])


INSIDE = ("dense", "triangular", "window", "cat", "blocks", "intervals", "edge_index", "csr", "reverse")


def made_inside(
    kind: str, n: int, boundaries: Tensor, start: Tensor, stop: Tensor, edges: Tensor, rowptr: Tensor, col: Tensor
) -> tg.Graph:
    """A graph of n nodes from tensors that a traced function was given."""
    makers = {
        "dense": lambda: tg.Graph.dense(n),
        "triangular": lambda: tg.Graph.triangular(n),
        "window": lambda: tg.Graph.window(n, 2, 1),
        "cat": lambda: tg.Graph.cat([tg.Graph.triangular(n - 2), tg.Graph.dense(2)]),
        "blocks": lambda: tg.Graph.cu_seqlens(boundaries, num_dst=n, num_src=n),
        "intervals": lambda: tg.Graph.intervals(start, stop, n),
        "edge_index": lambda: tg.Graph.from_edge_index(edges, num_src=n, num_dst=n),
        "csr": lambda: tg.Graph.from_csr(rowptr, col, num_src=n, num_dst=n),
        "reverse": lambda: tg.Graph.triangular(n).reverse(),
    }
    return makers[kind]()


def graph_tensors(n: int, num_edges: int) -> tuple[Tensor, ...]:
    """The tensors of made_inside; no edge stands twice, so that a mask says all."""
    row = torch.arange(n)
    pairs = (torch.arange(num_edges) * 5 + 1) % (n * n)
    pairs = pairs[(7 * torch.arange(num_edges) + 3).argsort(descending=True)]
    src, dst = pairs % n, pairs // n
    order = dst.argsort(stable=True)
    rowptr = torch.searchsorted(dst[order], torch.arange(n + 1))
    return torch.tensor([0, n // 3, n]), row // 2, row + 1, torch.stack([src, dst]), rowptr, src[order]


def mask_inside(kind: str, n: int, tensors: tuple[Tensor, ...]) -> Tensor:
    """What made_inside means, written down a second time as a mask (n destinations, n sources)."""
    boundaries, start, stop, edges = tensors[:4]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    segment = torch.searchsorted(boundaries, torch.arange(n), right=True)
    masks = {
        "dense": lambda: torch.ones(n, n, dtype=torch.bool),
        "triangular": lambda: j <= i,
        "window": lambda: (j >= i - 2) & (j <= i + 1),
        "cat": lambda: ((j <= i) & (i < n - 2)) | ((i >= n - 2) & (j >= n - 2)),
        "blocks": lambda: (segment[:, None] == segment[None]) & (j <= i),
        "intervals": lambda: (j >= start[:, None]) & (j < stop[:, None]),
        "reverse": lambda: j >= i,
    }
    if kind in masks:
        return masks[kind]()
    return torch.zeros(n, n, dtype=torch.bool).index_put((edges[1], edges[0]), torch.tensor(True))


class Rearranged(tg.MessagePassing):
    """Features that do not fill a power of two, in another order, more of them, and fewer."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        key, query = src.x.unflatten(-1, (6, 20)), torch.cat([dst.y, dst.x], -1).unflatten(-1, (6, 20))
        return self.reducer((key * query).sum(-1), torch.cat([key[..., 7:9], edge.z], -1))
