"""What a program costs on the kernel skeletons, and whether one way to write it is better than another.

Counted are the launches of a call - kernels, and lines that are left to torch -, the fields that its kernels move, and
the lines that a kernel over listed edges computes again at every edge.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tiga.codegen import nodes, rows, tiles
from tiga.parser import parse
from tiga.program import Program
from tiga.schedule import schedule

LIGHT = frozenset("add sub mul neg abs maximum minimum relu where lt le eq ne to unsqueeze squeeze".split())
"""What an edge may compute again of its other end: less than the load that it follows."""


class Cost(NamedTuple):
    launches: int = 0
    moved: int = 0
    again: int = 0


class NoKernel(Exception):
    """No kernel fits the program; the text says why."""


@functools.lru_cache(4096)
def cost(text: str) -> Cost:
    """Of one call. Raises NoKernel where it would run as torch operations."""
    p = parse(text)
    try:
        return _of_rows(p) if p.kind == "csr" else _of_tiles(p)
    except (tiles.Refused, rows.Refused) as e:
        raise NoKernel(str(e)) from None


def _of_tiles(p: Program) -> Cost:
    plan = nodes.Planner(p, schedule(p)[0]).plan()
    moved = 0
    for work in plan.works:
        moved += sum(1 for x in work.inputs if x.vector is not None and x.side != "shared")
        moved += sum(1 for o in (*work.outputs, *work.edge_outputs) if o.vector is not None)
    return Cost(len(plan.works) + len(plan.early) + len(plan.late), moved)


def _of_rows(p: Program) -> Cost:
    analysis = rows.Analysis(p)
    passes = analysis.passes()
    early, late = rows.around(analysis, passes)
    moved = again = 0
    for work in passes:
        for ref in (*work.inputs, *work.results):
            features = analysis.axes(ref)
            moved += ref in p.types and p.types[ref].place != "shared" and features[-1:] not in ((), (1,))
        far = rows.OTHER_END[work.owner]
        again += sum(1 for x in work.lines if p.types[x.outs[0]].place == far and x.op not in LIGHT)
    return Cost(len(passes) + len(early) + len(late), moved, again)


def worse(before: list[str], after: list[str], spared: int = 0) -> str:
    """Why programs are no better than those that they replace, or "". spared: fields that others no longer move."""
    try:
        old = [cost(text) for text in before]
    except NoKernel as e:
        return f"no kernel runs the program ({e}), and torch operations gain nothing by it"
    try:
        new = [cost(text) for text in after]
    except NoKernel as e:
        return f"no kernel would run the program ({e})"
    for k, what in ((0, "launches"), (2, "operations at every edge")):
        a, b = sum([c[k] for c in old]), sum([c[k] for c in new])
        if b > a:
            return f"{b} {what} instead of {a}"
    a, b = sum([c.moved for c in old]) + spared, sum([c.moved for c in new])
    return f"{b} fields moved instead of {a}" if b > a else ""
