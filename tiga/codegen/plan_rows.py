"""Plans of the rows skeleton: rows a program, edges at a time, warps; by widths and degrees, never by an edge count."""

from __future__ import annotations

from dataclasses import dataclass

SPLIT = 256
"""Edges of an item, at least, before a row is cut: below it a piece does not pay for its state's way through memory."""
PIECES = 8192
"""Items that all edges are worth: of larger graphs longer ones, so that states of pieces stay small beside fields."""
REGISTERS = 32
"""Of a thread, for one value of all edges that a program visits at a time: several such live at once."""
FEW_EDGES = 8
"""Edges of a row at a time where several rows share a warp."""
FEW_PROGRAMS = 2048
"""Warps that a GPU holds at once, about: fewer rows are not packed."""


@dataclass(frozen=True)
class Plan:
    rows: int
    block_e: int
    warps: int


# Widest factor of a matrix product an edge: (rows, edges, warps), best first. Products need 16 rows x edges or more.
# Chosen by ptxas for sm_90 (registers, no spills).
_MATRICES = (
    (16, ((4, 4, 1), (4, 8, 4), (2, 8, 1))),
    (32, ((4, 4, 4), (2, 8, 4), (4, 4, 8))),
    (1 << 30, ((4, 8, 8), (4, 4, 8), (2, 8, 8), (2, 8, 4))),
)


def plans(row_bytes: int, features: int, matrix: int, num_rows: int, mean_degree: float) -> list[Plan]:
    """The plans to try, best first.

    An edge gathers vectors of `row_bytes` at most, and holds `features` numbers; `matrix` is the widest factor of its
    matrix products, 0 without any. A warp reads 512 bytes at once: of one edge where its vector is as wide, else of
    several, and of several rows where there are enough of them. Half the edges at a time where registers do not
    suffice.
    """
    if matrix:
        sizes = next(sizes for most, sizes in _MATRICES if matrix <= most)
        return [*[Plan(*size) for size in sizes], Plan(1, 16, 8)]
    lanes = min(32, _power(row_bytes / 16))
    warps = min(4, _power(features / 256))
    edges = max(1, min(64, REGISTERS * 32 * warps // _power(features)))
    few = min(FEW_EDGES, _power(mean_degree))
    rows = max(1, min(32 // lanes, edges // few, _power(num_rows / FEW_PROGRAMS + 1) // 2))
    edges //= rows
    return [*[Plan(rows, edges >> k, warps) for k in range(3) if edges >> k], Plan(1, 1, max(4, warps))]


def split_of(num_edges: int) -> int:
    """Edges of one item at most."""
    return max(SPLIT, min(16 * SPLIT, _power(num_edges / PIECES)))


def _power(x: float) -> int:
    """The least power of two that is not below x."""
    return 1 << max(0, int(-(-x // 1)) - 1).bit_length()
