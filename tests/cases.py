"""The small CASES that every path is tested on: a relation, an edge function, and its fields.

`case.edges()` is written from the relation's definition, a boolean mask by formula or a list, and never asks
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, leaky_relu, linear

import tiga as tg


@dataclass(frozen=True)
class Relation:
    graph: Callable[[], tg.Graph]
    num_dst: int
    num_src: int
    pairs: Callable[
        [], Any
    ]  # a mask (num_dst, num_src), numbered by destination, then source; or [(src, dst), ...] in order

    def edges(self) -> oracle.Edges:
        found = self.pairs()
        if isinstance(found, Tensor):
            dst, src = found.nonzero().unbind(1)
        else:
            src, dst = torch.tensor(found, dtype=torch.long).reshape(-1, 2).unbind(1)
        return oracle.Edges(src, dst, self.num_src, self.num_dst)


def near(num_dst: int, num_src: int, low: int, high: int) -> Tensor:
    """i + low <= j <= i + high."""
    apart = torch.arange(num_src)[None] - torch.arange(num_dst)[:, None]
    return (apart >= low) & (apart <= high)


def between(starts: list, stops: list, num_src: int) -> Tensor:
    j = torch.arange(num_src)[None]
    return (j >= torch.tensor(starts)[:, None]) & (j < torch.tensor(stops)[:, None])


def listed(pairs: list, num_src: int, num_dst: int, dtype: torch.dtype = torch.int64) -> Relation:
    return Relation(
        lambda: tg.Graph.from_edge_index(torch.tensor(pairs, dtype=dtype).reshape(-1, 2).t(), num_src, num_dst),
        num_dst,
        num_src,
        lambda: pairs,
    )


def by_csr(rowptr: list, col: list, num_src: int, dtype: torch.dtype) -> Relation:
    pairs = [(j, i) for i in range(len(rowptr) - 1) for j in col[rowptr[i] : rowptr[i + 1]]]
    return Relation(
        lambda: tg.Graph.from_csr(torch.tensor(rowptr, dtype=dtype), torch.tensor(col, dtype=dtype), num_src),
        len(rowptr) - 1,
        num_src,
        lambda: pairs,
    )


HUB = [(e % 7, 3) for e in range(4097)] + [(6 - i % 7, i) for i in range(9) if i != 3]
MIXED = [
    (3, 1),
    (0, 4),
    (2, 1),
    (0, 0),
    (3, 1),
    (1, 4),
    (0, 0),
    (4, 3),
    (1, 1),
]  # unsorted; 3 -> 1 and 0 -> 0 twice, self loops, 2 has none

RELATIONS = {
    "dense": Relation(lambda: tg.Graph.dense(4), 4, 4, lambda: torch.ones(4, 4).bool()),
    "dense 3x5": Relation(lambda: tg.Graph.dense(3, 5), 3, 5, lambda: torch.ones(3, 5).bool()),
    "dense 0": Relation(lambda: tg.Graph.dense(0), 0, 0, lambda: torch.ones(0, 0).bool()),
    "dense 3x0": Relation(lambda: tg.Graph.dense(3, 0), 3, 0, lambda: torch.ones(3, 0).bool()),
    "dense 0x3": Relation(lambda: tg.Graph.dense(0, 3), 0, 3, lambda: torch.ones(0, 3).bool()),
    "triangular": Relation(lambda: tg.Graph.triangular(5), 5, 5, lambda: torch.ones(5, 5).bool().tril()),
    "triangular 1": Relation(lambda: tg.Graph.triangular(1), 1, 1, lambda: torch.ones(1, 1).bool()),
    "triangular 3x5": Relation(
        lambda: tg.Graph.triangular(3, 5, offset=2), 3, 5, lambda: torch.ones(3, 5).bool().tril(2)
    ),
    "triangular shifted": Relation(
        lambda: tg.Graph.triangular(4, offset=-1), 4, 4, lambda: torch.ones(4, 4).bool().tril(-1)
    ),
    "window": Relation(lambda: tg.Graph.window(6, 2, 1), 6, 6, lambda: near(6, 6, -2, 1)),
    "window 3x6": Relation(lambda: tg.Graph.window(3, 1, 0, num_src=6, offset=3), 3, 6, lambda: near(3, 6, 2, 3)),
    "segments": Relation(
        lambda: tg.Graph.cu_seqlens(torch.tensor([0, 0, 2, 2, 5], dtype=torch.int32)),
        5,
        5,
        lambda: torch.block_diag(torch.ones(2, 2).tril(), torch.ones(3, 3).tril()).bool(),
    ),
    "segments full": Relation(
        lambda: tg.Graph.cu_seqlens([0, 1, 3], causal=False, src_boundaries=[0, 2, 3]),
        3,
        3,
        lambda: torch.block_diag(torch.ones(1, 2), torch.ones(2, 1)).bool(),
    ),
    "cat": Relation(
        lambda: tg.Graph.cat([tg.Graph.triangular(3), tg.Graph.dense(1, 2), tg.Graph.window(2, 1)]),
        6,
        7,
        lambda: torch.block_diag(torch.ones(3, 3).tril(), torch.ones(1, 2), torch.ones(2, 2).tril()).bool(),
    ),
    "intervals": Relation(
        lambda: tg.Graph.intervals(torch.tensor([0, 2, 3]), torch.tensor([4, 2, 5]), 5),
        3,
        5,
        lambda: between([0, 2, 3], [4, 2, 5], 5),
    ),
    "two intervals": Relation(
        lambda: tg.Graph.intervals([0, 0, 0, 1], [0, 1, 2, 2], 5, [1, 3, 2, 2], [3, 5, 2, 5]),
        4,
        5,
        lambda: between([0, 0, 0, 1], [0, 1, 2, 2], 5) | between([1, 3, 2, 2], [3, 5, 2, 5], 5),
    ),
    "mixed": listed(MIXED, 5, 5),
    "mixed int32": listed(MIXED, 6, 5, torch.int32),
    "no edges": listed([], 3, 2),
    "hub": listed(HUB, 7, 9),
    "csr": by_csr([0, 2, 2, 5], [3, 0, 1, 1, 2], 4, torch.int64),
    "csr int32": by_csr([0, 0, 3, 4], [2, 0, 1, 3], 4, torch.int32),
    "reversed triangular": Relation(
        lambda: tg.Graph.triangular(4).reverse(), 4, 4, lambda: [(i, j) for i in range(4) for j in range(i + 1)]
    ),
    "reversed intervals": Relation(
        lambda: tg.Graph.intervals([0, 1, 0], [2, 4, 0], 4).reverse(),
        4,
        3,
        lambda: [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3)],
    ),
    "reversed mixed": Relation(
        lambda: tg.Graph.from_edge_index(torch.tensor(MIXED).t(), 5, 5).reverse(),
        5,
        5,
        lambda: [(j, i) for i, j in MIXED],
    ),
}


# Edge functions: written so that ordinary tensors, with equal ranks, give the same meaning.


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(dim=-1) * scale, src.value)


class Capped(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(-1) * scale
        return self.reducer(torch.tanh(score / 30) * 30, src.value)


class AttentionLse(tg.MessagePassing):
    reducer = tg.online_softmax(return_lse=True)

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(dim=-1) * scale, src.value)


class Bias(tg.MessagePassing):
    """A softcap, a bias an edge, and one more an edge's kind from a table."""

    reducer = tg.online_softmax()

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(6.0).reshape(3, 2).sin())

    def edge(self, src, dst, edge, cap):
        score = (src.key * dst.query).sum(-1)
        return self.reducer(cap * (score / cap).tanh() + edge.bias + embedding(edge.kind, self.table), src.value)


class Alibi(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, slope):
        return self.reducer((src.key * dst.query).sum(-1) + (src.pos - dst.pos)[:, None] * slope, src.value)


class EdgeScore(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer(edge.score, src.value)


class NetScore(tg.MessagePassing):
    """Graph attention: a network's one score an edge, beside a value of several features."""

    reducer = tg.online_softmax()

    def __init__(self) -> None:
        super().__init__()
        self.net = tg.nn.trace(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)))
        with torch.no_grad():
            for n, p in enumerate(self.parameters()):
                p.copy_((torch.arange(p.numel()).reshape(p.shape) + n).cos() / 2)

    def edge(self, src, dst, edge):
        return self.reducer(leaky_relu(self.net(src.x, dst.x), 0.2), src.x)


class Sum(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(src.x)


class Weighted(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * edge.weight[..., None] * dst.y)


class Mean(tg.MessagePassing):
    reducer = tg.mean()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * dst.y)


class Max(tg.MessagePassing):
    reducer = tg.max()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * dst.y)


class Min(tg.MessagePassing):
    reducer = tg.min()

    def edge(self, src, dst, edge):
        return self.reducer(src.x - edge.w)


class Several(tg.MessagePassing):
    """Reducers that share values, in a dictionary."""

    soft, total, mean, most, least = tg.online_softmax(return_lse=True), tg.sum(), tg.mean(), tg.max(), tg.min()

    def edge(self, src, dst, edge):
        message = (src.x * dst.y).sin()
        score = message.sum(-1)
        return {
            "soft": self.soft(score, message),
            "total": self.total(message),
            "mean": self.mean(score),
            "most": self.most(message),
            "least": self.least(message * src.x),
        }


class Edgewise(tg.MessagePassing):
    """A bare edge value."""

    def edge(self, src, dst, edge, scale):
        return (src.key * dst.query).sum(-1) * scale + edge.bias


class Weights(tg.MessagePassing):
    """A second pass: attention weights, and a sum of their squares; they read the lse of the first."""

    soft, total = tg.online_softmax(return_lse=True), tg.sum()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(-1) * scale
        out, lse = self.soft(score, src.value)
        weight = (score - lse).exp()
        return out, weight, self.total(weight * weight)


class Epilogue(tg.MessagePassing):
    """Node work before and after the fold."""

    reducer = tg.sum()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3).cos())

    def edge(self, src, dst, edge, gain):
        message = linear(src.x, self.weight) * dst.y.sigmoid()
        return layer_norm(self.reducer(message) * dst.y, (4,)) * gain + dst.y


class Quartic(tg.MessagePassing):
    """No operand on the edge but positions: an energy."""

    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer((src.p - dst.p).square().sum(-1).square())


class Numbered(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * edge.number[:, None])


class Geometric(tg.Reducer):
    """A user's own: the product of one value and the sum of another, one by the other."""

    identity = (1.0, 0.0)

    def lift(self, x, y):
        return x, y.exp()

    def combine(self, a, b):
        return a[0] * b[0], a[1] + b[1]

    def finalize(self, state):
        return state[0] / (state[1] + 1)


class Own(tg.MessagePassing):
    reducer = Geometric()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * dst.y, edge.w)


# Cases.


@dataclass(frozen=True)
class Case:
    """fields: place -> name -> feature sizes (of the dtype asked for), or a function of the rows giving integers."""

    name: str
    relation: str
    module: Callable[[], tg.MessagePassing]
    fields: dict
    uniform: dict = field(default_factory=dict)
    places: tuple[str, ...] = ("dst",)
    small: bool = True  # whether finite differences of it are cheap

    def __str__(self) -> str:
        return self.name

    @property
    def graph(self) -> tg.Graph:
        return RELATIONS[self.relation].graph()

    def edges(self) -> oracle.Edges:
        return RELATIONS[self.relation].edges()

    def arguments(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict:
        """src, dst, edge and uniform arguments; the floating tensors require gradients."""
        e, draw = self.edges(), torch.Generator().manual_seed(seed)
        rows = {"src": (e.num_src,), "dst": (e.num_dst,), "edge": (e.num_edges,), "uniform": ()}

        def tensor(place: str, what: Any) -> Any:
            if callable(what):
                return what(*rows[place])
            if isinstance(what, tuple):
                return (
                    torch.randn((*rows[place], *what), generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
                )
            return what

        return {
            place: {
                name: tensor(place, what)
                for name, what in (self.uniform if place == "uniform" else self.fields.get(place, {})).items()
            }
            for place in ("src", "dst", "edge", "uniform")
        }

    def build(self, dtype: torch.dtype = torch.float32) -> tg.MessagePassing:
        return self.module().to(dtype)

    def run(self, module: tg.MessagePassing, arguments: dict, graph: Any = None) -> list:
        """tiga's outputs, as a list."""
        a = arguments
        return oracle.flat(
            module(
                graph=self.graph if graph is None else graph, src=a["src"], dst=a["dst"], edge=a["edge"], **a["uniform"]
            )
        )

    def oracle(self, module: tg.MessagePassing, arguments: dict) -> list:
        return oracle.message_passing(module, self.edges(), self.places, **arguments)

    def lower(self, module: tg.MessagePassing, arguments: dict) -> Any:
        a = arguments
        return module.lower(self.graph, src=a["src"], dst=a["dst"], edge=a["edge"], **a["uniform"])


def tensors(arguments: dict, module: Any = None) -> list[Tensor]:
    """What can be differentiated: floating fields and uniform tensors, then the module's parameters."""
    found = [
        x for place in arguments.values() for x in place.values() if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return found + (list(module.parameters()) if module is not None else [])


def replaced(arguments: dict, values: list[Tensor]) -> dict:
    """The arguments with other floating tensors, in the order of `tensors`."""
    rest = iter(values)
    return {
        place: {
            name: next(rest) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in fields.items()
        }
        for place, fields in arguments.items()
    }


def qkv(query: tuple, key: tuple, value: tuple) -> dict:
    return {"src": {"key": key, "value": value}, "dst": {"query": query}}


def counted(dtype: torch.dtype, modulus: int) -> Callable[[int], Tensor]:
    return lambda rows: (torch.arange(rows) * 5 % modulus).to(dtype)


SMALL = qkv((2, 3), (2, 3), (2, 2))
XY = {"src": {"x": (2, 3)}, "dst": {"y": (2, 3)}}
NARROW = {"src": {"x": (2, 1)}, "dst": {"y": (1, 3)}}

CASES = [
    *[
        Case(f"attention, {r}", r, Attention, SMALL, {"scale": 0.7})
        for r in RELATIONS
        if r not in ("hub", "mixed", "segments")
    ],
    Case("attention, hub", "hub", Attention, qkv((1, 3), (1, 3), (1, 3)), {"scale": 0.7}, small=False),
    Case("attention, one head dimension", "triangular", Attention, qkv((3,), (3,), (2,)), {"scale": 0.5}),
    Case("attention, size 1", "dense 3x5", Attention, qkv((1, 1), (1, 1), (1, 1)), {"scale": 1.5}),
    Case("attention, size 64", "triangular", Attention, qkv((2, 64), (2, 64), (2, 64)), {"scale": 0.125}, small=False),
    Case("attention, size 80", "window", Attention, qkv((1, 80), (1, 80), (1, 80)), {"scale": 0.125}, small=False),
    Case("attention, grouped queries", "triangular", Attention, qkv((2, 3, 2), (2, 1, 2), (2, 1, 2)), {"scale": 0.7}),
    Case("attention, broadcast both ways", "mixed", Attention, qkv((2, 1, 3), (1, 2, 3), (2, 2, 2)), {"scale": 0.7}),
    Case("attention, tensor scale", "mixed", Attention, SMALL, {"scale": ()}),
    Case("attention, scale a head", "segments", Attention, SMALL, {"scale": (2,)}),
    Case("attention with lse, triangular", "triangular", AttentionLse, SMALL, {"scale": 0.7}, ("dst", "dst")),
    Case("attention with lse, mixed", "mixed", AttentionLse, SMALL, {"scale": 0.7}, ("dst", "dst")),
    *[
        Case(
            f"bias and table, {r}",
            r,
            Bias,
            {**qkv((2, 3), (2, 3), (2, 2)), "edge": {"bias": (2,), "kind": counted(dtype, 3)}},
            {"cap": 2.0},
        )
        for r, dtype in (
            ("triangular", torch.int64),
            ("segments", torch.int32),
            ("mixed", torch.int64),
            ("reversed intervals", torch.int32),
        )
    ],
    Case(
        "alibi",
        "triangular",
        Alibi,
        {
            "src": {"key": (2, 3), "value": (2, 2), "pos": counted(torch.int64, 7)},
            "dst": {"query": (2, 3), "pos": counted(torch.int64, 7)},
        },
        {"slope": 0.5},
    ),
    Case("score an edge, broadcast heads", "mixed", EdgeScore, {"src": {"value": (3, 2)}, "edge": {"score": (1,)}}),
    Case(
        "score an edge, every feature",
        "two intervals",
        EdgeScore,
        {"src": {"value": (3, 2)}, "edge": {"score": (3, 2)}},
    ),
    Case("score an edge, no feature", "csr", EdgeScore, {"src": {"value": (3,)}, "edge": {"score": ()}}),
    Case("network score, mixed", "mixed", NetScore, {"src": {"x": (3,)}, "dst": {"x": (3,)}}),
    Case("network score, triangular", "triangular", NetScore, {"src": {"x": (3,)}, "dst": {"x": (3,)}}),
    *[Case(f"sum, {r}", r, Sum, {"src": {"x": (3,)}}) for r in ("dense 3x5", "mixed", "no edges", "intervals", "cat")],
    Case("sum, no features", "window", Sum, {"src": {"x": ()}}),
    Case("sum, hub", "hub", Sum, {"src": {"x": (3,)}}, small=False),
    *[
        Case(f"weighted sum, {r}", r, Weighted, {**XY, "edge": {"weight": (2,)}})
        for r in (
            "dense",
            "triangular shifted",
            "window 3x6",
            "segments full",
            "two intervals",
            "csr int32",
            "reversed mixed",
            "reversed triangular",
        )
    ],
    Case("weighted sum, broadcast", "mixed", Weighted, {**NARROW, "edge": {"weight": (1,)}}),
    *[
        Case(f"{m.__name__.lower()}, {r}", r, m, fields, small=r != "hub")
        for m, fields in ((Mean, NARROW), (Max, XY), (Min, {"src": {"x": (3,)}, "edge": {"w": (1,)}}))
        for r in ("mixed", "triangular", "intervals", "no edges", "hub")
    ],
    *[
        Case(f"several reducers, {r}", r, Several, NARROW, {}, ("dst",) * 6)
        for r in ("mixed", "segments", "reversed intervals")
    ],
    *[
        Case(
            f"edge value, {r}",
            r,
            Edgewise,
            {"src": {"key": (2, 3)}, "dst": {"query": (2, 3)}, "edge": {"bias": (2,)}},
            {"scale": 0.5},
            ("edge",),
        )
        for r in ("mixed", "segments", "reversed triangular", "no edges")
    ],
    *[
        Case(f"second pass, {r}", r, Weights, SMALL, {"scale": 0.5}, ("dst", "edge", "dst"))
        for r in ("mixed", "two intervals")
    ],
    *[
        Case(f"epilogue, {r}", r, Epilogue, {"src": {"x": (3,)}, "dst": {"y": (4,)}}, {"gain": (4,)})
        for r in ("mixed", "triangular 3x5")
    ],
    *[Case(f"energy, {r}", r, Quartic, {"src": {"p": (3,)}, "dst": {"p": (3,)}}) for r in ("mixed", "window")],
    *[
        Case(f"a user's reducer, {r}", r, Own, {"src": {"x": (2, 1)}, "dst": {"y": (1, 3)}, "edge": {"w": (2, 3)}})
        for r in ("mixed", "segments", "reversed intervals")
    ],
    *[
        Case(f"edge numbers, {r}", r, Numbered, {"src": {"x": (2,)}})
        for r in ("mixed", "triangular", "cat", "reversed intervals", "two intervals")
    ],
]
