"""Neighbour searches against the table of all distances."""

import itertools

import pytest
import torch
from interpreting import said

import tiga as tg
from tiga import neighbours

Graph = tg.Graph
inf, nan = float("inf"), float("nan")


def distances(positions, batch=None):
    """Squared, inf between different samples: differences in the dtype of positions, squares in float64."""
    squared = (positions[None] - positions[:, None]).double().square().sum(-1)
    return squared if batch is None else squared.masked_fill(batch[:, None] != batch[None], inf)


def within(positions, cutoff, batch=None, loop=False):
    mask = (distances(positions, batch) <= cutoff**2) & (distances(positions, batch) < inf)
    return mask if loop else mask.fill_diagonal_(False)


def nearest(positions, k, batch=None):
    squared = distances(positions, batch).fill_diagonal_(inf)
    order = squared.argsort(dim=1, stable=True)[:, :k]
    return torch.zeros_like(squared, dtype=torch.bool).scatter(1, order, True) & (squared < inf)


def assert_lists(found, mask):
    """(rowptr, col) lists exactly the pairs of the mask, in its order."""
    rowptr, col = found
    dst = torch.repeat_interleave(torch.arange(len(mask)), rowptr.diff())
    assert torch.equal(torch.stack([dst, col], 1), mask.nonzero())


def points(shape, dim, dtype, count=60):
    generator = torch.Generator().manual_seed(dim)
    positions = 4 * torch.rand(count, dim, generator=generator, dtype=torch.float64)
    if shape == "lattice":
        positions = positions.round()
    if shape == "clusters":
        positions = positions * 10.0 ** (-8 * torch.rand(count, 1, generator=generator, dtype=torch.float64))
    if shape == "one place":
        positions = torch.full_like(positions, 7)
    if shape == "plane":
        positions[:, : dim // 2] = 3
    if shape == "far away":
        positions += 10_000
    return positions.to(dtype)


SHAPES = ["uniform", "lattice", "clusters", "one place", "plane", "far away"]
BATCH = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0)) * 10 - 5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_finds_what_a_table_of_distances_finds(shape, dim):
    for dtype, batch in itertools.product((torch.float32, torch.float64, torch.bfloat16), (None, BATCH)):
        positions = points(shape, dim, dtype)
        for cutoff in (0.0, 2.0**-10, 0.5, 1.0, 3.75, inf):
            assert_lists(neighbours.radius_edges(positions, cutoff, batch), within(positions, cutoff, batch))
        for k in (0, 1, 4, 100):
            assert_lists(neighbours.knn_edges(positions, k, batch), nearest(positions, k, batch))


@pytest.mark.parametrize("chunk", [1, 40, 1000])
def test_chunks_do_not_show(chunk, monkeypatch):
    monkeypatch.setattr(neighbours, "CHUNK", chunk)
    positions = points("uniform", 3, torch.float32)
    assert_lists(neighbours.radius_edges(positions, 1.0, BATCH), within(positions, 1.0, BATCH))
    assert_lists(neighbours.knn_edges(positions, 3, BATCH), nearest(positions, 3, BATCH))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_nodes(count):
    positions = torch.zeros(count, 3)
    assert_lists(neighbours.radius_edges(positions, 1.0), within(positions, 1.0))
    assert_lists(neighbours.radius_edges(positions, 1.0, loop=True), within(positions, 1.0, loop=True))
    assert_lists(neighbours.knn_edges(positions, 2), nearest(positions, 2))


def test_the_cutoff_is_included_and_the_node_itself_is_not():
    line = torch.tensor([[0.0], [0.1], [0.3]])
    assert Graph.radius(line, 0.1).to_mask().int().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert Graph.radius(line, 0.1, loop=True).to_mask().int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert Graph.radius(torch.zeros(3, 3), 0.5).to_mask().int().tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert Graph.radius(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 5).num_edges == 2


def test_equally_near_nodes_are_taken_in_order():
    cross = torch.tensor([[0.0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]])
    assert Graph.knn(cross, 2).to_mask()[0].int().tolist() == [0, 1, 1, 0, 0]
    assert Graph.knn(cross, 9).num_edges == 20


@pytest.mark.parametrize("offset", [0.0, -6.0, 100.0, 1000.0, 10000.0])
def test_a_molecule_may_stand_anywhere(offset):
    water = torch.tensor([[0.0, 0, 0.119], [0, 0.763, -0.477], [0, -0.763, -0.477]])
    assert Graph.radius(water + offset, 1.2).to_mask().sum(1).tolist() == [2, 1, 1]


def test_samples_of_a_batch_never_meet_in_whatever_order_they_come():
    positions = torch.zeros(5, 2)
    graph = Graph.radius(positions, 1.0, batch=[3, -1, 3, 3, -1])
    assert graph.to_mask().nonzero().tolist() == [[0, 2], [0, 3], [1, 4], [2, 0], [2, 3], [3, 0], [3, 2], [4, 1]]
    assert Graph.knn(positions, 1, batch=[3, -1, 3, 3, 0]).tensors[1].tolist() == [2, 0, 0]


def test_time_and_memory_grow_with_nodes_not_pairs():
    # 20,000 nodes are 4e8 pairs; counted are the candidates that are measured
    positions = 20 * torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0))
    positions[:3] += 1e6  # far from the rest, which must not spoil the cells
    measured = []
    original = neighbours._measured

    def counting(*arguments):
        measured.append(int(arguments[5].sum()))
        return original(*arguments)

    neighbours._measured = counting
    try:
        graph = Graph.radius(positions, 1.0)
        radius, measured[:] = sum(measured), []
        assert Graph.knn(positions, 8).num_edges == 160_000
    finally:
        neighbours._measured = original
    assert graph.num_edges / 20_000 > 8
    assert radius < 10 * graph.num_edges and sum(measured) < 300 * 20_000
    assert max(measured) <= neighbours.CHUNK


def test_keeps_positions_for_gradients():
    positions = torch.rand(6, 3, requires_grad=True)
    for graph in (Graph.radius(positions, 0.9), Graph.knn(positions, 2)):
        dst, src = graph.positions
        assert dst is src is positions and not graph.tensors[0].requires_grad


def test_is_never_cut():
    positions = torch.tensor([[0.0], [1.0], [2.0]])
    assert Graph.radius(positions, 1.0, max_neighbors=2).num_edges == 4
    with pytest.raises(tg.TigaError, match="node 1 has 2 neighbours.*max_neighbors=1"):
        Graph.radius(positions, 1.0, max_neighbors=1)


ones = torch.ones(3, 2)

REFUSED = [
    (lambda: Graph.radius(ones, nan), "cutoff is nan"),
    (lambda: Graph.radius(ones, -1), "cutoff is -1"),
    (lambda: Graph.radius(ones, True), "cutoff.*bool"),
    (lambda: Graph.radius(ones, torch.tensor(1.0)), r"cutoff.*Tensor.*float\(cutoff\)"),
    (lambda: Graph.radius(torch.tensor([[0.0], [nan]]), 1), "node 1 are .nan.*finite"),
    (lambda: Graph.knn(torch.tensor([[inf], [0.0]]), 1), "node 0 are .inf"),
    (lambda: Graph.radius(torch.ones(3), 1), r"positions.*\(num_nodes, dim\).*\(3,\)"),
    (lambda: Graph.knn(torch.ones(3, 0), 1), "dim >= 1"),
    (lambda: Graph.radius(torch.ones(3, 2, dtype=torch.int64), 1), "positions.*int64"),
    (lambda: Graph.radius([[0.0]], 1), "positions.*list"),
    (lambda: Graph.radius(ones, 1, batch=[0, 1]), "batch has 2 entries.*3 nodes"),
    (lambda: Graph.radius(ones, 1, batch=ones[:, 0]), "batch.*float32"),
    (lambda: Graph.radius(ones, 1, max_neighbors=-1), "max_neighbors is -1"),
    (lambda: Graph.knn(ones, -1), "k is -1"),
    (lambda: Graph.knn(ones, 1.5), "k.*float"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_refuses_with_name_number_and_remedy(call, words):
    with pytest.raises((tg.TigaError, TypeError), match=words):
        call()


def test_kernels_under_the_interpreter():
    assert "18 passed" in said("interpreted", "neighbours_interpreted.py")
