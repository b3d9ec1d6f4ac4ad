"""Sums over a row's edges that forward keeps, so that a gradient need not visit them again.

A gradient is linear in the results' gradients. Where that of a row's own field is sum_e p_e w_e <g, v_e>, with
softmax's weights p, and g the row's, it is <g, s> with s = sum_e p_e w_e v_e: softmax's mean of w v, which forward
makes of the vectors that it has at hand anyway. Without it every edge's vector would be read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiga.builder import Value, literal
from tiga.derivation import Derivation
from tiga.program import Line, Program, numbered
from tiga.reducers import softmax_weight
from tiga.types import broadcast_sizes, is_one


class NotLinear(Exception):
    """An edge value is no sum of products that are known of."""


class Term(NamedTuple):
    """row * weight * rest at every edge, taken off where `less`; `summed`: <row, vector> * weight * rest.

    row: the row's own value. weight: the word of a softmax's weight p_e. rest: w_e, what else differs from edge to
    edge. flat: the feature that <,> sums is gone, where else it has size 1.
    """

    row: Value
    weight: str = ""
    rest: Value | None = None
    vector: Value | None = None
    summed: bool = False
    flat: bool = False
    less: bool = False

    def times(self, x: Value) -> Term:
        return self._replace(rest=x if self.rest is None else self.rest * x)


class KeptSums:
    """Of a derived program whose results' gradients are `grads`. more: beside the means that the primal program has,
    any that its softmaxes could have are taken to be there, and wished for."""

    def __init__(self, d: Derivation, grads: Sequence[Value], more: bool) -> None:
        self.d, self.builder, self.more = d, d.builder, more
        self.moving = {g.ref for g in grads}  # words of what depends on them
        self.lines: dict[str, Line] = {}
        self.seen = 0
        self.scores: dict[str, tuple[int, Value]] = {}  # by a weight's word: its softmax's line, its score
        self.means: dict[tuple[str, str], Value] = {}  # by the words of a weight and of what is weighted
        self.wished: list[tuple[int, Value]] = []
        for at, line in enumerate(d.p.lines):
            if line.op == "reduce" and line.attrs == FOLD:
                score, value = [self.builder.lift(d.argument(a)) for a in line.args]
                weight = softmax_weight(self.builder, score, d.values[line.outs[1]]).ref
                self.scores.setdefault(weight, (at, score))
                self.means[weight, value.ref] = d.values[line.outs[0]]

    def home(self, c: Value) -> Value | None:
        """The sum of an edge value over a row's edges, of kept sums; None where it does not follow from them."""
        self.look()
        try:
            parts = [self.part(t) for t in self.alike(self.terms(c))]
        except NotLinear:
            return None
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if [is_one(s) for s in total.type.sizes] != [is_one(s) for s in c.type.sizes]:
            return None
        return total if total.type.dtype == c.type.dtype else total.emit("to", c.type.dtype)

    def look(self) -> None:
        for line in self.builder.lines[self.seen :]:
            self.lines.update(dict.fromkeys(line.outs, line))
            if any([a in self.moving for a in line.args]):
                self.moving.update(line.outs)
        self.seen = len(self.builder.lines)

    # An edge value as a sum of terms.

    def terms(self, v: Value) -> list[Term]:
        if v.ref not in self.moving:
            raise NotLinear
        if v.type.place == "dst":
            return [Term(v)]
        op, args = self.builder.origin.get(v.ref, ("", ()))
        if v.type.place != "edge" or op not in _RULES:
            raise NotLinear
        return _RULES[op](self, self.lines[v.ref].attrs, *args)

    def total(self, attrs: tuple, a: Value, b: Value) -> list[Term]:
        return self.terms(a) + self.terms(b)

    def difference(self, attrs: tuple, a: Value, b: Value) -> list[Term]:
        return self.terms(a) + self.negative(attrs, b)

    def negative(self, attrs: tuple, a: Value) -> list[Term]:
        return [t._replace(less=not t.less) for t in self.terms(a)]

    def same(self, attrs: tuple, a: Value) -> list[Term]:
        return self.terms(a)

    def product(self, attrs: tuple, a: Value, b: Value) -> list[Term]:
        moved, x = (a, b) if a.ref in self.moving else (b, a)
        if x.ref in self.moving or len(x.type.sizes) not in (0, len(moved.type.sizes)):
            raise NotLinear
        found = self.terms(moved)
        if x.ref not in self.scores:
            return [t.times(x) for t in found]
        if any([t.weight for t in found]):
            raise NotLinear
        return [t._replace(weight=x.ref) for t in found]

    def quotient(self, attrs: tuple, a: Value, x: Value) -> list[Term]:
        if x.ref in self.moving or len(x.type.sizes) not in (0, len(a.type.sizes)):
            raise NotLinear
        return [t._replace(rest=(1.0 if t.rest is None else t.rest) / x) for t in self.terms(a)]

    def branches(self, attrs: tuple, c: Value, a: Value, b: Value) -> list[Term]:
        if c.ref in self.moving:
            raise NotLinear
        found = []
        for x, first in ((a, True), (b, False)):
            if x.ref not in self.moving:
                if literal(x.ref) != 0:
                    raise NotLinear
                continue
            for t in self.terms(x):
                if t.rest is None:
                    here = c.emit("to", "f64" if x.type.dtype == "f64" else "f32")
                    rest = here if first else 1.0 - here
                else:
                    rest = self.builder.emit("where", (c, t.rest, 0.0) if first else (c, 0.0, t.rest))
                found.append(t._replace(rest=rest))
        return found

    def reshaped(self, op: str, attrs: tuple, a: Value) -> list[Term]:
        """The last feature, of size 1, comes or goes."""
        found, flat = [], op == "squeeze"
        for t in self.terms(a):
            if attrs != ("-1",) or (t.summed and t.flat == flat):
                raise NotLinear
            whole = [x for x in (t.rest, None if t.summed else t.row) if x is not None]
            if any([len(x.type.sizes) != len(a.type.sizes) for x in whole]):
                raise NotLinear
            t = t if t.rest is None else t._replace(rest=t.rest.emit(op, "-1"))
            found.append(t._replace(flat=flat) if t.summed else t._replace(row=t.row.emit(op, "-1")))
        return found

    def inner(self, attrs: tuple, a: Value) -> list[Term]:
        """A sum over the last feature."""
        found = []
        for t in self.terms(a):
            if attrs != ("-1",) or t.summed or t.weight or len(t.row.type.sizes) != len(a.type.sizes):
                raise NotLinear
            if t.rest is None or is_one(t.rest.type.sizes[-1]) or len(t.rest.type.sizes) != len(a.type.sizes):
                raise NotLinear
            found.append(Term(t.row, vector=t.rest, summed=True, flat=True, less=t.less))
        return found

    def alike(self, terms: list[Term]) -> list[Term]:
        """Terms of the same row value are one."""
        found: dict[tuple, Term] = {}
        for t in terms:
            key = (t.row.ref, t.weight, t.vector.ref if t.vector is not None else "", t.flat)
            other = found.setdefault(key, t)
            if other is not t:
                if t.rest is None or other.rest is None:
                    raise NotLinear
                rest = other.rest + t.rest if t.less == other.less else other.rest - t.rest
                found[key] = other._replace(rest=rest)
        return list(found.values())

    def part(self, t: Term) -> Value:
        """The sum of a term."""
        if not t.weight or t.rest is None:
            raise NotLinear
        rank, rest, narrow = len(self.scores[t.weight][1].type.sizes), t.rest, False
        if len(rest.type.sizes) == rank - 1:
            rest, narrow = rest.emit("unsqueeze", "-1"), True
        if len(rest.type.sizes) != rank or (t.summed and (narrow != t.flat or not is_one(rest.type.sizes[-1]))):
            raise NotLinear
        mean = self.mean(t.weight, rest if t.vector is None else t.vector * rest)
        row = -t.row if t.less else t.row
        if t.summed:
            found = (row * mean).emit("sum", "-1")
            return found if t.flat else found.emit("unsqueeze", "-1")
        return row * (mean.emit("squeeze", "-1") if narrow else mean)

    # Means that the primal program may have.

    def mean(self, weight: str, x: Value) -> Value:
        found = self.means.get((weight, x.ref))
        if found is None:
            at, score = self.scores[weight]
            # one vector beside that which is weighted already: each takes a row's registers, and memory until backward
            vectors = [y for k, y in self.wished if k == at and not is_one(y.type.sizes[-1])]
            if not self.more or self.written(at, x) is None or (vectors and not is_one(x.type.sizes[-1])):
                raise NotLinear
            t = broadcast_sizes((score.type.sizes, x.type.sizes), lambda a, b: None)
            found = self.d.new_operand("kept", "dst", x.type.dtype, t, ("kept", len(self.wished)))
            self.means[weight, x.ref] = found
            self.wished.append((at, x))
        return found

    def written(self, at: int, x: Value) -> tuple[str, list[Line]] | None:
        """A value's word in the primal program, where its line `at` stands, and the lines that it takes beside those
        which are there; None where it is not known there."""
        p, folded = self.d.p, set[str]()
        words = {ref: ref for ref in [o.ref for o in p.operands] + list(p.scalars)}
        for line in p.lines[:at]:
            if line.op in ("reduce", "scan") or any([a in folded for a in line.args]):
                folded.update(line.outs)
            else:
                words[self.d.values[line.outs[0]].ref] = line.outs[0]
        self.look()
        lines: list[Line] = []
        word = self.word(x.ref, f".{at}", words, lines)
        return None if word is None else (word, lines)

    def word(self, ref: str, mark: str, words: dict[str, str], lines: list[Line]) -> str | None:
        """Of a value of the derived program the word in the primal one. New lines are named with a mark."""
        if ref in words:
            return words[ref]
        line = self.lines.get(ref)
        if line is None:
            return ref if literal(ref) is not None else None
        args = [self.word(a, mark, words, lines) for a in line.args]
        if line.op in ("reduce", "scan") or None in args:
            return None
        words[ref] = ref + mark
        lines.append(Line((words[ref],), line.op, tuple([a for a in args if a is not None]), line.attrs))
        return words[ref]

    def extended(self) -> Program:
        """The primal program with the means that were wished for, as results after its own."""
        p = self.d.p
        after: dict[int, dict[str, Line]] = {}  # by the softmax that they follow, and by name
        returns = list(p.returns)
        for number, (at, x) in enumerate(self.wished):
            word, lines = self.written(at, x) or ("", [])
            fold = Line((f"%kept{number}", f"%lse{number}"), "reduce", (p.lines[at].args[0], word), FOLD)
            after.setdefault(at, {}).update({line.outs[0]: line for line in (*lines, fold)})
            returns.append(fold.outs[0])
        every = [x for at, line in enumerate(p.lines) for x in (line, *after.get(at, {}).values())]
        lines_of, names = numbered(every)
        return p.untyped(lines=lines_of, returns=tuple([names.get(r, r) for r in returns]))


FOLD = ("dst", "softmax")
_RULES: dict[str, Callable[..., list[Term]]] = {
    "add": KeptSums.total,
    "sub": KeptSums.difference,
    "neg": KeptSums.negative,
    "mul": KeptSums.product,
    "div": KeptSums.quotient,
    "where": KeptSums.branches,
    "to": KeptSums.same,
    "spread": KeptSums.same,
    "sum": KeptSums.inner,
    "squeeze": lambda self, attrs, a: self.reshaped("squeeze", attrs, a),
    "unsqueeze": lambda self, attrs, a: self.reshaped("unsqueeze", attrs, a),
}
