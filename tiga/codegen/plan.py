"""Plans of the tiles skeleton: tile sizes, warps, stages, by the widest vector. The first that fits is taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    block_m: int
    block_n: int
    warps: int
    stages: int
    last: bool = False


# (widest vector, item size): plans for one fold, then for several, best first. Chosen by ptxas for sm_90 (registers, no
# spills), 2026-11-30.
_TABLE = (
    ((64, 2), ((128, 64, 8, 3), (64, 64, 8, 2)), ((64, 32, 4, 2),)),
    ((128, 2), ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)), ((64, 32, 8, 2),)),
    ((1 << 20, 2), ((64, 32, 8, 2),), ((32, 32, 8, 2),)),
    ((64, 4), ((32, 32, 8, 2),), ((32, 32, 8, 2),)),
    ((1 << 20, 4), ((32, 32, 8, 1),), ((32, 16, 8, 1),)),
)
_SMALL = ((32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1))


def plans(widths: list[int], itemsize: int, folds: int) -> list[Plan]:
    """The plans to try for vectors of `widths`."""
    widest = max(widths, default=16)
    itemsize = 4 if itemsize > 2 else 2
    single, several = next((one, more) for (most, size), one, more in _TABLE if widest <= most and itemsize <= size)
    rows = (*(single if folds == 1 else several), *_SMALL)
    return [Plan(m, n, warps, stages, k == len(rows) - 1) for k, (m, n, warps, stages) in enumerate(rows)]
