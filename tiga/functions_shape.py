"""Shapes, dtypes, parameters and tables: the rest of the table of tiga.functions."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from tiga.errors import TraceError
from tiga.functions import FUNCTIONS, dim_of, meaning
from tiga.types import NAMES, is_one


@meaning("unsqueeze")
def _unsqueeze(t: Any, x: Any, dim: Any) -> Any:
    return x.emit("unsqueeze", dim_of(x, dim, 1))


@meaning("squeeze")
def _squeeze(t: Any, x: Any, dim: Any = None) -> Any:
    if dim is None:
        raise TraceError("squeeze of all dimensions may squeeze the edges. Name the feature dimension: squeeze(-1).")
    for d in sorted([dim_of(x, d) for d in (dim if isinstance(dim, tuple) else (dim,))], key=int):
        if is_one(x.type.sizes[int(d)]):
            x = x.emit("squeeze", d)
    return x


@meaning("permute")
def _permute(t: Any, x: Any, *dims: Any) -> Any:
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    rank = len(x.type.sizes)
    if len(dims) != rank + 1 or operator.index(dims[0]) not in (0, -rank - 1):
        raise TraceError(
            f"permute{tuple(dims)} of a traced value: name all {rank + 1} dimensions, the edges (0) first."
        )
    return x.emit("permute", *[dim_of(x, d) for d in dims[1:]])


@meaning("transpose")
def _transpose(t: Any, x: Any, dim0: Any, dim1: Any) -> Any:
    a, b = int(dim_of(x, dim0)), int(dim_of(x, dim1))
    order = list(range(-len(x.type.sizes), 0))
    order[a], order[b] = order[b], order[a]
    return x if a == b else x.emit("permute", *[str(d) for d in order])


@meaning("movedim", "moveaxis")
def _movedim(t: Any, x: Any, source: Any, destination: Any) -> Any:
    a, b = int(dim_of(x, source)), int(dim_of(x, destination))
    order = [d for d in range(-len(x.type.sizes), 0) if d != a]
    order.insert(b + len(x.type.sizes), a)
    return x.emit("permute", *[str(d) for d in order])


def _shape(shape: tuple) -> list:
    shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    return [operator.index(s) for s in shape]


@meaning("reshape")
def _reshape(t: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    sizes = _shape(shape or (kwargs["shape"],))
    if not sizes or sizes[0] != -1:
        raise TraceError(
            f"reshape to {tuple(sizes)}: the first dimension is the edges; write -1 for it (or x.shape[0])."
        )
    return _reshape_features(x, sizes[1:])


def _reshape_features(x: Any, sizes: list) -> Any:
    """At most one -1; the sizes are constants of the program."""
    whole, known = math.prod(x.type.sizes), math.prod([s for s in sizes if s != -1])
    if sizes.count(-1) > 1 or (known == 0 and -1 in sizes) or (whole % known if -1 in sizes else whole != known):
        raise TraceError(f"reshape of features {tuple(x.type.sizes)} to {tuple(sizes)}.")
    if -1 in sizes and whole == known:
        sizes = [1 if s == -1 else s for s in sizes]
    return x.emit("reshape", *[str(s) for s in sizes])


@meaning("reshape_as")
def _reshape_as(t: Any, x: Any, other: Any) -> Any:
    return t.emit("reshape_like", (x, other))


@meaning("flatten")
def _flatten(t: Any, x: Any, start_dim: Any = 0, end_dim: Any = -1) -> Any:
    rank = len(x.type.sizes)
    a, b = int(dim_of(x, start_dim)) + rank, int(dim_of(x, end_dim)) + rank
    if a == b:
        return x
    sizes = list(x.type.sizes)
    merged = (
        -1
        if math.prod(sizes[a : b + 1]) != 1 and math.prod(sizes[:a] + sizes[b + 1 :])
        else math.prod(sizes[a : b + 1])
    )
    return _reshape_features(
        x, [operator.index(s) for s in sizes[:a]] + [merged] + [operator.index(s) for s in sizes[b + 1 :]]
    )


@meaning("unflatten")
def _unflatten(t: Any, x: Any, dim: Any, sizes: Any) -> Any:
    d = int(dim_of(x, dim)) + len(x.type.sizes)
    new = [operator.index(s) for s in sizes]
    if -1 in new:
        known = math.prod([s for s in new if s != -1])
        new = [x.type.sizes[d] // known if s == -1 else s for s in new]
    old = list(x.type.sizes)
    return _reshape_features(x, [operator.index(s) for s in old[:d] + new + old[d + 1 :]])


@meaning("expand")
def _expand(t: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    sizes = _shape(shape or (kwargs["size"],))
    if not sizes or sizes[0] != -1:
        raise TraceError(
            f"expand to {tuple(sizes)}: the first dimension is the edges; write -1 for it (or x.shape[0])."
        )
    old = list(x.type.sizes)
    wide = [o if s == -1 else s for o, s in zip([1] * (len(sizes) - 1 - len(old)) + old, sizes[1:])]
    witness = torch.zeros(wide, dtype=torch.bool)
    return t.emit("expand_like", (x, t.capture(witness.to(t.device()), "shape" + t.next_number())))


@meaning("expand_as")
def _expand_as(t: Any, x: Any, other: Any) -> Any:
    return t.emit("expand_like", (x, other))


@meaning("cat")
def _cat(t: Any, tensors: Any, dim: Any = 0, axis: Any = None) -> Any:
    values = [t.lift(v) for v in tensors]
    first = next(v for v in values if v.type.place != "shared")
    return (
        t.emit("cat", tuple(values), (dim_of(first, dim if axis is None else axis),)) if len(values) > 1 else values[0]
    )


@meaning("stack")
def _stack(t: Any, tensors: Any, dim: Any = 0) -> Any:
    values = [t.lift(v) for v in tensors]
    d = dim_of(values[0], dim, 1)
    return t.emit("cat", tuple([v.emit("unsqueeze", d) for v in values]), (d,))


def _slice(x: Any, d: str, start: Any, stop: Any, step: Any) -> Any:
    size = x.type.sizes[int(d)]
    start = 0 if start is None else operator.index(start)
    step = 1 if step is None else operator.index(step)
    if step < 1:
        raise TraceError(f"a slice with step {step} in an edge function; steps are at least 1.")
    if stop is None and start == 0 and step == 1:
        return x
    start = max(0, start + size if start < 0 else min(start, size))
    stop = size if stop is None else operator.index(stop)
    stop = max(start, min(stop + size if stop < 0 else stop, size))
    length = len(range(operator.index(start), operator.index(stop), step))
    return x.emit("slice", d, str(operator.index(start)), str(length), str(step))


@meaning("narrow")
def _narrow(t: Any, x: Any, dim: Any, start: Any, length: Any) -> Any:
    return _slice(x, dim_of(x, dim), start, operator.index(start) + operator.index(length), 1)


@meaning("select")
def _select(t: Any, x: Any, dim: Any, index: Any) -> Any:
    d = dim_of(x, dim)
    size, at = x.type.sizes[int(d)], operator.index(index)
    if not -size <= at < size:
        raise TraceError(f"position {at} of a feature dimension of size {size}.")
    at = at + size if at < 0 else at
    return _slice(x, d, at, at + 1, 1).emit("squeeze", d)


@meaning("getitem")
def _getitem(t: Any, x: Any, at: Any) -> Any:
    items = list(at) if isinstance(at, tuple) else [at]
    rank = len(x.type.sizes) + 1
    named = len([i for i in items if i is not None and i is not Ellipsis])
    if Ellipsis in [i for i in items if i is Ellipsis]:
        k = [i is Ellipsis for i in items].index(True)
        items[k : k + 1] = [slice(None)] * (rank - named)
    if not items or items[0] is None or not isinstance(items[0], slice) or items[0] != slice(None):
        raise TraceError("the first dimension of a traced value is the edges: index features as x[..., k] or x[:, k].")
    if named > rank:
        raise TraceError(f"{named} positions for a traced value with {rank} dimensions.")
    d = -(rank - 1)
    for item in items[1:]:
        if item is None:
            x = x.emit("unsqueeze", str(d - 1))
        elif isinstance(item, slice):
            x = _slice(x, str(d), item.start, item.stop, item.step)
            d += 1
        elif isinstance(item, (int, torch.SymInt)):
            x = _select(t, x, d, item)
            d += 1
        elif isinstance(item, (list, tuple)) and all(isinstance(i, int) for i in item):
            parts = [
                _slice(x, str(d), i if i >= 0 else i + x.type.sizes[d], (i if i >= 0 else i + x.type.sizes[d]) + 1, 1)
                for i in item
            ]
            x = t.emit("cat", tuple(parts), (str(d),)) if len(parts) > 1 else parts[0]
            d += 1
        else:
            raise TraceError(
                f"a feature dimension indexed by {type(item).__name__}; "
                "integers, slices, lists of integers, None and ... can be."
            )
    return x


@meaning("chunk")
def _chunk(t: Any, x: Any, chunks: int, dim: Any = 0) -> Any:
    size = x.type.sizes[int(dim_of(x, dim))]
    return _split(t, x, -(-size // chunks), dim)


@meaning("split", "split_with_sizes")
def _split(t: Any, x: Any, split_size_or_sections: Any, dim: Any = 0) -> Any:
    d = dim_of(x, dim)
    size, each = operator.index(x.type.sizes[int(d)]), split_size_or_sections
    sizes = list(each) if isinstance(each, (list, tuple)) else [min(each, size - s) for s in range(0, size, each)]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple([_slice(x, d, start, start + length, 1) for start, length in zip(starts, sizes)])


@meaning("unbind")
def _unbind(t: Any, x: Any, dim: Any = 0) -> Any:
    size = operator.index(x.type.sizes[int(dim_of(x, dim))])
    return tuple([_select(t, x, dim, k) for k in range(size)])


@meaning("size")
def _size(t: Any, x: Any, dim: Any = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


@meaning("dim")
def _dim(t: Any, x: Any) -> int:
    return len(x.type.sizes) + 1


@meaning("contiguous", "clone", "alias")
def _same(t: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


@meaning("detach")
def _detach(t: Any, x: Any) -> Any:
    raise TraceError(
        "detach inside an edge function. Pass the field a second time under another name, detached: "
        "src={'h': h, 'h0': h.detach()}."
    )


@meaning("is_floating_point")
def _is_floating_point(t: Any, x: Any) -> bool:
    return x.type.floating


@meaning("to")
def _to(t: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = [a for a in [*args, *kwargs.values()] if isinstance(a, torch.dtype)]
    like = [a for a in args if hasattr(a, "builder") or isinstance(a, Tensor)]
    dtype = wanted[0] if wanted else like[0].dtype if like else None
    if dtype is None:
        return x
    if dtype not in NAMES:
        raise TraceError(f"{dtype} in an edge function; programs compute with {', '.join(NAMES.values())}.")
    return x if NAMES[dtype] == x.type.dtype and not x.type.weak else x.emit("to", NAMES[dtype])


FUNCTIONS["type_as"] = lambda t, x, other: _to(t, x, other.dtype)
for _name, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("int", torch.int32),
    ("long", torch.int64),
    ("bool", torch.bool),
):
    FUNCTIONS[_name] = lambda t, x, dtype=_dtype: _to(t, x, dtype)


def _like(value: float) -> Any:
    def row(t: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        fill = args[0] if args else kwargs.get("fill_value", value)
        zero = t.emit("zeros_like", (x,))
        return zero if isinstance(fill, float) and fill == 0 else t.emit("add", (zero, fill))

    return row


FUNCTIONS["zeros_like"], FUNCTIONS["ones_like"], FUNCTIONS["full_like"] = _like(0.0), _like(1.0), _like(0.0)


@meaning("embedding")
def _embedding(
    t: Any, input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *rest: Any, **kwargs: Any
) -> Any:
    if max_norm is not None or hasattr(weight, "builder"):
        raise TraceError(
            "embedding with max_norm, or from a traced table, in an edge function; "
            "the table is a parameter or captured tensor."
        )
    return t.emit("gather", (weight, input))


@meaning("index_select")
def _index_select(t: Any, x: Any, dim: Any, index: Any) -> Any:
    if hasattr(x, "builder"):
        raise TraceError("index_select of a traced value. Index features as x[..., [0, 2]].")
    return t.emit("gather", (x.movedim(dim, 0), index))


@meaning("cross")
def _cross(t: Any, x: Any, y: Any, dim: Any = -1) -> Any:
    x, y = t.lift(x), t.lift(y)
    a, b = _unbind(t, x, dim), _unbind(t, y, dim)
    if len(a) != 3:
        raise TraceError(f"cross of vectors of size {len(a)}; they have 3 components.")
    return _stack(t, [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]], dim)
