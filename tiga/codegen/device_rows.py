"""Pieces of the rows skeleton's kernels: a tile is [rows, edges, *features], an owner's value [rows, *features]."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FEW = tl.constexpr(8)  # edges, up to which their numbers are loaded one by one
FEW_ROWS = tl.constexpr(2)  # items, up to which they are loaded one by one
NOWHERE = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the number of an edge that is none


# Which rows, which edges.


@triton.jit
def work_items(items, group, num_items, num_own, num_edges, num_slots, WIDE: tl.constexpr, R: tl.constexpr):
    """R items (row, first entry, entries, slot): row -1 is padding, slot -1 a whole row; the most entries of them, and
    their largest slot. first and slot are int64, entries int32, rows as `offset` says.

    An item that names what does not exist is padding too.
    """
    at = (tl.full((), 0, tl.int64) + group) * R
    if R <= FEW_ROWS:  # numbers of the whole program, whatever threads hold of its tiles: all of a warp do the same
        row = tl.full([R], -1, items.dtype.element_ty)
        first = tl.full([R], 0, items.dtype.element_ty)
        entries = tl.full([R], 0, tl.int32)
        slot = tl.full([R], -1, items.dtype.element_ty)
        most = tl.full((), 0, tl.int32)
        top = tl.full((), -1, items.dtype.element_ty)
        for i in tl.static_range(R):
            item = items + (at + i) * 4
            here = at + i < num_items
            one = tl.load(item, mask=here, other=-1)
            begin = tl.load(item + 1, mask=here, other=0)
            end = tl.load(item + 2, mask=here, other=0)
            where = tl.load(item + 3, mask=here, other=-1)
            one, count = checked(one, begin, end, where, num_own, num_edges, num_slots)
            row = replaced(row, i, one)
            first = replaced(first, i, begin)
            entries = replaced(entries, i, count)
            slot = replaced(slot, i, where)
            most = tl.maximum(most, count)
            top = tl.maximum(top, where)
    else:
        here = at + tl.arange(0, R) < num_items
        item = items + (at + tl.arange(0, R)) * 4
        row = tl.load(item, mask=here, other=-1)
        first = tl.load(item + 1, mask=here, other=0)
        last = tl.load(item + 2, mask=here, other=0)
        slot = tl.load(item + 3, mask=here, other=-1)
        row, entries = checked(row, first, last, slot, num_own, num_edges, num_slots)
        most = tl.max(entries, 0)
        top = tl.max(slot, 0)
    return offset(row, WIDE), first.to(tl.int64), entries, slot.to(tl.int64), most, top


@triton.jit
def checked(row, first, last, slot, num_own, num_edges, num_slots):
    """An item's row and how many entries it has; -1 and 0 if one of its numbers is out of range: negative, by the sign
    of all of them together, or too large."""
    past = (last - first) | (num_own - 1 - row) | (num_edges - last) | (num_slots - 1 - slot)
    real = (row | first | last | past) >= 0
    return tl.where(real, row, -1), tl.where(real, last - first, 0).to(tl.int32)


@triton.jit
def replaced(x, TURN: tl.constexpr, y):
    """[R] numbers, of which that one is y."""
    if x.shape[0] == 1:
        z = tl.full([1], y, x.dtype)
    else:
        z = tl.where(tl.arange(0, x.shape[0]) == TURN, y, x)
    return z


@triton.jit
def within(x, count):
    """0 <= x < count in one comparison: as unsigned numbers what is negative is larger than all counts."""
    count = tl.full((), 0, tl.int32) + count  # a number that is constant as well
    if x.dtype == tl.int32 and count.dtype == tl.int32:
        y = x.to(tl.uint32, bitcast=True) < count.to(tl.uint32)
    else:
        y = x.to(tl.int64).to(tl.uint64, bitcast=True) < count.to(tl.uint64)
    return y


@triton.jit
def edges_from(col, first, entries, at, num_far, WIDE: tl.constexpr, BLOCK_E: tl.constexpr):
    """[R, BLOCK_E] entries from `at`: where they stand, whom they name, and whether there is such an edge."""
    k = at + tl.arange(0, BLOCK_E)
    entry = first[:, None] + k[None, :]
    if first.shape[0] == 1 and BLOCK_E <= FEW:
        far = loads(col + tl.max(first, 0) + at, tl.max(entries, 0) - at, BLOCK_E)
    else:
        far = tl.load(col + entry, mask=k[None, :] < entries[:, None], other=-1)
    return entry, offset(far, WIDE), within(far, num_far)


@triton.jit
def loads(at, count, BLOCK_E: tl.constexpr):
    """[1, BLOCK_E] numbers from `at`, -1 from the count-th on: loaded once, and in all threads."""
    k = tl.arange(0, BLOCK_E)[None, :]
    x = tl.full([1, BLOCK_E], -1, at.dtype.element_ty)
    for i in tl.static_range(BLOCK_E):
        x = tl.where(k == i, tl.load(at + i, mask=i < count, other=-1), x)
    return x


@triton.jit
def offset(row, WIDE: tl.constexpr):
    """A row's number, as it is multiplied by strides: in one instruction where no field has 2**31 elements."""
    if WIDE:
        x = row.to(tl.int64)
    else:
        x = row.to(tl.int32)
    return x


@triton.jit
def edge_numbers(number_of, first, entries, at, entry, live, num_edges, NUMBERED: tl.constexpr):
    """The numbers of the edges, the entries themselves where none are given, and which of these are edges."""
    if NUMBERED:
        if first.shape[0] == 1 and entry.shape[1] <= FEW:
            number = loads(number_of + tl.max(first, 0) + at, tl.max(entries, 0) - at, entry.shape[1])
        else:
            number = tl.load(number_of + entry, mask=live, other=-1)
        live = live & within(number, num_edges)
        number = number.to(tl.int64)
    else:
        number = entry
    return number, live


@triton.jit
def edge_at(x, TURN: tl.constexpr):
    """[R, *features] of one edge of [R, E, *features]."""
    k = tl.arange(0, x.shape[1])
    for _ in tl.static_range(len(x.shape) - 2):
        k = tl.expand_dims(k, -1)
    return tl.sum(tl.where(k == TURN, x, 0), 1)


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
def plus(total, x):
    """total and x of all edges, one after another: where a thread holds them all, a product and its sum are one
    instruction. -0.0 is what a number is added to and stays."""
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
