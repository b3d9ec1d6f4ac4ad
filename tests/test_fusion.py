"""Neighbours of the operator move into its programs: what is left beside it, and values and gradients of plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fused import Graphs
from programs import Attention, attend, plain_attention
from torch.autograd import grad

import tiga as tg

N, H, D = 6, 2, 4
program = Attention()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def tiga_attention(q, k, v):
    return attend(program, tg.Graph.triangular(q.shape[0]), q, k, v)


def torch_attention(q, k, v):
    return plain_attention(torch.ones(len(q), len(q)).tril().bool(), q, k, v)


def rotary(x, cos, sin):
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def two_readers(t, q, k, v):
    out = t(q, k, v)
    return out.relu(), out.tanh(), out


def residual_after(t, q, k, v, w):
    out = t(q, k, v)
    gate = q.flatten(1) @ w  # computed after the operator, needed by what follows it
    return (out.flatten(1) * gate.sigmoid() + gate).view_as(out)


# name, function of the attention and its tensors, shapes, what is left forward without and with gradients
U = (N, H, D)
CASES = [
    ("scale", lambda t, q, k, v: t(q * 0.5, k, v), (U,) * 3, [], []),
    ("bias of heads", lambda t, q, k, v, b: t(q + b, k, v), (*(U,) * 3, (H, 1)), [], []),
    ("relu", lambda t, q, k, v: t(q, k, v).relu(), (U,) * 3, [], []),
    ("scale, relu, gate", lambda t, q, k, v, g: t(q * 2, k, v).relu() * g, (U,) * 4, [], []),
    ("gate through a view", lambda t, q, k, v, g: t(q, k, v).reshape(N, -1) * g.sigmoid(), (*(U,) * 3, (N, H * D)), [], []),
    ("bias, elu", lambda t, q, k, v, b: F.elu(t(q, k, v).flatten(1) + b), (*(U,) * 3, (H * D,)), [], []),
    ("residual, silu", lambda t, q, k, v, x: F.silu(x + t(q, k, v)), (U,) * 4, [], []),
    ("gelu", lambda t, q, k, v: F.gelu(t(q, k, v)), (U,) * 3, [], []),
    ("two readers", two_readers, (U,) * 3, [], []),
    ("operand computed later", residual_after, (*(U,) * 3, (H * D, H * D)), ["mm"], ["mm"]),
    ("rms_norm", lambda t, q, k, v, w: t(F.rms_norm(q, (D,), w), k, v), (*(U,) * 3, (D,)), [], []),
    ("layer_norm", lambda t, q, k, v, w, b: t(F.layer_norm(q, (D,), w, b), k, v), (*(U,) * 3, (D,), (D,)), [], []),
    ("rows in two dimensions", lambda t, q, k, v: t((q.tanh() * 2).flatten(0, 1), k, v).unflatten(0, (2, 3)).exp(), ((2, 3, H, D), U, U), [], []),
    ("norm of the result", lambda t, q, k, v, w: F.rms_norm(t(q, k, v), (D,), w), (*(U,) * 3, (D,)), [], []),
]


def tensors(shapes):
    return [torch.randn(shape) for shape in shapes]


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def loss(outputs):
    return sum((o * torch.linspace(0.5, 2, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in as_tuple(outputs))


def check(fn, args, graphs, **options):
    """Compiled values and gradients, of what the function makes of tiga, against plain torch in float64."""
    wide = [a.double().requires_grad_() for a in args]
    want = fn(torch_attention, *wide)
    narrow = [a.clone().requires_grad_() for a in args]
    got = graphs.compile(lambda *a: fn(tiga_attention, *a), **options)(*narrow)
    for a, b in zip(as_tuple(got), as_tuple(want)):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)
    gradients = grad(loss(got), narrow, allow_unused=True)
    for a, b in zip(gradients, grad(loss(want), wide, allow_unused=True)):
        torch.testing.assert_close(a, None if b is None else b.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("fn", "shapes", "inference", "training"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_neighbours_move_into_the_program(fn, shapes, inference, training):
    args = tensors(shapes)
    graphs = Graphs()
    with torch.no_grad():
        compiled = graphs.compile(lambda *a: fn(tiga_attention, *a))
        for a, b in zip(as_tuple(compiled(*args)), as_tuple(fn(torch_attention, *args))):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert graphs.left() == inference and len(graphs.calls()) == 1
    torch._dynamo.reset()
    graphs = Graphs()
    check(fn, args, graphs)
    assert graphs.left() == training and len(graphs.calls()) == 1
    print(graphs.left(1))
