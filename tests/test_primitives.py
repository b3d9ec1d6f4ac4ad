"""Every row of PRIMITIVES as a program of one line: value, derivatives and transforms against torch's own."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import grad

from tiga.primitives import PRIMITIVES
from tiga.types import DTYPES, NAMES

propagate = torch.ops.tiga.propagate.default
NUM_DST, NUM_SRC = 2, 3


@dataclass(frozen=True)
class Row:
    """sizes: features of each argument; "shared" first for a table or parameter. draw: numbers inside the domain."""

    meaning: Callable[..., Any]
    sizes: tuple = ((2, 3),)
    attrs: str = ""
    draw: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda x: x)
    smooth: bool = True


def positive(x):
    return x.abs() + 0.5


def inside(x):
    return x.tanh() * 0.9


def integer(x):
    return (x * 10).to(torch.int64)


def boolean(x):
    return x > 0


PAIR, BROADCAST = ((2, 3), (2, 3)), ((2, 1), (1, 3))
UNARY = {
    name: Row(getattr(torch, name))
    for name in (
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "exp",
        "exp2",
        "expm1",
        "sin",
        "cos",
        "tan",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "sigmoid",
        "erf",
        "relu",
        "isnan",
        "isinf",
        "isfinite",
    )
}
ROWS = {
    **UNARY,
    **{name: Row(getattr(torch, name), draw=positive) for name in ("log", "log2", "log1p", "sqrt", "rsqrt")},
    **{name: Row(getattr(torch, name), draw=inside) for name in ("asin", "acos")},
    "norm": Row(torch.sqrt, draw=positive),
    **{
        name: Row(getattr(torch, name), BROADCAST)
        for name in ("add", "sub", "mul", "maximum", "minimum", "atan2", "lt", "le", "eq", "ne")
    },
    **{name: Row(getattr(torch, name), PAIR, draw=positive) for name in ("div", "pow", "fmod", "remainder")},
    **{name: Row(getattr(torch, "bitwise_" + name), PAIR, draw=integer, smooth=False) for name in ("and", "or", "xor")},
    "not": Row(torch.bitwise_not, draw=boolean, smooth=False),
    "where": Row(lambda c, x, y: torch.where(c, x, y), ((2, 3), (2, 1), (1, 3))),
    "to": Row(lambda x: x.to(torch.float32), attrs="f32"),
    "spread": Row(lambda x: x, attrs="edge"),
    "sum": Row(lambda x: x.sum(-2), attrs="-2"),
    "amax": Row(lambda x: x.amax(-1), attrs="-1"),
    "amin": Row(lambda x: x.amin(-1), attrs="-1"),
    "unsqueeze": Row(lambda x: x.unsqueeze(-2), attrs="-2"),
    "squeeze": Row(lambda x: x.squeeze(-2), ((1, 3),), "-2"),
    "permute": Row(lambda x: x.movedim(-1, -3), ((2, 3, 4),), "-1 -3 -2"),
    "slice": Row(lambda x: x[..., 1:5:2], ((2, 5),), "-1 1 2 2"),
    "unslice": Row(
        lambda g, x: torch.stack([0 * g[..., 0], g[..., 0], 0 * g[..., 0], g[..., 1], 0 * g[..., 0]], -1),
        ((2, 2), (2, 5)),
        "-1 1 2 2",
    ),
    "expand_like": Row(lambda g, x: g + 0 * x.detach(), ((2, 1), (2, 3))),
    "reshape_like": Row(lambda g, x: g.reshape(*g.shape[:-2], 3, 2), ((2, 3), (3, 2))),
    "reshape": Row(lambda x: x.reshape(*x.shape[:-2], 3, 2), attrs="3 -1"),
    "zeros_like": Row(torch.zeros_like),
    "cat": Row(lambda x, y, z: torch.cat([x, y, z], -1), ((2, 3), (2, 1), (2, 2)), "-1"),
    "part": Row(lambda g, x, y: g[..., 3:], ((2, 5), (2, 3), (2, 2)), "-1 1"),
    "linear": Row(lambda x, w: torch.einsum("...i,oi->...o", x, w), ((2, 3), ("shared", 4, 3))),
    "gather": Row(lambda table, i: table[i], (("shared", 4, 2), (3,))),
    "size": Row(lambda x: torch.tensor(x.shape[-2]), attrs="-2", smooth=False),
    "arange": Row(lambda x: torch.arange(2)[:, None].expand(*x.shape[:-2], 2, 1), attrs="-2", smooth=False),
    "number": Row(lambda x: torch.arange(len(x)), smooth=False),
}
INTEGERS = {"gather": 1, "where": 0}  # the argument that is no floating value
UNCHANGED = {"expand_like", "reshape_like", "part", "unslice"}  # only the first argument carries values


def arguments(name, seed=0):
    """Fields of every edge, and parameters."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for k, sizes in enumerate(ROWS[name].sizes):
        shared = sizes[:1] == ("shared",)
        x = torch.randn(*(sizes[1:] if shared else (NUM_DST * NUM_SRC, *sizes)), generator=draw, dtype=torch.float64)
        if INTEGERS.get(name) == k:
            x = (x * 100).to(torch.int64) % 4 if name == "gather" else x > 0
        else:
            x = ROWS[name].draw(x)
        found.append(x.requires_grad_(x.is_floating_point()))
    return found


def program(name):
    """On the edges of a dense relation."""
    row, head, refs = ROWS[name], ["tiga/1 relation dense"], []
    for k, (sizes, x) in enumerate(zip(row.sizes, arguments(name))):
        shared = sizes[:1] == ("shared",)
        place = "shared" if shared else "edge"
        marks = ", ".join("1" if s == 1 else "*" for s in (sizes[1:] if shared else sizes))
        head.append(f"operand {k} {place} x{k} {NAMES[x.dtype]} [{marks}]")
        refs.append(f"{place}.x{k}")
    line = " ".join(["%0 =", name, *([] if name == "number" else refs), row.attrs]).strip()
    last = "return %0"
    if name == "size":
        last = "%1 = spread %0 edge\nreturn %1"
    return "\n".join([*head, line, last])


def call(name):
    text = program(name)
    return lambda *xs: propagate(text, list(xs), [NUM_DST, NUM_SRC], [])[0]


def meaning(name):
    def run(*xs):
        out = ROWS[name].meaning(*xs)
        return out.expand(NUM_DST * NUM_SRC) if name == "size" else out

    return run


def same(x, y):
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_every_primitive_is_tested():
    assert set(ROWS) | {"rand", "kept"} == set(PRIMITIVES)  # kept: of kernels alone, tested where tiles are skipped


@pytest.mark.parametrize("name", ROWS)
def test_value(name):
    xs = arguments(name)
    same(call(name)(*xs), meaning(name)(*xs))


SMOOTH = [name for name, row in ROWS.items() if row.smooth and row.meaning(*arguments(name)).dtype.is_floating_point]


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives(name):
    """The gradient, the gradient of a function of the gradient, and the tangent."""
    xs = arguments(name)
    wrt = [x for k, x in enumerate(xs) if x.requires_grad and not (name in UNCHANGED and k)]
    found = []
    for run in (call(name), meaning(name)):
        out = run(*xs)
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos().requires_grad_()
        first = (
            [
                torch.zeros_like(x) if g is None else g
                for x, g in zip(wrt, grad(out, wrt, weight, create_graph=True, allow_unused=True))
            ]
            if out.requires_grad
            else [torch.zeros_like(x) for x in wrt]
        )
        second = [None] * (len(wrt) + 1)
        if any(g.requires_grad for g in first):
            second = grad(sum(g.sin().sum() for g in first), [*wrt, weight], allow_unused=True)
        moving = {id(x) for x in wrt}
        still = [x.detach() for x in xs]

        def on(*values, run=run, moving=moving, still=still):
            rest = iter(values)
            return run(*[next(rest) if id(x) in moving else y for x, y in zip(xs, still)])

        _, tangent = torch.func.jvp(on, tuple(x.detach() for x in wrt), tuple(x.detach().cos() for x in wrt))
        found.append(
            [*first, *[torch.zeros_like(x) if g is None else g for x, g in zip([*wrt, weight], second)], tangent]
        )
    for x, y in zip(*found):
        same(x, y)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("number", "size", "arange")])
def test_vmap(name):
    """Over all arguments, and over each alone; of the gradient too where there is one."""
    run, samples = call(name), [arguments(name, seed) for seed in range(3)]
    stacked = [torch.stack(xs).detach() for xs in zip(*samples)]
    alone = [
        tuple(0 if k == at else None for k in range(len(stacked)))
        for at in range(len(stacked) if name not in UNCHANGED else 1)
    ]
    for dims in [(0,) * len(stacked), *alone]:
        xs = [x if d == 0 else x[0] for x, d in zip(stacked, dims)]
        each = [[x[s] if d == 0 else x for x, d in zip(xs, dims)] for s in range(3)]
        if name == "zeros_like":
            continue  # its value does not depend on its argument
        same(torch.func.vmap(run, dims)(*xs), torch.stack([meaning(name)(*x) for x in each]))
        if name in SMOOTH:
            which = tuple(k for k, x in enumerate(xs) if x.is_floating_point() and not (name in UNCHANGED and k))
            got = torch.func.vmap(torch.func.grad(lambda *x: run(*x).sin().sum(), which), dims)(*xs)
            want = [torch.func.grad(lambda *x: meaning(name)(*x).sin().sum(), which)(*x) for x in each]
            for x, ys in zip(got, zip(*want)):
                same(x, torch.stack(ys))


@pytest.mark.parametrize("name", ["relu", "abs", "maximum", "minimum", "amax", "pow", "norm", "sqrt"])
def test_gradient_at_kinks_and_ends(name):
    """Where torch has to choose, tiga chooses the same; the length of a vector has gradient 0 at 0, twice."""
    values = {
        "relu": [[0.0, 1.0]],
        "abs": [[0.0, -1.0]],
        "maximum": [[1.0, 2.0], [1.0, 1.0]],
        "minimum": [[1.0, 2.0], [1.0, 1.0]],
        "amax": [[2.0, 2.0]],
        "pow": [[0.0, 3.0], [2.0, 0.0]],
        "norm": [[0.0, 4.0]],
        "sqrt": [[4.0, 9.0]],
    }[name]
    text = "\n".join(
        [
            "tiga/1 relation dense",
            *[f"operand {k} edge x{k} f64 [*]" for k in range(len(values))],
            " ".join(["%0 =", name, *[f"edge.x{k}" for k in range(len(values))], *(["-1"] if name == "amax" else [])]),
            "return %0",
        ]
    )
    xs = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in values]
    got = grad(propagate(text, xs, [1, 1], [])[0].sum(), xs, create_graph=name == "norm")
    if name == "norm":
        assert got[0].tolist() == [[0.0, 0.25]]
        assert grad(got[0].sum(), xs[0])[0].tolist() == [[0.0, -1 / 32]]
        return
    function = (lambda x: x.amax(-1)) if name == "amax" else getattr(torch, name)
    for x, y in zip(got, grad(function(*xs).sum(), xs)):
        same(x, y)


def test_powers_by_numbers():
    for base, exponent in ((None, 3.0), (None, 2), (None, -1.5), (None, 0), (None, 1), (2.0, None), (0.5, None)):
        x = torch.tensor([[0.7, 1.3, 2.0]], dtype=torch.float64, requires_grad=True)
        word = [str(v) if isinstance(v, int) else float.hex(v) if v is not None else "edge.x" for v in (base, exponent)]
        out = propagate(
            f"tiga/1 relation dense\noperand 0 edge x f64 [*]\n%0 = pow {word[0]} {word[1]}\nreturn %0", [x], [1, 1], []
        )[0]
        want = torch.pow(x if base is None else base, x if exponent is None else exponent)
        same(out, want)
        for _ in range(2):
            g, h = (grad(y.sum(), x, create_graph=True, allow_unused=True)[0] for y in (out, want))
            same(torch.zeros_like(x) if g is None else g, torch.zeros_like(x) if h is None else h)
            if g is None or not g.requires_grad:
                break
            out, want = g, h


def test_random_numbers_are_uniform_and_counted():
    text = "\n".join(
        [
            "tiga/1 relation dense",
            "operand 0 shared seed i64 []",
            "operand 1 edge x f32 [*]",
            "%0 = rand shared.seed edge.x",
            "return %0",
        ]
    )
    x = torch.zeros(40 * 50, 8)

    def draw(seed):
        return propagate(text, [torch.tensor(seed), x], [40, 50], [])[0]

    u = draw(7)
    assert torch.equal(u, draw(7)) and not torch.equal(u, draw(8))
    assert 0 <= u.min() and u.max() < 1 and len(u.unique()) > 0.99 * u.numel()
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.numel()) ** 0.5 and abs(u.var() - 1 / 12) < 0.005
    assert (torch.histc(u, 16, 0, 1) / (u.numel() / 16) - 1).abs().max() < 6 * (16 / u.numel()) ** 0.5
    centred = u - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), draw(8) - 0.5):
        assert abs((centred * other).mean()) < 5 / 12 / u.numel() ** 0.5
    # the same edge has the same number on every relation and in every block
    listed = propagate(
        text.replace("dense", "csr 2"),
        [torch.tensor(7), x[:100], torch.tensor([0, 60, 100]), torch.arange(100) % 3],
        [2, 3],
        [],
    )[0]
    assert torch.equal(listed, u[:100])


# Types.

KINDS = ("rows", "0-d", "number")
OPERATIONS = {
    "add": torch.add,
    "div": torch.div,
    "mul": torch.mul,
    "lt": lambda x, y: x < y,
    "maximum": torch.maximum,
    "pow": torch.pow,
    "where": None,
}


def word(kind, dtype, k):
    """(the operand's line, its reference, the tensor or number)."""
    if kind == "number":
        value = 2.0 if dtype in (torch.float32, torch.float64) else 2
        return None, float.hex(value) if isinstance(value, float) else str(value), value
    place, sizes = ("edge", (1,)) if kind == "rows" else ("shared", ())
    return f"operand {{}} {place} x{k} {NAMES[dtype]} []", f"{place}.x{k}", torch.full(sizes, 1 + k).to(dtype)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "kinds", [pair for pair in itertools.product(KINDS, repeat=2) if pair != ("number", "number")], ids="-".join
)
def test_dtypes_are_those_of_torch(operation, kinds):
    """For all pairs of dtypes; numbers are Python ints or floats."""
    pairs = [
        p
        for p in itertools.product(DTYPES.values(), repeat=2)
        if all(k != "number" or d in (torch.int64, torch.float64) for k, d in zip(kinds, p))
    ]
    for pair in pairs:
        lines, refs, values = zip(*[word(kind, dtype, k) for k, (kind, dtype) in enumerate(zip(kinds, pair))])
        if torch.maximum is OPERATIONS[operation] and "number" in kinds:
            continue  # torch.maximum takes no numbers
        try:
            condition = torch.ones(1).bool()
            want = torch.where(condition, *values) if operation == "where" else OPERATIONS[operation](*values)
        except RuntimeError:
            continue  # a pair that torch lacks
        heads = [line for line in lines if line is not None] + (
            ["operand {} edge c bool []"] if operation == "where" else []
        )
        tensors = [v for v in values if isinstance(v, torch.Tensor)] + ([condition] if operation == "where" else [])
        text = "\n".join(
            [
                "tiga/1 relation dense",
                *[h.format(n) for n, h in enumerate(heads)],
                " ".join(["%0 =", operation, *(["edge.c"] if operation == "where" else []), *refs]),
                "%1 = spread %0 edge",
                "return %1",
            ]
        )
        got = propagate(text, tensors, [1, 1], [])[0]
        assert got.dtype == want.dtype, (operation, kinds, pair, got.dtype, want.dtype)
        torch.testing.assert_close(got, want.reshape(1), rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["exp", "sqrt", "abs", "sum", "isnan", "relu"])
def test_dtypes_of_one_argument(name):
    function = (lambda x: x.sum(-1)) if name == "sum" else getattr(torch, name)
    for dtype in DTYPES.values():
        x = torch.ones(1, 2).to(dtype)
        try:
            want = function(x)
        except RuntimeError:
            continue
        line = f"%0 = {name} edge.x" + (" -1" if name == "sum" else "")
        text = f"tiga/1 relation dense\noperand 0 edge x {NAMES[dtype]} [*]\n{line}\nreturn %0"
        got = propagate(text, [x], [1, 1], [])[0]
        assert got.dtype == want.dtype and math.isclose(
            float(got.flatten()[0]), float(want.flatten()[0]), rel_tol=1e-2
        ), (dtype, got.dtype, want.dtype)
