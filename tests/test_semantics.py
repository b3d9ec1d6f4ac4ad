"""What the answers must be, by hand or by dense formulas: numerics, empty things, layouts, autocast, relations."""

import math

import pytest
import torch
from cases import Attention, AttentionLse, EdgeScore, Quartic
from torch.autograd import grad

import tiga as tg

Graph = tg.Graph
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Source(tg.MessagePassing):
    def __init__(self, reducer):
        super().__init__()
        self.reducer = reducer

    def edge(self, src, dst, edge):
        return self.reducer(src.x)


def summed(graph, x):
    return Source(tg.sum())(graph=graph, src={"x": x})


def attend(graph, q, k, v, scale=0.125, module=Attention):
    return module()(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=scale)


def scored(score, value, pairs, num_dst=1):
    graph = Graph.from_edge_index(torch.tensor(pairs).t(), len(value), num_dst)
    return EdgeScore()(graph=graph, src={"value": value}, edge={"score": score})


def qkv(n, heads=2, width=8, dtype=torch.float32):
    return [torch.randn(n, heads, width).to(dtype).requires_grad_() for _ in range(3)]


def dense(mask, q, k, v, scale=0.125):
    """softmax over a masked square, rows without a source 0."""
    score = torch.einsum("ihd,jhd->hij", q, k) * scale
    score = torch.where(mask, score, -torch.inf)
    weight = torch.where(mask.any(1)[:, None], score, 0.0).softmax(-1) * mask
    return torch.einsum("hij,jhd->ihd", weight, v)


def near(got, want, **tolerance):
    torch.testing.assert_close(got, want, **(tolerance or CLOSE))


# Numerics.

TO_ONE = [(0, 0), (1, 0), (2, 0)]


def test_large_scores_do_not_overflow():
    out = scored(torch.tensor([[1000.0], [1000.0], [-1000.0]]), torch.tensor([[[1.0]], [[3.0]], [[50.0]]]), TO_ONE)
    assert out.item() == 2.0


@pytest.mark.parametrize("low, tolerance", [(0.0, 1e-6), (-6e4, 5e-3), (-1e5, 5e-3), (-1e30, None)])
def test_very_negative_scores_are_scores(low, tolerance):
    out = scored(torch.tensor([[low], [low - 1]]), torch.tensor([[[1.0]], [[0.0]]]), TO_ONE[:2]).item()
    assert abs(out - (0.5 if tolerance is None else 1 / (1 + math.exp(-1)))) < (tolerance or 1e-6)


def test_the_lowest_float_is_a_score():
    low, value = torch.finfo(torch.float32).min, torch.tensor([1.0, 2.0, 3.0, 6.0]).view(4, 1, 1)
    pairs = [(j, 0) for j in range(4)]
    near(scored(torch.full((4, 1), low), value, pairs), torch.full((1, 1, 1), 3.0))
    near(scored(torch.tensor([[low], [low], [0.0], [low]]), value, pairs), torch.full((1, 1, 1), 3.0))


def test_16_bit_values_accumulate_in_float32():
    x = torch.ones(512, 1, 4, dtype=torch.bfloat16)
    graph = Graph.dense(1, 512)
    assert (summed(graph, x) == 512).all()
    assert (Source(tg.mean())(graph=graph, src={"x": x}) == 1).all()
    out = EdgeScore()(graph=graph, src={"value": x}, edge={"score": torch.zeros(512, 1, dtype=torch.bfloat16)})
    assert out.dtype == torch.bfloat16 and (out == 1).all()


@pytest.mark.parametrize("rho", [0, 0.0, -0.1, 1.5, math.inf, math.nan])
def test_thresholds_outside_their_range(rho):
    with pytest.raises(tg.TigaError, match="block_prune_threshold"):
        tg.online_softmax(block_prune_threshold=rho)
    tg.online_softmax(block_prune_threshold=1.0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-2)])
def test_one_query_and_one_key(dtype, tolerance):
    for _ in range(3):
        q, k, v = [(x.detach() * 3).requires_grad_() for x in qkv(1, 1, 16, dtype)]
        out = attend(Graph.dense(1), q, k, v, 0.25)
        near(out, v, rtol=0, atol=tolerance)
        for got, want in zip(grad(out, (q, k, v), torch.ones_like(out)), (0.0, 0.0, 1.0)):
            near(got, torch.full_like(got, want), rtol=0, atol=tolerance)


def test_many_heads():
    q, k, v = qkv(2, 65537, 2)
    mask = torch.ones(2, 2).bool().tril()
    got, want = attend(Graph.triangular(2), q, k, v), dense(mask, q, k, v)
    near(got, want)
    for x, y in zip(grad(got.sum(), (q, k, v)), grad(want.sum(), (q, k, v))):
        near(x, y)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 33, 129])
def test_sizes_that_are_no_multiple_of_anything(n):
    q, k, v = qkv(n)
    got, want = attend(Graph.triangular(n), q, k, v), dense(torch.ones(n, n).bool().tril(), q, k, v)
    near(got, want)
    for x, y in zip(grad(got.square().sum(), (q, k, v)), grad(want.square().sum(), (q, k, v))):
        near(x, y, rtol=2e-5, atol=2e-5)


# Nothing.


def test_a_row_without_edges():
    q, k, v = qkv(2)
    graph, mask = (
        Graph.from_edge_index(torch.tensor([[0, 1], [0, 0]]), 2, 2),
        torch.tensor([[True, True], [False, False]]),
    )
    out, lse = attend(graph, q, k, v, module=AttentionLse)
    near(out, dense(mask, q, k, v))
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    near(lse[0], ((k * q[0]).sum(-1) * 0.125).logsumexp(0))
    found = grad(out.sum(), (q, k, v), retain_graph=True)
    assert all(g.isfinite().all() for g in found) and not found[0][1].any()
    # the loss reads lse where it is finite only
    assert all(g.isfinite().all() for g in grad(lse[0].sum() + out.sum(), (q, k, v)))


@pytest.mark.parametrize("reducer", [tg.sum, tg.mean, tg.max, tg.min])
def test_no_edges_at_all(reducer):
    x = torch.randn(2, 1, 4, requires_grad=True)
    out = Source(reducer())(graph=Graph.from_edge_index(torch.zeros(2, 0).long(), 2, 3), src={"x": x})
    assert out.shape == (3, 1, 4) and not out.any() and not grad(out.sum(), x)[0].any()


def test_no_rows_at_all():
    q, k, v = [torch.empty(0, 2, 8, requires_grad=True) for _ in range(3)]
    out = attend(Graph.triangular(0), q, k, v)
    assert out.shape == (0, 2, 8) and all(g.shape == (0, 2, 8) for g in grad(out.sum(), (q, k, v)))
    query = torch.randn(3, 2, 8, requires_grad=True)
    out = attend(Graph.dense(3, 0), query, k, v)
    assert out.shape == (3, 2, 8) and not out.any()
    first, second = grad(out.sum(), (query, k))
    assert not first.any() and second.shape == (0, 2, 8)


def test_no_features():
    for graph in (Graph.triangular(3), Graph.triangular(3).to_csr()):
        q, k, v = qkv(3, 2, 0)
        out = attend(graph, q, k, v)
        assert out.shape == (3, 2, 0) and [g.shape for g in grad(out.sum(), (q, k, v))] == [(3, 2, 0)] * 3
        x = torch.randn(3, 0, requires_grad=True)
        for reducer in (tg.sum, tg.mean, tg.max, tg.min):
            out = Source(reducer())(graph=graph, src={"x": x})
            assert out.shape == (3, 0) and grad(out.sum(), x)[0].shape == (3, 0)
        # a sum over no features is 0
        value = torch.randn(3, 2, 1)
        near(attend(graph, q, k, value), dense(torch.ones(3, 3).bool().tril(), q, k, value))


def test_atoms_out_of_reach_still_have_forces():
    p = torch.tensor([[0.0, 0, 0], [10.0, 0, 0]], requires_grad=True)
    energy = Quartic()(graph=Graph.radius(p.detach(), 1.0), src={"p": p}, dst={"p": p}).sum()
    (force,) = grad(energy, p, create_graph=True)
    assert not force.any()
    (energy + force.square().sum()).backward()
    assert p.grad is not None and not p.grad.any()


def test_distance_zero_has_gradient_zero():
    class Length(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(edge.distance), self.reducer(edge.displacement)

    p = torch.tensor([[0.0, 0, 0], [0.0, 0, 0], [3.0, 4.0, 0.0]], requires_grad=True)
    length, apart = Length()(graph=Graph.radius(p, 6.0))
    assert length.tolist() == [5.0, 5.0, 10.0] and apart.tolist() == [
        [3.0, 4.0, 0.0],
        [3.0, 4.0, 0.0],
        [-6.0, -8.0, 0.0],
    ]
    (first,) = grad(length.sum(), p, create_graph=True)
    near(first, torch.tensor([[-1.2, -1.6, 0.0], [-1.2, -1.6, 0.0], [2.4, 3.2, 0.0]]))
    assert grad(first.sum(), p)[0].isfinite().all()


# Operands.


def test_views_of_one_projection():
    fused = torch.randn(20, 3, 2, 8, requires_grad=True)
    copies = [t.detach().contiguous().requires_grad_() for t in fused.unbind(1)]
    got, want = attend(Graph.window(20, 4), *fused.unbind(1)), attend(Graph.window(20, 4), *copies)
    near(got, want)
    near(grad(got.square().sum(), fused)[0], torch.stack(grad(want.square().sum(), copies), 1))


def test_scalars_from_anywhere():
    q, k, v = qkv(9)
    a, b = (torch.tensor(0.7, requires_grad=True) for _ in range(2))

    class Owned(tg.MessagePassing):
        reducer = tg.online_softmax()

        def __init__(self, held):
            super().__init__()
            self.held = torch.nn.Parameter(torch.tensor(0.7)) if held else None

        def edge(self, src, dst, edge):
            return self.reducer((src.key * dst.query).sum(-1) * (b if self.held is None else self.held), src.value)

    mask, c = torch.ones(9, 9).bool().tril(), torch.tensor(0.7, requires_grad=True)
    want = dense(mask, q, k, v, c)
    weight = torch.randn_like(want)
    (slope,) = grad((want * weight).sum(), c)
    own, captured = Owned(True), Owned(False)
    arguments = {"graph": Graph.triangular(9), "src": {"key": k, "value": v}, "dst": {"query": q}}
    for out, scale in (
        (attend(Graph.triangular(9), q, k, v, a), a),
        (own(**arguments), own.held),
        (captured(**arguments), b),
    ):
        near(out, want)
        (found,) = grad((out * weight).sum(), scale)
        assert found.shape == ()
        near(found, slope, rtol=1e-4, atol=1e-4)
    near(attend(Graph.triangular(9), q, k, v, 0.7), want)


def test_a_field_that_is_read_and_not_used():
    class Ignores(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            _ = src.extra
            return self.reducer(src.x)

    x, extra = torch.randn(4, 2, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    out = Ignores()(graph=Graph.triangular(4), src={"x": x, "extra": extra})
    found = grad(out.sum(), (x, extra), allow_unused=True)
    near(found[0][:, 0], torch.tensor([4.0, 3.0, 2.0, 1.0]))
    assert found[1] is None or not found[1].any()


def test_features_align_from_the_right():
    """A node's number times a uniform (H,) plus a field (H, F)."""

    class Scaled(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge, gain):
            return self.reducer(src.a * gain + dst.b)

    s, d = torch.tensor([0, 1, 2, 2, 3]), torch.tensor([0, 0, 1, 2, 2])
    a, gain, b = torch.randn(4), torch.randn(5), torch.randn(3, 2, 1)
    out = Scaled()(graph=Graph.from_edge_index(torch.stack([s, d]), 4, 3), src={"a": a}, dst={"b": b}, gain=gain)
    near(out, torch.zeros(3, 2, 5).index_add(0, d, (a[s][:, None] * gain)[:, None] + b[d]))


@pytest.mark.parametrize(
    "slope, dtype",
    [
        (0.5, torch.float32),
        (2, torch.int64),
        (torch.tensor([0.5, 0.25]), torch.float32),
        (torch.tensor(0.5, dtype=torch.float64), torch.float64),
    ],
    ids=["float", "int", "tensor", "0-d"],
)
def test_integer_positions_times_numbers(slope, dtype):
    class Relative(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge, slope):
            return self.reducer((src.pos - dst.pos) * slope)

    pos = torch.arange(6) * 3
    out = Relative()(graph=Graph.triangular(6), src={"pos": pos}, dst={"pos": pos}, slope=slope)
    total = (pos[None] - pos[:, None]).tril().sum(1)
    want = total[:, None] * slope if isinstance(slope, torch.Tensor) and slope.dim() else total * slope
    assert out.dtype == dtype
    near(out, want.to(dtype))


def test_autocast():
    q, k, v = qkv(16)
    want = attend(Graph.triangular(16), q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(Graph.triangular(16), q.to(torch.bfloat16), k, v)
        assert summed(Graph.triangular(16), torch.ones(16)).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16
    near(out.float(), want, rtol=3e-2, atol=3e-2)
    assert [g.dtype for g in grad(out.float().sum(), (q, k, v))] == [torch.float32] * 3


def test_autocast_leaves_geometry_and_float64_alone():
    class Geometry(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            d = edge.displacement
            return self.reducer(d), self.reducer(edge.distance), self.reducer(d * d)

    p, x = torch.randn(12, 3), torch.randn(16, 3, dtype=torch.float64)
    graph = Graph.radius(p, 1.5)
    plain = (*Geometry()(graph=graph), summed(Graph.triangular(16), x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = (*Geometry()(graph=graph), summed(Graph.triangular(16), x))
    for a, b in zip(cast, plain):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_fake_outputs_are_like_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in (torch.float32, torch.bfloat16):
        plain = [x.detach() for x in qkv(10, dtype=dtype)]
        for given in (
            plain,
            [x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain],
            [torch.cat([x, x], -1)[..., :8] for x in plain],
        ):
            real = attend(Graph.dense(10), *given)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = attend(Graph.dense(10), *[mode.from_tensor(x) for x in given])
            assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
                real.shape,
                real.stride(),
                real.dtype,
                real.device,
            )


# Relations.


@pytest.mark.parametrize("n", [4, 70])
def test_nan_outside_the_relation(n):
    q, k, v = qkv(n)
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[-1], v2[-1] = torch.nan, torch.inf
    k2.requires_grad_(), v2.requires_grad_()
    want = attend(Graph.triangular(n - 1), q[:-1], k[:-1], v[:-1])
    near(attend(Graph.triangular(n), q, k2, v2)[:-1], want)
    out = attend(Graph.cat([Graph.triangular(n - 1), Graph.dense(0, 1)]), q[:-1], k2, v2)
    near(out, want)
    got, expected = grad(out.square().sum(), (q, k2, v2)), grad(want.square().sum(), (q, k, v))
    for a, b in zip(got, expected):
        near(a[:-1], b[:-1])
    assert not got[1][-1].any() and not got[2][-1].any()
    lost = torch.cat([q[:-1].detach(), torch.full((1, 2, 8), torch.nan)])
    out = attend(Graph.cat([Graph.triangular(n - 1), Graph.dense(1, 0)]), lost, k[:-1], v[:-1])
    near(out[:-1], want)
    assert not out[-1].any()


def test_degrees():
    one = torch.ones(6)
    for graph, want in (
        (Graph.window(6, 2, 0), [1, 2, 3, 3, 3, 3]),
        (Graph.window(6, 1, 1), [2, 3, 3, 3, 3, 2]),
        (Graph.window(6, 0), [1] * 6),
        (Graph.triangular(2, 6, offset=4), [5, 6]),
        (Graph.triangular(6), [1, 2, 3, 4, 5, 6]),
        (Graph.dense(2, 6), [6, 6]),
    ):
        assert summed(graph, one).tolist() == want
    coded = 10.0 ** torch.arange(6)
    assert summed(Graph.window(2, 2, 0, num_src=6, offset=4), coded).tolist() == [11100.0, 111000.0]
    assert summed(Graph.intervals([1, 4], [3, 4], 5), coded[:5]).tolist() == [110.0, 0.0]


@pytest.mark.parametrize("n", [37, 130, 515])
def test_the_first_call_of_a_size_is_right(n):
    x = torch.ones(n, 4, requires_grad=True)
    for _ in range(2):
        out = summed(Graph.triangular(n), x)
        assert out[:, 0].tolist() == list(range(1, n + 1)) and grad(out.sum(), x)[0][:, 0].tolist() == list(
            range(n, 0, -1)
        )


def test_packed_segments():
    q, k, v = qkv(3)
    out = attend(Graph.cu_seqlens(torch.tensor([0, 0, 1, 1, 1, 3], dtype=torch.int32)), q, k, v)
    near(out, attend(Graph.cat([Graph.triangular(1), Graph.triangular(2)]), q, k, v))
    near(out[0], v[0])
    near(attend(Graph.cu_seqlens([0, 0, 0, 0, 1]), q[:1], k[:1], v[:1]), v[:1])
    graphs = [Graph.cu_seqlens(torch.tensor([0, 1 + i % 7, 10 + i % 5, 20])) for i in range(12)]
    for i, graph in enumerate(graphs):
        starts = [0, 1 + i % 7, 10 + i % 5]
        assert summed(graph, torch.ones(20)).tolist() == [r - max(s for s in starts if s <= r) + 1 for r in range(20)]


def test_weights_are_normalised_at_the_destination():
    pairs, score = [(0, 1), (0, 2), (1, 2)], torch.tensor([[5.0], [0.0], [math.log(2.0)]])
    near(scored(score, torch.ones(3, 1, 1), pairs, 3).flatten(), torch.tensor([0.0, 1.0, 1.0]))
    near(scored(score, torch.tensor([0.0, 6.0, 0.0]).view(3, 1, 1), pairs, 3).flatten(), torch.tensor([0.0, 0.0, 4.0]))


def test_repeated_edges_count_again():
    graph, x = Graph.from_edge_index(torch.tensor([[0, 0, 1], [2, 2, 2]]), 3, 3), torch.tensor([0.0, 3.0, 9.0])
    assert summed(graph, x).tolist() == [0.0, 0.0, 3.0] and Source(tg.mean())(graph=graph, src={"x": x}).tolist() == [
        0.0,
        0.0,
        1.0,
    ]
    near(EdgeScore()(graph=graph, src={"value": x[:, None]}, edge={"score": torch.zeros(3, 1)})[2], torch.tensor([1.0]))


def test_coincident_points_and_translation():
    assert summed(Graph.radius(torch.zeros(3, 3), 0.5), torch.tensor([1.0, 10.0, 100.0])).tolist() == [
        110.0,
        101.0,
        11.0,
    ]
    water = torch.tensor([[0.0, 0, 0.119], [0, 0.763, -0.477], [0, -0.763, -0.477]])
    for shift in (0.0, -6.0, 100.0, 1000.0, 1e4):
        assert summed(Graph.radius(water + shift, 1.2), torch.ones(3)).tolist() == [2.0, 1.0, 1.0]


def test_one_edge_field_serves_a_graph_its_list_and_its_reverse():
    class Weighted(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(src.x * edge.w)

    lists = {
        "edges": (
            Graph.from_edge_index(torch.tensor([[3, 0, 2, 0, 3, 1, 0], [1, 4, 1, 0, 1, 4, 0]]), 4, 5),
            [3, 0, 2, 0, 3, 1, 0],
            [1, 4, 1, 0, 1, 4, 0],
        ),
        "triangular": (Graph.triangular(3), [0, 0, 1, 0, 1, 2], [0, 1, 1, 2, 2, 2]),
        "intervals": (Graph.intervals([1, 0], [3, 1], 3), [1, 2, 0], [0, 0, 1]),
        "cat": (Graph.cat([Graph.triangular(2), Graph.dense(1, 2)]), [0, 0, 1, 2, 3], [0, 1, 1, 2, 2]),
    }
    for graph, s, d in lists.values():
        s, d, m, n = torch.tensor(s), torch.tensor(d), graph.num_src, graph.num_dst
        x, y, w = torch.randn(m, 3), torch.randn(n, 3), torch.randn(len(s), 1, requires_grad=True)
        forward, backward = torch.zeros(n, 3).index_add(0, d, x[s] * w), torch.zeros(m, 3).index_add(0, s, y[d] * w)
        for g, f, want in (
            (graph, x, forward),
            (graph.to_csr(), x, forward),
            (graph.reverse(), y, backward),
            (graph.to_csr().reverse(), y, backward),
            (graph.reverse().to_csr(), y, backward),
            (graph.reverse().reverse(), x, forward),
        ):
            out = Weighted()(graph=g, src={"x": f}, edge={"w": w})
            near(out, want)
            near(
                grad(out.square().sum(), w)[0], grad(want.square().sum(), w, retain_graph=True)[0], rtol=1e-4, atol=1e-4
            )
