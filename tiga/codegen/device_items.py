"""Device functions of kernels over lists: which rows a program takes, and which edges."""

from __future__ import annotations

import triton
import triton.language as tl

FEW = tl.constexpr(8)  # edges, up to which their numbers are loaded one by one
FEW_ROWS = tl.constexpr(2)  # items, up to which they are loaded one by one
NOWHERE = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the number of an edge that is none


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
