"""What operations of PyTorch's compiler mean in a program: one row each, as functions on program values.

A meaning gets the builder, the form of the operation's first tensor, and the operation's own arguments, tensors being
values. ELEMENTWISE ones compute element by element and so do not care how features are laid out in dimensions; LAYOUT
and VIEWS compute nothing; FOLDS sum over features; JOINS write a tensor of several.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tiga.builder import Value
from tiga.types import NAMES, is_one

aten, prims = torch.ops.aten, torch.ops.prims
Meaning = Callable[..., Any]


class Form(NamedTuple):
    """A tensor as an operation sees it: how many dimensions, of which `rows` are no features, and the features."""

    rank: int
    rows: int
    sizes: tuple


class Unfit(Exception):
    """An operation, or its arguments, have no place in a program; the text says why."""


def _unary(name: str) -> Meaning:
    return lambda b, form, x: b.emit(name, (x,))


def _binary(name: str, swap: bool = False) -> Meaning:
    return lambda b, form, x, y: b.emit(name, (y, x) if swap else (x, y))


def _scaled(name: str, swap: bool = False) -> Meaning:
    """add, sub and rsub, whose second argument may be multiplied."""

    def meaning(b: Any, form: Form, x: Any, y: Any, alpha: Any = 1) -> Value:
        y = y if alpha == 1 else b.emit("mul", (y, alpha))
        return b.emit(name, (y, x) if swap else (x, y))

    return meaning


def _power(b: Any, form: Form, x: Any, exponent: Any) -> Value:
    """Small powers as products, which kernels have."""
    if isinstance(exponent, (int, float)) and exponent in (1, 2, 3, 4):
        return functools.reduce(lambda y, _: b.emit("mul", (y, x)), range(int(exponent) - 1), x)
    known = {0.5: "sqrt", -0.5: "rsqrt"}
    if isinstance(exponent, float) and exponent in known:
        return b.emit(known[exponent], (x,))
    return b.emit("div", (1, x)) if exponent == -1 else b.emit("pow", (x, exponent))


def _clamp(b: Any, form: Form, x: Any, low: Any = None, high: Any = None) -> Value:
    x = x if low is None else b.emit("maximum", (x, low))
    return x if high is None else b.emit("minimum", (x, high))


def _to(b: Any, form: Form, x: Any, dtype: torch.dtype) -> Value:
    if dtype not in NAMES:
        raise Unfit(f"a cast to {dtype}")
    return b.lift(x).emit("to", NAMES[dtype])


def _same(b: Any, form: Form, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


# fmt: off
_POINTWISE: tuple[tuple[str, str, Meaning], ...] = (
    *[(name, "default", _unary(name)) for name in (
        "relu abs neg exp exp2 expm1 log log2 log1p sqrt rsqrt sin cos tan tanh sigmoid erf floor ceil sign asin acos "
        "atan sinh cosh isnan isinf").split()],
    ("reciprocal", "default", lambda b, form, x: b.emit("div", (1, x))),
    ("bitwise_not", "default", _unary("not")), ("logical_not", "default", _unary("not")),
    ("mul", "Tensor", _binary("mul")), ("mul", "Scalar", _binary("mul")),
    ("div", "Tensor", _binary("div")), ("div", "Scalar", _binary("div")),
    ("add", "Tensor", _scaled("add")), ("add", "Scalar", _scaled("add")),
    ("sub", "Tensor", _scaled("sub")), ("sub", "Scalar", _scaled("sub")),
    ("rsub", "Tensor", _scaled("sub", True)), ("rsub", "Scalar", _scaled("sub", True)),
    ("maximum", "default", _binary("maximum")), ("minimum", "default", _binary("minimum")),
    ("pow", "Tensor_Scalar", _power), ("pow", "Tensor_Tensor", _power), ("atan2", "default", _binary("atan2")),
    ("clamp", "default", _clamp), ("clamp", "Tensor", _clamp), ("clamp_min", "default", _clamp),
    ("clamp_max", "default", lambda b, form, x, high: b.emit("minimum", (x, high))),
    *[(name, kind, _binary(*row)) for kind in ("Tensor", "Scalar") for name, row in (
        ("lt", ("lt",)), ("le", ("le",)), ("gt", ("lt", True)), ("ge", ("le", True)), ("eq", ("eq",)),
        ("ne", ("ne",)), ("bitwise_and", ("and",)), ("bitwise_or", ("or",)), ("bitwise_xor", ("xor",)))],
    ("where", "self", lambda b, form, c, x, y: b.emit("where", (c, x, y))),
    ("clone", "default", _same), ("alias", "default", _same),
)
# fmt: on


# Features. Dimensions are the tensor's; in a program they are counted from the right.


def _dim(x: Value, dim: int, form: Form, more: int = 0) -> str:
    """A dimension of a tensor, of `more` dimensions, as a feature dimension of its value, which has all of them."""
    rank = form.rank + more
    if len(x.type.sizes) != form.rank - form.rows or dim % rank < form.rows:
        raise Unfit("an operation along the rows")
    return str(dim % rank - rank)


def _fold(name: str, mean: bool = False) -> Meaning:
    def meaning(b: Any, form: Form, x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Value:
        return _folded(b, form, x, name, mean, [dims] if isinstance(dims, int) else dims, keepdim)

    return meaning


def _folded(b: Any, form: Form, x: Any, name: str, mean: bool, dims: Any, keepdim: bool) -> Value:
    x, count = b.lift(x), 1
    if not dims:
        raise Unfit("a fold over rows")
    for d in sorted([_dim(x, d, form) for d in dims], key=int):
        count = count * form.sizes[int(d)]
        x = x.emit(name, d)
        x = x.emit("unsqueeze", d) if keepdim else x
    if mean and not isinstance(count, int):
        raise Unfit("a mean over a size that may change")
    return b.emit("div", (x, count)) if mean else x


def _var_mean(b: Any, form: Form, x: Any, dims: Any, *, correction: Any = 1, keepdim: bool = False) -> tuple:
    mean = _folded(b, form, x, "sum", True, dims, True)
    change = b.emit("sub", (x, mean))
    count = 1
    for d in dims:
        count = count * form.sizes[d % form.rank - form.rank]
    var = b.emit(
        "div", (_folded(b, form, b.emit("mul", (change, change)), "sum", False, dims, True), count - correction)
    )
    if not keepdim:
        drop = sorted([_dim(b.lift(x), d, form) for d in dims], key=int)
        for d in drop:
            mean, var = mean.emit("squeeze", d), var.emit("squeeze", d)
    return var, mean


def _unsqueeze(b: Any, form: Form, x: Any, dim: int) -> Value:
    return b.lift(x).emit("unsqueeze", _dim(x, dim, form, 1))


def _squeeze(b: Any, form: Form, x: Any, dim: Any) -> Value:
    for d in sorted([_dim(x, d, form) for d in ([dim] if isinstance(dim, int) else dim)], key=int):
        x = x.emit("squeeze", d) if is_one(x.type.sizes[int(d)]) else x
    return x


def _slice(b: Any, form: Form, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    d = _dim(x, dim, form)
    size = form.sizes[int(d)]
    if not all(isinstance(n, int) for n in (size, start or 0, end or 0)):
        raise Unfit("a slice of a size that may change")
    first, last, stride = slice(start, end, step).indices(size)
    return x.emit("slice", d, str(first), str(max(0, -((first - last) // stride))), str(stride))


def _cat(b: Any, form: Form, xs: Any, dim: int = 0) -> Value:
    xs = [b.lift(x) for x in xs]
    return b.emit("cat", tuple(xs), (_dim(xs[0], dim, form),))


def _permute(b: Any, form: Form, x: Any, dims: Any) -> Value:
    if form.rows and dims[0] != 0:
        raise Unfit("an operation along the rows")
    for d in dims[form.rows :]:
        _dim(x, d, form)
    return x.emit("permute", *[str(d % form.rank - form.rank) for d in dims[form.rows :]])


def _overloads(rows: tuple) -> dict[Any, Meaning]:
    """The rows whose operation this version of PyTorch has."""
    found = {}
    for name, overload, meaning in rows:
        op = getattr(getattr(aten, name, None), overload, None)
        if op is not None:
            found[op] = meaning
    return found


ELEMENTWISE = {**_overloads(_POINTWISE), prims.convert_element_type.default: _to}
FOLDS = _overloads(
    (
        ("sum", "dim_IntList", _fold("sum")),
        ("mean", "dim", _fold("sum", True)),
        ("amax", "default", _fold("amax")),
        ("amin", "default", _fold("amin")),
        ("var_mean", "correction", _var_mean),
    )
)
LAYOUT = {
    **_overloads(
        (
            ("expand", "default", _same),
            ("unsqueeze", "default", _unsqueeze),
            ("squeeze", "dim", _squeeze),
            ("squeeze", "dims", _squeeze),
            ("slice", "Tensor", _slice),
            ("permute", "default", _permute),
        )
    ),
    operator.getitem: lambda b, form, xs, k: xs[k],
}
JOINS = _overloads((("cat", "default", _cat),))
VIEWS = frozenset([aten.view.default, aten.reshape.default, aten._unsafe_view.default])
MEANINGS = {**ELEMENTWISE, **FOLDS, **LAYOUT, **JOINS, **dict.fromkeys(VIEWS, _same)}
