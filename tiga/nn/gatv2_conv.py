"""GATv2Conv: a score that looks at both ends together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiga.nn.edges import edges_of
from tiga.nn.graph_attention import METHODS, READ, End, LoopedAttention
from tiga.nn.linear import glorot, linear
from tiga.traces import Declared


class GATv2Conv(LoopedAttention):
    """out[i] = sum_j softmax_j(a . leaky_relu(W_l x[j] + W_r x[i] + W_e e[i, j])) W_l x[j], over j -> i and i.

    The arguments, parameters, their starting values and the results are those of `torch_geometric.nn.GATv2Conv`, and a
    state dict of either loads into the other. Calls, self loops, attention weights, dropout, memory, dtypes and errors
    are as in `GATConv`, but for `size`, which this layer has not, and a pair of inputs, which must have both. Edge
    attributes are projected where they are read: W_e e is never stored.

    Source: Brody et al. 2022.

    >>> import tiga as tg, torch
    >>> conv = tg.nn.GATv2Conv((16, 4), 8, heads=2, add_self_loops=False)
    >>> conv((torch.randn(3, 16), torch.randn(2, 4)), torch.tensor([[0, 2], [1, 1]])).shape
    torch.Size([2, 16])
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
        share_weights: bool = False,
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
            share_weights=share_weights,
            residual=residual,
        )
        width, (from_src, from_dst) = heads * out_channels, self.inputs()
        self.lin_l = linear(from_src, width, bias, glorot=True)
        self.lin_r = self.lin_l if share_weights else linear(from_dst, width, bias, glorot=True)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else linear(edge_dim, width, False, glorot=True)
        self.add_ends(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.redrawn(self.lin_l, self.lin_r, self.lin_edge)
        glorot(self.att)

    def message(self, j: End, i: End, attr: Any, shared: dict) -> tuple:
        both = j.x + i.x
        if attr is not None:
            both = both + F.linear(attr, shared["edge_weight"]).unflatten(-1, (self.heads, self.out_channels))
        return (F.leaky_relu(both, self.negative_slope) * shared["att"]).sum(dim=-1), j.x

    def forward(  # type: ignore[override]
        self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: bool | None = None
    ) -> Any:
        x_src, x_dst = self.both_nodes(x)
        if x_dst is x_src:
            ends = self.per_head(x_src, *((self.lin_l,) if self.share_weights else (self.lin_l, self.lin_r)))
        else:
            ends = (*self.per_head(x_src, self.lin_l), *self.per_head(x_dst, self.lin_r))
        src, dst = ends[0], ends[-1]
        edges = edges_of("GATv2Conv", edge_index, src.shape[0], dst.shape[0])
        loops = min(src.shape[0], dst.shape[0]) if self.add_self_loops else None
        attr, weight = self.attributes(edge_attr if edge_attr is not None else edges.field)
        shared = {"att": self.att.squeeze(0)} if weight is None else {"att": self.att.squeeze(0), "edge_weight": weight}
        found = self.attend(edges, {"x": src}, {"x": dst}, attr, bool(return_attention_weights), loops, **shared)
        out = self.result(found.results[0], x_dst)
        return self.with_weights(edges, out, found, loops) if return_attention_weights else out
