"""Attention's kernels on a sample of sizes, kinds, dtypes and layouts, forward, backward and twice, against float64."""

import pytest
import sample
import torch
from torch.autograd import grad

import tiga as tg
from tiga import passes

DEVICE = "cuda"
HEADS = 2


def test_the_list_is_what_the_generator_gives():
    assert sample.kept() == sample.generate()


def test_every_pair_of_values_meets():
    points = sample.kept()
    assert len(points) == len(set(points)) <= sample.MOST
    values = list(sample.DIMENSIONS.values())
    wanted = {
        (a, x, b, y)
        for a in range(len(values))
        for b in range(a + 1, len(values))
        for x in values[a]
        for y in values[b]
    }
    assert set().union(*map(sample.pairs, points)) == wanted


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


# Kinds: a graph of n destinations, and its mask written from the definition, [n, sources].


def rows_and_sources(n, m):
    return torch.arange(n, device=DEVICE)[:, None], torch.arange(m, device=DEVICE)[None]


def dense(n):
    return tg.Graph.dense(n), torch.ones(n, n, dtype=torch.bool, device=DEVICE)


def triangular(n):
    i, j = rows_and_sources(n, n)
    return tg.Graph.triangular(n), j <= i


def offset(n):
    i, j = rows_and_sources(n, n + 37)
    return tg.Graph.triangular(n, n + 37, offset=20), j <= i + 20


def window(n):
    i, j = rows_and_sources(n, n)
    return tg.Graph.window(n, n // 3, 2), (j >= i - n // 3) & (j <= i + 2)


def blocks(n):
    """Causal segments: one of no row, one of few rows, long ones."""
    boundaries = torch.tensor([0, n // 50, n // 50, n // 3, n], device=DEVICE)
    i, j = rows_and_sources(n, n)
    of = torch.bucketize(torch.arange(n, device=DEVICE), boundaries[1:], right=True)
    return tg.Graph.cu_seqlens(boundaries), (of[i] == of[j]) & (j <= i)


def intervals(n, m=None):
    """Starts and lengths at random; every fifth row is empty."""
    m = n if m is None else m
    start = torch.randint(m, (n,), device=DEVICE)
    stop = torch.minimum(start + torch.randint(1, m + 1, (n,), device=DEVICE), torch.tensor(m, device=DEVICE))
    stop[::5] = start[::5]
    j = torch.arange(m, device=DEVICE)
    return tg.Graph.intervals(start, stop, m), (j >= start[:, None]) & (j < stop[:, None])


def double(n):
    """The first four sources, and a window that ends with one's own."""
    i, j = rows_and_sources(n, n)
    first, own = i.flatten().clamp(max=4), i.flatten() + 1
    start = torch.maximum(own - 1 - n // 4, first)
    graph = tg.Graph.intervals(torch.zeros_like(first), first, n, start, torch.maximum(start, own))
    return graph, (j < first[:, None]) | ((j >= start[:, None]) & (j <= i))


def turned(n):
    graph, mask = intervals(n + 5, n)
    return graph.reverse(), mask.t()


KINDS = {f.__name__: f for f in (dense, triangular, offset, window, blocks, intervals, double)} | {"reversed": turned}


# Layouts of (rows, heads, width).


def gap(n, width, draw):
    """Cut out of a larger buffer whose rest is nan."""
    x = draw(n, HEADS, width)
    held = x.new_full((n, HEADS + 1, width + 8), torch.nan)
    held[:, :HEADS, :width] = x
    return held[:, :HEADS, :width]


LAYOUTS = {
    "contiguous": lambda n, width, draw: draw(n, HEADS, width),
    "heads-outermost": lambda n, width, draw: draw(HEADS, n, width).transpose(0, 1),
    "features-outermost": lambda n, width, draw: draw(width, HEADS, n).permute(2, 1, 0),
    "gap": gap,
    "broadcast-head": lambda n, width, draw: draw(n, 1, width).expand(n, HEADS, width),
}


def plain_attention(mask, query, key, value, scale):
    """Of one head, [rows, width]; a row without sources gives 0."""
    some = mask.any(1, keepdim=True)
    score = (query @ key.t() * scale).masked_fill(~mask & some, -torch.inf)
    return (score.softmax(-1) * some) @ value


def derivatives(attend, inputs, given, directions):
    """[out], [gradients], [gradients of <gradients, directions>]."""
    out = attend(*inputs)
    first = grad(out, inputs, given, create_graph=True)
    return [out.detach()], [x.detach() for x in first], list(grad(first, inputs, directions))


def by_head(mask, scale, inputs, given, directions, dtype):
    """The same by plain torch, a head at a time."""
    of = lambda x, h: x.detach()[:, h].to(dtype)
    found = []
    for h in range(HEADS):
        leaves = [of(x, h).requires_grad_() for x in inputs]
        attend = lambda *x: plain_attention(mask, *x, scale)
        found.append(derivatives(attend, leaves, of(given, h), [of(x, h) for x in directions]))
    return [[torch.stack(heads, 1) for heads in zip(*order)] for order in zip(*found)]


def assert_bounded(got, plain, exact, ulps, size):
    """At most twice the error that plain torch makes in this dtype, and some units of the last place of `size`."""
    assert got.dtype == plain.dtype and got.shape == exact.shape and got.isfinite().all()
    error, usual = (got.double() - exact).abs(), (plain.double() - exact).abs().max()
    bound = 2 * usual + ulps * torch.finfo(got.dtype).eps * size
    assert (error <= bound).all(), f"error {error.max():.3g} where plain torch makes {usual:.3g}, size {size.max():.3g}"


def largest(tensors):
    return torch.stack([x.abs().max() for x in tensors]).max()


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """Memory that nothing was written to yet holds nan."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else a matrix product of torch's raises

    def fill(fn):
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1, device=DEVICE).isnan().all()
            return fn()
        finally:
            torch.use_deterministic_algorithms(False)

    return fill


@pytest.fixture(autouse=True)
def memory_is_returned():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_point(n, width, kind, dtype, layout, fill):
    torch.manual_seed(1)
    graph, mask = KINDS[kind](n)
    draw = lambda *shape: torch.randn(shape, device=DEVICE, dtype=torch.float64).to(dtype)
    make = lambda rows: LAYOUTS[layout](rows, width, draw)
    m = graph.num_src
    inputs = [make(rows).detach().requires_grad_() for rows in (n, m, m)]
    given, directions = make(n), [make(rows) for rows in (n, m, m)]
    module, scale = Attention(), width**-0.5

    def attend(query, key, value):
        return module(graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=scale)

    run = lambda: derivatives(attend, inputs, given, directions)
    launched = passes.COUNTS["launch-tiles"]
    got = fill(run)
    assert passes.COUNTS["launch-tiles"] >= launched + 3, "not every order ran in kernels"
    plain, exact = (by_head(mask, scale, inputs, given, directions, x) for x in (dtype, torch.float64))
    (out,), (wanted,) = got[0], exact[0]
    assert out.is_contiguous()
    assert_bounded(out, plain[0][0], wanted, 2, wanted.abs().amax((1, 2), keepdim=True))
    # gradients are sums of numbers of each other's size, of which all may cancel
    for order, ulps in ((1, 4), (2, 8)):
        for x, y, z in zip(got[order], plain[order], exact[order]):
            assert_bounded(x, y, z, ulps, largest(exact[1] + exact[order]))
    assert all(torch.equal(x, y) for xs, ys in zip(got, run()) for x, y in zip(xs, ys)), "another result when run again"


@pytest.mark.gpu
@pytest.mark.parametrize("point", sample.kept()[::-1], ids=" ".join)
def test_point(point, unwritten_is_nan):
    rows, width, kind, dtype, layout = point
    check_point(int(rows), int(width), kind, getattr(torch, dtype), layout, unwritten_is_nan)


# Beyond 2^31 elements.

REACH = 64


@pytest.mark.gpu
def test_fields_of_more_than_2_to_31_elements():
    """A window over 66,000 rows of 256 heads of 128, 4 GiB a field: places at both ends and in the middle."""
    n, heads, width, scale = 66_000, 256, 128, 128**-0.5
    assert n * heads * width > 2**31
    query, both = (torch.randn(n, heads, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    query.requires_grad_(), both.requires_grad_()
    given = torch.randn(width, device=DEVICE, dtype=torch.bfloat16).expand(n, heads, width)
    graph = tg.Graph.window(n, REACH - 1)
    launched = passes.COUNTS["launch-tiles"]
    out = Attention()(graph=graph, src={"key": both, "value": both.detach()}, dst={"query": query}, scale=scale)
    got = [out.detach(), *grad(out, (query, both), given)]
    assert passes.COUNTS["launch-tiles"] >= launched + 2
    length = 400
    i, j = rows_and_sources(length, length)
    mask = (j <= i) & (j > i - REACH)
    for first in (0, n // 2, n - length):
        # the rows and sources whose neighbours all lie in this part
        low, high = (REACH if first else 0), (length if first + length == n else length - REACH)
        for h in (0, heads - 1):
            part = lambda x, dtype, at=slice(first, first + length), h=h: x.detach()[at, h].to(dtype)

            def run(dtype, part=part):
                q, k = part(query, dtype).requires_grad_(), part(both, dtype).requires_grad_()
                out = plain_attention(mask, q, k, part(both, dtype), scale)
                return [out.detach(), *grad(out, (q, k), part(given, dtype))]

            for x, y, z in zip(got, run(torch.bfloat16), run(torch.float64)):
                cut = [t[low:high] for t in (part(x, torch.bfloat16), y, z)]
                assert_bounded(*cut, 2, cut[2].abs().max())


@pytest.mark.gpu
def test_row_strides_that_pass_2_to_31():
    """One of 1,400 batches in a buffer whose rows lie 89,600 elements apart: few rows, then as many as sources."""
    n, batches, width = 24_000, 1_400, 64
    held = torch.empty(n, batches, width, device=DEVICE, dtype=torch.bfloat16)
    assert held.stride(0) * (n - 1) > 2**31
    held[:, :2] = torch.randn(n, 2, width, device=DEVICE)
    key, value = held[:, :1].detach().requires_grad_(), held[:, 1:2].detach().requires_grad_()
    query, given = (torch.randn(4, 1, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    fields = {"src": {"key": key, "value": value}, "dst": {"query": query}}
    launched = passes.COUNTS["launch-tiles"]
    out = Attention()(graph=tg.Graph.dense(4, n), scale=width**-0.5, **fields)
    got = [out.detach(), *grad(out, (key, value), given)]
    assert passes.COUNTS["launch-tiles"] >= launched + 2
    mask = torch.ones(4, n, dtype=torch.bool, device=DEVICE)

    def run(dtype):
        q, k, v = (x.detach()[:, 0].to(dtype) for x in (query, key, value))
        k.requires_grad_(), v.requires_grad_()
        out = plain_attention(mask, q, k, v, width**-0.5)
        return [out.detach(), *grad(out, (k, v), given[:, 0].to(dtype))]

    for x, y, z in zip(got, run(torch.bfloat16), run(torch.float64)):
        assert_bounded(x[:, 0], y, z, 2, z.abs().max())
