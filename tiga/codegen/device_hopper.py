"""Pieces of Gluon kernels that are the same in all of them, and the words that emitted lines are written with."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import (  # noqa: F401
    abs,
    arange,
    atomic_add,
    bfloat16,
    cast,
    cdiv,
    ceil,
    constexpr,
    convert_layout,
    cos,
    erf,
    exp,
    exp2,
    float16,
    float32,
    floor,
    full,
    int1,
    int8,
    int16,
    int32,
    int64,
    load,
    log,
    log2,
    max,
    maximum,
    minimum,
    num_programs,
    program_id,
    rsqrt,
    sin,
    sqrt,
    store,
    sum,
    uint8,
    where,
    zeros,
)
from triton.language import PropagateNan  # noqa: F401

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)

# Where a program is.


@gluon.jit
def back_and_forth(turn, num_tiles):
    """The tile of a program's turn. Tiles lie by weight, and are dealt to all programs in turn, from the first program
    to the last, then from the last to the first: so none has the heaviest of every round. A round that is not whole is
    dealt forth."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    first = turn - program
    back = (first // programs % 2 == 1) & (first + programs <= num_tiles)
    return gl.where(back, first + programs - 1 - program, turn)


@gluon.jit
def place(program, tiles, num_heads, group, LAST_FIRST: gl.constexpr):
    """(tile, head): heads in groups whose fields stay in the cache, and of each tile the heavier first."""
    of_group = group * tiles
    g = program // of_group
    rest = program - g * of_group
    size = gl.minimum(num_heads - g * group, group)
    head = g * group + rest % size
    tile = rest // size
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, head


@gluon.jit
def tile_at(step, steps, all_steps, begin, next_begin, inner_begin, BLOCK_N: gl.constexpr):
    """Where the others of a program's tile number `step` begin: those with a mask, then those of edges only."""
    masked = gl.where(step < steps, begin + step * BLOCK_N, next_begin + (step - steps) * BLOCK_N)
    return gl.where(step < all_steps, masked, inner_begin + (step - all_steps) * BLOCK_N)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next place of a ring."""
    if STAGES == 1:
        return stage, phase ^ 1
    else:
        wraps = stage == STAGES - 1
        return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def tell(told, at, words):
    """Of a tile of owners what its consumers are to know, in shared memory from `at` on: they read it where they need
    it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for k in gl.static_range(len(words)):
        told.index(at + k).store(gl.full([1], words[k], gl.int32, layout))


@gluon.jit
def word(told, at):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(told.index(at).load(layout), 0)


@gluon.jit
def reach_of_rows(start, stop, own_first, num_own, num_other, BLOCK_M: gl.constexpr):
    """(begin, end, inner_begin, inner_end) of a tile of owners that each have one interval of others."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    block: gl.constexpr = 256 if BLOCK_M > 128 else 128  # a power of two
    lane = gl.arange(0, block, layout=layout)
    own = own_first + lane
    live = (own < num_own) & (lane < BLOCK_M)
    low = gl.load(start + own, mask=live, other=0)
    high = gl.load(stop + own, mask=live, other=0)
    some = low < high
    begin = gl.min(gl.where(some, low, num_other), 0)
    end = gl.max(gl.where(some, high, 0), 0)
    inner_begin = gl.max(gl.where(live, low, 0), 0)
    inner_end = gl.min(gl.where(live, high, num_other), 0)
    return gl.maximum(begin, 0), gl.minimum(end, num_other), inner_begin, inner_end


# Fields.


@gluon.jit
def load_numbers(base, rows, more, stride_row, live):
    """[rows]: rows that are not live are 0."""
    return gl.load(base + rows.to(gl.int64) * stride_row + more, mask=live, other=0)


@gluon.jit
def store_rows(at, x, live, width, BLOCK_D: gl.constexpr, LAYOUT: gl.constexpr):
    """x, in LAYOUT, into contiguous vectors that start at `at`, for live rows."""
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))
    rows = gl.convert_layout(at, gl.SliceLayout(1, LAYOUT))
    here = gl.convert_layout(live, gl.SliceLayout(1, LAYOUT))
    gl.store(rows[:, None] + d[None, :], x, mask=here[:, None] & (d < width)[None, :])


@gluon.jit
def store_through(buffer, at, stride, first, end, width, x, DTYPE: gl.constexpr, BLOCK_D: gl.constexpr):
    """x, into contiguous vectors, `stride` from row to row of `first` .. `end`, by way of shared memory: a row of it is
    written at a time, where a warpgroup's registers hold pairs of numbers of eight rows."""
    buffer.store(x.to(DTYPE))
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [warps, 1], [1, 0])
    row = first + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    rows = at + row.to(gl.int64) * stride
    gl.store(rows[:, None] + d[None, :], buffer.load(layout), mask=(row < end)[:, None] & (d < width)[None, :])


@gluon.jit
def load_through(buffer, at, stride, first, end, width, BLOCK_D: gl.constexpr, LAYOUT: gl.constexpr):
    """Such vectors, in LAYOUT, the same way back; 0 outside of the rows and of the vectors."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [warps, 1], [1, 0])
    row = first + gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    rows = at + row.to(gl.int64) * stride
    buffer.store(gl.load(rows[:, None] + d[None, :], mask=(row < end)[:, None] & (d < width)[None, :], other=0))
    return buffer.load(LAYOUT)


@gluon.jit
def over_features(x, LAYOUT: gl.constexpr):
    """A number a row, for all features of LAYOUT."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def spoiled_rows(x, LIKE: gl.constexpr):
    """[rows]: whether any element is not a number."""
    return gl.convert_layout(gl.max((x != x).to(gl.int32), 1), LIKE, assert_trivial=True)


# Folds.


@gluon.jit
def edges_only(x, at, row_start, row_stop, instead, COLS: gl.constexpr):
    """x of pairs that are edges: of others from `at` on, an interval a row."""
    other = at + gl.arange(0, x.shape[1], layout=COLS)
    live = (other[None, :] >= row_start[:, None]) & (other[None, :] < row_stop[:, None])
    return gl.where(live, x, instead)


@gluon.jit
def packed(x, DTYPE: gl.constexpr):
    """x in 16 bits, each two in the register of the first: what goes from loop to loop stays so, where two numbers of
    16 bits would be taken apart and put together again in each. The second's register is never read: it is none."""
    name: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    text: gl.constexpr = "cvt.rn." + name + ".f32 $0, $3, $2; mov.b32 $1, $0;"
    return gl.inline_asm_elementwise(text, "=r,=r,f,f", [x], dtype=gl.int32, is_pure=True, pack=2)


@gluon.jit
def unpacked(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """What was packed, as an operand of a product."""
    if DTYPE == gl.bfloat16:
        each = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        each = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2)
    return gl.convert_layout(each, LAYOUT, assert_trivial=True)


@gluon.jit
def not_zero(by):
    """by, or a number too small to make a difference: an infinite score keeps its sign."""
    return gl.where(by == 0, 1.1754943508222875e-38, by)


@gluon.jit
def furthest(x, by):
    """[rows]: that of x which is the largest once multiplied by `by`."""
    if by > 0:
        top = gl.max(x, 1)
    else:
        top = gl.min(x, 1)
    return top


# Pointwise.


@gluon.jit
def reciprocal(x):
    """1 / x to the last digit or two of float32."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    return reciprocal(1 + gl.exp2(-x * LOG2E))


@gluon.jit
def tanh(x):
    return 1 - 2 * reciprocal(gl.exp2(x * (2 * LOG2E)) + 1)


@gluon.jit
def sign(x):
    return gl.where(x > 0, 1, gl.where(x < 0, -1, 0)).to(x.dtype)
