"""One row an operation: how its type follows, what it means in torch, how Triton writes it, its derivative.

The tracer, the parser, the reference, the adjoint, the tangent and the tests all read this table. A derivative gets the result and the
arguments as program values and gives, for each argument, the function from the result's cotangent to the argument's (None: no gradient).
Of a `linear` row (in each argument, jointly) the tangent is the row itself; of an elementwise row the same functions serve both ways.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

from tiga.errors import TigaError
from tiga.types import (DTYPES, Total, Type, Unify, as_float, broadcast_sizes, feature_dim, integers, is_one, join_places,
                        promote)

Rule = Callable[[tuple, tuple, Unify], Type]


@dataclass(frozen=True)
class Primitive:
    """arity -1: any number of arguments. attrs: how many words follow the arguments (-1: any number).

    batch: where the batch dimensions of the result come from when the rule looks at all sizes and so is shown the features alone: "join" all arguments,
    the "first", "ones", "none"; empty for a rule that counts from the right, or is elementwise.
    """

    name: str
    rule: Rule
    torch: Callable[..., Any]
    triton: str = ""
    derivative: Optional[Callable[..., tuple]] = None
    arity: int = 1
    attrs: int = 0
    commutative: bool = False
    elementwise: bool = True
    linear: bool = False
    batch: str = ""


# ---- how types follow -------------------------------------------------------------------------------------------------------------------

def _arithmetic(types, attrs, unify):
    dtype, weak = promote(types)
    return Type(join_places(types), dtype, broadcast_sizes(tuple([t.sizes for t in types]), unify), weak)


def _float(types, attrs, unify):
    t = _arithmetic(types, attrs, unify)
    return Type(t.place, as_float(t.dtype, t.weak), t.sizes, t.weak)


def _compare(types, attrs, unify):
    t = _arithmetic(types, attrs, unify)
    return Type(t.place, "bool", t.sizes, t.weak)


def _where(types, attrs, unify):
    if types[0].dtype != "bool":
        raise TigaError(f"the condition of where is {types[0].dtype}; compare first, so that it is bool")
    dtype, weak = promote(types[1:])
    if weak and dtype == "f64":                                # of two Python numbers: torch's default dtype
        dtype = "f32"
    return Type(join_places(types), dtype, broadcast_sizes(tuple([t.sizes for t in types]), unify))


def _to(types, attrs, unify):
    if attrs[0] not in DTYPES:
        raise TigaError(f"no dtype {attrs[0]!r}; there are {', '.join(DTYPES)}")
    return Type(types[0].place, attrs[0], types[0].sizes)


def _spread(types, attrs, unify):
    """A value as one of each row of a place below which it lives: a node's on its edges, a shared one anywhere."""
    t = types[0]
    if attrs[0] not in ("edge", "src", "dst") or (attrs[0] != "edge" and t.place not in ("shared", attrs[0])):
        raise TigaError(f"spread of a {t.place} value to {attrs[0]}")
    return Type(attrs[0], "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes)


def _sum(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    dtype = "i64" if t.dtype in ("bool", "u8", "i8", "i16", "i32") else t.dtype
    return Type(t.place, dtype, t.sizes[:dim] + t.sizes[dim + 1:])


def _amax(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    return Type(t.place, t.dtype, t.sizes[:dim] + t.sizes[dim + 1:])


def _unsqueeze(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes + (1,), attrs[0]) + len(t.sizes) + 1
    return Type(t.place, t.dtype, t.sizes[:dim] + (1,) + t.sizes[dim:])


def _squeeze(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    if not is_one(t.sizes[dim]):
        raise TigaError(f"squeeze of feature dimension {attrs[0]}, whose size is not 1")
    return Type(t.place, t.dtype, t.sizes[:dim] + t.sizes[dim + 1:])


def _permute(types, attrs, unify):
    t = types[0]
    dims = integers(attrs)
    if sorted(dims) != list(range(-len(dims), 0)) or len(dims) > len(t.sizes):
        raise TigaError(f"permute {' '.join(attrs)} of a value with {len(t.sizes)} feature dimensions")
    return Type(t.place, t.dtype, t.sizes[:len(t.sizes) - len(dims)] + tuple([t.sizes[d] for d in dims]))


def _slice(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    start, length, step = integers(attrs[1:])
    if start < 0 or length < 0 or step < 1:
        raise TigaError(f"slice from {start}, {length} long, step {step}: start and length must not be negative, step at least 1")
    unify(t.sizes[dim], Total("at least", (start + (length - 1) * step + 1 if length else 0,)))
    return Type(t.place, t.dtype, t.sizes[:dim] + (length,) + t.sizes[dim + 1:])


def _like(types, attrs, unify):
    """A cotangent brought to the feature sizes of the second argument."""
    return Type(types[0].place, types[0].dtype, types[1].sizes)


def _expand_like(types, attrs, unify):
    unify_last = broadcast_sizes((types[0].sizes, types[1].sizes), unify)
    return Type(types[0].place, types[0].dtype, unify_last if len(unify_last) == len(types[1].sizes) else types[1].sizes)


def _zeros_like(types, attrs, unify):
    return Type(types[0].place, types[0].dtype, types[0].sizes)


def _cat(types, attrs, unify):
    dim = feature_dim(types[0].sizes, attrs[0])
    rest = types[0].sizes
    for t in types[1:]:
        if len(t.sizes) != len(rest):
            raise TigaError(f"cat of values with {len(rest)} and {len(t.sizes)} feature dimensions")
        for d in range(-len(rest), 0):
            if d != dim:
                unify(rest[d], t.sizes[d])
    parts = tuple([t.sizes[dim] for t in types])
    total = sum(parts) if not any(isinstance(p, tuple) for p in parts) else Total("sum", parts)
    dim += len(rest)
    return Type(join_places(types), promote(types)[0], rest[:dim] + (total,) + rest[dim + 1:])


def _part(types, attrs, unify):
    """part g x0 x1 ... dim k: the slice of g that lies where xk lies in cat(x0, x1, ...)."""
    k = integers(attrs)[1]
    if not 0 <= k < len(types) - 1:
        raise TigaError(f"part {k} of {len(types) - 1}")
    return Type(types[0].place, types[0].dtype, types[1 + k].sizes)


def _reshape(types, attrs, unify):
    t = types[0]
    sizes = integers(attrs)
    if sum(1 for s in sizes if s < 0) > 1 or any(s < -1 for s in sizes):
        raise TigaError(f"reshape to {' '.join(attrs)}: at most one -1")
    known = math.prod([s for s in sizes if s >= 0])
    numbers = not any(isinstance(s, tuple) for s in t.sizes)
    whole = math.prod(t.sizes) if numbers else Total("product", t.sizes)
    if -1 not in sizes:
        unify(whole, known)
        return Type(t.place, t.dtype, sizes)
    if known == 0:
        raise TigaError("reshape with -1 beside a size of 0")
    if numbers and whole % known:
        raise TigaError(f"reshape of features {tuple(t.sizes)} to {sizes}")
    rest = whole // known if numbers else Total("quotient", (whole, known))
    return Type(t.place, t.dtype, tuple([rest if s == -1 else s for s in sizes]))


def _linear(types, attrs, unify):
    x, weight = types
    if weight.place != "shared" or len(weight.sizes) != 2 or not x.sizes:
        raise TigaError("linear needs a value with features and a (out, in) weight")
    unify(x.sizes[-1], weight.sizes[1])
    return Type(x.place, promote(types)[0], x.sizes[:-1] + (weight.sizes[0],))


def _gather(types, attrs, unify):
    table, i = types
    if table.place != "shared" or not table.sizes:
        raise TigaError("gather needs a captured table with at least one dimension")
    if i.dtype not in ("i32", "i64", "i16", "i8", "u8"):
        raise TigaError(f"gather by {i.dtype}; the number of a row is an integer")
    return Type(i.place, table.dtype, i.sizes + table.sizes[1:])


def _size(types, attrs, unify):
    feature_dim(types[0].sizes, attrs[0])
    return Type("shared", "i64", ())


def _number(types, attrs, unify):
    return Type("edge", "i64", ())


def _arange(types, attrs, unify):
    dim = feature_dim(types[0].sizes, attrs[0])
    return Type(types[0].place, "i64", (types[0].sizes[dim],) + (1,) * (-dim - 1))


def _rand(types, attrs, unify):
    return Type("edge", "f32", types[1].sizes)


# ---- derivatives, in the language of program values ---------------------------------------------------------------------------------------

def _op(name: str) -> Callable[..., Any]:
    def call(first: Any, *rest: Any) -> Any:
        holder = first if hasattr(first, "builder") else next(x for x in rest if hasattr(x, "builder"))
        return holder.builder.emit(name, (first, *rest))
    return call


where, exp, log, sqrt, rsqrt = _op("where"), _op("exp"), _op("log"), _op("sqrt"), _op("rsqrt")
sin, cos, sign, power, sigmoid, lt, eq, le = _op("sin"), _op("cos"), _op("sign"), _op("pow"), _op("sigmoid"), _op("lt"), _op("eq"), _op("le")


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


# ---- torch meanings that are more than one call; `lead` leading dimensions are rows ---------------------------------------------------------

def _hash_uniform(seed: torch.Tensor, number: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
    """Uniform in [0, 1), a function of (seed, edge number, feature) alone: two rounds of a 64-bit mix (Steele et al. 2014, splitmix64)."""
    x = seed + number * -7046029254386353131 + feature * -4417276706812531889
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) * 2.0 ** -24


_SQRT_HALF, _SQRT_2_PI = 2 ** -0.5, 2 / math.pi ** 0.5

_ROWS = (
    # name, rule, torch, triton, derivative
    Primitive("add", _arithmetic, torch.add, "{0} + {1}", lambda out, x, y: (lambda g: g, lambda g: g), 2, commutative=True),
    Primitive("sub", _arithmetic, torch.sub, "{0} - {1}", lambda out, x, y: (lambda g: g, lambda g: -g), 2),
    Primitive("mul", _arithmetic, torch.mul, "{0} * {1}", lambda out, x, y: (lambda g: g * y, lambda g: g * x), 2, commutative=True),
    Primitive("div", _float, torch.div, "{0} / {1}", lambda out, x, y: (lambda g: g / y, lambda g: -(g * out) / y), 2),
    Primitive("pow", _arithmetic, torch.pow, "pow({0}, {1})", _power, 2),
    Primitive("maximum", _arithmetic, torch.maximum, "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _ties, 2, commutative=True),
    Primitive("minimum", _arithmetic, torch.minimum, "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", _ties, 2, commutative=True),
    Primitive("fmod", _arithmetic, torch.fmod, "{0} % {1}", lambda out, x, y: (lambda g: g, lambda g: -(g * _op("trunc")(x / y))), 2),
    Primitive("remainder", _arithmetic, torch.remainder, "remainder({0}, {1})",
              lambda out, x, y: (lambda g: g, lambda g: -(g * _op("floor")(x / y))), 2),
    Primitive("neg", _arithmetic, torch.neg, "-{0}", lambda out, x: (lambda g: -g,)),
    Primitive("abs", _arithmetic, torch.abs, "tl.abs({0})", lambda out, x: (lambda g: g * sign(x),)),
    Primitive("sign", _arithmetic, torch.sign, "sign({0})", lambda out, x: (None,)),
    Primitive("floor", _arithmetic, torch.floor, "tl.floor({0})", lambda out, x: (None,)),
    Primitive("ceil", _arithmetic, torch.ceil, "tl.ceil({0})", lambda out, x: (None,)),
    Primitive("round", _arithmetic, torch.round, "round_even({0})", lambda out, x: (None,)),
    Primitive("trunc", _arithmetic, torch.trunc, "trunc({0})", lambda out, x: (None,)),
    Primitive("exp", _float, torch.exp, "tl.exp({0})", lambda out, x: (lambda g: g * out,)),
    Primitive("exp2", _float, torch.exp2, "tl.exp2({0})", lambda out, x: (lambda g: g * out * math.log(2),)),
    Primitive("expm1", _float, torch.expm1, "expm1({0})", lambda out, x: (lambda g: g * (out + 1),)),
    Primitive("log", _float, torch.log, "tl.log({0})", lambda out, x: (lambda g: g / x,)),
    Primitive("log2", _float, torch.log2, "tl.log2({0})", lambda out, x: (lambda g: g / (x * math.log(2)),)),
    Primitive("log1p", _float, torch.log1p, "log1p({0})", lambda out, x: (lambda g: g / (x + 1),)),
    Primitive("sqrt", _float, torch.sqrt, "tl.sqrt({0})", lambda out, x: (lambda g: g * 0.5 / out,)),
    Primitive("norm", _float, torch.sqrt, "tl.sqrt({0})", _norm),
    Primitive("rsqrt", _float, torch.rsqrt, "tl.rsqrt({0})", lambda out, x: (lambda g: g * -0.5 * out / x,)),
    Primitive("sin", _float, torch.sin, "tl.sin({0})", lambda out, x: (lambda g: g * cos(x),)),
    Primitive("cos", _float, torch.cos, "tl.cos({0})", lambda out, x: (lambda g: -(g * sin(x)),)),
    Primitive("tan", _float, torch.tan, "tan({0})", lambda out, x: (lambda g: g * (out * out + 1),)),
    Primitive("atan", _float, torch.atan, "atan({0})", lambda out, x: (lambda g: g / (x * x + 1),)),
    Primitive("atan2", _float, torch.atan2, "atan2({0}, {1})",
              lambda out, y, x: (lambda g: g * x / (x * x + y * y), lambda g: -(g * y) / (x * x + y * y)), 2),
    Primitive("asin", _float, torch.asin, "asin({0})", lambda out, x: (lambda g: g * rsqrt(1 - x * x),)),
    Primitive("acos", _float, torch.acos, "acos({0})", lambda out, x: (lambda g: -(g * rsqrt(1 - x * x)),)),
    Primitive("sinh", _float, torch.sinh, "sinh({0})", lambda out, x: (lambda g: g * _op("cosh")(x),)),
    Primitive("cosh", _float, torch.cosh, "cosh({0})", lambda out, x: (lambda g: g * _op("sinh")(x),)),
    Primitive("tanh", _float, torch.tanh, "tanh({0})", lambda out, x: (lambda g: g * (1 - out * out),)),
    Primitive("sigmoid", _float, torch.sigmoid, "tl.sigmoid({0})", lambda out, x: (lambda g: g * (out * (1 - out)),)),
    Primitive("erf", _float, torch.erf, "tl.erf({0})", lambda out, x: (lambda g: g * (exp(-(x * x)) * _SQRT_2_PI),)),
    Primitive("relu", _arithmetic, torch.relu, "tl.maximum({0}, 0)", lambda out, x: (lambda g: where(lt(0, x), g, 0.0),)),
    Primitive("lt", _compare, torch.lt, "{0} < {1}", lambda out, x, y: (None, None), 2),
    Primitive("le", _compare, torch.le, "{0} <= {1}", lambda out, x, y: (None, None), 2),
    Primitive("eq", _compare, torch.eq, "{0} == {1}", lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("ne", _compare, torch.ne, "{0} != {1}", lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("and", _arithmetic, torch.bitwise_and, "{0} & {1}", lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("or", _arithmetic, torch.bitwise_or, "{0} | {1}", lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("xor", _arithmetic, torch.bitwise_xor, "{0} ^ {1}", lambda out, x, y: (None, None), 2, commutative=True),
    Primitive("not", _arithmetic, torch.bitwise_not, "~{0}", lambda out, x: (None,)),
    Primitive("isnan", _compare, torch.isnan, "{0} != {0}", lambda out, x: (None,)),
    Primitive("isinf", _compare, torch.isinf, "tl.abs({0}) == float('inf')", lambda out, x: (None,)),
    Primitive("isfinite", _compare, torch.isfinite, "tl.abs({0}) < float('inf')", lambda out, x: (None,)),
    Primitive("where", _where, torch.where, "tl.where({0}, {1}, {2})",
              lambda out, c, x, y: (None, lambda g: where(c, g, 0.0), lambda g: where(c, 0.0, g)), 3),
    Primitive("to", _to, None, "{0}.to({1})", lambda out, x, dtype: (lambda g: g.emit("to", x.type.dtype) if x.type.floating else None,),
              attrs=1, elementwise=False, linear=True),
    Primitive("spread", _spread, None, "{0}", lambda out, x, place: (lambda g: g,), attrs=1, elementwise=False, linear=True),
    Primitive("sum", _sum, lambda x, lead, dim: x.sum(int(dim)), "tl.sum({0}, {1})",
              lambda out, x, dim: (lambda g: g.emit("unsqueeze", dim),), attrs=1, elementwise=False, linear=True),
    Primitive("amax", _amax, lambda x, lead, dim: x.amax(int(dim)), "tl.max({0}, {1})", _amax_derivative, attrs=1, elementwise=False),
    Primitive("amin", _amax, lambda x, lead, dim: x.amin(int(dim)), "tl.min({0}, {1})", _amax_derivative, attrs=1, elementwise=False),
    Primitive("unsqueeze", _unsqueeze, lambda x, lead, dim: x.unsqueeze(int(dim)), "tl.expand_dims({0}, {1})",
              lambda out, x, dim: (lambda g: g.emit("squeeze", dim),),
              attrs=1, elementwise=False, linear=True),
    Primitive("squeeze", _squeeze, lambda x, lead, dim: x.squeeze(int(dim)), "tl.reshape({0}, {1})",
              lambda out, x, dim: (lambda g: g.emit("unsqueeze", dim),), attrs=1, elementwise=False, linear=True),
    Primitive("permute", _permute, lambda x, lead, *dims: x.permute(*range(x.dim() - len(dims)), *[x.dim() + int(d) for d in dims]), "tl.permute({0}, {1})",
              lambda out, x, *dims: (lambda g: g.emit("permute", *_permute_back(dims)),), attrs=-1, elementwise=False, linear=True),
    Primitive("slice", _slice, lambda x, lead, dim, start, length, step: x.movedim(int(dim), 0)[
        int(start):int(start) + max(0, (int(length) - 1) * int(step) + 1):int(step)].movedim(0, int(dim)) if int(length) else x.narrow(int(dim), 0, 0), "",
              lambda out, x, *at: (lambda g: g.builder.emit("unslice", (g, x), at),), attrs=4, elementwise=False, linear=True),
    Primitive("unslice", _like, None, "", lambda out, g, x, *at: (lambda h: h.emit("slice", *at), None), 2, attrs=4, elementwise=False, batch="first", linear=True),
    Primitive("expand_like", _expand_like, None, "", lambda out, g, x: (lambda h: h, None), 2, elementwise=False, batch="first", linear=True),
    Primitive("reshape_like", _like, None, "", lambda out, g, x: (lambda h: h.builder.emit("reshape_like", (h, g)), None), 2, elementwise=False, batch="first",
              linear=True),
    Primitive("zeros_like", _zeros_like, lambda x, lead: torch.zeros_like(x), "tl.zeros_like({0})", lambda out, x: (None,), elementwise=False, batch="ones", linear=True),
    Primitive("cat", _cat, None, "", _cat_derivative, -1, attrs=1, elementwise=False, batch="join", linear=True),
    Primitive("part", _part, None, "", _part_derivative, -1, attrs=2, elementwise=False, batch="first", linear=True),
    Primitive("reshape", _reshape, None, "tl.reshape({0}, {1})",
              lambda out, x, *sizes: (lambda g: g.builder.emit("reshape_like", (g, x)),), attrs=-1, elementwise=False, batch="first", linear=True),
    Primitive("linear", _linear, None, "tl.dot({0}, {1})", None, 2, elementwise=False, batch="join"),
    Primitive("gather", _gather, None, "tl.load({0} + {1})", None, 2, elementwise=False, batch="join"),
    Primitive("size", _size, None, "", lambda out, x, dim: (None,), attrs=1, elementwise=False, batch="none"),
    Primitive("arange", _arange, None, "tl.arange(0, {0})", lambda out, x, dim: (None,), attrs=1, elementwise=False, batch="ones"),
    Primitive("number", _number, None, "", lambda out: (), 0, elementwise=False),
    Primitive("rand", _rand, None, "tl.rand({0}, {1})", lambda out, seed, x: (None, None), 2, elementwise=False, batch="first"),
)
PRIMITIVES = {row.name: row for row in _ROWS}
