"""Which lines of a program each pass of the rows skeleton computes, and which tensors it reads and fills.

A pass visits the rows of one direction of a listed relation, its owners, and the edges of each: all folds to the owners
are one kernel. Node work that a kernel can do stays in it: before the edges in the owner's registers, and after the
fold. What it cannot do is done by torch, around it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tiga.codegen.apart_rows import Few, apart
from tiga.primitives import PRIMITIVES
from tiga.program import Line, Program, number_text, read_number
from tiga.types import Total, is_one

POINTWISE = frozenset([name for name, row in PRIMITIVES.items() if row.elementwise])
SHAPED = frozenset(["to", "spread", "sum", "amax", "amin", "unsqueeze", "squeeze", "expand_like", "zeros_like"])
NODE = POINTWISE | SHAPED | {"permute", "arange", "size", "some"}
ALIKE = POINTWISE | {"to", "unsqueeze", "squeeze"}
SHARED = POINTWISE | {"to", "spread", "unsqueeze", "squeeze", "size", "vector"}
"""What a kernel computes of node values and of shared ones; torch does the rest once, before it."""
MOVED = {"cat", "part", "slice", "unslice", "reshape", "reshape_like", "column", "stack"}
EDGE = NODE | MOVED | {"number", "rand", "gather", "linear"}
# from which argument on an operation reads shapes alone
SHAPES = {
    **dict.fromkeys(("zeros_like", "size", "arange"), 0),
    **dict.fromkeys(("expand_like", "reshape_like", "unslice", "part", "rand"), 1),
}
# arguments that are read where they lie, part by part
READ = {"linear": 1, "gather": 0, "column": 0, "vector": 0}
FOLDS = ("sum", "count", "max", "min", "softmax")
SUMS = ("sum", "columns")
OTHER_END = {"dst": "src", "src": "dst"}


class Refused(Exception):
    """The skeleton does not fit the program; the text says why."""


@dataclass(frozen=True)
class Pass:
    """One kernel.

    folds to the owner, sums over all edges (`shared`), edge values to store; lines: what it computes, in the
    program's order; inputs: the tensors it reads; results: the owner's values that it stores.
    """

    owner: str
    folds: tuple[Line, ...]
    shared: tuple[Line, ...]
    stored: tuple[str, ...]
    lines: tuple[Line, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]

    @functools.cached_property
    def scans(self) -> bool:
        """Whether a user's reducer passes its states from edge to edge."""
        return any([f.op == "scan" for f in self.folds])


class Analysis:
    """few: fields whose linear maps are taken apart in each owner's pass; new: the lines that this one got by that."""

    def __init__(self, p: Program, few: Few = (), new: frozenset[str] = frozenset()) -> None:
        self.few, self.new, self.views = few, new, dict[str, Analysis]()
        self.p, self.lines = p, branches_joined(p, sums_of_rows(p))
        if p.kind == "csr":
            self.lines = softmaxes_joined(p, self.lines)
        self.defined = {o: line for line in self.lines for o in line.outs}
        self.parent: dict = {}
        for a, b in p.conditions:
            if not (isinstance(b, Total) and b.rule == "at least"):
                self.union(a, b)
        self.readers: dict[str, list[Line]] = {}
        for line in self.lines:
            for a in read_args(line):
                self.readers.setdefault(a, []).append(line)
        self.late = self.after_edges()

    # Sizes.

    def find(self, size):
        while self.parent.get(size, size) != size:
            size = self.parent[size]
        return size

    def union(self, a, b) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[b if isinstance(a, int) else a] = a if isinstance(a, int) else b

    def axes(self, ref: str) -> tuple:
        t = self.p.types.get(ref)
        return () if t is None else tuple([1 if is_one(s) else self.find(s) for s in t.sizes])

    # Passes.

    def after_edges(self) -> frozenset[str]:
        """Values that a fold over edges goes into."""
        found: set[str] = set()
        for line in self.lines:
            if any(a in found for a in line.args) or self.over_edges(line):
                found.update(line.outs)
        return frozenset(found)

    def over_edges(self, line: Line) -> bool:
        if line.op != "reduce":
            return line.op == "scan"
        places = {self.p.types[a].place for a in folded_args(line) if a in self.p.types}
        return line.attrs[0] != "shared" or "edge" in places or {"src", "dst"} <= places

    @functools.cached_property
    def over(self) -> tuple[Line, ...]:
        """The folds over edges."""
        return tuple([line for line in self.lines if self.over_edges(line)])

    @functools.cached_property
    def first(self) -> str:
        """The owner that is visited first, with sums over all edges."""
        owners = {owner_of(line) for line in self.over}
        return "dst" if "dst" in owners or "src" not in owners else "src"

    def view(self, owner: str) -> Analysis:
        """The program as the pass of an owner computes it."""
        if not self.few:
            return self
        if owner not in self.views:
            p, new = apart(self.p, owner, self.few, owner == self.first)
            self.views[owner] = Analysis(p, (), new)
        return self.views[owner]

    def passes(self) -> tuple[Pass, ...]:
        p = self.p
        if p.batch:
            raise Refused("a batch dimension (vmap)")
        for line in self.over:
            if line.op == "scan" and (line.attrs[0] != "forward" or len(line.outs) > int(line.attrs[2])):
                raise Refused("what a user's reducer leaves at every edge, for its gradient")
            if line.op == "reduce" and line.attrs[0] != "shared" and line.attrs[1] not in FOLDS:
                raise Refused(f"the reducer {line.attrs[1]} to {line.attrs[0]}")
        stored = tuple(dict.fromkeys([r for r in p.returns if p.types[r].place == "edge"]))
        views = {owner: self.view(owner) for owner in ("dst", "src")}
        owned = {owner: tuple([x for x in a.over if owner_of(x) == owner]) for owner, a in views.items()}
        # sums of matrices take most registers: they are visited for themselves
        small, large = (
            tuple([x for x in views[owner].over if x.attrs[0] == "shared" and (x.attrs[1] in SUMS) == few])
            for owner, few in ((self.first, True), ("dst", False))
        )
        passes = [
            views[owner].one(owner, owned[owner], *((small, stored) if owner == self.first else ((), ())))
            for owner in views
            if owned[owner] or (owner == self.first and (small or stored))
        ]
        passes = self.on_nodes(self.exported(passes))
        return (*passes, views["dst"].one("dst", (), large, ())) if large else tuple(passes)

    def on_nodes(self, passes: list[Pass]) -> list[Pass]:
        """Before passes by source alone: what they and others read of destinations, by a pass that visits no edges.
        torch's operations would read and write whole fields, each of them."""
        if self.p.kind != "csr" or {work.owner for work in passes} != {"src"}:
            return passes
        a = self.view("dst")
        found = _Closure(a, "dst")
        wanted = {*a.p.returns, *[r for work in passes for r in work.inputs]}
        made = [line.outs[0] for line in a.lines if line.outs[0] in wanted and found.fits(line.outs[0])]
        results = tuple([r for r in made if a.p.types[r].place == "dst"])
        for r in results:
            found.need(r)
        lines = tuple([line for line in a.lines if line.outs[0] in found.computed])
        if len(lines) < 2:
            return passes
        return [Pass("dst", (), (), (), lines, tuple(found.inputs), results), *passes]

    def one(self, owner: str, folds: tuple, shared: tuple, stored: tuple) -> Pass:
        found = _Closure(self, owner)
        for line in (*folds, *shared):
            for a in folded_args(line):
                found.need(a)
        for r in stored:
            found.need(r)
        mine = {o for line in folds for o in line.outs}
        for line in self.lines:
            if found.follows(line, mine):
                mine.add(line.outs[0])
        lines = tuple([x for x in self.lines if x.outs[0] in found.computed or (x.outs[0] in mine and x not in folds)])
        inside = {x.outs[0] for x in lines}
        results = tuple(
            [
                o
                for line in self.lines
                for o in line.outs
                if o in mine and (o in self.p.returns or any(r.outs[0] not in inside for r in self.readers.get(o, ())))
            ]
        )
        return Pass(owner, folds, shared, stored, lines, tuple(found.inputs), results)

    def exported(self, passes: list[Pass]) -> list[Pass]:
        """What the first pass computes of its owners on the way, and the second gathers: it stores that as well."""
        if len(passes) < 2:
            return passes
        one, two = passes
        types = self.view(one.owner).p.types
        own = {line.outs[0] for line in one.lines if types[line.outs[0]].place == one.owner}
        more = tuple([r for r in two.inputs if r in own and r not in one.results])
        return [replace(one, results=(*one.results, *more)), two]


class _Closure:
    """The lines that a value needs inside a kernel, down to the tensors it reads."""

    def __init__(self, analysis: Analysis, owner: str) -> None:
        self.a, self.owner = analysis, owner
        self.computed: set[str] = set()
        self.inputs: dict[str, None] = {}

    def need(self, ref: str) -> None:
        p = self.a.p
        if ref in self.computed or ref in self.inputs or read_number(ref) is not None:
            return
        line, place = self.a.defined.get(ref), p.types[ref].place if ref in p.types else "shared"
        if place == "edge" and line is not None:
            if line.op not in EDGE:
                raise Refused(f"{line.op} on the edge")
            self.compute(line)
        elif line is not None and (ref in self.a.new or self.fits(ref) or len(self.sources(ref)) == 1):
            self.compute(line)
        else:
            self.inputs[ref] = None

    def compute(self, line: Line) -> None:
        self.computed.add(line.outs[0])
        for k, a in enumerate(read_args(line)):
            if READ.get(line.op) == k:
                self.inputs[a] = None  # a matrix, a table: read where it lies
            else:
                self.need(a)

    def fits(self, ref: str) -> bool:
        """Whether the kernel computes a node or shared value: cheap work on what the owner holds anyway."""
        place = self.a.p.types[ref].place if ref in self.a.p.types else "shared"
        line = self.a.defined.get(ref)
        if line is None:
            return place in ("shared", self.owner)
        if ref in self.a.late or place not in ("shared", self.owner):
            return False
        return line.op in (SHARED if place == "shared" else NODE) and all(
            self.fits(a) or self.a.p.types[a].place == "shared" for a in read_args(line) if a in self.a.p.types
        )

    def sources(self, ref: str) -> set[str]:
        """The fields that a value of the other end follows from, number by number; a gather of one does for all."""
        place, line = self.a.p.types[ref].place if ref in self.a.p.types else "shared", self.a.defined.get(ref)
        if place == "shared":
            return set() if self.fits(ref) else {ref, ""}
        if line is None:
            return {ref}
        if line.op not in ALIKE or ref in self.a.late:
            return {ref, ""}
        return set().union(*[self.sources(a) for a in line.args])

    def follows(self, line: Line, mine: set[str]) -> bool:
        """Whether a line after the fold is node work on what the kernel has."""
        if line.op not in NODE or self.a.p.types[line.outs[0]].place != self.owner or line.outs[0] not in self.a.late:
            return False
        if not all(a in mine or self.fits(a) for a in line.args if a in self.a.p.types):
            return False
        for a in line.args:
            if a not in mine:
                self.need(a)
        return True


def read_args(line: Line) -> tuple[str, ...]:
    """The arguments whose values a line reads; of the others it reads the shape."""
    return line.args[: SHAPES.get(line.op)]


def owner_of(line: Line) -> str:
    """Where a fold's result lives."""
    return "dst" if line.op == "scan" else line.attrs[0]


def folded_args(line: Line) -> tuple[str, ...]:
    if line.op == "scan":
        return line.args
    return line.args[:2] if line.attrs[1] == "scatter" else line.args


def sums_of_rows(p: Program) -> tuple[Line, ...]:
    """The lines, where a sum over rows of sums over their edges is one sum over edges."""
    readers: dict[str, int] = {}
    for line in p.lines:
        for a in line.args:
            readers[a] = readers.get(a, 0) + 1
    lines: list[Line] = []
    gone: set[str] = set()
    for line in p.lines:
        inner = p.definitions.get(line.args[0]) if line.args else None
        if (
            line.op == "reduce"
            and line.attrs == ("shared", "sum")
            and inner is not None
            and inner.op == "reduce"
            and inner.attrs[1] == "sum"
            and readers[line.args[0]] == 1
            and line.args[0] not in p.returns
            and p.types[inner.args[0]].place == "edge"
            and len(p.types[inner.args[0]].sizes) == len(p.types[line.outs[0]].sizes)
        ):
            gone.add(line.args[0])
            line = Line(line.outs, line.op, inner.args, line.attrs)
        lines.append(line)
    return tuple([line for line in lines if line.outs[0] not in gone])


def around(analysis: Analysis, passes: tuple[Pass, ...]) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """The lines that torch computes, before the passes and after them."""
    made = {r for work in passes for r in (*work.results, *work.stored, *[f.outs[0] for f in work.shared])}
    inputs = {r for work in passes for r in work.inputs}
    # what a pass makes of its owners on the way is made before it where that is read before it
    early = needed([line for line in analysis.lines if line.outs[0] not in analysis.late], inputs - made)
    rest = [line for line in analysis.lines if line not in early and not made.intersection(line.outs)]
    return early, needed(rest, set(analysis.p.returns) - made)


def needed(lines: list[Line], wanted: set[str]) -> tuple[Line, ...]:
    """The lines that give what is wanted, and what those read."""
    found: list[Line] = []
    for line in reversed(lines):
        if any([o in wanted for o in line.outs]):
            found.insert(0, line)
            wanted = wanted.union(read_args(line))
    return tuple(found)


def softmaxes_joined(p: Program, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """The lines, where softmaxes of several values under the same scores are one: its results are the first's, lse, the
    others'. Where a later one's lse is read, they are not."""
    read = {*p.returns, *[a for line in lines for a in line.args]}
    found: list[Line] = []
    for line in lines:
        at = next((k for k, x in enumerate(found) if alike_softmax(x, line)), None)
        since = {a for x in (*found[at + 1 :], line) for a in x.args} if at is not None else set()
        if at is None or line.outs[1] in read or not since.isdisjoint(found[at].outs):
            found.append(line)
            continue
        first = found.pop(at)
        outs = (*first.outs, line.outs[0], *line.outs[2:])
        found.append(Line(outs, "reduce", (*first.args, *line.args[1:]), first.attrs))
    return tuple(found)


def alike_softmax(a: Line, b: Line) -> bool:
    """Whether two folds are softmaxes of the same scores."""
    softmax = a.op == b.op == "reduce" and a.attrs == b.attrs and a.attrs[1] == "softmax"
    return softmax and a.args[0] == b.args[0]


def branches_joined(p: Program, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """The lines, where(c, g, 0) + where(c, 0, g) * k written as g * where(c, 1, k): a gradient through two branches."""
    readers: dict[str, int] = {}
    for line in lines:
        for a in line.args:
            readers[a] = readers.get(a, 0) + 1
    once = {o: line for line in lines for o in line.outs if readers.get(o) == 1 and o not in p.returns}
    gone: set[str] = set()
    found: dict[str, tuple[Line, Line]] = {}
    for line in lines:
        for a, b in (line.args, line.args[::-1]) if line.op == "add" else ():
            taken, share = once.get(a), once.get(b)
            if taken is None or share is None or (taken.op, share.op) != ("where", "mul"):
                continue
            k = next((x for x in share.args if read_number(x) is not None), None)
            other = once.get(next((x for x in share.args if x != k), ""))
            if k is None or other is None or other.op != "where" or line.outs[0] in found:
                continue
            c, g, zero = taken.args
            same = p.types[c].sizes == p.types[a].sizes == p.types[line.outs[0]].sizes if c in p.types else False
            if (
                same
                and read_number(zero) == 0
                and read_number(other.args[1]) == 0
                and other.args == (c, other.args[1], g)
            ):
                if p.types[a].dtype == p.types[line.outs[0]].dtype and abs(read_number(k) or 0) < float("inf"):
                    gone |= {a, b, other.outs[0]}
                    branch = replace(taken, args=(c, number_text(1.0), k))
                    found[line.outs[0]] = (branch, Line(line.outs, "mul", (g, a)))
    kept = [found.get(line.outs[0], (line,)) for line in lines if line.outs[0] not in gone]
    return tuple([line for group in kept for line in group])
