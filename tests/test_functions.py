"""Every torch function that an edge function may use, against itself on ordinary tensors; errors of what it may not."""

import inspect
import math
import re
import textwrap
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.autograd import grad

import tiga as tg
from tiga.functions import FUNCTIONS

EDGES = torch.tensor([[0, 2, 1, 1, 0], [1, 1, 0, 2, 2]])
WEIGHT, BIAS, TABLE = (
    torch.linspace(-1, 1, 20).reshape(5, 4).cos().double(),
    torch.linspace(0, 1, 5).double(),
    torch.linspace(-1, 1, 12).reshape(4, 3).double(),
)
CAPTURED = [t.requires_grad_() for t in (WEIGHT, BIAS, TABLE)]

# name -> uses of it, on e.x, e.y (num_edges, 2, 4), e.p positive, e.u inside (-1, 1), e.v (num_edges, 2, 3),
# e.i and e.k integers, e.b and e.c booleans
USES = {
    **{
        name: [getattr(torch, name)]
        for name in (
            "exp exp2 expm1 sin cos tan atan sinh cosh tanh sigmoid erf abs neg sign square isnan isinf isfinite "
            "floor ceil trunc"
        ).split()
    },
    **{
        name: [lambda e, name=name: getattr(torch, name)(e.p)]
        for name in "log log2 log10 log1p sqrt rsqrt reciprocal".split()
    },
    **{name: [lambda e, name=name: getattr(torch, name)(e.u)] for name in "asin acos".split()},
    **{
        name: [lambda e, name=name: getattr(torch, name)(e.x, e.y), lambda e, name=name: getattr(e.x, name)(e.y)]
        for name in "mul maximum minimum atan2 lt le eq ne gt ge".split()
    },
    **{
        name: [lambda e, name=name: getattr(torch, name)(e.b, e.c), lambda e, name=name: getattr(torch, name)(e.x, e.b)]
        for name in "logical_and logical_or logical_xor".split()
    },
    "add": [lambda e: torch.add(e.x, e.y, alpha=0.5), lambda e: e.x + 2, lambda e: 2.5 + e.x, lambda e: e.i + e.x],
    "sub": [lambda e: torch.sub(e.x, e.y, alpha=2), lambda e: e.x - 1, lambda e: 1 - e.x, lambda e: e.x.subtract(e.y)],
    "div": [
        lambda e: e.x / e.p,
        lambda e: e.i / 2,
        lambda e: 1 / e.p,
        lambda e: torch.div(e.x, e.p, rounding_mode="floor"),
        lambda e: torch.div(e.x, e.p, rounding_mode="trunc"),
        lambda e: torch.div(e.i, 2, rounding_mode="floor"),
        lambda e: torch.true_divide(e.x, 3),
    ],
    "rsub": [lambda e: torch.rsub(e.x, 2)],
    "rdiv": [lambda e: 2 / e.p],
    "radd": [lambda e: 2 + e.x],
    "rmul": [lambda e: 2 * e.x],
    "fmod": [lambda e: torch.fmod(e.x, 0.7), lambda e: torch.fmod(e.x, e.p)],
    "remainder": [lambda e: e.x % 0.7, lambda e: torch.remainder(e.x, e.p), lambda e: e.i % 3],
    "rremainder": [lambda e: 5 % (e.i.abs() + 1)],
    "floor_divide": [
        lambda e: (e.i / 7) // 0.5,
        lambda e: torch.floor_divide(e.i, 3),
        lambda e: (e.i + 2**40) // 3,
        lambda e: 100 // (e.i.abs() + 1),
        lambda e: e.i // 3,
    ],
    "pow": [
        lambda e: e.x**2,
        lambda e: e.x**3,
        lambda e: e.p**0.5,
        lambda e: e.p**e.x,
        lambda e: e.p.pow(-1.5),
        lambda e: e.x**1,
        lambda e: e.i**2,
    ],
    "rpow": [lambda e: 2**e.x, lambda e: 0.5**e.x],
    "round": [lambda e: (e.x * 4).round()],
    "bitwise_and": [
        lambda e: e.b & e.c,
        lambda e: e.i & 3,
        lambda e: 1 & e.i,
        lambda e: torch.bitwise_and(e.i, e.k[:, None, None]),
    ],
    "bitwise_or": [lambda e: e.b | e.c, lambda e: e.i | 3],
    "bitwise_xor": [lambda e: e.b ^ e.c, lambda e: torch.bitwise_xor(e.i, 5), lambda e: 5 ^ e.i],
    "bitwise_not": [lambda e: ~e.b, lambda e: ~e.i],
    "logical_not": [lambda e: e.b.logical_not(), lambda e: torch.logical_not(e.i)],
    "where": [
        lambda e: torch.where(e.b, e.x, e.y),
        lambda e: torch.where(e.x > e.y, e.x, 0.0),
        lambda e: torch.where(e.b, 1.0, e.x),
        lambda e: e.x.where(e.b, e.y),
        lambda e: torch.where(e.b, 1.0, 0.0),
    ],
    "masked_fill": [lambda e: e.x.masked_fill(e.b, -1.0), lambda e: torch.masked_fill(e.x, ~e.b, 0)],
    "clamp": [lambda e: e.x.clamp(-0.5, 0.5), lambda e: torch.clamp(e.x, max=0.1), lambda e: torch.clip(e.x, min=-0.2)],
    "clamp_min": [lambda e: e.x.clamp_min(0.1)],
    "clamp_max": [lambda e: e.x.clamp_max(0.1)],
    "lerp": [lambda e: torch.lerp(e.x, e.y, 0.3), lambda e: torch.lerp(e.x, e.y, e.p)],
    "relu": [lambda e: F.relu(e.x), lambda e: e.x.relu()],
    "silu": [lambda e: F.silu(e.x)],
    "mish": [lambda e: F.mish(e.x)],
    "selu": [lambda e: F.selu(e.x)],
    "gelu": [lambda e: F.gelu(e.x), lambda e: F.gelu(e.x, approximate="tanh")],
    "leaky_relu": [lambda e: F.leaky_relu(e.x), lambda e: F.leaky_relu(e.x, 0.2)],
    "elu": [lambda e: F.elu(e.x), lambda e: F.elu(e.x, alpha=0.5)],
    "softplus": [lambda e: F.softplus(e.x), lambda e: F.softplus(e.x * 9, beta=2.0, threshold=3.0)],
    "logsigmoid": [lambda e: F.logsigmoid(e.x)],
    "softsign": [lambda e: F.softsign(e.x)],
    "relu6": [lambda e: F.relu6(e.x * 9)],
    "hardtanh": [lambda e: F.hardtanh(e.x), lambda e: F.hardtanh(e.x, -0.3, 0.2)],
    "hardsigmoid": [lambda e: F.hardsigmoid(e.x * 4)],
    "hardswish": [lambda e: F.hardswish(e.x * 4)],
    "dropout": [
        lambda e: F.dropout(e.x, 0.5, training=False),
        lambda e: F.dropout(e.x, 0.0),
        lambda e: F.dropout(e.x, 1.0),
    ],
    "sum": [
        lambda e: e.x.sum(-1),
        lambda e: e.x.sum(1),
        lambda e: e.x.sum((1, 2)),
        lambda e: e.x.sum(dim=-2, keepdim=True),
        lambda e: e.i.sum(-1),
        lambda e: e.b.sum(-1),
        lambda e: e.x.sum((1, 2), keepdim=True),
        lambda e: torch.sum(e.i, -1, dtype=torch.float64),
    ],
    "mean": [lambda e: e.x.mean(-1), lambda e: e.x.mean((1, 2), keepdim=True), lambda e: torch.mean(e.x, dim=1)],
    "amax": [lambda e: e.x.amax(-1), lambda e: e.x.amax((1, 2)), lambda e: torch.amax(e.x, 1, keepdim=True)],
    "amin": [lambda e: e.x.amin(-1), lambda e: e.x.amin((-1, -2))],
    "max": [lambda e: torch.max(e.x, e.y)],
    "min": [lambda e: torch.min(e.x, e.y)],
    "var": [
        lambda e: e.x.var(-1),
        lambda e: e.x.var(dim=(1, 2), correction=0),
        lambda e: torch.var(e.x, -1, unbiased=False),
        lambda e: torch.var(e.x, -1, keepdim=True),
    ],
    "std": [lambda e: e.x.std(-1), lambda e: torch.std(e.x, 1, correction=0, keepdim=True)],
    "norm": [
        lambda e: e.x.norm(dim=-1),
        lambda e: torch.linalg.vector_norm(e.x, dim=(1, 2)),
        lambda e: torch.linalg.norm(e.x, dim=-1, keepdim=True),
        lambda e: e.x.norm(p=1, dim=-1),
        lambda e: torch.linalg.vector_norm(e.x, ord=math.inf, dim=-1),
    ],
    "normalize": [lambda e: F.normalize(e.x, dim=-1), lambda e: F.normalize(e.x, dim=1)],
    "vecdot": [lambda e: torch.linalg.vecdot(e.x, e.y)],
    "softmax": [lambda e: e.x.softmax(-1), lambda e: F.softmax(e.x, dim=1)],
    "log_softmax": [lambda e: F.log_softmax(e.x, dim=-1)],
    "logsumexp": [lambda e: e.x.logsumexp(-1), lambda e: torch.logsumexp(e.x, 1, keepdim=True)],
    "layer_norm": [
        lambda e: F.layer_norm(e.x, (4,)),
        lambda e: F.layer_norm(e.x, (2, 4), eps=1e-3),
        lambda e: F.layer_norm(e.x, (4,), WEIGHT[0], WEIGHT[1]),
    ],
    "rms_norm": [lambda e: F.rms_norm(e.x, (4,)), lambda e: F.rms_norm(e.x, (4,), WEIGHT[2], 1e-3)],
    "unsqueeze": [lambda e: e.x.unsqueeze(-1), lambda e: e.x.unsqueeze(1), lambda e: e.x.unsqueeze(3)],
    "squeeze": [lambda e: e.x[:, :1].squeeze(1), lambda e: e.x.squeeze(-1), lambda e: e.x[:, :1, :1].squeeze((1, 2))],
    "permute": [lambda e: e.x.permute(0, 2, 1), lambda e: torch.permute(e.x, (0, -1, -2))],
    "transpose": [lambda e: e.x.transpose(1, 2), lambda e: torch.swapaxes(e.x, -1, -2)],
    "movedim": [lambda e: e.x.movedim(1, 2), lambda e: e.x[..., None].movedim(-1, 1)],
    "moveaxis": [lambda e: torch.moveaxis(e.x, -1, 1)],
    "reshape": [
        lambda e: e.x.reshape(-1, 8),
        lambda e: e.x.view(e.x.shape[0], 4, -1),
        lambda e: torch.reshape(e.x, (-1, 1, 8)),
    ],
    "reshape_as": [lambda e: e.x.reshape_as(e.x.transpose(1, 2)), lambda e: e.x.view_as(e.y)],
    "flatten": [lambda e: e.x.flatten(1), lambda e: e.x.flatten(-1), lambda e: torch.flatten(e.x[..., None], 2, 3)],
    "unflatten": [lambda e: e.x.unflatten(-1, (2, 2)), lambda e: e.x.unflatten(2, (-1, 1))],
    "expand": [lambda e: e.x[:, :1].expand(-1, 3, 4), lambda e: e.x.sum(-1, keepdim=True).expand(e.x.shape[0], -1, 5)],
    "expand_as": [lambda e: e.x[:, :1].expand_as(e.y)],
    "cat": [
        lambda e: torch.cat([e.x, e.v], -1),
        lambda e: torch.cat((e.x, e.y, e.x), dim=1),
        lambda e: torch.concat([e.x], -1),
        lambda e: torch.cat([e.i, e.x], 2),
    ],
    "stack": [lambda e: torch.stack([e.x, e.y], -1), lambda e: torch.stack([e.x, e.y], 1)],
    "narrow": [lambda e: e.x.narrow(-1, 1, 2)],
    "select": [lambda e: e.x.select(1, 0), lambda e: e.x.select(-1, -1)],
    "getitem": [
        lambda e: e.x[..., 0],
        lambda e: e.x[:, 1],
        lambda e: e.x[..., 1:3],
        lambda e: e.x[:, None],
        lambda e: e.x[..., None],
        lambda e: e.x[:, :, ::2],
        lambda e: e.x[..., -3:],
        lambda e: e.x[:, 0, 1:],
        lambda e: e.x[..., [0, 2]],
        lambda e: e.x[:, -1, -1],
        lambda e: e.x[:, ..., 2],
        lambda e: e.x[..., 2:2],
    ],
    "chunk": [lambda e: torch.cat(e.x.chunk(2, -1)[::-1], -1), lambda e: e.v.chunk(2, 2)[1]],
    "split": [lambda e: e.x.split(3, -1)[1], lambda e: torch.split(e.x, [1, 3], dim=2)[1]],
    "split_with_sizes": [lambda e: torch.split_with_sizes(e.x, [1, 3], -1)[0]],
    "unbind": [lambda e: torch.stack(e.x.unbind(1)[::-1], 1), lambda e: e.x.unbind(-1)[2]],
    "cross": [lambda e: torch.linalg.cross(e.v, e.v + 1), lambda e: torch.cross(e.v, e.v.cos(), dim=-1)],
    "size": [lambda e: e.x * e.x.size(-1), lambda e: e.x * e.x.size()[1]],
    "dim": [lambda e: e.x * e.x.dim()],
    "clone": [lambda e: e.x.clone()],
    "contiguous": [lambda e: e.x.transpose(1, 2).contiguous()],
    "alias": [lambda e: torch.ops.aten.alias(e.x)],
    "is_floating_point": [lambda e: e.x if e.x.is_floating_point() else e.y],
    "to": [
        lambda e: e.x.to(torch.float32),
        lambda e: e.i.to(torch.float64),
        lambda e: e.x.to(e.i),
        lambda e: e.x.to(dtype=torch.int64),
        lambda e: e.x.to(torch.bfloat16),
    ],
    "type_as": [lambda e: e.i.type_as(e.x)],
    "float": [lambda e: e.i.float()],
    "double": [lambda e: e.i.double()],
    "half": [lambda e: e.x.half()],
    "bfloat16": [lambda e: e.x.bfloat16()],
    "int": [lambda e: (e.x * 5).int()],
    "long": [lambda e: (e.x * 5).long()],
    "bool": [lambda e: e.i.bool()],
    "zeros_like": [lambda e: torch.zeros_like(e.x) + e.y],
    "ones_like": [lambda e: torch.ones_like(e.x) * e.y],
    "full_like": [lambda e: torch.full_like(e.x, 2.5) * e.y],
    "linear": [
        lambda e: F.linear(e.x, WEIGHT),
        lambda e: F.linear(e.x, WEIGHT, BIAS),
        lambda e: F.linear(e.x, WEIGHT[0]),
    ],
    "matmul": [lambda e: torch.matmul(e.x, WEIGHT.t()), lambda e: e.x.matmul(WEIGHT[0])],
    "embedding": [lambda e: F.embedding(e.k, TABLE)],
    "index_select": [lambda e: TABLE[e.k] if isinstance(e.k, torch.Tensor) else torch.index_select(TABLE, 0, e.k)],
}
REFUSED = {"detach"}


def fields(rows=5):
    draw = torch.Generator().manual_seed(3)
    x, y, p, u, v = (torch.randn(rows, 2, w, generator=draw, dtype=torch.float64) for w in (4, 4, 4, 4, 3))
    found = {
        "x": x,
        "y": y,
        "p": p.abs() + 0.3,
        "u": u.tanh() * 0.9,
        "v": v,
        "i": (x * 9).long(),
        "k": (x[:, 0, 0] * 100).long() % 4,
        "b": x > 0,
        "c": y > 0,
    }
    return {name: t.requires_grad_(t.is_floating_point()) for name, t in found.items()}


class Edgewise(tg.MessagePassing):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def edge(self, src, dst, edge):
        return self.function(edge)


def used(function):
    """A bare function of torch is applied to e.x."""
    return (lambda e: function(e.x)) if function.__name__ != "<lambda>" else function


def test_every_function_is_tested():
    assert set(USES) | REFUSED == set(FUNCTIONS)


@pytest.mark.parametrize(
    "name, function", [pytest.param(name, f, id=f"{name}-{k}") for name, fs in USES.items() for k, f in enumerate(fs)]
)
def test_function(name, function):
    given, function = fields(), used(function)
    got = Edgewise(function)(graph=tg.Graph.from_edge_index(EDGES, 3, 3), edge=given)
    want = function(SimpleNamespace(**given))
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(
        got, want, rtol=1e-10, atol=1e-10
    ) if got.dtype == torch.float64 else torch.testing.assert_close(got, want)
    if not want.requires_grad or not want.is_floating_point():
        return
    wrt = [t for t in given.values() if t.requires_grad] + CAPTURED
    weight = torch.arange(want.numel()).reshape(want.shape).cos().to(want.dtype)
    first = [
        [
            torch.zeros_like(t) if g is None else g
            for t, g in zip(wrt, grad(out, wrt, weight, create_graph=True, allow_unused=True))
        ]
        for out in (got, want)
    ]
    # torch keeps the sixth in hardsigmoid's derivative as a float32, and has no second derivative
    close = {} if got.dtype != torch.float64 or name == "hardsigmoid" else {"rtol": 1e-9, "atol": 1e-9}
    for x, y in zip(*first):
        torch.testing.assert_close(x, y, **close)
    if all(any(g.requires_grad for g in gs) for gs in first) and got.dtype == torch.float64 and name != "hardsigmoid":
        second = [grad(sum(g.sin().sum() for g in gs if g.requires_grad), wrt, allow_unused=True) for gs in first]
        for t, x, y in zip(wrt, *second):
            torch.testing.assert_close(*[torch.zeros_like(t) if g is None else g for g in (x, y)], rtol=1e-8, atol=1e-8)


def test_dropout_drops_and_scales():
    graph, x = tg.Graph.dense(30, 40), torch.ones(1200, 8, requires_grad=True)
    torch.manual_seed(5)
    out = Edgewise(lambda e: F.dropout(e.x, 0.25))(graph=graph, edge={"x": x})
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1.0) * (1 / 0.75))}
    assert abs((out == 0).double().mean() - 0.25) < 0.02
    assert torch.equal(grad(out.sum(), x)[0], out.detach())
    torch.manual_seed(5)
    assert torch.equal(Edgewise(lambda e: F.dropout(e.x, 0.25))(graph=graph, edge={"x": x}), out)
    assert not torch.equal(Edgewise(lambda e: F.dropout(e.x, 0.25))(graph=graph, edge={"x": x}), out)


def test_any_module_of_traceable_operations():
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.register_buffer("shift", torch.linspace(0, 1, 8))

        def forward(self, x):
            for layer in self.layers:
                x = x + F.silu(layer(x)) * self.shift
            return x

    net = nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        Residual(),
        nn.RMSNorm(8),
        nn.Dropout(0.0),
        nn.Identity(),
        nn.Linear(8, 1, bias=False),
        nn.Softplus(),
        nn.Flatten(1),
    ).double()
    given = fields()
    got = Edgewise(lambda e: tg.nn.trace(net)(e.x, e.y))(graph=tg.Graph.from_edge_index(EDGES, 3, 3), edge=given)
    want = net(torch.cat([given["x"], given["y"]], -1))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    wrt = [given["x"], given["y"], *net.parameters()]
    for x, y in zip(grad(got.square().sum(), wrt), grad(want.square().sum(), wrt)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


# What cannot be traced.


def branch(e):
    return e.x if e.b else e.y


def loop(e):
    return sum(row for row in e.x)


def product(e):
    return e.x @ e.y


def plain_number(e):
    return e.x * float(e.y)


def in_place(e):
    return e.x.add_(e.y)


def relu_in_place(e):
    return F.relu(e.x, inplace=True)


def assignment(e):
    e.x[..., 0] = 0
    return e.x


def unsupported(e):
    return torch.fft.fft(e.x)


def fold_edges(e):
    return e.x.sum(0)


def fold_all(e):
    return e.x.sum()


def captured_numpy(e):
    return e.x * numpy.ones(3)


def wrong_field(e):
    return e.bias * e.x


def length(e):
    return e.x * len(e.x)


def position(e):
    return [1, 2, 3][e.k] * e.x


def first_edges(e):
    return e.x[:2]


def one_edge(e):
    return e.x[0]


def joined_edges(e):
    return torch.cat([e.x, e.y], 0)


def detached(e):
    return e.x.detach() * e.y


def larger_and_where(e):
    return e.x.max(-1)


def misfit(e):
    return e.x + e.v


def too_long(e):
    return e.x[..., 9]


def two_traced(e):
    return torch.matmul(e.x, e.y.transpose(1, 2))


def of_a_tensor(e):
    return torch.matmul(WEIGHT, e.x)


def items(e):
    return e.x * e.y.item()


def unknown_attribute(e):
    return e.x.grad_fn


def wrong_dimension(e):
    return e.x.sum(7)


def a_string(e):
    return e.x * "2"


def nothing(e):
    return None


REMEDIES = {
    branch: "torch.where",
    loop: "unbind",
    product: "linear",
    plain_number: "torch functions",
    in_place: "x = x.add(...)",
    relu_in_place: "inplace",
    assignment: "torch.where",
    unsupported: "Compute it outside",
    fold_edges: "reducer",
    fold_all: "dim=-1",
    captured_numpy: "tensors",
    wrong_field: "edge fields given are",
    length: "not known",
    position: "embedding",
    first_edges: "[..., k]",
    one_edge: "[..., k]",
    joined_edges: "edges",
    detached: "detached",
    larger_and_where: "amax",
    misfit: "do not broadcast",
    too_long: "size 4",
    two_traced: "Multiply and sum",
    of_a_tensor: "linear",
    items: ".item",
    unknown_attribute: "grad_fn",
    wrong_dimension: "2 feature dimensions",
    a_string: "str",
    nothing: "Return",
}


@pytest.mark.parametrize("function", REMEDIES, ids=lambda f: f.__name__)
def test_error_quotes_the_line(function):
    with pytest.raises(tg.TraceError) as caught:
        Edgewise(function)(graph=tg.Graph.from_edge_index(EDGES, 3, 3), edge=fields())
    text, (lines, start) = str(caught.value), inspect.getsourcelines(function)
    assert REMEDIES[function] in text, text
    if function is nothing:
        return
    found = re.search(r"test_functions\.py:(\d+)", text)
    assert found and "Edgewise.edge" in text, text
    line = lines[int(found[1]) - start].strip()
    assert line in text and line != lines[0].strip(), text


def test_error_texts():
    def text(function):
        with pytest.raises(tg.TraceError) as caught:
            Edgewise(function)(graph=tg.Graph.from_edge_index(EDGES, 3, 3), edge=fields())
        text = re.sub(r"\.py:\d+", ".py:LINE", str(caught.value))
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in text.split("\n"))

    assert_expected_inline(
        text(branch),
        """\
while tracing Edgewise.edge (test_functions.py:LINE):
      return e.x if e.b else e.y
  `if`, `and`, `or` or `not` on a traced value: an edge function runs for all edges at once. Write
    torch.where(condition, a, b).""",
    )
    assert_expected_inline(
        text(wrong_field),
        """\
while tracing Edgewise.edge (test_functions.py:LINE):
      return e.bias * e.x
  the edge function reads edge.bias, but the edge fields given are: b, c, i, k, p, u, v, x, y. Pass
    it: edge={'bias': tensor}.""",
    )
    assert_expected_inline(
        text(fold_edges),
        """\
while tracing Edgewise.edge (test_functions.py:LINE):
      return e.x.sum(0)
  dimension 0 of a traced value is the edges. Fold over edges with a reducer; feature dimensions are
    1, 2, ... or -1, -2, ...""",
    )
    assert_expected_inline(
        text(unsupported),
        """\
while tracing Edgewise.edge (test_functions.py:LINE):
      return torch.fft.fft(e.x)
  torch.fft_fft is not supported in an edge function. Compute it outside for nodes or parameters, or
    write it with pointwise functions, sums over features and where.""",
    )
