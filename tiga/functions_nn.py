"""Activations, folds over features and normalisations: a part of the table of tiga.functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tiga.errors import TraceError
from tiga.functions import FUNCTIONS, clamp, dim_of, meaning
from tiga.types import NAMES


def _inplace(inplace: bool) -> None:
    if inplace:
        raise TraceError("inplace=True changes a value in place; an edge function gives new ones. Leave inplace out.")


@meaning("relu")
def _relu(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("relu", (x,))


@meaning("silu")
def _silu(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("mul", (x, t.emit("sigmoid", (x,))))


@meaning("gelu")
def _gelu(t: Any, x: Any, approximate: str = "none") -> Any:
    x = t.lift(x)
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * (2 / math.pi) ** 0.5
        return x * 0.5 * (t.emit("tanh", (inner,)) + 1)
    return x * 0.5 * (t.emit("erf", (x * 2**-0.5,)) + 1)


@meaning("leaky_relu")
def _leaky_relu(t: Any, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("where", (t.emit("lt", (0, x)), x, t.emit("mul", (x, negative_slope))))


@meaning("elu")
def _elu(
    t: Any, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False
) -> Any:
    _inplace(inplace)
    x = t.lift(x)
    below = t.emit("expm1", (t.emit("where", (t.emit("lt", (0, x)), 0.0, x * input_scale if input_scale != 1 else x)),))
    return t.emit("where", (t.emit("lt", (0, x)), x * scale, below * (alpha * scale)))


@meaning("selu")
def _selu(t: Any, x: Any, inplace: bool = False) -> Any:
    return _elu(t, x, 1.6732632423543772, 1.0507009873554805, 1.0, inplace)


@meaning("softplus")
def _softplus(t: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    x = t.lift(x)
    scaled = x * beta if beta != 1 else x
    far = t.emit("lt", (threshold, scaled))
    near = t.emit("log1p", (t.emit("exp", (t.emit("where", (far, 0.0, scaled)),)),))
    return t.emit("where", (far, x, near / beta if beta != 1 else near))


@meaning("logsigmoid")
def _logsigmoid(t: Any, x: Any) -> Any:
    return -_softplus(t, -t.lift(x))


@meaning("mish")
def _mish(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return t.emit("mul", (x, t.emit("tanh", (_softplus(t, x),))))


@meaning("softsign")
def _softsign(t: Any, x: Any) -> Any:
    return t.emit("div", (x, t.emit("add", (t.emit("abs", (x,)), 1))))


@meaning("hardtanh", "relu6")
def _hardtanh(t: Any, x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    _inplace(inplace)
    return clamp(t, x, min_val, max_val)


FUNCTIONS["relu6"] = lambda t, x, inplace=False: _hardtanh(t, x, 0.0, 6.0, inplace)


@meaning("hardsigmoid")
def _hardsigmoid(t: Any, x: Any, inplace: bool = False) -> Any:
    _inplace(inplace)
    return clamp(t, t.lift(x) + 3, 0.0, 6.0) / 6


@meaning("hardswish")
def _hardswish(t: Any, x: Any, inplace: bool = False) -> Any:
    return t.emit("mul", (x, _hardsigmoid(t, x, inplace)))


@meaning("dropout")
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


def _dims(x: Any, dim: Any) -> list[str]:
    """The feature dimensions a fold names, the last first, so that the others keep their numbers from the right."""
    if dim is None:
        raise TraceError(
            "a fold over all dimensions would fold the edges. Name the feature dimensions: dim=-1, or dim=(1, 2)."
        )
    dims = [dim_of(x, d) for d in dim] if isinstance(dim, (tuple, list)) else [dim_of(x, dim)]
    return sorted(set(dims), key=int)


def fold_features(t: Any, name: str, x: Any, dim: Any, keepdim: bool) -> Any:
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


@meaning("sum")
def _sum(t: Any, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x = t.lift(x)
    return fold_features(t, "sum", x if dtype is None else x.emit("to", NAMES[dtype]), dim, keepdim)


@meaning("mean")
def _mean(t: Any, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x = t.lift(x)
    x = x if dtype is None else x.emit("to", NAMES[dtype])
    return fold_features(t, "sum", x, dim, keepdim) / _count(t, x, dim)


@meaning("amax")
def _amax(t: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return fold_features(t, "amax", x, dim, keepdim)


@meaning("amin")
def _amin(t: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return fold_features(t, "amin", x, dim, keepdim)


@meaning("max")
def _max(t: Any, x: Any, other: Any = None, *rest: Any, **kwargs: Any) -> Any:
    if hasattr(other, "builder") or isinstance(other, Tensor):
        return t.emit("maximum", (x, other))
    raise TraceError(
        "max over a dimension also gives positions. Write x.amax(dim) for the values, torch.maximum(a, b) for the "
        "larger of two."
    )


@meaning("min")
def _min(t: Any, x: Any, other: Any = None, *rest: Any, **kwargs: Any) -> Any:
    if hasattr(other, "builder") or isinstance(other, Tensor):
        return t.emit("minimum", (x, other))
    raise TraceError(
        "min over a dimension also gives positions. Write x.amin(dim) for the values, torch.minimum(a, b) for the "
        "smaller of two."
    )


@meaning("var")
def _var(t: Any, x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: Any = None) -> Any:
    x = t.lift(x)
    if isinstance(correction, bool) or unbiased is not None:
        correction = int(correction if unbiased is None else unbiased)
    change = x - _mean(t, x, dim, True)
    return fold_features(t, "sum", change * change, dim, keepdim) / (_count(t, x, dim) - correction)


@meaning("std")
def _std(t: Any, x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False, unbiased: Any = None) -> Any:
    return t.emit("sqrt", (_var(t, x, dim, correction, keepdim, unbiased),))


@meaning("norm")
def _norm(
    t: Any, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, p: Any = None
) -> Any:
    """The Euclidean length, with gradient 0 at 0."""
    ord = p if p is not None else ord
    x = t.lift(x)
    if ord in (2, 2.0, "fro", None):
        return t.emit("norm", (fold_features(t, "sum", x * x, dim, keepdim),))
    if ord in (1, 1.0):
        return fold_features(t, "sum", t.emit("abs", (x,)), dim, keepdim)
    if ord == math.inf:
        return fold_features(t, "amax", t.emit("abs", (x,)), dim, keepdim)
    raise TraceError(f"norm of order {ord}; 1, 2 and inf are supported in an edge function.")


@meaning("normalize")
def _normalize(t: Any, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    return t.lift(x) / t.emit("maximum", (_norm(t, x, p, dim, True), eps))


@meaning("vecdot")
def _vecdot(t: Any, x: Any, y: Any, dim: int = -1) -> Any:
    return fold_features(t, "sum", t.emit("mul", (x, y)), dim, False)


@meaning("logsumexp")
def _logsumexp(t: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
    x = t.lift(x)
    peak = fold_features(t, "amax", x, dim, True)
    peak = t.emit("where", (t.emit("isfinite", (peak,)), peak, 0.0))
    out = t.emit("log", (fold_features(t, "sum", t.emit("exp", (x - peak,)), dim, True),)) + peak
    if not keepdim:
        for d in _dims(x, dim):
            out = out.emit("squeeze", d)
    return out


@meaning("softmax")
def _softmax(t: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    x = t.lift(x)
    x = x if dtype is None else x.emit("to", NAMES[dtype])
    e = t.emit("exp", (x - fold_features(t, "amax", x, dim, True),))
    return e / fold_features(t, "sum", e, dim, True)


@meaning("log_softmax")
def _log_softmax(t: Any, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    x = t.lift(x)
    x = x if dtype is None else x.emit("to", NAMES[dtype])
    return x - _logsumexp(t, x, dim, True)


def _last(x: Any, shape: Any) -> tuple:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(shape) > len(x.type.sizes):
        raise TraceError(f"normalized_shape {shape} of a value with features {tuple(x.type.sizes)}.")
    for want, have in zip(shape, x.type.sizes[len(x.type.sizes) - len(shape) :]):
        if want != have:
            raise TraceError(f"normalized_shape {shape} of a value with features {tuple(x.type.sizes)}.")
    return tuple(range(-len(shape), 0))


@meaning("layer_norm")
def _layer_norm(
    t: Any,
    x: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    x = t.lift(x)
    dims = _last(x, normalized_shape)
    change = x - _mean(t, x, dims, True)
    out = change * t.emit("rsqrt", (_mean(t, change * change, dims, True) + eps,))
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@meaning("rms_norm")
def _rms_norm(t: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    x = t.lift(x)
    dims = _last(x, normalized_shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out = x * t.emit("rsqrt", (_mean(t, x * x, dims, True) + eps,))
    return out if weight is None else out * weight
