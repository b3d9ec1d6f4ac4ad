"""Plans of the tiles skeleton: tile sizes, warps, stages, by the width of the widest vector. The first that fits is taken."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    block_m: int
    block_n: int
    warps: int
    stages: int
    last: bool = False


# (most vector elements, item size): plans, best first
_TABLE = (
    ((64, 2), ((128, 64, 4, 3), (64, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))),
    ((128, 2), ((128, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))),
    ((256, 2), ((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))),
    ((64, 4), ((64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1))),
    ((128, 4), ((64, 32, 8, 2), (32, 32, 4, 2), (16, 16, 4, 1))),
    ((1 << 20, 4), ((32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1))),
)


def plans(widths: list[int], itemsize: int, folds: int) -> list[Plan]:
    """The plans to try for vectors of `widths`."""
    widest = max(widths, default=16)
    itemsize = 4 if itemsize > 2 else 2
    rows = next(rows for (most, size), rows in _TABLE if widest <= most and itemsize <= size)
    if folds > 1:
        rows = tuple([r for r in rows if r[0] * r[1] <= 64 * 64] or rows)
    return [Plan(*row, last=k == len(rows) - 1) for k, row in enumerate(rows)]
