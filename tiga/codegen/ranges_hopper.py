"""Where a program of the hopper skeleton is, by what it is told of its relation: lines of its function `reach`."""

from __future__ import annotations

# What the kernel is told of its relation: a band, intervals, or the tiles that device_schedule found.
TOLD = {"band": ("low", "high"), "rows1": ("start", "stop"), "blocks": ("ordered", "taken")}
TAKEN = ("blocks",)  # whose tiles are taken by whoever is next: what counts them is 0 before the kernel begins
REACH = (
    "head own_first own_end low high other_low other_high begin next_begin inner_begin steps all_steps all_tiles"
).split()
# Tiles with a mask lie at both ends of those of edges only. They begin with the first edge; those that may be skipped,
# which are numbered, at a multiple of their size.
NUMBERED = "begin = begin // BLOCK_N * BLOCK_N"
TILES = """inner_begin = begin + tl.cdiv(tl.maximum(inner_begin - begin, 0), BLOCK_N) * BLOCK_N
inner_end = begin + tl.maximum(tl.minimum(inner_end, end) - begin, 0) // BLOCK_N * BLOCK_N
inner_end = tl.maximum(inner_begin, inner_end)
some_inner = inner_begin < inner_end
steps = tl.cdiv(tl.maximum(tl.where(some_inner, inner_begin, end) - begin, 0), BLOCK_N)
all_steps = steps + tl.where(some_inner, tl.cdiv(tl.maximum(end - inner_end, 0), BLOCK_N), 0)
next_begin = inner_end
all_tiles = tl.maximum(all_steps + (inner_end - inner_begin) // BLOCK_N, 1)
"""
_BAND = """last_row = tl.minimum(own_first + BLOCK_M, own_end) - 1
begin = tl.maximum(own_first + low, other_low)
end = tl.minimum(last_row + high + 1, other_high)
inner_begin = tl.maximum(last_row + low, other_low)
inner_end = tl.minimum(own_first + high + 1, other_high)
"""
_PLACE = """slot, head = place(program, tl.cdiv(num_own, BLOCK_M), num_heads, group, {last_first})
own_first = slot * BLOCK_M
own_end = num_own
"""
RANGES = {
    "band": _PLACE
    + """other_low = 0
other_high = num_other
"""
    + _BAND,
    "rows1": _PLACE
    + """low, high, other_low, other_high = 0, 0, 0, num_other
begin, end, inner_begin, inner_end = reach_of_rows(start, stop, own_first, num_own, num_other, BLOCK_M)
""",
    "blocks": """slot, head = place(program, num_tiles // num_heads, num_heads, group, False)
at = ordered + slot * 8
own_first = tl.load(at)
own_end = tl.load(at + 1)
other_low = tl.load(at + 2)
other_high = tl.load(at + 3)
low = tl.load(at + 4)
high = tl.load(at + 5)
"""
    + _BAND,
}
