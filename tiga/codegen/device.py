"""Pieces of kernels that are the same in all of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, rows, stride_row, stride_feature, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of a field: rows and features that do not exist are 0."""
    d = tl.arange(0, BLOCK_D)
    at = base + rows.to(tl.int64)[:, None] * stride_row + d[None, :] * stride_feature
    return tl.load(at, mask=(rows < num_rows)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_scalars(base, rows, stride_row, num_rows):
    """[rows] of a field: rows that do not exist are 0."""
    return tl.load(base + rows.to(tl.int64) * stride_row, mask=rows < num_rows, other=0)


@triton.jit
def weighted(
    weight,
    live,
    x,
    base,
    first,
    stride_row,
    stride_feature,
    num_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[M, D]: sum over the second dimension of weight * x where an edge is live.

    A weight of 0 lets no inf or nan through.

    x are the rows from `first`, already loaded; only if they hold a value that is not finite are they visited
    again, one by one.
    """
    finite = tl.abs(x.to(tl.float32)) < float("inf")
    out = tl.dot(weight.to(x.dtype), tl.where(finite, x, 0.0), input_precision=PRECISION)
    if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
        cols = tl.arange(0, weight.shape[1])
        d = tl.arange(0, BLOCK_D)
        for n in tl.range(0, weight.shape[1], num_stages=1):
            w = tl.sum(tl.where((cols == n)[None, :], weight, 0.0), 1)
            on = tl.max(tl.where((cols == n)[None, :] & live, 1, 0), 1)
            row = tl.full((), 0, tl.int64) + first + n
            values = tl.load(
                base + row * stride_row + d * stride_feature, mask=(d < D) & (row < num_rows), other=0.0
            ).to(tl.float32)
            odd = (tl.abs(values) < float("inf")) == 0
            out += tl.where((on == 1)[:, None] & odd[None, :], w[:, None] * values[None, :], 0.0)
    return out


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)
