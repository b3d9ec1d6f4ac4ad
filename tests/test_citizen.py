"""The operator among PyTorch's other parts: what is compiled composes with them; two processes at once."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from fused import compiling, programs
from programs import Attention, attend, fields, plain_attention
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import codecache
from torch._inductor.utils import fresh_cache
from torch.autograd import grad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tiga as tg
from tiga.inductor import version

HERE = os.path.dirname(os.path.abspath(__file__))
program = Attention()
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def layer(q, k, v, w):
    """Neighbours on both sides of the operator, and a product between two of it."""
    out = F.silu(attend(program, tg.Graph.triangular(len(q)), q * 2, k, v)) @ w
    return attend(program, tg.Graph.triangular(len(q)), out.tanh(), k, v) * q


def plain(q, k, v, w):
    mask = torch.ones(len(q), len(q)).tril().bool()
    return plain_attention(mask, (F.silu(plain_attention(mask, q * 2, k, v)) @ w).tanh(), k, v) * q


def inputs():
    return [*fields(grad=True), torch.randn(4, 4, requires_grad=True)]


def test_checkpoints_of_a_fused_layer():
    """Computed again in backward, the operator's results kept or not: gradients of plain torch."""

    def policy(ctx, op, *args, **kwargs):
        kept = op == torch.ops.tiga.propagate.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    args = inputs()
    wanted = grad(plain(*args).square().sum(), args)
    for options, again in (({}, 2), (selective, 0)):
        torch._dynamo.reset()
        graphs = []
        fn = compiling(graphs)(functools.partial(checkpoint, layer, use_reentrant=False, **options))
        close(grad(fn(*args).square().sum(), args), wanted, rtol=1e-4, atol=1e-5)
        forward, backward = graphs
        assert len(programs(forward)) == 2 and len(programs(backward)) == 2 + again


def test_compiled_autograd_of_a_fused_layer():
    args, graphs = inputs(), []
    wanted = grad(plain(*args).square().sum(), args)
    out = compiling(graphs)(layer)(*args).square().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        out.backward()
    close([a.grad for a in args], list(wanted), rtol=1e-4, atol=1e-5)


def test_autocast_inside_and_around_what_is_compiled():
    args = [a.detach() for a in inputs()]

    def inside(*a):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(*a)

    with torch.no_grad():
        want = inside(*args)
        got = compiling([])(inside)(*args)
        with torch.autocast("cpu", torch.bfloat16):
            around = compiling([])(layer)(*args)
    assert want.dtype == got.dtype == around.dtype
    close([got, around], [want, want], rtol=2e-2, atol=2e-2)
    close(got.float(), plain(*args), rtol=5e-2, atol=5e-2)


def test_sizes_that_are_never_symbols():
    """dynamic=False: each is compiled once."""
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(layer, backend=counter, fullgraph=True, dynamic=False)
    for n in (5, 7, 5):
        args = [*fields(n), torch.randn(4, 4)]
        close(fn(*args), plain(*args), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2


def test_transforms_of_functions_inside_what_is_compiled():
    """Per-sample gradients, a Hessian-vector product, a gradient of a gradient: of plain torch."""
    q, k, v, w = [a.detach() for a in inputs()]
    batch = torch.stack([q, -q])

    def each(f):
        energy = lambda q: f(q, k, v, w).square().sum()
        per_sample = torch.func.vmap(torch.func.grad(energy))(batch)
        product = torch.func.jvp(torch.func.grad(energy), (q,), (v,))[1]
        twice = torch.func.grad(lambda q: torch.func.grad(energy)(q).sin().sum())(q)
        return per_sample, product, twice

    graphs = []
    for got, want in zip(compiling(graphs)(lambda: each(layer))(), each(plain)):
        close(got, want, rtol=1e-3, atol=1e-4)
    assert all("reduce" in text for graph in graphs for text in programs(graph))


def test_another_version_of_tiga_finds_nothing_in_the_cache(monkeypatch):
    q, k, v = fields()
    fn = torch.compile(lambda q, k, v: attend(program, tg.Graph.triangular(len(q)), q * 2, k, v).relu())

    def misses():
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            fn(q, k, v)
        return counters["aot_autograd"]["autograd_cache_miss"], counters["inductor"]["fxgraph_cache_miss"]

    with fresh_cache():
        assert misses() == (1, 1) and misses() == (0, 0)
        monkeypatch.setattr(version, "sources", lambda: b"another")
        assert misses() == (1, 1)
    assert codecache.custom_backend_passes["tiga"].uuid() == ("tiga", b"another")


WORKS = ("ddp", "ddp compiled", "fsdp2", "fsdp2 compiled", "heads", "batches", "heads of batches compiled")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two processes found, by name of what they did."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *sys.path]), "OMP_NUM_THREADS": "1"}
    start = lambda rank: subprocess.Popen(
        [sys.executable, os.path.join(HERE, "ranks.py"), str(rank), folder],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ranks = [start(0), start(1)]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = []
    for rank in range(2):
        with open(f"{folder}/{rank}.json") as f:
            found.append(json.load(f))
    return found


@pytest.mark.parametrize("work", [*WORKS, "rows, summed features", "cache"])
def test_two_processes(together, work):
    assert [found[work] for found in together] == ["ok", "ok"]
