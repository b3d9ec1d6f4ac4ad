"""The reducers a user holds: attributes of a MessagePassing, called in its edge function."""
from __future__ import annotations

import math
from typing import Any, Optional

from tiga.errors import TigaError, TraceError
from tiga.trace import tracer_of
from tiga.types import is_one


class Reducer:
    """out[i] = finalize(combine over the edges j -> i of lift(values)).

    The user's own monoid subclasses this: `identity` (a tuple of numbers), `lift(*values) -> state`, `combine(state, state) -> state`,
    `finalize(state) -> result`; combine must be associative and commutative. A row without edges gives finalize(identity).
    """

    name = ""

    def __call__(self, *values: Any) -> Any:
        tracer = tracer_of(values)
        return tracer.reduce("dst", self.name, tuple([strong(tracer, v) for v in values]))[0]


def strong(tracer: Any, x: Any) -> Any:
    """A Python number as a value of each edge."""
    v = tracer.lift(x)
    return v.emit("spread", "edge") if v.type.place == "shared" else v


class Sum(Reducer):
    """out[i] = sum_j message[i, j]; 0 for a row without edges. Accumulates in float32 (float64 for float64), in edge order."""

    name = "sum"


class Mean(Reducer):
    """out[i] = sum_j message[i, j] / max(1, number of edges of i); 0 for a row without edges."""

    def __call__(self, *values: Any) -> Any:
        tracer = tracer_of(values)
        total = tracer.reduce("dst", "sum", tuple([strong(tracer, v) for v in values]))[0]
        count = tracer.reduce("dst", "count", ())[0]
        out = total / tracer.emit("maximum", (count, 1))
        return out


class Max(Reducer):
    """out[i] = max_j message[i, j], 0 for a row without edges; nan if any is. Ties give the gradient to the first edge."""

    name = "max"


class Min(Reducer):
    """out[i] = min_j message[i, j], 0 for a row without edges; nan if any is. Ties give the gradient to the first edge."""

    name = "min"


class OnlineSoftmaxReducer(Reducer):
    """out[i] = sum_j softmax_j(score[i, j]) value[i, j], over the edges j -> i, in one pass.

    score: (num_edges, *heads); value: (num_edges, *heads, *features): features align from the left, missing ones appended. Result: (num_dst, *heads,
    *features) in the value's dtype; with return_lse also lse (num_dst, *heads), natural log, float32 (float64 for float64). A row without edges, or
    whose scores are all -inf, gives 0 and lse -inf. Accumulates in float32 (float64 for float64), in edge order; results repeat bit for bit.
    Source: Milakov & Gimelshein 2018; Rabe & Staats 2021; Dao et al. 2022.
    """

    name = "softmax"
    block_prune_threshold: Optional[float] = None
    prune_mass: Optional[float] = None

    def __init__(self, block_prune_threshold: Optional[float] = None, prune_mass: Optional[float] = None, return_lse: bool = False) -> None:
        if block_prune_threshold is not None:
            self.block_prune_threshold = block_prune_threshold
        if prune_mass is not None:
            self.prune_mass = prune_mass
        self.return_lse = return_lse
        self._check()

    def _check(self) -> None:
        rho, eps = self.block_prune_threshold, self.prune_mass
        for name, x in (("block_prune_threshold", rho), ("prune_mass", eps)):
            if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))):
                raise TypeError(f"online_softmax: {name} is {type(x).__name__}; it is a Python number, or None for exact attention.")
        if rho is not None and not (0 < rho <= 1):
            raise TigaError(f"online_softmax: block_prune_threshold={rho}; it lies in (0, 1]. Leave it out for exact attention.")
        if eps is not None and not (0 < eps < 1):
            raise TigaError(f"online_softmax: prune_mass={eps}; it lies in (0, 1). Leave it out for exact attention.")
        if rho is not None and eps is not None and math.isfinite(rho):
            raise TigaError("online_softmax: block_prune_threshold and prune_mass are two rules; give one.")

    def __call__(self, score: Any, value: Any) -> Any:
        self._check()
        for name in ("block_prune_threshold", "prune_mass"):
            if getattr(self, name) is not None:
                raise TigaError(f"online_softmax with {name}={getattr(self, name)}: pruning exists only in the CUDA forward kernel of implicit relations, which "
                                "this version does not have; no other path prunes, and none computes something else instead. "
                                f"Leave {name} out for exact attention.")
        tracer = tracer_of((score, value))
        score, value = strong(tracer, score), strong(tracer, value)
        missing = len(value.type.sizes) - len(score.type.sizes)
        if missing < 0:
            raise TraceError(f"the score has features {tuple(score.type.sizes)}, more than the value's {tuple(value.type.sizes)}: they align from the left.")
        for have, want in zip(score.type.sizes, value.type.sizes):
            if not is_one(have) and have != want:
                raise TraceError(f"the score's features {tuple(score.type.sizes)} do not fit the value's {tuple(value.type.sizes)}: each must be 1 or equal, "
                                 "counted from the left.")
        for _ in range(missing):
            score = score.emit("unsqueeze", "-1")
        out, lse = tracer.reduce("dst", "softmax", (score, value))
        if not self.return_lse:
            return out
        for _ in range(missing):
            lse = lse.emit("squeeze", "-1")
        return out, lse


def online_softmax(block_prune_threshold: Optional[float] = None, prune_mass: Optional[float] = None, return_lse: bool = False) -> OnlineSoftmaxReducer:
    """out[i] = sum_j softmax_j(score[i, j]) value[i, j]: see OnlineSoftmaxReducer."""
    return OnlineSoftmaxReducer(block_prune_threshold, prune_mass, return_lse)


def sum() -> Reducer:
    """out[i] = sum_j message[i, j]: see Sum."""
    return Sum()


def mean() -> Reducer:
    """out[i] = mean_j message[i, j]: see Mean."""
    return Mean()


def max() -> Reducer:
    """out[i] = max_j message[i, j]: see Max."""
    return Max()


def min() -> Reducer:
    """out[i] = min_j message[i, j]: see Min."""
    return Min()
