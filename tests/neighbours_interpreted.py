"""Neighbour searches by kernels under Triton's interpreter: test_neighbours.py starts them with `-p interpreted`."""

import math

import pytest
import torch
from images import assert_lists, listed
from test_neighbours import assert_lists as assert_pairs
from test_neighbours import nearest, within

import tiga as tg
from tiga import neighbours, periodic
from tiga.codegen import device_neighbours
from tiga.codegen import neighbours as kernels

SKEWED = torch.tensor([[2.0, 0, 0], [1, 2.2, 0], [0.3, -0.7, 3]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    """Every search of these tests is by kernels; it is counted that they run."""
    launched = []

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return order[grid]

    order = device_neighbours.order
    monkeypatch.setattr(device_neighbours, "order", Counted())
    monkeypatch.setattr(neighbours, "KERNEL_DEVICES", {"cpu"})
    yield launched


def cloud(count, dim=3, spread=2.0, dtype=torch.float32):
    return (spread * torch.rand(count, dim, generator=torch.Generator().manual_seed(count), dtype=dtype)).to(dtype)


def test_radius_of_samples_with_one_far_off(by_kernels):
    positions = cloud(6)
    positions[3] += 1e6
    batch = torch.tensor([7, -2, 7, 7, 7, -2])
    assert_pairs(neighbours.radius_edges(positions, 1.3, batch), within(positions, 1.3, batch))
    assert by_kernels


@pytest.mark.parametrize("dim, dtype", [(1, torch.float16), (2, torch.float64)], ids=str)
def test_radius_in_fewer_dimensions(dim, dtype):
    positions = cloud(4, dim, 1.0, dtype)
    assert_pairs(neighbours.radius_edges(positions, 0.4, loop=True), within(positions, 0.4, loop=True))


def test_the_cutoff_is_included_and_may_be_all():
    line = torch.tensor([[0.0], [0.1], [0.4]])
    assert_pairs(neighbours.radius_edges(line, 0.1), (line - line.t()).abs().le(0.1).fill_diagonal_(False))
    assert_pairs(neighbours.radius_edges(line[1:], math.inf), torch.eye(2) == 0)


def test_boxes_of_a_batch_smaller_than_the_cutoff():
    cells = torch.stack([SKEWED, 0 * SKEWED, SKEWED * torch.tensor([[1.0], [0], [1]], dtype=torch.float64)])
    positions, batch = cloud(3, dtype=torch.float64), torch.tensor([2, 0, 2])
    positions[0] -= 2 * SKEWED[2]
    wanted = listed(positions, 2.3, cells, batch, reach=4)
    assert len(wanted[0]) > 4
    assert_lists(periodic.periodic_edges(positions, 2.3, cells, batch), wanted)


@pytest.mark.parametrize("longest", [512, 1], ids=["compared", "sorted"])
def test_many_bins_wrap_around(longest, monkeypatch):
    monkeypatch.setattr(kernels, "LONGEST", longest)
    cell, positions = torch.diag(torch.tensor([4.0, 0.9])), torch.tensor([[0.05, 0.8], [3.95, 0.05], [2.0, 0.5]])
    wanted = listed(positions, 0.95, cell, reach=2)
    assert torch.bincount(wanted[0]).max() > 1
    assert_lists(periodic.periodic_edges(positions, 0.95, cell), wanted)


def test_nearest_with_ties_and_small_samples(by_kernels):
    cross = torch.tensor([[0.0, 0], [1, 0], [0, 1], [-1, 0], [9, 9], [9, 9.5]])
    batch = torch.tensor([1, 1, 1, 1, 0, 0])
    assert_pairs(neighbours.knn_edges(cross, 2, batch), nearest(cross, 2, batch))
    assert by_kernels


def test_nearest_where_rings_must_grow():
    positions = cloud(3, 3, 1.0)
    positions[2] += 40
    assert_pairs(neighbours.knn_edges(positions, 2), nearest(positions, 2))


@pytest.mark.parametrize("count", [0, 1])
def test_few_nodes(count):
    positions = torch.zeros(count, 3)
    assert_pairs(neighbours.radius_edges(positions, 1.0), within(positions, 1.0))
    assert_pairs(neighbours.knn_edges(positions, 2), nearest(positions, 2))
    assert_lists(periodic.periodic_edges(positions, 0.9, torch.eye(3)), listed(positions, 0.9, torch.eye(3)))


ones, box = torch.ones(2, 3), torch.eye(3)
flat = torch.stack([box, ones[[0, 0, 0]]])
REFUSED = [
    (lambda: neighbours.radius_edges(ones, 1.0, None, False, 0), "node 0 has 1 neighbours within 1.0.*max_neighbors=0"),
    (lambda: neighbours.radius_edges(ones * torch.tensor([[1.0], [math.nan]]), 1.0), "positions of node 1 are .nan"),
    (lambda: neighbours.knn_edges(ones * math.inf, 1), "positions of node 0"),
    (lambda: periodic.periodic_edges(ones[:1], 1.0, flat, torch.tensor([0])), "cell 1 is .*independent"),
    (lambda: periodic.periodic_edges(ones[:1], 1000.0, box), "reaches over 1e.03 periods"),
    (lambda: periodic.periodic_edges(ones[:1], 1.0, box * math.nan), "cell is .*not finite"),
    (lambda: periodic.periodic_edges(ones[:1], 0.5, box[None], torch.tensor([1])), "batch has the entry 1"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_what_the_read_shows_is_refused(call, words):
    with pytest.raises(tg.TigaError, match=words):
        call()
