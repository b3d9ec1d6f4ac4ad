"""What torch functions mean on traced values: one row a name, each written with the primitives.

A traced value has the shape (num_edges, *features): dimension 0 is the edges and cannot be folded or moved; -1 is the last feature.
"""
from __future__ import annotations

import math
import operator
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from tiga.errors import TraceError
from tiga.types import NAMES, is_one, promote

FUNCTIONS: dict[str, Callable] = {}
ALIASES = {"true_divide": "div", "truediv": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "rtruediv": "rdiv", "absolute": "abs", "negative": "neg",
            "less": "lt", "greater": "gt", "less_equal": "le", "greater_equal": "ge", "not_equal": "ne", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose",
            "swapdims": "transpose", "clip": "clamp", "arctan": "atan", "arctan2": "atan2", "arcsin": "asin", "arccos": "acos", "fix": "trunc", "view": "reshape",
            "view_as": "reshape_as", "sgn": "sign", "vector_norm": "norm", "linalg_vector_norm": "norm", "linalg_norm": "norm", "frobenius_norm": "norm", "and": "bitwise_and",
            "or": "bitwise_or", "xor": "bitwise_xor", "special_expit": "sigmoid", "linalg_vecdot": "vecdot", "linalg_cross": "cross", "iand": "bitwise_and", "invert": "bitwise_not",
            "floordiv": "floor_divide", "mod": "remainder", "rmod": "rremainder", "hardtanh_": "hardtanh", "special_erf": "erf", "log_sigmoid": "logsigmoid", "abs_": "abs"}


def call(tracer: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """The row of a torch function; in-place spellings and functions without a row are refused by name."""
    if name[:2] == "__":
        name = name.strip("_")
    name = ALIASES.get(name, name)
    row = FUNCTIONS.get(name)
    if row is None:
        if name[-1:] == "_":
            raise TraceError(f"torch.{name} changes a value in place; an edge function gives new ones. Write x = x.{name[:-1]}(...).")
        raise TraceError(f"torch.{name} is not supported in an edge function. Compute it outside for nodes or parameters, or write it with "
                         "pointwise functions, sums over features and where.")
    return row(tracer, *args, **kwargs)


def _row(*names: str) -> Callable:
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
        raise TraceError("dimension 0 of a traced value is the edges. Fold over edges with a reducer; feature dimensions are 1, 2, ... or -1, -2, ...")
    if not -rank <= d < 0:
        raise TraceError(f"dimension {dim} of a traced value with {rank} feature dimensions (and the edges).")
    return str(operator.index(d))


def _dims(x: Any, dim: Any) -> list[str]:
    """The feature dimensions a fold names, the last first, so that the others keep their numbers from the right."""
    if dim is None:
        raise TraceError("a fold over all dimensions would fold the edges. Name the feature dimensions: dim=-1, or dim=(1, 2).")
    dims = [dim_of(x, d) for d in dim] if isinstance(dim, (tuple, list)) else [dim_of(x, dim)]
    return sorted(set(dims), key=int)


def _plain(name: str, arity: int) -> None:
    def unary(t: Any, x: Any) -> Any:
        return t.emit(name, (x,))

    def binary(t: Any, x: Any, y: Any) -> Any:
        return t.emit(name, (x, y))
    FUNCTIONS[name] = unary if arity == 1 else binary


for _name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "atan", "asin", "acos", "sinh", "cosh", "tanh", "sigmoid", "erf", "abs",
              "neg", "sign", "floor", "ceil", "trunc", "isnan", "isinf", "isfinite"):
    _plain(_name, 1)
for _name in ("mul", "maximum", "minimum", "fmod", "remainder", "lt", "le", "eq", "ne", "atan2"):
    _plain(_name, 2)


@_row("add")
def _add(t: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return t.emit("add", (x, y if alpha == 1 else t.emit("mul", (y, alpha))))


@_row("sub")
def _sub(t: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return t.emit("sub", (x, y if alpha == 1 else t.emit("mul", (y, alpha))))


@_row("div")
def _div(t: Any, x: Any, y: Any, rounding_mode: Optional[str] = None) -> Any:
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


for _name, _swap in (("rsub", "sub"), ("rdiv", "div"), ("gt", "lt"), ("ge", "le"), ("radd", "add"), ("rmul", "mul"), ("rremainder", "remainder")):
    FUNCTIONS[_name] = _swapped(_swap)


@_row("pow")
def _pow(t: Any, x: Any, y: Any) -> Any:
    if isinstance(y, (int, float)) and not isinstance(y, bool):
        if y == 1:
            return x
        if y == 2:
            return t.emit("mul", (x, x))
    return t.emit("pow", (x, y))


@_row("rpow")
def _rpow(t: Any, x: Any, y: Any) -> Any:
    return t.emit("pow", (y, x))


@_row("square")
def _square(t: Any, x: Any) -> Any:
    return t.emit("mul", (x, x))


@_row("reciprocal")
def _reciprocal(t: Any, x: Any) -> Any:
    return t.emit("div", (1, x))


@_row("log10")
def _log10(t: Any, x: Any) -> Any:
    return t.emit("mul", (t.emit("log", (x,)), 1 / math.log(10)))


@_row("round")
def _round(t: Any, x: Any, decimals: int = 0) -> Any:
    if decimals:
        raise TraceError("round to decimals is not supported in an edge function. Write (x * 10 ** d).round() / 10 ** d.")
    return t.emit("round", (x,))


@_row("floor_divide")
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


@_row("logical_not")
def _logical_not(t: Any, x: Any) -> Any:
    return t.emit("not", (_bool(t, x),))


@_row("bitwise_not")
def _bitwise_not(t: Any, x: Any) -> Any:
    return t.emit("not", (x,))


@_row("where")
def _where(t: Any, condition: Any, input: Any, other: Any) -> Any:
    return t.emit("where", (_bool(t, condition), input, other))


@_row("masked_fill")
def _masked_fill(t: Any, x: Any, mask: Any, value: Any) -> Any:
    return t.emit("where", (_bool(t, mask), value, x))


@_row("clamp")
def _clamp(t: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    """Inside the bounds, and on them, the gradient passes, as in torch."""
    x = t.lift(x)
    if min is not None:
        x = t.emit("where", (t.emit("lt", (x, min)), min, x))
    if max is not None:
        x = t.emit("where", (t.emit("lt", (max, x)), max, x))
    return x


@_row("clamp_min")
def _clamp_min(t: Any, x: Any, min: Any) -> Any:
    return _clamp(t, x, min=min)


@_row("clamp_max")
def _clamp_max(t: Any, x: Any, max: Any) -> Any:
    return _clamp(t, x, max=max)


@_row("lerp")
def _lerp(t: Any, x: Any, end: Any, weight: Any) -> Any:
    return t.emit("add", (x, t.emit("mul", (weight, t.emit("sub", (end, x))))))


# ---- activations ------------------------------------------------------------------------------------------------------------------------------

def _inplace(inplace: bool) -> None:
    if inplace:
        raise TraceError("inplace=True changes a value in place; an edge function gives new ones. Leave inplace out.")


@_row("relu")
def _relu(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("relu", (x,))


@_row("silu")
def _silu(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("mul", (x, t.emit("sigmoid", (x,))))


@_row("gelu")
def _gelu(t: Any, x: Any, approximate: str = "none") -> Any:
    x = t.lift(x)
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * (2 / math.pi) ** 0.5
        return x * 0.5 * (t.emit("tanh", (inner,)) + 1)
    return x * 0.5 * (t.emit("erf", (x * 2 ** -0.5,)) + 1)


@_row("leaky_relu")
def _leaky_relu(t: Any, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("where", (t.emit("lt", (0, x)), x, t.emit("mul", (x, negative_slope))))


@_row("elu")
def _elu(t: Any, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False) -> Any:
    _inplace(inplace)
    x = t.lift(x)
    below = t.emit("expm1", (t.emit("where", (t.emit("lt", (0, x)), 0.0, x * input_scale if input_scale != 1 else x)),))
    return t.emit("where", (t.emit("lt", (0, x)), x * scale, below * (alpha * scale)))


@_row("selu")
def _selu(t: Any, x: Any, inplace: bool = False) -> Any:
    return _elu(t, x, 1.6732632423543772, 1.0507009873554805, 1.0, inplace)


@_row("softplus")
def _softplus(t: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    x = t.lift(x)
    scaled = x * beta if beta != 1 else x
    far = t.emit("lt", (threshold, scaled))
    near = t.emit("log1p", (t.emit("exp", (t.emit("where", (far, 0.0, scaled)),)),))
    return t.emit("where", (far, x, near / beta if beta != 1 else near))


@_row("logsigmoid")
def _logsigmoid(t: Any, x: Any) -> Any:
    return -_softplus(t, -t.lift(x))


@_row("mish")
def _mish(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("mul", (x, t.emit("tanh", (_softplus(t, x),))))


@_row("softsign")
def _softsign(t: Any, x: Any) -> Any:
    return t.emit("div", (x, t.emit("add", (t.emit("abs", (x,)), 1))))


@_row("hardtanh", "relu6")
def _hardtanh(t: Any, x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    _inplace(inplace)
    return _clamp(t, x, min_val, max_val)


FUNCTIONS["relu6"] = lambda t, x, inplace=False: _hardtanh(t, x, 0.0, 6.0, inplace)


@_row("hardsigmoid")
def _hardsigmoid(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return _clamp(t, t.lift(x) + 3, 0.0, 6.0) / 6


@_row("hardswish")
def _hardswish(t: Any, x: Any, inplace: bool = False) -> Any:
    return t.emit("mul", (x, _hardsigmoid(t, x, inplace)))


@_row("dropout")
def _dropout(t: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """A mask of (seed, edge number, feature); the seed is drawn from torch's generator, outside the operator."""
    _inplace(inplace)
    x = t.lift(x)
    if not training or p == 0:
        return x
    if not 0 <= p <= 1:
        raise TraceError(f"dropout probability {p}; it lies in [0, 1].")
    if p == 1:
        return x * 0.0
    keep = t.emit("le", (p, t.emit("rand", (t.seed(), x))))
    return t.emit("where", (keep, x * (1 / (1 - p)), 0.0))


# ---- folds over features ------------------------------------------------------------------------------------------------------------------------

def _keep(t: Any, x: Any, dims: list[str], keepdim: bool) -> Any:
    """Put size 1 back for the folded dimensions, the last last."""
    if keepdim:
        for d in dims:
            x = x.emit("unsqueeze", d)
    return x


def _fold(t: Any, name: str, x: Any, dim: Any, keepdim: bool) -> Any:
    x = t.lift(x)
    dims = _dims(x, dim)
    for d in dims:
        x = x.emit(name, d)
        dims = dims
    return x


def _folded(t: Any, name: str, x: Any, dim: Any, keepdim: bool) -> Any:
    """Fold from the left, so that dimensions counted from the right stay where they are."""
    x = t.lift(x)
    for d in _dims(x, dim):
        x = x.emit(name, d)
        if keepdim:
            x = x.emit("unsqueeze", d)
    return x


def _count(t: Any, x: Any, dim: Any) -> Any:
    count: Any = 1
    for d in _dims(x, dim):
        size = x.emit("size", d)
        count = size if isinstance(count, int) else count * size
    return count


@_row("sum")
def _sum(t: Any, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x = t.lift(x)
    return _folded(t, "sum", x if dtype is None else x.emit("to", NAMES[dtype]), dim, keepdim)


@_row("mean")
def _mean(t: Any, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x = t.lift(x)
    x = x if dtype is None else x.emit("to", NAMES[dtype])
    return _folded(t, "sum", x, dim, keepdim) / _count(t, x, dim)


@_row("amax")
def _amax(t: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _folded(t, "amax", x, dim, keepdim)


@_row("amin")
def _amin(t: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _folded(t, "amin", x, dim, keepdim)


@_row("max")
def _max(t: Any, x: Any, other: Any = None, *rest: Any, **kwargs: Any) -> Any:
    if hasattr(other, "builder") or isinstance(other, Tensor):
        return t.emit("maximum", (x, other))
    raise TraceError("max over a dimension also gives positions. Write x.amax(dim) for the values, torch.maximum(a, b) for the larger of two.")


@_row("min")
def _min(t: Any, x: Any, other: Any = None, *rest: Any, **kwargs: Any) -> Any:
    if hasattr(other, "builder") or isinstance(other, Tensor):
        return t.emit("minimum", (x, other))
    raise TraceError("min over a dimension also gives positions. Write x.amin(dim) for the values, torch.minimum(a, b) for the smaller of two.")


@_row("var")
def _var(t: Any, x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: Any = None) -> Any:
    x = t.lift(x)
    if isinstance(correction, bool) or unbiased is not None:
        correction = int(correction if unbiased is None else unbiased)
    change = x - _mean(t, x, dim, True)
    return _folded(t, "sum", change * change, dim, keepdim) / (_count(t, x, dim) - correction)


@_row("std")
def _std(t: Any, x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: Any = None) -> Any:
    return t.emit("sqrt", (_var(t, x, dim, correction, keepdim, unbiased),))


@_row("norm")
def _norm(t: Any, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, p: Any = None) -> Any:
    """The Euclidean length, with gradient 0 at 0."""
    ord = p if p is not None else ord
    x = t.lift(x)
    if ord in (2, 2.0, "fro", None):
        return t.emit("norm", (_folded(t, "sum", x * x, dim, keepdim),))
    if ord in (1, 1.0):
        return _folded(t, "sum", t.emit("abs", (x,)), dim, keepdim)
    if ord == math.inf:
        return _folded(t, "amax", t.emit("abs", (x,)), dim, keepdim)
    raise TraceError(f"norm of order {ord}; 1, 2 and inf are supported in an edge function.")


@_row("normalize")
def _normalize(t: Any, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    return t.lift(x) / t.emit("maximum", (_norm(t, x, p, dim, True), eps))


@_row("vecdot")
def _vecdot(t: Any, x: Any, y: Any, dim: int = -1) -> Any:
    return _folded(t, "sum", t.emit("mul", (x, y)), dim, False)


@_row("logsumexp")
def _logsumexp(t: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
    x = t.lift(x)
    peak = _folded(t, "amax", x, dim, True)
    peak = t.emit("where", (t.emit("isfinite", (peak,)), peak, 0.0))
    out = t.emit("log", (_folded(t, "sum", t.emit("exp", (x - peak,)), dim, True),)) + peak
    if not keepdim:
        for d in _dims(x, dim):
            out = out.emit("squeeze", d)
    return out


@_row("softmax")
def _softmax(t: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    x = t.lift(x)
    x = x if dtype is None else x.emit("to", NAMES[dtype])
    e = t.emit("exp", (x - _folded(t, "amax", x, dim, True),))
    return e / _folded(t, "sum", e, dim, True)


@_row("log_softmax")
def _log_softmax(t: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    x = t.lift(x)
    x = x if dtype is None else x.emit("to", NAMES[dtype])
    return x - _logsumexp(t, x, dim, True)


def _last(x: Any, shape: Any) -> tuple:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(shape) > len(x.type.sizes):
        raise TraceError(f"normalized_shape {shape} of a value with features {tuple(x.type.sizes)}.")
    for want, have in zip(shape, x.type.sizes[len(x.type.sizes) - len(shape):]):
        if want != have:
            raise TraceError(f"normalized_shape {shape} of a value with features {tuple(x.type.sizes)}.")
    return tuple(range(-len(shape), 0))


@_row("layer_norm")
def _layer_norm(t: Any, x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Any:
    x = t.lift(x)
    dims = _last(x, normalized_shape)
    change = x - _mean(t, x, dims, True)
    out = change * t.emit("rsqrt", (_mean(t, change * change, dims, True) + eps,))
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@_row("rms_norm")
def _rms_norm(t: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: Optional[float] = None) -> Any:
    x = t.lift(x)
    dims = _last(x, normalized_shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out = x * t.emit("rsqrt", (_mean(t, x * x, dims, True) + eps,))
    return out if weight is None else out * weight
