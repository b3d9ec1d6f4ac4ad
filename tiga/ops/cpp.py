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

from tiga import passes, preparation, relations
from tiga.codegen import launch_cpp
from tiga.codegen.emit_cpp import Source, TooWide
from tiga.codegen.rows import Analysis, Pass, Refused, around, read_args
from tiga.codegen.rows_cpp import Listed
from tiga.codegen.tiles_cpp import OTHERS, ROWS, Tiled
from tiga.ops.nodes import Nodes, Whole
from tiga.program import Line, Program, evaluate_size
from tiga.schedule import schedule
from tiga.types import DTYPES, NAMES, compute_dtype

LEAST = 1 << 22
"""Numbers at edges from which on a compiler's seconds are soon won back: on torch they take a tenth of a second."""
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
    early, late = around(analysis, works)
    return Planned(analysis, works, early, late, frozenset([a for line in late for a in read_args(line)]))


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
    return count * widest(
        p, tuple([t.shape if o.place == "shared" else t.shape[1:] for o, t in zip(p.operands, tensors)])
    )


@functools.lru_cache(4096)
def widest(p: Program, features: tuple) -> int:
    shapes = tuple([f if o.place == "shared" else (0, *f) for o, f in zip(p.operands, features)])
    # products that only folds read: of a list, torch multiplies vectors pair by pair, and holds no less for it
    lazy = frozenset() if p.kind == "csr" else schedule(p)[0]
    edges = [t.sizes for ref, t in p.types.items() if t.place == "edge" and ref not in lazy]
    return max([1, *[math.prod([evaluate_size(s, shapes, p.operands) for s in sizes]) for sizes in edges]])


@functools.lru_cache(4096)
def source(analysis: Analysis, work: Pass, shapes: tuple, forms: tuple) -> Source:
    passes.ran("emit-cpp")
    if analysis.p.kind == "csr":
        return Listed(analysis, work, shapes, dict(forms)).source()
    for rows in ROWS:
        try:
            return Tiled(analysis, work, shapes, dict(forms), rows=rows).source()
        except TooWide:
            if rows == ROWS[-1]:
                raise
    raise AssertionError


class _Cpp(Nodes):
    def __init__(self, p: Program, tensors: Any, ints: Any, scalars: Any, outputs: list[Tensor], plan: Planned) -> None:
        super().__init__(p, tensors, ints, (), outputs)
        assert plan.analysis is not None
        self.numbers, self.plan, self.whole = dict(zip(p.scalars, scalars)), plan, Whole(self.num_dst)
        features = tuple([s if o.place == "shared" else (0, *s[1:]) for o, s in zip(p.operands, self.shapes)])
        self.calls = []
        for work in plan.works:
            lists = direction(p, self.ints, self.relation, work)
            self.calls.append((work, source(plan.analysis, work, features, lists.forms()), lists))
        launch_cpp.load(tuple([made.text for _, made, _ in self.calls]))

    def run(self) -> None:
        for line in self.plan.early:
            self.node(line)
        for work, made, lists in self.calls:
            self.visit_edges(work, made, lists)
        passes.launched("launch-cpp", tuple([made.text for _, made, _ in self.calls]))
        for line in self.plan.late:
            self.node(line)
        self.store()

    def visit_edges(self, work: Pass, made: Source, lists: Lists) -> None:
        rows = self.num_dst if work.owner == "dst" else self.num_src
        outs = {ref: self.result(ref, rows) for ref in work.results}
        # an edge that no row holds is visited by nobody
        outs.update({ref: self.outputs[self.p.returns.index(ref)].zero_() for ref in work.stored})
        sums = {f.outs[0]: self.zeros(f.outs[0]) for f in work.shared}
        size = sum([x.numel() * x.element_size() for x in sums.values()])
        groups = max(1, min(GROUPS, PARTS // max(1, size), rows))
        parts = {ref: x.new_zeros((groups, *x.shape)) for ref, x in sums.items()}
        counts = {"num_rows": rows, "num_far": lists.num_far, "num_edges": lists.num_edges, "groups": groups}
        rows_of = {ref: self.together(ref) for _, what, ref in made.arguments if what in ("field", "row")}
        known: dict[str, Any] = {"field": rows_of, "out": outs, "parts": parts, "list": lists.tensors}
        tensors: list[Tensor] = []
        ints: list[int] = []
        numbers: list[float] = []
        for _, what, ref in made.arguments:
            if what == "scalar":
                numbers.append(self.numbers[ref])
            elif what in ("int", "row"):
                ints.append(counts[ref] if what == "int" else rows_of[ref].stride(0))
            else:
                tensors.append(known[what][ref] if what in known else self.turned(what, ref))
        launch_cpp.call(made.text, tensors, ints, numbers, torch.get_num_threads())
        self.fields.update({ref: x.sum(0) for ref, x in parts.items()})
        for ref, x in outs.items():
            (self.here if self.p.types[ref].place == "dst" else self.fields)[ref] = x

    def result(self, ref: str, rows: int) -> Tensor:
        """An output where it is one, else memory: rows that later lines read are not rounded."""
        t = self.p.types[ref]
        wide = DTYPES[compute_dtype(t.dtype)]
        if ref in self.p.returns:
            out = self.outputs[self.p.returns.index(ref)]
            if out.dtype == wide or ref not in self.plan.read:
                return out
        sizes = [evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]
        return torch.empty((rows, *sizes), dtype=wide, device=self.device)

    def store(self) -> None:
        for out, ref in zip(self.outputs, self.p.returns):
            x = self.held(ref) if ref in self.here or ref in self.fields else self.value(ref, self.whole)
            if x is not out:
                out.copy_(x.expand(out.shape) if x.dim() == out.dim() else x)

    def together(self, ref: str) -> Tensor:
        """A field whose features lie beside each other, in rows that may lie anywhere."""
        t = self.held(ref).to(DTYPES[compute_dtype(self.p.types[ref].dtype)])
        return t if self.p.types[ref].place != "shared" and t[:1].is_contiguous() else t.contiguous()

    def turned(self, what: str, ref: str) -> Tensor:
        """A field in another order: a matrix transposed, or the rows of each tile, others or features last."""
        t = self.held(ref).to(DTYPES[compute_dtype(self.p.types[ref].dtype)])
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
    by_dst, by_src = preparation.directions(relation)
    rowptr, col, number = (by_src if turned and by_src is not None else by_dst)[:3]
    if turned and by_src is None:
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
        starts, stops = (
            [tensors[n + str(k)].reshape(-1, OTHERS) for k in range(len(found))] for n in ("start", "stop")
        )
        empty = [a >= b for a, b in zip(starts, stops)]
        far = relations.UNBOUNDED
        tensors["low"] = torch.stack([a.masked_fill(e, far).amin(1) for a, e in zip(starts, empty)]).amin(0)
        tensors["high"] = torch.stack([b.masked_fill(e, -1).amax(1) for b, e in zip(stops, empty)]).amax(0)
        tensors["inner_low"], tensors["inner_high"] = starts[0].amax(1), stops[0].amin(1)
    return Lists(tensors, ints[0] if turned else ints[1], 0)
