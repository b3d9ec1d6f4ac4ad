"""What reducers promise beyond the CASES: ties, empty rows, integers, names that do not matter, monoids of the user."""

import dataclasses

import pytest
import torch
from cases import CASES
from torch import nn
from torch.autograd import grad, gradcheck, gradgradcheck

import tiga as tg
from tiga.reducers import REDUCERS

propagate = torch.ops.tiga.propagate.default
GRAPH = tg.Graph.from_edge_index(
    torch.tensor([[0, 2, 1, 1, 0, 2], [1, 1, 0, 1, 3, 3]]), 3, 4
)  # destination 2 has no edges


class Fold(tg.MessagePassing):
    def __init__(self, reducer):
        super().__init__()
        self.reducer = reducer

    def edge(self, src, dst, edge):
        return self.reducer(src.x)


class Soft(tg.MessagePassing):
    reducer = tg.online_softmax(return_lse=True)

    def edge(self, src, dst, edge):
        return self.reducer(edge.score, src.value)


def fold(reducer, x, graph=GRAPH):
    return Fold(reducer)(graph=graph, src={"x": x})


def test_values_by_hand():
    x = torch.tensor([1.0, -2.0, 4.0], requires_grad=True)
    for reducer, want in (
        (tg.sum(), [-2, 3, 0, 5]),
        (tg.mean(), [-2, 1, 0, 2.5]),
        (tg.max(), [-2, 4, 0, 4]),
        (tg.min(), [-2, -2, 0, 1]),
    ):
        assert fold(reducer, x).tolist() == want, reducer
    weights = torch.arange(1.0, 5.0)
    for reducer, want in (
        (tg.sum(), [6, 3, 6]),
        (tg.mean(), [2 / 3 + 2, 2 / 3 + 1, 2 / 3 + 2]),
        (tg.max(), [0, 1, 6]),
        (tg.min(), [4, 3, 0]),
    ):
        torch.testing.assert_close(grad(fold(reducer, x) @ weights, x)[0], torch.tensor(want, dtype=torch.float32))


@pytest.mark.parametrize("reducer", [tg.max, tg.min])
@pytest.mark.parametrize(
    "graph",
    [tg.Graph.dense(2, 3), tg.Graph.dense(2, 3).to_csr(), tg.Graph.dense(3, 2).reverse()],
    ids=["implicit", "listed", "reversed"],
)
def test_ties_go_to_the_first_edge(reducer, graph):
    x = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]], requires_grad=True)
    assert grad(fold(reducer(), x, graph).sum(), x)[0].tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_ties_go_to_the_first_edge_in_the_users_order():
    graph = tg.Graph.from_edge_index(torch.tensor([[2, 0, 1], [0, 0, 0]]), 3, 1)
    x = torch.ones(3, requires_grad=True)
    assert grad(fold(tg.max(), x, graph).sum(), x)[0].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers(dtype):
    x = torch.tensor([1, 0, 3]).to(dtype)
    total = fold(tg.sum(), x)
    assert total.dtype == torch.int64 and total.tolist() == [
        0,
        int(x[0]) + int(x[2]) + int(x[1]),
        0,
        int(x[0]) + int(x[2]),
    ]
    most = fold(tg.max(), x)
    assert most.dtype == dtype and most.tolist() == torch.tensor([0, 3, 0, 3]).to(dtype).tolist()
    assert fold(tg.min(), x).dtype == dtype
    mean = fold(tg.mean(), x)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(
        mean, torch.tensor([0, float(x[0]) + float(x[2]), 0, float(x[0]) + float(x[2])]) / torch.tensor([1, 3, 1, 2])
    )


def test_large_integers_are_exact():
    x = torch.tensor([2**60 + 1, 5, -(2**60)])
    assert fold(tg.sum(), x).tolist() == [5, 6, 0, 1] and fold(tg.max(), x).tolist() == [5, 2**60 + 1, 0, 2**60 + 1]


def test_nan_and_infinity():
    x = torch.tensor([1.0, torch.nan, -torch.inf])
    for reducer in (tg.max, tg.min, tg.sum, tg.mean):
        got = fold(reducer(), x)
        assert got[:2].isnan().all() and got[2] == 0 and not got[3].isnan()
    assert fold(tg.max(), x)[3] == 1 and fold(tg.min(), x)[3] == -torch.inf
    score = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf, -torch.inf, -torch.inf], requires_grad=True)
    value = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    out, lse = Soft()(graph=GRAPH, src={"value": value}, edge={"score": score})
    assert out.flatten().tolist() == [2.0, 1.0, 0.0, 0.0] and lse.tolist() == [0.0, 0.0, -torch.inf, -torch.inf]
    for g in grad(out.sum(), (score, value)):
        assert g.isfinite().all()
    with_nan = torch.tensor([torch.nan, 0.0, 0.0, 0.0, 0.0, 0.0])
    out, lse = Soft()(graph=GRAPH, src={"value": value}, edge={"score": with_nan})
    assert out[1].isnan().all() and lse[1].isnan() and out[[0, 2, 3]].isfinite().all() and lse[[0, 3]].isfinite().all()


def test_constant_messages():
    class Ones(tg.MessagePassing):
        soft, most = tg.online_softmax(), tg.max()

        def edge(self, src, dst, edge):
            return self.soft(0.0, src.x), self.most(dst.x), self.soft(src.x, 2.0)

    same, most, twos = Ones()(
        graph=GRAPH, src={"x": torch.tensor([1.0, -2.0, 4.0])}, dst={"x": torch.tensor([5.0, 6.0, 7.0, 8.0])}
    )
    torch.testing.assert_close(same, torch.tensor([-2.0, 1.0, 0.0, 2.5]))
    assert most.tolist() == [5.0, 6.0, 0.0, 8.0]
    torch.testing.assert_close(twos, torch.tensor([2.0, 2.0, 0.0, 2.0]))


# Derivatives name no reducer.


@pytest.mark.parametrize("name", ["attention with lse, mixed", "attention, triangular", "network score, mixed"])
def test_softmax_under_another_name(name, monkeypatch):
    """The same row, registered under a name that nothing else knows; the original is gone."""
    case = next(case for case in CASES if case.name == name)
    call = case.lower(case.build(torch.float64), case.arguments(torch.float64))
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in call.tensors]
    want = propagate(*call)
    monkeypatch.setitem(REDUCERS, "another", dataclasses.replace(REDUCERS["softmax"], name="another"))
    monkeypatch.delitem(REDUCERS, "softmax")
    text = call.program.replace("dst softmax ", "dst another ")
    assert text != call.program

    def run(*xs):
        return tuple(torch.where(x.isfinite(), x, 0.0) for x in propagate(text, list(xs), call.ints, call.scalars))

    torch.testing.assert_close(propagate(text, inputs, call.ints, call.scalars), want)
    assert gradcheck(run, inputs, fast_mode=True) and gradgradcheck(run, inputs, fast_mode=True)


def test_network_score_and_shared_values_to_second_order():
    class Both(tg.MessagePassing):
        soft, total = tg.online_softmax(), tg.sum()

        def __init__(self):
            super().__init__()
            self.net = tg.nn.trace(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))

        def edge(self, src, dst, edge):
            score, value = self.net(src.x, dst.x), src.x * dst.x
            return self.soft(score, value), self.total(value * score.exp())

    torch.manual_seed(1)
    module, x, y = Both().double(), *(torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    names, weights = zip(*module.named_parameters())

    def run(x, y, *weights):
        return torch.func.functional_call(
            module, dict(zip(names, weights)), (), {"graph": GRAPH, "src": {"x": x}, "dst": {"x": y}}
        )

    assert gradcheck(run, (x, y, *weights)) and gradgradcheck(run, (x, y, *weights), fast_mode=True)


# Monoids of the user.


class LogSumExp(tg.Reducer):
    identity = (-1e30, 0.0)

    def lift(self, x):
        return x, x * 0 + 1

    def combine(self, a, b):
        top = torch.maximum(a[0], b[0])
        return top, a[1] * (a[0] - top).exp() + b[1] * (b[0] - top).exp()

    def finalize(self, state):
        return state[0] + state[1].log()


class Product(tg.Reducer):
    identity = 1.0

    def combine(self, a, b):
        return a * b


def test_users_logsumexp_is_torchs():
    x = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64, requires_grad=True)
    want = torch.stack([x[[1]].logsumexp(0), x[[0, 2, 1]].logsumexp(0), x[[0, 2]].logsumexp(0)])
    got = fold(LogSumExp(), x)[[0, 1, 3]]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad(got.sin().sum(), x), grad(want.sin().sum(), x))


def test_users_product():
    x = torch.tensor([[0.5, 2.0], [3.0, 0.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    assert fold(Product(), x).tolist() == [[3.0, 0.0], [-1.5, 0.0], [1.0, 1.0], [-0.5, 0.0]]  # no edges: the identity
    assert gradcheck(lambda x: fold(Product(), x), x) and gradgradcheck(lambda x: fold(Product(), x), x)


def test_users_monoid_is_checked():
    class Difference(tg.Reducer):
        identity = 0.0

        def combine(self, a, b):
            return a - b

    with pytest.raises(tg.TigaError, match="Difference"):
        fold(Difference(), torch.ones(3))

    class Nothing(tg.Reducer):
        pass

    with pytest.raises(tg.TigaError, match="identity"):
        fold(Nothing(), torch.ones(3))


# The attention reducer's own terms.


def test_subclass_with_a_threshold_is_refused_where_nothing_prunes():
    class Mine(tg.OnlineSoftmaxReducer):
        block_prune_threshold = 0.5

    class Pruned(tg.MessagePassing):
        reducer = Mine()

        def edge(self, src, dst, edge):
            return self.reducer(src.x, src.x)

    assert isinstance(tg.online_softmax(), tg.OnlineSoftmaxReducer)
    with pytest.raises(tg.TigaError, match="block_prune_threshold=0.5"):
        Pruned()(graph=tg.Graph.dense(3), src={"x": torch.ones(3)})


@pytest.mark.parametrize(
    "score, value, out",
    [
        ((), (5,), (5,)),
        ((1,), (5,), (5,)),
        ((3,), (3, 5), (3, 5)),
        ((1,), (3, 5), (3, 5)),
        ((3, 1), (3, 5), (3, 5)),
        ((3, 5), (3, 5), (3, 5)),
        ((), (), ()),
        ((2, 3), (2, 1, 4), (2, 3, 4)),
    ],
    ids=str,
)
def test_score_aligns_from_the_left(score, value, out):
    s, v = torch.randn(6, *score, dtype=torch.float64), torch.randn(3, *value, dtype=torch.float64)
    got, lse = Soft()(graph=GRAPH, src={"value": v}, edge={"score": s})
    assert got.shape == (4, *out) and lse.shape == (4, *score)
    wide = s.reshape(6, *score, *[1] * (len(value) - len(score)))
    for i in range(4):
        edges = [e for e in range(6) if [1, 1, 0, 1, 3, 3][e] == i]
        rows = [[0, 2, 1, 1, 0, 2][e] for e in edges]
        want = (wide[edges].softmax(0) * v[rows]).sum(0) if edges else torch.zeros(out, dtype=torch.float64)
        torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("score, value", [((5,), ()), ((3, 1), (3,)), ((5,), (3, 5))], ids=str)
def test_score_that_does_not_align_is_refused(score, value):
    with pytest.raises(tg.TigaError, match="from the left"):
        Soft()(graph=GRAPH, src={"value": torch.randn(3, *value)}, edge={"score": torch.randn(6, *score)})


def test_dtypes():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out, lse = Soft()(
            graph=GRAPH, src={"value": torch.ones(3, 2, dtype=dtype)}, edge={"score": torch.zeros(6, dtype=dtype)}
        )
        assert out.dtype == dtype and lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
