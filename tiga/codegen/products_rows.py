"""Sums of products over a row's edges: what is the same for all edges of a row is multiplied after the sum.

Edges that do not exist add nothing, whatever an owner's field holds: of a product the narrow part is masked, and the
wide one only where it is not known to be a finite number there.
"""

from __future__ import annotations

from tiga.codegen.lines_rows import TRITON, Value, is_literal
from tiga.codegen.matrices_rows import Matrices
from tiga.program import Line, read_number
from tiga.types import compute_dtype


class Products(Matrices):
    def multiplied(self, ref: str, dtype: str) -> list[str]:
        """What an edge value is the product of."""
        line = self.a.defined.get(ref)
        t = self.p.types.get(ref)
        if line is None or line.op != "mul" or ref in self.work.inputs or t is None or t.place != "edge":
            return [ref]
        return [f for a in line.args for f in self.multiplied(a, dtype)] if compute_dtype(t.dtype) == dtype else [ref]

    def split(self, f: Line, ref: str) -> tuple[list[str], list[str]]:
        """The factors of what is folded that differ from edge to edge, and those that a row's edges share."""
        dtype = compute_dtype(self.p.types[f.outs[0]].dtype)
        parts = self.multiplied(ref, dtype)
        edge = [r for r in parts if r in self.p.types and self.p.types[r].place not in ("shared", self.work.owner)]
        if not edge or f.attrs == ("shared", "sum"):
            return parts, []
        return edge, [r for r in parts if r not in edge]

    def joined(self, refs: list[str], rank: int) -> tuple:
        """The axes of a product, `rank` of them."""
        axes: list = [1] * rank
        for r in refs:
            own = self.a.axes(r) if r in self.p.types else ()
            for back, a in enumerate(reversed(own), 1):
                axes[-back] = axes[-back] if a == 1 else a
        return tuple(axes)

    def product_of(self, refs: list[str], dtype: str, rank: int) -> str:
        """The product at [rows, edges, *features], 0 where there is no edge."""
        values = [self.value(r) for r in refs]
        width = [sum(a != 1 for a in v.axes) for v in values]
        wide = [v for v, n in zip(values, width) if n == max(width)]
        narrow = [v for v, n in zip(values, width) if n < max(width)]
        if len(wide) > 1 and not narrow and not all(v.quiet for v in wide):
            return self.only_edges(self.times(wide, dtype, rank), rank)
        text = self.times(wide, dtype, rank)
        zero = any(v.loaded for v in wide)
        if not narrow:
            return text if zero else self.only_edges(text, rank)
        if not all(v.quiet for v in wide):
            text = self.only_edges(text, rank)
        first = self.times(narrow, dtype, rank)
        if not (all(v.quiet for v in narrow) and (zero or any(v.loaded for v in narrow))):
            first = self.only_edges(first, rank)
        return f"{first} * {bracketed(text)}"

    def masked(self, ref: str, dtype: str, rank: int) -> str:
        """The value at [rows, edges, *features], 0 where there is no edge."""
        v = self.value(ref)
        if v.loaded:
            return self.at(v, 2, rank, dtype)
        line = self.a.defined.get(ref)
        if line is not None and line.op == "mul" and v.dtype == dtype:
            for a, b in (line.args, line.args[::-1]):
                x, y = self.value(a), self.value(b)
                if y.loaded and x.lead == 2 and sum(s != 1 for s in x.axes) < sum(s != 1 for s in y.axes):
                    # 0 * 0 where there is no edge: a mask of the narrow one does for both
                    narrow = f"tl.where({self.live(len(x.axes))}, {x.text}, 0)"
                    x = Value(narrow, 2, x.axes, x.dtype)
                    return f"{self.at(x, 2, rank, dtype)} * {self.at(y, 2, rank, dtype)}"
        return f"tl.where({self.live(rank)}, {self.at(v, 2, rank, dtype)}, 0)"

    def only_edges(self, text: str, rank: int) -> str:
        return f"tl.where({self.live(rank)}, {text}, 0)"

    def times(self, values: list[Value], dtype: str, rank: int) -> str:
        texts = [self.at(v, 2, rank, dtype) for v in values]
        if is_literal(texts[0]):
            texts[0] = f"tl.full((), {texts[0]}, {TRITON[dtype]})"
        return " * ".join(texts)

    def completed(self, name: str, common: list[str], out: str, state: Value, live: str) -> Value:
        """A sum whose edges were added, times what they share; a row without edges is 0, whatever that is."""
        if not common:
            return state
        dtype, axes = state.dtype, self.a.axes(out)
        values = [Value(state.text, 1, state.axes, dtype), *[self.value(r) for r in common]]
        text = " * ".join([self.at(v, 1, len(axes), dtype) for v in values])
        if live == "whole" and out not in self.a.new:
            some = "(entries > 0)" + ("[:" + ", None" * len(axes) + "]" if axes else "")
            text = f"tl.where({some}, {text}, 0)"
        self.put(1, f"{name} = {text}")
        return Value(name, 1, axes, dtype)

    def write_where(self, line: Line) -> Value:
        """x where it is positive, else a share of it, is the larger of both."""
        condition, x, share = line.args
        c, m = self.a.defined.get(condition), self.a.defined.get(share)
        if c is None or m is None or (c.op, m.op) != ("lt", "mul") or c.args[1] != x or x not in m.args:
            return self.pointwise(line)
        k = read_number(m.args[1] if m.args[0] == x else m.args[0])
        t = self.p.types[x]
        if not t.floating or read_number(c.args[0]) != 0 or k is None or not 0 < k <= 1:
            return self.pointwise(line)
        v, w = self.value(x), self.value(share)
        out = self.new(line, v.lead, v.axes, v.dtype, f"tl.maximum({v.text}, {w.text})")
        return out._replace(quiet=v.quiet)


def bracketed(text: str) -> str:
    return text if text.isidentifier() or text[:3] == "tl." else f"({text})"
