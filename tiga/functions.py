"""What torch functions mean on traced values: one row a name, each written with the primitives.

A traced value has the shape (num_edges, *features): dimension 0 is the edges and cannot be folded or moved; -1 is the
last feature.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from tiga.errors import TraceError
from tiga.types import promote

FUNCTIONS: dict[str, Callable] = {}
# fmt: off
ALIASES = {
    "true_divide": "div", "truediv": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "rtruediv": "rdiv",
    "absolute": "abs", "negative": "neg", "less": "lt", "greater": "gt", "less_equal": "le", "greater_equal": "ge",
    "not_equal": "ne", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose",
    "clip": "clamp", "arctan": "atan", "arctan2": "atan2", "arcsin": "asin", "arccos": "acos", "fix": "trunc",
    "view": "reshape", "view_as": "reshape_as", "sgn": "sign", "vector_norm": "norm", "linalg_vector_norm": "norm",
    "linalg_norm": "norm", "frobenius_norm": "norm", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "special_expit": "sigmoid", "linalg_vecdot": "vecdot", "linalg_cross": "cross", "iand": "bitwise_and",
    "invert": "bitwise_not", "floordiv": "floor_divide", "mod": "remainder", "rmod": "rremainder",
    "hardtanh_": "hardtanh", "special_erf": "erf", "log_sigmoid": "logsigmoid", "abs_": "abs",
}
# fmt: on


def call(tracer: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """What a torch function means on traced values."""
    return tracer.once(name, FUNCTIONS.get(name) or row_of(name), args, kwargs)


def row_of(name: str) -> Callable:
    """The row of a torch function; in-place spellings and functions without a row are refused by name."""
    name = name.strip("_") if name[:2] == "__" else name
    name = ALIASES.get(name, name)
    row = FUNCTIONS.get(name)
    if row is not None:
        return row
    if name[-1:] == "_":
        raise TraceError(
            f"torch.{name} changes a value in place; an edge function gives new ones. Write x = x.{name[:-1]}(...)."
        )
    raise TraceError(
        f"torch.{name} is not supported in an edge function. Compute it outside for nodes or parameters, or write "
        "it with "
        "pointwise functions, sums over features and where."
    )


def meaning(*names: str) -> Callable:
    def register(fn: Callable) -> Callable:
        for name in names:
            FUNCTIONS[name] = fn
        return fn

    return register


def dim_of(x: Any, dim: Any, extra: int = 0) -> str:
    """A user's dimension as a feature dimension counted from the right, as text."""
    rank = len(x.type.sizes) + extra
    d = operator.index(dim)
    if d > 0:
        d -= rank + 1
    if d == 0 or d == -(rank + 1):
        raise TraceError(
            "dimension 0 of a traced value is the edges. Fold over edges with a reducer; "
            "feature dimensions are 1, 2, ... or -1, -2, ..."
        )
    if not -rank <= d < 0:
        raise TraceError(f"dimension {dim} of a traced value with {rank} feature dimensions (and the edges).")
    return str(operator.index(d))


def _plain(name: str, arity: int) -> None:
    def unary(t: Any, x: Any) -> Any:
        return t.emit(name, (x,))

    def binary(t: Any, x: Any, y: Any) -> Any:
        return t.emit(name, (x, y))

    FUNCTIONS[name] = unary if arity == 1 else binary


for _name in (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tan",
    "atan",
    "asin",
    "acos",
    "sinh",
    "cosh",
    "tanh",
    "sigmoid",
    "erf",
    "abs",
    "neg",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "isnan",
    "isinf",
    "isfinite",
):
    _plain(_name, 1)
for _name in ("mul", "maximum", "minimum", "fmod", "remainder", "lt", "le", "eq", "ne", "atan2"):
    _plain(_name, 2)


@meaning("add")
def _add(t: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return t.emit("add", (x, y if alpha == 1 else t.emit("mul", (y, alpha))))


@meaning("sub")
def _sub(t: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return t.emit("sub", (x, y if alpha == 1 else t.emit("mul", (y, alpha))))


@meaning("div")
def _div(t: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return t.emit("div", (x, y))
    x, y = t.lift(x), t.lift(y)
    if x.type.floating or y.type.floating:
        return t.emit(rounding_mode, (t.emit("div", (x, y)),))
    # integers: float32 would lose digits, and the result is an integer again
    return t.emit(rounding_mode, (t.emit("div", (x.emit("to", "f64"), y)),)).emit("to", promote((x.type, y.type))[0])


def _swapped(name: str) -> Callable:
    def row(t: Any, x: Any, y: Any) -> Any:
        return t.emit(name, (y, x))

    return row


for _name, _swap in (
    ("rsub", "sub"),
    ("rdiv", "div"),
    ("gt", "lt"),
    ("ge", "le"),
    ("radd", "add"),
    ("rmul", "mul"),
    ("rremainder", "remainder"),
):
    FUNCTIONS[_name] = _swapped(_swap)


@meaning("pow")
def _pow(t: Any, x: Any, y: Any) -> Any:
    if isinstance(y, (int, float)) and not isinstance(y, bool):
        if y == 1:
            return x
        if y == 2:
            return t.emit("mul", (x, x))
    return t.emit("pow", (x, y))


@meaning("rpow")
def _rpow(t: Any, x: Any, y: Any) -> Any:
    return t.emit("pow", (y, x))


@meaning("square")
def _square(t: Any, x: Any) -> Any:
    return t.emit("mul", (x, x))


@meaning("reciprocal")
def _reciprocal(t: Any, x: Any) -> Any:
    return t.emit("div", (1, x))


@meaning("log10")
def _log10(t: Any, x: Any) -> Any:
    return t.emit("mul", (t.emit("log", (x,)), 1 / math.log(10)))


@meaning("round")
def _round(t: Any, x: Any, decimals: int = 0) -> Any:
    if decimals:
        raise TraceError(
            "round to decimals is not supported in an edge function. Write (x * 10 ** d).round() / 10 ** d."
        )
    return t.emit("round", (x,))


@meaning("floor_divide")
def _floor_divide(t: Any, x: Any, y: Any) -> Any:
    return _div(t, x, y, "floor")


def _logical(name: str, primitive: str) -> None:
    def row(t: Any, x: Any, y: Any) -> Any:
        return t.emit(primitive, (_bool(t, x), _bool(t, y)))

    def bits(t: Any, x: Any, y: Any) -> Any:
        return t.emit(primitive, (x, y))

    FUNCTIONS["logical_" + name], FUNCTIONS["bitwise_" + name] = row, bits


for _name in ("and", "or", "xor"):
    _logical(_name, _name)


def _bool(t: Any, x: Any) -> Any:
    x = t.lift(x)
    return x if x.type.dtype == "bool" else t.emit("ne", (x, 0))


@meaning("logical_not")
def _logical_not(t: Any, x: Any) -> Any:
    return t.emit("not", (_bool(t, x),))


@meaning("bitwise_not")
def _bitwise_not(t: Any, x: Any) -> Any:
    return t.emit("not", (x,))


@meaning("where")
def _where(t: Any, condition: Any, input: Any, other: Any) -> Any:
    return t.emit("where", (_bool(t, condition), input, other))


@meaning("masked_fill")
def _masked_fill(t: Any, x: Any, mask: Any, value: Any) -> Any:
    return t.emit("where", (_bool(t, mask), value, x))


@meaning("clamp")
def clamp(t: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    """Inside the bounds, and on them, the gradient passes, as in torch."""
    x = t.lift(x)
    if min is not None:
        x = t.emit("where", (t.emit("lt", (x, min)), min, x))
    if max is not None:
        x = t.emit("where", (t.emit("lt", (max, x)), max, x))
    return x


@meaning("clamp_min")
def _clamp_min(t: Any, x: Any, min: Any) -> Any:
    return clamp(t, x, min=min)


@meaning("clamp_max")
def _clamp_max(t: Any, x: Any, max: Any) -> Any:
    return clamp(t, x, max=max)


@meaning("lerp")
def _lerp(t: Any, x: Any, end: Any, weight: Any) -> Any:
    return t.emit("add", (x, t.emit("mul", (weight, t.emit("sub", (end, x))))))
