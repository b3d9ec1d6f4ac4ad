"""Tests of repeated calls under Triton's interpreter: test_replay.py starts them with `-p interpreted`.

The oracle is plain torch in float64. Launches are given tensors, as the interpreter takes them, or addresses, as those
of a device: then each argument is a tensor made of nothing but the address.
"""

import copy
import ctypes
import dataclasses

import pytest
import torch

import tiga as tg
from tiga import passes, relations
from tiga.codegen import device_bounds, kernels, launch, launch_rows, replay, steps


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, a):
        return self.reducer((torch.nn.functional.leaky_relu(src.x + dst.y, 0.2) * a).sum(-1), src.x)


class Biased(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer((src.key * dst.query).sum(-1) + edge.bias, src.value)


class Weights(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        weight = (src.x * dst.y).sum(-1)
        return self.reducer(weight[..., None] * src.x), weight * edge.w


def at(address, dtype):
    """A tensor of one number where an address says: what kernels read further on is not looked at."""
    size = torch.empty((), dtype=dtype).element_size()
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def by_address(run, values):
    """What launches a kernel by addresses, which are wanted where these values hold tensors."""
    dtypes = [x.dtype if isinstance(x, torch.Tensor) else None for x in values]

    def launched(programs, y, z, stream, words, *arguments):
        assert (y, z, stream, words) == (1, 1, 0, "words")
        run(*[x if dtype is None else at(x, dtype) for x, dtype in zip(arguments, dtypes, strict=True)])

    return launched


@pytest.fixture(params=["tensors", "addresses"])
def launched(request, monkeypatch):
    """How kernels are launched: forgotten are earlier calls, and what is not written is nan."""
    monkeypatch.setattr(replay, "KEPT", type(replay.KEPT)(most=4096, each=8))
    monkeypatch.setattr(steps, "_records", type(steps._records)())
    monkeypatch.setattr(launch_rows, "_records", {})
    if request.param == "addresses":
        runner, made = launch.runner, launch_rows.made

        def bare(text, values, plan, grid, device):
            found = runner(text, values, plan, grid, device)
            return found._replace(bare=kernels.Bare(by_address(found.run, values), (grid[0], 1, 1), ("words",)))

        def with_kernel(source, plan, tensors, constants, sizes, device, *more):
            found = made(source, plan, tensors, constants, sizes, device, *more)
            values, _ = launch_rows.arguments(source, plan, tensors, constants, sizes, device)
            return dataclasses.replace(found, kernel=(found.run, values))

        def of_rows(kernel, grid):
            run, values = kernel
            start = by_address(lambda *arguments: run(grid, list(arguments)), values)
            return kernels.Bare(start, (grid, 1, 1), ("words",))

        monkeypatch.setattr(launch, "runner", bare)
        monkeypatch.setattr(launch_rows, "made", with_kernel)
        monkeypatch.setattr(launch_rows, "bare", of_rows)
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)


def recipes():
    return [met.recipe for met in replay.KEPT.calls() if met.recipe is not None]


def softmax(scores, mask, value):
    weights = torch.where(mask, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, value)


def dense(mask, query, key, value, scale):
    query, key, value = (x.double() for x in (query, key, value))
    return softmax(torch.einsum("ihd,jhd->hij", query, key) * scale, mask, value)


def gat(mask, x, a):
    x, a = x.double(), a.double()
    joined = torch.nn.functional.leaky_relu(x[None] + x[:, None], 0.2)
    return softmax((joined * a).sum(-1).permute(2, 0, 1), mask, x)


def repeated(ours, exact, draw, times=3):
    """Calls with new tensors each time, and their gradients, against float64."""
    for step in range(times):
        inputs = [x.requires_grad_() for x in draw()]
        found, wanted = ours(step, *inputs), exact(step, *inputs)
        grad = torch.randn_like(found)
        pairs = [(found, wanted)]
        pairs += zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad.double()))
        for a, b in pairs:
            torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=2e-5)


def draw():
    return [torch.randn(9, 2, 8) for _ in range(3)]


GRAPHS = {
    "triangular": lambda: tg.Graph.triangular(9),
    "window": lambda: tg.Graph.window(9, 2, 1),
    "two intervals": lambda: tg.Graph.intervals([0] * 9, [2] * 9, 9, [max(2, i - 3) for i in range(9)], [9] * 9),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_tiles_repeat_with_other_tensors_and_scalars(name, launched):
    graph, module = GRAPHS[name](), Attention()
    mask, scales = graph.to_mask(), [0.5, 0.25, 1.0]
    ours = lambda k, *x: module(graph=graph, src={"key": x[1], "value": x[2]}, dst={"query": x[0]}, scale=scales[k])
    before = passes.COUNTS["launch-tiles"]
    repeated(ours, lambda k, *x: dense(mask, *x, scales[k]), draw)
    assert [recipe.bare for recipe in recipes()] == [launched == "addresses"] * 2
    assert passes.COUNTS["launch-tiles"] == before + 6
    assert "lowering: tiles" in module.explain() and module.ir("kernel").count("def propagate(") >= 1


def test_rows_repeat_with_other_tensors(launched):
    """Rows that are cut and merged, a gradient that is the sum of what programs kept, edge values, an empty row."""
    edges = torch.tensor([[(3 * e) % 9 for e in range(300)] + [1, 2], [0] * 300 + [4, 5]])
    mask = torch.zeros(9, 9)
    mask[edges[1], edges[0]] = 1
    simple = tg.Graph.from_edge_index(mask.nonzero().T.flip(0), 9, 9).prepare()
    module = Gat()
    repeated(
        lambda k, x, a: module(graph=simple, src={"x": x}, dst={"y": x}, a=a),
        lambda k, x, a: gat(mask.bool(), x, a),
        lambda: [torch.randn(9, 2, 4), torch.randn(2, 4)],
    )
    assert [recipe.bare for recipe in recipes()] == [launched == "addresses"] * 2
    assert "lowering: rows" in module.explain()
    hub, weights = tg.Graph.from_edge_index(edges, 9, 9).prepare(), Weights()
    assert hub.prepared[1].shape[0], "the first row is cut"
    for _ in range(4):
        x, y, w = torch.randn(9, 2, 4), torch.randn(9, 2, 4), torch.randn(302, 2)
        out, weight = weights(graph=hub, src={"x": x}, dst={"y": y}, edge={"w": w})
        exact = (x[edges[0]].double() * y[edges[1]].double()).sum(-1)
        torch.testing.assert_close(weight.double(), exact * w.double(), atol=1e-5, rtol=1e-5)
        wanted = torch.zeros(9, 2, 4, dtype=torch.float64).index_add(
            0, edges[1], exact[..., None] * x[edges[0]].double()
        )
        torch.testing.assert_close(out.double(), wanted, atol=1e-3, rtol=1e-5)
    assert len(recipes()) == 3


def test_packed_sequences_repeat(launched):
    graph, module = tg.Graph.cu_seqlens([0, 3, 3, 9]), Attention()
    for _ in range(3):
        q, k, v = draw()
        ours = module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
        torch.testing.assert_close(ours.double(), dense(graph.to_mask(), q, k, v, 0.5), atol=1e-5, rtol=1e-5)
    assert len(recipes()) == 1


def test_edges_of_a_window_are_numbered_at_every_call(launched):
    graph, module = tg.Graph.window(9, 3), Biased()
    i, j = graph.to_mask().nonzero(as_tuple=True)
    for _ in range(3):
        (q, k, v), bias = draw(), torch.randn(len(i), 2)
        spread = torch.zeros(2, 9, 9, dtype=torch.float64)
        spread[:, i, j] = bias.double().T
        score = torch.einsum("ihd,jhd->hij", q.double(), k.double()) + spread
        ours = module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, edge={"bias": bias})
        torch.testing.assert_close(ours.double(), softmax(score, graph.to_mask(), v.double()), atol=1e-5, rtol=1e-5)
    assert len(recipes()) == 1


def test_one_tensor_in_two_places_says_nothing_of_later_calls(launched):
    graph, module = tg.Graph.triangular(9), Attention()
    one, two, three = draw()
    for q, k, v in ([(one, one, one)] * 3) + [(one, two, three), (three, two, two)]:
        ours = module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
        torch.testing.assert_close(ours.double(), dense(graph.to_mask(), q, k, v, 0.5), atol=1e-5, rtol=1e-5)
    assert len(recipes()) == 1


def test_another_layout_is_another_call(launched):
    """Strides, alignment, dtype and sizes: each is prepared for itself."""
    graph, module = tg.Graph.triangular(9), Attention()
    wide = torch.randn(3, 2, 9, 12)
    for _ in range(3):
        for q, k, v in (
            draw(),
            wide[..., :8].transpose(1, 2),
            wide[..., 1:9].transpose(1, 2),
            [x.half() for x in draw()],
        ):
            ours = module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
            torch.testing.assert_close(
                ours.double(),
                dense(graph.to_mask(), q, k, v, 0.5),
                atol=2e-3 if q.dtype == torch.half else 1e-5,
                rtol=0,
            )
    assert len(recipes()) == 4


def test_what_is_wrong_is_still_refused(launched):
    graph, module = tg.Graph.triangular(9), Attention()
    for _ in range(3):
        q, k, v = draw()
        call = module.lower(graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
        torch.ops.tiga.propagate(*call)
    short = [call.tensors[0][:8], *call.tensors[1:]]
    for tensors, ints, scalars in (
        (short, call.ints, [0.5]),
        (call.tensors, [9, 9], [0.5]),
        (call.tensors, call.ints, []),
        (call.tensors[:-1], call.ints, [0.5]),
        ([*call.tensors, q], call.ints, [0.5]),
    ):
        with pytest.raises(tg.TigaError):
            torch.ops.tiga.propagate(call.program, tensors, ints, scalars)


class Network(tg.MessagePassing):
    """A network per edge, whose first map is taken to the nodes; and what nodes compute after the edges."""

    reducer = tg.online_softmax()

    def __init__(self, width):
        super().__init__()
        self.net = tg.nn.trace(
            torch.nn.Sequential(torch.nn.Linear(2 * width, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        )

    def edge(self, src, dst, edge, scale):
        return self.reducer(self.net(src.x, dst.y) * scale, src.x)


def network(module, edges, x, y, scale):
    """The same in torch, in the precision of x and y."""
    net = copy.deepcopy(module.net.module).to(x.dtype)
    score = net(torch.cat([x[edges[0]], y[edges[1]]], -1)) * scale
    weight = torch.zeros(len(y), len(edges[0]), dtype=x.dtype)
    weight[edges[1], torch.arange(len(edges[0]))] = score[:, 0].exp()
    total = weight.sum(1, keepdim=True)
    return weight @ x[edges[0]] / torch.where(total == 0, 1, total), list(net.parameters())


def test_work_on_nodes_is_repeated(launched):
    """Projections before the edges, sums and projections after them; other data, scalars, layouts and gradients."""
    edges = torch.tensor([[(5 * e + e // 7) % 9 for e in range(40)], [e % 8 for e in range(40)]])
    graph, other = (tg.Graph.from_edge_index(x, 9, 9).prepare() for x in (edges, edges[:, ::2]))
    modules, wide = [Network(4), Network(4)], torch.randn(9, 3, 12)
    for step in range(4):
        for module in modules:
            for k, (g, e, x) in enumerate(
                (
                    (graph, edges, torch.randn(9, 4)),
                    (graph, edges, wide[:, 1, 2:6] * 1),
                    (other, edges[:, ::2], wide[:, step % 3, 4:8]),
                )
            ):
                y, scale = torch.randn(9, 4), 0.5 + 0.25 * step
                x, y = x.detach().requires_grad_(k != 1), y.requires_grad_()
                found = module(graph=g, src={"x": x}, dst={"y": y}, scale=scale)
                exact = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, y)]
                wanted, parameters = network(module, e, *exact, scale)
                torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
                grad = torch.randn_like(found)
                moving = [t for t in (x, y) if t.requires_grad]
                ours = torch.autograd.grad(found, [*moving, *module.net.parameters()], grad)
                theirs = torch.autograd.grad(
                    wanted, [*[t for t in exact if t.requires_grad], *parameters], grad.double()
                )
                for a, b in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)
                with torch.no_grad():
                    torch.testing.assert_close(module(graph=g, src={"x": x}, dst={"y": y}, scale=scale), found)
    texts = [recipe.text for recipe in recipes()]
    assert sum(["view(" in text for text in texts]) == len(texts) >= 6
    assert [recipe.bare for recipe in recipes()] == [launched == "addresses"] * len(texts)
    assert "lowering: rows" in modules[0].explain()


class Before(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge, w, scale):
        return self.reducer(torch.nn.functional.linear(src.x * scale, w) * dst.y)


class After(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge, w, scale):
        return torch.nn.functional.linear(self.reducer(src.x * dst.y), w) * scale


@pytest.mark.parametrize("graph", [tg.Graph.from_edge_index([[0, 1, 2], [1, 2, 0]], 3, 3), tg.Graph.dense(3)], ids=str)
def test_scalars_on_nodes_are_those_of_the_call(graph, launched):
    graph, mask = graph.prepare(), graph.to_mask().double()
    for step in range(4):
        x, y, w = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 4)
        scale, exact = 0.5 - step, (x.double(), y.double(), w.double())
        given = {"graph": graph, "src": {"x": x}, "dst": {"y": y}, "w": w, "scale": scale}
        wanted = mask @ (exact[0] @ exact[2].T * scale) * exact[1]
        torch.testing.assert_close(Before()(**given).double(), wanted, atol=1e-5, rtol=1e-5)
        wanted = (mask @ exact[0] * exact[1]) @ exact[2].T * scale
        torch.testing.assert_close(After()(**given).double(), wanted, atol=1e-5, rtol=1e-5)
    assert len(recipes()) == 2 and all(["s[0]" in recipe.text for recipe in recipes()])


# Bounds of intervals.


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_bounds_and_reach_of_any_intervals(rows, two):
    """Nobody checked these: they leave the sources, end before they begin, overlap, and do not grow."""
    num_src, block, tile = 29, 16, 4
    given = [torch.randint(-5, 40, (max(rows, 1),), dtype=torch.int32) for _ in range(4)]
    ints, used = (rows, num_src, -1), given if two else given[:2]
    wanted = relations.row_intervals("intervals", ints, tuple([t[:rows] for t in used]), 0, rows, "cpu")
    made = [torch.full((max(rows, 1),), -7, dtype=torch.int32) for _ in range(4)]
    blocks, tiles = max(1, -(-rows // block)), -(-num_src // tile)
    low, high = (torch.full((blocks,), -7, dtype=torch.int32) for _ in range(2))
    device_bounds.row_bounds[(blocks,)](*given, *made, low, high, rows, num_src, two, block)
    for k, x in enumerate([x for pair in wanted for x in pair]):
        assert torch.equal(made[k][:rows].long(), x)
    reach = [torch.full((tiles,), -7, dtype=torch.int32) for _ in range(2)]
    device_bounds.column_reach[(tiles,)](*made, low, high, *reach, rows, num_src, tile, two, block)
    for k in range(tiles):
        ends = [i for i in range(rows) if any(a[i] < b[i] and b[i] > k * tile for a, b in wanted)]
        begins = [i for i in range(rows) if any(a[i] < b[i] and a[i] < (k + 1) * tile for a, b in wanted)]
        assert (reach[0][k], reach[1][k]) == (min(ends, default=rows), max(begins, default=-1) + 1)
