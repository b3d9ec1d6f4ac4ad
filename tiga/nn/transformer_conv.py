"""TransformerConv: inner products of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tiga.errors import TigaError
from tiga.nn.edges import edges_of
from tiga.nn.graph_attention import METHODS, READ, End, GraphAttention
from tiga.nn.linear import linear, projected
from tiga.traces import Declared


class TransformerConv(GraphAttention):
    """out[i] = W_s x[i] + sum_j softmax_j(q[i] . (k[j] + W_e e[i, j]) / sqrt(out_channels)) (v[j] + W_e e[i, j]).

    q, k, v are linear in x. The arguments, parameters, their starting values and the results are those of
    `torch_geometric.nn.TransformerConv`, and a state dict of either loads into the other: with `beta` a gate mixes the
    two terms, without root_weight the first is left out. Calls, dropout, memory, dtypes and errors are as in
    `GATConv`; there are no self loops, a pair of inputs must have both, and return_attention_weights=True gives the
    weights before dropout. W_e is applied to queries and to results, never to edges: q . W_e e = (W_e^T q) . e.

    Source: Shi et al. 2021.

    >>> import tiga as tg, torch
    >>> conv = tg.nn.TransformerConv(16, 8, heads=2, edge_dim=3)
    >>> conv(torch.randn(3, 16), torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 3)).shape
    torch.Size([3, 16])
    """

    dropped_weights = False
    edge_reads = Declared(METHODS, READ)

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kwargs,
            in_channels=in_channels,
            out_channels=out_channels,
            heads=heads,
            concat=concat,
            beta=beta and root_weight,
            dropout=dropout,
            edge_dim=edge_dim,
            root_weight=root_weight,
        )
        width, (from_src, from_dst) = heads * out_channels, self.inputs()
        self.lin_key = linear(from_src, width, bias)
        self.lin_query = linear(from_dst, width, bias)
        self.lin_value = linear(from_src, width, bias)
        self.lin_edge = None if edge_dim is None else linear(edge_dim, width, False)
        self.lin_skip = linear(from_dst, self.outputs(), bias)
        self.lin_beta = nn.Linear(3 * self.outputs(), 1, bias=False) if self.beta else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.redrawn(self.lin_key, self.lin_query, self.lin_value, self.lin_edge, self.lin_skip, self.lin_beta)

    def message(self, j: End, i: End, attr: Any, shared: dict) -> tuple:
        score = (i.query * j.key).sum(dim=-1)
        if attr is None:
            return score * self.out_channels**-0.5, j.value
        each = attr.unsqueeze(1)
        return (score + (i.edge_query * each).sum(dim=-1)) * self.out_channels**-0.5, j.value, each

    def forward(  # type: ignore[override]
        self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: bool | None = None
    ) -> Any:
        x_src, x_dst = self.both_nodes(x)
        own = (self.lin_query, *((self.lin_skip,) if self.root_weight else ()))
        if x_dst is x_src:
            every = projected(x_src, self.lin_key, self.lin_value, *own)
        else:
            every = (*projected(x_src, self.lin_key, self.lin_value), *projected(x_dst, *own))
        key, value, query = [y.unflatten(1, (self.heads, self.out_channels)) for y in every[:3]]
        edges = edges_of("TransformerConv", edge_index, key.shape[0], query.shape[0])
        attr, weight = self.attributes(edge_attr if edge_attr is not None else edges.field)
        dst = {"query": query}
        if weight is not None:
            weight = weight.view(self.heads, self.out_channels, -1)
            dst["edge_query"] = torch.einsum("nhc,hcd->nhd", query, weight)
        elif self.lin_edge is not None:
            raise TigaError(f"TransformerConv: edge_dim is {self.edge_dim}, but no edge_attr is given. Give edge_attr.")
        weights = isinstance(return_attention_weights, bool)
        found = self.attend(edges, {"key": key, "value": value}, dst, attr, weights)
        out = found.results[0]
        if weight is not None:
            out = out + torch.einsum("nhd,hcd->nhc", found.results[1], weight)
        out = self.over_heads(out)
        if self.root_weight:
            skip = every[3]
            if self.lin_beta is None:
                out = out + skip
            else:
                gate = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
                out = gate * skip + (1 - gate) * out
        return self.with_weights(edges, out, found, None) if weights else out
