"""What it means to skip tiles, in float64 and one tile after another: nothing here knows of programs or kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SLACK = 1 + 1 / 1024  # by which a certificate is widened
TOGETHER = 128  # rows whose tiles come in one order


@dataclass
class Judged:
    """kept: [rows, sources], the pairs left; counts: (visited, skipped, absent) of each query block, in order."""

    kept: Tensor
    counts: list[tuple[int, int, int]]
    bound: Tensor  # [rows]: what is left out, over what is kept and that
    gaps: list[float]  # of every visited tile, how far its top lies below the running maximum


def starts(edges: list[int], size: int, together: int = 0) -> list[tuple[int, int, int, int]]:
    """Rows of the query blocks of segments with these edges, and of those around them whose tiles come in one order."""
    near = max(size, together or TOGETHER)
    around = lambda i, a, b: (a + (i - a) // near * near, min(a + (i - a) // near * near + near, b))
    return [(i, min(i + size, b), *around(i, a, b)) for a, b in zip(edges, edges[1:]) for i in range(a, b, size)]


def in_order(tiles: list[int], near: dict[int, Tensor], cols: int, order: str, first: Tensor) -> list[int]:
    if order == "once":
        full = lambda t: bool(near[t].all()) and near[t].shape[1] == cols
        return [t for t in tiles if not full(t)] + [t for t in tiles if full(t)]
    if order == "in turn":
        reached = first.any(0).nonzero().flatten()
        low, high = (int(reached[0]) // cols, int(reached[-1]) // cols) if len(reached) else (0, -1)
        return [t for t in tiles if low <= t <= high] + [t for t in tiles if not low <= t <= high]
    return tiles


def judge(
    score: Tensor,
    mask: Tensor,
    tile: tuple[int, int],
    blocks: list[tuple[int, int, int, int]],
    rho: float | None = None,
    eps: float | None = None,
    order: str = "once",
    first: Tensor | None = None,
) -> Judged:
    """One head: score [rows, sources] in float64, mask: which pairs are edges; first: those of first intervals."""
    cols, count = tile[1], -(-score.shape[1] // tile[1])
    kept, bound, counts, gaps = torch.zeros_like(mask), torch.zeros(len(score)).double(), [], []
    for a, b, near_a, near_b in blocks:
        at = {t: slice(t * cols, (t + 1) * cols) for t in range(count)}
        live = {t: mask[a:b, at[t]] for t in range(count)}
        tiles = [t for t in range(count) if live[t].any()]
        highest, skipped = -math.inf, 0
        left = torch.zeros(b - a).double()  # sums of exp(score), as they are
        held = torch.zeros(b - a).double()
        near = {t: mask[near_a:near_b, at[t]] for t in range(count)}
        for t in in_order(tiles, near, cols, order, mask[a:b] if first is None else first[a:b]):
            x = score[a:b, at[t]].masked_fill(~live[t], -math.inf)
            top, tops, n = x.max().item(), x.amax(1), live[t].sum(1)
            more = n * tops.exp() * SLACK
            gaps.append(highest - top if highest > -math.inf else -math.inf)
            if rho is not None:
                out = top < highest + math.log(rho)
            else:
                out = bool(((left + more <= eps / (1 - eps) * held) | (n == 0)).all())
            highest = max(highest, top)
            if out:
                skipped += 1
                left += more
            else:
                kept[a:b, at[t]] = live[t]
                held += x.exp().sum(1)
        counts.append((len(tiles), skipped, count - len(tiles)))
        total = left + held
        bound[a:b] = torch.where(total == 0, 0.0, left / total)
    return Judged(kept, counts, bound, gaps)


def softmax(score: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """[rows, features]: rows without pairs are 0."""
    weight = score.masked_fill(~mask, -math.inf).softmax(1)
    return torch.where(mask.any(1, keepdim=True), weight, 0.0).nan_to_num(0.0) @ value


def omitted(score: Tensor, mask: Tensor, kept: Tensor) -> Tensor:
    """[rows]: the share of each row's probability on edges that were not kept."""
    weight = score.masked_fill(~mask, -math.inf).softmax(1).nan_to_num(0.0)
    return (weight * (mask & ~kept)).sum(1).clamp(max=1)
