"""The reducers a user holds: attributes of a MessagePassing, called in its edge function."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch import Tensor

from tiga import prune
from tiga.errors import TigaError, TraceError
from tiga.program import Function
from tiga.trace import Sym, Tracer
from tiga.types import Type, is_one


class Reducer:
    """out[i] = finalize(combine over the edges j -> i of lift(values)).

    The user's own monoid subclasses this: `identity` (a tuple of numbers), `lift(*values) -> state`,
    `combine(state, state) -> state`, `finalize(state) -> result`; combine must be associative and commutative. A
    row without edges gives finalize(identity).
    """

    name = ""

    def __call__(self, *values: Any) -> Any:
        tracer = reducing(self, values)
        if not self.name:
            return monoid(self, tracer, values)
        return tracer.reduce("dst", self.name, tuple([strong(tracer, v) for v in values]))[0]


def reducing(reducer: Any, values: tuple) -> Tracer:
    """The tracer of a reducer's arguments."""
    if reducer.name != "softmax":
        for option in prune.OPTIONS:
            prune.check_none(type(reducer).__name__, option, getattr(reducer, option, None))
    for x in values:
        if isinstance(x, Sym):
            return x.builder  # type: ignore[return-value]
    given = ", ".join([type(x).__name__ for x in values]) or "nothing"
    raise TraceError(
        f"{type(reducer).__name__} of {given}: a reducer needs a value of edges or nodes. "
        "To fold a number once an edge, write torch.full_like(src.x, number) with a field x."
    )


def strong(tracer: Any, x: Any) -> Any:
    """A Python number as a value of each edge."""
    v = tracer.lift(x)
    return v.emit("spread", "edge") if v.type.place == "shared" else v


def monoid(reducer: Any, tracer: Any, values: tuple) -> Any:
    """A user's reducer: lift on the edges, a scan of combine over each segment, finalize at the destinations."""
    who = type(reducer).__name__
    for part in ("identity", "combine"):
        if not hasattr(reducer, part):
            raise TigaError(
                f"{who} has no {part}. A reducer defines identity (numbers), combine(a, b), and if need be "
                "lift(*values) and finalize(state)."
            )
    single = not isinstance(reducer.identity, (tuple, list))
    identity = (reducer.identity,) if single else tuple(reducer.identity)
    lifted = reducer.lift(*values) if hasattr(reducer, "lift") else values
    lifted = tuple([strong(tracer, x) for x in (lifted if isinstance(lifted, (tuple, list)) else (lifted,))])
    if len(lifted) != len(identity):
        raise TraceError(f"{who}.lift gives {len(lifted)} states, identity has {len(identity)}.")
    types = tuple([x.type for x in lifted])
    combine = function_of(reducer.combine, (types, types), single, len(identity), f"{who}.combine")
    gradient = None
    if hasattr(reducer, "edge_gradient"):
        gradient = function_of(
            reducer.edge_gradient, (types, types, types), single, len(identity), f"{who}.edge_gradient"
        )
    if not torch.compiler.is_compiling():
        check_monoid(reducer, single, types)
    final = tracer.scan("forward", combine, len(identity), (*identity, *lifted), gradient)
    if not hasattr(reducer, "finalize"):
        return final[0] if single else tuple(final)
    return reducer.finalize(final[0] if single else tuple(final))


def function_of(fn: Any, states: tuple, single: bool, results: int, who: str) -> Function:
    """A part of a user's reducer as a function of programs."""
    tracer = FunctionTracer(who)
    args, number = [], 0
    for types in states:
        group = []
        for t in types:
            group.append(Sym(tracer, "a" + str(number), Type("edge", t.dtype, t.sizes)))
            number += 1
        args.append(group[0] if single else tuple(group))
    out = fn(*args)
    out = (out,) if not isinstance(out, (tuple, list)) else tuple(out)
    if len(out) != results:
        raise TraceError(f"{who} gives {len(out)} states; {results} are needed.")
    return Function(number, tuple(tracer.lines), tuple([tracer.lift(x).ref for x in out]))


class FunctionTracer(Tracer):
    """Traces a part of a reducer: a function of states alone."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def operand(self, t: Any, place: str, name: str, flag: str = "") -> Any:
        raise TraceError(
            f"{self.who} reads a tensor. It is a function of the states alone: bring the tensor in through lift."
        )


_checked: set = set()


def check_monoid(reducer: Any, single: bool, types: tuple) -> None:
    """combine is associative and commutative: tried once a class on random states."""
    cls = type(reducer)
    if cls in _checked:
        return
    _checked.add(cls)
    generator = torch.Generator().manual_seed(0)
    a, b, c = (
        [
            torch.rand((4, *[2 if is_one(s) else 3 for s in t.sizes][:1]), generator=generator, dtype=torch.float64)
            for t in types
        ]
        for _ in range(3)
    )

    def join(x: Any, y: Any) -> list:
        out = reducer.combine(x[0], y[0]) if single else reducer.combine(tuple(x), tuple(y))
        return list(out) if isinstance(out, (tuple, list)) else [out]

    with torch.no_grad():
        for law, x, y in (
            ("associative", join(join(a, b), c), join(a, join(b, c))),
            ("commutative", join(a, b), join(b, a)),
        ):
            if not all(torch.allclose(p, q, rtol=1e-6, atol=1e-8) for p, q in zip(x, y)):
                raise TigaError(
                    f"{cls.__name__}.combine is not {law}: on random states the two orders differ by "
                    f"{builtins.max(float((p - q).abs().max()) for p, q in zip(x, y)):.3g}. "
                    "Edges may be folded in any order."
                )


class Sum(Reducer):
    """out[i] = sum_j message[i, j]; 0 for a row without edges. Accumulates in float32 or float64, in a fixed order."""

    name = "sum"


class Mean(Reducer):
    """out[i] = sum_j message[i, j] / max(1, number of edges of i); 0 for a row without edges."""

    def __call__(self, *values: Any) -> Any:
        tracer = reducing(self, values)
        total = tracer.reduce("dst", "sum", tuple([strong(tracer, v) for v in values]))[0]
        count = tracer.reduce("dst", "count", ())[0]
        out = total / tracer.emit("maximum", (count, 1))
        return out


class Max(Reducer):
    """out[i] = max_j message[i, j], 0 without edges; nan if any is. Ties give the gradient to the first edge."""

    name = "max"


class Min(Reducer):
    """out[i] = min_j message[i, j], 0 without edges; nan if any is. Ties give the gradient to the first edge."""

    name = "min"


class OnlineSoftmaxReducer(Reducer):
    """out[i] = sum_j softmax_j(score[i, j]) value[i, j], over the edges j -> i, in one pass.

    score: (num_edges, *heads); value: (num_edges, *heads, *features): features align from the left, missing ones
    appended. Result: (num_dst, *heads, *features) in the value's dtype; with return_lse also lse (num_dst, *heads),
    natural log, float32 (float64 for float64). A row without edges, or whose scores are all -inf, gives 0 and lse
    -inf. Accumulates in float32 (float64 for float64), in a fixed order; results repeat bit for bit. Source: Milakov &
    Gimelshein 2018; Rabe & Staats 2021; Dao et al. 2022.

    Pruning skips tiles of destinations by sources, in the CUDA kernels of implicit relations; all other paths raise.
    block_prune_threshold: a tile is skipped where its largest score lies below the running maximum of its
    destinations, all together, by more than -ln(threshold) - the published rule; a number in (0, 1], or a tensor of
    such, one a head. prune_mass: a tile is skipped only where that leaves the omitted share of EVERY row's probability
    below it; a number in (0, 1). The tile is prune_tile = (destinations, sources), (64, 128) unless given, the same
    whatever the sizes. The program's last_report says what was skipped and in which order tiles were judged, with a
    bound on the omitted probability of each row. prune_backward: gradients, exactly those of the pruned result, with
    the same tiles skipped; without it needing one raises.
    """

    name = "softmax"
    block_prune_threshold: float | Tensor | None = None
    prune_mass: float | None = None
    prune_backward: bool = False
    prune_tile: tuple[int, int] = prune.TILE

    def __init__(
        self,
        block_prune_threshold: float | Tensor | None = None,
        prune_mass: float | None = None,
        return_lse: bool = False,
        prune_backward: bool | None = None,
        prune_tile: tuple[int, int] | None = None,
    ) -> None:
        given = {
            "block_prune_threshold": block_prune_threshold,
            "prune_mass": prune_mass,
            "prune_backward": prune_backward,
            "prune_tile": prune_tile,
        }
        for option, x in given.items():
            if x is not None:
                setattr(self, option, x)
        self.return_lse = return_lse
        prune.check_options(self.block_prune_threshold, self.prune_mass, self.prune_tile)

    def __call__(self, score: Any, value: Any) -> Any:
        tracer = reducing(self, (score, value))
        if self.block_prune_threshold is not None or self.prune_mass is not None or prune.records_gaps():
            out, lse = self.pruned(tracer, score, value)
        else:
            out, lse = tracer.once("online_softmax", softmax, (score, value), {})
        return (out, lse) if self.return_lse else out

    def pruned(self, tracer: Any, score: Any, value: Any) -> tuple:
        """The fold that skips tiles; what it says of itself is noted for the program's report."""
        rho, eps, tile = self.block_prune_threshold, self.prune_mass, self.prune_tile
        limit: Any
        if prune.records_gaps():
            if eps is not None:
                raise TigaError(
                    "calibrate_prune: the reducer prunes by prune_mass, which needs no threshold. Give it "
                    "block_prune_threshold, or no option."
                )
            rule, limit = "softmax_by_peak", tracer.lift(float("-inf"))
        else:
            prune.check_options(rho, eps, tile)
            rule = "softmax_by_peak" if eps is None else "softmax_by_mass"
            limit = prune.limit(tracer, rho, eps)
        arguments = (score, value, limit, rule, *tile, int(self.prune_backward))
        out, lse, *said = tracer.once("pruned_softmax", pruned_softmax, arguments, {})
        asked = ("block_prune_threshold", rho) if eps is None else ("prune_mass", eps)
        tracer.notes.append(prune.Note(asked, tile, tuple([(x.ref, x.type) for x in said])))
        return out, lse


def pruned_softmax(
    tracer: Any, score: Any, value: Any, limit: Any, rule: str, rows: int, cols: int, back: int
) -> tuple:
    """The fold, its lse, certificate, tiles visited and skipped, and each tile's gap."""
    score, value, missing = aligned(tracer, score, value)
    if limit.type.sizes:
        for _ in range(missing):
            limit = limit.emit("unsqueeze", "-1")
        if len(limit.type.sizes) != len(score.type.sizes):
            raise TraceError(
                f"block_prune_threshold is a tensor with {len(limit.type.sizes) - missing} dimensions, the score has "
                f"{len(score.type.sizes) - missing} feature dimensions. Give one threshold a head, or a number."
            )
    out, *said, _, gaps = tracer.reduce("dst", rule, (score, value, limit, rows, cols, back))
    for _ in range(missing):
        said = [x.emit("squeeze", "-1") for x in said]
    return (out, *said, gaps)


def softmax(tracer: Any, score: Any, value: Any) -> tuple:
    """The fold and its lse."""
    score, value, missing = aligned(tracer, score, value)
    out, lse = tracer.reduce("dst", "softmax", (score, value))
    for _ in range(missing):
        lse = lse.emit("squeeze", "-1")
    return out, lse


def aligned(tracer: Any, score: Any, value: Any) -> tuple:
    """Score and value, whose features align from the left, and how many dimensions the score was given."""
    score, value = strong(tracer, score), strong(tracer, value)
    missing = len(value.type.sizes) - len(score.type.sizes)
    if missing < 0:
        raise TraceError(
            f"the score has features {tuple(score.type.sizes)}, more than the value's {tuple(value.type.sizes)}: "
            "they align from the left."
        )
    for have, want in zip(score.type.sizes, value.type.sizes):
        if not is_one(have) and not is_one(want) and have != want:
            raise TraceError(
                f"the score's features {tuple(score.type.sizes)} do not fit the value's "
                f"{tuple(value.type.sizes)}: each must be 1 or equal, "
                "counted from the left."
            )
    for _ in range(missing):
        score = score.emit("unsqueeze", "-1")
    return score, value, missing


def online_softmax(
    block_prune_threshold: float | Tensor | None = None,
    prune_mass: float | None = None,
    return_lse: bool = False,
    prune_backward: bool | None = None,
    prune_tile: tuple[int, int] | None = None,
) -> OnlineSoftmaxReducer:
    """out[i] = sum_j softmax_j(score[i, j]) value[j]: see OnlineSoftmaxReducer."""
    return OnlineSoftmaxReducer(block_prune_threshold, prune_mass, return_lse, prune_backward, prune_tile)


def unpruned(who: str, options: dict) -> dict:
    """Options of a reducer that skips no tiles."""
    for option, value in options.items():
        if option in prune.OPTIONS:
            prune.check_none(who, option, value)
    return options


def sum(**options: Any) -> Reducer:
    """out[i] = sum_j message[i, j]: see Sum."""
    return Sum(**unpruned("tg.sum", options))


def mean(**options: Any) -> Reducer:
    """out[i] = mean_j message[i, j]: see Mean."""
    return Mean(**unpruned("tg.mean", options))


def max(**options: Any) -> Reducer:
    """out[i] = max_j message[i, j]: see Max."""
    return Max(**unpruned("tg.max", options))


def min(**options: Any) -> Reducer:
    """out[i] = min_j message[i, j]: see Min."""
    return Min(**unpruned("tg.min", options))
