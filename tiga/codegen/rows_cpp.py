"""C++ source of a pass over a listed relation: rows in parallel, the edges of a row in chunks."""

from __future__ import annotations

import math
from typing import Any

from tiga.codegen.emit_cpp import HEAD, PARALLEL, Frame, Source, State, Sum, means_of
from tiga.codegen.lines_cpp import CPP, NARROW
from tiga.codegen.roots_cpp import indented
from tiga.codegen.rows import Refused
from tiga.codegen.words_cpp import Array, Scope
from tiga.program import Line
from tiga.types import DTYPES

BLOCK = 16
"""Features that are summed over a chunk's edges at a time, in registers."""
MOST_FETCHED = 1024
"""Bytes of a field's row that are called for ahead of time."""


class Listed(Frame):
    """Rows of a list, one after another; `chunk` edges of a row at a time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heads: dict[str, str] = {}
        self.row_heads: dict[str, str] = {}
        refs = [r for r in self.work.inputs if self.lead(r) == 2]
        self.chunk = max(16, min(64, 2048 // max([1, *[math.prod(self.shape(r)) for r in refs]]))) // 16 * 16

    # Where things are.

    def declare(self, array: Array) -> None:
        count = array.width * (self.chunk if array.lead == 2 else 1)
        self.bytes += count * DTYPES[array.dtype].itemsize
        place = self.once if array.lead == 0 else self.declared
        place.append(f"alignas(64) {CPP[array.dtype]} {array.name}[{count}];")

    def at(self, array: Array, flat: str) -> str:
        if array.lead < 2:
            return f"{array.name}[{flat}]"
        if array.width <= NARROW:
            return f"{array.name}[({flat}) * CHUNK + e]"
        return f"{array.name}[e * {array.width} + {flat}]"

    def owner_row(self) -> str:
        return "row"

    def edge_number(self) -> str:
        self.numbers = True
        return "number[e]"

    def beside(self, heads: dict[str, str], ref: str, row: str) -> str:
        """A pointer to a field's row, made where the row is known: compilers then see how features lie."""
        if ref not in heads:
            name, kind = self.name("y"), CPP[self.dtype(ref)]
            heads[ref] = f"const {kind}* {name} = {self.pointer(ref)} + {row} * {self.stride(ref)};"
        return heads[ref].split()[2]

    def owner_field(self, ref: str, flat: str) -> str:
        return f"{self.beside(self.row_heads, ref, 'row')}[{flat}]"

    def edge_field(self, ref: str, flat: str) -> str:
        return f"{self.beside(self.heads, ref, self.edge_number())}[{flat}]"

    def far_field(self, ref: str, flat: str) -> str:
        return f"{self.beside(self.heads, ref, 'far[e]')}[{flat}]"

    def nest(self, openers: list[str], rows: list[str]) -> list[str]:
        for k, opener in enumerate(openers):
            if (self.EDGES in opener or self.PADDED in opener) and self.heads:
                heads, self.heads = list(self.heads.values()), {}
                return super().nest(openers[: k + 1], [*heads, *super().nest(openers[k + 1 :], rows)])
        return super().nest(openers, rows)

    EDGES = "for (i64 e = 0; e < edges; e++)"
    PADDED = "for (i64 b = 0; b < edges; b += 16)\n#pragma omp simd\nfor (i64 e = b; e < b + 16; e++)"

    def loops(self, lead: int, axes: tuple) -> tuple[list[str], tuple[str, ...]]:
        if lead < 2:
            return self.over(axes)
        if math.prod([self.size(a) for a in axes]) <= NARROW:
            openers, idx = self.over(axes, False)
            return [*openers, self.PADDED], idx
        openers, idx = self.over(axes)
        return [self.EDGES, *openers], idx

    def each(self, lead: int, axes: tuple, skip: int = 0) -> tuple[list[str], tuple[str, ...]]:
        openers, idx = self.over(axes, False, skip)
        return [*([self.EDGES] if lead == 2 else []), *openers], idx

    def filled(self, array: Array, start: str) -> list[str]:
        return [f"for (int i = 0; i < {array.width}; i++) {array.name}[i] = {start};"]

    # Folds.

    def fold(self, k: int, f: Line, state: State) -> list[str]:
        name = f.attrs[1] if f.op == "reduce" else "scan"
        if name == "count":
            return [f"{state.arrays[0].name}[0] += edges;"]
        if name == "softmax":
            return self.softmax(f, state)
        if name in ("max", "min"):
            return self.extreme(f, state)
        raise Refused("a user's reducer")

    def lies(self, w: str, dtype: str) -> bool:
        return super().lies(w, dtype) and self.arrays[w].width <= NARROW

    def rows_added(self, weight: Array, ref: str, x: str, total: str, axes: tuple) -> list[str]:
        """total += weight * x, x a field of the other end, vector by vector."""
        openers, idx = self.over(axes, False, 1)
        w = f"{weight.name} + ({self.flat(self.broadcast(ref, idx), weight.steps)}) * CHUNK"
        field = f"{self.pointer(x)} + {self.flat(self.broadcast(x, idx), self.steps(self.shape(x)))}"
        kind, width, steps = CPP[weight.dtype], self.size(axes[-1]), self.steps(tuple([self.size(a) for a in axes]))
        call = f"tiga::add_rows<{kind}, {width}>({total} + {self.flat(idx, steps)}, {w}, {field}, "
        return self.nest(openers, [f"{call}{self.stride(x)}, far, edges);"])

    def sums(self, sums: list[Sum]) -> list[str]:
        """Each total += the sum over the chunk's edges; those of equal features share a loop, and numbers at edges."""
        rows: list[str] = []
        alike: dict[tuple, list[Sum]] = {}
        for s in sums:
            pair = self.weighted(s.ref, s.dtype)
            if pair is not None and self.shape(pair[1])[-1:] == tuple([self.size(a) for a in s.axes[-1:]]):
                rows += [s.note, *self.rows_added(self.arrays[pair[0]], pair[0], pair[1], s.total, s.axes)]
            else:
                alike.setdefault(s.axes, []).append(s)
        return rows + [row for group in alike.values() for row in self.added(group)]

    def added(self, sums: list[Sum]) -> list[str]:
        axes, steps = sums[0].axes, self.steps(tuple([self.size(a) for a in sums[0].axes]))
        openers, idx = self.over(axes, False, 1)
        last = self.size(axes[-1]) if axes else 1
        rows, whole = [s.note for s in sums], last // BLOCK * BLOCK
        blocks = ((BLOCK, 0, whole), (last - whole, whole, last)) if last > 1 else ((1, 0, 1),)
        inner = []
        for width, start, stop in blocks:
            if start == stop:
                continue
            scope, at = Scope(), (*idx[:-1], "(i + d)") if last > 1 else idx
            xs = [self.cast(s.ref, self.broadcast(s.ref, at), s.dtype, scope) for s in sums]
            if last > 1:
                each = f"#pragma omp simd\nfor (int d = 0; d < {width}; d++)"
                block = [f"{CPP[s.dtype]} s{n}[{width}] = {{}};" for n, s in enumerate(sums)]
                block += self.nest([self.EDGES, each], [*scope.rows, *[f"s{n}[d] += {x};" for n, x in enumerate(xs)]])
                kept = [f"{s.total}[{self.flat(at, steps)}] += s{n}[d];" for n, s in enumerate(sums)]
                block += self.nest([each], kept)
                inner += self.nest([f"for (int i = {start}; i < {stop}; i += {width})"], block)
            else:
                names = ", ".join([f"s{n}" for n in range(len(sums))])
                inner += [f"{CPP[s.dtype]} s{n} = 0;" for n, s in enumerate(sums)]
                simd = f"#pragma omp simd reduction(+ : {names})\n{self.EDGES}"
                inner += self.nest([simd], [*scope.rows, *[f"s{n} += {x};" for n, x in enumerate(xs)]])
                inner += [f"{s.total}[{self.flat(at, steps)}] += s{n};" for n, s in enumerate(sums)]
        return [*rows, *self.nest(openers, inner)]

    def softmax(self, f: Line, state: State) -> list[str]:
        peak, total, *means = state.arrays
        score, lse = f.args[0], self.axes(f.outs[1])
        weight, keep = self.new_array("p", peak.dtype, 2, lse), self.new_array("keep", peak.dtype, 1, lse)
        openers, idx = self.loops(2, lse)
        scope = Scope()
        x = self.cast(score, self.broadcast(score, idx), peak.dtype, scope)
        rows = self.nest(openers, [*scope.rows, f"{self.at(weight, self.flat(idx, weight.steps))} = {x};"])
        rows += (self.narrow_weights if weight.width <= NARROW else self.wide_weights)(weight, keep, peak, total)
        for value, out, mean in zip(f.args[1:], means_of(f), means):
            openers, idx = self.loops(1, self.axes(out))
            kept = self.at(keep, self.flat(self.broadcast(f.outs[1], idx), keep.steps))
            rows += self.nest(openers, [f"{self.at(mean, self.flat(idx, mean.steps))} *= {kept};"])
            rows += self.weighed(weight, f.outs[1], value, out, mean)
        return rows

    def weighed(self, weight: Array, lse: str, value: str, out: str, mean: Array) -> list[str]:
        """mean += weight * value, of the chunk's edges."""
        axes, rows = self.axes(out), []
        pair = self.weighted(value, weight.dtype)
        if pair is not None and weight.width <= NARROW and self.arrays[pair[0]].width == weight.width:
            more, value = self.arrays[pair[0]], pair[1]
            both = self.new_array("p", weight.dtype, 2, self.axes(lse))
            openers, idx = self.loops(2, self.axes(lse))
            a, b, c = (self.at(x, self.flat(idx, weight.steps)) for x in (both, weight, more))
            rows, weight = self.nest(openers, [f"{a} = {b} * {c};"]), both
        vector = self.is_vector(value, weight.dtype) and self.shape(value)[-1] == self.shape(out)[-1]
        if vector and weight.width <= NARROW and self.shape(lse)[-1] == 1:
            return rows + self.rows_added(weight, lse, value, mean.name, axes)
        openers, idx = self.over(axes)
        scope = Scope()
        x = self.cast(value, self.broadcast(value, idx), mean.dtype, scope)
        p = self.at(weight, self.flat(self.broadcast(lse, idx), weight.steps))
        add = f"{self.at(mean, self.flat(idx, mean.steps))} += {p} * {x};"
        return rows + self.nest([self.EDGES, *openers], [*scope.rows, add])

    def narrow_weights(self, weight: Array, keep: Array, peak: Array, total: Array) -> list[str]:
        """p = exp(score - top) of the chunk's edges beside each other, and what is kept of those before."""
        kind, p = CPP[peak.dtype], f"{weight.name}[k * CHUNK + e]"
        return self.nest(
            [f"for (int k = 0; k < {weight.width}; k++)"],
            [
                f"{kind} top = {peak.name}[k], some[16] = {{}};",
                f"for (i64 e = edges; e < padded; e++) {p} = -std::numeric_limits<{kind}>::infinity();",
                f"#pragma omp simd reduction(max : top)\nfor (i64 e = 0; e < padded; e++) top = {p} > top ? {p} : top;",
                f"{keep.name}[k] = tiga::exp({peak.name}[k] - top);",
                f"{self.PADDED} {p} = tiga::exp({p} - top);",
                "for (i64 b = 0; b < padded; b += 16)",
                f"  for (int e = 0; e < 16; e++) some[e] += {p.replace('+ e', '+ b + e')};",
                f"{total.name}[k] = {total.name}[k] * {keep.name}[k] + tiga::total<{kind}, 16>(some);",
                f"{peak.name}[k] = top;",
            ],
        )

    def wide_weights(self, weight: Array, keep: Array, peak: Array, total: Array) -> list[str]:
        """The same of features beside each other."""
        kind, p = CPP[peak.dtype], f"{weight.name}[e * {weight.width} + k]"
        features = f"#pragma omp simd\nfor (int k = 0; k < {weight.width}; k++)"
        return [
            *self.nest([features], [f"{keep.name}[k] = {peak.name}[k];"]),
            *self.nest([self.EDGES, features], [f"{peak.name}[k] = {p} > {peak.name}[k] ? {p} : {peak.name}[k];"]),
            *self.nest(
                [features],
                [
                    f"{keep.name}[k] = tiga::exp({keep.name}[k] - {peak.name}[k]);",
                    f"{total.name}[k] *= {keep.name}[k];",
                ],
            ),
            *self.nest(
                [self.EDGES, features],
                [f"const {kind} w = tiga::exp({p} - {peak.name}[k]);", f"{p} = w;", f"{total.name}[k] += w;"],
            ),
        ]

    def extreme(self, f: Line, state: State) -> list[str]:
        best, at = state.arrays
        openers, idx = self.over(self.axes(f.outs[0]), False)
        scope = Scope()
        x = self.cast(f.args[0], self.broadcast(f.args[0], idx), best.dtype, scope)
        flat, largest = self.flat(idx, best.steps), "true" if f.attrs[1] == "max" else "false"
        call = f"tiga::extreme<{CPP[best.dtype]}, {largest}>({x}, {self.edge_number()}, "
        return self.nest([self.EDGES, *openers], [*scope.rows, f"{call}{best.name}[{flat}], {at.name}[{flat}]);"])

    # The whole.

    def source(self) -> Source:
        self.body()
        listed = ["rowptr", "col", *(["number_of"] if "number_of" in self.forms and self.numbers else [])]
        self.arguments += [(n, "list", n) for n in listed]
        self.arguments += [(n, "int", n) for n in ("num_rows", "num_far", "num_edges", "groups")]
        edges = [
            "i64 at = rowptr[row] < 0 ? 0 : rowptr[row];",
            "const i64 last = rowptr[row + 1] < num_edges ? rowptr[row + 1] : num_edges;",
            *self.nest(["while (at < last)"], [*self.taken("number_of" in listed), *self.edge]),
        ]
        rows = [*self.row_heads.values(), *self.row, *(edges if self.edge else []), *self.finish]
        range_of = "i64 row = num_rows * group / groups; row < num_rows * (group + 1) / groups; row++"
        group = [
            "i64 far[CHUNK];",
            *(["i64 number[CHUNK];"] if self.numbers else []),
            *self.declared,
            *self.nest([f"for ({range_of})"], rows),
        ]
        whole = [
            f"constexpr int CHUNK = {self.chunk};",
            *self.bound(),
            *self.once,
            *self.nest([f"{PARALLEL}\nfor (i64 group = 0; group < groups; group++)"], group),
        ]
        return Source("\n".join([HEAD, *indented(whole), "}"]), tuple(self.arguments))

    def taken(self, numbered: bool) -> list[str]:
        """The next edges of a row, those that name a node; what later ones read is called for meanwhile."""
        number = "number_of[at]" if numbered else "at"
        keep = f"far[edges] = j; {f'number[edges] = {number}; ' if self.numbers else ''}edges++;"
        good = "j >= 0 && j < num_far" + (f" && {number} >= 0 && {number} < num_edges" if self.numbers else "")
        fetched = [r for r in self.work.inputs if self.lead(r) == 2 and self.p.types[r].place != "edge"]
        size = lambda r: min(MOST_FETCHED, math.prod(self.shape(r)) * DTYPES[self.dtype(r)].itemsize)
        ahead = [f"tiga::fetch<{size(r)}>({self.pointer(r)} + next * {self.stride(r)});" for r in fetched]
        each = [
            "const i64 j = col[at];",
            f"if ({good}) {{ {keep} }}",
            "const i64 next = col[at + CHUNK < num_edges ? at + CHUNK : at];",
            f"if (next >= 0 && next < num_far) {{ {' '.join(ahead)} }}",
        ]
        return [
            "i64 edges = 0;",
            *self.nest(["for (; at < last && edges < CHUNK; at++)"], each),
            "if (!edges) continue;",
            "const i64 padded = (edges + 15) / 16 * 16;",
            f"for (i64 e = edges; e < padded; e++) {{ far[e] = far[0];{' number[e] = number[0];' * self.numbers} }}",
        ]
