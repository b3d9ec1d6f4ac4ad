"""Linear maps of few inputs on the edge, taken apart: W a is the sum over t of a[t] W[:, t].

Each term is a number of the edge times a vector that all edges share, so that a pass that owns the other factor
multiplies by the vector once a row, where it would for every edge:

    sum_c (k + W a)[c] q[c]   =  sum_c k[c] q[c] + sum_t a[t] (sum_c W[c, t] q[c])       inner products
    sum_e p_e (k_e + W a_e)   =  sum_e p_e k_e + sum_t W[:, t] (sum_e p_e a_e[t])        folds
    sum_e (p_e q) a_e^T       =  q (sum_e p_e a_e)^T                                     the gradient of W
    W^T (p_e q)               =  p_e (W^T q)                                             the gradient of a

These are lines of the same program, by other names; what no rule takes apart is the sum of its terms at every edge.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from tiga.infer import infer
from tiga.primitives import PRIMITIVES
from tiga.program import Line, Program, evaluate_size, read_number
from tiga.types import Type, compute_dtype, is_one

MOST = 8
"""Inputs of a map, at most: of each a kernel holds a vector, and of the gradient another."""
Few = tuple[tuple[str, int], ...]
"""Values of edges that are such inputs, and how many numbers each has."""
_POINTWISE = frozenset([name for name, row in PRIMITIVES.items() if row.elementwise])


@functools.lru_cache(4096)
def _bare(p: Program) -> Program:
    """The program whose maps read their operands of 16 bits as they lie: their numbers are float32 once read."""

    def behind(ref: str) -> str:
        line = p.definitions.get(ref)
        if line is None or (line.op, line.attrs) != ("to", ("f32",)) or line.args[0] in p.definitions:
            return ref
        return line.args[0] if p.types[line.args[0]].dtype in ("bf16", "f16") else ref

    def read(line: Line) -> Line:
        maps = line.op in ("linear", "permute") or (line.op == "reduce" and line.attrs[1] == "dot")
        return dataclasses.replace(line, args=tuple(map(behind, line.args))) if maps else line

    lines = tuple(map(read, p.lines))
    return dataclasses.replace(p, lines=lines, definitions={o: line for line in lines for o in line.outs})


@functools.lru_cache(4096)
def _inputs(p: Program) -> tuple[tuple[str, Any], ...]:
    """What linear maps on the edges of a program read: nothing, if one reads what is not made number by number."""
    if p.batch or any([line.op == "scan" for line in p.lines]):
        return ()
    p = _bare(p)
    maps = [line.args for line in p.lines if line.op == "linear" and p.types[line.outs[0]].place == "edge"]
    read = {x: w for x, w in maps if p.types[x].place == "edge" and by_columns(p, x)}
    matrices = {w for w in read.values() if p.types[w].place == "shared" and not transposed(p, w)}
    for x, w in maps:
        if not (w in matrices or transposed(p, w) in matrices) or (w in matrices and x not in read):
            return ()
    return tuple([(x, p.types[x].sizes[0]) for x in read])


def by_columns(p: Program, ref: str) -> bool:
    """Whether each number of a vector follows from the same numbers of fields."""
    t, line = p.types.get(ref), p.definitions.get(ref)
    if t is None or (t.place == "shared" and not t.sizes):
        return True
    if t.place == "shared" or len(t.sizes) != 1 or is_one(t.sizes[0]):
        return False
    return line is None or (line.op in _POINTWISE and all([by_columns(p, a) for a in line.args]))


def few(p: Program, shapes: Sequence[Any]) -> Few:
    """The inputs of a program's maps at operands of these shapes, where all of them are few."""
    found = tuple([(x, int(evaluate_size(size, tuple(shapes), p.operands))) for x, size in _inputs(p)])
    return found if all([0 < n <= MOST for _, n in found]) else ()


def transposed(p: Program, ref: str) -> str:
    line = p.definitions.get(ref)
    return line.args[0] if line is not None and (line.op, line.attrs) == ("permute", ("-1", "-2")) else ""


def apart(p: Program, owner: str, few: Few, sums: bool) -> tuple[Program, frozenset[str]]:
    """The program for an owner's pass, and the names of its new lines; sums: that pass has those over all edges."""
    p = _bare(p)
    work = Apart(p, owner, dict(few), sums)
    new = dataclasses.replace(p, lines=tuple(work.lines), types=work.types, definitions=work.defined)
    return new, frozenset(work.new)


class Apart:
    def __init__(self, p: Program, owner: str, few: dict[str, int], sums: bool) -> None:
        self.p, self.owner, self.few, self.sums = p, owner, few, sums
        self.types, self.new = dict(p.types), set[str]()
        self.lines: list[Line] = []
        self.same: dict[tuple, str] = {}
        self.maps: dict[str, tuple[Line, ...]] = {}  # maps and sums of maps, by what holds their result
        maps = [line.args for line in p.lines if line.op == "linear" and line.args[0] in few]
        self.matrices = {w: few[x] for x, w in maps}
        for line in p.lines:
            if not self.taken(line):
                self.lines.append(line)
        self.defined = {o: line for line in self.lines for o in line.outs}

    # Lines.

    def put(self, op: str, args: tuple, attrs: tuple = (), known: Type | None = None, out: str = "") -> str:
        """A line's result, by the name asked for; the same line is written once."""
        key = (op, args, attrs, known)
        if not out and key in self.same:
            return self.same[key]
        t = known or infer(Line((), op, args, attrs), tuple([self.type(a) for a in args]), lambda a, b: None)[0]
        name = out or f"%{len(self.p.types) + len(self.new)}a"
        self.types[name] = t
        self.lines.append(Line((name,), op, args, attrs))
        if not out:
            self.same[key] = name
            self.new.add(name)
        return name

    def type(self, ref: str) -> Type:
        if ref in self.types:
            return self.types[ref]
        return Type("shared", "i64" if isinstance(read_number(ref), int) else "f64", (), True)

    def joined(self, op: str, refs: list[str], out: str = "") -> str:
        """A sum or a product of values, by the name asked for."""
        while len(refs) > 2:
            refs = [self.put(op, (refs[0], refs[1])), *refs[2:]]
        if len(refs) == 2:
            return self.put(op, (refs[0], refs[1]), out=out)
        return self.put("to", (refs[0],), (self.types[out].dtype,), out=out) if out else refs[0]

    def column(self, x: str, t: int) -> str:
        """Number t of each vector."""
        known, line = self.type(x), self.p.definitions.get(x)
        if not known.sizes:
            return x
        if line is None:
            return self.put("column", (x,), (str(t),), Type(known.place, known.dtype, ()))
        return self.put(line.op, tuple([self.column(a, t) for a in line.args]), line.attrs)

    def vector(self, w: str, t: int, sizes: tuple) -> str:
        """W[:, t], in the sizes that its map's result is read with."""
        return self.put("vector", (w,), (str(t), str(self.matrices[w])), Type("shared", self.types[w].dtype, sizes))

    def products(self, name: str) -> list[tuple[str, str]]:
        """The terms of a map, or of a sum of maps: (number of the edge, vector of all)."""
        sizes, maps = self.types[name].sizes, [line.args for line in self.maps[name]]
        return [(self.column(x, t), self.vector(w, t, sizes)) for x, w in maps for t in range(self.few[x])]

    # What a value is made of.

    def at_edge(self, ref: str) -> bool:
        return self.type(ref).place not in ("shared", self.owner)

    def terms(self, ref: str) -> list[str]:
        line, t = self.p.definitions.get(ref), self.type(ref)
        if line is None or line.op != "add" or ref in self.maps or t.place != "edge":
            return [ref]
        if any([a not in self.types or self.types[a].weak for a in line.args]):
            return [ref]
        return [x for a in line.args for x in self.terms(a)]

    def factors(self, ref: str) -> list[str]:
        line, t = self.p.definitions.get(ref), self.type(ref)
        if line is None or line.op != "mul" or t.place != "edge":
            return [ref]
        return [x for a in line.args for x in self.factors(a)]

    def split(self, ref: str) -> tuple[list[str], list[str], list[str]] | None:
        """(factors, maps, terms) of a value that is a product with one sum of maps and other terms."""
        factors = self.factors(ref)
        sums = [f for f in factors if not self.maps.keys().isdisjoint(self.terms(f))]
        if len(sums) != 1:
            return None
        terms = self.terms(sums[0])
        maps = [x for x in terms if x in self.maps]
        return [f for f in factors if f != sums[0]], maps, [x for x in terms if x not in self.maps]

    def like(self, refs: list[str], out: str) -> bool:
        """Whether the sum of these is of the type that is known by this name."""
        types, t = [self.type(r) for r in refs], self.types[out]
        rank = len(t.sizes)
        ones = [all([len(x.sizes) < back or is_one(x.sizes[-back]) for x in types]) for back in range(1, rank + 1)]
        wide = [is_one(t.sizes[-back]) for back in range(1, rank + 1)]
        return all([len(x.sizes) <= rank for x in types]) and ones == wide

    # Rules: each says whether it took the line apart.

    def taken(self, line: Line) -> bool:
        rule = {
            "linear": self.linear,
            "add": self.add,
            "reshape": self.reshape,
            "reshape_like": self.reshape,
            "sum": self.inner,
            "reduce": self.fold,
        }.get(line.op)
        kept = len(self.lines), dict(self.types), set(self.new), dict(self.same)
        if rule is None:
            return False
        if rule(line):
            return True
        at, self.types, self.new, self.same = kept
        del self.lines[at:]
        return False

    def linear(self, line: Line) -> bool:
        x, w = line.args
        if self.type(line.outs[0]).place != "edge":
            return False
        if x not in self.few:
            return self.sums and transposed(self.p, w) in self.matrices and self.back(line, transposed(self.p, w))
        self.maps[line.outs[0]] = (line,)
        readers = [r for r in self.p.lines if line.outs[0] in r.args]
        # others read its shape alone
        return any([r.op not in ("reshape", "reshape_like") for r in readers]) and self.whole(line)

    def add(self, line: Line) -> bool:
        if not self.maps.keys() >= set(line.args):
            return False
        self.maps[line.outs[0]] = tuple([x for a in line.args for x in self.maps[a]])
        return self.whole(line)

    def reshape(self, line: Line) -> bool:
        if line.args[0] not in self.maps:
            return False
        self.maps[line.outs[0]] = self.maps[line.args[0]]
        return self.whole(line)

    def whole(self, line: Line) -> bool:
        """A map's result at every edge."""
        out = line.outs[0]
        self.joined("add", [self.put("mul", pair) for pair in self.products(out)], out)
        return True

    def inner(self, line: Line) -> bool:
        """A sum over features of a product with what the owner holds."""
        found = self.split(line.args[0]) if line.attrs == ("-1",) else None
        if found is None or any([self.at_edge(f) for f in found[0]]):
            return False
        factors, maps, rest = found
        total = lambda values: self.put("sum", (self.joined("mul", values),), ("-1",))
        pieces = [total([self.joined("add", rest), *factors])] if rest else []
        for number, vector in [x for name in maps for x in self.products(name)]:
            pieces.append(self.put("mul", (number, total([vector, *factors]))))
        if not self.like(pieces, line.outs[0]):
            return False
        self.joined("add", pieces, line.outs[0])
        return True

    def fold(self, line: Line) -> bool:
        place, name = line.attrs
        if place == "shared":
            return self.sums and name == "dot" and line.args[1] in self.few and self.outer(line)
        if place != self.owner or name not in ("sum", "softmax"):
            return False
        found = self.split(line.args[-1])
        if found is None:
            return False
        factors, maps, rest = found
        edge = [f for f in factors if self.at_edge(f)]
        row = [f for f in factors if f not in edge]
        wide = sum([not is_one(s) for s in self.types[maps[0]].sizes])
        if any([sum([not is_one(s) for s in self.type(f).sizes]) >= wide for f in edge]):
            return False
        values = [self.joined("mul", [self.joined("add", rest), *factors])] if rest else []
        values += [
            self.joined("mul", [*edge, number, vector, *row]) for m in maps for number, vector in self.products(m)
        ]
        if not self.like([*values, *line.args[:-1]], line.outs[0]):
            return False
        if name == "sum":
            folds = [self.put("reduce", (v,), line.attrs) for v in values]
        elif factors:
            return False
        else:
            folds = self.softmax(line, values)
        total = self.joined("add", folds)
        self.put("some", (total,), known=self.types[line.outs[0]], out=line.outs[0])
        return True

    def softmax(self, line: Line, values: list[str]) -> list[str]:
        """One softmax of several values: its results are the first's, lse, the others'."""
        score, outs = line.args[0], []
        for v in values:
            t = infer(line, (self.type(score), self.type(v)), lambda a, b: None)[0]
            outs.append(f"%{len(self.p.types) + len(self.new)}a")
            self.types[outs[-1]] = t
            self.new.add(outs[-1])
        self.lines.append(Line((outs[0], line.outs[1], *outs[1:]), "reduce", (score, *values), line.attrs))
        return outs

    def source(self, ref: str) -> str:
        """The value that a reshaped one was."""
        line = self.p.definitions.get(ref)
        while line is not None and line.op in ("reshape_like", "reshape") and self.type(ref).place == "edge":
            ref, line = line.args[0], self.p.definitions.get(line.args[0])
        return ref

    def parts(self, ref: str) -> list[tuple[list[str], list[str]]]:
        """The terms of a value, of each the factors at edges and the owner's."""
        found = []
        for term in self.terms(ref):
            factors = self.factors(term)
            edge = [f for f in factors if self.at_edge(f)]
            found.append((edge, [f for f in factors if f not in edge]))
        return found

    def outer(self, line: Line) -> bool:
        """The gradient of a matrix, column by column: sums over edges of products."""
        g, x = self.source(line.args[0]), line.args[1]
        values = []
        for t in range(self.few[x]):
            values += [self.joined("mul", [*edge, self.column(x, t), *row]) for edge, row in self.parts(g)]
        dtypes = compute_dtype(self.type(g).dtype), self.types[line.outs[0]].dtype
        if dtypes[0] != dtypes[1] or not all([self.like([v], g) for v in values]):
            return False
        self.lines.append(Line(line.outs, "reduce", tuple(values), ("shared", "columns", str(self.few[x]))))
        return True

    def back(self, line: Line, w: str) -> bool:
        """The gradient of a map's inputs: of each a number a head, then their sums over heads, all at once."""
        g, out, columns = self.source(line.args[0]), self.types[line.outs[0]], []
        sizes = self.types[g].sizes
        for t in range(self.matrices[w]):
            vector, pieces = self.vector(w, t, sizes), []
            for edge, row in self.parts(g):
                own = self.joined("mul", [vector, *row])
                if edge and all([not self.type(f).sizes or is_one(self.type(f).sizes[-1]) for f in edge]):
                    own = self.put("unsqueeze", (self.put("sum", (own,), ("-1",)),), ("-1",))
                piece = self.joined("mul", [*edge, own])
                for _ in sizes[1:]:
                    piece = self.put("sum", (piece,), ("-1",))
                pieces.append(piece)
            columns.append(self.joined("add", pieces))
            if len({is_one(self.types[x].sizes[0]) for x in pieces}) > 1:
                return False
        if len(out.sizes) != 1:
            return False
        known = out._replace(sizes=(self.types[columns[0]].sizes[0], *out.sizes))
        self.put("sum", (self.put("stack", tuple(columns), known=known),), ("-2",), out, line.outs[0])
        return True
