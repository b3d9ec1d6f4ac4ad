"""Tiles of owners of packed sequences, found and ordered on the device: no size is read on the host."""

from __future__ import annotations

import triton
import triton.language as tl

from tiga.codegen.device import count_tiles, find_blocks

BESIDE: tl.constexpr = tl.constexpr(512)  # tiles whose weights are compared at a time
WORDS: tl.constexpr = tl.constexpr(8)  # a tile: owners first and end, others low and high, band low and high


@triton.jit
def tiles_of(
    slot, places, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other,
    BLOCK_M: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """What programs of these tiles of owners are told, and their weights: others that they reach, -1 without owners."""
    tile, own_low, own_end, other_low, other_high, low, high = find_blocks(
        slot, places, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other, REVERSED
    )
    own_first = own_low + tile * BLOCK_M
    last = tl.minimum(own_first + BLOCK_M, own_end) - 1
    begin = tl.maximum(own_first + low, other_low)
    end = tl.minimum(last + high + 1, other_high)
    weight = tl.where(own_first < own_end, tl.maximum(end - begin, 0), -1)
    return own_first, own_end, other_low, other_high, low, high, weight


@triton.jit(do_not_specialize=["num_blocks", "num_own", "num_other", "slots"])
def schedule_tiles(
    places, prefix, own_bounds, other_bounds, block_low, block_high, ordered, taken,
    num_blocks, num_own, num_other, slots,
    BLOCK_M: tl.constexpr, REDO_M: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """ordered: what programs of tiles of BLOCK_M owners are told, the heaviest first, those of one weight as they lie;
    of them none is taken.

    Each program places some tiles among all. Where tiles begin, `places`, every program writes for itself: all the
    same. prefix: the same for tiles of REDO_M owners.
    """
    program = tl.program_id(0)
    count_tiles(own_bounds, places, num_blocks, num_own, 1, BLOCK_M, BLOCK)
    if program == 0:
        tl.store(taken, 0)
        count_tiles(own_bounds, prefix, num_blocks, num_own, 1, REDO_M, BLOCK)
    tl.debug_barrier()
    mine = program * ORDERED + tl.arange(0, ORDERED)
    first, own_end, other_low, other_high, low, high, weight = tiles_of(
        mine, places, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other, BLOCK_M, REVERSED
    )
    rank = tl.zeros([ORDERED], tl.int32)
    for at in tl.range(0, slots, BESIDE):
        other = at + tl.arange(0, BESIDE)
        _, _, _, _, _, _, beside = tiles_of(
            other, places, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other,
            BLOCK_M, REVERSED,
        )  # fmt: skip
        same = (beside[None, :] == weight[:, None]) & (other[None, :] < mine[:, None])
        ahead = ((beside[None, :] > weight[:, None]) | same) & (other < slots)[None, :]
        rank += tl.sum(ahead.to(tl.int32), 1)
    told = ordered + rank * WORDS
    live = mine < slots
    tl.store(told, first, mask=live)
    tl.store(told + 1, own_end, mask=live)
    tl.store(told + 2, other_low, mask=live)
    tl.store(told + 3, other_high, mask=live)
    tl.store(told + 4, low, mask=live)
    tl.store(told + 5, high, mask=live)
