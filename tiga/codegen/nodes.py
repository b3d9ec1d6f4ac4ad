"""Which work on nodes a kernel of the tiles skeleton does itself, and the plan of a whole program."""

from __future__ import annotations

from typing import Any

from tiga.codegen.tiles import (
    ELEMENTWISE,
    SAME,
    Axes,
    EdgeWork,
    Fold,
    Input,
    Output,
    Refused,
    Tiles,
    Work,
    literal_text,
)
from tiga.codegen.tiles_pruned import skips_tiles
from tiga.program import Line, Program

_NODE_OPS = ELEMENTWISE | {"to", "zeros_like", *SAME}


class Nodes:
    """The node values that one kernel can compute: numbers over its heads, and vectors over one axis more."""

    def __init__(self, axes: Axes, place: str, heads: tuple) -> None:
        self.axes, self.p, self.place, self.heads = axes, axes.p, place, heads
        self.done: dict[str, bool] = {}  # whether a value can be computed here

    def vector(self, ref: str) -> tuple:
        return tuple([a for a in self.axes.of(ref) if a not in self.heads])

    def fits(self, ref: str) -> bool:
        """Whether a value is a literal, a field of these rows or of all, or computed from such by lines known here."""
        if ref not in self.done:
            self.done[ref] = False
            self.done[ref] = self._fits(ref)
        return self.done[ref]

    def _fits(self, ref: str) -> bool:
        if ref not in self.p.types:
            return literal_text(ref) is not None
        if self.axes.place(ref) not in (self.place, "shared") or len(self.vector(ref)) > 1:
            return False
        dims = self.axes.dims(ref)
        if self.vector(ref) and dims[-1] not in self.vector(ref):
            return False
        line = self.p.definitions.get(ref)
        if line is None:
            return True
        if self.axes.place(ref) == "shared" and self.vector(ref):
            return False
        return self.line_fits(line)

    def line_fits(self, line: Line) -> bool:
        if line.op == "sum":
            last = self.axes.dims(line.args[0])[-1]
            if line.attrs != ("-1",) or last in self.heads:
                return False
        elif line.op not in _NODE_OPS:
            return False
        args = line.args[:1] if line.op == "expand_like" else line.args
        return line.op == "zeros_like" or all([self.fits(a) for a in args])

    def lines(self, refs: list[str], known: frozenset = frozenset()) -> tuple[dict[str, None], tuple[Line, ...]]:
        """The fields that are read, and the lines in order, that give `refs`."""
        fields: dict[str, None] = {}
        made: dict[str, Line] = {}

        def visit(ref: str) -> None:
            if ref not in self.p.types or ref in known or ref in made or ref in fields:
                return
            line = self.p.definitions.get(ref)
            if line is None:
                fields[ref] = None
                return
            for a in () if line.op == "zeros_like" else line.args[:1] if line.op == "expand_like" else line.args:
                visit(a)
            made[ref] = line

        for ref in refs:
            visit(ref)
        return fields, tuple(made.values())


class Planner:
    def __init__(self, p: Program, lazy: frozenset) -> None:
        self.p, self.lazy, self.axes = p, lazy, Axes(p)
        self.stored: dict[
            str, str
        ] = {}  # node values computed before any edge, which a kernel over edges reads -> mode
        self.folded: set[str] = set()  # what is known only after folds

    def plan(self) -> Tiles:
        self.refuse()
        self.mark_folded()
        edge_works = [w for owner in ("dst", "src") for w in self.edge_works(owner)]
        if not edge_works:
            raise Refused("no fold over edges")
        for w in edge_works:
            self.store(w)
        parts = [self.edge_inputs(w) for w in edge_works]
        before, by_torch = self.node_works()
        after = [self.after(w) for w in edge_works]
        late = self.late(after)
        works = [self.finish(w, part, lines, late) for w, part, lines in zip(edge_works, parts, after)]
        self.covers(works)
        early = self.early(by_torch, late, works)
        return Tiles((*before, *works), early, late, self.axes)

    def edge_works(self, owner: str) -> list[EdgeWork]:
        """Kernels over edges: as few as hold the folds to `owner`, none using an axis as a head and as a vector."""
        lines = [line for line in self.p.lines if line.op == "reduce" and line.attrs[0] == owner]
        lines += [line for line in self.p.lines if owner == "dst" and self.is_edge_scatter(line)]
        edges = list(dict.fromkeys([r for r in self.p.returns if self.axes.place(r) == "edge"]))
        works: list[EdgeWork] = []
        for fold, returned in [([line], []) for line in lines] + [([], [r]) for r in edges if owner == "dst"]:
            for k, w in enumerate(works):
                try:
                    works[k] = EdgeWork(self.axes, self.lazy, owner, w.lines + fold, w.returned + returned)
                    break
                except Refused:
                    continue
            else:
                works.append(EdgeWork(self.axes, self.lazy, owner, fold, returned))
        return works

    def is_edge_scatter(self, line: Line) -> bool:
        into_table = line.op == "reduce" and line.attrs == ("shared", "scatter")
        return into_table and any(self.axes.place(a) == "edge" for a in line.args[:2])

    def refuse(self) -> None:
        p = self.p
        if p.functions:
            raise Refused("a user's reducer")
        for t in p.types.values():
            if t.dtype == "f64" and not t.weak:
                raise Refused("float64")
        for line in p.lines:
            summed = line.op == "reduce" and line.attrs[0] == "shared" and not self.is_edge_scatter(line)
            if summed and any(self.axes.place(a) == "edge" for a in line.args):
                raise Refused("a parameter's gradient is summed over edges")

    def mark_folded(self) -> None:
        for line in self.p.lines:
            if line.op == "reduce" or any(a in self.folded for a in line.args):
                self.folded.update(line.outs)

    # Before the edges.

    def side(self, w: EdgeWork, ref: str) -> str:
        place = self.axes.place(ref)
        return "own" if place == w.owner else place if place in ("shared", "edge") else "far"

    def store(self, w: EdgeWork) -> None:
        """Notes the computed node values that a kernel over edges cannot compute itself."""
        nodes = Nodes(self.axes, w.owner, tuple(w.heads))
        for ref, mode in w.reads:
            here = self.side(w, ref) in ("own", "shared") and mode == ("vector" if nodes.vector(ref) else "number")
            if ref in self.p.definitions and not (here and nodes.fits(ref)):
                self.stored[ref] = mode

    def edge_inputs(self, w: EdgeWork) -> tuple[tuple[Input, ...], tuple[Line, ...]]:
        """The fields of a kernel over edges, and the node values of its owners that it computes."""
        nodes = Nodes(self.axes, w.owner, tuple(w.heads))
        inputs: dict[tuple[str, str], Input] = {}
        wanted = []
        for (ref, mode), vector in w.reads.items():
            if ref in self.p.definitions and ref not in self.stored:
                wanted.append(ref)
            else:
                inputs[ref, mode] = self.input(ref, self.side(w, ref), mode, vector)
        fields, lines = nodes.lines(wanted)
        for ref in fields:
            vector = nodes.vector(ref)
            mode = "vector" if vector else "number"
            side = "own" if self.axes.place(ref) == w.owner else "shared"
            inputs.setdefault((ref, mode), self.input(ref, side, mode, vector[0] if vector else None))
        return tuple(inputs.values()), lines

    def input(self, ref: str, side: str, mode: str, vector: Any) -> Input:
        dims = self.axes.dims(ref)
        return Input(ref, side, self.p.types[ref].dtype, (1, *dims[1:]) if mode == "table" else dims, mode, vector)

    def node_works(self) -> tuple[list[Work], list[str]]:
        """Kernels without edges, one a place, for what those over edges read; and what is left to torch."""
        works, by_torch = [], []
        for place in ("src", "dst"):
            refs = [r for r in self.stored if self.axes.place(r) == place]
            heads: dict[Any, None] = {}
            for r in refs:
                own = self.axes.of(r)
                heads.update(dict.fromkeys(own if self.stored[r] == "number" else own[:-1]))
            nodes = Nodes(self.axes, place, tuple(heads))
            fitting = [r for r in refs if nodes.fits(r)]
            by_torch += [r for r in refs if r not in fitting]
            if not fitting:
                continue
            fields, lines = nodes.lines(fitting)
            inputs = []
            for ref in fields:
                vector = nodes.vector(ref)
                side = "own" if self.axes.place(ref) == place else "shared"
                inputs.append(self.input(ref, side, *(("vector", vector[0]) if vector else ("number", None))))
            outputs = [self.output(r, None, nodes.vector(r)) for r in fitting]
            works.append(
                Work(place, tuple(inputs), lines, (), (), tuple(outputs), tuple(heads), None, False, (), (), {}, {}, {})
            )
        return works, [*by_torch, *[r for r in self.stored if self.axes.place(r) == "shared"]]

    def output(self, ref: str, result: int | None, vector: tuple) -> Output:
        name = self.axes.same(ref)
        return Output(name, self.axes.dims(ref if result is not None else name), result, vector[0] if vector else None)

    # After the edges.

    def after(self, w: EdgeWork) -> dict[str, Line]:
        """Node lines that the kernel can do once its folds are known."""
        nodes = Nodes(self.axes, w.owner, tuple(w.heads))
        made: dict[str, Line] = {}
        for line, *_ in w.folds:
            for o in line.outs if line.attrs[1] != "scatter" else ():
                nodes.done[o] = len(nodes.vector(o)) <= 1
        for line in self.p.lines:
            out = line.outs[0]
            if line.op == "reduce" or out not in self.folded or self.axes.place(out) != w.owner:
                continue
            if nodes.fits(out):
                made[out] = line
        return made

    def late(self, after: list[dict[str, Line]]) -> tuple[Line, ...]:
        """What is left to torch after the edges."""
        done = {o for made in after for o in made}
        return tuple(
            [
                line
                for line in self.p.lines
                if line.outs[0] in self.folded
                and line.outs[0] not in done
                and self.axes.place(line.outs[0]) != "edge"
                and not (line.op == "reduce" and line.attrs[0] != "shared")
                and not self.is_edge_scatter(line)
            ]
        )

    def finish(self, w: EdgeWork, part: tuple, after: dict[str, Line], late: tuple[Line, ...]) -> Work:
        """The work with what it computes and stores after the edges: only what is returned, or read by torch."""
        inputs, before = part
        nodes = Nodes(self.axes, w.owner, tuple(w.heads))
        results = {o for line, *_ in w.folds for o in line.outs if line.attrs[1] != "scatter"}
        mine = results | set(after)
        returned = [(k, r) for k, r in enumerate(self.p.returns) if r in mine]
        maps = tuple([self.output(r, k, ()) for k, r in returned if self.axes.place(r) == "shared"])
        outputs = [self.output(r, k, nodes.vector(r)) for k, r in returned if self.axes.place(r) == w.owner]
        for a in dict.fromkeys([a for line in late for a in line.args if a in mine]):
            outputs.append(self.output(a, None, nodes.vector(a)))
        known = frozenset(results) | {line.outs[0] for line in before}
        fields, lines = nodes.lines([o.ref for o in outputs], known)
        all_inputs = {(x.ref, x.mode): x for x in inputs}
        for ref in fields:
            vector = nodes.vector(ref)
            side = "own" if self.axes.place(ref) == w.owner else "shared"
            mode = "vector" if vector else "number"
            all_inputs.setdefault((ref, mode), self.input(ref, side, mode, vector[0] if vector else None))
        found = {(x.ref, x.mode): x for x in all_inputs.values()}
        folds = tuple([Fold(x[0], x[1], found[x[2], "vector"] if x[2] else None, *x[3:]) for x in w.folds])
        tables = {k: self.table(f.line) for k, f in enumerate(folds) if f.line.attrs[1] == "scatter"}
        return Work(
            w.owner,
            tuple(all_inputs.values()),
            before,
            folds,
            lines,
            tuple({(o.ref, o.dims, o.result): o for o in outputs}.values()),
            tuple(w.heads),
            packed(w, all_inputs.values()),
            w.numbers,
            tuple([self.output(r, k, ()) for k, r in enumerate(self.p.returns) if r in w.returned]),
            w.for_returns,
            tables,
            w.inners,
            w.loops,
            maps,
            w.within,
            w.within is not None and skips_tiles(w),
        )

    def table(self, line: Line) -> Output:
        """Sums into a table: the heads of what is summed, then the table's rows."""
        rows = self.axes.dims(line.args[2])[0]
        return Output(line.outs[0], (*[a for a in self.axes.dims(line.args[0]) if a != 1], rows), None, rows)

    def covers(self, works: list[Work]) -> None:
        """Every element of an output is written: its axes are heads, or the vector."""
        for work in works:
            for o in (*work.outputs, *work.edge_outputs):
                if any(a != 1 and a not in work.axes and a != o.vector for a in o.dims):
                    raise Refused("a result wider than what is folded into it")

    def early(self, by_torch: list[str], late: tuple[Line, ...], works: list[Work]) -> tuple[Line, ...]:
        """What torch computes on nodes before the edges: for kernels, for `late`, and for what is returned."""
        made = {o.result for w in works for o in (*w.outputs, *w.edge_outputs, *w.maps)}
        returned = [r for k, r in enumerate(self.p.returns) if k not in made]
        needed = {*by_torch, *[a for line in late for a in line.args], *returned}
        kept = []
        for line in reversed(self.p.lines):
            if any(o in needed for o in line.outs) and line.outs[0] not in self.folded:
                kept.append(line)
                needed.update(line.args)
        return tuple(kept[::-1])


def packed(w: EdgeWork, inputs: Any) -> Any | None:
    """A head that only the owners' fields have: heads that share the other end's fields share its tiles as well."""
    if any(line.attrs[1] == "scatter" for line, *_ in w.folds):
        return None  # a tile sums the owners of one head
    elsewhere = {a for x in inputs if x.side in ("far", "edge") for a in x.dims}
    here = [a for a in w.heads if a not in elsewhere and any(x.side == "own" and a in x.dims for x in inputs)]
    return here[-1] if here and any(x.side == "far" for x in inputs) else None
