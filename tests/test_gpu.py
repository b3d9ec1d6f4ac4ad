"""Real kernels on a CUDA device: CASES and attention at awkward sizes, against the oracle."""

import pytest
import torch
from cases import replaced, tensors
from test_cases import assert_accurate, every
from torch.autograd import grad

import tiga as tg

pytestmark = pytest.mark.gpu


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


POINTS = [
    # rows, width, dtype: each at least once forward, backward and, in float32, twice
    (1, 64, torch.bfloat16),
    (17, 8, torch.float32),
    (127, 80, torch.float16),
    (128, 128, torch.bfloat16),
    (129, 64, torch.bfloat16),
    (129, 16, torch.float32),
    (1000, 96, torch.float16),
    (1000, 256, torch.bfloat16),
]
GRAPHS = {
    "dense": tg.Graph.dense,
    "triangular": tg.Graph.triangular,
    "window": lambda n: tg.Graph.window(n, max(1, n // 4), 3),
    "blocks": lambda n: tg.Graph.cu_seqlens(sorted({0, n // 3, n // 2, n})),
    "reverse": lambda n: tg.Graph.cu_seqlens(sorted({0, n // 3, n // 2, n})).reverse(),
}


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def plain_attention(mask, q, k, v, scale):
    score = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~mask, -torch.inf)
    return torch.einsum("hij,jhd->ihd", score.softmax(-1), v)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("n, width, dtype", POINTS, ids=str)
def test_attention(n, width, dtype, kind):
    graph = GRAPHS[kind](n)
    mask = graph.to_mask().cuda()
    q, k, v, w = (torch.randn(2, n, width, dtype=torch.float64).to(dtype).cuda().transpose(0, 1) for _ in range(4))

    def run(attend, dtype):
        x = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = attend(*x)
        first = grad(out, x, w.to(dtype), create_graph=True)
        return [out, *first, *(grad(sum(g.square().sum() for g in first), x) if n <= 129 and width < 64 else ())]

    module, scale = Attention(), width**-0.5
    here = graph.to("cuda")
    ours = lambda *x: module(graph=here, src={"key": x[1], "value": x[2]}, dst={"query": x[0]}, scale=scale)
    theirs = lambda *x: plain_attention(mask, *x, scale)
    got, plain, exact = run(ours, dtype), run(theirs, dtype), run(theirs, torch.float64)
    again = run(ours, dtype)
    assert "lowering: tiles" in module.explain()
    for k, (x, y, z, repeat) in enumerate(zip(got, plain, exact, again)):
        assert torch.equal(x, repeat)
        error, usual = (x.double() - z).abs().max(), (y.double() - z).abs().max()
        size = max(z.abs().max().item(), 1e-2)  # of a gradient that is 0 in exact arithmetic, rounding is left
        ulps = 4 if k < 4 else 8  # second derivatives are sums of products of first ones
        assert error <= 2 * usual + ulps * torch.finfo(dtype).eps * size, (error, usual)


def test_rows_that_are_no_neighbours_never_leak():
    n = 70
    q, k, v = (torch.randn(n, 2, 64, device="cuda") for _ in range(3))
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[-1], dirty_v[-1] = torch.nan, torch.inf
    attend = lambda n, q, k, v: Attention()(
        graph=tg.Graph.triangular(n), src={"key": k, "value": v}, dst={"query": q}, scale=0.1
    )
    torch.testing.assert_close(attend(n, q, dirty_k, dirty_v)[:-1], attend(n - 1, q[:-1], k[:-1], v[:-1]))


def test_levels_of_the_kernel_can_be_read():
    module = Attention()
    x = torch.randn(40, 2, 64, device="cuda", dtype=torch.float16)
    module(graph=tg.Graph.triangular(40), src={"key": x, "value": x}, dst={"query": x}, scale=0.1)
    assert (
        "tl.dot" in module.ir("kernel") and "tt.dot" in module.ir("kernel_ttir") and ".target sm_" in module.ir("ptx")
    )


def test_a_captured_graph_replays_new_inputs():
    x = [torch.randn(96, 2, 32, device="cuda") for _ in range(3)]
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


def test_what_no_kernel_fits_is_said_once():
    class Largest(tg.MessagePassing):
        reducer = tg.max()

        def edge(self, src, dst, edge):
            return self.reducer(src.x)

    with pytest.warns(UserWarning, match="no kernel fits this program"):
        out = Largest()(graph=tg.Graph.triangular(5), src={"x": torch.arange(5.0, device="cuda")})
    assert torch.equal(out.cpu(), torch.arange(5.0))
