"""Sums that forward keeps so that no gradient visits a row's edges again: which programs have them, what they give."""

import pytest
import torch
from torch import nn

import tiga as tg
from tiga.adjoint import adjoint, augment
from tiga.codegen.rows import Analysis
from tiga.parser import parse

pytestmark = pytest.mark.filterwarnings("ignore:.*never uses it")

SCORES = {
    "leaky": lambda j, i, a: nn.functional.leaky_relu(j + i, 0.2),
    "tanh": lambda j, i, a: torch.tanh(j + i) * 1.5,
    "its own slope": lambda j, i, a: torch.exp(j + i),
    "of one end's slope": lambda j, i, a: torch.where(i > 0, j + i, 0.5 * (j + i)),
    "masked": lambda j, i, a: torch.where(j > 0.3, float("-inf"), nn.functional.leaky_relu(j + i, 0.1)),
    "of an edge": lambda j, i, a: nn.functional.silu(j - i * a),
    "of a product": lambda j, i, a: torch.exp(j * i) / (1 + a * a),
    "of two branches": lambda j, i, a: torch.where(i > 0, j * i, torch.sigmoid(j - i)),
}


class Additive(tg.MessagePassing):
    """A score of numbers, heads apart, that weighs vectors."""

    reducer = tg.online_softmax()

    def __init__(self, name="leaky", more=False):
        super().__init__()
        self.score, self.more = SCORES[name], more

    def edge(self, src, dst, edge):
        return self.reducer(self.score(src.a, dst.a, edge.w), src.v + edge.w.unsqueeze(-1) if self.more else src.v)


class Dot(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer((src.v * dst.q).sum(-1), src.v)


class Vectors(tg.MessagePassing):
    """Each feature of a row has a share in its score."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer(nn.functional.leaky_relu(src.v + dst.q, 0.2).sum(-1), src.v)


class Mean(tg.MessagePassing):
    reducer = "mean"

    def edge(self, src, dst, edge):
        return torch.relu(src.a + dst.a).unsqueeze(-1) * src.v


def listed(n=23, edges=140):
    """Some rows without an edge, some edges more than once."""
    i = torch.randint(0, n - 3, (edges,))
    return tg.Graph.from_edge_index(torch.stack([torch.randint(0, n, (edges,)), i]), n, n)


def fields(n=23, edges=140, heads=2, width=5, dtype=torch.float64):
    draw = lambda *shape: torch.randn(shape, dtype=dtype, requires_grad=True)
    src = {"a": draw(n, heads), "v": draw(n, heads, width)}
    return src, {"a": draw(n, heads), "q": draw(n, heads, width)}, {"w": draw(edges, heads)}


def texts(module, graph, src, dst, edge):
    call = module.lower(graph, src=src, dst=dst, edge=edge)
    own = parse(call.program)
    full = augment(call.program)
    p = parse(full)
    wanted = tuple(i for i, o in enumerate(p.operands) if p.types[o.ref].floating)
    return own, p, parse(adjoint(full, wanted, (0,)).text)


def folds(p, place):
    return [line for line in p.lines if line.op == "reduce" and line.attrs[0] == place]


def only(names, **fields_of):
    return {k: v for k, v in fields_of.items() if k in names}


def plain(module, graph, src, dst, edge):
    """The same by torch, on edges."""
    rowptr, j, number = graph.tensors
    i = torch.arange(graph.num_dst).repeat_interleave(rowptr.diff())
    w = edge["w"][number]
    score = module.score(src["a"][j], dst["a"][i], w)
    value = src["v"][j] + w.unsqueeze(-1) if module.more else src["v"][j]
    rows = torch.zeros_like(dst["a"]).index_add(0, i, torch.exp(score))
    out = torch.zeros_like(dst["q"]).index_add(0, i, torch.exp(score).unsqueeze(-1) * value)
    return torch.where(rows.unsqueeze(-1) > 0, out / rows.clamp(min=1e-300).unsqueeze(-1), 0.0)


@pytest.mark.parametrize("name", SCORES)
def test_no_gradient_visits_a_row_again(name):
    own, full, back = texts(Additive(name), listed(), *fields())
    assert len(full.returns) > len(own.returns) + 2 and len(folds(full, "dst")) == 1 + 2 * (len(folds(own, "dst")))
    assert not folds(back, "dst") and folds(back, "src")
    analysis = Analysis(full)
    assert len(analysis.passes()) == 1 and len(analysis.passes()[0].folds) == 1, "one softmax of three values"
    assert [work.owner for work in Analysis(back).passes() if work.folds] == ["src"]


@pytest.mark.parametrize("module", [Dot(), Vectors(), Mean()], ids=lambda m: type(m).__name__)
def test_other_programs_keep_no_more(module):
    src, dst, edge = fields()
    own, full, back = texts(module, listed(), src, dst, edge)
    assert len(folds(full, "dst")) == len(folds(own, "dst")) and folds(back, "dst")


def test_implicit_relations_keep_no_more():
    src, dst, _ = fields()

    class Dense(Additive):
        def edge(self, src, dst, edge):
            return self.reducer(nn.functional.leaky_relu(src.a + dst.a, 0.2), src.v)

    own, full, _ = texts(Dense(), tg.Graph.dense(23, 23), src, dst, {})
    assert len(folds(full, "dst")) == len(folds(own, "dst"))


@pytest.mark.parametrize("how", ["never", "always"])
@pytest.mark.parametrize("more", [False, True], ids=["", "values of edges"])
@pytest.mark.parametrize("name", SCORES)
def test_gradients_and_theirs(name, more, how, monkeypatch):
    monkeypatch.setenv("TIGA_CPP", how)
    torch.manual_seed(3)
    graph, module = listed(), Additive(name, more)
    src, dst, edge = fields()
    leaves = [src["a"], src["v"], dst["a"], edge["w"]]
    found = []
    g = torch.randn(23, 2, 5, dtype=torch.float64)
    others = [torch.randn_like(x) for x in leaves]
    for out in (module(graph=graph, src=src, dst=dst, edge=edge), plain(module, graph, src, dst, edge)):
        first = torch.autograd.grad(out, leaves, g, create_graph=True, allow_unused=True)
        first = [torch.zeros_like(x) if y is None else y for x, y in zip(leaves, first)]
        second = torch.autograd.grad(sum((x * y).sum() for x, y in zip(first, others)), leaves, allow_unused=True)
        found.append([out, *first, *[torch.zeros_like(x) if y is None else y for x, y in zip(leaves, second)]])
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("wanted", [("dst.a",), ("src.a", "dst.a"), ("src.v",), ("edge.w", "dst.a")])
def test_some_gradients(wanted):
    torch.manual_seed(5)
    graph, module = listed(), Additive("of an edge")
    src, dst, edge = fields()
    leaves = {"src.a": src["a"], "src.v": src["v"], "dst.a": dst["a"], "edge.w": edge["w"]}
    for name, x in leaves.items():
        x.requires_grad_(name in wanted)
    g = torch.randn(23, 2, 5, dtype=torch.float64)
    asked = [leaves[name] for name in wanted]
    made = [module(graph=graph, src=src, dst=dst, edge=edge), plain(module, graph, src, dst, edge)]
    for x, y in zip(*[torch.autograd.grad(out, asked, g) for out in made]):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_accumulate_in_float32(dtype):
    """Rows whose values all but agree: what is left of a gradient is a difference of sums that are nearly equal."""
    torch.manual_seed(7)
    graph, module = listed(), Additive()
    src, dst, edge = fields(dtype=dtype)
    with torch.no_grad():
        src["v"].copy_(1 + src["v"] / 16)
    g = torch.randn(23, 2, 5).to(dtype)
    (found,) = torch.autograd.grad(module(graph=graph, src=src, dst=dst, edge=edge), [dst["a"]], g)
    src, dst, edge = [{k: x.detach().double().requires_grad_() for k, x in f.items()} for f in (src, dst, edge)]
    (exact,) = torch.autograd.grad(plain(module, graph, src, dst, edge), [dst["a"]], g.double())
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_compiled():
    torch.manual_seed(9)
    graph, module = listed(), Additive("of an edge")
    src, dst, edge = fields(dtype=torch.float32)
    leaves = [src["a"], src["v"], dst["a"], edge["w"]]
    run = lambda m: torch.autograd.grad(m(graph=graph, src=src, dst=dst, edge=edge).sin().sum(), leaves)
    for x, y in zip(run(torch.compile(module, fullgraph=True)), run(module)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
