"""Neighbours in periodic boxes, against every image, ASE's neighbour list and scipy's KD-tree."""

import math

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.neighborlist import neighbor_list
from images import assert_lists, lengths, listed
from scipy.spatial import KDTree

import tiga as tg
from tiga import neighbours, periodic

Graph = tg.Graph
SKEWED = [[2.0, 0, 0], [1, 2.2, 0], [0.3, -0.7, 3]]
PERIODS = [(1, 1, 1), (1, 0, 1), (0, 0, 1), (0, 1, 0), (0, 0, 0)]


def cloud(count, dim=3, dtype=torch.float64, spread=3.0):
    return spread * torch.randn(count, dim, dtype=dtype, generator=torch.Generator().manual_seed(count))


def skewed(dtype=torch.float64, periods=(1, 1, 1)):
    return torch.tensor(SKEWED, dtype=dtype) * torch.tensor(periods, dtype=dtype)[:, None]


@pytest.mark.parametrize(
    "periods, dtype",
    [*[(p, torch.float64) for p in PERIODS], ((1, 1, 1), torch.float32), ((1, 0, 1), torch.bfloat16)],
    ids=str,
)
def test_finds_what_looking_at_every_image_finds(periods, dtype):
    inside = (torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) @ torch.tensor(SKEWED)).to(dtype)
    for cutoff in (0.9, 2.3):
        wanted = listed(inside, cutoff, skewed(dtype, periods))
        assert_lists(periodic.periodic_edges(inside, cutoff, skewed(dtype, periods)), wanted)
    again = torch.cat([inside, inside[:2]])
    assert_lists(
        periodic.periodic_edges(again, 1.1, skewed(dtype, periods), loop=True),
        listed(again, 1.1, skewed(dtype, periods), loop=True),
    )


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_other_dimensions(dim):
    cell = torch.eye(dim, dtype=torch.float64) * 1.5 + 0.2 * torch.ones(dim, dim, dtype=torch.float64).triu(1)
    positions = torch.rand(5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim)) @ cell
    assert_lists(periodic.periodic_edges(positions, 1.4, cell), listed(positions, 1.4, cell, reach=2))


def test_samples_have_a_box_each_in_whatever_order_they_come():
    cells = torch.stack([skewed(), 0 * skewed(), skewed(periods=(0, 1, 1)) * 1.3])
    batch = torch.arange(9) * 2 % 3
    positions = torch.rand(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_lists(periodic.periodic_edges(positions, 2.1, cells, batch), listed(positions, 2.1, cells, batch))
    assert_lists(periodic.periodic_edges(positions, 1.7, cells[0], batch), listed(positions, 1.7, cells[0], batch))
    # a sample that has no nodes
    assert_lists(
        periodic.periodic_edges(positions, 1.7, cells, batch * 0 + 2), listed(positions, 1.7, cells, batch * 0 + 2)
    )


@pytest.mark.parametrize("count", [0, 1])
def test_few_nodes(count):
    positions = torch.full((count, 3), 7.0)
    for cutoff in (0.5, 1.0, 1.5):
        assert_lists(periodic.periodic_edges(positions, cutoff, torch.eye(3)), listed(positions, cutoff, torch.eye(3)))


STRUCTURES = {
    "one atom, a box far smaller than the cutoff": (bulk("Cu"), 7.3),
    "perovskite-like, rattled": (bulk("Si", cubic=True) * (3, 2, 2), 5.1),
    "skewed, atoms outside of the box": (Atoms("H9", cloud(9).numpy(), cell=SKEWED, pbc=True), 4.3),
    "a slab": (Atoms("H9", cloud(9, spread=1.0).numpy(), cell=SKEWED, pbc=(1, 1, 0)), 4.3),
    "a wire": (Atoms("H9", cloud(9, spread=1.0).numpy(), cell=SKEWED, pbc=(0, 1, 0)), 4.3),
    "a molecule": (molecule("C6H6"), 2.9),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_agrees_with_ase(name):
    atoms, cutoff = STRUCTURES[name]
    atoms = atoms.copy()
    atoms.rattle(0.05, seed=1)
    i, j, apart, shift = neighbor_list("ijDS", atoms, cutoff)
    order = np.lexsort((*shift.T[::-1], j, i))
    cell = torch.tensor(np.array(atoms.cell) * atoms.pbc[:, None])
    positions = torch.tensor(atoms.positions)
    assert_lists(periodic.periodic_edges(positions, cutoff, cell), [torch.tensor(x[order]) for x in (i, j, shift)])
    vector, distance = Vectors()(graph=Graph.radius(positions, cutoff, cell=cell))
    torch.testing.assert_close(vector, torch.tensor(apart[order]))
    torch.testing.assert_close(distance, torch.tensor(apart[order]).norm(dim=1))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_agrees_with_a_kd_tree(dim):
    positions = torch.rand(400, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    box = [1.0, 1.5, 2.0][:dim]
    tree = KDTree(positions.numpy(), boxsize=box)
    pairs = {p for a, b in tree.query_pairs(0.11) for p in ((a, b), (b, a))}
    rowptr, col, _ = periodic.periodic_edges(positions, 0.11, torch.diag(torch.tensor(box).double()))
    dst = torch.repeat_interleave(torch.arange(400), rowptr.diff())
    assert set(zip(dst.tolist(), col.tolist())) == pairs and len(col) == len(pairs)
    tree = KDTree(positions.numpy())
    rowptr, col = neighbours.radius_edges(positions, 0.11)
    dst = torch.repeat_interleave(torch.arange(400), rowptr.diff())
    assert set(zip(dst.tolist(), col.tolist())) == {p for a, b in tree.query_pairs(0.11) for p in ((a, b), (b, a))}
    near = np.sort(tree.query(positions.numpy(), 6)[1][:, 1:], 1)
    assert neighbours.knn_edges(positions, 5)[1].reshape(400, 5).tolist() == near.tolist()


# ---- programs


class Vectors(tg.MessagePassing):
    def edge(self, src, dst, edge):
        return edge.displacement, edge.distance


class Springs(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(torch.exp(-edge.distance) * edge.displacement.square().sum(-1))


springs = Springs()


def energy(positions, cell, batch=None, cutoff=2.1):
    return springs(graph=Graph.radius(positions, cutoff, batch, cell=cell)).square().sum()


def plain_energy(positions, cell, batch=None, cutoff=2.1):
    i, j, n, apart = lengths(positions, cell, batch)
    distance = apart.square().sum(-1)
    near = (distance.detach() <= cutoff**2) & ((i != j) | (n != 0).any(-1))
    each = torch.exp(-distance[near].sqrt()) * distance[near]
    return torch.zeros(len(positions), dtype=positions.dtype).index_add(0, i[near], each).square().sum()


@pytest.mark.parametrize("batch", [None, [0, 1, 0, 1]], ids=["one", "batch"])
def test_forces_stress_and_their_derivatives(batch):
    batch = None if batch is None else torch.tensor(batch)
    cell = skewed() if batch is None else torch.stack([skewed(), skewed(periods=(1, 0, 1)) * 1.1])
    inputs = [torch.rand(4, 3, dtype=torch.float64).requires_grad_(), cell.requires_grad_()]
    found = []
    for of in (energy, plain_energy):
        value = of(*inputs, batch)
        first = torch.autograd.grad(value, inputs, create_graph=True)
        found.append([value, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)])
    for ours, theirs in zip(*found):
        # a row of zeros is no period: what its derivative is, is nobody's matter
        torch.testing.assert_close(ours * (ours != 0), theirs * (ours != 0))
        assert (ours != 0).any()


def test_compiled_and_exported():
    call = lambda positions, cell: energy(positions, cell)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    inputs = [torch.rand(5, 3, dtype=torch.float64).requires_grad_(), skewed().requires_grad_()]
    first = torch.autograd.grad(plain_energy(*inputs), inputs)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), first)

    class Energy(torch.nn.Module):
        def forward(self, positions, cell):
            return energy(positions, cell)

    inputs = torch.rand(4, 3, dtype=torch.float64), skewed()
    program = torch.export.export(Energy(), inputs, dynamic_shapes=({0: torch.export.Dim.DYNAMIC}, None))
    inputs = torch.rand(6, 3, dtype=torch.float64), skewed() * 1.1
    torch.testing.assert_close(program.module()(*inputs), plain_energy(*inputs))


def test_reverse_and_cat_keep_displacements():
    positions, cell = torch.rand(4, 3, dtype=torch.float64), skewed()
    graph, module = Graph.radius(positions, 1.9, cell=cell), Vectors()
    apart, distance = module(graph=graph)
    turned, same = module(graph=graph.reverse())
    torch.testing.assert_close(turned, -apart)
    torch.testing.assert_close(same, distance)
    back = graph.reverse().reverse()
    torch.testing.assert_close(module(graph=back)[0], apart)
    free = Graph.radius(positions, 1.9)
    both = module(graph=Graph.cat([graph, free]))[0]
    torch.testing.assert_close(both, torch.cat([apart, module(graph=free)[0]]))
    assert graph.shift.shape == (graph.num_edges, 3) and free.shift is None
    assert "shifts of" in graph.explain()
    # pairs of a periodic list are no longer told apart by their image
    assert all(g.positions is None for g in (graph & free, free | graph, graph | graph))


def test_max_neighbors_and_loops_count_images():
    one, box = torch.zeros(1, 3), torch.eye(3)
    assert Graph.radius(one, 1.0, cell=box).num_edges == 6
    assert Graph.radius(one, 1.0, cell=box, loop=True).num_edges == 7
    assert Graph.radius(one, 1.0, cell=[[1, 0, 0], [0, 1, 0], [0, 0, 1]]).num_edges == 6
    with pytest.raises(tg.TigaError, match="node 0 has 6 neighbours.*max_neighbors=5"):
        Graph.radius(one, 1.0, cell=box, max_neighbors=5)


ones, box = torch.ones(3, 3), torch.eye(3)
REFUSED = [
    (lambda: Graph.radius(ones, 1, cell=torch.ones(3)), r"cell has shape \(3,\).*torch.diag"),
    (lambda: Graph.radius(ones, 1, cell=torch.ones(2, 2)), r"cell has shape \(2, 2\).*3 coordinates"),
    (lambda: Graph.radius(ones, 1, cell=box[None]), "1 cells, but there is no batch"),
    (lambda: Graph.radius(ones, 1, cell=box.long()), "cell must be floating point.*int64"),
    (lambda: Graph.radius(ones, 1, cell=torch.ones(3, 3)), "cell is .*not independent"),
    (lambda: Graph.radius(ones, 1, cell=box * math.nan), "cell is .*not finite"),
    (lambda: Graph.radius(ones, 1, torch.zeros(3).long(), cell=torch.stack([box, ones])), "cell 1 is"),
    (lambda: Graph.radius(ones, 1000, cell=box), "cutoff 1000.0 reaches over 1e.03 periods.*500"),
    (lambda: Graph.radius(ones, math.inf, cell=box), "cutoff inf reaches over inf"),
    (lambda: Graph.radius(ones, 1, [0, 1, 2], cell=torch.stack([box, box])), "batch has the entry 2.*2 cells"),
    (lambda: Graph.radius(ones, 1, [0, -1, 1], cell=torch.stack([box, box])), "batch has the entry -1"),
    (lambda: Graph.radius(ones * math.nan, 1, cell=box), "positions of node 0"),
    (lambda: Graph.radius(ones, 1, [0, 0, 0], cell=torch.ones(0, 3, 3)), "0 cells"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_refuses_with_name_number_and_remedy(call, words):
    with pytest.raises((tg.TigaError, TypeError), match=words):
        call()
