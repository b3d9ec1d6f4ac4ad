"""Pieces of kernels that skip tiles: the tile's largest scores, what is left out of each row, who allows it."""

from __future__ import annotations

import triton
import triton.language as tl

from tiga.codegen.device import LOG2E

SLACK: tl.constexpr = tl.constexpr(0.0014082)  # log2(1 + 1/1024): for rounding, of scores by up to 0.001
LEAST: tl.constexpr = tl.constexpr(-120.0)  # log2 of what a certificate is at least where anything is left out


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_tops(score, live_own):
    """[M]: each row's largest score, nan if any is; rows that do not exist have none."""
    return tl.where(live_own, tl.reduce(score, 1, larger), float("-inf"))


@triton.jit
def tile_top(tops):
    return tl.reduce(tops, None, larger)


@triton.jit
def left_out(omitted, tops, count):
    """log2 of a bound on the sum of exp(score) left out of each row, once `count` scores up to `tops` are as well.

    Rounded up: of thousands of tiles each may be less than half a last digit of those before. nan where a score is.
    """
    more = tl.where(count > 0, tops * LOG2E + tl.log2(tl.maximum(count, 1.0)) + SLACK, float("-inf"))
    high = tl.maximum(omitted, more)
    safe = tl.where(high == float("-inf"), 0.0, high)
    total = tl.exp2(omitted - safe) + tl.exp2(more - safe)
    return tl.where(more == float("-inf"), omitted, high + (tl.log2(total) + (tl.abs(high) * 1e-7 + 3e-7)))


@triton.jit
def all_allow(bound, peak, total, odds, count, live_own):
    """Whether in every row that has scores here what is left out stays below the odds times what is kept.

    peak in base 2. A row that is no number already has no say.
    """
    allowed = bound <= odds * LOG2E + (peak + tl.log2(total))
    allowed = allowed | (count == 0) | (total != total) | (live_own == 0)
    return tl.min(allowed.to(tl.int32)) == 1


@triton.jit
def certificate(omitted, peak, total):
    """A bound on the share of each row's probability that was left out, 0 if nothing was; peak in base 2."""
    least = tl.where(omitted == float("-inf"), omitted, LEAST)
    ratio = tl.exp2(tl.minimum(larger(omitted - (peak + tl.log2(total)), least), 126.0, tl.PropagateNan.ALL))
    share = tl.minimum(ratio / (1.0 + ratio) * (1.0 + 5e-7), 1.0, tl.PropagateNan.ALL)  # rounded up
    return tl.where(total == 0, (omitted > float("-inf")).to(tl.float32), share)


@triton.jit(do_not_specialize=["own", "other", "own_stride", "other_stride"])
def list_tiles(kept, tiles, before, own, other, own_stride, other_stride, BLOCK: tl.constexpr):
    """Of a row of a contiguous map [heads, ...]: the numbers of its kept tiles, and how many come before each tile."""
    row = tl.program_id(0).to(tl.int64)
    kept += row // own * own * other + row % own * own_stride
    tiles += row * other
    before += row * (other + 1)
    count = tl.full((), 0, tl.int32)
    tl.store(before, count)
    for at in tl.range(0, other, BLOCK):
        t = at + tl.arange(0, BLOCK)
        on = (tl.load(kept + t.to(tl.int64) * other_stride, mask=t < other, other=0) != 0).to(tl.int32)
        place = count + tl.cumsum(on, 0)
        tl.store(before + t + 1, place, mask=t < other)
        tl.store(tiles + place - 1, t, mask=on == 1)
        count += tl.sum(on)
