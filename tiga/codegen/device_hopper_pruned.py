"""Pieces of Gluon kernels that skip tiles: what a warpgroup tells of a tile, and what is left out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tiga.codegen.device_hopper import edges_only

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
SLACK: gl.constexpr = gl.constexpr(0.0014082)  # log2(1 + 1/1024): for rounding, of scores by up to 0.001
LEAST: gl.constexpr = gl.constexpr(-120.0)  # log2 of what a certificate is at least where anything is left out
NOTHING: gl.constexpr = gl.constexpr(-3e38)  # the exponent of what is left out before anything is


# A tile's scores.


@gluon.jit
def larger(a, b):
    """nan if one is."""
    return gl.inline_asm_elementwise(
        "max.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def smaller(a, b):
    """nan if one is."""
    return gl.inline_asm_elementwise(
        "min.NaN.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def row_tops(score, by):
    """[rows]: the largest of score * by, nan if any is."""
    if by > 0:
        top = gl.reduce(score, 1, larger)
    else:
        top = gl.reduce(score, 1, smaller)
    return top * by


@gluon.jit
def edges_and_count(x, at, row_start, row_stop, instead, COLS: gl.constexpr):
    """x of pairs that are edges; log2 of how many of them each row has, and a little more; whether any row has one."""
    count = gl.minimum(row_stop, at + x.shape[1]) - gl.maximum(row_start, at)
    wide = gl.where(count > 0, gl.log2(gl.maximum(count, 1).to(gl.float32)) + SLACK, float("-inf"))
    return edges_only(x, at, row_start, row_stop, instead, COLS), wide, (gl.max(count, 0) > 0).to(gl.int32)


# What the warps of a warpgroup tell one another and the producer of a tile.


@gluon.jit
def say(words, slot, WG: gl.constexpr, x):
    """The largest number of each warp's rows, nan if one is."""
    words.index(slot).slice(4 * WG, 4).store(gl.reduce(x.reshape([4, 16]), 1, larger))


@gluon.jit
def hear(words, slot, WG: gl.constexpr):
    """The largest number that any of a warpgroup's warps told, once all did."""
    lanes: gl.constexpr = [[0]] * 5
    warps: gl.constexpr = [[0]] * (2 if gl.num_warps() == 4 else 0)
    layout: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], lanes, warps, [], [4])
    return gl.reduce(words.index(slot).slice(4 * WG, 4).load(layout), 0, larger)


# What is left out: 2 ** exponent * rest.


@gluon.jit
def left_out(exponent, rest, tops, count):
    """A bound on the sum of exp(score) left out of each row, once 2 ** count scores up to `tops` are as well, which are
    in base 2.

    Rounded up: of thousands of tiles each may be less than half a last digit of those before. nan where a score is.
    """
    more = tops + count
    high = gl.maximum(exponent, more)
    return high, (rest * gl.exp2(exponent - high) + gl.exp2(more - high)) * 1.0000006


@gluon.jit
def allowed(exponent, rest, peak, total, odds, count, live_own):
    """[rows]: whether what is left out stays below the odds times what is kept, or a row has no say: it has no scores
    here, or is no number already. peak in base 2."""
    bound = gl.where(rest == 0, float("-inf"), exponent + gl.log2(rest))
    found = bound <= odds * LOG2E + (peak + gl.log2(total))
    return found | (count == float("-inf")) | (total != total) | (live_own == 0)


@gluon.jit
def certificate(exponent, rest, peak, total):
    """A bound on the share of each row's probability that was left out, 0 if nothing was; peak in base 2."""
    omitted = exponent + gl.log2(rest)
    omitted += gl.abs(omitted) * 1e-7 + 3e-7  # rounded up, as is what follows
    ratio = gl.exp2(gl.minimum(gl.maximum(omitted - (peak + gl.log2(total)), LEAST), 126.0))
    share = gl.minimum(ratio / (1.0 + ratio) * (1.0 + 5e-7), 1.0)
    return gl.where(rest == 0, 0.0, gl.where(total == 0, 1.0, share))
