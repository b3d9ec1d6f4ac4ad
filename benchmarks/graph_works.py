"""The programs that are measured on listed graphs: as tiga's edge function, and as plain torch on lists of edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, linear

import tiga as tg
from benchmarks import graph_lists, graph_peers
from benchmarks.graph_lists import Listed
from benchmarks.graph_peers import Edges
from benchmarks.measure import Setting


class GATv2(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


def plain_gatv2(f: dict, e: Edges, net: None) -> Tensor:
    x = f["src.x"][e.src]
    return e.attend((leaky_relu(x + f["dst.x"][e.dst], 0.2) * f["att"]).sum(-1), x)


class Dot(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def plain_dot(f: dict, e: Edges, net: None) -> Tensor:
    score = (f["src.key"][e.src] * f["dst.query"][e.dst]).sum(-1) * f["scale"]
    return e.attend(score, f["src.value"][e.src])


class GraphTransformer(tg.MessagePassing):
    """Keys and values with the edge's attributes, projected on the edge."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, weight, scale):
        added = linear(edge.attributes, weight).unflatten(-1, src.key.shape[1:])
        return self.reducer(((src.key + added) * dst.query).sum(-1) * scale, src.value + added)


def plain_transformer(f: dict, e: Edges, net: None) -> Tensor:
    key, value = f["src.key"][e.src], f["src.value"][e.src]
    added = linear(f["edge.attributes"], f["weight"]).view_as(key)
    return e.attend(((key + added) * f["dst.query"][e.dst]).sum(-1) * f["scale"], value + added)


class EdgeNetwork(tg.MessagePassing):
    reducer = tg.online_softmax()

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = tg.nn.trace(net)

    def edge(self, src, dst, edge):
        return self.reducer(self.net(edge.displacement, src.x, dst.x), src.x)


def displacement(f: dict, e: Edges) -> Tensor:
    apart = f["positions"][e.src] - f["positions"][e.dst]
    return apart + f["edge.shift"] if "edge.shift" in f else apart


def plain_network(f: dict, e: Edges, net: nn.Module) -> Tensor:
    x = f["src.x"][e.src]
    return e.attend(net(torch.cat([displacement(f, e), x, f["dst.x"][e.dst]], -1)), x)


class Morse(tg.MessagePassing):
    """Energy an atom of a pair potential; its gradient are the forces."""

    reducer = tg.sum()

    def edge(self, src, dst, edge):
        bond = torch.exp(1.36 * (2.87 - edge.distance))
        return self.reducer(0.17 * (bond * bond - 2 * bond))


def plain_morse(f: dict, e: Edges, net: None) -> Tensor:
    bond = torch.exp(1.36 * (2.87 - displacement(f, e).norm(dim=-1)))
    return e.total(0.17 * (bond * bond - 2 * bond))


@dataclass(frozen=True)
class Case:
    """fields: by place.name, tensors shared by all edges and numbers by name alone; heads: softmax states a row."""

    listed: Listed
    module: tg.MessagePassing
    plain: Callable[[dict, Edges, nn.Module | None], Tensor]
    fields: dict[str, Tensor | float]
    heads: int
    net: nn.Module | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """What has a gradient: fields in order, then parameters."""
        found = [x for x in self.fields.values() if isinstance(x, Tensor) and x.requires_grad]
        return [*found, *(self.net.parameters() if self.net is not None else ())]

    def tiga(self) -> Tensor:
        places: dict[str, dict] = {"src": {}, "dst": {}, "edge": {}}
        shared = {}
        for name, x in self.fields.items():
            place, dot, key = name.partition(".")
            if dot and name != "edge.shift":
                places[place][key] = x
            elif not dot and name != "positions":
                shared[name] = x
        return self.module(graph=self.listed.graph, **places, **shared)

    def peer(self) -> Callable[[], Tensor]:
        e = graph_peers.edges(self.listed.src, self.listed.dst, self.listed.num_nodes)
        return lambda: self.plain(self.fields, e, self.net)

    def peer_compiled(self) -> Callable[[], Tensor]:
        e = graph_peers.edges(self.listed.src, self.listed.dst, self.listed.num_nodes)
        run = graph_peers.compiled(lambda fields: self.plain(fields, e, self.net))
        return lambda: run(self.fields)

    def reaching(self, rows: Tensor) -> Tensor:
        """The edges whose destination is one of these."""
        chosen = torch.zeros(self.listed.num_nodes, dtype=torch.bool, device=rows.device)
        chosen[rows] = True
        return chosen[self.listed.dst].nonzero()[:, 0]

    def exact(self, rows: Tensor, grad: Tensor) -> list[Tensor]:
        """Results of some rows and all gradients, given those of the rows, in float64, from the edges reaching them."""
        here = self.reaching(rows)

        def wide(name: str, x: Tensor | float) -> Tensor | float:
            if not isinstance(x, Tensor):
                return x
            part = x.detach()[here] if name.startswith("edge.") else x.detach()
            return part.double().requires_grad_(x.requires_grad)

        fields = {name: wide(name, x) for name, x in self.fields.items()}
        net = copy.deepcopy(self.net).double() if self.net is not None else None
        e = graph_peers.edges(self.listed.src[here], self.listed.dst[here], self.listed.num_nodes, exact=True)
        case = replace(self, fields=fields, net=net)
        out = self.plain(fields, e, net)[rows]
        return [out.detach(), *torch.autograd.grad(out, case.leaves, grad.double())]

    def traffic(self, out: Tensor) -> tuple[float, float]:
        """Bytes of forward and backward if every edge reads its far end, and a node its own row once.

        Backward: one pass by destination, one by source, which reads two states a head besides.
        """
        size = lambda place: sum(
            x[0].numel() * x.element_size()
            for name, x in self.fields.items()
            if isinstance(x, Tensor) and name.partition(".")[0] in (place, *(("positions",) if place != "edge" else ()))
        )
        src, dst, edge, row = size("src"), size("dst"), size("edge"), out[0].numel() * out.element_size()
        edges, nodes, states = len(self.listed.src), self.listed.num_nodes, 8 * self.heads
        listed = self.listed.graph.tensors[1].element_size()
        forward = edges * (src + edge + listed) + nodes * (dst + row)
        by_dst = edges * (src + edge + listed) + nodes * (2 * dst + row + states)
        by_src = edges * (dst + edge + row + states + listed) + nodes * 2 * src
        written = sum(
            x.numel() * x.element_size()
            for name, x in self.fields.items()
            if name.startswith("edge.") and isinstance(x, Tensor) and x.requires_grad
        )
        return float(forward), float(by_dst + by_src + written)


@dataclass(frozen=True)
class Work:
    """make: the case on a setting; anemoi: of a case, the published kernel on the same numbers."""

    make: Callable[[Setting], Case]
    anemoi: Callable[[Case], Callable[[], Tensor]] | None = None


def _draw(setting: Setting, dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda *shape: torch.randn(shape, device=setting.device).to(dtype).requires_grad_()


def gatv2(lists: Callable[[Setting], Listed], dtype: torch.dtype, setting: Setting) -> Case:
    listed, draw = lists(setting), _draw(setting, dtype)
    n = listed.num_nodes
    return Case(listed, GATv2(), plain_gatv2, {"src.x": draw(n, 4, 32), "dst.x": draw(n, 4, 32), "att": draw(4, 32)}, 4)


def dot(lists: Callable[[Setting], Listed], dtype: torch.dtype, setting: Setting) -> Case:
    listed, draw = lists(setting), _draw(setting, dtype)
    fields = {name: draw(listed.num_nodes, 4, 32) for name in ("src.key", "src.value", "dst.query")}
    return Case(listed, Dot(), plain_dot, {**fields, "scale": 32**-0.5}, 4)


def mesh(heads: int, width: int, dtype: torch.dtype, setting: Setting) -> Case:
    (listed, attributes), draw = graph_lists.icosphere(setting, 6), _draw(setting, dtype)
    fields = {name: draw(listed.num_nodes, heads, width) for name in ("src.key", "src.value", "dst.query")}
    fields |= {"edge.attributes": attributes.to(dtype), "weight": draw(heads * width, attributes.shape[1])}
    return Case(listed, GraphTransformer(), plain_transformer, {**fields, "scale": width**-0.5}, heads)


def mesh_anemoi(case: Case) -> Callable[[], Tensor]:
    f, run = case.fields, graph_peers.anemoi(case.listed.src, case.listed.dst, case.listed.num_nodes)
    key = f["src.key"]
    project = lambda: linear(f["edge.attributes"], f["weight"]).view(-1, *key.shape[1:])
    return lambda: run(f["dst.query"], key, f["src.value"], project())


def network(nodes: int, cutoff: float, width: int, hidden: int, setting: Setting) -> Case:
    listed, draw = graph_lists.points(setting, nodes, cutoff), _draw(setting, torch.float32)
    net = nn.Sequential(nn.Linear(3 + 2 * width, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1)).to(setting.device)
    x = {name: draw(listed.num_nodes, width) for name in ("src.x", "dst.x")}
    return Case(listed, EdgeNetwork(net), plain_network, {**x, "positions": listed.positions}, 1, net)


def forces(atoms: int, cutoff: float, setting: Setting) -> Case:
    listed = graph_lists.crystal(setting, atoms, cutoff)
    return Case(listed, Morse(), plain_morse, {"positions": listed.positions, "edge.shift": listed.shift}, 0)


LISTS = {
    "arxiv-shaped": partial(graph_lists.power_law, nodes=169343, edges=1166243, exponent=0.55),
    "products-shaped": partial(graph_lists.power_law, nodes=400000, edges=20000000, exponent=0.45),
    "hub": partial(graph_lists.hub, nodes=63436, edges=299186, largest=21810),
}
SHORT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
WORKS: dict[str, Work] = {
    f"{name}, {make.__name__}, {SHORT[dtype]}": Work(partial(make, lists, dtype))
    for name, lists in LISTS.items()
    for make in (gatv2, dot)
    for dtype in (torch.float32, torch.bfloat16)
}
WORKS |= {
    f"mesh, {heads} x {width}, {SHORT[dtype]}": Work(partial(mesh, heads, width, dtype), mesh_anemoi)
    for heads, width in ((16, 32), (16, 64))
    for dtype in (torch.float16, torch.bfloat16)
}
WORKS |= {
    "published GAT, 512 nodes, 8 features, hidden 16": Work(partial(network, 512, 0.15, 8, 16)),
    "edge network, 20k nodes, 8 features, hidden 16": Work(partial(network, 20000, 0.044, 8, 16)),
    "edge network, 20k nodes, 64 features, hidden 64": Work(partial(network, 20000, 0.044, 64, 64)),
    "crystal, 50k atoms, pair forces": Work(partial(forces, 50000, 6.0)),
}
