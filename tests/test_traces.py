"""Known traces: an edge function is not run again where all that it reads is as it was, and only there."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tiga as tg
from tiga import passes

GRAPH = tg.Graph.from_edge_index([[0, 1, 2], [0, 1, 2]], 3, 3)  # one edge a row: sums are the messages themselves
X = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-3.0, 0.25]])
FACTOR = 2.0
close = torch.testing.assert_close


class Scaled(tg.MessagePassing):
    reducer = tg.sum()
    factor = 2.0

    def edge(self, src, dst, edge, shift):
        return self.reducer(src.x * self.factor + shift)


class Global(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(nn.functional.leaky_relu(src.x, 0.5) * FACTOR + math.pi)


def call(module, **uniform):
    return module(graph=GRAPH, src={"x": X}, **uniform)


@pytest.fixture
def traced():
    """How often an edge function ran since this was asked last."""
    before = [passes.COUNTS["trace"]]

    def count():
        now = passes.COUNTS["trace"]
        since, before[0] = now - before[0], now
        return since

    return count


def test_a_known_trace_is_not_run_and_numbers_are_those_of_the_call(traced):
    module = Scaled()
    for shift in (1.0, 2.0, -0.5):
        close(call(module, shift=shift), X * 2 + shift)
    assert traced() == 1 and "trace" in module.last_variant.passes
    assert module.last_variant.hits == 2 and "lowering: composite" in module.explain()


def test_attributes_of_module_and_class_are_seen(traced):
    module, other = Scaled(), Scaled()
    for _ in range(2):
        for factor in (3.0, 3, True, -0.0, 0.0):
            module.factor = factor
            got = call(module, shift=1.0)
            close(got, X * factor + 1)
            close(call(other, shift=1.0), X * 2 + 1)
    texts = [module.lower(GRAPH, src={"x": X}, shift=1.0).program for module.factor in (0.0, -0.0, 0.0)]
    assert texts[0] == texts[2] != texts[1], "0.0 and -0.0 are equal, and not the same"
    del module.factor
    close(call(module, shift=1.0), X * 2 + 1)
    Scaled.factor = 5.0
    try:
        close(call(module, shift=1.0), X * 5 + 1)
    finally:
        Scaled.factor = 2.0
    module.reducer = tg.online_softmax()
    with pytest.raises(TypeError):
        call(module, shift=1.0)
    module.reducer = tg.max()
    assert "reduce dst max" in str(module.lower(GRAPH, src={"x": X}, shift=1.0).program)
    close(call(module, shift=1.0), X * 2 + 1)
    assert "reduce dst max" in module.ir()


def test_options_of_a_reducer_are_seen():
    class Attention(tg.MessagePassing):
        def __init__(self):
            super().__init__()
            self.reducer = tg.online_softmax()

        def edge(self, src, dst, edge):
            return self.reducer(src.x.sum(-1), src.x)

    module = Attention()
    for _ in range(3):
        close(call(module), X)
    module.reducer.return_lse = True
    out, lse = call(module)
    close((out, lse), (X, X.sum(-1)))
    module.reducer.return_lse = False
    close(call(module), X)
    module.reducer.block_prune_threshold = 0.5
    with pytest.raises(tg.TigaError, match="block_prune_threshold"):
        call(module)


def test_names_of_the_file_are_seen(monkeypatch, traced):
    module = Global()
    wanted = lambda factor: nn.functional.leaky_relu(X, 0.5) * factor + math.pi
    for _ in range(3):
        close(call(module), wanted(2.0))
    assert traced() == 1
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    close(call(module), wanted(4.0))
    monkeypatch.setitem(globals(), "FACTOR", torch.tensor(3.0))
    close(call(module), wanted(3.0))

    class Other:
        pi = 1.0

    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    monkeypatch.setitem(globals(), "math", Other)
    close(call(module), nn.functional.leaky_relu(X, 0.5) * 2 + 1)


def test_another_function_is_another_trace():
    module = Scaled()
    for _ in range(2):
        close(call(module, shift=1.0), X * 2 + 1)
    edge, code = Scaled.edge, Scaled.edge.__code__

    def replaced(self, src, dst, edge, shift):
        return self.reducer(src.x - shift)

    try:
        Scaled.edge = replaced
        close(call(module, shift=1.0), X - 1)
        Scaled.edge = edge
        close(call(module, shift=1.0), X * 2 + 1)
        Scaled.edge.__code__ = replaced.__code__
        close(call(module, shift=1.0), X - 1)
    finally:
        Scaled.edge, edge.__code__ = edge, code
    close(call(module, shift=1.0), X * 2 + 1)
    module.edge = lambda src, dst, edge, shift: module.reducer(src.x * shift)
    close(call(module, shift=3.0), X * 3)


def test_arguments_of_another_kind_or_form_are_another_trace():
    module = Scaled()
    for _ in range(2):
        for shift in (1.0, 1, True, torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.tensor(2)):
            close(call(module, shift=shift), X * 2 + shift)
        for x in (X, X.double(), X[:, :1], X[:, None], X.half()):
            close(module(graph=GRAPH, src={"x": x}, shift=1.0), x * 2 + 1)
        close(module(graph=tg.Graph.dense(3), src={"x": X}, shift=1.0), (X * 2 + 1).sum(0).expand(3, 2))
        close(
            module(graph=tg.Graph.triangular(3).reverse(), src={"x": X}, shift=1.0),
            (X * 2 + 1).flip(0).cumsum(0).flip(0),
        )


def test_a_tensor_in_two_places_is_told_from_two():
    class Both(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge, a, b):
            return self.reducer(src.x * a + b)

    module, one, two = Both(), torch.randn(2), torch.randn(2)
    for a, b in ((one, two), (one, one), (two, one), (two, two), (X[0], one)) * 2:
        close(call(module, a=a, b=b), X * a + b)


def test_branches_on_what_is_in_the_key():
    class Branches(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge, mode):
            x = src.x if mode == "plain" else src.x * self.late
            return self.reducer(x + dst.y if "y" in dst else x)

    module = Branches()
    for _ in range(2):
        close(call(module, mode="plain"), X)
        close(module(graph=GRAPH, src={"x": X}, dst={"y": X}, mode="plain"), 2 * X)
    with pytest.raises(AttributeError):
        call(module, mode="scaled")
    for module.late in (2.0, 3.0):
        for _ in range(2):
            close(call(module, mode="plain"), X)
            close(call(module, mode="scaled"), X * module.late)


class Ran(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def unknown(kind):
    """Edge functions that do or read what no key holds."""
    seen = []

    class Closure(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            seen.append(1)
            return self.reducer(src.x * len(seen))

    class Counts(tg.MessagePassing):
        reducer = tg.sum()
        calls = 0

        def edge(self, src, dst, edge):
            self.calls = self.calls + 1
            return self.reducer(src.x * self.calls)

    class Config(tg.MessagePassing):
        reducer = tg.sum()
        config = {"factor": 0}

        def edge(self, src, dst, edge):
            return self.reducer(src.x * self.config["factor"])

    class Method(tg.MessagePassing):
        reducer = tg.sum()

        def factor(self):
            seen.append(1)
            return len(seen)

        def edge(self, src, dst, edge):
            return self.reducer(src.x * self.factor())

    class Parameters(tg.MessagePassing):
        reducer = tg.sum()

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def edge(self, src, dst, edge):
            return self.reducer(src.x * self.weight)

    class Property(tg.MessagePassing):
        reducer = tg.sum()

        @property
        def factor(self):
            seen.append(1)
            return len(seen)

        def edge(self, src, dst, edge):
            return self.reducer(src.x * self.factor)

    class State(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(src.x * (2 if torch.is_grad_enabled() else 3))

    return {x.__name__: x for x in (Closure, Counts, Config, Method, Parameters, Property, State)}[kind]()


@pytest.mark.parametrize("kind", ["Closure", "Counts", "Config", "Method", "Parameters"])
def test_functions_that_do_more_run_at_every_call(kind, traced):
    module = unknown(kind)
    for k in (1, 2, 3):
        if kind == "Config":
            module.config["factor"] = k
        if kind == "Parameters":
            module.weight = nn.Parameter(torch.tensor(float(k)))
        close(call(module).detach(), X * k)
    assert traced() == 3


def test_properties_and_states_of_torch_are_seen():
    module = unknown("Property")
    outs = [call(module) for _ in range(3)]
    assert all((b / X).mean() > (a / X).mean() for a, b in zip(outs, outs[1:]))
    module = unknown("State")
    for enabled in (True, False, True, False):
        with torch.set_grad_enabled(enabled):
            close(call(module), X * (2 if enabled else 3))


def test_a_mode_over_torch_functions_sees_them():
    module = Global()
    for _ in range(2):
        call(module)
    with Ran() as mode:
        call(module)
    assert "leaky_relu" in mode.names


def test_copies_and_pickles_begin_anew(traced):
    module = Scaled()
    call(module, shift=1.0)
    again = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    traced()
    for other in again:
        other.factor = 7.0
        close(call(other, shift=1.0), X * 7 + 1)
        close(call(module, shift=1.0), X * 2 + 1)
    assert traced() == 2


def test_checks_of_fields_are_made_at_every_call():
    module = Scaled()
    for _ in range(2):
        call(module, shift=1.0)
    with pytest.raises(tg.TigaError, match="has 2 rows, but the graph has 3 sources"):
        module(graph=GRAPH, src={"x": X[:2]}, shift=1.0)
    with pytest.raises(tg.TigaError, match="fields given are: y"):
        module(graph=GRAPH, src={"y": X}, shift=1.0)


def test_gradients_of_a_known_trace():
    module, x, a = Scaled(), X.clone().requires_grad_(), torch.randn(2, requires_grad=True)
    for _ in range(3):
        grads = torch.autograd.grad((module(graph=GRAPH, src={"x": x}, shift=a) ** 2).sum(), (x, a))
        wanted = torch.autograd.grad(((x * 2 + a) ** 2).sum(), (x, a))
        close(grads, wanted)
