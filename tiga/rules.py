"""How types follow: the rule of each row of the table of primitives, and no more than one a shape of rule.

A rule gets the types of the arguments, the words after them and `unify`, which is asked whether two sizes agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tiga.errors import TigaError
from tiga.types import (
    DTYPES,
    Total,
    Type,
    Unify,
    as_float,
    broadcast_sizes,
    feature_dim,
    integers,
    is_one,
    join_places,
    promote,
)

Rule = Callable[[tuple, tuple, Unify], Type]


def arithmetic_type(types, attrs, unify):
    dtype, weak = promote(types)
    return Type(join_places(types), dtype, broadcast_sizes(tuple([t.sizes for t in types]), unify), weak)


def float_type(types, attrs, unify):
    t = arithmetic_type(types, attrs, unify)
    return Type(t.place, as_float(t.dtype, t.weak), t.sizes, t.weak)


def compare_type(types, attrs, unify):
    t = arithmetic_type(types, attrs, unify)
    return Type(t.place, "bool", t.sizes, t.weak)


def where_type(types, attrs, unify):
    if types[0].dtype != "bool":
        raise TigaError(f"the condition of where is {types[0].dtype}; compare first, so that it is bool")
    dtype, weak = promote(types[1:])
    if weak and dtype == "f64":  # of two Python numbers: torch's default dtype
        dtype = "f32"
    return Type(join_places(types), dtype, broadcast_sizes(tuple([t.sizes for t in types]), unify))


def kept_type(types, attrs, unify):
    """Whether a pair's tile was kept: [*heads, tiles of destinations, tiles of sources] on the edge."""
    if types[0].place != "shared" or len(types[0].sizes) < 2 or any(n <= 0 for n in integers(attrs)):
        raise TigaError("kept reads a map of tiles, and two sizes")
    return Type("edge", "bool", types[0].sizes[:-2])


def to_type(types, attrs, unify):
    if attrs[0] not in DTYPES:
        raise TigaError(f"no dtype {attrs[0]!r}; there are {', '.join(DTYPES)}")
    return Type(types[0].place, attrs[0], types[0].sizes)


def spread_type(types, attrs, unify):
    """A value as one of each row of a place below which it lives: a node's on its edges, a shared one anywhere."""
    t = types[0]
    if attrs[0] not in ("edge", "src", "dst") or (attrs[0] != "edge" and t.place not in ("shared", attrs[0])):
        raise TigaError(f"spread of a {t.place} value to {attrs[0]}")
    return Type(attrs[0], "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes)


def sum_type(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    dtype = "i64" if t.dtype in ("bool", "u8", "i8", "i16", "i32") else t.dtype
    return Type(t.place, dtype, t.sizes[:dim] + t.sizes[dim + 1 :])


def amax_type(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    return Type(t.place, t.dtype, t.sizes[:dim] + t.sizes[dim + 1 :])


def unsqueeze_type(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes + (1,), attrs[0]) + len(t.sizes) + 1
    return Type(t.place, t.dtype, t.sizes[:dim] + (1,) + t.sizes[dim:])


def squeeze_type(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    if not is_one(t.sizes[dim]):
        raise TigaError(f"squeeze of feature dimension {attrs[0]}, whose size is not 1")
    return Type(t.place, t.dtype, t.sizes[:dim] + t.sizes[dim + 1 :])


def permute_type(types, attrs, unify):
    t = types[0]
    dims = integers(attrs)
    if sorted(dims) != list(range(-len(dims), 0)) or len(dims) > len(t.sizes):
        raise TigaError(f"permute {' '.join(attrs)} of a value with {len(t.sizes)} feature dimensions")
    return Type(t.place, t.dtype, t.sizes[: len(t.sizes) - len(dims)] + tuple([t.sizes[d] for d in dims]))


def slice_type(types, attrs, unify):
    t = types[0]
    dim = feature_dim(t.sizes, attrs[0]) + len(t.sizes)
    start, length, step = integers(attrs[1:])
    if start < 0 or length < 0 or step < 1:
        raise TigaError(
            f"slice from {start}, {length} long, step {step}: start and length must not be negative, step at least 1"
        )
    unify(t.sizes[dim], Total("at least", (start + (length - 1) * step + 1 if length else 0,)))
    return Type(t.place, t.dtype, t.sizes[:dim] + (length,) + t.sizes[dim + 1 :])


def like_type(types, attrs, unify):
    """A cotangent brought to the feature sizes of the second argument."""
    return Type(types[0].place, types[0].dtype, types[1].sizes)


def expand_like_type(types, attrs, unify):
    unify_last = broadcast_sizes((types[0].sizes, types[1].sizes), unify)
    return Type(
        types[0].place, types[0].dtype, unify_last if len(unify_last) == len(types[1].sizes) else types[1].sizes
    )


def zeros_like_type(types, attrs, unify):
    return Type(types[0].place, types[0].dtype, types[0].sizes)


def cat_type(types, attrs, unify):
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
    return Type(join_places(types), promote(types)[0], rest[:dim] + (total,) + rest[dim + 1 :])


def part_type(types, attrs, unify):
    """part g x0 x1 ... dim k: the slice of g that lies where xk lies in cat(x0, x1, ...)."""
    k = integers(attrs)[1]
    if not 0 <= k < len(types) - 1:
        raise TigaError(f"part {k} of {len(types) - 1}")
    return Type(types[0].place, types[0].dtype, types[1 + k].sizes)


def reshape_type(types, attrs, unify):
    t = types[0]
    sizes = integers(attrs)
    if sum(1 for s in sizes if s < 0) > 1 or any(s < -1 for s in sizes):
        raise TigaError(f"reshape to {' '.join(attrs)}: at most one -1")
    known = math.prod([s for s in sizes if s >= 0])
    numbers = not any(isinstance(s, tuple) for s in t.sizes)
    whole: Any = math.prod(t.sizes) if numbers else Total("product", t.sizes)
    if -1 not in sizes:
        unify(whole, known)
        return Type(t.place, t.dtype, sizes)
    if known == 0:
        raise TigaError("reshape with -1 beside a size of 0")
    if numbers and whole % known:
        raise TigaError(f"reshape of features {tuple(t.sizes)} to {sizes}")
    rest = whole // known if numbers else Total("quotient", (whole, known))
    return Type(t.place, t.dtype, tuple([rest if s == -1 else s for s in sizes]))


def linear_type(types, attrs, unify):
    x, weight = types
    if weight.place != "shared" or len(weight.sizes) != 2 or not x.sizes:
        raise TigaError("linear needs a value with features and a (out, in) weight")
    unify(x.sizes[-1], weight.sizes[1])
    return Type(x.place, promote(types)[0], x.sizes[:-1] + (weight.sizes[0],))


def gather_type(types, attrs, unify):
    table, i = types
    if table.place != "shared" or not table.sizes:
        raise TigaError("gather needs a captured table with at least one dimension")
    if i.dtype not in ("i32", "i64", "i16", "i8", "u8"):
        raise TigaError(f"gather by {i.dtype}; the number of a row is an integer")
    return Type(i.place, table.dtype, i.sizes + table.sizes[1:])


def size_type(types, attrs, unify):
    feature_dim(types[0].sizes, attrs[0])
    return Type("shared", "i64", ())


def number_type(types, attrs, unify):
    return Type("edge", "i64", ())


def arange_type(types, attrs, unify):
    dim = feature_dim(types[0].sizes, attrs[0])
    return Type(types[0].place, "i64", (types[0].sizes[dim],) + (1,) * (-dim - 1))


def rand_type(types, attrs, unify):
    return Type("edge", "f32", types[1].sizes)
