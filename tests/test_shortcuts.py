"""Calls that are known at once: each thing that can differ is seen, and nothing that a call was given is held."""

import gc
import math
import random
import weakref

import pytest
import torch
from torch import nn

import tiga as tg
from tiga import alike, traces
from tiga.nn import GATv2Conv
from tiga.ops import propagate

FACTOR = 2.0
close = torch.testing.assert_close


class Weighted(tg.MessagePassing):
    """Reads a name of the file, two attributes, a parameter, and numbers."""

    reducer = tg.sum()
    shift = 0.5

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def edge(self, src, dst, edge, scale, power=None):
        score = (src.x * self.weight * dst.y).sum(-1) * scale + self.shift * FACTOR + math.pi
        return self.reducer(score)


class Other(Weighted):
    """The same without a default, which would be seen as a thing that may change."""

    def edge(self, src, dst, edge, scale, power):
        score = (src.x * self.weight * dst.y).sum(-1) * scale + self.shift * FACTOR + math.pi
        return self.reducer(score * power if power is not None else score)


GRAPH = tg.Graph.from_edge_index([[0, 1, 2, 2], [0, 1, 2, 0]], 3, 3)


def fields(rows=3, width=2):
    return {"src": {"x": torch.randn(rows, width)}, "dst": {"y": torch.randn(rows, width)}}


def known(module, graph=GRAPH, power=None, **given):
    """A module that knows a call at once, and the call's fields."""
    given = given or fields()
    for _ in range(3):
        module(graph=graph, **given, scale=2.0, power=power)
    return given


def asked(module):
    """The answers of a module's shortcuts from now on: True where a call was known."""
    answers = []
    held = traces.of(module)
    for k, call in enumerate(held.calls):

        def told(*args, same=call.same, **kwargs):
            found = same(*args, **kwargs)
            answers.append(found is not None)
            return found

        held.calls[k] = call._replace(same=told)
    return answers


def exact(module, graph, given, scale, power=None):
    """A fresh module of the same attributes, which knows nothing."""
    fresh = type(module)()
    fresh.__dict__.update({name: x for name, x in module.__dict__.items() if name not in ("_traces", "_variants")})
    return fresh(graph=graph, **given, scale=scale, power=power)


def test_numbers_and_tensors_are_those_of_the_call():
    module = Other()
    known(module)
    answers = asked(module)
    for scale in (1.0, -2.5):
        given = fields()
        close(module(graph=GRAPH, **given, scale=scale, power=None), exact(module, GRAPH, given, scale))
    with torch.no_grad():
        module.weight.mul_(3.0)
    close(module(graph=GRAPH, **given, scale=1.0, power=None), exact(module, GRAPH, given, 1.0))
    module.weight = nn.Parameter(torch.randn(2))
    close(module(graph=GRAPH, **given, scale=1.0, power=None), exact(module, GRAPH, given, 1.0))
    assert answers == [True] * 4


def other_graph(module, given):
    return {"graph": tg.Graph.from_edge_index([[0, 0, 0, 0], [0, 1, 2, 0]], 3, 3)}


def reversed_names(module, given):
    return {"src": {"x": given["src"]["x"], "z": given["src"]["x"]}}


DIFFERENT = {
    "another graph": other_graph,
    "a tensor more": lambda m, g: {"src": {**g["src"], "z": g["src"]["x"]}},
    "dtype": lambda m, g: {"src": {"x": g["src"]["x"].double()}, "dst": {"y": g["dst"]["y"].double()}},
    "strides": lambda m, g: {"src": {"x": torch.randn(2, 3).T}},
    "a gradient": lambda m, g: {"src": {"x": g["src"]["x"].clone().requires_grad_()}},
    "one tensor twice": lambda m, g: {"src": {"x": g["dst"]["y"]}},
    "a number for an integer": lambda m, g: {"scale": 3},
    "a tensor for a number": lambda m, g: {"scale": torch.tensor(3.0)},
    "an argument": lambda m, g: {"power": 2},
    "an attribute": lambda m, g: setattr(m, "shift", 0.25) or {},
    "a reducer": lambda m, g: setattr(m, "reducer", tg.mean()) or {},
    "a parameter's form": lambda m, g: setattr(m, "weight", nn.Parameter(torch.randn(1))) or {},
    "a parameter that is frozen": lambda m, g: m.requires_grad_(False) is None or {},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_seen(name, monkeypatch):
    module = Other()
    given = known(module)
    answers = asked(module)
    call = {"graph": GRAPH, "scale": 2.0, "power": None, **given, **DIFFERENT[name](module, given)}
    with pytest.warns() if name == "a tensor more" else torch.enable_grad():
        found = module(**call)
    assert answers and not any(answers)
    fresh = exact(module, call.pop("graph"), {k: call[k] for k in ("src", "dst")}, call["scale"], call["power"])
    close(found, fresh)


def test_names_of_the_file_and_of_python_are_seen(monkeypatch):
    module = Other()
    given = known(module)
    answers = asked(module)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    close(module(graph=GRAPH, **given, scale=2.0, power=None), exact(module, GRAPH, given, 2.0))
    assert answers == [False]


class Softmax(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer((src.x * dst.y).sum(-1), src.x)


def test_the_state_of_a_reducer_is_seen():
    module, given = Softmax(), fields()
    module.reducer = tg.online_softmax()
    for _ in range(3):
        out = module(graph=GRAPH, **given)
    module.reducer.return_lse = True
    both = module(graph=GRAPH, **given)
    assert isinstance(out, torch.Tensor) and len(both) == 2


@pytest.mark.parametrize("recorded", [True, False])
def test_lists_for_gradients_follow_the_mode(recorded):
    module, given = Other(), fields()
    with torch.set_grad_enabled(not recorded):
        known(module, **given)
    given["src"]["x"].requires_grad_()
    with torch.set_grad_enabled(recorded):
        out = module(graph=GRAPH, **given, scale=2.0, power=None)
    assert out.requires_grad == recorded
    if recorded:
        out.sum().backward()
        found = given["src"]["x"].grad
        wanted = (given["dst"]["y"] * module.weight * 2.0).detach()
        close(found, torch.stack([wanted[0], wanted[1], wanted[2] + wanted[0]]))


class Network(tg.MessagePassing):
    reducer = tg.sum()

    def __init__(self):
        super().__init__()
        self.net = tg.nn.trace(nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.2), nn.Linear(3, 1)))

    def edge(self, src, dst, edge):
        return self.reducer(self.net(src.x, dst.y))


NETWORKS = {
    "weights": (True, lambda net: [w.mul_(2.0) for w in net.parameters()]),
    "a gradient": (False, lambda net: net[0].requires_grad_(False)),
    "a slope": (False, lambda net: setattr(net[1], "negative_slope", 0.5)),
    "a layer": (False, lambda net: net.__setitem__(1, nn.Tanh())),
    "one more layer": (False, lambda net: net.append(nn.Tanh())),
    "another linear layer": (False, lambda net: net.__setitem__(2, nn.Linear(3, 1, bias=False))),
    "no bias": (False, lambda net: setattr(net[0], "bias", None)),
    "a wider layer": (False, lambda net: [net.__setitem__(0, nn.Linear(4, 5)), net.__setitem__(2, nn.Linear(5, 1))]),
    "a hook": (False, lambda net: net[0].register_forward_hook(lambda module, x, out: out * 2)),
    "a function of its own": (False, lambda net: setattr(net[1], "forward", lambda x: x * 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_network_computes_is_seen(name):
    same, change = NETWORKS[name]
    module, given = Network(), fields()
    for _ in range(3):
        module(graph=GRAPH, **given)
    answers = asked(module)
    module(graph=GRAPH, **given)
    with torch.no_grad():
        change(module.net.module)
    x, y = given["src"]["x"], given["dst"]["y"]
    messages = module.net.module(torch.cat([x[[0, 1, 2, 2]], y[[0, 1, 2, 0]]], -1))
    close(module(graph=GRAPH, **given), torch.zeros(3, 1).index_add(0, torch.tensor([0, 1, 2, 0]), messages))
    assert answers == [True, same]


def test_hooks_on_all_modules_are_seen():
    module, given = Network(), fields()
    for _ in range(3):
        module(graph=GRAPH, **given)
    answers = asked(module)
    handle = nn.modules.module.register_module_forward_hook(lambda module, x, out: None)
    try:
        module(graph=GRAPH, **given)
    finally:
        handle.remove()
    assert answers == [False]


def test_what_is_wrong_is_refused_as_ever():
    module = Other()
    given = known(module)
    call = {"graph": GRAPH, "scale": 2.0, "power": None, **given}
    for change, error, text in (
        ({"src": {"x": torch.randn(2, 2)}}, tg.TigaError, "has 2 rows, but the graph has 3 sources"),
        ({"src": {"x": [1.0, 2.0]}}, TypeError, "src field 'x' is list, not a tensor"),
        ({"src": {"z": torch.randn(3, 2)}}, tg.TigaError, "fields given are: z"),
        ({"src": torch.randn(3, 2)}, TypeError, "src is Tensor; give a dictionary"),
        ({"src": ["x"]}, TypeError, "src is list; give a dictionary"),
        ({"graph": None}, TypeError, "graph is NoneType"),
    ):
        with pytest.raises(error, match=text):
            module(**{**call, **change})
    module.weight = None
    with pytest.raises((tg.TigaError, TypeError)):
        module(**call)


@pytest.mark.parametrize("asks", [False, True])
def test_a_known_call_of_the_operator_with_other_tensors_is_refused(asks):
    x, y = fields()["src"]["x"].requires_grad_(asks), fields()["dst"]["y"]
    call = Other().lower(GRAPH, src={"x": x}, dst={"y": y}, scale=2.0, power=None)
    run = torch.ops.tiga.propagate
    for _ in range(3):
        run(*call)
    for tensors in (call.tensors[:-1], [*call.tensors, x], [x[:2], *call.tensors[1:]]):
        with pytest.raises(tg.TigaError):
            run(call.program, tensors, call.ints, call.scalars)


def test_edges_that_are_counted_are_counted_again():
    class Biased(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(edge.bias)

    made = tg.Graph.cu_seqlens([0, 2, 3], causal=False)
    graph, module, bias = tg.Graph("blocks", (3, 3, -1), made.tensors), Biased(), torch.randn(5)
    for _ in range(4):
        module(graph=graph, edge={"bias": bias})
    for t in graph.tensors[:2]:
        t[1] = 1  # in place: the other way round, still five
    close(module(graph=graph, edge={"bias": bias})[0], bias[0])
    for t in graph.tensors[:2]:
        t[1] = 3
    with pytest.raises(tg.TigaError, match="edge field 'bias' has 5 rows, but the graph has 9 edges"):
        module(graph=graph, edge={"bias": bias})


def test_modes_and_transforms_are_seen():
    module = Other()
    given = known(module)
    x, y = given["src"]["x"], given["dst"]["y"]
    run = lambda x: module(graph=GRAPH, src={"x": x}, dst={"y": y}, scale=2.0, power=None)
    out = run(x)
    close(torch.func.vmap(run)(torch.stack([x, x])), torch.stack([out, out]))
    wanted = torch.autograd.functional.jacobian(run, x)
    close(torch.func.jacrev(run)(x), wanted)
    close(torch.func.jacfwd(run)(x), wanted)
    with torch.inference_mode():
        close(run(x), out)
        assert run(x.clone()).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == exact(module, GRAPH, given, 2.0).dtype
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(run(dual)).tangent
    close(tangent, (wanted * torch.ones_like(x)).sum((-1, -2)))


def test_nothing_of_a_call_is_held():
    module, graph = Other(), tg.Graph.from_edge_index([[0, 1, 2, 2], [0, 1, 2, 0]], 3, 3)
    given = known(module, graph)
    assert asked(module) == [] and traces.of(module).calls
    weight = module.weight
    held = [weakref.ref(x) for x in (graph, given["src"]["x"], given["dst"]["y"], weight)]
    module.weight = nn.Parameter(torch.randn(2))
    module._variants = None
    del graph, given, weight
    gc.collect()
    assert [x() for x in held] == [None] * 4


def test_graphs_that_change_leave_no_code():
    module = Other()
    for n in range(4, 12):
        module(graph=tg.Graph.dense(n), **fields(n), scale=2.0, power=None)
    assert not traces.of(module).calls
    graphs = [tg.Graph.dense(n) for n in range(4, 16)]
    for graph in graphs:
        known(module, graph, **fields(graph.num_dst))
    assert len(traces.of(module).calls) == 8


def test_layers_know_their_calls():
    layer, draw = GATv2Conv(3, 2, heads=2), lambda: torch.randn(3, 3)
    for _ in range(3):
        layer(draw(), GRAPH)
    known = [m for m in layer.modules() if isinstance(m, tg.MessagePassing) and traces.of(m).calls]
    assert len(known) == 1
    answers, x = asked(known[0]), draw()
    fresh = GATv2Conv(3, 2, heads=2)
    fresh.load_state_dict(layer.state_dict())
    close(layer(x, GRAPH), fresh(x, GRAPH))
    assert answers == [True]


# Tensors that are alike.


@pytest.fixture(params=["torch's", "own"])
def comparison(request, monkeypatch):
    """As torch's compiler compares, and as tiga does where that is gone."""
    if request.param == "own":
        monkeypatch.setattr(alike, "_guards", lambda: None)
    else:
        assert alike._guards() is torch._C._dynamo.guards.TensorGuards


def test_the_comparison_is_looked_at_wherever_it_is_first_asked_for():
    def found():
        alike._checked_guards.cache_clear()
        return alike._guards()

    want = torch._C._dynamo.guards.TensorGuards
    with torch.inference_mode():
        assert found() is want
    with torch.no_grad(), torch.device("meta"):
        assert found() is want
    seen = []
    torch.func.vmap(lambda x: seen.append(found()) or x)(torch.randn(2))
    assert seen[0] in (want, None) and alike._guards() is want


def test_forms_are_told_apart(comparison):
    x, y = torch.randn(2, 3), torch.randn(3)
    like = alike.like([x, y])
    assert like(torch.randn(2, 3), torch.randn(3))
    for a, b in (
        (x[:1], y),
        (torch.randn(3, 2).T, y),
        (x.double(), y),
        (x.to("meta"), y),
        (x.clone().requires_grad_(), y),
        (nn.Parameter(x, False), y),
        (x, y[None]),
        (x.to_sparse(), y),
        (torch._neg_view(x), y),
    ):
        assert not like(a, b)
    with torch.inference_mode():
        inside = torch.randn(2, 3)
    assert not like(inside, y)


def test_tensors_given_twice_are_told(comparison):
    x, y = torch.randn(3), torch.randn(3)
    twice, apart = alike.like([x, x, y]), alike.like([x, y, torch.randn(3)])
    assert twice(y, y, x) and not twice(x, y, y) and not twice(x, y, x)
    assert apart(y, x, torch.randn(3)) and not apart(x, x, y)


def test_no_tensor_is_held(comparison):
    x = torch.randn(3)
    like, held = alike.like([x]), weakref.ref(x)
    del x
    gc.collect()
    assert held() is None and like(torch.randn(3))


def test_what_a_transform_gives_is_told(comparison):
    x, answers = torch.randn(3), []
    like = alike.like([x])
    run = lambda x: answers.append(like(x)) or x.sum()
    torch.func.vmap(run)(torch.randn(2, 3))
    torch.func.grad(run)(torch.randn(3))
    assert answers == [False, False]


CHANGES = {
    "width": [2, 3],
    "graph": [0, 1, 2],
    "same": [False, True],
    "asks": [False, True],
    "layout": ["rows", "columns", "shifted"],
    "mode": ["grad", "no grad", "inference", "vmap", "jvp"],
    "scale": [1.0, 2.0, 3],
    "power": [None, 2],
    "shift": [0.5, 0.25],
    "reducer": [0, 1],
    "frozen": [False, True],
    "new weight": [False, True],
}


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_of_one_module_are_those_of_a_new_one(seed, monkeypatch):
    """Calls that differ in one thing or none from the one before, of a module that knows what it met and one that does
    not."""
    monkeypatch.setattr("tiga.ops.cpp.run", lambda *args: "torch operations are enough here")
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module, graphs = Other(), [GRAPH, tg.Graph.from_edge_index([[0, 0, 1, 2], [2, 1, 0, 0]], 3, 3), tg.Graph.dense(3)]
    state = {name: values[0] for name, values in CHANGES.items()}
    known, met = 0, alike.Recent(most=4096, each=4)
    for step in range(120):
        if step % 3 == 0:
            name = draw.choice([*CHANGES])
            state[name] = draw.choice(CHANGES[name])
        if state["new weight"] or module.weight.shape[0] != state["width"]:
            module.weight = nn.Parameter(torch.randn(state["width"]))
        module.weight.requires_grad_(not state["frozen"])
        module.shift, module.reducer = state["shift"], [Weighted.reducer, tg.mean()][state["reducer"]]
        n, w = 3, state["width"]
        memory = {
            "rows": torch.randn(n, w),
            "columns": torch.randn(w, n).T,
            "shifted": torch.randn(n * w + 1)[1:].view(n, w),
        }
        x = memory[state["layout"]].requires_grad_(state["asks"])
        y = x if state["same"] else torch.randn(n, w)
        found = []
        fresh = Other()
        fresh.weight, fresh.shift, fresh.reducer = module.weight, module.shift, module.reducer
        for m in (module, fresh):
            monkeypatch.setattr(propagate, "KNOWN", met if m is module else alike.Recent(most=9, each=1))
            run = lambda x, y, m=m: m(
                graph=graphs[state["graph"]], src={"x": x}, dst={"y": y}, scale=state["scale"], power=state["power"]
            )
            if state["mode"] == "grad":
                out = run(x, y)
                moving = [t for t in (x, module.weight) if t.requires_grad]
                found.append([out, *(torch.autograd.grad(out.sin().sum(), moving) if moving else ())])
            elif state["mode"] == "vmap":
                found.append([torch.func.vmap(run)(torch.stack([x, x + 1]), torch.stack([y, y]))])
            elif state["mode"] == "jvp":
                found.append([*torch.func.jvp(run, (x, y), (torch.ones_like(x), torch.zeros_like(y)))])
            else:
                with torch.inference_mode() if state["mode"] == "inference" else torch.no_grad():
                    found.append([run(x, y)])
        known += bool(traces.of(module).calls)
        assert len(found[0]) == len(found[1])
        for a, b in zip(*found):
            assert torch.equal(a, b) and a.requires_grad == b.requires_grad, state
    assert known > 60


def test_few_calls_are_remembered():
    recent = alike.Recent(most=2, each=2)
    for key, call in (("a", 1), ("a", 2), ("a", 3), ("b", 4)):
        recent.add((key,), call)
    assert recent.calls() == [3, 2, 4]
    recent.add(("c",), 5)
    assert recent.calls() == [5]
