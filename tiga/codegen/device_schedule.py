"""Tiles of owners of packed sequences, found and ordered on the device: no size is read on the host."""

from __future__ import annotations

import triton
import triton.language as tl

from tiga.codegen.device import find_block

BESIDE: tl.constexpr = tl.constexpr(256)  # tiles whose weights are compared at a time
WORDS: tl.constexpr = tl.constexpr(8)  # a tile: owners first and end, others low and high, band low and high, weight


@triton.jit(do_not_specialize=["num_blocks", "num_own", "num_other"])
def schedule_tiles(
    prefix,
    own_bounds,
    other_bounds,
    block_low,
    block_high,
    ranges,
    num_blocks,
    num_own,
    num_other,
    BLOCK_M: tl.constexpr,
    REVERSED: tl.constexpr,
):
    """ranges[tile]: what a program of a tile of owners is told; its weight: how many others it reaches."""
    slot = tl.program_id(0)
    tile, own_low, own_end, other_low, other_high, low, high = find_block(
        slot, prefix, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other, REVERSED
    )
    own_first = own_low + tile * BLOCK_M
    last = tl.minimum(own_first + BLOCK_M, own_end) - 1
    begin = tl.maximum(own_first + low, other_low)
    end = tl.minimum(last + high + 1, other_high)
    told = ranges + slot * WORDS
    tl.store(told, own_first)
    tl.store(told + 1, own_end)
    tl.store(told + 2, other_low)
    tl.store(told + 3, other_high)
    tl.store(told + 4, low)
    tl.store(told + 5, high)
    tl.store(told + 6, tl.where(own_first < own_end, tl.maximum(end - begin, 0), -1))


@triton.jit(do_not_specialize=["slots"])
def order_tiles(ranges, ordered, taken, slots, BLOCK: tl.constexpr):
    """ordered: the tiles of `ranges`, the heaviest first, those of one weight as they were; of them none is taken."""
    if tl.program_id(0) == 0:
        tl.store(taken, 0)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(ranges + mine * WORDS + 6, mask=mine < slots, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(0, slots, BESIDE):
        other = at + tl.arange(0, BESIDE)
        beside = tl.load(ranges + other * WORDS + 6, mask=other < slots, other=0)
        same = (beside[None, :] == weight[:, None]) & (other[None, :] < mine[:, None])
        ahead = ((beside[None, :] > weight[:, None]) | same) & (other < slots)[None, :]
        rank += tl.sum(ahead.to(tl.int32), 1)
    for k in tl.static_range(6):
        word = tl.load(ranges + mine * WORDS + k, mask=mine < slots, other=0)
        tl.store(ordered + rank * WORDS + k, word, mask=mine < slots)
