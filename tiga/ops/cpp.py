"""Programs on the CPU as C++: a loop a direction, other work on nodes by torch; and when that is worth a compiler."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import passes, relations
from tiga.codegen import launch_cpp
from tiga.codegen.emit_cpp import Listed, Source
from tiga.codegen.rows import Analysis, Pass, Refused
from tiga.codegen.tiles_cpp import OTHERS, Tiled
from tiga.ops.rows import _Rows, around
from tiga.program import Line, Program, evaluate_size
from tiga.types import DTYPES, NAMES, compute_dtype

LEAST = 1 << 22
"""Numbers at edges, from which on seconds of a compiler are soon won back: a call on torch takes tens of milliseconds."""
WHEN = {"always": 0, "never": math.inf}
"""TIGA_CPP=always or never, instead."""
GROUPS = 1024  # of rows, a thread at a time
PARTS = 16 << 20  # bytes of sums over all edges, of all groups


@dataclass(frozen=True, eq=False)
class Planned:
    """The passes of a program, what torch does around them, or why there are none."""

    analysis: Analysis | None = None
    works: tuple[Pass, ...] = ()
    early: tuple[Line, ...] = ()
    late: tuple[Line, ...] = ()
    read: frozenset[str] = frozenset()
    reason: str = ""


@functools.lru_cache(4096)
def planned(p: Program) -> Planned:
    try:
        analysis = Analysis(p)
        works = analysis.passes()
    except Refused as e:
        return Planned(reason=str(e))
    return Planned(analysis, works, *around(analysis, works))


def run(
    p: Program, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float], outputs: list[Tensor]
) -> str:
    """Fill `outputs` and give "", or say why torch operations are taken."""
    least = WHEN.get(os.environ.get("TIGA_CPP", ""), LEAST)
    if least:
        numbers = at_edges(p, tensors, ints)
        if numbers < least:
            return f"{numbers} numbers at edges, fewer than {least}"
    plan = planned(p)
    if plan.reason:
        return plan.reason
    try:
        _Cpp(p, tensors, ints, scalars, outputs, plan).run()
    except Refused as e:
        return str(e)
    return ""


def at_edges(p: Program, tensors: Sequence[Tensor], ints: Sequence[int]) -> int:
    """Edges times the widest value that one holds: what torch would materialise."""
    count = relations.num_edges(p.kind, tuple(ints), tuple(tensors[len(p.operands) :]))
    shapes = tuple([tuple(t.shape) for t in tensors])
    widths = [
        math.prod([evaluate_size(s, shapes, p.operands) for s in t.sizes])
        for t in p.types.values()
        if t.place == "edge"
    ]
    return count * max([1, *widths])


@functools.lru_cache(4096)
def source(analysis: Analysis, work: Pass, shapes: tuple, forms: tuple) -> Source:
    passes.ran("emit-cpp")
    kind = Listed if analysis.p.kind == "csr" else Tiled
    return kind(analysis, work, shapes, dict(forms)).source()


class _Cpp(_Rows):
    def __init__(self, p: Program, tensors: Any, ints: Any, scalars: Any, outputs: list[Tensor], plan: Planned) -> None:
        super().__init__(p, tensors, ints, scalars, outputs, plan)  # type: ignore[arg-type]
        features = tuple(
            [s if o.place == "shared" else (0, *s[1:]) for o, s in zip(p.operands, self.shapes)]
        )
        self.directions = [direction(p, self.ints, self.relation, work) for work in plan.works]
        self.sources = [
            source(plan.analysis, work, features, lists.forms()) for work, lists in zip(plan.works, self.directions)
        ]
        launch_cpp.load(tuple([s.text for s in self.sources]))

    def run(self) -> None:
        for line in self.plan.early:
            self.node(line)
        for work, made, lists in zip(self.plan.works, self.sources, self.directions):
            self.visit_edges(work, made, lists)
        passes.launched("launch-cpp", tuple([s.text for s in self.sources]))
        for line in self.plan.late:
            self.node(line)
        self.store()

    def visit_edges(self, work: Pass, made: Source, lists: Any) -> None:
        p = self.p
        rows = self.num_dst if work.owner == "dst" else self.num_src
        kept: list[Tensor] = []
        tensors: list[Tensor] = []
        ints: list[int] = []
        numbers: list[float] = []
        outs = {ref: self.result(ref, rows) for ref in work.results}
        outs.update({ref: self.outputs[p.returns.index(ref)].zero_() for ref in work.stored})
        size = sum([math.prod(self.zeros(f.outs[0]).shape) * 8 for f in work.shared])
        groups = max(1, min(GROUPS, PARTS // max(1, size), rows))
        parts = {
            f.outs[0]: torch.zeros((groups, *(z := self.zeros(f.outs[0])).shape), dtype=z.dtype) for f in work.shared
        }
        fields: dict[str, Tensor] = {}

        def field(ref: str) -> Tensor:
            if ref not in fields:
                fields[ref] = together(self.held(ref), p.types[ref].place == "shared")
            return fields[ref]

        counts = {"num_rows": rows, "num_far": lists.num_far, "num_edges": lists.num_edges, "groups": groups}
        for name, what, ref in made.arguments:
            if what == "scalar":
                numbers.append(self.numbers[ref])
            elif what == "int":
                ints.append(counts[ref])
            elif what == "row":
                ints.append(field(ref).stride(0))
            else:
                tensors.append(
                    field(ref) if what == "field" else outs[ref] if what == "out" else parts[ref]
                    if what == "parts" else lists.tensors[ref] if what == "list" else self.other(what, ref)
                )
        launch_cpp.call(made.text, tensors, ints, numbers, torch.get_num_threads())
        for ref, x in parts.items():
            self.fields[ref] = x.sum(0)
        for ref, x in outs.items():
            (self.here if p.types[ref].place == "dst" else self.fields)[ref] = x

    def other(self, what: str, ref: str) -> Tensor:
        """A field in another order: a matrix transposed, or tiles of rows."""
        t = self.held(ref)
        if what == "transposed":
            return t.t().contiguous()
        count = -(-t.shape[0] // OTHERS)
        padded = t.new_zeros((count * OTHERS, *t.shape[1:]))
        padded[: t.shape[0]] = t
        if what == "columns":
            return padded.reshape(count, OTHERS, math.prod(t.shape[1:])).transpose(1, 2).contiguous()
        return padded.reshape(count, OTHERS, math.prod(t.shape[1:-1]), t.shape[-1]).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Lists:
    """One direction of a listed relation."""

    tensors: dict[str, Tensor]
    num_far: int
    num_edges: int

    def forms(self) -> tuple:
        return tuple([(name, NAMES[t.dtype]) for name, t in self.tensors.items()])


def direction(p: Program, ints: tuple, relation: tuple, work: Pass) -> Lists:
    """What a pass reads of the relation: lists of the other end, or the intervals of the rows as they are stored."""
    turned = (work.owner == "dst") == p.reverse
    if p.kind != "csr":
        return spans(p, ints, relation, turned)
    rowptr, col = relation[:2]
    number = relation[2] if len(relation) > 2 else None
    if turned:
        rowptr, col, number = torch.ops.tiga.csr_transpose(rowptr, col, number, ints[1])
    tensors = {"rowptr": rowptr.contiguous(), "col": col.contiguous()}
    if number is not None:
        tensors["number_of"] = number.contiguous()
    return Lists(tensors, ints[0] if turned else ints[1], col.shape[0])


def spans(p: Program, ints: tuple, relation: tuple, turned: bool) -> Lists:
    """Intervals of each stored row; where sources own the sums, of each tile of rows what any and what all reach."""
    count = -(-ints[0] // OTHERS) * OTHERS
    found = relations.row_intervals(p.kind, ints, relation, 0, ints[0], "cpu")
    tensors: dict[str, Tensor] = {}
    for k, ends in enumerate(found):
        for name, t in zip(("start", "stop"), ends):
            tensors[name + str(k)] = torch.cat([t, t.new_zeros(count - ints[0])])
    tensors["offsets"] = relations.edge_offsets(p.kind, ints, relation, "cpu")
    if turned:
        starts, stops = ([tensors[n + str(k)].reshape(-1, OTHERS) for k in range(len(found))] for n in ("start", "stop"))
        empty = [a >= b for a, b in zip(starts, stops)]
        far = relations.UNBOUNDED
        tensors["low"] = torch.stack([a.masked_fill(e, far).amin(1) for a, e in zip(starts, empty)]).amin(0)
        tensors["high"] = torch.stack([b.masked_fill(e, -1).amax(1) for b, e in zip(stops, empty)]).amax(0)
        tensors["inner_low"], tensors["inner_high"] = starts[0].amax(1), stops[0].amin(1)
    return Lists(tensors, ints[0] if turned else ints[1], 0)


def together(t: Tensor, shared: bool) -> Tensor:
    """The features of a row beside each other; rows where they are."""
    wide = t.contiguous() if shared or not t[:1].is_contiguous() else t
    return wide
