"""Pieces of kernels that are the same in all of them."""

from __future__ import annotations

import triton
import triton.language as tl

from tiga.codegen.device_products import summed

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


# Where a program is.


@triton.jit
def place(tiles, num_heads, group, splits, LAST_FIRST: tl.constexpr):
    """(tile, head, split): heads in groups whose fields stay in the cache, and of each tile the heavier first."""
    program = tl.program_id(0)
    of_group = group * tiles * splits
    g = program // of_group
    rest = program - g * of_group
    size = tl.minimum(num_heads - g * group, group)
    head = g * group + rest % size
    rest = rest // size
    tile = rest // splits
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, head, rest % splits


@triton.jit
def part_of(begin, end, split, splits, BLOCK: tl.constexpr):
    """Part `split` of [begin, end), in whole tiles."""
    size = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), splits) * BLOCK
    first = begin + split * size
    return first, tl.minimum(end, first + size)


@triton.jit(do_not_specialize=["num_blocks", "num_own", "unit"])
def count_tiles(bounds, prefix, num_blocks, num_own, unit, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """prefix[k]: tiles before entry k of: rows before the first block, the blocks, rows after the last."""
    entry = tl.arange(0, BLOCK)
    before = tl.full((), 0, tl.int32)
    tl.store(prefix, before)
    for at in tl.range(0, num_blocks + 2, BLOCK):
        k = at + entry
        low = tl.load(bounds + k - 1, mask=(k > 0) & (k < num_blocks + 2), other=0).to(tl.int64)
        high = tl.load(bounds + k, mask=k <= num_blocks, other=0).to(tl.int64)
        high = tl.where(k == num_blocks + 1, num_own, high)
        low = tl.minimum(tl.maximum(low, 0), num_own)
        high = tl.minimum(tl.maximum(high, low), num_own)
        tiles = tl.where(k < num_blocks + 2, tl.cdiv((high - low) * unit, BLOCK_M), 0).to(tl.int32)
        tl.store(prefix + k + 1, before + tl.cumsum(tiles, 0), mask=k < num_blocks + 2)
        before += tl.sum(tiles, 0)


@triton.jit
def find_block(
    tile,
    prefix,
    own_bounds,
    other_bounds,
    block_low,
    block_high,
    num_blocks,
    num_own,
    num_other,
    REVERSED: tl.constexpr,
):
    """(tile within its block, rows of the block, others of the block, its band): no others outside of all blocks."""
    low_k = tl.full((), 0, tl.int32)
    high_k = low_k + num_blocks + 1
    while high_k - low_k > 127:
        middle = (low_k + high_k + 1) // 2
        inside = tl.load(prefix + middle) <= tile
        low_k = tl.where(inside, middle, low_k)
        high_k = tl.where(inside, high_k, middle - 1)
    k = low_k + 1 + tl.arange(0, 128)
    low_k += tl.sum(((tl.load(prefix + k, mask=k <= high_k, other=0) <= tile) & (k <= high_k)).to(tl.int32), 0)
    return told_of_block(
        tile, low_k, prefix, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other, REVERSED
    )


@triton.jit
def find_blocks(
    tile,
    prefix,
    own_bounds,
    other_bounds,
    block_low,
    block_high,
    num_blocks,
    num_own,
    num_other,
    REVERSED: tl.constexpr,
):
    """find_block, of many tiles at once."""
    low_k = tile * 0
    high_k = low_k + num_blocks + 1
    left = num_blocks + 1
    while left > 0:
        middle = (low_k + high_k + 1) // 2
        inside = tl.load(prefix + middle) <= tile
        low_k = tl.where(inside, middle, low_k)
        high_k = tl.where(inside, high_k, middle - 1)
        left = left // 2
    return told_of_block(
        tile, low_k, prefix, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other, REVERSED
    )


@triton.jit
def told_of_block(
    tile,
    k,
    prefix,
    own_bounds,
    other_bounds,
    block_low,
    block_high,
    num_blocks,
    num_own,
    num_other,
    REVERSED: tl.constexpr,
):
    """What find_block says of a tile that lies in entry k of `prefix`."""
    own_low = tl.load(own_bounds + k - 1, mask=k > 0, other=0).to(tl.int64)
    own_high = tl.load(own_bounds + k, mask=k <= num_blocks, other=0).to(tl.int64)
    own_high = tl.where(k > num_blocks, num_own, own_high)
    own_low = tl.minimum(tl.maximum(own_low, 0), num_own)
    own_high = tl.minimum(tl.maximum(own_high, own_low), num_own)
    past = tile >= tl.load(prefix + num_blocks + 2)
    own_low = tl.where(past, num_own, own_low)
    own_high = tl.where(past, num_own, own_high)
    block = (k > 0) & (k <= num_blocks) & (past == 0)
    other_low = tl.load(other_bounds + k - 1, mask=block, other=0).to(tl.int64)
    other_high = tl.load(other_bounds + k, mask=block, other=0).to(tl.int64)
    other_low = tl.minimum(tl.maximum(other_low, 0), num_other)
    other_high = tl.minimum(tl.maximum(other_high, other_low), num_other)
    low = tl.load(block_low + k - 1, mask=block, other=1).to(tl.int64)
    high = tl.load(block_high + k - 1, mask=block, other=0).to(tl.int64)
    if REVERSED:
        low, high = -high, -low
    far = tl.cast(num_own, tl.int64) + num_other
    shift = other_low - own_low
    low = tl.minimum(tl.maximum(low, -far) + shift, far)
    high = tl.maximum(tl.minimum(high, far) + shift, -far - 1)
    low = tl.where(block, low, 1)
    high = tl.where(block, high, 0)
    first_tile = tl.load(prefix + k)
    return (
        tile - first_tile,
        own_low.to(tl.int32),
        own_high.to(tl.int32),
        other_low.to(tl.int32),
        other_high.to(tl.int32),
        low.to(tl.int32),
        high.to(tl.int32),
    )


# Fields.


@triton.jit
def load_rows(base, rows, more, stride_row, stride_feature, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D]: rows that are not live and features that do not exist are 0. live None: all are."""
    d = tl.arange(0, BLOCK_D)
    at = base + (rows.to(tl.int64) * stride_row + more)[:, None] + d[None, :] * tl.cast(stride_feature, tl.int64)
    if live is None:
        if D == BLOCK_D:
            return tl.load(at)
        else:
            return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(at, mask=live[:, None], other=0.0)
        else:
            return tl.load(at, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_numbers(base, rows, more, stride_row, live):
    """[rows]: rows that are not live are 0. live None: all are."""
    at = base + rows.to(tl.int64) * stride_row + more
    if live is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=live, other=0)


@triton.jit
def features(base, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D] of a field of all: features that do not exist are 0."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(base + d * stride, mask=d < D, other=0)


@triton.jit
def features_only(x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """x with 0 for features that do not exist."""
    if D == BLOCK_D:
        return x
    else:
        d = tl.arange(0, BLOCK_D)
        if len(x.shape) == 2:
            return tl.where((d < D)[None, :], x, 0.0)
        else:
            return tl.where(d < D, x, 0.0)


@triton.jit
def store_rows(at, x, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """x into contiguous vectors that start at `at`, for live rows."""
    d = tl.arange(0, BLOCK_D)
    tl.store(at[:, None] + d[None, :], x, mask=live[:, None] & (d < D)[None, :])


@triton.jit
def gathered(table, i, stride, count, more):
    """Rows i of a table, 0 where there is no such row."""
    return tl.load(table + i * stride + more, mask=(i >= 0) & (i < count), other=0)


# Folds.


@triton.jit
def poisoned(x):
    """Whether any element is not a number."""
    return tl.max((x != x).to(tl.int32)) > 0


@triton.jit
def careful(
    weight,
    live,
    x,
    total,
    base,
    first,
    stride_row,
    stride_feature,
    num_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + weight @ x over live pairs: what is no edge adds nothing at all, whatever x holds.

    x are the rows from `first`, already loaded; values that are not finite are added one row at a time.
    """
    weight = tl.where(live, weight, 0.0)
    finite = tl.abs(x.to(tl.float32)) < float("inf")
    total = summed(total, weight, tl.where(finite, x, 0.0), PRECISION)
    if tl.min(finite.to(tl.int32)) == 0:
        cols = tl.arange(0, weight.shape[1])
        d = tl.arange(0, BLOCK_D)
        for n in tl.range(0, weight.shape[1], num_stages=1):
            w = tl.sum(tl.where((cols == n)[None, :], weight, 0.0), 1)
            on = tl.max(tl.where((cols == n)[None, :] & live, 1, 0), 1)
            row = tl.full((), 0, tl.int64) + first + n
            at = base + row * stride_row + d * stride_feature
            values = tl.load(at, mask=(d < D) & (row < num_rows), other=0.0).to(tl.float32)
            values = tl.where(tl.abs(values) < float("inf"), 0.0, values)
            w = tl.minimum(tl.maximum(w, -1.0), 1.0)  # of an infinite weight its sign, as inf times 0 is nan
            total = tl.where((on == 1)[:, None], w[:, None] * values[None, :] + total, total)
    return total


@triton.jit
def scattered(total, x, i, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """total [M, BLOCK_D] + of each owner the sums of x over live pairs by their number i, one number at a time."""
    d = tl.arange(0, BLOCK_D)
    for n in tl.range(0, D, num_stages=1):
        found = tl.sum(tl.where(live & (i == n), x, 0.0), 1)
        total = tl.where((d == n)[None, :], total + found[:, None], total)
    return total


@triton.jit
def further(SIGN: tl.constexpr, best, found, x, number, live):
    """The largest (SIGN 1) or smallest (-1) and the first edge that has it, with the live pairs of a tile; nan wins."""
    nan = (x != x) & live
    any_nan = tl.max(nan.to(tl.int32), 1) > 0
    y = tl.where(live & (nan == 0), x * SIGN, float("-inf"))
    top = tl.max(y, 1)
    hit = tl.where(any_nan[:, None], nan, (y == top[:, None]) & live)
    none: tl.constexpr = 9223372036854775807
    first = tl.min(tl.where(hit, number, none), 1)
    first = tl.where(first == none, -1, first)
    value = tl.where(any_nan, float("nan"), top * SIGN)
    return further_of(SIGN, best, found, value, first)


@triton.jit
def further_of(SIGN: tl.constexpr, best, found, value, first):
    """Of two candidates the better, the first edge where they are equal; number -1: none."""
    same = (best == value) | ((best != best) & (value != value))
    better = ((value != value) & (best == best)) | (value * SIGN > best * SIGN)
    take = (first >= 0) & ((found < 0) | better | (same & (first < found)))
    return tl.where(take, value, best), tl.where(take, first, found)


# Pointwise.


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)


@triton.jit
def uniform(seed, number, feature):
    """Uniform in [0, 1), of (seed, edge number, feature) alone: two rounds of splitmix64."""
    x = seed + number * -7046029254386353131 + feature * -4417276706812531889
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
