"""What operations on features, and folds over rows, mean on torch tensors; `lead` counts rows and batch dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tiga.layouts import Far, add_rows
from tiga.program import Line, Program
from tiga.types import DTYPES, compute_dtype


def cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        return x.to(dtype)
    if isinstance(x, Far):
        return Far(x.tensor.to(dtype), x.place)
    return x


def fold_rows(line: Line, rows: list, p: Program, zero: Tensor) -> Tensor:
    """sum, dot and scatter over rows (n, *features)."""
    name = line.attrs[1]
    if name == "sum":
        return rows[0].to(zero.dtype).sum(0)
    if name == "dot":
        g, x = (t.to(zero.dtype) for t in rows)
        wide, batch = torch.broadcast_shapes(g.shape[:-1], x.shape[:-1]), zero.shape[:-2]
        g, x = (t.expand(*wide, t.shape[-1]).movedim(0, p.batch).reshape(*batch, -1, t.shape[-1]) for t in (g, x))
        return g.mT @ x
    g, i, _ = rows
    sizes, features = zero.shape[: p.batch + 1], zero.shape[p.batch + 1 :]
    i, inside = _flat_rows(i, 1, sizes)
    rank = g.dim() - len(features)
    wide = torch.broadcast_shapes(g.shape[:rank], i.shape)
    g = torch.where(inside.reshape(*i.shape, *[1] * len(features)), g, 0).to(zero.dtype).expand(*wide, *features)
    return add_rows(
        zero.new_zeros(math.prod(sizes), *features), i.expand(wide).reshape(-1), g.reshape(-1, *features)
    ).reshape(zero.shape)


def align(x: Tensor, lead: int, rank: int) -> Tensor:
    """Ones between the leading dimensions and the features, so that `rank` features align from the right."""
    missing = lead + rank - x.dim()
    return x if missing <= 0 else x.reshape(*x.shape[:lead], *[1] * missing, *x.shape[lead:])


def _to(x: Tensor, lead: int, dtype: str) -> Tensor:
    return x.to(DTYPES[dtype]).to(DTYPES[compute_dtype(dtype)])


def _expand(g: Tensor, sizes: tuple, lead: int) -> Tensor:
    return g.expand(*g.shape[:lead], *torch.broadcast_shapes(g.shape[lead:], sizes))


def _unslice(g: Tensor, sizes: tuple, lead: int, dim: str, start: str, length: str, step: str) -> Tensor:
    first, count, stride = int(start), int(length), int(step)
    whole = list(g.shape)
    whole[int(dim)] = sizes[int(dim)]
    if not count:
        return g.new_zeros(whole)
    stop = first + (count - 1) * stride + 1
    return torch.ops.aten.slice_backward(g, whole, int(dim), first, stop, stride)


def _cat(*args: Any) -> Tensor:
    *values, lead, dim = args
    rank = max(v.dim() for v in values)
    values = [v if v.dim() == rank else v.reshape((1,) * (rank - v.dim()) + tuple(v.shape)) for v in values]
    d = int(dim) + rank
    wide = torch.broadcast_shapes(*[(*v.shape[:d], 1, *v.shape[d + 1 :]) for v in values])
    dtype = functools.reduce(torch.promote_types, [v.dtype for v in values])
    return torch.cat([v.to(dtype).expand(*wide[:d], v.shape[d], *wide[d + 1 :]) for v in values], d)


def _part(g: Tensor, *args: Any) -> Tensor:
    *sizes, lead, dim, k = args
    start = sum(x[int(dim)] for x in sizes[: int(k)])
    return g.narrow(int(dim), start, sizes[int(k)][int(dim)])


def _linear(x: Tensor, weight: Tensor, lead: int) -> Tensor:
    """weight: (*batch, out, in)."""
    dtype, batch = torch.promote_types(x.dtype, weight.dtype), weight.shape[:-2]
    if all(size == 1 for size in batch):
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype).reshape(weight.shape[-2:]))
    weight = weight.reshape(*batch, *[1] * (x.dim() - lead - 1), *weight.shape[-2:])
    return torch.matmul(x.to(dtype).unsqueeze(-2), weight.to(dtype).mT).squeeze(-2)


def _flat_rows(i: Tensor, lead: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows i of a table of `sizes` = (*batch, rows) as rows of the flat table, and whether there are such;
    `lead` dimensions stand before the batch.
    """
    inside = (i >= 0) & (i < sizes[-1])
    first = (
        torch.arange(0, math.prod(sizes), max(1, sizes[-1]), device=i.device)
        if math.prod(sizes)
        else torch.zeros(math.prod(sizes[:-1]), dtype=torch.int64)
    )
    first = first.reshape((1,) * lead + tuple(sizes[:-1]) + (1,) * max(0, i.dim() - lead - len(sizes) + 1))
    i = torch.where(inside, i, 0).to(torch.int64) + first.to(i.device)
    return i, inside.expand(i.shape)


def gather(table: Tensor, i: Tensor, lead: int, batch: int) -> Tensor:
    sizes, features = table.shape[: batch + 1], table.shape[batch + 1 :]
    i, inside = _flat_rows(i, lead, sizes)
    rows = table.reshape(-1, *features)[i] if math.prod(sizes) else table.new_zeros((*i.shape, *features))
    return torch.where(inside.reshape(*i.shape, *[1] * len(features)), rows, 0)


SHAPED: dict[str, Callable] = {
    "to": _to,
    "unslice": _unslice,
    "cat": _cat,
    "part": _part,
    "linear": _linear,
    "expand_like": lambda g, sizes, lead: _expand(align(g, lead, len(sizes)), sizes, lead),
    "reshape_like": lambda g, sizes, lead: g.reshape(*g.shape[:lead], *sizes),
    "reshape": lambda x, lead, *sizes: x.reshape(*x.shape[:lead], *[int(s) for s in sizes]),
}
