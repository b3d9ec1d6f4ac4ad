"""GATConv: a score that is a sum of one of each end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiga.nn.edges import edges_of
from tiga.nn.graph_attention import METHODS, READ, End, LoopedAttention
from tiga.nn.linear import glorot, linear
from tiga.traces import Declared


class GATConv(LoopedAttention):
    """out[i] = sum_j softmax_j(leaky_relu(a_s . W x[j] + a_t . W x[i] + a_e . W_e e[i, j])) W x[j], over j -> i and i.

    The arguments, parameters, their starting values and the results are those of `torch_geometric.nn.GATConv`, and a
    state dict of either loads into the other. in_channels: features, or (of sources, of destinations), -1 for as many
    as the first input has.

    Calling it: x (num_nodes, in_channels), or a pair of sources and destinations, of which the second may be None;
    edge_index: (2, num_edges) with sources in row 0, a torch sparse matrix (num_dst, num_src) as PyG's adj_t, or a
    `tg.Graph`, which is sorted once and not at every call; edge_attr: (num_edges, edge_dim); size: (num_src, num_dst).
    Gives (num_dst, heads * out_channels), or (num_dst, out_channels), the mean over heads, without concat. A
    destination without edges and self loop gives the bias.

    With add_self_loops every node receives from itself as well, once, with edge attributes `fill_value`: a number, a
    tensor, or "mean", "add", "min", "max", "mul" of the attributes of the edges to it. No list of edges is built for
    that.

    return_attention_weights=True gives (out, (edge_index, weights)): a second program over the edges, the only one
    that stores (num_edges, heads); with self loops the list is built then, and its length read from a device.
    Dropout is drawn from torch's generator, with other numbers than PyG's; its backward repeats them.

    Memory is O(nodes), and forward, backward and second derivatives repeat bit for bit. Accumulates in float32, or
    float64 for float64. Raises TigaError for options of PyG's base class that mean another aggregation or direction.

    Source: Velickovic et al. 2018.

    >>> import tiga as tg, torch
    >>> conv = tg.nn.GATConv(16, 8, heads=2)
    >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([3, 16])
    """

    edge_reads = Declared(METHODS, (*READ, "negative_slope"))

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kwargs,
            in_channels=in_channels,
            out_channels=out_channels,
            heads=heads,
            concat=concat,
            negative_slope=negative_slope,
            dropout=dropout,
            add_self_loops=add_self_loops,
            edge_dim=edge_dim,
            fill_value=fill_value,
            residual=residual,
        )
        width, (from_src, from_dst) = heads * out_channels, self.inputs()
        one = isinstance(in_channels, int)
        self.lin = linear(from_src, width, False, glorot=True) if one else None
        self.lin_src = None if one else linear(from_src, width, False, glorot=True)
        self.lin_dst = None if one else linear(from_dst, width, False, glorot=True)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else linear(edge_dim, width, False, glorot=True)
        self.att_edge = None if edge_dim is None else nn.Parameter(torch.empty(1, heads, out_channels))
        self.add_ends(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.redrawn(self.lin, self.lin_src, self.lin_dst, self.lin_edge)
        for att in (self.att_src, self.att_dst, self.att_edge):
            glorot(att)

    def message(self, j: End, i: End, attr: Any, shared: dict) -> tuple:
        score = j.score + i.score if "score" in i else j.score
        if attr is not None:
            score = score + (attr.unsqueeze(1) * shared["edge_weight"]).sum(dim=-1)
        return F.leaky_relu(score, self.negative_slope), j.x

    def scores(self, x: Tensor, *atts: Tensor) -> tuple[Tensor, ...]:
        """(nodes, heads) of each att: the inner products of every head's features with its own vector.

        One product with a matrix that is 0 between heads: (nodes, heads, features) is read once, and made by nothing.
        A compiler does so by one pass over the features, and adds their gradients to others on the way.
        """
        if torch.compiler.is_compiling():
            return tuple([(x * att).sum(-1) for att in atts])
        apart = torch.diag_embed(torch.cat(atts).permute(2, 0, 1), dim1=0, dim2=3)  # heads, features, atts, heads
        return (x.flatten(1) @ apart.flatten(2).flatten(0, 1)).split(self.heads, dim=1)

    def forward(  # type: ignore[override]
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        x_src, x_dst = self.nodes(x)
        (src,) = self.per_head(x_src, self.lin or self.lin_src)  # type: ignore[arg-type]
        dst = src if self.lin is not None and x_dst is x_src else None
        if x_dst is not None and dst is None:
            (dst,) = self.per_head(x_dst, self.lin or self.lin_dst)  # type: ignore[arg-type]
        num_src, num_dst = (src.shape[0], (src if dst is None else dst).shape[0]) if size is None else size
        edges = edges_of("GATConv", edge_index, num_src, num_dst)
        loops = min(num_src, num_dst) if self.add_self_loops else None
        attr, shared = edge_attr if edge_attr is not None else edges.field, {}
        if self.lin_edge is None or self.att_edge is None:
            attr = None
        elif attr is not None:
            attr, weight = self.attributes(attr)
            assert weight is not None
            # att . (W e) is linear in e: one row a head, whatever its channels
            each = weight.view(self.heads, self.out_channels, -1) * self.att_edge.squeeze(0).unsqueeze(-1)
            shared["edge_weight"] = each.sum(1)
        if dst is src:
            score_src, score_dst = self.scores(src, self.att_src, self.att_dst)
            fields = {"score": score_src}, {"score": score_dst}
        else:
            other = {} if dst is None else {"score": self.scores(dst, self.att_dst)[0]}
            fields = {"score": self.scores(src, self.att_src)[0]}, other
        found = self.attend(
            edges,
            {"x": src, **fields[0]},
            fields[1],
            attr,
            bool(return_attention_weights),
            loops,
            **shared,
        )
        out = self.result(found.results[0], x_dst)
        return self.with_weights(edges, out, found, loops) if return_attention_weights else out
