"""Kernels over lists of edges on a CUDA device: CASES, heavy and empty rows, layouts, second derivatives, memory."""

import os
import subprocess
import sys

import oracle
import pytest
import torch
from cases import CASES, tensors
from test_cases import assert_accurate, gradients
from test_examples import EXAMPLES
from test_gpu import on_cuda
from torch import nn
from torch.nn.functional import leaky_relu

import tiga as tg
from tiga import passes

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LISTED = [case for case in CASES if case.graph.kind == "csr"]
WIDE, NARROW = torch.float64, torch.bfloat16


def plain(case, module, host, dtype):
    """Outputs and gradients on the CPU by plain torch, of the same numbers in another dtype."""
    other = case.build(dtype)
    for x, y in zip(other.parameters(), module.parameters()):
        x.data = y.detach().cpu().to(dtype)
    arguments = {
        place: {
            n: x.detach().to(dtype).requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for n, x in f.items()
        }
        for place, f in host.items()
    }
    out = case.oracle(other, arguments)
    return out, gradients(out, tensors(arguments, other))


@pytest.mark.parametrize("dtype", [WIDE, torch.float32, NARROW], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_case(case, dtype):
    """Values; and all gradients as one vector, as each is a sum of numbers of the others' size."""
    module, arguments, host = on_cuda(case, dtype)
    launched = passes.COUNTS["launch-rows"]
    out = [x.cpu() for x in case.run(module, arguments, case.graph.to(DEVICE))]
    assert passes.COUNTS["launch-rows"] > launched
    got = [*out, torch.cat([x.cpu().flatten() for x in gradients(out, tensors(arguments, module))])[None]]
    found = []
    for kind in (dtype, WIDE):
        values, first = plain(case, module, host, kind)
        found.append([*values, torch.cat([x.flatten() for x in first])[None]])
    for x, y, z in zip(got, *found):
        if dtype is WIDE:  # a reference with no more digits, which adds in another order
            torch.testing.assert_close(x, z, rtol=1e-12, atol=1e-12 * (1 + z.nan_to_num(0, 0, 0).norm().item()))
        else:
            assert_accurate(x, y.to(x.dtype), z)


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


class Dot(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((src.x * dst.x * att).sum(-1), src.x)


class Network(tg.MessagePassing):
    """Joined features meet a matrix; what it gives is weighed by att and is one score."""

    reducer = tg.online_softmax()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8 * 2 * WIDTH, dtype=WIDE).cos().reshape(8, 2 * WIDTH) / 4)

    def edge(self, src, dst, edge, att):
        hidden = nn.functional.linear(torch.cat([src.x, dst.x], -1), self.weight).tanh()
        return self.reducer((hidden * att).sum(-1), src.x)


ROWS, HUB, WIDTH = 700, 5000, 32


def hub(dtype=torch.int64):
    """Sources, destinations: a row of 5,000 edges, others of few, a third empty; repeated edges and loops."""
    draw = torch.Generator().manual_seed(3)
    dst = torch.cat([torch.full((HUB,), 7), torch.randint(ROWS // 3, ROWS, (3000,), generator=draw)])
    src = torch.randint(ROWS, dst.shape, generator=draw)
    dst[-20:], src[-20:] = dst[-40:-20], src[-40:-20]
    src[-5:] = dst[-5:]
    order = torch.randperm(dst.shape[0], generator=draw)
    return src[order].to(dtype), dst[order].to(dtype)


LAYOUTS = {
    "contiguous": lambda n: torch.randn(n, 4, WIDTH, dtype=WIDE),
    "heads outermost": lambda n: torch.randn(4, n, WIDTH, dtype=WIDE).transpose(0, 1),
    "features outermost": lambda n: torch.randn(WIDTH, 4, n, dtype=WIDE).permute(2, 1, 0),
    "one head": lambda n: torch.randn(n, 1, WIDTH, dtype=WIDE).expand(n, 4, WIDTH),
}


def orders(module, run, inputs, given, directions):
    out = run(module, *inputs)
    inputs = [*inputs, *module.parameters()]
    first = torch.autograd.grad(out, inputs, given, create_graph=True)
    second = torch.autograd.grad(first, inputs, directions)
    return [[out.detach()], [x.detach() for x in first], list(second)]


@pytest.mark.parametrize("dtype", [WIDE, torch.float32, NARROW], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    "module, layout, number",
    [
        (Gat, "contiguous", torch.int32),
        (Gat, "heads outermost", torch.int64),
        (Dot, "features outermost", torch.int64),
        (Dot, "one head", torch.int32),
        (Network, "contiguous", torch.int64),
    ],
)
def test_heavy_and_empty_rows(module, layout, number, dtype):
    """First and second derivatives against float64, twice the error of plain torch at most; the same when run again."""
    torch.manual_seed(5)
    src, dst = hub(number)
    fields = [LAYOUTS[layout](ROWS)[:, 0] if module is Network else LAYOUTS[layout](ROWS) for _ in range(2)]
    att = torch.randn(*((8,) if module is Network else (4, WIDTH)), dtype=WIDE) / 4
    inputs = [x.to(dtype) for x in (*fields, att)]
    given = torch.randn_like(inputs[0])
    directions = [torch.randn_like(x) for x in (*inputs, *module().to(dtype).parameters())]
    graph = tg.Graph.from_edge_index(torch.stack([src, dst]).to(DEVICE), ROWS, ROWS).prepare()

    def kernels(m, x, y, att):
        return m(graph=graph, src={"x": x}, dst={"x": y}, att=att)

    def by_oracle(m, x, y, att):
        edges = oracle.Edges(src.long(), dst.long(), ROWS, ROWS)
        return oracle.message_passing(m, edges, ("dst",), {"x": x}, {"x": y}, {}, {"att": att})[0]

    found = []
    for run, device, kind in ((kernels, DEVICE, dtype), (by_oracle, "cpu", dtype), (by_oracle, "cpu", WIDE)):
        there = lambda x, device=device, kind=kind: x.detach().to(device, kind)
        leaves, m = [there(x).requires_grad_() for x in inputs], module().to(device, dtype).to(kind)
        arguments = (m, run, leaves, there(given), [there(x) for x in directions])
        launched = passes.COUNTS["launch-rows"]
        found.append(orders(*arguments))
        if run is kernels:
            assert passes.COUNTS["launch-rows"] >= launched + 3, "not every order ran in kernels"
            again = orders(*arguments)
            assert all(torch.equal(x, y) for xs, ys in zip(found[0], again) for x, y in zip(xs, ys)), (
                "not the same again"
            )
    got, usual, wanted = found
    empty = torch.bincount(dst, minlength=ROWS) == 0
    assert empty.sum() > ROWS // 4 and got[0][0].cpu()[empty].eq(0).all()
    slack = 64 if dtype is WIDE else 1  # of a reference with no more digits, which adds in another order
    for order, ulps in ((0, 2 * slack), (1, 4 * slack), (2, 8 * slack)):
        size = max(x.abs().max() for x in wanted[order] + wanted[min(order, 1)])
        for x, y, z in zip(got[order], usual[order], wanted[order]):
            error, bound = (x.cpu().double() - z).abs().max(), (y.double() - z).abs().max()
            assert error <= 2 * bound + ulps * torch.finfo(dtype).eps * size, f"order {order}: {error:.3g}, {bound:.3g}"


class Mapped(tg.MessagePassing):
    """Keys and values with what a map makes of an edge's few attributes."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, weight):
        added = nn.functional.linear(edge.a, weight).unflatten(-1, src.key.shape[1:])
        return self.reducer(((src.key + added) * dst.query).sum(-1) * 0.2, src.value + added)


@pytest.mark.parametrize("dtype", [WIDE, torch.float32, NARROW], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("count, heads, width", [(4, 16, 32), (3, 6, 20), (8, 4, 64)])
def test_maps_of_few_inputs(count, heads, width, dtype):
    """First and second derivatives against float64, those of attributes and of the map too."""
    torch.manual_seed(6)
    src, dst = hub()
    draw = lambda *shape: torch.randn(*shape, dtype=WIDE)
    node = [draw(ROWS, heads, width) for _ in range(3)]
    inputs = [x.to(dtype) for x in (*node, draw(len(src), count), draw(heads * width, count) / 4)]
    given, directions = torch.randn_like(inputs[0]), [torch.randn_like(x) for x in inputs]
    graph = tg.Graph.from_edge_index(torch.stack([src, dst]).to(DEVICE), ROWS, ROWS).prepare()

    def kernels(m, key, value, query, a, weight):
        return m(graph=graph, src={"key": key, "value": value}, dst={"query": query}, edge={"a": a}, weight=weight)

    def by_oracle(m, key, value, query, a, weight):
        edges, nodes = oracle.Edges(src, dst, ROWS, ROWS), ({"key": key, "value": value}, {"query": query})
        return oracle.message_passing(m, edges, ("dst",), *nodes, {"a": a}, {"weight": weight})[0]

    found = []
    for run, device, kind in ((kernels, DEVICE, dtype), (by_oracle, "cpu", dtype), (by_oracle, "cpu", WIDE)):
        there = lambda x, device=device, kind=kind: x.detach().to(device, kind)
        leaves = [there(x).requires_grad_() for x in inputs]
        found.append(orders(Mapped(), run, leaves, there(given), [there(x) for x in directions]))
    slack = 64 if dtype is WIDE else 1
    for order, ulps in ((0, 2 * slack), (1, 4 * slack), (2, 8 * slack)):
        size = max(x.abs().max() for x in found[2][order] + found[2][min(order, 1)])
        for x, y, z in zip(*[each[order] for each in found]):
            error, bound = (x.cpu().double() - z).abs().max(), (y.double() - z).abs().max()
            assert error <= 2 * bound + ulps * torch.finfo(dtype).eps * size, f"order {order}: {error:.3g}, {bound:.3g}"


def many(edges, rows=100_000, width=128):
    """Edges times features beyond 2^31, of which nothing but the fields is held."""
    dst = torch.arange(edges, device=DEVICE, dtype=torch.int32) % rows
    src = (torch.arange(edges, device=DEVICE) * 7919 % rows).to(torch.int32)
    graph = tg.Graph.from_edge_index(torch.stack([src, dst]), rows, rows).prepare()
    x, y = (torch.randn(rows, 1, width, device=DEVICE, dtype=NARROW).requires_grad_() for _ in range(2))
    return graph, src, dst, x, y, torch.randn(1, width, device=DEVICE, dtype=NARROW).requires_grad_()


def test_nothing_of_size_edges_is_held():
    graph, src, dst, x, y, att = many(17_000_000)
    run = lambda: Gat()(graph=graph, src={"x": x}, dst={"x": y}, att=att)
    torch.autograd.grad(run().sum(), (x, y, att))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = run()
    first = torch.autograd.grad(out, (x, y), torch.ones_like(out))
    assert 17_000_000 * 128 > 2**31
    assert torch.cuda.max_memory_allocated() - before < 17_000_000 * 16
    for row in (0, 50_001, 99_999):
        of = dst == row
        j = src[of].long()
        a, b, w = x.detach()[j, 0].double(), y.detach()[row, 0].double(), att.detach()[0].double()
        weight = (leaky_relu(a + b, 0.2) @ w).softmax(0)
        torch.testing.assert_close(out[row, 0].double(), weight @ a, rtol=2e-2, atol=2e-2)
    assert all(g.isfinite().all() for g in first)


class EdgeField(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(edge.e * src.x)


def test_edge_fields_beyond_2_to_31_elements():
    graph, src, dst, x, _, _ = many(17_000_000)
    e = torch.randn(17_000_000, 1, 128, device=DEVICE, dtype=NARROW).requires_grad_()
    out = EdgeField()(graph=graph, src={"x": x}, edge={"e": e})
    (back,) = torch.autograd.grad(out, e, torch.ones_like(out))
    assert e.numel() > 2**31 and back.numel() > 2**31
    for k in (0, 8_500_000, 16_999_999):
        assert torch.equal(back[k, 0], x.detach()[src[k].long(), 0])
    for row in (3, 99_999):
        of = (dst == row).nonzero().flatten()
        wanted = (e.detach()[of, 0].double() * x.detach()[src[of].long(), 0].double()).sum(0)
        torch.testing.assert_close(out[row, 0].double(), wanted, rtol=2e-2, atol=0.1)


def test_a_prepared_graph_is_captured_with_its_gradient():
    src, dst = hub()
    graph = tg.Graph.from_edge_index(torch.stack([src, dst]).to(DEVICE), ROWS, ROWS).prepare()
    x, y = (torch.randn(ROWS, 4, WIDTH, device=DEVICE).requires_grad_() for _ in range(2))
    att, given = torch.randn(4, WIDTH, device=DEVICE), torch.randn(ROWS, 4, WIDTH, device=DEVICE)

    def step():
        out = Gat()(graph=graph, src={"x": x}, dst={"x": y}, att=att)
        return [out.detach(), *torch.autograd.grad(out, (x, y), given)]

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            wanted = step()
    torch.cuda.current_stream().wait_stream(aside)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        got = step()
    for t in got:
        t.fill_(torch.nan)
    captured.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


def test_another_number_of_edges_makes_no_other_kernel(monkeypatch):
    from triton import knobs

    def run(edges):
        src, dst = torch.randint(300, (2, edges), device=DEVICE)
        graph = tg.Graph.from_edge_index(torch.stack([src, dst]), 300, 300).prepare()
        x = torch.randn(300, 4, WIDTH, device=DEVICE).requires_grad_()
        out = Gat()(graph=graph, src={"x": x}, dst={"x": x}, att=torch.randn(4, WIDTH, device=DEVICE))
        torch.autograd.grad(out.sum(), x)

    run(3000)
    compiled = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **of: compiled.append(of["metadata"]["name"]))
    written = passes.COUNTS["emit-rows"]
    for edges in (3001, 3104, 2999, 3328):
        run(edges)
    assert passes.COUNTS["emit-rows"] == written and compiled == []


def test_forces_are_trained(tmp_path):
    """Second derivatives in float32, then a force against a finite difference in float64: the example's own checks."""
    env = {**os.environ, "MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "train_forces.py"), "--steps", "30"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
