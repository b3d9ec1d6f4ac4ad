"""Kernels of the hopper skeleton on a CPU: their text by threads, all others under Triton's interpreter.

test_hopper.py starts these with `-p interpreted`, which is wrong of bfloat16: works of which the tiles skeleton does a
part are of float16. The oracle is plain torch in float64.
"""

import gluon_emulated
import pytest
import torch
import triton
from test_hopper import Attention, Gated, Positions

import tiga as tg

HEADS = 2


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """What Gluon kernels ran, which do whatever they can."""
    every = [(span, width) for span in ("band", "rows1", "blocks") for width in (64, 128, 256)]
    torch.manual_seed(0)
    return gluon_emulated.stand_in(monkeypatch, dict.fromkeys(every, (0, 0)))


def of_pairs(n, m, edge):
    return edge(torch.arange(n)[:, None], torch.arange(m)[None])


def blocks(n):
    """Causal segments: one of no row, one of few rows, long ones, and rows after the last."""
    boundaries = torch.tensor([0, n // 50, n // 50, n // 3, n - 3])
    of = torch.bucketize(torch.arange(n), boundaries[1:], right=True)
    mask = (of[:, None] == of) & of_pairs(n, n, lambda i, j: (j <= i) & (i < n - 3))
    return tg.Graph.cu_seqlens(boundaries, num_dst=n, num_src=n), mask


def intervals(n):
    start = torch.randint(n, (n,))
    stop = torch.minimum(start + torch.randint(1, n + 1, (n,)), torch.tensor(n))
    stop[::5] = start[::5]
    return tg.Graph.intervals(start, stop, n), of_pairs(n, n, lambda i, j: (j >= start[:, None]) & (j < stop[:, None]))


KINDS = {
    "dense": lambda n: (tg.Graph.dense(n), torch.ones(n, n, dtype=torch.bool)),
    "triangular": lambda n: (tg.Graph.triangular(n), of_pairs(n, n, lambda i, j: j <= i)),
    "offset": lambda n: (
        tg.Graph.triangular(n, n + 37, offset=20),
        of_pairs(n, n + 37, lambda i, j: j <= i + 20),
    ),
    "window": lambda n: (
        tg.Graph.window(n, n // 3, 2),
        of_pairs(n, n, lambda i, j: (j >= i - n // 3) & (j <= i + 2)),
    ),
    "blocks": blocks,
    "intervals": intervals,
}
POINTS = [
    *[(300, 64, kind, torch.float16) for kind in KINDS],
    *[(420, 128, kind, torch.bfloat16) for kind in KINDS if kind != "intervals"],
    (420, 128, "intervals", torch.float16),
    (129, 80, "blocks", torch.float16),
    (200, 104, "triangular", torch.float16),
    (65, 40, "offset", torch.float16),
    (200, 200, "window", torch.float16),
    (200, 256, "blocks", torch.float16),
]


def plain(mask, score, value):
    """Of one head; a row without edges gives 0."""
    some = mask.any(1, keepdim=True)
    return (score.masked_fill(~mask & some, -torch.inf).softmax(-1) * some) @ value


def check(got, wanted, dtype):
    bound = 4 * torch.finfo(dtype).eps
    for x, y in zip(got, wanted):
        assert (x.double() - y).abs().max() <= bound * max(y.abs().max(), 1e-3)


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[0]} {p[1]} {p[2]}")
def test_point(point, ran):
    n, width, kind, dtype = point
    graph, mask = KINDS[kind](n)
    draw = lambda rows: torch.randn(rows, HEADS, width).to(dtype).requires_grad_()
    leaves = query, key, value = [draw(rows) for rows in (n, graph.num_src, graph.num_src)]
    scale = width**-0.5
    out = Attention()(graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=scale)
    assert len(ran) == 1
    given = torch.randn_like(out)
    got = [out.detach(), *torch.autograd.grad(out, leaves, given)]
    assert len(ran) == (2 if width > 128 or kind == "intervals" else 3)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact
    wanted = torch.stack([plain(mask, q[:, h] @ k[:, h].T * scale, v[:, h]) for h in range(HEADS)], 1)
    check(got, [wanted, *torch.autograd.grad(wanted, exact, given.double())], dtype)


@pytest.mark.parametrize("scale", [0.1, -0.1])
def test_scores_of_positions(scale, ran):
    n, width = 300, 64
    graph, mask = KINDS["triangular"](n)
    draw = lambda: torch.randn(n, HEADS, width).half().requires_grad_()
    leaves = query, key, value = [draw() for _ in range(3)]
    pos, slope = torch.arange(n, dtype=torch.float32)[:, None], torch.tensor([0.1, 0.01])
    dst = {"query": query, "pos": pos, "slope": slope.expand(n, HEADS)}
    out = Positions()(graph=graph, src={"key": key, "value": value, "pos": pos}, dst=dst, scale=scale)
    given = torch.randn_like(out)
    got = [out.detach(), *torch.autograd.grad(out, leaves, given)]
    assert len(ran) >= 2
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact
    score = lambda h: 30 * torch.tanh(q[:, h] @ k[:, h].T * scale / 30) + (pos.T - pos).double() * slope[h].double()
    wanted = torch.stack([plain(mask, score(h), v[:, h]) for h in range(HEADS)], 1)
    check(got, [wanted, *torch.autograd.grad(wanted, exact, given.double())], torch.bfloat16)


class Added(Attention):
    """A vector of products that the result reads again."""

    def edge(self, src, dst, edge, scale):
        return super().edge(src, dst, edge, scale) + dst.query


@pytest.mark.parametrize("width", [64, 104])
def test_gates(width, ran):
    n = 300
    graph, mask = KINDS["blocks"](n)
    query, key, value, gate = (torch.randn(n, HEADS, width).half() for _ in range(4))
    dst = {"query": query, "gate": gate}
    out, gated = Gated()(graph=graph, src={"key": key, "value": value}, dst=dst, scale=width**-0.5)
    assert len(ran) == 1
    q, k, v, g = (x.double() for x in (query, key, value, gate))
    wanted = torch.stack([plain(mask, q[:, h] @ k[:, h].T * width**-0.5, v[:, h]) for h in range(HEADS)], 1)
    check([out, gated], [wanted, wanted * g.sigmoid()], torch.float16)


def test_a_vector_that_is_read_twice():
    n, width = 200, 64
    graph, mask = KINDS["triangular"](n)
    query, key, value = (torch.randn(n, HEADS, width).half() for _ in range(3))
    out = Added()(graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=width**-0.5)
    q, k, v = (x.double() for x in (query, key, value))
    wanted = torch.stack([plain(mask, q[:, h] @ k[:, h].T * width**-0.5, v[:, h]) for h in range(HEADS)], 1)
    check([out], [wanted + q], torch.float16)


assert triton.knobs.runtime.interpret
