"""Kernels of the neighbour searches: one program a node, over the cells around its own.

Nodes lie in the order of their cells' keys; the cells beside one another in the last direction are a run of that
order, found by halving, R runs at a time; their candidates are looked at BLOCK at a time.
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
def span(keys, least, most, num, steps):
    """(the first place whose key is at least `least`, the first whose key is above `most`), of each pair."""
    low = tl.zeros_like(least).to(tl.int32)
    high = low + num
    low_end, high_end = low, high
    for _ in range(steps):
        middle, middle_end = (low + high) // 2, (low_end + high_end) // 2
        key = tl.load(keys + middle, mask=low < high, other=0)
        key_end = tl.load(keys + middle_end, mask=low_end < high_end, other=0)
        before = (low < high) & (key < least)
        before_end = (low_end < high_end) & (key_end <= most)
        high = tl.where(before, high, middle)
        low = tl.where(before, middle + 1, low)
        high_end = tl.where(before_end, high_end, middle_end)
        low_end = tl.where(before_end, middle_end + 1, low_end)
    return low, low_end


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
    low0, high0, low1, high1 = c0 - ring0, c0 + ring0, c1 - ring1, c1 + ring1
    begin, end = c2 - ring2, c2 + ring2
    if PERIODIC:
        b0, b1, b2 = tl.load(bins), tl.load(bins + 1), tl.load(bins + 2)
        lowest, _ = wrapped(begin, b2)
        highest, _ = wrapped(end, b2)
    else:
        lowest, highest = 0, 0
        low0, high0 = tl.maximum(low0, 0), tl.minimum(high0, n0.to(tl.int32) - 1)
        low1, high1 = tl.maximum(low1, 0), tl.minimum(high1, n1.to(tl.int32) - 1)
        begin = tl.maximum(begin, 0)
    layers, across = highest - lowest + 1, high1 - low1 + 1
    count = (high0 - low0 + 1) * across * layers
    run = first + tl.arange(0, R)
    image2 = lowest + run % layers
    run_of = run // layers
    q1 = low1 + run_of % across
    q0 = low0 + run_of // across
    image = tl.zeros([R], tl.int32)
    if PERIODIC:
        image0, q0 = wrapped(q0, b0)
        image1, q1 = wrapped(q1, b1)
        image = (((image0 + IMAGES) * 1024) + image1 + IMAGES) * 1024 + image2 + IMAGES
        begin = tl.maximum(begin - image2 * b2, 0)
        end = tl.minimum(end - image2 * b2, b2 - 1)
    else:
        begin, end = begin + image, end + image
    end = tl.minimum(end, n2.to(tl.int32) - 1)
    live = (run < count) & (q0 >= 0) & (q0 < n0) & (q1 >= 0) & (q1 < n1)
    row = ((base + q0) * n1 + q1) * n2
    at, beyond = span(keys, row + begin, row + end, num, steps)
    return count, at, tl.where(live, beyond - at, 0), image


@triton.jit
def three(x, step):
    return tl.load(x), tl.load(x + step), tl.load(x + 2 * step)


@triton.jit
def apart(here, there, shift, DTYPE: tl.constexpr):
    """A dimension of the displacement that a program computes, in float64."""
    return rounded(rounded(there - here, DTYPE) + shift, DTYPE).to(tl.float64)


@triton.jit
def moved(a0, a1, a2, i0, i1, i2, DTYPE: tl.constexpr):
    """A dimension of what an image adds to a displacement: of periods (a0, a1, a2) in it."""
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
    lane, run = tl.arange(0, BLOCK), tl.arange(0, R)
    written = tl.full((), 0, tl.int32)
    each = tl.zeros([BLOCK], tl.int32)
    inner, outer = tl.zeros([BLOCK], tl.float64), tl.full([BLOCK], float("inf"), tl.float64)
    x0, x1, x2 = three(x + p, num)
    if PERIODIC:
        w0, w1, w2 = three(wraps + 3 * node, 1)
        a0, a1, a2 = three(cell, 3)
        b0, b1, b2 = three(cell + 1, 3)
        c0, c1, c2 = three(cell + 2, 3)
    first = tl.full((), 0, tl.int32)
    count = first + 1
    while first < count:
        count, at, many, image = runs(first, p, ring0, ring1, ring2, keys, places, bins, sizes, num, steps, PERIODIC, R)
        for r in range(0, tl.minimum(count - first, R)):
            begin = tl.sum(tl.where(run == r, at, 0), 0)
            size = tl.sum(tl.where(run == r, many, 0), 0)
            bits = 0
            if PERIODIC:
                bits = tl.sum(tl.where(run == r, image, 0), 0)
            for block in range(0, size, BLOCK):
                live = block + lane < size
                slot = begin + block + lane
                src = tl.load(nodes + slot, mask=live, other=0)
                y0 = tl.load(x + slot, mask=live, other=0)
                y1 = tl.load(x + num + slot, mask=live, other=0)
                y2 = tl.load(x + 2 * num + slot, mask=live, other=0)
                itself = src == node
                if PERIODIC:
                    i0 = (bits >> 20) - IMAGES + w0 - tl.load(wraps + 3 * src, mask=live, other=0)
                    i1 = ((bits >> 10) & 1023) - IMAGES + w1 - tl.load(wraps + 3 * src + 1, mask=live, other=0)
                    i2 = (bits & 1023) - IMAGES + w2 - tl.load(wraps + 3 * src + 2, mask=live, other=0)
                    d0 = apart(x0, y0, moved(a0, a1, a2, i0, i1, i2, DTYPE), DTYPE)
                    d1 = apart(x1, y1, moved(b0, b1, b2, i0, i1, i2, DTYPE), DTYPE)
                    d2 = apart(x2, y2, moved(c0, c1, c2, i0, i1, i2, DTYPE), DTYPE)
                    itself = itself & (i0 == 0) & (i1 == 0) & (i2 == 0)
                else:
                    d0 = apart(x0, y0, 0.0, DTYPE)
                    d1 = apart(x1, y1, 0.0, DTYPE)
                    d2 = apart(x2, y2, 0.0, DTYPE)
                squared = d0 * d0 + d1 * d1 + d2 * d2  # in this order, and not fused: as torch computes it
                if not LOOP:
                    live = live & (itself == 0)
                taken = (live & ((squared < bound) | ((squared == bound) & (src <= last)))).to(tl.int32)
                if FILL:
                    place = out + written + tl.cumsum(taken, 0) - 1
                    tl.store(place, (src << 30) | bits, mask=taken != 0)
                    written += tl.sum(taken, 0)
                else:
                    each += taken
                if GAP:
                    inner = tl.maximum(inner, tl.where(live & (squared <= bound), squared, 0))
                    outer = tl.minimum(outer, tl.where(live & (squared > bound), squared, float("inf")))
        first += R
    return tl.sum(each, 0).to(tl.int64), tl.max(inner, 0), tl.min(outer, 0)


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
