"""What kernels over intervals are told of their relation: each row's intervals, put right, and the reach of columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def interval(start, stop, row, live, num_src):
    """(start, stop) of rows as they were given, brought within 0 .. num_src: int64."""
    low = tl.minimum(tl.maximum(tl.load(start + row, mask=live, other=0).to(tl.int64), 0), num_src)
    high = tl.minimum(tl.maximum(tl.load(stop + row, mask=live, other=0).to(tl.int64), 0), num_src)
    return low, tl.maximum(low, high)


@triton.jit(do_not_specialize=["num_rows", "num_src"])
def row_bounds(
    given, given_end, given2, given2_end, start, stop, start2, stop2, low, high, num_rows, num_src,
    TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Intervals as kernels read them: int32, not empty backwards, the second after the first, no source in both.

    low, high: of BLOCK rows together the least source that one has, and past the last; num_src and 0 if none has any.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < num_rows
    num_src = num_src.to(tl.int64)
    a, b = interval(given, given_end, row, live, num_src)
    least, most = tl.where(a < b, a, num_src), tl.where(a < b, b, 0)
    if TWO:
        c, d = interval(given2, given2_end, row, live, num_src)
        swap = c < a
        a, c = tl.where(swap, c, a), tl.where(swap, a, c)
        b, d = tl.where(swap, d, b), tl.where(swap, b, d)
        c = tl.maximum(c, b)  # intervals that nobody checked may overlap; a pair still counts once
        d = tl.maximum(c, d)
        tl.store(start2 + row, c.to(tl.int32), mask=live)
        tl.store(stop2 + row, d.to(tl.int32), mask=live)
        least = tl.minimum(tl.where(a < b, a, num_src), tl.where(c < d, c, num_src))
        most = tl.maximum(tl.where(a < b, b, 0), tl.where(c < d, d, 0))
    tl.store(start + row, a.to(tl.int32), mask=live)
    tl.store(stop + row, b.to(tl.int32), mask=live)
    tl.store(low + tl.program_id(0), tl.min(least, 0).to(tl.int32))
    tl.store(high + tl.program_id(0), tl.max(most, 0).to(tl.int32))


@triton.jit
def span(start, stop, row, live, num_src):
    """(least source, past the last) of rows; num_src and 0 where there are none."""
    a, b = tl.load(start + row, mask=live, other=0), tl.load(stop + row, mask=live, other=0)
    return tl.where(a < b, a, num_src), tl.where(a < b, b, 0)


@triton.jit(do_not_specialize=["num_rows", "num_src"])
def column_reach(
    start, stop, start2, stop2, low, high, reach_low, reach_high, num_rows, num_src,
    BLOCK_M: tl.constexpr, TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For a tile of BLOCK_M sources: the first row that ends after its begin, and past the last that begins before its
    end. Wider than the rows that reach it where starts and stops do not grow."""
    tile = tl.program_id(0)
    first, past = tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, num_src)
    blocks = tl.cdiv(num_rows, BLOCK)
    block_low, block_high = blocks, blocks * 0 - 1
    for at in tl.range(0, blocks, BLOCK):
        k = at + tl.arange(0, BLOCK)
        live = k < blocks
        ends = tl.load(high + k, mask=live, other=0) > first
        begins = (tl.load(low + k, mask=live, other=0) < past) & live
        block_low = tl.minimum(block_low, tl.min(tl.where(ends, k, blocks), 0))
        block_high = tl.maximum(block_high, tl.max(tl.where(begins, k, -1), 0))
    row = block_low * BLOCK + tl.arange(0, BLOCK)
    _, most = span(start, stop, row, row < num_rows, num_src)
    if TWO:
        most = tl.maximum(most, span(start2, stop2, row, row < num_rows, num_src)[1])
    tl.store(reach_low + tile, tl.min(tl.where(most > first, row, num_rows), 0))
    row = tl.maximum(block_high, 0) * BLOCK + tl.arange(0, BLOCK)
    least, _ = span(start, stop, row, row < num_rows, num_src)
    if TWO:
        least = tl.minimum(least, span(start2, stop2, row, row < num_rows, num_src)[0])
    inside = (least < past) & (row < num_rows) & (block_high >= 0)
    tl.store(reach_high + tile, tl.max(tl.where(inside, row + 1, 0), 0))
