"""Programs of several kinds over implicit graphs run in kernels on a CUDA device, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from test_gpu_sample import DEVICE, Attention, assert_bounded, intervals, largest, offset
from torch.autograd import grad
from torch.nn.functional import embedding, leaky_relu

import tiga as tg
from tiga import passes

pytestmark = pytest.mark.gpu


# Programs of several kinds, beside the same on all pairs [dst, src, heads, features] in plain torch.


class SigmoidSum(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge, scale):
        return self.reducer(((src.key * dst.query).sum(-1) * scale).sigmoid()[..., None] * src.value)


class ReluMean(tg.MessagePassing):
    reducer = tg.mean()

    def edge(self, src, dst, edge, scale):
        return self.reducer(((src.key * dst.query).sum(-1) * scale).relu()[..., None] * src.value)


class Extremes(tg.MessagePassing):
    most, least = tg.max(), tg.min()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(-1) * scale
        return self.most(score), self.least(score * score)


class Pooling(tg.MessagePassing):
    reducer = tg.max()

    def edge(self, src, dst, edge, scale):
        return self.reducer(src.value * scale)


class TwoProducts(tg.MessagePassing):
    """Scores of contents and of places, each of its own width."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(-1) + (src.place * dst.place).sum(-1)
        return self.reducer(score * scale, src.value)


class RelativeBias(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale, table):
        apart = (dst.pos - src.pos).clamp(-9, 9) + 9
        return self.reducer((src.key * dst.query).sum(-1) * scale + embedding(apart, table), src.value)


class Slopes(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale, slope):
        score = (src.key * dst.query).sum(-1) * scale
        return self.reducer(score + (src.pos - dst.pos)[..., None] * 0.01 * slope, src.value)


class EdgeBias(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale + edge.bias, src.value)


class WithLse(tg.MessagePassing):
    reducer = tg.online_softmax(return_lse=True)

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Sinks(tg.MessagePassing):
    """One more score a head, of no source."""

    reducer = tg.online_softmax(return_lse=True)

    def edge(self, src, dst, edge, scale, sink):
        out, lse = self.reducer((src.key * dst.query).sum(-1) * scale, src.value)
        return out * (lse - sink).sigmoid()[..., None]


class Additive(tg.MessagePassing):
    """GATv2: vector work on the edge that is no inner product."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale, weight):
        return self.reducer((leaky_relu(src.key + dst.query, 0.2) * weight).sum(-1) * scale, src.value)


class Numbered(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(-1) * scale
        return self.reducer((score * (edge.number * 0.25).sin()[..., None])[..., None] * src.value)


def product(s, d):
    return torch.einsum("jhd,ihd->ijh", s.key, d.query)


def weighted(weight, s):
    return torch.einsum("ijh,jhd->ihd", weight.to(s.value.dtype), s.value)


def softmax(mask, score):
    some = mask.any(1, keepdim=True)
    return score.masked_fill(~mask & some, -torch.inf).softmax(1) * some


def attention(mask, score, s):
    return weighted(softmax(mask, score), s)


def lse(mask, score):
    some = mask.any(1)
    known = score.masked_fill(~mask & some[:, None], -torch.inf).logsumexp(1)
    return torch.where(some, known, -torch.inf)


def largest_of(mask, x):
    """Over sources, of which the first of equals gets the gradient; 0 of none. mask has the rank of x."""
    x = x.masked_fill(~mask, -torch.inf)
    order = torch.arange(x.shape[1], device=x.device).reshape(1, -1, *[1] * (x.dim() - 2))
    first = torch.where(x == x.amax(1, keepdim=True), order, x.shape[1]).amin(1, keepdim=True)
    return torch.where(mask.any(1), x.gather(1, first)[:, 0], 0)


def apart(s, d):
    return s.pos[None] - d.pos[:, None]


def each_edge(mask, values):
    """[i, j, ...] of an edge field, 0 where there is no edge."""
    everywhere = values.new_zeros(*mask.shape[:2], *values.shape[1:])
    return everywhere.masked_scatter(mask.expand_as(everywhere), values)


H, D, V = 8, 40, 24
QKV = {"src": {"key": (H, D), "value": (H, V)}, "dst": {"query": (H, D)}}
GROUPED = {"src": {"key": (H, 1, D), "value": (H, 1, V)}, "dst": {"query": (H, 3, D)}}
PLACES = {"src": {**QKV["src"], "place": (H, 16)}, "dst": {**QKV["dst"], "place": (H, 16)}}


@dataclass(frozen=True)
class Written:
    """plain(mask [i, j, 1], src, dst, edge, uniform): the outputs; places: which extra fields it reads."""

    module: type[tg.MessagePassing]
    plain: Callable
    fields: dict = field(default_factory=lambda: QKV)
    uniform: dict = field(default_factory=dict)
    positions: bool = False


PROGRAMS = {
    "sum of sigmoids": Written(SigmoidSum, lambda m, s, d, e, u: weighted((product(s, d) * u.scale).sigmoid() * m, s)),
    "mean of relus": Written(
        ReluMean,
        lambda m, s, d, e, u: weighted((product(s, d) * u.scale).relu() * m / m.sum(1, keepdim=True).clamp_min(1), s),
    ),
    "max and min": Written(
        Extremes,
        lambda m, s, d, e, u: [
            largest_of(m, product(s, d) * u.scale),
            -largest_of(m, -(product(s, d) * u.scale).square()),
        ],
        {"src": {"key": (H, D)}, "dst": {"query": (H, D)}},
    ),
    "max of a field": Written(
        Pooling,
        lambda m, s, d, e, u: largest_of(m[..., None], (s.value * u.scale).expand(m.shape[0], -1, -1, -1)),
        {"src": {"value": (H, V)}},
    ),
    "two inner products": Written(
        TwoProducts,
        lambda m, s, d, e, u: attention(
            m, (product(s, d) + torch.einsum("jhd,ihd->ijh", s.place, d.place)) * u.scale, s
        ),
        PLACES,
    ),
    "relative bias": Written(
        RelativeBias,
        lambda m, s, d, e, u: attention(m, product(s, d) * u.scale + u.table[(-apart(s, d)).clamp(-9, 9) + 9], s),
        uniform={"table": (19, H)},
        positions=True,
    ),
    "learned slopes": Written(
        Slopes,
        lambda m, s, d, e, u: attention(m, product(s, d) * u.scale + apart(s, d)[..., None] * 0.01 * u.slope, s),
        uniform={"slope": (H,)},
        positions=True,
    ),
    "a bias an edge": Written(
        EdgeBias,
        lambda m, s, d, e, u: attention(m, product(s, d) * u.scale + each_edge(m, e.bias), s),
        {**QKV, "edge": {"bias": (H,)}},
    ),
    "lse": Written(
        WithLse, lambda m, s, d, e, u: [attention(m, product(s, d) * u.scale, s), lse(m, product(s, d) * u.scale)]
    ),
    "sinks": Written(
        Sinks,
        lambda m, s, d, e, u: (
            attention(m, product(s, d) * u.scale, s) * (lse(m, product(s, d) * u.scale) - u.sink).sigmoid()[..., None]
        ),
        uniform={"sink": (H,)},
    ),
    "additive": Written(
        Additive,
        lambda m, s, d, e, u: attention(
            m, (leaky_relu(s.key[None] + d.query[:, None], 0.2) * u.weight).sum(-1) * u.scale, s
        ),
        uniform={"weight": (H, D)},
    ),
    "edge numbers": Written(
        Numbered,
        lambda m, s, d, e, u: weighted(
            product(s, d) * u.scale * each_edge(m, (e.number * 0.25).sin()[:, None].expand(-1, H)) * m, s
        ),
    ),
    "grouped queries": Written(
        Attention,
        lambda m, s, d, e, u: torch.einsum(
            "ijhg,jhd->ihgd",
            softmax(m[..., None], torch.einsum("jhd,ihgd->ijhg", s.key[:, :, 0], d.query) * u.scale),
            s.value[:, :, 0],
        ),
        GROUPED,
    ),
}


def listed(x):
    return [x] if isinstance(x, torch.Tensor) else list(x)


@dataclass(frozen=True)
class Call:
    """A written program on one graph: its values, by place and name, and a run on them."""

    work: Written
    graph: tg.Graph
    mask: torch.Tensor

    def rows(self, place):
        return {"src": self.graph.num_src, "dst": self.graph.num_dst, "edge": int(self.mask.sum())}[place]

    def draw(self, dtype):
        draw = lambda *shape: torch.randn(shape, device=DEVICE, dtype=torch.float64).to(dtype)
        fields = {p: {k: draw(self.rows(p), *x) for k, x in f.items()} for p, f in self.work.fields.items()}
        return {"edge": {}, "dst": {}, **fields, "uniform": {k: draw(*x) for k, x in self.work.uniform.items()}}

    def placed(self, values):
        """With positions, where the program reads them."""
        if not self.work.positions:
            return values
        pos = {p: {"pos": torch.arange(self.rows(p), device=DEVICE)} for p in ("src", "dst")}
        return {place: {**fields, **pos.get(place, {})} for place, fields in values.items()}

    def ours(self, values):
        v, module = self.placed(values), self.work.module()
        outs = module(graph=self.graph, src=v["src"], dst=v["dst"], edge=v["edge"], scale=D**-0.5, **v["uniform"])
        assert "composite" not in module.explain().split("passes:")[0]
        return outs

    def plain(self, values):
        v = self.placed(values)
        wide = torch.float64 if v["src"].get("value", v["src"].get("key")).dtype == torch.float64 else torch.float32
        more = {"edge": {"number": torch.arange(self.rows("edge"), device=DEVICE, dtype=wide)}}
        more["uniform"] = {"scale": D**-0.5}
        places = ("src", "dst", "edge", "uniform")
        return self.work.plain(self.mask[..., None], *[SimpleNamespace(**v[p], **more.get(p, {})) for p in places])


def derivatives(run, values, dtype, seed=3):
    """Outputs, 0 for the -inf of an empty row's lse, and the gradients of <outputs, random numbers>."""
    moved = {p: {k: x.to(dtype).requires_grad_() for k, x in f.items()} for p, f in values.items()}
    outs = run(moved)
    outs = [torch.where(x.isfinite(), x, 0) for x in ([outs] if isinstance(outs, torch.Tensor) else outs)]
    draw = torch.Generator(DEVICE).manual_seed(seed)
    cotangents = [torch.randn(x.shape, generator=draw, device=DEVICE).to(x.dtype) for x in outs]
    return [x.detach() for x in outs], grad(outs, [x for f in moved.values() for x in f.values()], cotangents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("relation", [offset, intervals], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs_in_kernels(name, relation, dtype):
    """Values, and gradients of every field and uniform tensor; the same again when run again."""
    call = Call(PROGRAMS[name], *relation(200))
    values = call.draw(dtype)
    launched = passes.COUNTS["launch-tiles"]
    got = derivatives(call.ours, values, dtype)
    assert passes.COUNTS["launch-tiles"] >= launched + 2, "a direction ran without kernels"
    usual, exact = derivatives(call.plain, values, dtype), derivatives(call.plain, values, torch.float64)
    # the gradient of a slope or a table is a sum over all edges, of which most may cancel
    for order, ulps in enumerate((2, 8)):
        for x, y, z in zip(got[order], usual[order], exact[order], strict=True):
            assert_bounded(x, y.to(x.dtype), z, ulps, largest(exact[order]))
    again = derivatives(call.ours, values, dtype)
    assert all(torch.equal(x, y) for xs, ys in zip(got, again) for x, y in zip(xs, ys)), "not the same again"
