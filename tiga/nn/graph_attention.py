"""What attention layers over a graph share: one edge function, in which a layer's `message` says what an edge is worth.

A self loop is no edge of the graph: a node's own message joins its softmax after the fold, and self loops that are
edges are left out. So no list of edges is built anew at a call, and nothing is read from a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiga.errors import TigaError
from tiga.fields import Fields
from tiga.message_passing import MessagePassing
from tiga.nn.edges import Edges, weighted, with_loops
from tiga.nn.linear import linear, projected
from tiga.reducer import Reducer, max, min, online_softmax, sum

FILLS = ("add", "sum", "mean", "min", "max", "mul")


METHODS = ("message", "joined", "filled")
READ = (
    "training",
    "dropout",
    "dropped_weights",
    "fill_value",
    "heads",
    "out_channels",
    "reducer",
    "total",
    "least",
    "most",
)
"""Methods that an edge function here is made of, and the attributes that these read; layers' messages may read more."""


class Product(Reducer):
    """out[i] = prod_j value[i, j]; 1 without edges."""

    identity = 1.0

    def combine(self, a: Any, b: Any) -> Any:
        return a * b


PRODUCT = Product()


class End:
    """The fields of one end of an edge, as attributes; of a self loop's source those that `prefix` begins."""

    def __init__(self, fields: Fields, prefix: str = "") -> None:
        self.__fields__, self.__prefix__ = fields, prefix

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self.__fields__[self.__prefix__ + name]

    def __contains__(self, name: str) -> bool:
        return self.__prefix__ + name in self.__fields__


class Attended(NamedTuple):
    """results: (num_dst, heads, ...) of each value; weight: (num_edges, heads), loop: (num_dst, heads), where asked."""

    results: tuple[Tensor, ...]
    weight: Tensor | None = None
    loop: Tensor | None = None


class GraphAttention(MessagePassing):
    """out[i] = sum_j softmax_j(score[i, j]) value[i, j], over the edges j -> i and, where asked, i itself.

    A layer holds parameters and says in `message` what score (.., heads) and values (.., heads, features) an edge has.
    """

    in_channels: int | tuple[int, int]
    out_channels: int
    heads: int
    concat: bool
    dropout: float
    edge_dim: int | None
    fill_value: Any = "mean"
    dropped_weights = True  # whether returned weights are those after dropout
    lin_edge: nn.Linear | None
    reducer = online_softmax(return_lse=True)
    total, least, most = sum(), min(), max()

    def __init__(self, others: dict[str, Any], **options: Any) -> None:
        super().__init__()
        known_options(type(self).__name__, others)
        for name, value in options.items():
            setattr(self, name, value)
        if isinstance(self.fill_value, str) and self.fill_value not in FILLS:
            raise TigaError(
                f"{type(self).__name__}: fill_value={self.fill_value!r}. It is a number, a tensor of attributes, or "
                f"one of {FILLS}."
            )

    def message(self, j: End, i: End, attr: Any, shared: dict) -> tuple:
        """(score, value, ...) of an edge with attributes `attr`, or None, from j to i."""
        raise NotImplementedError

    def edge(self, src: Any, dst: Any, edge: Any, returned: bool = False, **shared: Any) -> Any:
        attr = edge.attr if "attr" in edge else None
        score, *values = self.message(End(src), End(dst), attr, shared)
        kept = F.dropout(torch.ones_like(score), self.dropout) if self.dropout > 0 and self.training else None
        own = src.node == dst.node if "node" in dst else None
        seen = score if own is None else torch.where(own, -torch.inf, score)
        folds = [self.reducer(seen, value if kept is None else value * kept.unsqueeze(-1)) for value in values]
        results, lse = [out for out, _ in folds], folds[0][1]
        if own is not None:
            results, share, own_score = self.joined(dst, attr, own, lse, results, shared)
        if not returned:
            return results
        if own is None:
            weight = (score - lse).exp()
        else:
            # a row whose only edge is its own has lse -inf; what is not chosen must be finite for its gradient
            base = torch.where(lse == -torch.inf, 0.0, lse)
            weight = torch.where(own, 0.0, (torch.where(own, base, score) - base).exp()) * (lse - own_score).sigmoid()
        weight = weight * kept if kept is not None and self.dropped_weights else weight
        return (results, weight) if own is None else (results, weight, share)

    def joined(self, dst: Any, attr: Any, own: Any, lse: Any, results: list, shared: dict) -> tuple[list, Any, Any]:
        """Each result with the node's own message in it, the weight of that, and its score."""
        filled = dst.loop_attr if "loop_attr" in dst else None if attr is None else self.filled(attr, own)
        score, *values = self.message(End(dst, "loop_"), End(dst), filled, shared)
        share = torch.sigmoid(score - lse)
        if "has_loop" in dst:
            share = torch.where(dst.has_loop, share, 0.0)
        mixed = []
        for out, value in zip(results, values):
            kept = value * dst.loop_kept.unsqueeze(-1) if "loop_kept" in dst else value
            mixed.append(torch.lerp(out, kept, share.unsqueeze(-1)).to(out.dtype))
        dropped = "loop_kept" in dst and self.dropped_weights
        return mixed, share * dst.loop_kept if dropped else share, score

    def filled(self, attr: Any, own: Any) -> Any:
        """The attributes of a node's self loop, from those of the other edges to it."""
        own, fill = own.unsqueeze(-1), self.fill_value
        if fill == "mul":
            return PRODUCT(torch.where(own, 1.0, attr))
        if fill in ("min", "max"):
            none, fold = (torch.inf, self.least) if fill == "min" else (-torch.inf, self.most)
            best = fold(torch.where(own, none, attr))
            return torch.where(best == none, 0.0, best)
        total = self.total(torch.where(own, 0.0, attr))
        if fill != "mean":
            return total
        return total / self.total(torch.where(own, 0.0, 1.0)).clamp(min=1.0)

    # The call.

    def attend(
        self,
        edges: Edges,
        src: dict[str, Tensor],
        dst: dict[str, Tensor],
        attr: Tensor | None = None,
        returned: bool = False,
        loops: int | None = None,
        **shared: Any,
    ) -> Attended:
        """The edge function over a graph; loops: how many nodes, from the first, have a self loop."""
        if loops is not None:
            own = self.own_fields(edges, src, attr, loops)
            x, numbers = first(src), own["node"]
            if x.shape[0] != numbers.shape[0]:
                numbers = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
            src, dst = {**src, "node": numbers}, {**dst, **own}
        found = MessagePassing.forward(
            self, edges.graph, src, dst, {} if attr is None else {"attr": attr}, returned=returned, **shared
        )
        return Attended(*found) if returned else Attended(found)

    def own_fields(self, edges: Edges, src: dict, attr: Tensor | None, loops: int) -> dict[str, Tensor]:
        """What a node gives itself: its fields as a source, the number by which edges tell self loops, and masks."""
        rows, x = edges.graph.num_dst, first(src)
        own = {"loop_" + name: of_rows(field, loops, rows) for name, field in src.items()}
        own["node"] = torch.arange(rows, dtype=torch.int32, device=x.device)
        if loops != rows:
            own["has_loop"] = (own["node"] < loops).unsqueeze(-1)
        if self.dropout > 0 and self.training:
            # not F.dropout, for which a compiler bakes a changing probability in
            kept = (torch.rand(rows, self.heads, device=x.device) >= self.dropout).to(x.dtype)
            own["loop_kept"] = kept if self.dropout >= 1 else kept / (1 - self.dropout)
        if attr is not None and not isinstance(self.fill_value, str):
            fill = torch.as_tensor(self.fill_value, dtype=attr.dtype, device=attr.device)
            fill = fill if fill.dim() == attr.dim() else fill.unsqueeze(0)
            own["loop_attr"] = of_rows(fill.expand(loops, attr.shape[1]), loops, rows)
        return own

    def with_weights(self, edges: Edges, out: Tensor, found: Attended, loops: int | None) -> tuple:
        """(out, (edge list or matrix, weights))."""
        assert found.weight is not None
        if loops is None:
            return out, (weighted(edges, found.weight), found.weight)
        assert found.loop is not None
        return out, with_loops(type(self).__name__, edges, found.weight, found.loop[:loops])

    # What calls have in common.

    def inputs(self) -> tuple[int, int]:
        """Features of (sources, destinations)."""
        return (self.in_channels, self.in_channels) if isinstance(self.in_channels, int) else self.in_channels

    def outputs(self) -> int:
        """Features of the result."""
        return self.out_channels * (self.heads if self.concat else 1)

    def redrawn(self, *parts: Any) -> None:
        for part in parts:
            if part is not None:
                part.reset_parameters()

    def per_head(self, x: Tensor, *parts: nn.Module) -> tuple[Tensor, ...]:
        """(rows, heads, out_channels) of each map."""
        return tuple([y.unflatten(1, (self.heads, self.out_channels)) for y in projected(x, *parts)])

    def over_heads(self, out: Tensor) -> Tensor:
        return out.flatten(1) if self.concat else out.mean(dim=1)

    def nodes(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """(of sources, of destinations) of an input: one tensor for both, or a pair, whose second may be None."""
        who, pair = type(self).__name__, (x, x) if isinstance(x, Tensor) else tuple(x)
        if len(pair) != 2 or pair[0] is None:
            raise TigaError(f"{who}: x is {len(pair)} inputs; give a tensor, or a pair (of sources, of destinations).")
        for t in pair:
            if t is not None and t.dim() != 2:
                raise TigaError(
                    f"{who}: x has shape {tuple(t.shape)}; (num_nodes, features) is needed. Write x.flatten(1)."
                )
        return pair

    def both_nodes(self, x: Any) -> tuple[Tensor, Tensor]:
        src, dst = self.nodes(x)
        if dst is None:
            raise TigaError(
                f"{type(self).__name__}: no x of destinations, which its scores read. Give both of the pair."
            )
        return src, dst

    def attributes(self, attr: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(num_edges, edge_dim) edge attributes, and the matrix (heads * out_channels, edge_dim) that projects them."""
        if attr is None:
            return None, None
        who, part = type(self).__name__, self.lin_edge
        if part is None:
            raise TigaError(f"{who}: edge_attr of shape {tuple(attr.shape)}, but the layer has no edge_dim. Give it.")
        attr = attr.unsqueeze(-1) if attr.dim() == 1 else attr
        if attr.dim() != 2 or self.edge_dim not in (-1, attr.shape[1]):
            raise TigaError(
                f"{who}: edge_attr has shape {tuple(attr.shape)}, but edge_dim is {self.edge_dim}: give "
                "(num_edges, edge_dim)."
            )
        if self.edge_dim == -1:
            part(attr[:0])  # learns its size
        return attr, part.weight

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


class LoopedAttention(GraphAttention):
    """With self loops, a skip connection and a bias of the result."""

    add_self_loops: bool
    negative_slope: float
    residual: bool
    res: nn.Linear | None
    bias: nn.Parameter | None

    def add_ends(self, bias: bool) -> None:
        """The parameters that the result meets last."""
        total = self.outputs()
        self.res = linear(self.inputs()[1], total, False, glorot=True) if self.residual else None
        self.bias = nn.Parameter(torch.empty(total)) if bias else None

    def redrawn(self, *parts: Any) -> None:
        GraphAttention.redrawn(self, *parts, self.res)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def result(self, out: Tensor, x_dst: Tensor | None) -> Tensor:
        out = self.over_heads(out)
        if self.res is not None and x_dst is not None:
            out = out + self.res(x_dst)
        return out if self.bias is None else out + self.bias


def first(fields: dict[str, Tensor]) -> Tensor:
    return next(iter(fields.values()))


def of_rows(field: Tensor, given: int, rows: int) -> Tensor:
    """The first `given` rows of a field, then rows of 0; where those are all, the field and no slice of it."""
    kept = field if field.shape[0] == given else field[:given]
    return kept if given == rows else torch.cat([kept, kept.new_zeros(rows - given, *kept.shape[1:])])


SUPPORTED = {"aggr": ("add", "sum"), "flow": ("source_to_target",), "node_dim": (0,), "decomposed_layers": (1,)}
"""Of the options of PyG's base class the values that mean what is computed here."""


def known_options(who: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value not in SUPPORTED.get(name, ()):
            raise TigaError(
                f"{who}: {name}={value!r} is not supported: softmax weights are added up at destinations, row 1 of "
                "edge_index. For the other direction give edge_index.flip(0)."
            )
