"""Thresholds of pruning that skip a wanted share of tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tiga import prune
from tiga.errors import TigaError


def calibrate_prune(
    program: Any, calls: Iterable[Mapping[str, Any]], target: float, per_head: bool = False
) -> float | Tensor:
    """rho such that a share `target` of the visited tiles lies below their running maximum by more than -ln(rho).

    program: a MessagePassing with an online_softmax, pruned by a threshold or not; calls: its keyword arguments, call
    after call. One exact pass over them records each tile's gap; the threshold lies in the middle between two of
    these, so that `block_prune_threshold` = rho skips that share of them, but for ties. A Python number; with
    per_head a float64 tensor of the score's heads. Raises TigaError where so many tiles do not lie below their maximum
    at all, or not by gaps that differ, within 1 point.
    """
    if not 0 < target < 1:
        raise TigaError(f"calibrate_prune: target={target}; it is the share of tiles to skip, in (0, 1).")
    found = [gaps for call in calls for gaps in _recorded(program, call)]
    if not found:
        raise TigaError("calibrate_prune: nothing to calibrate. Give calls of a program with an online_softmax.")
    if not per_head:
        return _threshold(torch.cat([gaps.flatten() for gaps in found]), target)
    heads = found[0].shape[:-2]
    if any(gaps.shape[:-2] != heads for gaps in found):
        raise TigaError(
            "calibrate_prune: per_head=True, and the calls' scores differ in heads. Give calls alike in them."
        )
    each = torch.cat([gaps.reshape(heads.numel(), -1) for gaps in found], 1)
    return torch.tensor([_threshold(gaps, target) for gaps in each], dtype=torch.float64).reshape(heads).to(each.device)


def _recorded(program: Any, call: Mapping[str, Any]) -> list[Tensor]:
    """The gaps of one exact call, [*heads, tiles, tiles] of each fold; the program's own last report stays."""
    kept = program.__dict__.pop("_reports", None)
    try:
        with prune.recording(), torch.no_grad():
            program(**call)
        reports = [prune.Report(*held) for held in program.__dict__.pop("_reports", ())]
        return [r.gaps.reshape(*r.certificate.shape[1:], *r.gaps.shape[-2:]) for r in reports if r.gaps is not None]
    finally:
        if kept is not None:
            program._reports = kept


def _threshold(gaps: Tensor, target: float) -> float:
    """The threshold for the gaps of visited tiles; nan stands where no tile was visited."""
    gaps = gaps[~gaps.isnan()].double().sort(descending=True).values
    count = len(gaps)
    if count == 0:
        raise TigaError("calibrate_prune: a head visited no tile. Give calls with edges.")
    wanted = min(max(1, round(target * count)), count - 1) if count > 1 else 1
    below = int((gaps > 0).sum())
    if below < wanted - count / 100:
        raise TigaError(
            f"calibrate_prune: target={target}, but only {below} of {count} tiles ({below / count:.1%}) lie below the "
            "running maximum. Ask for less."
        )
    wanted = min(wanted, below)
    # a cut between two gaps that differ, nearest to the one that was asked for
    differ = torch.cat([gaps[:-1] != gaps[1:], gaps.new_ones(1, dtype=torch.bool)]).nonzero().flatten() + 1
    cut = int(differ[(differ - wanted).abs().argmin()])
    cut = min(cut, below)
    if abs(cut - wanted) > count / 100 or cut == 0:
        raise TigaError(f"calibrate_prune: target={target}, but {count} tiles have gaps too equal to cut there.")
    last = gaps[cut - 1].item()
    following = max(gaps[cut].item() if cut < count else 0.0, 0.0)
    middle = following + 1 if math.isinf(last) else (last + following) / 2
    if middle > 690:
        raise TigaError(f"calibrate_prune: the threshold would be exp(-{middle:.0f}), which no number holds.")
    return math.exp(-middle)
