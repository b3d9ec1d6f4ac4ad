"""Tests of repeated calls under Triton's interpreter: test_replay.py starts them with `-p interpreted`.

The oracle is plain torch: each call is compared with dense attention, or with gathers and scatters, in float64.
"""

import pytest
import torch

import tiga as tg
from tiga import passes
from tiga.codegen import launch, replay


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, a):
        return self.reducer((torch.nn.functional.leaky_relu(src.x + dst.y, 0.2) * a).sum(-1), src.x)


class Weights(tg.MessagePassing):
    """A sum, and the edges' own values beside it."""

    reducer = tg.sum()

    def edge(self, src, dst, edge, c):
        weight = (src.x * dst.y).sum(-1) * c
        return self.reducer(weight[..., None] * src.x), weight


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(replay, "KEPT", {})


def softmax(scores, mask, value):
    weights = torch.where(mask, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, value)


def dense(mask, query, key, value, scale):
    query, key, value = (x.double() for x in (query, key, value))
    return softmax(torch.einsum("ihd,jhd->hij", query, key) * scale, mask, value)


def gat(mask, x, y, a):
    x, y, a = (t.double() for t in (x, y, a))
    joined = torch.nn.functional.leaky_relu(x[None] + y[:, None], 0.2)
    return softmax((joined * a).sum(-1).permute(2, 0, 1), mask, x)


def recipes():
    return [recipe for recipe in replay.KEPT.values() if recipe is not None]


def repeated(call, exact, draw, times=5):
    """Calls with other tensors each time, and their gradients, against float64; how many programs were planned anew."""
    for _ in range(times):
        inputs = [x.requires_grad_() for x in draw()]
        ours, theirs = call(*inputs), exact(*inputs)
        grad = torch.randn_like(ours)
        pairs = [(ours, theirs)]
        pairs += zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad.double()))
        for a, b in pairs:
            torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=2e-5)


GRAPHS = {
    "triangular": lambda: tg.Graph.triangular(19),
    "window": lambda: tg.Graph.window(19, 4, 2),
    "packed": lambda: tg.Graph.cu_seqlens([0, 7, 7, 19]),
    "prefix": lambda: tg.Graph.intervals([0] * 19, [9] * 9 + list(range(10, 20)), 19),
    "two intervals": lambda: tg.Graph.intervals([0] * 19, [2] * 19, 19, [max(2, i - 3) for i in range(19)], [19] * 19),
    "reversed": lambda: tg.Graph.triangular(19).reverse(),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_tiles_repeat_with_other_tensors(name, monkeypatch):
    graph = GRAPHS[name]()
    module, mask = Attention(), graph.to_mask()
    planned, before = [], launch._Launch.steps
    monkeypatch.setattr(launch._Launch, "steps", lambda self: planned.append(self) or before(self))
    scales = iter([0.5, 0.25, 1.0, 0.75, 0.125] * 2)
    scale = [0.5]

    def call(q, k, v):
        scale[0] = next(scales)
        return module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=scale[0])

    launches = passes.COUNTS["launch-tiles"]
    repeated(call, lambda q, k, v: dense(mask, q, k, v, scale[0]), lambda: [torch.randn(19, 2, 8) for _ in range(3)])
    assert len(recipes()) == 2 and passes.COUNTS["launch-tiles"] == launches + 10
    assert "2 x cached" not in module.explain() and "lowering: tiles" in module.explain()


def test_one_tensor_in_two_places_says_nothing_of_later_calls():
    graph, module = tg.Graph.triangular(17), Attention()
    one, two, three = (torch.randn(17, 2, 8) for _ in range(3))
    for q, k, v in ([(one, one, one)] * 3) + [(one, two, three), (three, two, two)]:
        ours = module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
        torch.testing.assert_close(ours.double(), dense(graph.to_mask(), q, k, v, 0.5), atol=1e-5, rtol=1e-5)
    assert len(recipes()) == 1
