"""Plans of the tiles skeleton: tile sizes, warps, stages. The first without spills runs, else that of fewest.

Few spills are better than tiny tiles, whatever those spill (`launch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """block_m owners by block_n others a tile; masked: the stages of the loop over tiles with a mask.

    From 64 owners on a warp multiplies 16 of them. Triton 3.6 gives further warps owners that the tile does not have,
    and reads past its memory.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    masked: int = 1

    def __post_init__(self) -> None:
        if self.block_m >= 64 and self.warps * 16 > self.block_m:
            raise ValueError(f"{self.warps} warps for {self.block_m} owners: at most {self.block_m // 16}")


# Vectors of one item size up to a width: plans for at most so many sums of vectors, best first.
# Chosen on an H200 (sm_90), 2026-11-30, by causal attention of 8,192 rows: forward (one sum), and backward by
# destination (one) and by source (two).
_TABLE = (
    # item size, width, sums
    (2, 64, 1, ((128, 64, 4, 3, 3), (64, 64, 4, 3, 3), (64, 64, 4, 2, 2))),
    (2, 64, 2, ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2))),
    (2, 64, 9, ((64, 32, 4, 2), (32, 32, 4, 2))),
    (2, 128, 1, ((128, 64, 8, 3, 2), (128, 64, 8, 2), (64, 64, 4, 3))),
    (2, 128, 2, ((128, 64, 8, 3, 2), (128, 64, 8, 3), (128, 32, 8, 3, 3), (64, 32, 4, 2))),
    (2, 128, 9, ((64, 32, 4, 2), (32, 32, 4, 2))),
    (2, 1 << 20, 9, ((32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 4, 2))),
    (4, 64, 9, ((64, 64, 4, 2), (128, 32, 8, 2), (128, 32, 8, 1), (64, 32, 4, 2), (64, 32, 4, 1))),
    (4, 1 << 20, 9, ((32, 32, 8, 1),)),
)
_SMALL = ((32, 32, 4, 2), (16, 16, 4, 1))


def plans(width: int, itemsize: int, sums: int, rows: int) -> list[Plan]:
    """The plans to try for vectors up to `width`, `sums` of them summed, and `rows` rows of owners."""
    itemsize = 4 if itemsize > 2 else 2
    found: tuple[tuple[int, ...], ...] = next(
        p for size, most, count, p in _TABLE if size == itemsize and width <= most and sums <= count
    )
    short = itemsize == 2 and sums <= 1
    if rows <= (128 if short else 64):
        few = min(64, max(16, 1 << (rows - 1).bit_length()))
        wide = ((128, 128, 8, 3),) if rows > 64 else ((few, 128, 4, 3),) if short and few < 64 else ()
        found = (*wide, (few, 64, 4, 3), (few, 32, 4, 2), *[p for p in found if p[0] <= few])
    return [Plan(*p) for p in (*found, *_SMALL)]


def at_once(plan: Plan) -> int:
    """Tiles that a multiprocessor visits at a time where parts of the others' rows are read: so much of its memory they
    take. On an H200 (2026-11-30) one of 128 others, two of 64 were the fastest."""
    return max(1, 128 // plan.block_n)


def merge(parts: int, width: int) -> Plan:
    """Of the states of parts: one owner, so many parts at a time, by one warp where those are few numbers."""
    at_a_time = min(32, 1 << (parts - 1).bit_length())
    return Plan(1, at_a_time, 4 if at_a_time * width > 1024 else 1, 1)


def candidates(some: list[Plan]) -> list[Plan]:
    """Plans to time: those of the table, and neighbours of its first two in tile sizes and stages."""
    found = dict.fromkeys(some)
    for p in some[:2]:
        for m, n in ((2, 2), (2, 4), (2, 1), (4, 2), (1, 2), (1, 4)):  # halves
            block_m, block_n = p.block_m * m // 2, p.block_n * n // 2
            for stages in (p.stages, p.stages + 1, p.stages - 1):
                if 16 <= block_m <= 128 and 16 <= block_n <= 128 and 1 <= stages <= 4:
                    warps = 8 if block_m >= 128 else p.warps if block_m < 64 else 4
                    found[Plan(block_m, block_n, warps, stages, min(p.masked, stages))] = None
    return list(found)
