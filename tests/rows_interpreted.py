"""Tests of the rows skeleton under Triton's interpreter: test_rows.py starts them with `-p interpreted_rows`."""

import itertools

import oracle
import pytest
import test_cases
import test_fusion
import torch
from cases import CASES, Attention, Case, Max, NetScore, tensors
from programs import Rearranged
from test_cases import assert_same
from torch.nn.functional import leaky_relu

import tiga as tg
from tiga import passes, preparation
from tiga.codegen import launch_rows, plan_rows, replay
from tiga.ops import rows
from tiga.parser import parse


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


def listed(pairs, num_src=6, num_dst=5, dtype=torch.int64):
    src, dst = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    graph = tg.Graph.from_edge_index(torch.stack([src, dst]).to(dtype), num_src, num_dst)
    return graph, oracle.Edges(src, dst, num_src, num_dst)


def gradients(outputs, inputs, again=False):
    weights = [torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape).cos() for x in outputs]
    first = torch.autograd.grad(outputs, inputs, weights, create_graph=again, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, first)]
    if not again:
        return found
    return [*found, *gradients([g.sin() for g in found if g.requires_grad], inputs)]


def both(module, graph, edges, src, dst, uniform=None, edge=None, again=False):
    """Outputs and gradients, by kernels and by the oracle: [each], [each]."""
    fields = [x for place in (src, dst, edge or {}, uniform or {}) for x in place.values()]
    inputs = [x for x in fields if isinstance(x, torch.Tensor) and x.requires_grad] + list(module.parameters())
    before = passes.COUNTS["launch-rows"]
    ours = [module(graph=graph, src=src, dst=dst, edge=edge or {}, **(uniform or {}))]
    got = [*ours, *gradients(ours, inputs, again)]
    assert passes.COUNTS["launch-rows"] - before >= 2 + again, "kernels ran"
    theirs = oracle.message_passing(module, edges, ("dst",), src, dst, edge or {}, uniform or {})
    return got, [*theirs, *gradients(theirs, inputs, again)]


def fields(rows, *features, count=1, dtype=torch.float64):
    made = [torch.randn(rows, *features, dtype=dtype).requires_grad_() for _ in range(count)]
    return made[0] if count == 1 else made


def bare(graph):
    """The same graph with lists made anew, of the split that a test asks for."""
    return tg.Graph(graph.kind, graph.ints, graph.tensors, graph._positions).prepare()


GRAPH = Case.graph.fget
LISTED = [case for case in CASES if case.graph.kind == "csr"]


@pytest.mark.parametrize("case", LISTED, ids=str)
def test_case(case, monkeypatch):
    """Values and gradients of first and second order; rows of more than two edges are cut, but for the hub's."""
    monkeypatch.setattr(preparation, "SPLIT", 256 if case.relation == "hub" else 2)
    module, arguments = test_cases.moved(case, torch.float64)
    inputs = tensors(arguments, module)
    found = []
    for outputs in (case.run(module, arguments, bare(case.graph)), case.oracle(module, arguments)):
        known = [torch.where(x.isfinite(), x, 0.0) for x in outputs]
        found.append([*outputs, *gradients(known, inputs, again=case.small)])
    assert_same(*found)


@pytest.mark.parametrize("case", [case for case in LISTED if case.small], ids=str)
def test_error_is_that_of_plain_torch(case, monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", 2)
    monkeypatch.setattr(Case, "graph", property(lambda case: bare(GRAPH(case))))
    test_cases.test_error_is_that_of_plain_torch(case, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [0, 1, 2, 17])
def test_edge_counts(count, dtype):
    graph, edges = listed([(3 * e % 6, e * e % 5) for e in range(count)], dtype=dtype)
    x, y, att = fields(6, 2, 3), fields(5, 2, 3), fields(2, 3)
    assert_same(*both(Gat(), graph, edges, {"x": x}, {"x": y}, {"att": att}))


@pytest.mark.parametrize("split", [3, 16])
def test_a_hub_is_the_same_in_pieces(split, monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", split)
    pairs = [(e % 6, 2) for e in range(41)] + [(1, 0), (4, 4), (4, 4)]  # rows 1 and 3 are empty
    graph, edges = listed(pairs)
    x, y, att = fields(6, 2, 3), fields(5, 2, 3), fields(2, 3)
    got, want = both(Gat(), graph, edges, {"x": x}, {"x": y}, {"att": att}, again=True)
    assert_same(got, want)
    key, value, query = fields(6, 1, 5, count=2) + [fields(5, 1, 5)]
    program = {"key": key, "value": value}
    assert_same(*both(Attention(), graph, edges, program, {"query": query}, {"scale": 0.3}, again=True))


def test_largest_with_ties_and_nan_in_pieces(monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", 3)
    pairs = [(e % 6, 2) for e in range(20)] + [(1, 0)]
    graph, edges = listed(pairs)
    x, y = fields(6, 3), torch.ones(5, 3, dtype=torch.float64)
    with torch.no_grad():
        x[4], x[5] = x[3], x[3] + 1  # every value twice or more in row 2; the first edge of equals has the gradient
    assert_same(*both(Max(), graph, edges, {"x": x}, {"y": y}))
    with torch.no_grad():
        x[3, 0] = torch.nan
    out = Max()(graph=graph, src={"x": x}, dst={"y": y})
    assert out[2].isnan().tolist() == [True, False, False]


def test_a_network_in_pieces(monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", 3)
    graph, edges = listed([(e % 6, 2) for e in range(11)] + [(1, 0), (5, 4)])
    module = NetScore().double()
    assert_same(*both(module, graph, edges, {"x": fields(6, 3)}, {"x": fields(5, 3)}, again=True))


class Lowest(tg.MessagePassing):
    """Scores that a mask pushed to the least finite number: an average, as in torch."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer(edge.score, src.value)


def test_scores_of_the_least_finite_number_still_count():
    graph, edges = listed([(0, 0), (1, 0), (2, 0), (3, 1)])
    score = torch.full((4, 1), torch.finfo(torch.float32).min)
    value = torch.randn(6, 2)
    out = Lowest()(graph=graph, src={"value": value}, edge={"score": score})
    torch.testing.assert_close(out[0], value[:3].mean(0))
    torch.testing.assert_close(out[1], value[3])


class Scaled(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * dst.y)


def test_edges_that_do_not_exist_let_nothing_through():
    """Blocks of edges are wider than rows: what pads them meets inf and nan of the owner, and stays 0."""
    graph, _ = listed([(0, 0), (1, 0), (2, 1)])
    x, y = torch.ones(6, 3), torch.full((5, 3), torch.inf)
    out = Scaled()(graph=graph, src={"x": x}, dst={"y": y})
    assert out.tolist() == [[torch.inf] * 3] * 2 + [[0.0] * 3] * 3


class Bent(tg.MessagePassing):
    """Sums of products: factors of the owner, of the edge, a narrow one, a function of both ends."""

    reducer = tg.sum()

    def edge(self, src, dst, edge, c):
        bent = leaky_relu(src.x + dst.y, 0.2)
        return self.reducer(bent * edge.w * dst.z * c), self.reducer(edge.w * dst.y), self.reducer(bent * src.x)


def test_factors_that_a_row_shares_are_multiplied_after_its_sum(monkeypatch):
    for split in (256, 3):
        monkeypatch.setattr(preparation, "SPLIT", split)
        graph, edges = listed([(e % 6, e * e % 4) for e in range(23)])  # row 4 is empty
        x, y, z, w = fields(6, 3), fields(5, 3), fields(5, 1), fields(23, 1)
        src, dst, edge = {"x": x}, {"y": y, "z": z}, {"w": w}
        inputs = [x, y, z, w]
        ours, theirs = (
            Bent()(graph=graph, src=src, dst=dst, edge=edge, c=0.5),
            oracle.message_passing(Bent(), edges, ("dst",) * 3, src, dst, edge, {"c": 0.5}),
        )
        assert_same([*ours, *gradients(ours, inputs)], [*theirs, *gradients(theirs, inputs)])
    with torch.no_grad():
        y[1], y[4] = torch.inf, torch.inf
        w.abs_()  # of infinities of both signs a sum is nan, of the factors' it need not be
    ours = Bent()(graph=graph, src=src, dst=dst, edge=edge, c=0.5)
    theirs = oracle.message_passing(Bent(), edges, ("dst",) * 3, src, dst, edge, {"c": 0.5})
    assert_same(ours[:2], theirs[:2])
    assert not ours[0][4].any() and not ours[1][4].any() and not ours[0][1].isnan().any()


def test_offsets_of_64_bits(monkeypatch):
    monkeypatch.setattr(launch_rows, "FAR_AWAY", 0)
    graph, edges = listed([(e % 6, e * e % 5) for e in range(17)])
    x, y, z, w = fields(6, 3), fields(5, 3), fields(5, 1), fields(17, 1)
    before = len(launch_rows._records)
    ours = Bent()(graph=graph, src={"x": x}, dst={"y": y, "z": z}, edge={"w": w}, c=0.5)
    theirs = oracle.message_passing(Bent(), edges, ("dst",) * 3, {"x": x}, {"y": y, "z": z}, {"w": w}, {"c": 0.5})
    assert_same([*ours, *gradients(ours, [x, y, z, w])], [*theirs, *gradients(theirs, [x, y, z, w])])
    assert len(launch_rows._records) > before


def test_items_that_name_what_does_not_exist_are_nothing():
    graph, _ = listed([(0, 0), (1, 0), (2, 1), (3, 4)])
    x, y = torch.randn(6, 3), torch.ones(5, 3)
    call = Scaled().lower(graph, src={"x": x}, dst={"y": y})
    items, merges = graph.prepared[:2]
    wrong = torch.tensor([[5, 0, 1, -1], [-2, 0, 1, -1], [2, -1, 3, -1], [2, 3, 1, -1], [2, 0, 5, -1], [2, 0, 1, 9]])
    whole = torch.cat([wrong.to(items.dtype), items])
    cut = torch.tensor([[7, 0, 1], [-1, 0, 1], [2, -1, 1], [2, 0, 99]], dtype=merges.dtype)
    for new in ({id(items): whole}, {id(items): whole, id(merges): cut}):
        (out,) = torch.ops.tiga.propagate(
            call.program, [new.get(id(t), t) for t in call.tensors], call.ints, call.scalars
        )
        torch.testing.assert_close(out[[0, 1, 2, 3, 4]], torch.stack([x[0] + x[1], x[2], y[0] * 0, y[0] * 0, x[3]]))


def test_entries_outside_the_graph_are_no_edges():
    x, y, rowptr, col = torch.randn(4, 3), torch.ones(3, 3), torch.tensor([0, 3, 3, 5]), torch.tensor([0, 9, 1, -1, 2])
    graph = tg.Graph.from_csr(rowptr, col.clamp(0, 3), 4)
    call = Scaled().lower(graph, src={"x": x}, dst={"y": y})
    spoiled = [col if t is graph.tensors[1] else t for t in call.tensors]
    (out,) = torch.ops.tiga.propagate(call.program, spoiled, call.ints, call.scalars)
    torch.testing.assert_close(out, torch.stack([x[0] + x[1], torch.zeros(3), x[2]]))


def test_blocks_and_rows_change_no_result(monkeypatch):
    """Every plan gives what one edge at a time gives, but for the order of a sum."""
    graph, edges = listed([(e * 5 % 6, e * 3 % 5) for e in range(23)])
    x, y, att = fields(6, 2, 3), fields(5, 2, 3), fields(2, 3)
    for r, e in itertools.product((1, 2, 4), (1, 4)):
        monkeypatch.setattr("tiga.codegen.launch_rows._records", {})
        replay.KEPT.clear()
        monkeypatch.setattr("tiga.codegen.launch_rows.plans", lambda *a, r=r, e=e: [plan_rows.Plan(r, e, 1)])
        assert_same(*both(Gat(), graph, edges, {"x": x}, {"x": y}, {"att": att}))


def test_no_record_keeps_a_tensor():
    graph, edges = listed([(0, 0), (1, 0), (2, 1)])
    x, y, att = fields(6, 2, 3), fields(5, 2, 3), fields(2, 3)
    both(Gat(), graph, edges, {"x": x}, {"x": y}, {"att": att})
    calls = [call for record in launch_rows._records.values() for call in (record.main, record.merge) if call]
    values = [v for call in calls for v in call.values]
    assert values and not any(isinstance(v, torch.Tensor) for v in values)


def test_one_text_serves_all_sizes():
    texts = set()
    for n, width in ((5, 2), (9, 3), (40, 8)):
        graph = tg.Graph.from_edge_index(torch.randint(0, n, (2, 3 * n)), n, n)
        x = torch.randn(n, 2, width)
        call = Gat().lower(graph, src={"x": x}, dst={"x": x}, att=torch.randn(2, width))
        texts |= {k.main.text for k in rows.planned(parse(call.program)).passes}
    assert len(texts) == 1


def test_neighbours_are_computed_in_the_kernels():
    """Bias and activation of a layer, which a compiler moved into its program."""
    torch.manual_seed(0)
    before = passes.COUNTS["launch-rows"]
    test_fusion.test_a_layer_over_listed_edges()
    assert passes.COUNTS["launch-rows"] - before >= 4


class Projected(tg.MessagePassing):
    """Keys and values with what a map makes of an edge's few attributes."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, weight, scale):
        added = torch.nn.functional.linear(edge.a, weight).unflatten(-1, src.key.shape[1:])
        return self.reducer(((src.key + added) * dst.query).sum(-1) * scale, src.value + added)


class Mixed(tg.MessagePassing):
    """Maps alone and beside other terms: in products with both ends, in sums, under a nonlinear function."""

    reducer = tg.sum()

    def edge(self, src, dst, edge, weight, other):
        added, more = (torch.nn.functional.linear(edge.a, w) for w in (weight, other))
        bent = leaky_relu(src.x + dst.y + added, 0.2)
        gate = (added * dst.y * 0.5).sum(-1, keepdim=True)
        return self.reducer(gate * (more + src.x)), self.reducer(bent), self.reducer(added * dst.y)


@pytest.mark.parametrize("count, heads, width", [(3, 3, 5), (8, 1, 3)])
def test_maps_of_few_inputs(count, heads, width, monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", 3)
    graph, edges = listed([(e % 6, e * e % 4) for e in range(23)])  # row 4 is empty
    key, value = fields(6, heads, width, count=2)
    query, a, weight = fields(5, heads, width), fields(23, count), fields(heads * width, count)
    src, dst, uniform = {"key": key, "value": value}, {"query": query}, {"weight": weight, "scale": 0.3}
    assert_same(*both(Projected(), graph, edges, src, dst, uniform, {"a": a}, again=True))
    text = [key[0].main.text for key in launch_rows._records]
    assert any("softmax_weights" in t for t in text) and any("tl.join" in t for t in text)


class Scored(tg.MessagePassing):
    """Numbers of both ends make the score: forward keeps a mean, and backward visits edges by source alone."""

    reducer = tg.online_softmax()

    def __init__(self, score):
        super().__init__()
        self.score = score

    def edge(self, src, dst, edge):
        return self.reducer(self.score(src.a, dst.a, edge.w), src.v)


SCORES = [
    lambda j, i, w: torch.where(j > 1, float("-inf"), leaky_relu(j + i * w, 0.2)),
    lambda j, i, w: torch.exp(j + i) * w,
    lambda j, i, w: torch.where(i > 0, j + i, 0.5 * (j + i)) + w,
]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads, width, split", [(3, 5, 3), (1, 4, 100)])
def test_sums_that_forward_keeps(heads, width, split, score, monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", split)
    graph, edges = listed([(e % 6, e * e % 4) for e in range(23)])  # row 4 is empty
    src, dst = {"a": fields(6, heads), "v": fields(6, heads, width)}, {"a": fields(5, heads)}
    assert_same(*both(Scored(score), graph, edges, src, dst, {}, {"w": fields(23, heads)}, again=True))
    works = [key[0].work for key in launch_rows._records]
    assert any([not work.folds and work.owner == "dst" for work in works]), "node work before a pass by source"
    assert any([len(f.args) == 4 for work in works for f in work.folds]), "one softmax of three values"


class Displaced(tg.MessagePassing):
    """A map of what is made of both ends and the edge, number by number."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, weight):
        away = (src.p - dst.p).abs() * 0.5 + edge.shift
        bent = leaky_relu(src.x + dst.y + torch.nn.functional.linear(away, weight), 0.2)
        return self.reducer(bent.sum(-1), src.x)


@pytest.mark.parametrize("count, width", [(3, 5), (8, 3)])
def test_maps_of_few_numbers_that_edges_compute(count, width, monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", 3)
    graph, edges = listed([(e % 6, e * e % 4) for e in range(23)])
    src, dst = {"p": fields(6, count), "x": fields(6, width)}, {"p": fields(5, count), "y": fields(5, width)}
    edge, uniform = {"shift": fields(23, count)}, {"weight": fields(width, count)}
    assert_same(*both(Displaced(), graph, edges, src, dst, uniform, edge, again=True))
    text = [key[0].main.text for key in launch_rows._records]
    assert any("column src.p 0" in t for t in text)


def test_rearranged_features():
    graph, edges = listed([(0, 1), (2, 1), (5, 0), (3, 4), (4, 4)], 6, 5)
    x, y, z = fields(6, 120), fields(5, 120), fields(5, 6, 3)
    ends = {"x": x}, {"x": y[:, :80], "y": y[:, 80:]}
    assert_same(*both(Rearranged(), graph, edges, *ends, edge={"z": z}, again=True))


@pytest.mark.parametrize("count", [2, 3])
def test_maps_beside_other_terms(count, monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", 3)
    graph, edges = listed([(e % 6, e * e % 4) for e in range(23)])
    x, y, a, weight, other = fields(6, 5), fields(5, 5), fields(23, count), fields(5, count), fields(5, count)
    src, dst, edge, uniform = {"x": x}, {"y": y}, {"a": a}, {"weight": weight, "other": other}
    inputs = [x, y, a, weight, other]
    ours = Mixed()(graph=graph, src=src, dst=dst, edge=edge, **uniform)
    theirs = oracle.message_passing(Mixed(), edges, ("dst",) * 3, src, dst, edge, uniform)
    assert_same([*ours, *gradients(ours, inputs)], [*theirs, *gradients(theirs, inputs)])


def test_rows_without_edges_are_0_whatever_a_map_holds():
    graph, _ = listed([(e % 6, e * e % 4) for e in range(23)])
    key, value = fields(6, 2, 3, count=2)
    query, a, weight = fields(5, 2, 3), fields(23, 3), torch.full((6, 3), torch.inf, dtype=torch.float64)
    given = {"graph": graph, "src": {"key": key, "value": value}, "dst": {"query": query}, "edge": {"a": a}}
    assert not Projected()(**given, weight=weight, scale=0.3)[4].any()
    with torch.no_grad():
        query[4], weight[:] = torch.nan, 1.0
    weight.requires_grad_()
    out = Projected()(**given, weight=weight, scale=0.3)
    (back,) = torch.autograd.grad(out.sum(), weight)
    assert back.isfinite().all() and not out[4].any()


def test_a_gradient_of_all_edges_in_16_bits_is_replayed():
    replay.KEPT.clear()
    graph, edges = listed([(e % 6, e * e % 4) for e in range(23)])
    x, y, att = (f.detach().half().requires_grad_() for f in (fields(6, 2, 3), fields(5, 2, 3), fields(2, 3)))
    found = []
    for _ in range(3):  # met, noted, repeated
        out = Gat()(graph=graph, src={"x": x}, dst={"x": y}, att=att)
        found.append(torch.autograd.grad(out.float().cos().sum(), (x, y, att)))
    assert [met.recipe is not None for met in replay.KEPT.calls()] == [True] * 2
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0]))
    wide = [f.detach().double().requires_grad_() for f in (x, y, att)]
    out = oracle.message_passing(Gat(), edges, ("dst",), {"x": wide[0]}, {"x": wide[1]}, {}, {"att": wide[2]})[0]
    for got, want in zip(found[0], torch.autograd.grad(out.cos().sum(), wide)):
        torch.testing.assert_close(got.double(), want, rtol=5e-3, atol=5e-3)
