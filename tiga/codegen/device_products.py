"""Products of float32 vectors on tensor cores, of bfloat16 pieces."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of float32's numbers


@triton.jit
def pieces(x, PRECISION: tl.constexpr):
    """(high, middle, low), bfloat16, of float32 x = high + middle + low: each has the next 8 of x's 24 binary digits.

    Of another precision (x,). Of inf and nan high is the same, and the others are nan.
    """
    if PRECISION == "bf16x6":
        high = (x + 0.0).to(tl.int32, bitcast=True)  # a nan now has a digit in the upper half
        rest = x - (high & -65536).to(tl.float32, bitcast=True)
        middle = rest.to(tl.int32, bitcast=True) + 32768  # rounded, so that what a product leaves out has either sign
        low = (rest - (middle & -65536).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        return upper(high), upper(middle), upper(low)
    else:
        return (x,)


@triton.jit
def upper(digits):
    """The upper halves of float32's digits, as bfloat16."""
    return (digits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """sum_k a[i, k] b[k, j] of pieces.

    Of three each, six products of bfloat16, smallest first; the three left out are 2^-24 of |a| |b| in the mean. Where
    five of them sum to nan, a factor is inf or nan, and the product of the highest pieces alone is float32's: `maximum`
    gives a number for the nan.
    """
    if len(a) == 3:
        small = tl.dot(a[0], b[2])
        small = tl.dot(a[1], b[1], small)
        small = tl.dot(a[2], b[0], small)
        small = tl.dot(a[0], b[1], small)
        small = tl.dot(a[1], b[0], small)
        return tl.dot(a[0], b[0], tl.maximum(small, LEAST))
    else:
        return tl.dot(a[0], b[0], input_precision=PRECISION)


@triton.jit
def inner(a, x, PRECISION: tl.constexpr):
    """sum_d a[i, d] x[j, d] of pieces of the owners' vectors a, and the others' vectors x."""
    b = pieces(x.to(tl.float32), PRECISION)
    if len(b) == 3:
        return product(a, (tl.trans(b[0]), tl.trans(b[1]), tl.trans(b[2])), PRECISION)
    else:
        return product(a, (tl.trans(b[0]),), PRECISION)


@triton.jit
def summed(total, weight, x, PRECISION: tl.constexpr):
    """total[i] + sum_j weight[i, j] x[j], of products of x's dtype."""
    if x.dtype != tl.float32:
        return tl.dot(weight.to(x.dtype), x, total)
    elif PRECISION == "bf16x6":
        return total + product(pieces(weight, PRECISION), pieces(x, PRECISION), PRECISION)
    else:
        return tl.dot(weight, x, total, input_precision=PRECISION)


@triton.jit
def load_rows_again(base, rows, more, stride_row, stride_feature, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """load_rows, of a policy that load_rows has not: else the compiler makes both one, and keeps its registers."""
    d = tl.arange(0, BLOCK_D)
    at = base + (rows.to(tl.int64) * stride_row + more)[:, None] + d[None, :] * tl.cast(stride_feature, tl.int64)
    return tl.load(at, mask=live[:, None] & (d < D)[None, :], other=0.0, eviction_policy="evict_first")
