"""Edges as other libraries hold them: PyG's EdgeIndex, Data and Batch, sparse matrices of torch and scipy.

Known by what they offer, so that none of these libraries is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga.errors import TigaError


class Listed(NamedTuple):
    """Edges one by one: (2, num_edges), sources above destinations, or CSR by destination."""

    edges: Any = None
    rowptr: Any = None
    col: Any = None


def edge_list(given: Any, num_src: Any, num_dst: Any) -> tuple[Any, Any, Any]:
    """(edge_index, num_src, num_dst) of an edge list, or of an object that holds one; sizes that were given stand."""
    if type(given) is Tensor or isinstance(given, (list, tuple)):
        if isinstance(given, Tensor) and given.layout != torch.strided:
            raise TigaError(
                "Graph.from_edge_index: got a sparse tensor, which is a matrix, not a list of edges. "
                "Write Graph.from_sparse(matrix), whose row i receives from the columns that it stores."
            )
        return given, num_src, num_dst
    if isinstance(given, Tensor):
        if not hasattr(given, "sparse_size") or not hasattr(given, "as_tensor"):
            return given, num_src, num_dst
        rows, columns = given.sparse_size()
        return given.as_tensor(), rows if num_src is None else num_src, columns if num_dst is None else num_dst
    if not hasattr(given, "num_nodes"):
        return given, num_src, num_dst
    edges = getattr(given, "edge_index", None)
    if edges is None:
        raise TigaError(
            f"Graph.from_edge_index: this {type(given).__name__} has no edge_index. Where it holds a matrix write "
            "Graph.from_sparse(graph.adj_t), where it holds several kinds of edges give the edge_index of one."
        )
    nodes = given.num_nodes
    return edge_list(edges, nodes if num_src is None else num_src, nodes if num_dst is None else num_dst)


def sparse(matrix: Any) -> tuple[Listed, int, int]:
    """(entries in the order they are stored, num_src, num_dst) of a matrix with a row for each destination."""
    asked = "Graph.from_sparse"
    if isinstance(matrix, Tensor):
        listed = _of_torch(asked, matrix)
    elif hasattr(matrix, "tocsr") and hasattr(matrix, "format"):
        listed = _of_scipy(matrix)
    else:
        raise TypeError(
            f"{asked}: got {type(matrix).__name__}; a torch sparse tensor or a scipy sparse matrix is needed. "
            "A list of edges is written Graph.from_edge_index(edge_index), a CSR Graph.from_csr(rowptr, col)."
        )
    num_dst, num_src = matrix.shape[0], matrix.shape[1]
    return listed, num_src, num_dst


def _of_torch(asked: str, matrix: Tensor) -> Listed:
    if matrix.layout == torch.sparse_csr and matrix.crow_indices().dim() == 1:
        return Listed(rowptr=matrix.crow_indices(), col=matrix.col_indices())
    if matrix.layout == torch.sparse_csc and matrix.ccol_indices().dim() == 1:
        return _by_column(matrix.ccol_indices(), matrix.row_indices())
    if matrix.layout == torch.sparse_coo and matrix.sparse_dim() == 2:
        return Listed(edges=matrix._indices().flip(0))  # as they lie: a pair that is stored twice is two edges
    raise TigaError(
        f"{asked}: a matrix of layout {matrix.layout} and shape {tuple(matrix.shape)}; rows of destinations and "
        "columns of sources, as sparse_csr, sparse_csc or sparse_coo, are needed. Write matrix.to_sparse_csr()."
    )


def _of_scipy(matrix: Any) -> Listed:
    if matrix.format == "coo":
        return Listed(edges=torch.stack([torch.as_tensor(matrix.col), torch.as_tensor(matrix.row)]))
    if matrix.format == "csc":
        return _by_column(torch.as_tensor(matrix.indptr), torch.as_tensor(matrix.indices))
    rows = matrix if matrix.format == "csr" else matrix.tocsr()
    return Listed(rowptr=rows.indptr, col=rows.indices)


def _by_column(starts: Tensor, row: Tensor) -> Listed:
    column = torch.arange(starts.shape[0] - 1, dtype=row.dtype, device=row.device)
    return Listed(edges=torch.stack([column.repeat_interleave(starts.diff(), output_size=row.shape[0]), row]))
