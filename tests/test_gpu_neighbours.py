"""Neighbour searches by kernels: on a GPU against the torch operations of the CPU; compiled for one without it."""

import pytest
import torch
import triton.language as tl
from compiled import compile_for, used
from test_periodic import energy

from tiga import neighbours, periodic
from tiga.codegen import device_neighbours
from tiga.codegen import neighbours as kernels

SKEWED = torch.tensor([[2.0, 0, 0], [1, 2.2, 0], [0.3, -0.7, 3]], dtype=torch.float64)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def cloud(count, dim, spread, dtype):
    generator = torch.Generator().manual_seed(count)
    return (spread * torch.rand(count, dim, generator=generator, dtype=torch.float64)).to(dtype)


def assert_same(search, *tensors, **options):
    here, there = search(*tensors, **options), None
    moved = [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]
    for _ in range(2):
        there = [t.cpu() for t in search(*moved, **options)]
        assert all(a.dtype == b.dtype and a.equal(b) for a, b in zip(here, there))
    assert here[1].numel()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_radius_and_knn_are_those_of_the_cpu(dtype):
    batch = torch.randint(0, 7, (3000,), generator=torch.Generator().manual_seed(0))
    for dim in (1, 2, 3):
        positions = cloud(3000, dim, 3.0, dtype)
        assert_same(neighbours.radius_edges, positions, (0.02, 0.1, 0.3)[dim - 1], batch)
        assert_same(neighbours.radius_edges, positions, (0.02, 0.1, 0.3)[dim - 1], loop=True)
        assert_same(neighbours.knn_edges, positions, 9, batch)
    assert_same(neighbours.knn_edges, positions.round(), 5)
    positions[:3] += 1000
    assert_same(neighbours.radius_edges, positions, 0.3)
    assert_same(neighbours.radius_edges, positions[:1200] * 0, 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_boxes_are_those_of_the_cpu(dtype):
    assert_same(periodic.periodic_edges, cloud(2000, 3, 9.0, dtype), 0.7, (4 * SKEWED).to(dtype))
    assert_same(periodic.periodic_edges, cloud(30, 3, 9.0, dtype) - 4, 4.3, SKEWED.to(dtype))
    cells = torch.stack([SKEWED, 0 * SKEWED, SKEWED * torch.tensor([[1.0], [0], [1]], dtype=torch.float64)]).to(dtype)
    assert_same(periodic.periodic_edges, cloud(60, 3, 4.0, dtype), 2.1, cells, torch.arange(60) % 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_operations_of_the_gpu_are_those_of_the_cpu(dtype, monkeypatch):
    """Of more dimensions than kernels search, and of what they do; a lattice's nodes have many at one distance."""
    batch = torch.arange(900) * 5 % 7
    assert_same(neighbours.knn_edges, cloud(900, 8, 3.0, dtype), 8, batch)
    assert_same(neighbours.knn_edges, cloud(900, 8, 1.5, dtype).round(), 8)
    assert_same(neighbours.radius_edges, cloud(900, 5, 1.5, dtype), 0.7)
    monkeypatch.setattr(neighbours, "KERNEL_DEVICES", set())
    assert_same(neighbours.radius_edges, cloud(900, 3, 3.0, dtype), 0.5, batch)
    assert_same(neighbours.knn_edges, cloud(900, 3, 3.0, dtype).round(), 5)
    assert_same(periodic.periodic_edges, cloud(30, 3, 9.0, dtype) - 4, 4.3, SKEWED.to(dtype))
    cells = torch.stack([SKEWED, 0 * SKEWED, SKEWED * torch.tensor([[1.0], [0], [1]], dtype=torch.float64)]).to(dtype)
    assert_same(periodic.periodic_edges, cloud(60, 3, 4.0, dtype), 2.1, cells, torch.arange(60) % 3)


@pytest.mark.gpu
def test_the_device_is_waited_for_once_and_for_the_cells():
    positions, box = cloud(3000, 3, 3.0, torch.float32).cuda(), torch.eye(3, device="cuda") * 3
    batch = torch.arange(3000, device="cuda") % 5
    calls = [
        (1, lambda: neighbours.radius_edges(positions, 0.3, batch)),
        (1, lambda: neighbours.knn_edges(positions, 4, batch)),
        (2, lambda: periodic.periodic_edges(positions, 0.3, box)),
    ]
    for times, call in calls:
        call()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning, match="synchroniz") as seen:
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum("synchroniz" in str(w.message) for w in seen) == times


@pytest.mark.gpu
def test_forces_and_stress_in_a_small_box_are_those_of_the_cpu():
    """Pairs have several edges, one an image: each keeps its own shift in both passes."""
    positions, found = cloud(40, 3, 4.0, torch.float64), []
    for device in ("cpu", "cuda"):
        inputs = [t.to(device).requires_grad_() for t in (positions, SKEWED * 1.3)]
        value = energy(*inputs, cutoff=3.1)
        first = torch.autograd.grad(value, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)
        found.append([t.detach().cpu() for t in (value, *first, *second)])
    for here, there in zip(*found):
        torch.testing.assert_close(there, here)


def kinds():
    """Of each kernel the widest instance: float64, with boxes."""
    long, short, x = (torch.empty(4, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.float64))
    size = (1000, 10)
    blocks = (kernels.RUNS, kernels.BLOCK)
    grid = (long, long, short, x)
    yield (
        device_neighbours.near,
        (
            *(long, long, long, x, *grid, short, short, short, short, x, long, *size),
            *(False, tl.float64, True, True, *blocks),
        ),
    )
    yield (
        device_neighbours.nearest,
        (
            *(long, long, long, x, short, *grid, long, *size, tl.float64),
            *blocks,
        ),
    )
    yield device_neighbours.order, (long, long, long, short, short, True, 64, 16)


def test_kernels_do_not_spill():
    for fn, arguments in kinds():
        kernel = compile_for(fn, arguments, {"num_warps": 1, "enable_fp_fusion": False}, 90)
        registers, spilled = used(kernel)
        assert spilled == 0 and registers <= 128
        # a product and a sum rounded once would decide edges otherwise than torch does
        assert "fma.rn.f64" not in kernel.asm["ptx"]
