"""What a call's fields are computed by moves into its program: scales, casts, biases, norms."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable
from typing import Any

import torch

from tiga.inductor.cost import worse
from tiga.inductor.draft import Draft, Written, constant, shown
from tiga.inductor.meanings import ELEMENTWISE, FOLDS, JOINS, MEANINGS, Unfit
from tiga.inductor.neighbourhood import (
    calls_of,
    direction,
    has_meaning,
    is_call,
    is_layout,
    is_pointwise,
    is_small,
    is_stored,
    is_written,
    names,
    put,
    results,
    stays,
    sweep,
)
from tiga.inductor.specialised import plainer
from tiga.inductor.terms import At, Terms

Node = Any
Note = Callable[[Node, str], None]


def roots(graph: torch.fx.Graph) -> list[Node]:
    """The computed fields of calls, last first."""
    found: dict[Node, None] = {}
    for call in calls_of(graph):
        draft = Draft(call)
        for o, s in zip(draft.operands, draft.sources):
            if o.place != "shared" and has_meaning(s.node):
                found[s.node] = None
    return sorted(found, reverse=True)


def absorb(root: Node, note: Note) -> bool:
    """Move what computes a field into the programs of all calls that read it; all of them, or none."""
    calls = [u for u in root.users if is_call(u)]
    said: list[str] = []
    for cut in ((), (*FOLDS, *JOINS)):
        cone = _cone(root, {t for t in MEANINGS if t not in cut})
        if not any(n.target in ELEMENTWISE or n.target in FOLDS for n in cone):
            break
        if needs_memory(root, set(calls)):
            said.append("it is read elsewhere as well, and so lies in memory")
            break
        try:
            pairs = [_written(call, root, cone) for call in calls]
            _check(root, calls, pairs)
        except Unfit as e:
            said.append(str(e))
            continue
        for call in calls:
            draft, written = _written(call, root, cone)  # anew: the calls before it have changed what this one reads
            note(draft.call, f"before the edges: {names(cone)}")
            old = list(draft.call.users)
            put(draft, written, results(draft.call))
            sweep(old)
            sweep([draft.call])
        sweep(cone)
        return True
    for text in dict.fromkeys(said):
        note(calls[0], f"left before the edges ({root.target}): {text}")
    return False


def _cone(root: Node, allowed: set) -> set[Node]:
    """The nodes that compute the root, back to tensors that lie in memory. What else reads one computes it itself."""
    cone: set[Node] = set()
    order = {node: k for k, node in enumerate(root.graph.nodes)}
    todo, seen = [(-order[root], root.name, root)], {root}
    while todo:
        node = heapq.heappop(todo)[2]
        alone = node is root or not needs_memory(node, cone)
        fits = has_meaning(node) and node.target in allowed and constant(node) is None and not stays(node)
        if not alone or not fits or (is_layout(node) and is_stored(node.args[0]) and node is not root):
            continue
        cone.add(node)
        for a in node.all_input_nodes:
            if a not in seen:
                seen.add(a)
                heapq.heappush(todo, (-order[a], a.name, a))
    return cone


def needs_memory(node: Node, inside: set[Node]) -> bool:
    """Whether something outside reads the node's tensor from memory, rather than computing it on the way."""
    return any(
        not is_pointwise(u) or (is_layout(u) and u.target is not operator.getitem and is_written(u))
        for u in node.users
        if u not in inside
    )


def _written(call: Node, root: Node, cone: set[Node]) -> tuple[Draft, Written]:
    draft = Draft(call)
    if draft.p.batch:
        raise Unfit("the program of a vmap")
    terms = Terms(draft, cone.__contains__, lambda n: is_stored(n) or is_small(n, shown(root)))
    for o, s in zip(draft.p.operands, list(draft.sources)):
        if s.node is root:
            at = At(o.place)
            if o.place == "shared":
                raise Unfit("what all rows share is computed once, outside")
            value = terms.translate(root, at)
            if not terms.is_whole(root, value, at):
                raise Unfit("a field that is broadcast")
            draft.values[o.ref] = value
    if any(t is root for t in draft.relation):
        raise Unfit("a relation's tensor")
    return draft, draft.write(draft.replay())


def _check(root: Node, calls: list[Node], pairs: list[tuple[Draft, Written]]) -> None:
    leaves: dict[Node, None] = {}
    for draft, written in pairs:
        before = {s.node for s in draft.sources[: len(draft.p.operands)]}
        for s in written.sources:
            if (
                s.node not in before
                and not is_small(s.node, shown(root))
                and len(s.val.shape) == len(shown(root).shape)
            ):
                leaves[s.node] = None
    made = [n for n in leaves if n.op == "call_function"]
    if len(made) > 1 and len({direction(call) for call in calls}) > 1:
        raise Unfit(f"{len(made)} tensors would be kept for backward instead of one")
    reason = worse([call.args[0] for call in calls], [w.text for _, w in pairs], len(leaves) + 1)
    reason = reason or plainer(calls, pairs)
    if reason:
        raise Unfit(reason)
