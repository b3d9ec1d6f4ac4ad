"""Two calls over one graph that read a field in common become one program, where its kernels do the work of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiga.inductor.cost import cost, worse
from tiga.inductor.draft import Draft
from tiga.inductor.meanings import Unfit
from tiga.inductor.neighbourhood import calls_of, direction, following, hoist, put, results, sweep
from tiga.inductor.specialised import plainer

Node = Any


def join(graph: torch.fx.Graph, note: Callable[[Node, str], None]) -> bool:
    """Join calls that may be one, as long as there are any."""
    joined = False
    while _join_first(calls_of(graph), note):
        joined = True
    return joined


def _join_first(calls: list[Node], note: Callable[[Node, str], None]) -> bool:
    heads = [_head(Draft(call)) for call in calls]
    for k, first in enumerate(calls):
        for n, second in enumerate(calls[k + 1 :], k + 1):
            if heads[k][0] != heads[n][0] or not heads[k][1] & heads[n][1]:
                continue
            after = following(first)
            if second in after:
                continue
            try:
                _join(first, second, after)
            except Unfit as e:
                note(second, f"left apart from another over this graph: {e}")
                continue
            note(first, "two applications over one graph are one program")
            return True
    return False


def _head(d: Draft) -> tuple[tuple, set]:
    """What two calls must have in common, and the fields of which they must have one."""
    fields = {(o.place, s.node) for o, s in zip(d.p.operands, d.sources) if o.place != "shared"}
    return (d.p.kind, d.p.reverse, d.p.batch, d.relation, [str(n) for n in d.ints], direction(d.call)), fields


def _join(first: Node, second: Node, after: set[Node]) -> None:
    draft, other = Draft(first), Draft(second)
    written = draft.write([*draft.replay(), *draft.also(other)])
    apart = [first.args[0], second.args[0]]
    reason = worse(apart, [written.text])
    if not reason and cost(written.text).launches >= sum([cost(text).launches for text in apart]):
        reason = "one kernel does not hold both"
    reason = reason or plainer([first, second], [(draft, written)])
    if reason:
        raise Unfit(reason)
    needs = [s.node for s in written.sources]
    hoist(needs, first, after, False)
    hoist(needs, first, after, True)
    old = [*first.users, *second.users]
    put(draft, written, [*results(first), *results(second)])
    sweep(old)
    sweep([first, second])
