"""Plans of programs that skip tiles: the tile is the program's own, all else is a plan's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiga.codegen.plan import Plan
from tiga.codegen.tiles import Work


@dataclass(frozen=True)
class PrunedPlan(Plan):
    """early: values are asked for before a tile is judged, which hides the way from memory and reads all of them."""

    early: bool = False


def pruned_plans(block_m: int, block_n: int, itemsize: int, rows: int) -> list[Plan]:
    """Plans of tiles of block_m by block_n. Of few rows there are smaller ones: rows that do not exist have no say."""
    block_m = min(block_m, max(16, 1 << max(rows - 1, 0).bit_length()))
    warps = (8,) if block_m >= 128 else (4,) if block_m >= 64 else (4, 8)
    stages = (3, 2, 1) if itemsize == 2 else (2, 1)
    return [PrunedPlan(block_m, block_n, w, s, 1, early) for early in (True, False) for w in warps for s in stages]


def plans_within(own: int, other: int, some: Sequence[Plan]) -> list[Plan]:
    """Plans whose tiles lie within those of a map, of own by other: the same plans, their tiles cut to fit.

    Where owners are cut there are two stages at most, so that a multiprocessor has memory for two programs of half the
    warps: of 128 numbers on an H200 (2026-12-01) both kernels of the gradient took 11.7 ms, with three stages 13.6.
    """
    cut = []
    for p in some:
        block_m = min(p.block_m, own)
        warps = p.warps if block_m < 64 else min(p.warps, block_m // 16)
        stages = p.stages if block_m == p.block_m else min(p.stages, 2)
        fit = {"block_m": block_m, "block_n": min(p.block_n, other), "warps": warps, "stages": stages}
        cut.append(replace(p, **fit, masked=min(p.masked, stages)))
    return list(dict.fromkeys(cut))


def plans_of(work: Work, some: Sequence[Plan], itemsize: int, rows: int) -> Sequence[Plan]:
    """The plans to try: `some`, unless the program says which tiles there are."""
    if work.tile is not None:
        return pruned_plans(*work.tile, itemsize, rows)
    return some if work.within is None else plans_within(*work.within, some)
