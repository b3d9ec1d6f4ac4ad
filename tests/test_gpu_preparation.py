"""Real kernels over lists of edges: prepared graphs, and what must never happen on a CUDA device."""

import pytest
import torch
from torch.nn.functional import leaky_relu

import tiga as tg
from tiga import passes

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


module = Gat()


def pairs(n, count, hub=0):
    edges = torch.randint(0, n, (2, count), device=DEVICE)
    edges[1, :hub] = 0
    return edges


def draw(n, dtype=torch.float32):
    made = torch.randn(n, 4, 32, device=DEVICE), torch.randn(n, 4, 32, device=DEVICE), torch.randn(4, 32, device=DEVICE)
    return [x.to(dtype).requires_grad_() for x in made]


def attend(graph, x, y, att):
    return module(graph=graph, src={"x": x}, dst={"x": y}, att=att)


def step(graph, inputs):
    out = attend(graph, *inputs)
    return [out, *torch.autograd.grad(out.float().cos().sum(), inputs)]


def plain(edges, n, x, y, att):
    src, dst = edges
    score = (leaky_relu(x[src] + y[dst], 0.2) * att).sum(-1)
    peak = torch.full((n, 4), -1e30, device=DEVICE, dtype=score.dtype)
    peak = peak.scatter_reduce(0, dst[:, None].expand_as(score), score.detach(), "amax")
    weight = (score - peak[dst]).exp()
    weight = weight / torch.zeros_like(peak).index_add(0, dst, weight)[dst]
    return torch.zeros_like(y).index_add(0, dst, weight[..., None] * x[src])


def test_nothing_waits_where_sizes_are_given():
    edges, inputs = pairs(500, 3000), draw(500)
    step(tg.Graph.from_edge_index(edges, 500, 500), inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = tg.Graph.from_edge_index(edges, 500, 500)
        assert len(graph.prepared) == 7
        step(graph, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_prepared_graph_is_captured_and_replayed():
    graph, inputs = tg.Graph.from_edge_index(pairs(500, 3000, hub=900), 500, 500), draw(500)
    for _ in range(3):
        step(graph, inputs)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step(graph, inputs)
    with torch.no_grad():
        for t in inputs:
            t.copy_(torch.randn_like(t))
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, step(graph, inputs)))


def test_edge_counts_make_no_other_kernel(monkeypatch):
    from triton import knobs

    step(tg.Graph.from_edge_index(pairs(500, 3000, hub=900), 500, 500), draw(500))
    compiled = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **of: compiled.append(of["metadata"]["name"]))
    written = passes.COUNTS["emit-rows"]
    for n, count in ((500, 3001), (500, 3016), (512, 3100), (777, 4099)):
        step(tg.Graph.from_edge_index(pairs(n, count, hub=900), n, n), draw(n))
    assert passes.COUNTS["emit-rows"] == written and compiled == []


def test_a_compiled_step_takes_the_lists_as_they_are():
    edges, inputs = pairs(500, 3000, hub=900), draw(500)
    graph = tg.Graph.from_edge_index(edges, 500, 500)
    bare = tg.Graph("csr", graph.ints, graph.tensors)
    want = step(graph, inputs)
    for given in (graph, bare):
        torch._dynamo.reset()
        out = torch.compile(attend, fullgraph=True, backend="aot_eager")(given, *inputs)
        found = [out, *torch.autograd.grad(out.float().cos().sum(), inputs)]
        for a, b in zip(found, want):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_long_row_is_as_exact_as_plain_torch(dtype):
    """5,000 edges in one row: at most twice plain torch's error at that dtype, and 4 units in its last place."""
    edges, inputs = pairs(300, 7000, hub=5000), draw(300, dtype)
    graph = tg.Graph.from_edge_index(edges, 300, 300)
    assert graph.prepared[1].shape[0] > 0, "a row is cut"
    exact = [x.detach().double().requires_grad_() for x in inputs]
    usual = plain(edges, 300, *inputs)
    usual = [usual, *torch.autograd.grad(usual.float().cos().sum(), inputs)]
    wanted = plain(edges, 300, *exact)
    wanted = [wanted, *torch.autograd.grad(wanted.cos().sum(), exact)]
    found, again = step(graph, inputs), step(graph, inputs)
    for a, b, c, d in zip(found, usual, wanted, again):
        assert torch.equal(a, d)
        ulps = 4 * torch.finfo(dtype).eps * (50 if dtype == torch.float64 else 1) * c.abs().max()
        assert (a.double() - c).abs().max() <= 2 * (b.double() - c).abs().max() + ulps
