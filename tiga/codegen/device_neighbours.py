"""Kernels of the neighbour searches: one program a node, over the cells around its own.

Nodes lie in the order of their cells' keys; the cells beside one another in the last direction are a run of that
order, found by halving. Runs are found RUNS at a time, and their candidates, end to end, are looked at BLOCK at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

IMAGES: tl.constexpr = tl.constexpr(512)
"""Added to the image in a direction, so that it is ten bits of a candidate's key."""


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """As a result in DTYPE is."""
    return x.to(DTYPE).to(x.dtype)


@triton.jit
def first_from(keys, wanted, num, steps):
    """The first place whose key is not less than wanted."""
    low = tl.zeros_like(wanted).to(tl.int32)
    high = low + num
    for _ in range(steps):
        middle = (low + high) // 2
        less = (low < high) & (tl.load(keys + middle, mask=low < high, other=0) < wanted)
        high = tl.where(less, high, middle)
        low = tl.where(less, middle + 1, low)
    return low


@triton.jit
def wrapped(cell, bins):
    """(image, cell in the box) of a cell that may lie in another image of it."""
    image = (cell + IMAGES * bins) // bins - IMAGES
    return image, cell - image * bins


@triton.jit
def runs(first, p, ring0, ring1, ring2, keys, places, bins, sizes, num, steps, PERIODIC: tl.constexpr, R: tl.constexpr):
    """(how many runs there are, and of R from `first` on: the first candidate, their number, the image as bits)."""
    c0, c1, c2 = tl.load(places + p), tl.load(places + num + p), tl.load(places + 2 * num + p)
    n0, n1, n2 = tl.load(sizes), tl.load(sizes + 1), tl.load(sizes + 2)
    base = (tl.load(keys + p) - c2) // n2 - c1
    base = base // n1 - c0
    begin, end = c2 - ring2, c2 + ring2
    if PERIODIC:
        b0, b1, b2 = tl.load(bins), tl.load(bins + 1), tl.load(bins + 2)
        lowest, _ = wrapped(begin, b2)
        highest, _ = wrapped(end, b2)
    else:
        lowest, highest = 0, 0
    layers = highest - lowest + 1
    count = (2 * ring0 + 1) * (2 * ring1 + 1) * layers
    run = first + tl.arange(0, R)
    image2 = lowest + run % layers
    run_of = run // layers
    q1 = c1 - ring1 + run_of % (2 * ring1 + 1)
    q0 = c0 - ring0 + run_of // (2 * ring1 + 1)
    image = tl.zeros([R], tl.int32)
    if PERIODIC:
        image0, q0 = wrapped(q0, b0)
        image1, q1 = wrapped(q1, b1)
        image = (((image0 + IMAGES) * 1024) + image1 + IMAGES) * 1024 + image2 + IMAGES
        begin = tl.maximum(begin - image2 * b2, 0)
        end = tl.minimum(end - image2 * b2, b2 - 1)
    else:
        begin = tl.maximum(begin, 0) + image
        end = end + image
    end = tl.minimum(end, n2.to(tl.int32) - 1)
    live = (run < count) & (q0 >= 0) & (q0 < n0) & (q1 >= 0) & (q1 < n1)
    row = ((base + q0) * n1 + q1) * n2
    at = first_from(keys, row + begin, num, steps)
    beyond = first_from(keys, row + end + 1, num, steps)
    return count, at, tl.where(live, beyond - at, 0), image


@triton.jit
def apart(x, p, at, live, num, DTYPE: tl.constexpr, s0, s1, s2):
    """Squared distance in float64 of the displacement that a program computes, added in the order of dimensions."""
    d0 = rounded(tl.load(x + at, mask=live, other=0) - tl.load(x + p), DTYPE)
    d1 = rounded(tl.load(x + num + at, mask=live, other=0) - tl.load(x + num + p), DTYPE)
    d2 = rounded(tl.load(x + 2 * num + at, mask=live, other=0) - tl.load(x + 2 * num + p), DTYPE)
    d0 = rounded(d0 + s0, DTYPE).to(tl.float64)
    d1 = rounded(d1 + s1, DTYPE).to(tl.float64)
    d2 = rounded(d2 + s2, DTYPE).to(tl.float64)
    return d0 * d0 + d1 * d1 + d2 * d2


@triton.jit
def moved(cell, d: tl.constexpr, i0, i1, i2, DTYPE: tl.constexpr):
    """Dimension d of what an image adds to a displacement."""
    a0, a1, a2 = tl.load(cell + d), tl.load(cell + 3 + d), tl.load(cell + 6 + d)
    return rounded((i0.to(a0.dtype) * a0 + i1.to(a0.dtype) * a1) + i2.to(a0.dtype) * a2, DTYPE)


@triton.jit
def survey(
    p,
    node,
    ring0,
    ring1,
    ring2,
    bound,
    last,
    keys,
    nodes,
    places,
    x,
    wraps,
    bins,
    cell,
    sizes,
    out,
    num,
    steps,
    LOOP: tl.constexpr,
    DTYPE: tl.constexpr,
    PERIODIC: tl.constexpr,
    FILL: tl.constexpr,
    GAP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many candidates lie nearer than `bound`, or at it and no later than node `last`; FILL writes their keys.

    GAP: the largest squared distance up to the bound, and the smallest beyond it, too.
    """
    found = tl.full((), 0, tl.int64)
    inner, outer = tl.full((), 0, tl.float64), tl.full((), float("inf"), tl.float64)
    first = tl.full((), 0, tl.int32)
    count = first + 1
    while first < count:
        count, at, many, image = runs(first, p, ring0, ring1, ring2, keys, places, bins, sizes, num, steps, PERIODIC, R)
        ends = tl.cumsum(many, 0)
        offset = at - (ends - many)
        for block in range(0, tl.sum(many, 0), BLOCK):
            flat = block + tl.arange(0, BLOCK)
            live = flat < tl.sum(many, 0)
            run = tl.sum((ends[None, :] <= flat[:, None]).to(tl.int32), 1)
            mine = run[:, None] == tl.arange(0, R)[None, :]
            slot = flat + tl.sum(tl.where(mine, offset[None, :], 0), 1)
            src = tl.load(nodes + slot, mask=live, other=0)
            bits = tl.zeros([BLOCK], tl.int64)
            if PERIODIC:
                bits = tl.sum(tl.where(mine, image[None, :], 0), 1).to(tl.int64)
                i0 = (bits >> 20).to(tl.int32) - IMAGES + tl.load(wraps + 3 * node)
                i1 = ((bits >> 10) & 1023).to(tl.int32) - IMAGES + tl.load(wraps + 3 * node + 1)
                i2 = (bits & 1023).to(tl.int32) - IMAGES + tl.load(wraps + 3 * node + 2)
                i0 -= tl.load(wraps + 3 * src, mask=live, other=0)
                i1 -= tl.load(wraps + 3 * src + 1, mask=live, other=0)
                i2 -= tl.load(wraps + 3 * src + 2, mask=live, other=0)
                s0 = moved(cell, 0, i0, i1, i2, DTYPE)
                s1 = moved(cell, 1, i0, i1, i2, DTYPE)
                s2 = moved(cell, 2, i0, i1, i2, DTYPE)
                squared = apart(x, p, slot, live, num, DTYPE, s0, s1, s2)
                itself = (src == node) & (i0 == 0) & (i1 == 0) & (i2 == 0)
            else:
                squared = apart(x, p, slot, live, num, DTYPE, 0.0, 0.0, 0.0)
                itself = src == node
            taken = live & ((squared < bound) | ((squared == bound) & (src <= last)))
            if not LOOP:
                taken = taken & (itself == 0)
            if FILL:
                place = out + found + tl.cumsum(taken.to(tl.int32), 0) - 1
                tl.store(place, (src << 30) | bits, mask=taken)
            found += tl.sum(taken.to(tl.int32), 0)
            if GAP:
                inside = live & (itself == 0) & (squared <= bound)
                inner = tl.maximum(inner, tl.max(tl.where(inside, squared, 0), 0))
                beyond = live & (itself == 0) & (squared > bound)
                outer = tl.minimum(outer, tl.min(tl.where(beyond, squared, float("inf")), 0))
        first += R
    return found, inner, outer


@triton.jit(do_not_specialize=["num", "steps"])
def near(
    counts,
    rowptr,
    out,
    bound,
    keys,
    nodes,
    places,
    x,
    wraps,
    which,
    bins,
    rings,
    cell,
    sizes,
    num,
    steps,
    LOOP: tl.constexpr,
    DTYPE: tl.constexpr,
    PERIODIC: tl.constexpr,
    FILL: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The neighbours within sqrt(bound) of every node: their number, or their keys behind rowptr."""
    p = tl.program_id(0)
    node = tl.load(nodes + p)
    one = tl.full((), 1, tl.int32)
    ring0, ring1, ring2 = one, one, one
    if PERIODIC:
        of = tl.load(which + node)
        bins += 3 * of
        cell += 9 * of
        rings += 3 * of
        ring0, ring1, ring2 = tl.load(rings), tl.load(rings + 1), tl.load(rings + 2)
    if FILL:
        out += tl.load(rowptr + node)
    limit = tl.load(bound)
    found, _, _ = survey(
        p, node, ring0, ring1, ring2, limit, node + num, keys, nodes, places, x, wraps, bins, cell, sizes, out,
        num, steps, LOOP, DTYPE, PERIODIC, FILL, False, R, BLOCK,
    )  # fmt: skip
    if not FILL:
        tl.store(counts + node, found)


@triton.jit(do_not_specialize=["num", "steps"])
def nearest(
    wanted,
    rowptr,
    out,
    width,
    limit,
    keys,
    nodes,
    places,
    x,
    sizes,
    num,
    steps,
    DTYPE: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The wanted[i] nearest of every node. Rings grow until that many lie as near as no node outside of them can.

    Then the bits of the bound, and where several lie at it the last node taken, are found by halving.
    """
    p = tl.program_id(0)
    node = tl.load(nodes + p)
    want = tl.load(wanted + node)
    farthest = tl.load(limit)
    step = tl.load(width)
    last = tl.full((), 0, tl.int64) + num
    ring = tl.full((), 1, tl.int32)
    bound = step * step
    found, inner, outer = survey(
        p, node, ring, ring, ring, bound, last, keys, nodes, places, x, x, x, x, sizes, out,
        num, steps, False, DTYPE, False, False, True, R, BLOCK,
    )  # fmt: skip
    while found < want:
        ring *= 2
        bound = tl.where(ring >= farthest, float("inf"), ring * step * ring * step)
        found, inner, outer = survey(
            p, node, ring, ring, ring, bound, last, keys, nodes, places, x, x, x, x, sizes, out,
            num, steps, False, DTYPE, False, False, True, R, BLOCK,
        )  # fmt: skip
    high = inner.to(tl.int64, bitcast=True)
    low = tl.full((), -1, tl.int64)
    while (found > want) & (high - low > 1):
        middle = low + (high - low) // 2
        bound = middle.to(tl.float64, bitcast=True)
        inside, inner, outer = survey(
            p, node, ring, ring, ring, bound, last, keys, nodes, places, x, x, x, x, sizes, out,
            num, steps, False, DTYPE, False, False, True, R, BLOCK,
        )  # fmt: skip
        low = tl.where(inside < want, outer.to(tl.int64, bitcast=True) - 1, low)
        high = tl.where(inside < want, high, inner.to(tl.int64, bitcast=True))
        found = tl.where(inside < want, found, inside)
    bound = high.to(tl.float64, bitcast=True)
    before = tl.full((), -1, tl.int64)
    while (found > want) & (last - before > 1):
        middle = before + (last - before) // 2
        inside, inner, outer = survey(
            p, node, ring, ring, ring, bound, middle, keys, nodes, places, x, x, x, x, sizes, out,
            num, steps, False, DTYPE, False, False, False, R, BLOCK,
        )  # fmt: skip
        before = tl.where(inside < want, middle, before)
        last = tl.where(inside < want, last, middle)
        found = tl.where(inside < want, found, inside)
    survey(
        p, node, ring, ring, ring, bound, last, keys, nodes, places, x, x, x, x, sizes,
        out + tl.load(rowptr + node), num, steps, False, DTYPE, False, True, False, R, BLOCK,
    )  # fmt: skip


@triton.jit
def order(found, rowptr, col, image, wraps, PERIODIC: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """A row's keys from the least to the greatest, as sources and images: each goes where as many are less."""
    node = tl.program_id(0).to(tl.int64)
    start = tl.load(rowptr + node)
    count = (tl.load(rowptr + node + 1) - start).to(tl.int32)
    for block in range(0, count, BLOCK):
        k = block + tl.arange(0, BLOCK)
        key = tl.load(found + start + k, mask=k < count, other=0)
        rank = tl.zeros([BLOCK], tl.int32)
        for others in range(0, count, OTHERS):
            o = others + tl.arange(0, OTHERS)
            other = tl.load(found + start + o, mask=o < count, other=9223372036854775807)
            rank += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
        src = key >> 30
        at = start + rank
        tl.store(col + at, src, mask=k < count)
        if PERIODIC:
            for d in tl.static_range(3):
                n = ((key >> (20 - 10 * d)) & 1023).to(tl.int32) - IMAGES + tl.load(wraps + 3 * node + d)
                n -= tl.load(wraps + 3 * src + d, mask=k < count, other=0)
                tl.store(image + 3 * at + d, n, mask=k < count)
