"""Two calls over one graph that read a field in common become one program, where its kernels do the work of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiga.inductor.cost import cost, worse
from tiga.inductor.draft import Draft
from tiga.inductor.meanings import Unfit
from tiga.inductor.neighbourhood import direction, following, hoist, propagate, put, results, sweep

Node = Any


def join(graph: torch.fx.Graph, note: Callable[[Node, str], None]) -> bool:
    """Join the first two calls that may be one."""
    calls = list(graph.find_nodes(op="call_function", target=propagate))
    for k, first in enumerate(calls):
        after = following(first)
        for second in calls[k + 1 :]:
            if second in after or not _alike(Draft(first), Draft(second)):
                continue
            try:
                _join(first, second, after)
            except Unfit as e:
                note(second, f"left apart from {first}: {e}")
                continue
            note(first, "two applications over one graph are one program")
            return True
    return False


def _alike(a: Draft, b: Draft) -> bool:
    """One relation, one pass of the two, and a field that both read."""
    fields = {(o.place, s.node) for o, s in zip(a.operands, a.sources) if o.place != "shared"}
    common = any((o.place, s.node) in fields for o, s in zip(b.operands, b.sources))
    head = lambda d: (d.p.kind, d.p.reverse, d.p.batch, d.relation, list(d.ints), direction(d.call))
    return common and head(a) == head(b)


def _join(first: Node, second: Node, after: set[Node]) -> None:
    draft, other = Draft(first), Draft(second)
    written = draft.write([*draft.replay(), *draft.also(other)])
    apart = [first.args[0], second.args[0]]
    reason = worse(apart, [written.text])
    if not reason and cost(written.text).launches >= sum([cost(text).launches for text in apart]):
        reason = "one kernel does not hold both"
    if reason:
        raise Unfit(reason)
    needs = [s.node for s in written.sources]
    hoist(needs, first, after, False)
    hoist(needs, first, after, True)
    old = [*first.users, *second.users]
    put(draft, written, [*results(first), *results(second)])
    sweep(old)
    sweep([first, second])
