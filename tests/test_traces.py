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

    return {x.__name__: x for x in (Closure, Counts, Config, Method, Property, State)}[kind]()


@pytest.mark.parametrize("kind", ["Closure", "Counts", "Config", "Method"])
def test_functions_that_do_more_run_at_every_call(kind, traced):
    module = unknown(kind)
    for k in (1, 2, 3):
        if kind == "Config":
            module.config["factor"] = k
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


# Tensors and networks of the module.


class Weighted(tg.MessagePassing):
    reducer = tg.sum()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("bias", torch.zeros(2))

    def edge(self, src, dst, edge):
        return self.reducer(src.x * self.weight + self.bias)


def test_parameters_and_buffers_are_those_of_the_call(traced):
    module = Weighted()
    for k in range(4):
        if k == 1:
            module.weight.data.mul_(2)
        if k == 2:
            module.weight, module.bias = nn.Parameter(torch.tensor([3.0, -1.0])), torch.tensor([1.0, 2.0])
        if k == 3:
            module.weight.requires_grad_(False)
        out = call(module)
        close(out, X * module.weight + module.bias)
        assert out.requires_grad == (k < 3)
    assert traced() == 1
    swapped = torch.func.functional_call(
        module, {"weight": torch.full((2,), 7.0)}, (), {"graph": GRAPH, "src": {"x": X}}
    )
    close(swapped, X * 7 + module.bias)
    grads = torch.func.vmap(
        torch.func.grad(
            lambda w: torch.func.functional_call(module, {"weight": w}, (), {"graph": GRAPH, "src": {"x": X}}).sum()
        )
    )
    close(grads(torch.randn(3, 2)), X.sum(0).expand(3, 2))
    assert traced() == 0
    for other in (
        torch.ones(1),
        torch.ones(()),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.float16),
    ):
        module.weight = nn.Parameter(other)
        for _ in range(2):
            close(call(module), (X * module.weight + module.bias).to(call(module).dtype))
    assert traced() == 4
    module = Weighted()
    call(module)
    module.bias = module.weight
    for k in (2.0, 3.0):
        module.weight.data.fill_(k)
        close(call(module), X * k + k)
    for _ in range(2):
        close(copy.deepcopy(module)(graph=GRAPH, src={"x": X}), X * k + k)


READS = {
    "float": lambda self, x, a: x * float(a),
    "if": lambda self, x, a: x * (2.0 if a > 0 else 3.0),
    "and it is an operand": lambda self, x, a: x * a * int(a),
    "of the module": lambda self, x, a: x * self.held * float(self.held) + a,
    "unpacked": lambda self, x, a: x * max(*a[None].expand(2)) + a,
}


@pytest.mark.parametrize("name", READS)
def test_numbers_that_were_read_of_a_tensor_are_read_again(name):
    class Reads(tg.MessagePassing):
        reducer = tg.sum()
        held = torch.tensor(2.0)
        edge = eval(
            "lambda self, src, dst, edge, a: self.reducer("
            + {
                "float": "src.x * float(a)",
                "if": "src.x * (2.0 if a > 0 else 3.0)",
                "and it is an operand": "src.x * a * int(a)",
                "of the module": "src.x * self.held * float(self.held) + a",
                "unpacked": "src.x * max(*a[None].expand(2)) + a",
            }[name]
            + ")"
        )

    module = Reads()
    for k in (2.0, 2.0, -5.0, 3.0):
        a = torch.tensor(k)
        Reads.held = torch.tensor(k)
        close(call(module, a=a), READS[name](module, X, a))


class Network(tg.MessagePassing):
    reducer = tg.sum()

    def __init__(self, *layers):
        super().__init__()
        self.net = tg.nn.trace(nn.Sequential(*layers))

    def edge(self, src, dst, edge):
        return self.reducer(self.net(src.x, dst.y))


def of_network(module):
    out = module(graph=GRAPH, src={"x": X}, dst={"y": X.flip(1)})
    close(out, module.net.module(torch.cat([X, X.flip(1)], -1)))
    return out


def test_networks_are_known_as_long_as_they_compute_the_same(traced):
    module = Network(nn.Linear(4, 3), nn.LeakyReLU(0.2), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    other, layers = Network(nn.Linear(4, 3), nn.Tanh(), nn.Identity(), nn.Linear(3, 2)), module.net.module
    for _ in range(3):
        of_network(module)
        of_network(other)
    assert traced() == 2
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(-1.5)
    of_network(module)
    layers[0] = nn.Linear(4, 3)
    of_network(module).sum().backward()
    assert layers[0].weight.grad is not None and traced() == 0
    changes = [
        lambda: setattr(layers[1], "negative_slope", 0.5),
        lambda: setattr(layers[2], "eps", 0.5),
        lambda: setattr(layers, "1", nn.ELU()),
        lambda: setattr(layers[0], "bias", None),
        lambda: layers.append(nn.Tanh()),
        lambda: layers.insert(0, nn.Linear(4, 4)),
    ]
    for change in changes:
        change()
        of_network(module)
        of_network(module)
    assert traced() == len(changes)
    of_network(other)
    assert traced() == 0


def test_modes_of_a_network_are_seen(traced):
    module = Network(nn.Linear(4, 2), nn.Dropout(0.5))
    first, second = (module(graph=GRAPH, src={"x": X}, dst={"y": X}) for _ in range(2))
    assert not torch.equal(first, second)
    module.eval()
    of_network(module)
    of_network(module)
    assert traced() == 3
    module.net.module[1].train()
    assert not torch.equal(*[module(graph=GRAPH, src={"x": X}, dst={"y": X}) for _ in range(2)])


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_networks_that_do_more_run_at_every_call(traced, monkeypatch):
    seen = []
    module = Network(nn.Linear(4, 2), nn.Tanh())
    layers = module.net.module
    of_network(module)
    for register in (
        lambda: layers[0].register_forward_hook(lambda m, x, y: seen.append(1) or y * (1 + len(seen) % 2)),
        lambda: layers.register_forward_pre_hook(lambda m, x: seen.append(1)),
        lambda: module.net.register_forward_hook(lambda m, x, y: seen.append(1)),
        lambda: nn.modules.module.register_module_forward_hook(lambda m, x, y: seen.append(1)),
    ):
        hook = register()
        for _ in range(2):
            before = len(seen)
            module(graph=GRAPH, src={"x": X}, dst={"y": X})
            assert len(seen) > before
        hook.remove()
    traced()
    of_network(module)
    assert traced() == 0
    layers[0] = Doubled(4, 2)
    of_network(module)
    layers[0].bias.data.add_(1)
    of_network(module)
    assert traced() == 2
    layers[0] = nn.Linear(4, 2)
    layers[0].forward = lambda x: x[..., :2] * len(seen)
    of_network(module)
    seen.append(1)
    of_network(module)
    layers[0] = nn.Linear(4, 2)
    of_network(module)
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: torch.sigmoid(x))
    of_network(module)


def test_one_parameter_in_two_layers_is_one_operand():
    module = Network(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    layers = module.net.module
    of_network(module)
    for tied in (layers[0].weight, nn.Parameter(torch.randn(4, 4)), layers[0].weight):
        layers[2].weight = tied
        of_network(module).sum().backward()
    layers[2].weight = nn.Parameter(torch.randn(4, 4))
    of_network(module)


def test_what_a_function_may_read_of_a_network_itself_is_not_known(traced):
    class Inside(Network):
        training = True

        def edge(self, src, dst, edge):
            return self.reducer(self.net(src.x, dst.y) * (2.0 if self.net.training else 3.0))

    module = Inside(nn.Linear(4, 2))
    for training in (True, False, True):
        module.net.train(training)
        wanted = module.net.module(torch.cat([X, X.flip(1)], -1)) * (2 if training else 3)
        close(module(graph=GRAPH, src={"x": X}, dst={"y": X.flip(1)}), wanted)
    assert traced() == 3


class Apart(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(edge.displacement * edge.distance[..., None])


def test_positions_are_those_of_the_graph(traced):
    module = Apart()
    for n, positions in enumerate(
        [torch.rand(5, 3), torch.rand(5, 3), torch.rand(7, 3), torch.rand(7, 2, dtype=torch.float64)]
    ):
        graph = tg.Graph.knn(positions.requires_grad_(), 2)
        rowptr, col = graph.tensors[:2]
        i = torch.arange(len(positions)).repeat_interleave(rowptr.diff())
        apart = positions[col] - positions[i]
        wanted = torch.zeros_like(positions).index_add(0, i, apart * apart.norm(dim=-1, keepdim=True))
        found = module(graph=graph)
        close(found, wanted)
        close(torch.autograd.grad(found.sum(), positions), torch.autograd.grad(wanted.sum(), positions))
        assert traced() == [1, 0, 0, 1][n]
    cell = torch.eye(3)
    for _ in range(2):
        graph = tg.Graph.radius(torch.rand(4, 3), 0.7, cell=cell)
        found, (x, _) = module(graph=graph), graph.positions
        rowptr, col = graph.tensors[:2]
        i = torch.arange(4).repeat_interleave(rowptr.diff())
        apart = x[col] - x[i] + graph.shift
        close(found, torch.zeros_like(x).index_add(0, i, apart * apart.norm(dim=-1, keepdim=True)))
    assert traced() == 1


def test_a_network_that_asks_for_a_geometry_is_known(traced):
    module = Network(nn.Linear(4, 2))
    module.net = tg.nn.trace(module.net.module, block_e=16)
    text = module.lower(GRAPH, src={"x": X}, dst={"y": X}).program
    assert module.lower(GRAPH, src={"x": X}, dst={"y": X}).program == text and traced() == 1
    module.net.block_e = 32
    assert module.lower(GRAPH, src={"x": X}, dst={"y": X}).program != text
