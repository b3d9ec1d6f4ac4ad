"""Pieces of kernels that skip tiles: the tile's largest scores, what is left out of each row, who allows it."""

from __future__ import annotations

import triton
import triton.language as tl

from tiga.codegen.device import LOG2E

SLACK: tl.constexpr = tl.constexpr(0.0014082)  # log2(1 + 1/1024): for rounding, of scores by up to 0.001


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_tops(score, live_own):
    """[M]: each row's largest score, nan if any is; rows that do not exist have none."""
    return tl.where(live_own, tl.reduce(score, 1, larger), float("-inf"))


@triton.jit
def tile_top(tops):
    return tl.reduce(tops, 0, larger)


@triton.jit
def left_out(omitted, tops, count):
    """log2 of a bound on the sum of exp(score) left out of each row, once `count` scores up to `tops` are as well."""
    more = tl.where(count > 0, tops * LOG2E + tl.log2(tl.maximum(count, 1.0)) + SLACK, float("-inf"))
    high = tl.maximum(omitted, more)
    safe = tl.where(high == float("-inf"), 0.0, high)
    total = tl.exp2(omitted - safe) + tl.exp2(more - safe)
    return tl.where(high == float("-inf"), high, high + tl.log2(total))


@triton.jit
def all_allow(bound, peak, total, odds, count, live_own):
    """Whether in every row that has scores here what is left out stays below the odds times what is kept.

    peak in base 2. A row that is no number already has no say.
    """
    allowed = bound <= odds * LOG2E + (peak + tl.log2(total))
    allowed = allowed | (count == 0) | (total != total) | (live_own == 0)
    return tl.min(allowed.to(tl.int32), 0) == 1


@triton.jit
def certificate(omitted, peak, total):
    """A bound on the share of each row's probability that was left out; peak in base 2."""
    ratio = tl.exp2(tl.minimum(omitted - (peak + tl.log2(total)), 126.0))
    return tl.where(total == 0, (omitted > float("-inf")).to(tl.float32), ratio / (1.0 + ratio))
