"""Skipping tiles of online_softmax: what may be asked for, what a call reports of it, and where it cannot be."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga import preparation
from tiga.errors import TigaError

TILE = (64, 128)
"""Destinations and sources of the tiles that are judged, unless others are given."""
TOGETHER = 128
"""Destinations whose tiles are judged in one order, whichever of them is worked on beside which."""
DEVICES = preparation.KERNEL_DEVICES
"""Device types that have the kernels."""


class Note(NamedTuple):
    """A pruned fold of a trace: what was asked for, and (word, type) of what it says of itself."""

    asked: tuple[str, Any]
    tile: tuple[int, int]
    words: tuple[tuple[str, Any], ...]


class _Here(threading.local):
    gaps = False


_here = _Here()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Calls inside are exact, on the paths that prune, and record how far each tile lies below the running maximum."""
    kept, _here.gaps = _here.gaps, True
    try:
        yield
    finally:
        _here.gaps = kept


def records_gaps() -> bool:
    """Whether calls now are exact and give how far each tile lies below the running maximum."""
    return _here.gaps


def wanted(note: Note) -> tuple:
    """What a call returns beside its results: certificate, tiles visited and skipped; each tile's gap if recorded."""
    if torch.compiler._is_exporting_flag:
        return ()
    return note.words if records_gaps() else note.words[:3]


def rows(graph: Any) -> tuple:
    """What a report needs of its graph: sizes, kind, and where blocks of destinations begin."""
    boundaries = graph.tensors[int(graph.reversed)] if graph.kind == "blocks" else None
    return (graph.num_dst, graph.num_src, graph.kind, len(graph.tensors), graph.reversed, boundaries)


def check_options(rho: Any, eps: Any, tile: Any) -> None:
    """Raises TigaError or TypeError for options that online_softmax cannot take."""
    for name, x in (("block_prune_threshold", rho), ("prune_mass", eps)):
        tensor = name == "block_prune_threshold" and isinstance(x, Tensor)
        if x is not None and not tensor and (isinstance(x, bool) or not isinstance(x, (int, float))):
            raise TypeError(
                f"online_softmax: {name} is {type(x).__name__}; it is a Python number, or None for exact attention."
            )
    if rho is not None and eps is not None:
        raise TigaError("online_softmax: block_prune_threshold and prune_mass are two rules; give one.")
    if isinstance(rho, Tensor):
        check_thresholds(rho)
    elif rho is not None and not (0 < rho <= 1):
        raise TigaError(
            f"online_softmax: block_prune_threshold={rho}; it lies in (0, 1]. Leave it out for exact attention."
        )
    if eps is not None and not (0 < eps < 1):
        raise TigaError(f"online_softmax: prune_mass={eps}; it lies in (0, 1). Leave it out for exact attention.")
    good = isinstance(tile, tuple) and len(tile) == 2
    if not good or any([type(n) is not int or n not in (16, 32, 64, 128, 256) for n in tile]):
        raise TigaError(
            f"online_softmax: prune_tile={tile}; it is (destinations, sources) of a tile, powers of two from 16 to 256."
        )


OPTIONS = ("block_prune_threshold", "prune_mass")


def check_none(who: str, option: str, value: Any) -> None:
    """Raises where another reducer than online_softmax is asked to prune."""
    if value is not None:
        raise TigaError(
            f"{who}: {option}={value}; only online_softmax skips tiles, whose scores say what little they add. Leave "
            f"{option} out."
        )


def check_thresholds(rho: Tensor) -> None:
    if not rho.is_floating_point():
        raise TypeError(f"online_softmax: block_prune_threshold is a tensor of {rho.dtype}; give floats, one a head.")
    if torch.compiler.is_compiling():
        return
    good = (rho > 0) & (rho <= 1)
    if not bool(good.all()):
        raise TigaError(
            f"online_softmax: block_prune_threshold={rho[~good].flatten()[0].item()} of a head; each lies in (0, 1]. "
            "Leave it out for exact attention."
        )


def limit(tracer: Any, rho: Any, eps: Any) -> Any:
    """What a tile is judged by, as a traced value: ln(threshold), or the log of the odds of the mass."""
    if isinstance(rho, Tensor):
        return tracer.capture(rho.detach().log().to(device=tracer.home, dtype=torch.float32), "log_threshold")
    stem, x = ("log_threshold", math.log(rho)) if eps is None else ("log_odds", math.log(eps) - math.log1p(-eps))
    name, taken = stem, {n for n, _ in tracer.scalars} | {row.name for _, row in tracer.operands}
    while name in taken:
        name += "_"
    if tracer.compiling and not torch.compiler._is_exporting_flag:  # so that no compiler bakes the value in
        return tracer.number(x, name)
    return tracer.scalar(name, x)


def refuse(name: str, value: Any, device: str, kind: str, why: str = "") -> None:
    """Raises where no kernel skips tiles: nothing else is computed instead. value: of the option, None if not known."""
    if not why and device not in DEVICES:
        why = f"the fields are on {device}"
    if not why and kind == "csr":
        why = "the graph is a list of edges"
    if why:
        asked = name if value is None else f"{name}={value}"
        raise TigaError(
            f"online_softmax with {asked}: pruning exists only in the CUDA kernels of implicit relations, and {why}. "
            "No other path prunes, and none computes something else instead. Leave the option out for exact attention."
        )


_ORDER = "tiles that hold pairs which are no edges{}, by source, then tiles of edges only, by source"
ORDERS = {
    "together": _ORDER.format(f" of the {TOGETHER} destinations around"),
    "once": _ORDER.format(""),
    "ascending": "tiles by source",
    "in turn": "tiles that first intervals reach, by source, then all others, by source",
}


class Report:
    """What a call's pruned fold skipped by `rule`: tiles of `tile` = (destinations, sources), judged in `order`.

    visited, skipped, absent: [query blocks, *heads] int32: tiles that hold edges, those of them that were skipped, and
    those without an edge. first_row: the first destination of each query block. certificate: [num_dst, *heads]
    float32: at most this share of the row's probability was skipped, of the scores as the kernel computed them; 0 where
    nothing was, else widened by 1/1024 for rounding and at least 2^-120. Tensors stay on their device: nothing waits
    for it until one is read, printed, or `share` is asked for.
    """

    def __init__(
        self,
        rule: str,
        tile: tuple,
        certificate: Tensor,
        visited: Tensor,
        skipped: Tensor,
        rows: tuple,
        gaps: Tensor | None = None,
    ):
        self.rule, self.tile, self.certificate = rule, tile, certificate
        self._visited, self._skipped, self._rows, self.gaps = visited, skipped, rows, gaps

    @property
    def order(self) -> str:
        kind, tensors, reverse = self._rows[2:5]
        if kind != "intervals":
            return ORDERS["together"]
        if tensors == 2 and not reverse:
            return ORDERS["once"]
        return ORDERS["ascending" if reverse else "in turn"]

    @functools.cached_property
    def first_row(self) -> Tensor:
        num_dst, _, kind, _, _, boundaries = self._rows
        size, device = self.tile[0], self.certificate.device
        if kind != "blocks":
            return torch.arange(0, num_dst, size, device=device)
        ends = boundaries.long().clamp(0, num_dst).cummax(0).values.tolist()
        ends = [0, *ends, num_dst]
        return torch.tensor([i for a, b in zip(ends, ends[1:]) for i in range(a, b, size)], device=device)

    @property
    def visited(self) -> Tensor:
        return self._visited[self.first_row]

    @property
    def skipped(self) -> Tensor:
        return self._skipped[self.first_row]

    @property
    def absent(self) -> Tensor:
        return -(-self._rows[1] // self.tile[1]) - self.visited

    @property
    def share(self) -> float:
        """The share of visited tiles that were skipped; 0 of none."""
        return self.skipped.sum().item() / max(1, self.visited.sum().item())

    def __repr__(self) -> str:
        visited, skipped, absent = (int(x.sum()) for x in (self.visited, self.skipped, self.absent))
        most = self.certificate.max().item() if self.certificate.numel() else 0.0
        return (
            f"{self.rule}: {skipped} of {visited} tiles of {self.tile[0]} x {self.tile[1]} skipped ({self.share:.1%}), "
            f"{absent} hold no edge; at most {most:.2e} of any row's probability was skipped\norder: {self.order}"
        )
