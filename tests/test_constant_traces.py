"""Edge functions that Dynamo need not follow: programs as where it does, and all that they depend on is guarded."""

import types

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from cases import CASES, Own
from torch import nn

import tiga as tg
from tiga import constant_traces
from tiga.nn import GATConv, GATv2Conv, TransformerConv

close = torch.testing.assert_close
GRAPH = tg.Graph.from_edge_index([[0, 1, 2, 2], [0, 1, 2, 0]], 3, 3)
FACTOR = 2.0
act = torch.relu


class Texts:
    """A backend that notes the programs of the graphs, and runs them as they are."""

    def __init__(self):
        self.texts, self.frames = [], 0

    def __call__(self, gm, example_inputs):
        self.frames += 1
        nodes = [n for n in gm.graph.nodes if n.op == "call_function" and "propagate" in str(n.target)]
        self.texts += [n.args[0] for n in nodes]
        return gm.forward


@pytest.fixture
def followed(monkeypatch):
    """How often a trace was a constant, and how often Dynamo followed it, since this was asked last."""
    counts, ran = types.SimpleNamespace(constant=0), constant_traces.trace

    def trace(*args):
        found = ran(*args)
        counts.constant += found is not None
        return found

    monkeypatch.setattr(constant_traces, "trace", trace)
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize("case", {case.module: case for case in CASES}.values(), ids=str)
def test_programs_are_those_that_dynamo_makes(case, monkeypatch):
    found = []
    for constant in (True, False):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            if not constant:
                patch.setattr(constant_traces, "reads_of", lambda *args: None)
            torch.manual_seed(0)
            module, arguments, backend = case.build(), case.arguments(), Texts()
            result = case.run(torch.compile(module, backend=backend, fullgraph=True), arguments)
        assert backend.texts and backend.frames == 1
        found.append((backend.texts, result))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1]):
        assert torch.equal(a, b)


class Scaled(tg.MessagePassing):
    """Reads torch, a function of the file, a reducer, values and a parameter of the module, and arguments."""

    reducer = tg.sum()
    shift = 0.5
    twice = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def edge(self, src, dst, edge, scale, power):
        score = act(src.x * self.weight + self.shift) * torch.tanh(dst.y) * scale
        score = F.elu(score, 0.5) if self.twice else score
        return self.reducer(score * score if power == 2 else score)


def call(scale=2.0, power=2, width=2, rows=3):
    graph = GRAPH if rows == 3 else tg.Graph.dense(rows)
    x, y = torch.randn(rows, width), torch.randn(rows, width)
    return {"graph": graph, "src": {"x": x}, "dst": {"y": y}, "scale": scale, "power": power}


CHANGES = {
    "a number of the module": lambda m: setattr(m, "shift", 0.25),
    "a flag of the module": lambda m: setattr(m, "twice", True),
    "a reducer": lambda m: setattr(m, "reducer", tg.mean()),
    "a parameter's form": lambda m: setattr(m, "weight", nn.Parameter(torch.randn(1))),
    "a parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.randn(2))),
    "a function of its own": lambda m: setattr(
        m, "edge", types.MethodType(lambda self, src, dst, edge, scale, power: self.reducer(src.x * scale), m)
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_is_is_guarded(name, followed):
    module = Scaled()
    run = torch.compile(module, backend="eager")
    given = call()
    close(run(**given), module(**given))
    assert followed.constant == 1
    CHANGES[name](module)
    close(run(**given), module(**given))


def test_functions_are_guarded(followed, monkeypatch):
    module, given = Scaled(), call()
    run = torch.compile(module, backend="eager", fullgraph=True)
    for change in (
        lambda: None,
        lambda: monkeypatch.setitem(globals(), "act", torch.sigmoid),
        lambda: monkeypatch.setattr(
            Scaled, "edge", lambda self, src, dst, edge, scale, power: self.reducer(src.x * scale)
        ),
    ):
        change()
        close(run(**given), module(**given))
    assert followed.constant == 3


def test_a_number_of_the_file_is_followed(followed, monkeypatch, caplog):
    caplog.set_level("DEBUG", logger="tiga")

    class Global(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(src.x * FACTOR)

    module, given = Global(), {"graph": GRAPH, "src": {"x": torch.randn(3, 2)}}
    run = torch.compile(module, backend="eager", fullgraph=True)
    before = run(**given)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    close(run(**given), before * 2.5)
    assert followed.constant == 0 and "Global.edge does more than Dynamo could guard" in caplog.text


def test_the_state_of_a_reducer_is_guarded(followed):
    class Softmax(tg.MessagePassing):
        def __init__(self):
            super().__init__()
            self.reducer = tg.online_softmax()

        def edge(self, src, dst, edge):
            return self.reducer((src.x * dst.y).sum(-1), src.x)

    module = Softmax()
    given = {name: x for name, x in call().items() if name in ("graph", "src", "dst")}
    run = torch.compile(module, backend="eager", fullgraph=True)
    assert isinstance(run(**given), torch.Tensor)
    module.reducer.return_lse = True
    out, lse = run(**given)
    close((out, lse), module(**given))
    assert followed.constant == 2
    module.reducer.prune_mass = 0.1
    with pytest.raises(Exception, match="prune_mass"):
        run(**given)


def test_numbers_and_rows_make_no_program_anew(followed):
    module, backend = Scaled(), Texts()
    run = torch.compile(module, backend=backend, fullgraph=True)
    for scale, rows in ((2.0, 4), (3.0, 4), (-1.5, 5), (0.25, 6), (7.0, 9)):
        given = call(scale, rows=rows)
        close(run(**given), module(**given))
    assert backend.frames <= 4 and len(set(backend.texts)) == 1
    for power in (2, 3, 4):
        given = call(power=power, rows=4)
        close(run(**given), module(**given))


def test_symbolic_features_are_followed(followed):
    module = Scaled()
    module.weight = nn.Parameter(torch.randn(1))
    run = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for width in (2, 3, 5):
        given = call(width=width)
        close(run(**given), module(**given))
    assert followed.constant == 0


def test_symbols_that_are_known_are_numbers(followed):
    """Under dynamic=True a size that was compared is a symbol of one value."""

    class Power(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge, power):
            return self.reducer((src.x * dst.y) ** 2 if power == -3 else src.x)

    module = Power()

    def run(x, y, power):
        if x.shape[1] != 2 or y.shape[1] != 2 or power != -3:
            return x
        return module(graph=tg.Graph.dense(len(x)), src={"x": x}, dst={"y": y}, power=power)

    x, y = torch.randn(4, 2), torch.randn(4, 2)
    close(torch.compile(run, backend="eager", fullgraph=True, dynamic=True)(x, y, -3), (x * y[:, None]).square().sum(1))
    assert followed.constant == 1


def test_errors_are_those_of_the_edge_function(followed):
    class Wrong(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(src.x + dst.y)

    given = {"graph": GRAPH, "src": {"x": torch.randn(3, 2)}, "dst": {"y": torch.randn(3, 3)}}
    with pytest.raises(
        Exception, match="feature sizes 2 and 3 do not broadcast|feature sizes 3 and 2 do not broadcast"
    ):
        torch.compile(Wrong(), backend="eager", fullgraph=True)(**given)


def test_what_computes_while_it_is_traced_is_followed_or_refused(followed):
    class Read(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge, table):
            return self.reducer(src.x * table.sum())

    x, table = torch.randn(3, 2), torch.randn(4)
    given = {"graph": GRAPH, "src": {"x": x}, "table": table}
    close(torch.compile(Read(), backend="eager")(**given), Read()(**given))
    assert followed.constant == 0


def test_modules_made_while_compiling_are_followed(followed):
    class Power(tg.MessagePassing):
        def __init__(self, power):
            super().__init__()
            self.reducer, self.power = tg.sum(), power

        def edge(self, src, dst, edge):
            return self.reducer(src.x**self.power)

    backend = Texts()
    run = torch.compile(lambda x: Power(2)(graph=tg.Graph.dense(len(x)), src={"x": x}), backend=backend, fullgraph=True)
    for rows in (4, 5, 6, 9):
        x = torch.randn(rows, 2)
        close(run(x), x.square().sum(0).expand(rows, 2))
    assert backend.frames == 2 and followed.constant == 0


def test_a_compiler_that_knows_no_mark_follows(followed, monkeypatch):
    for name in ("_edge_reads_of", "_constant_trace"):
        monkeypatch.delattr(getattr(tg.MessagePassing, name), "_dynamo_marked_constant")
    module, given = Scaled(), call()
    close(torch.compile(module, backend="eager", fullgraph=True)(**given), module(**given))
    assert followed.constant == 0


def test_users_reducers_are_followed(followed):
    module, x = Own(), torch.randn(3, 2, 1)
    given = {"graph": GRAPH, "src": {"x": x}, "dst": {"y": torch.randn(3, 1, 3)}, "edge": {"w": torch.randn(4, 2, 3)}}
    close(torch.compile(module, backend="eager")(**given), module(**given))
    assert followed.constant == 0


class Network(tg.MessagePassing):
    reducer = tg.sum()

    def __init__(self, **options):
        super().__init__()
        self.net = tg.nn.trace(nn.Sequential(nn.Linear(5, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1)), **options)

    def edge(self, src, dst, edge):
        return self.reducer(self.net(src.x, edge.displacement) * edge.distance)


def plain(module, graph, x):
    """The same in torch, of the network as it is."""
    positions = graph.positions
    i, j = graph.to_mask().nonzero(as_tuple=True)
    apart = positions[1][j] - positions[0][i]
    messages = module.net.module(torch.cat([x[j], apart], -1)) * apart.norm(dim=-1, keepdim=True)
    return torch.zeros(len(x), 1).index_add(0, i, messages)


NETWORKS = {
    "weights": (1, lambda net: [w.mul_(2.0) for w in net.parameters()]),
    "a weight of its own": (1, lambda net: setattr(net[0], "weight", nn.Parameter(torch.randn(4, 5)))),
    "a slope": (1, lambda net: setattr(net[1], "negative_slope", 0.5)),
    "a layer": (2, lambda net: net.__setitem__(1, nn.Tanh())),
    "one more layer": (2, lambda net: net.append(nn.Tanh())),
    "no bias": (2, lambda net: setattr(net[0], "bias", None)),
    "a wider layer": (2, lambda net: [net.__setitem__(0, nn.Linear(5, 7)), net.__setitem__(2, nn.Linear(7, 1))]),
    "a hook": (1, lambda net: net[0].register_forward_hook(lambda module, x, out: out * 2)),
    "a function of its own": (1, lambda net: setattr(net[1], "forward", lambda x: x * 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_network_computes_is_guarded(name, followed):
    constant, change = NETWORKS[name]
    module, x = Network(), torch.randn(6, 2)
    graph = tg.Graph.radius(torch.randn(6, 3), 2.5)
    run = torch.compile(module, backend="eager", fullgraph=True)
    close(run(graph=graph, src={"x": x}), plain(module, graph, x))
    assert followed.constant == 1
    with torch.no_grad():
        change(module.net.module)
    if name == "a hook":  # torch's compiler looks for hooks when it compiles alone
        torch._dynamo.reset()
    close(run(graph=graph, src={"x": x}), plain(module, graph, x))
    assert followed.constant == constant


@pytest.mark.parametrize("options", [{}, {"block_e": 32, "num_warps": 2}])
def test_programs_with_networks_and_positions_are_those_that_dynamo_makes(options, monkeypatch):
    torch.manual_seed(0)
    module, x = Network(**options), torch.randn(6, 2)
    positions, shift = torch.randn(6, 3).requires_grad_(), torch.eye(3) * 4
    found = []
    for graph in (tg.Graph.radius(positions, 2.5), tg.Graph.radius(positions, 1.5, cell=shift)):
        for constant in (True, False):
            torch._dynamo.reset()
            with monkeypatch.context() as patch:
                if not constant:
                    patch.setattr(constant_traces, "reads_of", lambda *args: None)
                backend = Texts()
                out = torch.compile(module, backend=backend, fullgraph=True)(graph=graph, src={"x": x})
            found.append((backend.texts, out, *torch.autograd.grad(out.sin().sum(), (positions, *module.parameters()))))
    for a, b in (found[:2], found[2:]):
        assert a[0] == b[0] and len(a[0]) == 1
        for x, y in zip(a[1:], b[1:]):
            assert torch.equal(x, y)
    assert found[0][0] != found[2][0]


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_layers_are_not_followed(layer, followed):
    module, x = layer(4, 3, heads=2), torch.randn(3, 4, requires_grad=True)
    graph = GRAPH.prepare()
    run = torch.compile(module, backend="aot_eager", fullgraph=True)
    close(run(x, graph), module(x, graph))
    grads = [torch.autograd.grad(f(x, graph).square().sum(), (x, *module.parameters())) for f in (run, module)]
    close(*grads)
    assert followed.constant >= 1


def test_few_instructions_are_followed(followed):
    """Of a layer of attention: through Dynamo it is more than ten thousand."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    class Attention(tg.MessagePassing):
        reducer = tg.online_softmax()

        def edge(self, src, dst, edge, scale):
            return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)

    count, step = [0], InstructionTranslatorBase.step

    def counted(self):
        count[0] += 1
        return step(self)

    q, k, v = (torch.randn(5, 2, 4) for _ in range(3))
    InstructionTranslatorBase.step = counted
    try:
        torch.compile(Attention(), backend="eager", fullgraph=True)(
            graph=tg.Graph.triangular(5), src={"key": k, "value": v}, dst={"query": q}, scale=0.5
        )
    finally:
        InstructionTranslatorBase.step = step
    assert followed.constant == 1 and count[0] < 2500
