"""What reads a call's results moves into its program: activations, gates, residuals, casts, norms of rows."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import torch

from tiga.inductor.cost import worse
from tiga.inductor.draft import Draft, can_view, shown
from tiga.inductor.meanings import ELEMENTWISE, FOLDS, JOINS, MEANINGS, VIEWS, Unfit
from tiga.inductor.neighbourhood import (
    direction,
    following,
    has_meaning,
    hoist,
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
from tiga.inductor.terms import At, Terms, laid_out

Node = Any
Note = Callable[[Node, str], None]


def absorb(call: Node, note: Note) -> bool:
    """Move consumers of the call's results into its program: of all results, else of one, as many as pay."""
    taken = [u for u in call.users if isinstance(shown(u), torch.Tensor)]
    ways = [(taken, False), (taken, True)]
    ways += [([r], simple) for r in taken for simple in (False, True)] if len(taken) > 1 else []
    said: list[str] = []
    after = following(call)
    for seeds, simple in ways:
        if not any(_is_neighbour(u, call) for r in seeds for u in r.users):
            continue
        try:
            text = _Consumers(call, after, seeds, simple).absorb()
        except Unfit as e:
            said.append(str(e))
            continue
        if text:
            note(call, "after the edges: " + text)
            return True
    for text in dict.fromkeys(said):
        note(call, "left after the edges: " + text)
    return False


def _is_neighbour(node: Node, call: Node) -> bool:
    """Not one of the other direction, nor random, nor one that reads memory."""
    return direction(node) == direction(call) and not stays(node) and is_pointwise(node)


class _Consumers:
    """The consumers of some of a call's results, `simple`: without folds over features."""

    def __init__(self, call: Node, after: set[Node], seeds: list[Node], simple: bool) -> None:
        self.call, self.after, self.seeds = call, after, seeds
        self.allowed = {t for t in MEANINGS if not simple or (t not in FOLDS and t not in JOINS)}
        self.draft = Draft(call)
        if self.draft.p.batch:
            raise Unfit("the program of a vmap")
        self.returned = self.draft.replay()
        self.terms = Terms(self.draft, self.computes, self.reads)
        self.why: dict[Node, str] = {}

    def computes(self, node: Node) -> bool:
        """Whether a node that does not follow from the call is computed inside, be it again, rather than read."""
        return node not in self.after and has_meaning(node) and not is_stored(node) and not stays(node)

    def reads(self, node: Node) -> bool:
        return node not in self.after and (is_stored(node) or is_small(node, shown(self.seeds[0])))

    def grow(self) -> None:
        """All that can be computed from the results."""
        held = self.terms.held
        for r in self.seeds:
            value = self.returned[r.args[1]]
            if value.type.place != "shared":
                held[r] = (value, At(value.type.place))
        todo = [u for r in held for u in r.users]
        heapq.heapify(todo)
        while todo:
            node = heapq.heappop(todo)
            if node in held or node in self.why or not _is_neighbour(node, self.call):
                continue
            try:
                if node.target not in self.allowed or not has_meaning(node):
                    raise Unfit("an operation that no kernel has")
                at = self.where(node)
                held[node] = (self.terms.translate(node, at), at)
                for u in node.users:
                    heapq.heappush(todo, u)
            except Unfit as e:
                self.why[node] = f"{node.target}: {e}"

    def where(self, node: Node) -> At:
        first = next(a for a in node.all_input_nodes if a in self.terms.held)
        at = self.terms.held[first][1]
        if node.target not in VIEWS:
            return at
        features = tuple(shown(first).shape[at.lead :]) if at.frame is None else at.frame
        return laid_out(at.place, shown(node).shape, features)

    def ends(self) -> list[Node]:
        """The nodes whose tensors are needed in memory, and that the program can return."""
        found = []
        for node, (value, at) in self.terms.held.items():
            val = shown(node)
            if node in self.seeds or not isinstance(val, torch.Tensor) or not self.outside(node):
                continue
            if self.terms.is_whole(node, value, at) and val.is_contiguous():
                found.append(node)
        return found

    def outside(self, node: Node) -> bool:
        """Whether something that stays outside needs the node's tensor in memory."""
        held = self.terms.held
        return any(u not in held and not is_pointwise(u) for u in node.users) or (
            is_written(node) and any(u.target in VIEWS and u not in held for u in node.users)
        )

    def absorb(self) -> str:
        self.grow()
        ends = self.ends()
        inside = self.needed(ends)
        if not any(n.target in ELEMENTWISE or n.target in FOLDS for n in inside):
            if self.why:
                raise Unfit(next(iter(self.why.values())))
            return ""
        takers = results(self.call)
        ends += self.instead(inside, ends)
        known: dict[Node, bool] = {}
        kept = [k for k, takes in enumerate(takers) if any(self.survives(r, inside, ends, known) for r in takes)]
        values = [self.returned[k] for k in kept] + [self.terms.held[n][0] for n in ends]
        written = self.draft.write(values)
        needs = [s.node for s in written.sources]
        hoist(needs, self.call, self.after, False)
        if not all(can_view(shown(n), [*self.draft.known, *needs]) for n in ends):
            raise Unfit("sizes that no operand has")
        read = self.call.args[1]
        spared = len(ends) + len(self.seeds) + len([n for n in dict.fromkeys(needs) if n not in read])
        reason = worse([self.call.args[0]], [written.text], spared) or plainer([self.call], [(self.draft, written)])
        if reason:
            raise Unfit(reason)
        hoist(needs, self.call, self.after, True)
        text, old = names(inside), list(self.call.users)
        put(self.draft, written, [*[takers[k] for k in kept], *[[n] for n in ends]])
        sweep({*inside, *old})
        sweep([self.call])
        return text

    def instead(self, inside: list[Node], ends: list[Node]) -> list[Node]:
        """Consumers to return in place of a result that would be kept for them alone, as backward reads them again."""
        known: dict[Node, bool] = {}
        found = []
        for r in self.seeds:
            node = r
            while True:
                readers = [
                    u
                    for u in node.users
                    if u not in ends and (u not in inside or self.survives(u, inside, ends, known))
                ]
                if len(readers) != 1 or readers[0] not in inside:
                    break
                node = readers[0]
                value, at = self.terms.held[node]
                if node.target in ELEMENTWISE and shown(node).is_contiguous() and self.terms.is_whole(node, value, at):
                    found.append(node)
                    break
        return list(dict.fromkeys(found))

    def needed(self, ends: list[Node]) -> list[Node]:
        """The consumers that the ends are computed from, and they."""
        found: dict[Node, None] = {}
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node in self.terms.held and node not in self.seeds and node not in found:
                found[node] = None
                todo.extend(node.all_input_nodes)
        return sorted(found)

    def survives(self, node: Node, inside: list[Node], ends: list[Node], known: dict[Node, bool]) -> bool:
        """Whether a node is still read once the ends are the program's own results."""
        if node not in known:
            known[node] = any(
                u not in ends and (u not in inside or self.survives(u, inside, ends, known)) for u in node.users
            )
        return known[node]
