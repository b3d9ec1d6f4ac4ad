"""Plans of the rows skeleton: rows a program, edges at a time, warps; by widths and degrees, never by an edge count."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

REGISTERS = 32
"""Of a thread, for one value of all edges that a program visits at a time: several such live at once."""
FEW_EDGES = 4
"""Edges of a row at a time, at least, where rows have no fewer: less leaves too few loads in flight."""
MANY_EDGES = 32
"""Edges of a row, beyond which more change no plan."""
PACKED = 8
"""Items that a program visits one after another where there are many: what is done once a program is done less."""
FEW_PROGRAMS = 2048
"""Warps that a GPU holds at once, about: fewer rows are not packed."""
MOST_NUMBERS = 1 << 20
"""Of one tile, by Triton."""


@dataclass(frozen=True)
class Plan:
    rows: int
    block_e: int
    warps: int
    stages: int = 3


class Bucket(NamedTuple):
    """All that plans ask of a graph's sizes, in powers of two.

    spare: rows that may share a program, at most: fewer programs than a GPU holds are not packed. few: edges of a row.
    """

    spare: int
    few: int


@functools.lru_cache(4096)
def bucket(num_rows: int, num_edges: int) -> Bucket:
    spare = min(32, 1 << max(0, (num_rows // FEW_PROGRAMS).bit_length() - 1))
    return Bucket(spare, min(MANY_EDGES, 1 << max(0, -(-num_edges // max(1, num_rows)) - 1).bit_length()))


# Widest factor of a matrix product an edge: (rows, edges, warps), best first. Products need 16 rows x edges or more.
# Chosen by ptxas for sm_90 (registers, no spills).
_MATRICES = (
    (16, ((4, 4, 1), (4, 8, 4), (2, 8, 1))),
    (32, ((4, 4, 4), (2, 8, 4), (4, 4, 8))),
    (1 << 30, ((4, 8, 8), (4, 4, 8), (2, 8, 8), (2, 8, 4))),
)


def plans(
    row_bytes: int,
    features: int,
    matrix: int,
    size: Bucket,
    asked: tuple[int, int] = (0, 0),
    held: bool = False,
    rescaled: bool = True,
) -> list[Plan]:
    """The plans to try, best first: what was asked for, (edges a program visits at a time, warps), before all others.

    An edge gathers vectors of `row_bytes` at most, and holds `features` numbers; `matrix` is the widest factor of its
    matrix products, 0 without any. asked: 0 asks for nothing. held: of a vector that edges do not
    gather, but compute, each holds the whole. rescaled: what a row has summed is scaled anew with the edges that a
    program visits at a time, as by softmax.
    """
    usual = _plans(row_bytes, features, matrix, size)
    if (held or (row_bytes >= 512 and not rescaled)) and not matrix and len(usual) > 2:
        # half the edges at a time: registers decide how many warps run. On an H200 469 us were 288 and 736 were 602;
        # passes without softmax over float32 rows of 4 x 32 took 88 to 95 % of the time, those with it 110 %
        usual = usual[1:]
    block_e, warps = asked[0] or usual[0].rows * usual[0].block_e, asked[1] or usual[0].warps
    if asked == (0, 0) or block_e * _power(features) > MOST_NUMBERS:
        return usual
    rows = min(usual[0].rows, block_e)
    return [Plan(rows, block_e // rows, warps), *usual]


def _plans(row_bytes: int, features: int, matrix: int, size: Bucket) -> list[Plan]:
    """
    A warp reads 256 bytes at once: of one edge where its vector is as wide, else of several rows, so that a row's edges
    are added in registers, and of several edges where rows are few. Half the edges at a time where registers do not
    suffice. Best of those timed on an H200, 2026-12-01: GATv2 and dot product of 4 heads of 32, float32 and bfloat16.
    """
    if matrix:
        sizes = next(sizes for most, sizes in _MATRICES if matrix <= most)
        return [*[Plan(*size) for size in sizes], Plan(1, 16, 8)]
    lanes = min(32, _power(row_bytes / 16))
    warps = min(4, _power(features / 256))
    edges = max(1, min(64, REGISTERS * 32 * warps // _power(features)))
    few = FEW_EDGES if lanes > 4 else min(size.few, 2 * FEW_EDGES)
    rows = max(1, min(16 // lanes, edges // few, size.spare))
    edges //= rows
    if lanes > 4:
        # a row's last edges are visited with the whole block's instructions
        edges = min(edges, FEW_EDGES)
    return [*[Plan(rows, edges >> k, warps) for k in range(3) if edges >> k], Plan(1, 1, 4), Plan(1, 1, 8)]


def programs(groups: Any, processors: int, most: int = 0, larger: Any = max, smaller: Any = min) -> Any:
    """How many programs visit so many groups of items: all at once where they fit the GPU; at most so many, if any."""
    found = larger(smaller(groups, 2 * processors * 32), -(-groups // PACKED))
    return smaller(found, most) if most else found


def whole_waves(most: int, registers: int, warps: int, processors: int) -> int:
    """At most so many programs, as many as run at once or a multiple of that: none of them waits for the last ones."""
    at_once = processors * max(1, min(32, 64 // warps, 65536 // (-(-registers // 8) * 8 * 32 * warps)))
    return most - most % at_once if most > at_once else most


def _power(x: float) -> int:
    """The least power of two that is not below x."""
    return 1 << max(0, int(-(-x // 1)) - 1).bit_length()
