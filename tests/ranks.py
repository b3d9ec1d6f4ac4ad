"""What two processes do together, started once by test_citizen.py: `python ranks.py RANK FOLDER` writes its results."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import Attention, attend, plain_attention
from torch import nn

import tiga as tg

N, H, D = 6, 4, 3


class Block(nn.Module):
    """Projections, causal attention, residual; `plain`: with attention in plain torch."""

    def __init__(self, plain=False):
        super().__init__()
        self.plain, self.attention = plain, Attention()
        self.project, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x):
        q, k, v = self.project(x).view(len(x), 3, H, D).unbind(1)
        if self.plain:
            mixed = plain_attention(torch.ones(len(x), len(x)).tril().bool(), q, k, v)
        else:
            mixed = attend(self.attention, tg.Graph.triangular(len(x)), q, k, v)
        return x + self.out(mixed.flatten(1).relu())


def batch(rank):
    return torch.randn(N, H * D, generator=torch.Generator().manual_seed(rank))


def trained(plain, wrap, steps=2):
    """Parameters after steps of training where each rank has its batch, and averages gradients with the others."""
    torch.manual_seed(1)
    model = Block(plain)
    fn = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        fn(batch(dist.get_rank())).square().sum().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def alone(steps=2):
    """The same in one process: the mean of the ranks' gradients, in plain torch."""
    torch.manual_seed(1)
    model = Block(plain=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(model(batch(r)).square().sum() for r in range(2)) / 2).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def data_parallel(compiled):
    wrap = nn.parallel.DistributedDataParallel
    make = (lambda m: torch.compile(wrap(m), backend="aot_eager")) if compiled else wrap
    torch.testing.assert_close(trained(False, make), alone())


def fully_sharded(compiled):
    from torch.distributed.fsdp import fully_shard

    def make(model):
        fully_shard(model)
        return torch.compile(model, backend="aot_eager") if compiled else model

    torch.testing.assert_close(trained(False, make), alone())


def sharded(dim, shape, compiled=False):
    """Heads (or batches) cut over the ranks: each computes its own, forward and backward, and nothing is gathered."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, program = init_device_mesh("cpu", (2,)), Attention()
    torch.manual_seed(2)
    whole = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    pieces = [distribute_tensor(t.detach(), mesh, [Shard(dim)]).requires_grad_() for t in whole]
    run = lambda q, k, v: attend(program, tg.Graph.triangular(q.shape[0]), q * 2, k, v)
    out = (torch.compile(run, backend="aot_eager") if compiled else run)(*pieces)
    out.square().sum().backward()
    flat = [t.reshape(shape[0], -1, shape[-1]) for t in whole]
    want = plain_attention(torch.ones(shape[0], shape[0]).tril().bool(), flat[0] * 2, *flat[1:])
    want.square().sum().backward()
    assert out.placements == (Shard(dim),) and out.to_local().shape[dim] == shape[dim] // 2
    assert all(p.grad.placements == (Shard(dim),) for p in pieces)
    torch.testing.assert_close(out.full_tensor().flatten(1), want.flatten(1))
    torch.testing.assert_close([p.grad.full_tensor() for p in pieces], [t.grad for t in whole])


def gathered():
    """Rows, and features that are summed, are cut otherwise, or not at all: results are right."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh, program = init_device_mesh("cpu", (2,)), Attention()
    torch.manual_seed(2)
    whole = [torch.randn(N, H, 4) for _ in range(3)]
    want = plain_attention(torch.ones(N, N).tril().bool(), *whole)
    for dim in (0, 2):
        out = attend(program, tg.Graph.triangular(N), *[distribute_tensor(t, mesh, [Shard(dim)]) for t in whole])
        torch.testing.assert_close(out.full_tensor(), want)


def cached(rank):
    """The second process takes from the cache what the first one compiled."""
    from torch._dynamo.utils import counters

    program = Attention()
    fn = torch.compile(lambda q, k, v: F.relu(attend(program, tg.Graph.triangular(N), q * 2, k, v)), fullgraph=True)
    if rank:
        dist.barrier()
    torch.manual_seed(3)
    q, k, v = (torch.randn(N, H, D, requires_grad=True) for _ in range(3))
    got = fn(q, k, v)
    got.sum().backward()  # an entry of the cache holds both directions
    if not rank:
        dist.barrier()
    torch.testing.assert_close(got, plain_attention(torch.ones(N, N).tril().bool(), q * 2, k, v).relu())
    found = counters["aot_autograd"]
    assert (found["autograd_cache_hit"], found["autograd_cache_miss"]) == ((1, 0) if rank else (0, 1)), dict(found)


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder + "/cache"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    works = {
        "ddp": lambda: data_parallel(False),
        "ddp compiled": lambda: data_parallel(True),
        "fsdp2": lambda: fully_sharded(False),
        "fsdp2 compiled": lambda: fully_sharded(True),
        "heads": lambda: sharded(1, (N, H, D)),
        "batches": lambda: sharded(1, (N, 4, 2, D)),
        "heads of batches compiled": lambda: sharded(2, (N, 2, H, D), True),
        "rows, summed features": gathered,
        "cache": lambda: cached(rank),
    }
    results = {}
    for name, work in works.items():
        try:
            work()
            results[name] = "ok"
        except Exception as e:
            results[name] = f"{type(e).__name__}: {str(e)[-1500:]}"
        dist.barrier()
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump(results, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
