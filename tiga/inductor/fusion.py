"""Neighbours of the operator move into its programs: in inference, and in training in both directions at once.

The pass works on the graph that holds forward and backward, before it is cut in two, so that what a program computes is
neither written nor saved. That graph is functional: nothing in it changes memory in place or is another's alias. It
stands behind Inductor's own passes over that graph, and touches no configuration.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch

from tiga.inductor import consumers, producers, siblings
from tiga.inductor.draft import Draft
from tiga.inductor.neighbourhood import calls_of, direction, is_call, put, results, settle, sweep
from tiga.parser import parse
from tiga.program import Program

log = logging.getLogger("tiga.fusion")
_MOST_ROUNDS, _MOST_NOTES = 8, 4096
_notes: dict[tuple, dict[str, None]] = {}


def signature(p: Program) -> tuple:
    """What a program and those that were derived from it by casts, numbers and further results have in common."""
    fields = frozenset([(o.place, o.name) for o in p.operands if o.place != "shared"])
    folds = tuple([(line.op, line.attrs) for line in p.lines if line.op in ("reduce", "scan")])
    return p.kind, fields, folds


def notes(text: str) -> list[str]:
    """What was said of a program when it was compiled in this process, and of its gradient's."""
    return list(_notes.get(signature(parse(text)), ()))


class Neighbours:
    """The pass over one graph: `apply`, as Inductor calls it."""

    def apply(self, graph: Any) -> int:
        graph = getattr(graph, "graph", graph)
        calls = calls_of(graph)
        if not calls:
            return 0
        settle(graph)
        origins(calls)
        fold_numbers(calls)
        rounds = 0
        while rounds < _MOST_ROUNDS:
            rounds += 1
            said: list[tuple[Any, str]] = []
            changed = once(graph, lambda node, text, said=said: said.append((node.meta.get("tiga"), text)))
            for origin, text in said:
                if not changed or not text.startswith("left"):
                    say(origin, text)
            if not changed:
                break
        graph.lint()
        return rounds


def once(graph: torch.fx.Graph, note: Any) -> bool:
    """Every change that pays, each call and each field looked at once."""
    changed = siblings.join(graph, note)
    for call in reversed(calls_of(graph)):
        changed |= consumers.absorb(call, note)
    for root in producers.roots(graph):
        changed |= bool(root.users) and producers.absorb(root, note)
    return changed


def origins(calls: list[Any]) -> None:
    """Each call is known by its program as it came in; the gradient's call by that of its own call."""
    for call in calls:
        origin = (signature(parse(call.args[0])), "")
        for t in call.args[1]:
            behind = t.args[0] if t.target is operator.getitem else None
            if direction(call)[0] == "is_backward" and behind is not None and is_call(behind):
                origin = (behind.meta["tiga"][0], "gradient: ")
        call.meta["tiga"] = origin


def fold_numbers(calls: list[Any]) -> None:
    """Numbers that never change are written into the programs."""
    for call in calls:
        draft = Draft(call)
        if any(o.flag == "number" and draft.values[o.ref].ref != o.ref for o in draft.p.operands):
            old = list(call.users)
            put(draft, draft.write(draft.replay()), results(call))
            sweep(old)
            sweep([call])


def say(origin: Any, text: str) -> None:
    if origin is None:
        return
    key, which = origin
    log.debug("%s: %s%s", ", ".join([".".join(f) for f in sorted(key[1])]), which, text)
    if len(_notes) >= _MOST_NOTES:
        _notes.clear()
    _notes.setdefault(key, {})[which + text] = None


def install() -> None:
    """Put the pass behind Inductor's own over the graph of both directions."""
    from torch._inductor.fx_passes import joint_graph

    joint_graph.pass_patterns.append(Neighbours())  # type: ignore[arg-type]
