"""Pieces of the rows skeleton's kernels: a tile is [rows, edges, *features], an owner's value [rows, *features]."""

from __future__ import annotations

import triton
import triton.language as tl

from tiga.codegen.device_items import NOWHERE

LOG2E = tl.constexpr(1.4426950408889634)


# Memory.


@triton.jit
def load_features(base, first, live, at, inside, PADDED: tl.constexpr):
    """base[first + at], features last, where live; others are 0."""
    here = tl.expand_dims(live, -1)
    if PADDED:
        here = here & inside
    return tl.load(tl.expand_dims(base + first, -1) + at, mask=here, other=0)


@triton.jit
def from_bfloat16(x):
    """x in float32, by its bits: a register of two numbers takes two instructions, where a conversion takes three.

    A tensor may hold float32 where its type says bfloat16: what was saved without rounding.
    """
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def store_features(base, first, live, at, inside, x, PADDED: tl.constexpr):
    here = tl.expand_dims(live, -1)
    if PADDED:
        here = here & inside
    tl.store(tl.expand_dims(base + first, -1) + at, x.to(base.dtype.element_ty), mask=here)


# Features that do not exist, edges that do not exist.


@triton.jit
def feature(x, BACK: tl.constexpr):
    """0, 1, 2, ... along the dimension of x that is BACK from the right, to be broadcast with x."""
    i = tl.arange(0, x.shape[len(x.shape) - BACK])
    for _ in tl.static_range(BACK - 1):
        i = tl.expand_dims(i, -1)
    return i


@triton.jit
def only(x, BACK: tl.constexpr, D: tl.constexpr, other):
    """x, and `other` in place of the features from D on that pad the dimension BACK from the right."""
    if x.shape[len(x.shape) - BACK] == D:
        y = x
    else:
        y = tl.where(feature(x, BACK) < D, x, other)
    return y


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """The largest along a dimension; nan if there is one."""
    y = tl.max(x, AXIS)
    if x.dtype.is_floating():
        y = tl.where(tl.max((x != x).to(tl.int32), AXIS) > 0, float("nan"), y)
    return y


@triton.jit
def smallest(x, AXIS: tl.constexpr):
    """The smallest along a dimension; nan if there is one."""
    y = tl.min(x, AXIS)
    if x.dtype.is_floating():
        y = tl.where(tl.max((x != x).to(tl.int32), AXIS) > 0, float("nan"), y)
    return y


# Folds: a state a row, [R, *features], and what a chunk of edges, [R, E, *features], makes of it.


@triton.jit
def power_of_e(x):
    """exp(x), of a difference that is rounded once more only by its change to base 2."""
    if x.dtype == tl.float64:
        y = tl.exp(x)
    else:
        y = tl.exp2(x * LOG2E)
    return y


@triton.jit
def added(total, x, y, entries):
    """total + x * y, but for rows without edges, of a program that has some."""
    if total.shape[0] == 1:
        z = total + x * y
    else:
        z = total + rows_only(x * y, entries)
    return z


@triton.jit
def rows_only(x, entries):
    """[R, *features], 0 in rows without edges."""
    some = entries > 0
    for _ in tl.static_range(len(x.shape) - 1):
        some = tl.expand_dims(some, -1)
    return tl.where(some, x, 0)


@triton.jit
def plus(total, x):
    """total and x of all edges, one after another, where these are many: a product and its sum are one instruction, as
    a thread holds them all. -0.0 is what a number is added to and stays."""
    if x.shape[1] < 4:
        return total + tl.sum(x, 1)
    else:
        none = tl.full((), 0, x.dtype)
        if x.dtype == tl.float32:
            none = tl.full((), -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        k = feature(x, len(x.shape) - 1)
        return tl.sum(tl.where(k == 0, tl.expand_dims(total, 1), none) + x, 1)


@triton.jit
def softmax_step(score, value, peak, total, mean):
    """score is -inf where there is no edge. peak starts finite, so that no difference is nan that should be 0."""
    higher = tl.maximum(peak, tl.max(score, 1))
    keep = power_of_e(peak - higher)
    weight = power_of_e(score - higher[:, None])
    return higher, total * keep + tl.sum(weight, 1), mean * keep + tl.sum(weight * value, 1)


@triton.jit
def softmax_merge(peaks, totals, means, peak, total, mean):
    higher = tl.maximum(peak, tl.max(peaks, 1))
    keep = power_of_e(peak - higher)
    weight = power_of_e(peaks - higher[:, None])
    return higher, total * keep + tl.sum(weight * totals, 1), mean * keep + tl.sum(weight * means, 1)


@triton.jit
def softmax_weights(score, peak, total):
    """The new peak and total, what sums so far are multiplied by, and each edge's weight."""
    higher = tl.maximum(peak, tl.max(score, 1))
    keep = power_of_e(peak - higher)
    weight = power_of_e(score - higher[:, None])
    return higher, total * keep + tl.sum(weight, 1), keep, weight


@triton.jit
def weights_merge(peaks, totals, peak, total):
    """As softmax_weights, of rows' pieces."""
    higher = tl.maximum(peak, tl.max(peaks, 1))
    keep = power_of_e(peak - higher)
    weight = power_of_e(peaks - higher[:, None])
    return higher, total * keep + tl.sum(weight * totals, 1), keep, weight


@triton.jit
def softmax_end(peak, total, mean):
    none = total == 0
    safe = tl.where(none, 1.0, total)
    return tl.where(none, 0.0, mean * (1.0 / safe)), tl.where(none, float("-inf"), peak + tl.log(safe))


@triton.jit
def better(x, y, LARGEST: tl.constexpr):
    """Whether x beats y: nan beats all numbers, as in torch."""
    if LARGEST:
        more = x > y
    else:
        more = x < y
    if x.dtype.is_floating():
        more = more | ((x != x) & (y == y))
    return more


@triton.jit
def extreme_step(x, number, live, best, at, LARGEST: tl.constexpr):
    """The best of x and its edge's number, the lowest of equals; at is NOWHERE where no edge was yet."""
    if LARGEST:
        top = largest(tl.where(live, x, lowest(x, LARGEST)), 1)
    else:
        top = smallest(tl.where(live, x, lowest(x, LARGEST)), 1)
    same = x == top[:, None]
    if x.dtype.is_floating():
        same = same | ((x != x) & (top != top)[:, None])
    first = tl.min(tl.where(live & same, number, NOWHERE), 1)
    some = first != NOWHERE
    none = at == NOWHERE
    take = some & (none | better(top, best, LARGEST))
    tie = some & (none == 0) & (better(top, best, LARGEST) == 0) & (better(best, top, LARGEST) == 0)
    return tl.where(take, top, best), tl.where(take, first, tl.where(tie, tl.minimum(first, at), at))


@triton.jit
def lowest(x, LARGEST: tl.constexpr):
    """What every number beats, or equals."""
    if x.dtype.is_floating():
        if LARGEST:
            y = tl.full((), float("-inf"), x.dtype)
        else:
            y = tl.full((), float("inf"), x.dtype)
    else:
        low: tl.constexpr = -(2 ** (x.dtype.primitive_bitwidth - 1))
        if LARGEST:
            y = tl.full((), low, x.dtype)
        else:
            y = tl.full((), -(low + 1), x.dtype)
    return y


# Matrices.


@triton.jit
def product(x, w, SHAPE: tl.constexpr, PRECISION: tl.constexpr):
    """[..., I] times [I, O], accumulated in x's dtype."""
    width: tl.constexpr = w.shape[0]
    wide: tl.constexpr = width >= 16 and w.shape[1] >= 8 and x.dtype != tl.float64
    if wide and x.numel // width >= 16:
        y = tl.dot(tl.reshape(x, [x.numel // width, width]), w.to(x.dtype), input_precision=PRECISION)
        y = tl.reshape(y, SHAPE)
    else:
        y = tl.sum(tl.expand_dims(x, -1) * w.to(x.dtype), len(x.shape) - 1)
    return y


@triton.jit
def outer(x, y, PRECISION: tl.constexpr):
    """The sum over m of x[m]^T y[m]."""
    wide: tl.constexpr = x.shape[0] >= 16 and y.shape[1] >= 8 and x.dtype != tl.float64
    if wide and x.shape[1] >= 8:
        z = tl.dot(tl.trans(x), y, input_precision=PRECISION)
    else:
        z = tl.sum(x[:, :, None] * y[:, None, :], 0)
    return z


@triton.jit
def copies(x, AXIS: tl.constexpr, TIMES: tl.constexpr):
    """x, so many times, one after another along an axis."""
    many = tl.broadcast_to(tl.expand_dims(x, AXIS), x.shape[:AXIS] + (TIMES,) + x.shape[AXIS:])
    return tl.reshape(many, x.shape[:AXIS] + (TIMES * x.shape[AXIS],) + x.shape[AXIS + 1 :])


@triton.jit
def gathered(x, at, AXIS: tl.constexpr):
    """x[at] along an axis. Triton 3.6 fails where x and at differ in size there and a warp does not hold a whole row:
    the smaller of them is repeated."""
    have: tl.constexpr = x.shape[AXIS]
    want: tl.constexpr = at.shape[AXIS]
    if have < want:
        y = tl.gather(copies(x, AXIS, want // have), at, AXIS)
    elif have > want:
        times: tl.constexpr = have // want
        y = tl.gather(x, copies(at, AXIS, times), AXIS)
        y = tl.reshape(y, at.shape[:AXIS] + (times,) + at.shape[AXIS:])
        y = tl.max(y, AXIS).to(x.dtype)  # of equals
    else:
        y = tl.gather(x, at, AXIS)
    return y


@triton.jit
def moved(x, START: tl.constexpr, STEP: tl.constexpr, EVERY: tl.constexpr, BACK: tl.constexpr, SHAPE: tl.constexpr):
    """y[i] = x[START + STEP * i // EVERY] along the dimension BACK from the right, where EVERY divides; else 0."""
    axis: tl.constexpr = len(SHAPE) - BACK
    i = tl.arange(0, SHAPE[axis])
    at = START + STEP * i
    real = (at >= 0) & (at % EVERY == 0) & (at // EVERY < x.shape[axis])
    at = tl.where(real, at // EVERY, 0)
    for _ in tl.static_range(BACK - 1):
        at = tl.expand_dims(at, -1)
        real = tl.expand_dims(real, -1)
    at = tl.zeros(SHAPE, tl.int32) + at
    return tl.where(real, gathered(x, at, axis), 0)


@triton.jit
def reshaped(x, at, FLAT: tl.constexpr, WIDE: tl.constexpr, SHAPE: tl.constexpr, PADDED: tl.constexpr):
    """x with its features as SHAPE: FLAT has x's in one dimension, WIDE the new ones, of which i is FLAT's at[i]."""
    if PADDED:
        x = gathered(tl.reshape(x, FLAT), tl.zeros(WIDE, tl.int32) + at, len(FLAT) - 1)
    return tl.reshape(x, SHAPE)
