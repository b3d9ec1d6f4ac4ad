"""Graphs from what other libraries hold: PyG's edge lists and samples, sparse matrices of torch and scipy."""

import numpy as np
import pytest
import scipy.sparse
import torch

import tiga as tg

geometric = pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data, HeteroData  # noqa: E402

LIST = torch.tensor([[2, 0, 0, 3], [1, 1, 0, 2]])


class Edgewise(tg.MessagePassing):
    """sum over the edges j -> i of value[edge] * x[j]: a product with the matrix of the values."""

    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(edge.value * src.x)


def test_edge_index_brings_its_sizes():
    held = geometric.EdgeIndex(LIST, sparse_size=(5, 4))
    assert tg.Graph.from_edge_index(held) == tg.Graph.from_edge_index(LIST, 5, 4)
    assert tg.Graph.from_edge_index(held, num_src=6) == tg.Graph.from_edge_index(LIST, 6, 4)
    assert tg.Graph.from_edge_index(geometric.EdgeIndex(LIST)) == tg.Graph.from_edge_index(LIST)
    assert type(tg.Graph.from_edge_index(held.sort_by("col")[0]).tensors[1]) is torch.Tensor


def test_data_and_batch_bring_their_edges_and_nodes():
    sample = Data(edge_index=LIST, x=torch.zeros(6, 1))
    assert tg.Graph.from_edge_index(sample) == tg.Graph.from_edge_index(LIST, 6, 6)
    assert tg.Graph.from_edge_index(sample, num_dst=9) == tg.Graph.from_edge_index(LIST, 6, 9)
    batch = Batch.from_data_list([sample, Data(edge_index=LIST, x=torch.zeros(4, 1))])
    assert tg.Graph.from_edge_index(batch) == tg.Graph.from_edge_index(torch.cat([LIST, LIST + 6], 1), 10, 10)


def test_objects_without_edges_say_what_to_write():
    with pytest.raises(tg.TigaError, match="this Data has no edge_index.*from_sparse"):
        tg.Graph.from_edge_index(Data(adj_t=torch.eye(3).to_sparse_csr(), num_nodes=3))
    with pytest.raises(tg.TigaError, match="this HeteroData has no edge_index.*of one"):
        tg.Graph.from_edge_index(HeteroData())
    with pytest.raises(tg.TigaError, match="Graph.from_sparse.matrix."):
        tg.Graph.from_edge_index(torch.eye(3).to_sparse())


def matrix(seed=0):
    """Four destinations, six sources, an empty row."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    dense[torch.rand(4, 6, generator=generator) < 0.5] = 0
    dense[2] = 0
    return dense


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
def test_a_torch_matrix_multiplies(layout):
    dense, x = matrix(), torch.randn(6, 3, dtype=torch.float64)
    held = dense.to_sparse(layout=layout)
    graph = tg.Graph.from_sparse(held)
    assert (graph.num_dst, graph.num_src) == (4, 6) and torch.equal(graph.to_mask(), dense != 0)
    out = Edgewise()(graph=graph, src={"x": x}, edge={"value": held.values()[:, None]})
    torch.testing.assert_close(out, dense @ x)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "bsr"])
@pytest.mark.parametrize("kind", ["matrix", "array"])
def test_a_scipy_matrix_multiplies(form, kind):
    dense, x = matrix(1), torch.randn(6, 3, dtype=torch.float64)
    held = getattr(scipy.sparse, f"{form}_{kind}")(dense.numpy())
    values = (held if form in ("csr", "csc", "coo") else held.tocsr()).data
    out = Edgewise()(graph=tg.Graph.from_sparse(held), src={"x": x}, edge={"value": torch.as_tensor(values)[:, None]})
    torch.testing.assert_close(out, dense @ x)


def test_pairs_that_are_stored_twice_are_two_edges():
    held = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0], [2, 2, 0]]), torch.tensor([1.0, 2.0, 0.0]), (2, 3))
    assert tg.Graph.from_sparse(held).num_edges == 3
    other = scipy.sparse.coo_array((np.ones(3), (np.array([1, 1, 0]), np.array([2, 2, 0]))), shape=(2, 3))
    assert tg.Graph.from_sparse(other) == tg.Graph.from_edge_index(torch.tensor([[2, 2, 0], [1, 1, 0]]), 3, 2)


@pytest.mark.parametrize(
    "given, error, words",
    [
        (torch.eye(4).to_sparse(layout=torch.sparse_bsr, blocksize=(2, 2)), tg.TigaError, "matrix.to_sparse_csr"),
        (torch.eye(3), tg.TigaError, "layout torch.strided"),
        (torch.stack([torch.eye(2)] * 2).to_sparse_csr(), tg.TigaError, r"shape \(2, 2, 2\)"),
        ([[0], [1]], TypeError, "from_edge_index"),
    ],
)
def test_other_matrices_say_what_to_write(given, error, words):
    with pytest.raises(error, match=words):
        tg.Graph.from_sparse(given)
