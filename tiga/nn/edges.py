"""The edges of a layer's call: a graph, an edge list or a sparse matrix, and the list that its edge fields follow."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga import graph_algebra
from tiga.errors import TigaError
from tiga.graph import Graph

SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


class Edges(NamedTuple):
    """graph: what reaches what; given: what the caller gave; field: values that a sparse matrix holds for each edge."""

    graph: Graph
    given: Any
    field: Tensor | None = None

    def pairs(self) -> Tensor:
        """(2, num_edges), sources above destinations, in the order of edge fields."""
        if isinstance(self.given, Tensor) and self.given.layout == torch.strided:
            return self.given
        dst, src, numbers = graph_algebra.listed(self.graph)
        pairs = torch.stack([src, dst])
        return pairs if numbers is None else torch.empty_like(pairs).index_copy_(1, numbers.long(), pairs)


def edges_of(who: str, given: Any, num_src: int, num_dst: int | None) -> Edges:
    """`given` as a graph of these sizes: num_dst None, which a list needs, is as many as there are sources."""
    if isinstance(given, Graph):
        return Edges(given, given)
    if isinstance(given, Tensor) and given.layout in SPARSE:
        values = given._values() if given.layout == torch.sparse_coo else given.values()
        return Edges(Graph.from_sparse(given), given, values if values.dim() > 1 else None)
    if isinstance(given, Tensor):
        return Edges(Graph.from_edge_index(given, num_src, num_src if num_dst is None else num_dst), given)
    raise TigaError(
        f"{who}: edge_index is {type(given).__name__}; a tensor (2, num_edges), a torch sparse matrix (num_dst, "
        "num_src) or a tg.Graph is needed. Write tg.Graph.from_sparse(matrix) for scipy's, and "
        "edge_index=batch.edge_index for a Data or Batch."
    )


def weighted(edges: Edges, weight: Tensor) -> Any:
    """What goes with attention weights (num_edges, heads): the edge list, or the sparse matrix that holds them."""
    matrix = edges.given
    if not isinstance(matrix, Tensor) or matrix.layout not in SPARSE:
        return edges.pairs()
    size = (*matrix.shape[:2], *weight.shape[1:])
    if matrix.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(matrix._indices(), weight, size, is_coalesced=matrix.is_coalesced())
    if matrix.layout == torch.sparse_csr:
        return torch.sparse_csr_tensor(matrix.crow_indices(), matrix.col_indices(), weight, size)
    return torch.sparse_csc_tensor(matrix.ccol_indices(), matrix.row_indices(), weight, size)


def with_loops(who: str, edges: Edges, weight: Tensor, loop_weight: Tensor) -> tuple[Any, Tensor]:
    """(edge list, weights) of the edges but self loops, in their order, and then of a loop a row of loop_weight."""
    if isinstance(edges.given, Tensor) and edges.given.layout in SPARSE:
        raise TigaError(
            f"{who}: return_attention_weights with add_self_loops of a sparse matrix, in which loops would stand "
            "between the entries. Give the edge list, matrix.to_sparse_coo().indices().flip(0)."
        )
    pairs = edges.pairs()
    loops = torch.arange(loop_weight.shape[0], dtype=pairs.dtype, device=pairs.device)
    kept = (pairs[0] != pairs[1]).nonzero().squeeze(1)
    every = torch.cat([pairs.index_select(1, kept), torch.stack([loops, loops])], dim=1)
    return every, torch.cat([weight.index_select(0, kept), loop_weight])
