"""One row an operation: how its type follows, what it means in torch, how Triton writes it, its derivative.

The tracer, the parser, the reference, the adjoint, the tangent and the tests all read this table. A derivative gets the
result and the arguments as program values and gives, for each argument, the function from the result's cotangent to the
argument's (None: no gradient). Of a `linear` row (in each argument, jointly) the tangent is the row itself; of an
elementwise row the same functions serve both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tiga.rules import (
    Rule,
    amax_type,
    arange_type,
    arithmetic_type,
    cat_type,
    compare_type,
    expand_like_type,
    float_type,
    gather_type,
    kept_type,
    like_type,
    linear_type,
    number_type,
    part_type,
    permute_type,
    rand_type,
    reshape_type,
    size_type,
    slice_type,
    spread_type,
    squeeze_type,
    sum_type,
    to_type,
    unsqueeze_type,
    where_type,
    zeros_like_type,
)


@dataclass(frozen=True)
class Primitive:
    """arity -1: any number of arguments. attrs: how many words follow the arguments (-1: any number).

    batch: where the batch dimensions of the result come from when the rule looks at all sizes and so is shown the
    features alone: "join" all arguments, the "first", "ones", "none"; empty for a rule that counts from the right,
    or is elementwise.
    """

    name: str
    rule: Rule
    torch: Callable[..., Any] | None
    triton: str = ""
    derivative: Callable[..., tuple] | None = None
    arity: int = 1
    attrs: int = 0
    commutative: bool = False
    elementwise: bool = True
    linear: bool = False
    batch: str = ""


# Derivatives, in the language of program values.


def _op(name: str) -> Callable[..., Any]:
    def call(first: Any, *rest: Any) -> Any:
        holder = first if hasattr(first, "builder") else next(x for x in rest if hasattr(x, "builder"))
        return holder.builder.emit(name, (first, *rest))

    return call


where, exp, log, sqrt, rsqrt = _op("where"), _op("exp"), _op("log"), _op("sqrt"), _op("rsqrt")
sin, cos, sign, power, sigmoid, lt, eq, le = (
    _op("sin"),
    _op("cos"),
    _op("sign"),
    _op("pow"),
    _op("sigmoid"),
    _op("lt"),
    _op("eq"),
    _op("le"),
)


def _ties(out, x, y):
    """max and min of two: torch gives each half where they tie."""
    half = where(eq(x, y), 0.5, 1.0)
    return (lambda g: g * where(eq(out, x), half, 0.0), lambda g: g * where(eq(out, y), half, 0.0))


def _power(out, x, y):
    def base(g):
        if hasattr(y, "builder"):
            return g * where(eq(y, 0), 0.0, y * power(x, y - 1))
        return None if y == 0 else g if y == 1 else g * (x * 2) if y == 2 else g * (power(x, y - 1) * y)

    def exponent(g):
        if hasattr(x, "builder"):
            return g * where(eq(x, 0), 0.0, out * log(where(eq(x, 0), 1.0, x)))
        return g * (out * math.log(x)) if x > 0 else None

    return base, exponent


def _norm(out, x):
    """sqrt whose derivative at 0 is 0 (twice as well): the length of a vector."""
    flat = eq(out, 0)
    return (lambda g: g * (where(flat, 0.0, 0.5) / where(flat, 1.0, out)),)


def _amax_derivative(out, x, dim):
    top = out.emit("unsqueeze", dim)
    hit = where(eq(x, top), 1.0, 0.0)
    return (lambda g: g.emit("unsqueeze", dim) * (hit / hit.emit("sum", dim).emit("unsqueeze", dim)),)


def _permute_back(dims):
    rank = len(dims)
    back = [0] * rank
    for new, old in enumerate(dims):
        back[int(old) + rank] = new - rank
    return tuple([str(d) for d in back])


def _cat_derivative(out, *args):
    values, dim = args[:-1], args[-1]
    return tuple([(lambda g, k=k: g.builder.emit("part", (g, *values), (dim, str(k)))) for k in range(len(values))])


def _part_derivative(out, g, *args):
    values, dim, k = args[:-2], args[-2], int(args[-1])

    def back(h):
        pieces = [h if i == k else h.builder.emit("zeros_like", (v,)) for i, v in enumerate(values)]
        return h.builder.emit("cat", tuple(pieces), (dim,))

    return (back, *[None] * len(values))


# Torch meanings that are more than one call; `lead` leading dimensions are rows.


def _hash_uniform(seed: torch.Tensor, number: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
    """Uniform in [0, 1), of (seed, edge number, feature) alone: two rounds of splitmix64 (Steele et al. 2014)."""
    x = seed + number * -7046029254386353131 + feature * -4417276706812531889
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _permute_features(x: torch.Tensor, lead: int, *dims: str) -> torch.Tensor:
    return x.permute(*range(x.dim() - len(dims)), *[x.dim() + int(d) for d in dims])


def _slice_rows(x: torch.Tensor, lead: int, dim: str, start: str, length: str, step: str) -> torch.Tensor:
    first, count, stride = int(start), int(length), int(step)
    if not count:
        return x.narrow(int(dim), 0, 0)
    return torch.ops.aten.slice(x, int(dim), first, first + (count - 1) * stride + 1, stride)


_SQRT_2_PI = 2 / math.pi**0.5

# fmt: off
_ROWS = (
    # name, rule, torch, triton, derivative
    Primitive("add", arithmetic_type, torch.add, "{0} + {1}",
              lambda out, x, y: (lambda g: g, lambda g: g), 2, commutative=True),
    Primitive("sub", arithmetic_type, torch.sub, "{0} - {1}", lambda out, x, y: (lambda g: g, lambda g: -g), 2),
    Primitive("mul", arithmetic_type, torch.mul, "{0} * {1}",
              lambda out, x, y: (lambda g: g * y, lambda g: g * x), 2, commutative=True),
    Primitive("div", float_type, torch.div, "{0} / {1}",
              lambda out, x, y: (lambda g: g / y, lambda g: -(g * out) / y), 2),
    Primitive("pow", arithmetic_type, torch.pow, "pow({0}, {1})", _power, 2),
    Primitive("maximum", arithmetic_type, torch.maximum, "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
              _ties, 2, commutative=True),
    Primitive("minimum", arithmetic_type, torch.minimum, "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
              _ties, 2, commutative=True),
    Primitive("fmod", arithmetic_type, torch.fmod, "{0} % {1}",
              lambda out, x, y: (lambda g: g, lambda g: -(g * _op("trunc")(x / y))), 2),
    Primitive("remainder", arithmetic_type, torch.remainder, "remainder({0}, {1})",
              lambda out, x, y: (lambda g: g, lambda g: -(g * _op("floor")(x / y))), 2),
    Primitive("neg", arithmetic_type, torch.neg, "-{0}", lambda out, x: (lambda g: -g,)),
    Primitive("abs", arithmetic_type, torch.abs, "tl.abs({0})", lambda out, x: (lambda g: g * sign(x),)),
    Primitive("sign", arithmetic_type, torch.sign, "sign({0})", lambda out, x: (None,)),
    Primitive("floor", arithmetic_type, torch.floor, "tl.floor({0})", lambda out, x: (None,)),
    Primitive("ceil", arithmetic_type, torch.ceil, "tl.ceil({0})", lambda out, x: (None,)),
    Primitive("round", arithmetic_type, torch.round, "round_even({0})", lambda out, x: (None,)),
    Primitive("trunc", arithmetic_type, torch.trunc, "trunc({0})", lambda out, x: (None,)),
    Primitive("exp", float_type, torch.exp, "tl.exp({0})", lambda out, x: (lambda g: g * out,)),
    Primitive("exp2", float_type, torch.exp2, "tl.exp2({0})", lambda out, x: (lambda g: g * out * math.log(2),)),
    Primitive("expm1", float_type, torch.expm1, "expm1({0})", lambda out, x: (lambda g: g * (out + 1),)),
    Primitive("log", float_type, torch.log, "tl.log({0})", lambda out, x: (lambda g: g / x,)),
    Primitive("log2", float_type, torch.log2, "tl.log2({0})", lambda out, x: (lambda g: g / (x * math.log(2)),)),
    Primitive("log1p", float_type, torch.log1p, "log1p({0})", lambda out, x: (lambda g: g / (x + 1),)),
    Primitive("sqrt", float_type, torch.sqrt, "tl.sqrt({0})", lambda out, x: (lambda g: g * 0.5 / out,)),
    Primitive("norm", float_type, torch.sqrt, "tl.sqrt({0})", _norm),
    Primitive("rsqrt", float_type, torch.rsqrt, "tl.rsqrt({0})", lambda out, x: (lambda g: g * -0.5 * out / x,)),
    Primitive("sin", float_type, torch.sin, "tl.sin({0})", lambda out, x: (lambda g: g * cos(x),)),
    Primitive("cos", float_type, torch.cos, "tl.cos({0})", lambda out, x: (lambda g: -(g * sin(x)),)),
    Primitive("tan", float_type, torch.tan, "tan({0})", lambda out, x: (lambda g: g * (out * out + 1),)),
    Primitive("atan", float_type, torch.atan, "atan({0})", lambda out, x: (lambda g: g / (x * x + 1),)),
    Primitive("atan2", float_type, torch.atan2, "atan2({0}, {1})",
              lambda out, y, x: (lambda g: g * x / (x * x + y * y), lambda g: -(g * y) / (x * x + y * y)), 2),
    Primitive("asin", float_type, torch.asin, "asin({0})", lambda out, x: (lambda g: g * rsqrt(1 - x * x),)),
    Primitive("acos", float_type, torch.acos, "acos({0})", lambda out, x: (lambda g: -(g * rsqrt(1 - x * x)),)),
    Primitive("sinh", float_type, torch.sinh, "sinh({0})", lambda out, x: (lambda g: g * _op("cosh")(x),)),
    Primitive("cosh", float_type, torch.cosh, "cosh({0})", lambda out, x: (lambda g: g * _op("sinh")(x),)),
    Primitive("tanh", float_type, torch.tanh, "tanh({0})", lambda out, x: (lambda g: g * (1 - out * out),)),
    Primitive("sigmoid", float_type, torch.sigmoid, "tl.sigmoid({0})",
              lambda out, x: (lambda g: g * (out * (1 - out)),)),
    Primitive("erf", float_type, torch.erf, "tl.erf({0})",
              lambda out, x: (lambda g: g * (exp(-(x * x)) * _SQRT_2_PI),)),
    Primitive("relu", arithmetic_type, torch.relu, "tl.maximum({0}, 0)",
              lambda out, x: (lambda g: where(lt(0, x), g, 0.0),)),
    Primitive("lt", compare_type, torch.lt, "{0} < {1}", lambda out, x, y: (None, None), 2),
    Primitive("le", compare_type, torch.le, "{0} <= {1}", lambda out, x, y: (None, None), 2),
    Primitive("eq", compare_type, torch.eq, "{0} == {1}", lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("ne", compare_type, torch.ne, "{0} != {1}", lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("and", arithmetic_type, torch.bitwise_and, "{0} & {1}",
              lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("or", arithmetic_type, torch.bitwise_or, "{0} | {1}",
              lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("xor", arithmetic_type, torch.bitwise_xor, "{0} ^ {1}",
              lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("not", arithmetic_type, torch.bitwise_not, "~{0}", lambda out, x: (None,)),
    Primitive("isnan", compare_type, torch.isnan, "{0} != {0}", lambda out, x: (None,)),
    Primitive("isinf", compare_type, torch.isinf, "tl.abs({0}) == float('inf')", lambda out, x: (None,)),
    Primitive("isfinite", compare_type, torch.isfinite, "tl.abs({0}) < float('inf')", lambda out, x: (None,)),
    Primitive("where", where_type, torch.where, "tl.where({0}, {1}, {2})",
              lambda out, c, x, y: (None, lambda g: where(c, g, 0.0), lambda g: where(c, 0.0, g)), 3),
    Primitive("to", to_type, None, "{0}.to({1})",
              lambda out, x, dtype: (lambda g: g.emit("to", x.type.dtype) if x.type.floating else None,),
              attrs=1, elementwise=False, linear=True),
    Primitive("spread", spread_type, None, "{0}",
              lambda out, x, place: (lambda g: g,), attrs=1, elementwise=False, linear=True),
    Primitive("sum", sum_type, lambda x, lead, dim: x.sum(int(dim)), "tl.sum({0}, {1})",
              lambda out, x, dim: (lambda g: g.emit("unsqueeze", dim),), attrs=1, elementwise=False, linear=True),
    Primitive("amax", amax_type, lambda x, lead, dim: x.amax(int(dim)), "tl.max({0}, {1})", _amax_derivative, attrs=1,
              elementwise=False),
    Primitive("amin", amax_type, lambda x, lead, dim: x.amin(int(dim)), "tl.min({0}, {1})", _amax_derivative, attrs=1,
              elementwise=False),
    Primitive("unsqueeze", unsqueeze_type, lambda x, lead, dim: x.unsqueeze(int(dim)), "tl.expand_dims({0}, {1})",
              lambda out, x, dim: (lambda g: g.emit("squeeze", dim),), attrs=1, elementwise=False, linear=True),
    Primitive("squeeze", squeeze_type, lambda x, lead, dim: x.squeeze(int(dim)), "tl.reshape({0}, {1})",
              lambda out, x, dim: (lambda g: g.emit("unsqueeze", dim),), attrs=1, elementwise=False, linear=True),
    Primitive("permute", permute_type, _permute_features, "tl.permute({0}, {1})",
              lambda out, x, *dims: (lambda g: g.emit("permute", *_permute_back(dims)),),
              attrs=-1, elementwise=False, linear=True),
    Primitive("slice", slice_type, _slice_rows, "",
              lambda out, x, *at: (lambda g: g.builder.emit("unslice", (g, x), at),),
              attrs=4, elementwise=False, linear=True),
    Primitive("unslice", like_type, None, "", lambda out, g, x, *at: (lambda h: h.emit("slice", *at), None), 2,
              attrs=4, elementwise=False, batch="first", linear=True),
    Primitive("expand_like", expand_like_type, None, "",
              lambda out, g, x: (lambda h: h, None), 2, elementwise=False, batch="first", linear=True),
    Primitive("reshape_like", like_type, None, "",
              lambda out, g, x: (lambda h: h.builder.emit("reshape_like", (h, g)), None),
              2, elementwise=False, batch="first", linear=True),
    Primitive("zeros_like", zeros_like_type, lambda x, lead: torch.zeros_like(x), "tl.zeros_like({0})",
              lambda out, x: (None,), elementwise=False, batch="ones", linear=True),
    Primitive("cat", cat_type, None, "", _cat_derivative, -1, attrs=1, elementwise=False, batch="join", linear=True),
    Primitive("part", part_type, None, "", _part_derivative, -1, attrs=2, elementwise=False, batch="first",
              linear=True),
    Primitive("reshape", reshape_type, None, "tl.reshape({0}, {1})",
              lambda out, x, *sizes: (lambda g: g.builder.emit("reshape_like", (g, x)),),
              attrs=-1, elementwise=False, batch="first", linear=True),
    Primitive("linear", linear_type, None, "tl.dot({0}, {1})", None, 2, elementwise=False, batch="join"),
    Primitive("gather", gather_type, None, "tl.load({0} + {1})", None, 2, elementwise=False, batch="join"),
    Primitive("kept", kept_type, None, "", lambda out, tiles, *sizes: (None,), attrs=2, elementwise=False),
    Primitive("size", size_type, None, "", lambda out, x, dim: (None,), attrs=1, elementwise=False, batch="none"),
    Primitive("arange", arange_type, None, "tl.arange(0, {0})",
              lambda out, x, dim: (None,), attrs=1, elementwise=False, batch="ones"),
    Primitive("number", number_type, None, "", lambda out: (), 0, elementwise=False),
    Primitive("rand", rand_type, None, "tl.rand({0}, {1})",
              lambda out, seed, x: (None, None), 2, elementwise=False, batch="first"),
)
# fmt: on
PRIMITIVES = {row.name: row for row in _ROWS}
