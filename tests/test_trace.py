"""Traces are looked up step by step and calls skip the dispatcher: neither may be seen in a result."""

import gc
import math
import random
import warnings
import weakref

import pytest
import torch
from cases import CASES
from programs import Attention, attend, fields, graph_of, plain_attention
from torch import nn
from torch.autograd import grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tiga as tg
from tiga.builder import Path
from tiga.ops import propagate

close = torch.testing.assert_close
SELF = tg.Graph.from_edge_index([[0, 1, 2], [0, 1, 2]], 3, 3)  # one edge a row: sums are the messages themselves


@pytest.fixture(autouse=True)
def nothing_traced_yet():
    Path.root = None


class Told(tg.MessagePassing):
    """Sums what a function of the field x gives."""

    reducer = tg.sum()

    def __init__(self, message):
        super().__init__()
        self.message = message

    def edge(self, src, dst, edge, **uniform):
        return self.reducer(self.message(src.x, **uniform))


def told(message, x, **uniform):
    return Told(message)(graph=SELF, src={"x": x}, **uniform)


X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0], [-3.0, 0.25, 2.0]])


# ---- what is looked up is what would be traced anew ----


def run(case):
    module = case.build()
    case.run(module, case.arguments())
    return module.ir()


def test_cases_in_any_order_give_the_texts_of_fresh_traces():
    fresh = []
    for case in CASES:
        Path.root = None
        fresh.append(run(case))
    Path.root = None
    order = [*range(len(CASES))] * 3
    random.Random(0).shuffle(order)
    for k in order:
        assert run(CASES[k]) == fresh[k], CASES[k].name


def test_a_known_trace_types_and_appends_nothing(monkeypatch):
    module, tensors = Attention(), fields()
    want = attend(module, graph_of("triangular"), *tensors)
    monkeypatch.setattr("tiga.builder.infer", None)
    monkeypatch.setattr(tg.trace.Tracer, "append", None)
    close(attend(module, graph_of("triangular"), *tensors), want)


# ---- every step that may mean something else is another step ----

PAIRS = {
    "int, float": (lambda x: (x > 0) * 2, lambda x: (x > 0) * 2.0),
    "bool, int": (lambda x: x.var(1, unbiased=False), lambda x: x.var(1, correction=1)),
    "zeros": (lambda x: 1 / torch.where(x > 9, x, 0.0), lambda x: 1 / torch.where(x > 9, x, -0.0)),
    "exponents": (lambda x: x.abs() ** 2, lambda x: x.abs() ** 2.5),
    "dimensions": (lambda x: x.unsqueeze(-1).sum(-1), lambda x: x.unsqueeze(-1).sum(-2, keepdim=True).squeeze(-1)),
    "keywords": (lambda x: x.sum(-1, keepdim=True) + x, lambda x: x.sum(-1, keepdim=False).unsqueeze(-1) - x),
    "tuples": (lambda x: x.unsqueeze(-1).sum((-1, -2)), lambda x: x.unsqueeze(-1).sum((-1,))),
    "text": (
        lambda x: torch.div(x, 0.7, rounding_mode="floor"),
        lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    ),
    "argument order": (lambda x: torch.where(x > 0, x, 0.0), lambda x: torch.where(x > 0, 0.0, x)),
    "no argument": (lambda x: nn.functional.gelu(x), lambda x: nn.functional.gelu(x, approximate="tanh")),
    "slices": (lambda x: x[:, 0:2], lambda x: x[:, 1:3]),
    "pieces": (lambda x: x.split([1, 2], -1)[1], lambda x: x.chunk(3, -1)[1]),
    "dtypes": (lambda x: x.to(torch.float64) / 3, lambda x: x.to(torch.float16) / 3),
}


@pytest.mark.parametrize("name", PAIRS)
def test_alike_steps_are_told_apart(name):
    for message in PAIRS[name] * 3:
        got, want = told(message, X), message(X)
        close(got, want.to(got.dtype) if want.dtype == torch.float16 else want)
        assert (got.signbit() == want.signbit()).all()


def test_a_field_of_another_form_is_another_trace():
    for x in (X, X.double(), X.long(), X[:, :1], X[:, None], X.half()) * 2:
        got = told(lambda x: x.sum(-1) / 2, x)
        close(got, x.sum(-1) / 2)
        assert got.dtype == (x.sum(-1) / 2).dtype


def test_captured_tensors_are_those_of_the_call():
    a, b = torch.randn(3), torch.randn(3)
    for left, right in ((a, a), (a, b), (b, a), (b, b)) * 2:
        close(told(lambda x, p=left, q=right: x * p + q, X), X * left + right)
        close(told(lambda x, p, q: x * p + q, X, p=left, q=right), X * left + right)


# ---- what the user changes is seen at the next call ----

SIGN = 1.0


class Changing(tg.MessagePassing):
    reducer = tg.sum()

    def __init__(self):
        super().__init__()
        self.layer, self.flag, self.power, self.scale = nn.Linear(3, 3), False, 2, 0.5

    def message(self, x):
        y = self.layer(x) * (SIGN * self.scale)
        return torch.relu(y) if self.flag else y**self.power

    def edge(self, src, dst, edge):
        return self.reducer(self.message(src.x))


def changes(monkeypatch):
    """Functions that each change something an edge function reads."""
    return [
        lambda m: None,
        lambda m: setattr(m, "flag", True),
        lambda m: setattr(m, "flag", False),
        lambda m: setattr(m, "scale", -1.5),
        lambda m: setattr(m, "power", 3),
        lambda m: monkeypatch.setitem(globals(), "SIGN", -2.0),
        lambda m: setattr(m, "layer", nn.Linear(3, 5)),
        lambda m: m.layer.weight.data.mul_(2),
        lambda m: setattr(m, "layer", nn.Sequential(nn.Linear(3, 2), nn.Tanh())),
        lambda m: setattr(m.layer[1], "forward", torch.sigmoid),
        lambda m: setattr(m, "message", lambda x: x - 1),
        lambda m: setattr(m, "reducer", tg.mean()),
    ]


def test_changes_are_seen(monkeypatch):
    module = Changing()
    for change in changes(monkeypatch):
        change(module)
        for _ in range(2):
            close(module(graph=SELF, src={"x": X}), module.message(X))


def test_reducers_that_change_are_seen():
    class Both(Attention):
        reducer = tg.online_softmax(return_lse=True)

    module, tensors, graph = Both(), fields(), graph_of("dense")
    for wanted in (True, False, True):
        module.reducer.return_lse = wanted
        assert isinstance(attend(module, graph, *tensors), tuple) == wanted


def test_dropout_is_drawn_at_each_call_and_once_a_call():
    x = torch.ones(3, 200)

    def message(x):
        return torch.cat([nn.functional.dropout(x, 0.5), nn.functional.dropout(x, 0.25)], -1)

    found = []
    for _ in range(3):
        torch.manual_seed(len(found) % 2)
        found.append(told(message, x))
    close(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    kept, more = found[0].split(200, -1)
    assert 0.3 < kept.count_nonzero() / 600 < 0.7 < more.count_nonzero() / 600
    # one seed a call: what the first drops at one half, the second keeps only where it drops less
    assert ((kept != 0) <= (more != 0)).all()
    assert not told(lambda x: nn.functional.dropout(x, 0.5), x).eq(told(lambda x: x, x)).all()


# ---- mistakes are said on known traces too ----


def test_a_field_never_used_is_said_once_a_class():
    class Other(Told):
        pass

    for cls in (Told, Other):
        with pytest.warns(UserWarning, match=rf"{cls.__name__}: src field 'spare_{cls.__name__}' was given and"):
            for _ in range(2):
                cls(lambda x: x)(graph=SELF, src={"x": X, f"spare_{cls.__name__}": X})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Told(lambda x: x)(graph=SELF, src={"x": X, "spare_Told": X})


def test_a_value_of_another_call_is_refused():
    class Keeping(tg.MessagePassing):
        reducer = tg.sum()
        kept = None

        def edge(self, src, dst, edge):
            use = src.x if self.kept is None else self.use(src.x)
            self.__dict__.setdefault("kept", src.x)
            return use if self.bare else self.reducer(use)

    uses = {
        "an operation": lambda m, x: m.kept * x,
        "a function": lambda m, x: torch.maximum(x, m.kept),
        "reduced": lambda m, x: m.kept,
        "returned": lambda m, x: m.kept,
    }
    for name, use in uses.items():
        for _ in range(2):
            module = Keeping()
            module.use, module.bare = lambda x, use=use, module=module: use(module, x), name == "returned"
            module(graph=SELF, src={"x": X})
            with pytest.raises(tg.TigaError, match="of another call"):
                module(graph=SELF, src={"x": X})


def test_sizes_are_checked_at_every_call():
    module, graph = Attention(), graph_of("triangular")
    call = module.lower(graph, *[{"key": k, "value": v} for _, k, v in [fields()]], {"query": fields()[0]}, scale=1.0)
    operator = torch.ops.tiga.propagate.default
    for _ in range(2):
        operator(*call)
        short = [t[:4] if k == 1 else t for k, t in enumerate(call.tensors)]
        wide = [torch.cat([t, t], -1) if k == 1 else t for k, t in enumerate(call.tensors)]
        double = [t.double() if k == 1 else t for k, t in enumerate(call.tensors)]
        flat = [t[0, 0, 0] if k == 1 else t for k, t in enumerate(call.tensors)]
        for tensors, text in ((short, "4 rows"), (wide, "sizes differ"), (double, "float64"), (flat, "dimensions")):
            with pytest.raises(tg.TigaError, match=text):
                operator(call.program, tensors, call.ints, call.scalars)
            with pytest.raises(tg.TigaError, match=text):
                propagate.call(call.program, tensors, call.ints, call.scalars)


# ---- memory ----


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_tensors_die_with_the_call_and_wait_for_no_collector(known):
    module, layer = Told(lambda x: nn.functional.dropout(x * 2) + 1), torch.ones(3)
    if known:
        module(graph=SELF, src={"x": X})
    gc.collect()
    gc.disable()
    try:
        x = X.clone()
        alive = weakref.ref(x)
        module(graph=SELF, src={"x": x})
        del x
        assert alive() is None
    finally:
        gc.enable()
    del layer


# ---- the dispatcher is left out where nothing of it would take part, and only there ----


@pytest.fixture
def reached(monkeypatch):
    """How often the operator went to the dispatcher, and what tensors the implementation was given."""

    class Reached:
        dispatched, given = 0, []

        def __call__(self, *args):
            self.dispatched += 1
            return operator(*args)

    def check(p, tensors, ints, scalars):
        seen.given = tensors
        return checked(p, tensors, ints, scalars)

    seen, operator, checked = Reached(), propagate._op, propagate.check
    monkeypatch.setattr(propagate, "_op", seen)
    monkeypatch.setattr(propagate, "check", check)
    return seen


def test_plain_calls_reach_the_implementation_alone(reached):
    q, k, v = fields(grad=True)
    mask = torch.ones(6, 6).tril().bool()
    want = plain_attention(mask, q, k, v)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            close(attend(Attention(), graph_of("triangular"), q, k, v), want)
    out = attend(Attention(), graph_of("triangular"), nn.Parameter(q.detach()), k, v)
    close(grad(out.square().sum(), (k, v)), grad(want.square().sum(), (k, v)))
    with torch.inference_mode():
        attend(Attention(), graph_of("triangular"), *fields())
    assert reached.dispatched == 0 and reached.given


@pytest.mark.gpu
def test_plain_calls_on_cuda_reach_the_implementation_alone(reached):
    q, k, v = [t.detach().cuda().requires_grad_() for t in fields()]
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            out = attend(Attention(), graph_of("triangular"), q, k, v)
            close(out, plain_attention(torch.ones(6, 6, device="cuda").tril().bool(), q, k, v), rtol=1e-2, atol=1e-2)
    assert reached.dispatched == 0 and reached.given


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    seen: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("mode", [Ops, Functions])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_modes_see_the_operator(mode, requires_grad):
    with mode() as active:
        attend(Attention(), graph_of("triangular"), *fields(grad=requires_grad))
    assert active.seen.count(propagate._op) == 1


def test_modes_see_the_operator_called_by_its_name():
    q, k, v = fields()
    call = Attention().lower(graph_of("dense"), {"key": k, "value": v}, {"query": q}, scale=1.0)
    for mode in (Ops, Functions):
        with mode() as active:
            torch.ops.tiga.propagate.default(*call)
        assert active.seen.count(propagate._op) == 1


def test_subclasses_see_the_operator():
    q, k, v = fields()
    Marked.seen.clear()
    out = attend(Attention(), graph_of("dense"), q.as_subclass(Marked), k, v)
    assert isinstance(out, Marked) and propagate._op in Marked.seen


def test_profilers_see_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        attend(Attention(), graph_of("dense"), *fields())
    assert "tiga::propagate" in {event.key for event in found.key_averages()}


def test_autocast_is_applied():
    q, k, v = fields()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(Attention(), graph_of("dense"), q, k, v)
    assert out.dtype == attend(Attention(), graph_of("dense"), q, k, v.bfloat16()).dtype == torch.bfloat16
    close(out.float(), plain_attention(torch.ones(6, 6).bool(), q, k, v), rtol=0, atol=0.05)


def test_negated_views_are_resolved(reached):
    q, k, v = fields()
    turned = torch.complex(torch.zeros_like(k), -k).conj().imag
    assert turned.is_neg()
    out = attend(Attention(), graph_of("dense"), q, turned, v)
    close(out, plain_attention(torch.ones(6, 6).bool(), q, k, v))
    assert reached.dispatched and reached.given and not any(t.is_neg() for t in reached.given)


def test_function_transforms_are_seen():
    q, k, v = fields()
    graph, mask = graph_of("triangular"), torch.ones(6, 6).tril().bool()
    got = torch.func.grad(lambda q: attend(Attention(), graph, q, k, v).sin().sum())(q)
    close(got, torch.func.grad(lambda q: plain_attention(mask, q, k, v).sin().sum())(q))
    got = torch.vmap(lambda q: attend(Attention(), graph, q, k, v))(torch.stack([q, -q]))
    close(got[1], plain_attention(mask, -q, k, v))
    _, got = torch.func.jvp(lambda q: attend(Attention(), graph, q, k, v), (q,), (k,))
    close(got, torch.func.jvp(lambda q: plain_attention(mask, q, k, v), (q,), (k,))[1])


def test_below_autograd_no_graph_is_recorded():
    q, k, v = fields(grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        assert attend(Attention(), graph_of("dense"), q, k, v).grad_fn is None
    assert attend(Attention(), graph_of("dense"), q, k, v).grad_fn is not None


def test_a_known_trace_serves_uniform_numbers_of_any_value():
    for scale in (0.5, -0.0, 2.0, math.inf, 0.5):
        close(told(lambda x, s: x * s, X, s=scale), X * scale)
    for power in (1, 2, 3, 1):
        close(told(lambda x, n: x**n, X, n=power), X**power)
