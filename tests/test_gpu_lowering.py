"""Kernels in Inductor's code, on a GPU: values and gradients of plain torch, launches, CUDA graphs, a package."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
import torch
from programs import Attention, Rearranged, attend
from test_gpu_compile import launched
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import tiga as tg

pytestmark = pytest.mark.gpu
CALL = "torch.ops.tiga.propagate.default("
N = 300
program = Attention()


def relation(kind):
    """(the graph of n nodes as a compiled function makes it or has it, how often j reaches i)."""
    row = torch.arange(N, device="cuda")
    i, j = row[:, None], row[None]
    bounds = torch.tensor([0, 100, 170, N], device="cuda")
    edges = torch.randint(0, N, (2, 4000), device="cuda")
    prepared = tg.Graph.from_edge_index(edges, num_src=N, num_dst=N).prepare()
    segment = torch.searchsorted(bounds, row, right=True)
    count = torch.zeros(N, N, device="cuda").index_put((edges[1], edges[0]), torch.ones(4000, device="cuda"), True)
    return {
        "triangular": (lambda n: tg.Graph.triangular(n), j <= i),
        "window": (lambda n: tg.Graph.window(n, 50, 3), (j >= i - 50) & (j <= i + 3)),
        "blocks": (
            lambda n: tg.Graph.cu_seqlens(bounds, num_dst=n, num_src=n),
            (segment[:, None] == segment[None]) & (j <= i),
        ),
        "intervals": (lambda n: tg.Graph.intervals(row // 2, row + 1, n), (j >= i // 2) & (j <= i)),
        "prepared list": (lambda n: prepared, count),
        "list": (lambda n: tg.Graph.from_edge_index(edges, num_src=n, num_dst=n), count),
    }[kind]


def plain(times, q, k, v):
    """Attention whose edges j -> i count so often."""
    score = torch.einsum("ihd,jhd->hij", q, k) * 0.5
    weight = (score - score.amax(-1, keepdim=True)).exp() * times.to(q.dtype)
    return torch.einsum("hij,jhd->ihd", weight / weight.sum(-1, keepdim=True), v)


KINDS = ["triangular", "window", "blocks", "intervals", "prepared list", "list"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_gradients_and_launches(kind):
    torch._dynamo.reset()
    make, times = relation(kind)
    args = [torch.randn(N, 2, 64, device="cuda", requires_grad=True) for _ in range(3)]
    wide = [a.detach().double().requires_grad_() for a in args]
    layer = lambda q, k, v: attend(program, make(q.shape[0]), q * 2, k, v).relu()
    fn = torch.compile(layer, fullgraph=True)
    wanted = plain(times, wide[0] * 2, *wide[1:]).relu()
    with torch.no_grad():
        out, codes = run_and_get_code(fn, *args)
        assert launched(lambda: fn(*args)) <= launched(lambda: layer(*args))
    got, more = run_and_get_code(lambda: torch.autograd.grad(fn(*args).square().sum(), args))
    assert not any(CALL in code for code in [*codes, *more])
    pairs = zip((out, *got), (wanted, *torch.autograd.grad(wanted.square().sum(), wide)))
    assert all((a.double() - b).norm() <= 1e-5 * b.norm() for a, b in pairs)


def test_features_that_torch_puts_together_beside_kernels():
    torch._dynamo.reset()
    edges = torch.randint(N, (2, 4000))
    host = [torch.randn(N, 120) / 4, torch.randn(N, 40) / 4, torch.randn(4000, 6, 3)]

    def run(device, dtype):
        graph = tg.Graph.from_edge_index(edges.to(device), num_src=N, num_dst=N)
        layer, given = Rearranged(), [t.to(device, dtype).requires_grad_() for t in host]
        call = lambda x, y, z: layer(graph=graph, src={"x": x}, dst={"x": x[:, :80], "y": y}, edge={"z": z})
        fn = torch.compile(call, fullgraph=True) if device == "cuda" else call
        out = fn(*given)
        return out.detach(), *torch.autograd.grad(out.square().sum(), given)

    got, codes = run_and_get_code(lambda: run("cuda", torch.float32))
    assert not any(CALL in code for code in codes)
    assert all((a.cpu() - b).norm() <= 1e-5 * b.norm() for a, b in zip(got, run("cpu", torch.float64)))


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_gradients_that_are_concatenated_are_written_side_by_side(name):
    """Of one product's columns, or of scores: the compiled layer's are those of the eager one."""
    torch._dynamo.reset()
    loops = {} if name == "TransformerConv" else {"add_self_loops": False}
    layer = getattr(tg.nn, name)(32, 16, heads=4, **loops).cuda()
    x = torch.randn(N, 32, device="cuda", requires_grad=True)
    graph = tg.Graph.from_edge_index(torch.randint(0, N, (2, 4000), device="cuda"), num_src=N, num_dst=N).prepare()
    given = torch.randn(N, 64, device="cuda")
    gradients = lambda fn: torch.autograd.grad(fn(x, graph), [x, *layer.parameters()], given)
    got, codes = run_and_get_code(lambda: gradients(torch.compile(layer, fullgraph=True)))
    torch.testing.assert_close(got, gradients(layer), rtol=1e-4, atol=1e-4)
    assert not any("fused_cat" in code or CALL in code for code in codes[-1:])


def test_sizes_that_change_compile_nothing_more():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    heads_first = lambda x: x.permute(1, 0, 2)
    layer = lambda q, k, v: attend(program, tg.Graph.triangular(v.shape[0]), heads_first(q), heads_first(k), v)
    fn = torch.compile(layer, backend=counter, fullgraph=True)
    for n in (37, 300, 1000, 64, 5):
        q, k = torch.randn(2, 2, n, 64, device="cuda")
        v = torch.randn(n, 2, 64, device="cuda")
        with torch.no_grad():
            out = fn(q, k, v)
        rows = [heads_first(q).double(), heads_first(k).double(), v.double()]
        wanted = plain(torch.ones(n, n, device="cuda").tril(), *rows)
        assert (out.double() - wanted).norm() <= 1e-5 * wanted.norm()
    assert counter.frame_count == 2


def test_cuda_graphs_of_a_list_skip_nothing():
    torch._dynamo.reset()
    counters.clear()
    make, times = relation("prepared list")
    args = [torch.randn(N, 2, 64, device="cuda") for _ in range(3)]
    fn = torch.compile(lambda q, k, v: attend(program, make(N), q, k, v).relu(), fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            out = fn(*args).clone()
    wanted = plain(times, *[a.double() for a in args]).relu()
    assert (out.double() - wanted).norm() <= 1e-5 * wanted.norm()
    assert counters["inductor"]["cudagraph_skips"] == 0


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attention = torch.nn.Linear(128, 384), Attention()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).unbind(1)
        return attend(self.attention, tg.Graph.triangular(x.shape[0]), q, k, v).flatten(1)


CHILD = """
import sys
sys.modules["tiga"] = None
import torch
x, wanted = torch.load(sys.argv[1] + ".call")
torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(x), wanted, rtol=1e-4, atol=1e-5)
"""


def packaged(module, path):
    """A package of a module, with a call of it; how a process ends that loads it, without tiga."""
    module, x = module.cuda().eval(), torch.randn(200, 128, device="cuda")
    with torch.no_grad():
        exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
        torch.save((x, module(x)), path + ".call")
    return subprocess.run([sys.executable, "-c", CHILD, path], capture_output=True, text=True, timeout=300)


def test_a_package_holds_the_kernels_and_runs_without_tiga(tmp_path):
    """Where packages run at all: a plain Linear's tells."""
    path = str(tmp_path / "layer.pt2")
    done = packaged(Layer(), path)
    with zipfile.ZipFile(path) as package:
        held = {name: package.read(name) for name in package.namelist()}
    assert any(b".text.propagate" in held[name] for name in held if name.endswith(".cubin"))
    (code,) = [held[name] for name in held if name.endswith(".wrapper.cpp")]
    assert b"aoti_torch_proxy_executor_call_function(" not in code
    if done.returncode:
        plain = packaged(torch.nn.Linear(128, 128), str(tmp_path / "linear.pt2"))
        assert plain.returncode == done.returncode < 0, done.stderr[-2000:]
