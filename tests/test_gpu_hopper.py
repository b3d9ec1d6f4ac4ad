"""Kernels of the hopper skeleton on sm_90: values beside float64 at awkward sizes, and what is no number."""

import pytest
import torch
from test_gpu_sample import DEVICE, Attention, check_point

import tiga as tg
from tiga import passes
from tiga.codegen import launch_hopper, plan_hopper, replay, steps

pytestmark = pytest.mark.gpu
SIZES = (17, 127, 128, 129, 1000)
KINDS = ("dense", "triangular", "offset", "window", "blocks", "intervals")
LAYOUTS = ("contiguous", "heads-outermost")
POINTS = [
    (n, (64, 128)[(i + j) % 2], kind, ("bfloat16", "float16")[i % 2], LAYOUTS[(i + j // 2) % 2])
    for i, n in enumerate(SIZES)
    for j, kind in enumerate(KINDS)
]
WIDE = ((80, "window"), (96, "blocks"), (104, "triangular"), (256, "dense"), (200, "intervals"), (40, "offset"))
POINTS += [(n, width, kind, "bfloat16", "contiguous") for n in (129, 1000) for width, kind in WIDE]
POINTS += [(4097, 128, "triangular", "bfloat16", "contiguous"), (4097, 64, "window", "bfloat16", "heads-outermost")]
KERNELS: dict = {}  # sizes and layouts, by what makes a kernel: compiled once, it sees them all
for _n, *_kernel, _layout in POINTS:
    KERNELS.setdefault(tuple(_kernel), []).append((_n, _layout))


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """As if the chip had two multiprocessors: a few tiles are enough, and two programs visit them all."""
    if launch_hopper.unavailable(torch.device(DEVICE)):
        pytest.fail(launch_hopper.unavailable(torch.device(DEVICE)))
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 2)
    every = [(span, width) for span in ("band", "rows1", "blocks") for width in (64, 128, 256)]
    monkeypatch.setattr(plan_hopper, "FEWEST", dict.fromkeys(every, (0, 0)))
    forget()
    yield
    forget()


def forget():
    steps._records.clear()
    replay.KEPT.clear()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda p: " ".join(map(str, p)))
def test_points(kernel):
    width, kind, dtype = kernel
    for n, layout in KERNELS[kernel]:
        launched = passes.COUNTS["launch-hopper"]
        check_point(n, width, kind, getattr(torch, dtype), layout, lambda run: run())
        assert passes.COUNTS["launch-hopper"] > launched, (n, layout)


class Positions(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = 30 * torch.tanh((src.key * dst.query).sum(-1) * scale / 30)
        return self.reducer(score + (src.pos - dst.pos) * dst.slope, src.value)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("scale", [0.1, -0.1, 0.0])
def test_scores_of_positions(width, scale):
    n, heads = 700, 2
    draw = lambda: torch.randn(n, heads, width, device=DEVICE).bfloat16().requires_grad_()
    query, key, value = draw(), draw(), draw()
    pos = torch.arange(n, device=DEVICE, dtype=torch.float32)[:, None]
    slope = torch.tensor([0.1, 0.01], device=DEVICE)
    launched = passes.COUNTS["launch-hopper"]
    out = Positions()(
        graph=tg.Graph.triangular(n, device=DEVICE),
        src={"key": key, "value": value, "pos": pos},
        dst={"query": query, "pos": pos, "slope": slope.expand(n, heads)},
        edge={},
        scale=scale,
    )
    given = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, (query, key, value), given)]
    assert passes.COUNTS["launch-hopper"] >= launched + 2
    q, k, v = (x.detach().double().requires_grad_() for x in (query, key, value))
    score = 30 * torch.tanh(torch.einsum("ihd,jhd->hij", q, k) * scale / 30)
    score = score + (pos.T - pos).double() * slope.double()[:, None, None]
    mask = torch.ones(n, n, device=DEVICE, dtype=torch.bool).tril()
    wanted = torch.einsum("hij,jhd->ihd", score.masked_fill(~mask, -torch.inf).softmax(-1), v)
    for x, y in zip(got, [wanted, *torch.autograd.grad(wanted, (q, k, v), given.double())]):
        assert (x.double() - y).abs().max() <= 0.02 * max(y.abs().max(), 1e-3)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("scale", [0.1, -0.1])
def test_heads_that_share_keys(width, scale):
    """Of a scale below 0 the peaks of scores are the least products."""
    n, groups, members = 700, 2, 3
    draw = lambda heads: torch.randn(n, groups, heads, width, device=DEVICE).bfloat16().requires_grad_()
    query, key, value = draw(members), draw(1), draw(1)
    launched = passes.COUNTS["launch-hopper"]
    graph = tg.Graph.triangular(n, device=DEVICE)
    out = Attention()(graph=graph, src={"key": key, "value": value}, dst={"query": query}, edge={}, scale=scale)
    given = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, (query, key, value), given)]
    assert passes.COUNTS["launch-hopper"] == launched + 3
    q, k, v = (x.detach().double().requires_grad_() for x in (query, key, value))
    score = torch.einsum("ighd,jgxd->ghij", q, k) * scale
    mask = torch.ones(n, n, device=DEVICE, dtype=torch.bool).tril()
    wanted = torch.einsum("ghij,jgxd->ighd", score.masked_fill(~mask, -torch.inf).softmax(-1), v)
    for x, y in zip(got, [wanted, *torch.autograd.grad(wanted, (q, k, v), given.double())]):
        assert (x.double() - y).abs().max() <= 0.02 * y.abs().max()


def test_what_is_no_edge_is_not_seen():
    """Infinite values and keys of later rows; those rows show them."""
    n, late = 900, 700
    query, key, value = (torch.randn(n, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    fields = lambda: {"src": {"key": key, "value": value}, "dst": {"query": query}, "edge": {}, "scale": 0.1}
    graph = tg.Graph.triangular(n, device=DEVICE)
    wanted = Attention()(graph=graph, **fields())
    value[late, 0], key[late + 9, 1] = torch.inf, torch.nan
    launched = passes.COUNTS["launch-hopper"]
    out = Attention()(graph=graph, **fields())
    assert passes.COUNTS["launch-hopper"] == launched + 1
    # rows beside a spoiled one are done again as well, in tiles of another size
    torch.testing.assert_close(out[:late], wanted[:late], rtol=0.02, atol=0.02)
    assert not out[late:, 0].isfinite().any() and out[late + 9 :, 1].isnan().all()
    torch.testing.assert_close(out[late : late + 9, 1], wanted[late : late + 9, 1], rtol=0.02, atol=0.02)


def test_few_tiles_are_left_to_the_tiles_skeleton(monkeypatch):
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 132)
    forget()
    query = torch.randn(300, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    launched = passes.COUNTS["launch-hopper"]
    Attention()(
        graph=tg.Graph.triangular(300, device=DEVICE),
        src={"key": query, "value": query},
        dst={"query": query},
        edge={},
        scale=0.1,
    )
    assert passes.COUNTS["launch-hopper"] == launched
