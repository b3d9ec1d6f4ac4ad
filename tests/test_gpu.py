"""Real kernels on a CUDA device: CASES, programs that are not attention, examples, and what must never happen."""

import subprocess
import sys
import warnings

import pytest
import torch
from cases import replaced, tensors
from compiled import float32_products
from test_cases import assert_accurate, every
from test_examples import EXAMPLES, RUNS
from test_gpu_sample import Attention

import tiga as tg
from tiga import passes
from tiga.ops import propagate

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def on_cuda(case, dtype):
    arguments = case.arguments(dtype)
    moved = {
        place: {
            n: x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for n, x in f.items()
        }
        for place, f in arguments.items()
    }
    return case.build(dtype).cuda(), moved, arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@every()
def test_error_is_that_of_plain_torch(case, dtype):
    module, arguments, host = on_cuda(case, dtype)
    got = case.run(module, arguments, case.graph.to("cuda"))
    plain_module = case.build(dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in tensors(host)]
    exact_module = case.build(torch.float64)
    for p, x, y in zip(exact_module.parameters(), plain_module.parameters(), module.parameters()):
        x.data, p.data = y.detach().cpu(), y.detach().cpu().double()
    plain, exact = case.oracle(plain_module, host), case.oracle(exact_module, replaced(host, exact_inputs))
    for x, y, z in zip(got, plain, exact):
        assert_accurate(x.cpu(), y.to(x.dtype), z)


# Few rows, memory, graphs of CUDA, sizes.


def decode(rows, sources, dtype=torch.float16):
    """A call of grouped queries against a cache, and its result in float64."""
    draw = lambda *shape: torch.randn(shape, device=DEVICE, dtype=dtype)
    query, key, value = draw(rows, 4, 8, 128), draw(sources, 4, 1, 128), draw(sources, 4, 1, 128)
    graph, module = tg.Graph.triangular(rows, sources, offset=sources - rows), Attention()
    call = lambda: module(graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=128**-0.5)
    i, j = torch.arange(rows, device=DEVICE)[:, None], torch.arange(sources, device=DEVICE)[None]
    q, k, v = query.double(), key[:, :, 0].double(), value[:, :, 0].double()
    score = (torch.einsum("ihgd,jhd->ihgj", q, k) * 128**-0.5).masked_fill(
        (j > i + sources - rows)[:, None, None], -torch.inf
    )
    return call, torch.einsum("ihgj,jhd->ihgd", score.softmax(-1), v)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("sources", [33, 5000])
def test_few_rows_against_many_sources(rows, sources):
    call, wanted = decode(rows, sources)
    out = call()
    error = (out.double() - wanted).abs().max()
    assert error <= 4 * torch.finfo(out.dtype).eps * wanted.abs().max()
    assert torch.equal(out, call())


def test_a_captured_graph_replays_new_inputs():
    x = [torch.randn(96, 2, 32, device=DEVICE) for _ in range(3)]
    module = Attention()
    attend = lambda q, k, v: module(
        graph=tg.Graph.triangular(96), src={"key": k, "value": v}, dst={"query": q}, scale=0.1
    )
    for _ in range(3):
        attend(*x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = attend(*x)
    for t in x:
        t.copy_(torch.randn_like(t))
    captured.replay()
    torch.testing.assert_close(out, attend(*x))


def test_few_rows_can_be_captured():
    call, wanted = decode(4, 5000)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = call()
    out.fill_(torch.nan)
    captured.replay()
    assert torch.equal(out, call())
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)


def packed(n):
    return tg.Graph.cu_seqlens([0, n // 3, n // 2, n]).to(DEVICE)


@pytest.mark.parametrize(
    "first, others",
    [
        (300, (301, 304, 511, 512, 1000)),
        pytest.param(2000, (2001, 2016, 2040), id="sources in parts"),
    ],
)
def test_sizes_make_no_other_kernel(monkeypatch, first, others):
    """Neither source nor machine code is made for other numbers of rows, nor for other boundaries, of one plan."""
    from triton import knobs

    draw = lambda n: torch.randn(n, 2, 64, device=DEVICE, dtype=torch.float16).requires_grad_()

    def run(n):
        for make in (tg.Graph.triangular, packed):
            q, k, v = draw(n), draw(n), draw(n)
            out = Attention()(graph=make(n), src={"key": k, "value": v}, dst={"query": q}, scale=0.125)
            torch.autograd.grad(out.float().square().sum(), (q, k, v))

    run(first)
    compiled = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **of: compiled.append(of["metadata"]["name"]))
    written = passes.COUNTS["emit-tiles"]
    for n in others:
        run(n)
    assert passes.COUNTS["emit-tiles"] == written and compiled == []


@pytest.mark.parametrize("make", [tg.Graph.dense, tg.Graph.triangular, lambda n: tg.Graph.window(n, n // 2), packed])
def test_memory_is_that_of_the_rows(make):
    """Forward, backward and twice hold less than one head's scores, with keys that two heads of queries share."""
    n = 16384
    draw = lambda *shape: torch.randn(n, *shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    q, k, v = draw(1, 2, 32), draw(1, 1, 32), draw(1, 1, 32)
    module, graph = Attention(), make(n)

    def run():
        out = module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.125)
        first = torch.autograd.grad(out, (q, k, v), out.detach(), create_graph=True)
        return torch.autograd.grad(first, (q, k, v), [x.detach() for x in first])

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.max_memory_allocated() - before < n * n * 2


def test_tf32_is_taken_only_where_torch_allows_it():
    q, k, v = (torch.randn(300, 2, 64, device=DEVICE) for _ in range(3))
    attend = lambda *x: Attention()(graph=graph, src={"key": x[1], "value": x[2]}, dst={"query": x[0]}, scale=0.125)
    graph = tg.Graph.triangular(300)
    exact = attend(q.double(), k.double(), v.double())
    error = lambda: ((attend(q, k, v) - exact).norm() / exact.norm()).item()
    assert error() < 1e-6
    with float32_products("tf32"):
        assert 1e-5 < error() < 3e-3


def test_rows_that_are_no_neighbours_never_leak():
    n = 70
    q, k, v = (torch.randn(n, 2, 64, device=DEVICE) for _ in range(3))
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[-1], dirty_v[-1] = torch.nan, torch.inf
    attend = lambda n, q, k, v: Attention()(
        graph=tg.Graph.triangular(n), src={"key": k, "value": v}, dst={"query": q}, scale=0.1
    )
    clean = attend(n - 1, q[:-1], k[:-1], v[:-1])  # of other tiles, whose sums round otherwise
    torch.testing.assert_close(attend(n, q, dirty_k, dirty_v)[:-1], clean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_infinities_and_nan_are_those_of_numbers_one_by_one(dtype):
    n = 70
    q, k, v = (torch.randn(n, 1, 64, device=DEVICE).to(dtype) for _ in range(3))
    v[3, 0, 0], v[5, 0, 0], v[7, 0, 1], v[9, 0, 2] = torch.inf, -torch.inf, torch.nan, -torch.inf
    out = Attention()(graph=tg.Graph.triangular(n), src={"key": k, "value": v}, dst={"query": q}, scale=0.1)[:, 0]
    assert out[3:5, 0].eq(torch.inf).all() and out[5:, 0].isnan().all() and out[:3].isfinite().all()
    assert out[:7, 1].isfinite().all() and out[7:, 1].isnan().all()
    assert out[:9, 2].isfinite().all() and out[9:, 2].eq(-torch.inf).all() and out[:, 3:].isfinite().all()


# What is said, and the examples.


def test_levels_of_the_kernel_can_be_read():
    module = Attention()
    x = torch.randn(40, 2, 64, device=DEVICE, dtype=torch.float16)
    module(graph=tg.Graph.triangular(40), src={"key": x, "value": x}, dst={"query": x}, scale=0.1)
    assert "tl.dot" in module.ir("kernel") and "tt.dot" in module.ir("kernel_ttir")
    assert "ttg." in module.ir("ttgir") and ".target sm_" in module.ir("ptx")
    assert module.last_variant.artifacts["ptx"] == module.ir("ptx")


def test_what_no_kernel_fits_is_said_once(monkeypatch):
    monkeypatch.setattr(propagate, "_warned", set())
    x = torch.randn(5, 2, 8, device=DEVICE, dtype=torch.float64)
    attend = lambda: Attention()(graph=tg.Graph.triangular(5), src={"key": x, "value": x}, dst={"query": x}, scale=0.1)
    with pytest.warns(UserWarning, match=r"no kernel fits this program \(float64\)"):
        out = attend()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(out, attend())


PUBLISHED = [name for name, (arguments, _, _) in RUNS.items() if not arguments]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_example_runs_on_the_gpu(name):
    run = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    last = run.stdout.splitlines()[-1]
    assert RUNS[name][2] in last and "on cuda" in last
