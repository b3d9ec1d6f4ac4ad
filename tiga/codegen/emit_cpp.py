"""C++ source of a pass over a listed relation: rows in parallel, the edges of a row in chunks, folds in small arrays.

Each row's numbers come from one thread, edge after edge: results are the same bit for bit, whatever the number of
threads. Sums over all rows are kept a group of rows, and groups do not depend on threads either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tiga.codegen.lines_cpp import CPP, NARROW, Array, Lines, Scope
from tiga.codegen.rows import Refused, read_args
from tiga.program import Line
from tiga.types import DTYPES, compute_dtype

NAME = "KERNEL"
HEAD = f'extern "C" void {NAME}(void* const* tensors, const int64_t* ints, const double* numbers, int64_t threads) {{'
PARALLEL = "#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)"
LOWEST = {"f32": "-3.4028234663852886e38f", "f64": "-1.7976931348623157e308"}
MOST_BYTES = 1 << 21
"""Of a thread's stack, for the arrays of a kernel."""
BLOCK = 16
"""Features that are summed over a chunk's edges at a time, in registers."""


@dataclass(frozen=True)
class Source:
    """text, with NAME for the function's; arguments: (name, what, ...) of each tensor and number, in order."""

    text: str
    arguments: tuple[tuple, ...]


@dataclass(frozen=True)
class State:
    """What a row holds of a fold while its edges are visited."""

    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class Sum:
    """total[...] += the sum of an edge value; in its features' order."""

    ref: str
    total: str
    dtype: str
    axes: tuple
    note: str


class Frame(Lines):
    """Roots, rows before and after the edges, results: what both kinds of loops have in common."""

    LANES = 16  # numbers that are added beside each other

    # Loops.

    def nest(self, openers: list[str], rows: list[str]) -> list[str]:
        """Rows inside loops; an opener of several lines begins with a pragma."""
        text = [line for opener in openers for line in opener.split("\n")] or [""]
        text[-1] = (text[-1] + " {").lstrip()
        return [*text, *indented(rows), "}"]

    def over(self, axes: tuple, simd: bool = True, skip: int = 0) -> tuple[list[str], tuple[str, ...]]:
        """Loops over features, but for the last `skip`, and their numbers."""
        openers, idx = [], []
        for k, a in enumerate(axes):
            if a == self.peel:
                idx.append("h")
            elif self.size(a) == 1 or k >= len(axes) - skip:
                idx.append("0")
            else:
                name = self.name("k")
                openers.append(f"for (int {name} = 0; {name} < {self.size(a)}; {name}++)")
                idx.append(name)
        if openers and simd:
            openers[-1] = "#pragma omp simd\n" + openers[-1]
        return openers, tuple(idx)

    def section(self, lead: int) -> list[str]:
        return self.finish if self.finishing else (self.once, self.row, self.edge)[lead]

    # Roots.

    def root(self, line: Line) -> None:
        out = line.outs[0]
        lead, dtype, peel = self.lead(out), self.dtype(out), self.peel
        if lead == 0:  # before all loops
            self.peel = None
        array = self.new_array("t", dtype, lead, self.axes(out))
        note = f"// {line.op} {' '.join([*line.args, *line.attrs])}"
        rows = {
            "amax": self.root_extreme,
            "amin": self.root_extreme,
            "linear": self.root_linear,
            "cat": self.root_cat,
        }.get(line.op, self.root_map)(line, array)
        self.section(lead).extend([note, *rows])
        self.arrays[out], self.peel = array, peel

    def root_map(self, line: Line, array: Array) -> list[str]:
        openers, idx = self.loops(array.lead, self.axes(line.outs[0]))
        scope = Scope()
        x = self.inline(line, idx, scope)
        return self.nest(openers, [*scope.rows, f"{self.at(array, self.flat(idx, array.steps))} = {x};"])

    def reduced(self, line: Line) -> tuple[str, tuple, int]:
        """The argument of a reduction over a feature, its axes, the position of that feature."""
        ref = line.args[0]
        axes = self.axes(ref)
        return ref, axes, len(axes) + int(line.attrs[0])

    def roots(self, late: bool) -> None:
        """All roots in order; sums over one feature that run over the same numbers share a loop."""
        left = [x for x in self.work.lines if x.outs[0] in self.rooted and (x.outs[0] in self.a.late) == late]
        while left:
            line, done = left.pop(0), {x.outs[0] for x in left}
            alike = [x for x in left if self.is_like(x, line) and not (self.reads(x) & {line.outs[0], *done})]
            left = [x for x in left if x not in alike]
            if line.op == "sum":
                self.root_sums([line, *alike])
            else:
                self.root(line)

    def is_like(self, a: Line, b: Line) -> bool:
        if not a.op == b.op == "sum" or a.attrs != b.attrs:
            return False
        same = lambda ref: (self.lead(ref), self.axes(ref))
        return same(a.outs[0]) == same(b.outs[0]) and self.axes(a.args[0]) == self.axes(b.args[0])

    def reads(self, line: Line) -> set[str]:
        """The roots that a line reads."""
        found: set[str] = set()
        for ref in read_args(line):
            inner = self.a.defined.get(ref)
            found |= {ref} if ref in self.rooted or inner is None else self.reads(inner)
        return found

    def root_sums(self, lines: list[Line]) -> None:
        axes = self.axes(lines[0].outs[0])
        arrays = [self.new_array("t", self.dtype(x.outs[0]), self.lead(x.outs[0]), axes) for x in lines]
        ref, inside, k = self.reduced(lines[0])
        openers, idx = self.each(arrays[0].lead, axes)
        size = self.size(inside[k])
        rows = [f"{CPP[a.dtype]} s{n}[{self.LANES}] = {{}};" for n, a in enumerate(arrays)]
        whole = size // self.LANES * self.LANES
        for width, start, stop in ((self.LANES, 0, whole), (size - whole, whole, size)):
            if start < stop:
                scope = Scope()
                at = idx[:k] + ("(i + d)",) + idx[k:]
                xs = [self.cast(x.args[0], at, a.dtype, scope) for x, a in zip(lines, arrays)]
                adds = [f"s{n}[d] += {x};" for n, x in enumerate(xs)]
                each = f"#pragma omp simd\nfor (int d = 0; d < {width}; d++)"
                rows += self.nest([f"for (int i = {start}; i < {stop}; i += {width})", each], [*scope.rows, *adds])
        for n, a in enumerate(arrays):
            many = min(self.LANES, 1 << (size - 1).bit_length()) if size else 1
            sum_of = f"tiga::total<{CPP[a.dtype]}, {many}>(s{n})"
            rows.append(f"{self.at(a, self.flat(idx, a.steps))} = {sum_of};")
        notes = [f"// {x.op} {' '.join([*x.args, *x.attrs])}" for x in lines]
        self.section(arrays[0].lead).extend([*notes, *self.nest(openers, rows)])
        self.arrays.update(zip([x.outs[0] for x in lines], arrays))

    def root_extreme(self, line: Line, array: Array) -> list[str]:
        ref, axes, k = self.reduced(line)
        openers, idx = self.each(array.lead, self.axes(line.outs[0]))
        scope = Scope()
        what = "maximum" if line.op == "amax" else "minimum"
        x = self.cast(ref, idx[:k] + ("d",) + idx[k:], array.dtype, scope)
        inner = self.nest(
            [f"for (int d = 0; d < {self.size(axes[k])}; d++)"],
            [*scope.rows, f"s = d == 0 ? {x} : tiga::{what}(s, {x});"],
        )
        kept = f"{self.at(array, self.flat(idx, array.steps))} = s;"
        return self.nest(openers, [f"{CPP[array.dtype]} s = 0;", *inner, kept])

    def root_linear(self, line: Line, array: Array) -> list[str]:
        """y[o] = sum over i of x[i] weight[o][i], the weight read transposed."""
        x, weight = line.args
        axes, into, out = self.axes(line.outs[0]), self.shape(x)[-1], self.shape(line.outs[0])[-1]
        openers, idx = self.each(array.lead, axes, 1)
        matrix, scope, kind = self.argument("w", "transposed", weight), Scope(), CPP[array.dtype]
        self.dtype(weight)
        value = self.cast(x, self.broadcast(x, idx)[:-1] + ("i" if into > 1 else "0",), array.dtype, scope)
        rows = [f"{kind} s[{out}] = {{}};"]
        product = f"s[o] += x * {kind}({matrix}[i * {out} + o]);"
        inner = [*scope.rows, f"const {kind} x = {value};"]
        inner += self.nest([f"#pragma omp simd\nfor (int o = 0; o < {out}; o++)"], [product])
        rows += self.nest([f"for (int i = 0; i < {into}; i++)"], inner)
        kept = self.at(array, self.flat((*idx[:-1], "o"), array.steps))
        rows += self.nest([f"for (int o = 0; o < {out}; o++)"], [f"{kept} = s[o];"])
        return self.nest(openers, rows)

    def root_cat(self, line: Line, array: Array) -> list[str]:
        axes, rows, start = self.axes(line.outs[0]), [], 0
        k = len(axes) + int(line.attrs[0])
        for ref in line.args:
            own = self.shape(ref)[int(line.attrs[0])]
            openers, idx = self.loops(array.lead, (*axes[:k], own, *axes[k + 1 :]))
            scope = Scope()
            x = self.cast(ref, self.broadcast(ref, idx), array.dtype, scope)
            moved = (*idx[:k], f"({start} + {idx[k]})", *idx[k + 1 :])
            rows += self.nest(openers, [*scope.rows, f"{self.at(array, self.flat(moved, array.steps))} = {x};"])
            start += own
        return rows

    def each(self, lead: int, axes: tuple, skip: int = 0) -> tuple[list[str], tuple[str, ...]]:
        """Loops without vectors over all but the last `skip` features: each body has vectors of its own."""
        raise NotImplementedError

    # Folds that all frames write alike.

    def begin(self, f: Line, k: int) -> State:
        """A fold's state in arrays, and how it begins."""
        name = f.attrs[1]
        dtype = compute_dtype(self.dtype(f.outs[0]))
        made = lambda stem, kind, ref, start: self.state(f"{stem}{k}_", kind, self.axes(ref), start)
        if name == "softmax":
            wide = self.dtype(f.outs[1])
            return State(
                (
                    made("peak", wide, f.outs[1], LOWEST[wide]),
                    made("total", wide, f.outs[1], "0"),
                    made("sum", wide, f.outs[0], "0"),
                )
            )
        if name in ("max", "min"):
            return State((made("best", dtype, f.outs[0], "0"), made("at", "i64", f.outs[0], "-1")))
        return State((made("sum", dtype, f.outs[0], "0"),))

    def state(self, stem: str, dtype: str, axes: tuple, start: str) -> Array:
        array = self.new_array(stem, dtype, 1, axes)
        self.row += self.filled(array, start)
        return array

    def filled(self, array: Array, start: str) -> list[str]:
        raise NotImplementedError

    def ended(self, f: Line, state: State) -> list[str]:
        """What a state comes to; the fold's results are read from it."""
        names = state.arrays
        rows: list[str] = []
        if f.attrs[1] == "softmax":
            peak, total, mean = names
            openers, idx = self.loops(1, self.axes(f.outs[0]))
            of = lambda a: self.at(a, self.flat(self.broadcast(f.outs[1], idx), a.steps))
            value = self.at(mean, self.flat(idx, mean.steps))
            rows += self.nest(openers, [f"{value} = {of(total)} == 0 ? 0 : {value} / {of(total)};"])
            openers, idx = self.loops(1, self.axes(f.outs[1]))
            top, all_of = (self.at(a, self.flat(idx, a.steps)) for a in (peak, total))
            none = f"-std::numeric_limits<{CPP[peak.dtype]}>::infinity()"
            rows += self.nest(openers, [f"{top} = {all_of} == 0 ? {none} : {top} + std::log({all_of});"])
            names = (mean, peak)
        elif f.attrs[1] in ("max", "min"):
            openers, idx = self.loops(1, self.axes(f.outs[0]))
            best, at = (self.at(a, self.flat(idx, a.steps)) for a in names)
            rows += self.nest(openers, [f"{best} = {at} < 0 ? 0 : {best};"])
        self.arrays.update(zip(f.outs, names))
        return rows

    def result(self, ref: str) -> list[str]:
        """Store an owner's value in its contiguous row."""
        openers, idx = self.loops(1, self.axes(ref))
        scope, shape = Scope(), self.shape(ref)
        out, flat = self.argument("out", "out", ref), self.flat(idx, self.steps(shape))
        x = self.cast(ref, idx, self.dtype(ref), scope)
        return self.nest(
            openers, [*scope.rows, f"{out}[({self.owner_row()}) * {math.prod(shape)} + {flat}] = {x};   // {ref}"]
        )

    def body(self) -> list[State]:
        """All sections, in the order of the program."""
        work = self.work
        self.roots(False)
        states = [self.begin(f, k) for k, f in enumerate(work.folds)]
        sums: list[Sum] = []
        for k, f in enumerate((*work.folds, *work.shared)):
            note, dtype = f"// {f.op} {' '.join([*f.attrs, *f.args])}", compute_dtype(self.dtype(f.outs[0]))
            if f.op == "reduce" and f.attrs[1] == "sum":
                total = self.total_of(states[k].arrays[0]) if k < len(states) else self.parts(f)
                sums.append(Sum(f.args[0], total, dtype, self.axes(f.outs[0]), note))
            else:
                self.edge += [note, *(self.fold(k, f, states[k]) if k < len(states) else self.total(f))]
        self.edge += self.sums(sums)
        for ref in work.stored:
            self.edge += self.store_edge(ref)
        self.finishing = True
        for f, state in zip(work.folds, states):
            self.finish += self.ended(f, state)
        self.roots(True)
        for ref in work.results:
            self.finish += self.result(ref)
        if self.bytes > MOST_BYTES:
            raise Refused(f"{self.bytes >> 10} KiB of edge values at once, more than {MOST_BYTES >> 10}")
        return states

    # Sums over all edges, values of edges.

    def total(self, f: Line) -> list[str]:
        base = self.parts(f)
        return self.outer(f, base) if f.attrs[1] == "dot" else self.scattered(f, base)

    def outer(self, f: Line, base: str) -> list[str]:
        """total[o][i] += g[o] x[i]."""
        g, x = f.args
        mid = max([self.axes(r)[:-1] for r in (g, x)], key=len)
        mid = tuple([max([1, *[s[k - len(mid) - 1] for s in (self.shape(g), self.shape(x)) if len(s) > len(mid) - k]])
                     for k in range(len(mid))])  # fmt: skip
        openers, idx = self.each(2, mid)
        into, out, dtype = self.shape(x)[-1], self.shape(g)[-1], compute_dtype(self.dtype(f.outs[0]))
        outside, inside = Scope(), Scope()
        a = self.cast(g, self.broadcast(g, (*idx, "o")), dtype, outside)
        b = self.cast(x, self.broadcast(x, (*idx, "i")), dtype, inside)
        add = f"{base}[o * {into} + i] += a * {b};"
        inner = self.nest([f"#pragma omp simd\nfor (int i = 0; i < {into}; i++)"], [*inside.rows, add])
        rows = [*self.guard(), *outside.rows, f"const {CPP[dtype]} a = {a};", *inner]
        return self.nest([*openers, f"for (int o = 0; o < {out}; o++)"], rows)

    def scattered(self, f: Line, base: str) -> list[str]:
        """total[number] += g, where there is such a row."""
        g, i, _ = f.args
        shape = self.shape(f.outs[0])
        axes = (*self.spread(self.axes(g)[: len(self.axes(g)) - len(shape) + 1], self.axes(i)), *self.axes(f.outs[0])[1:])
        openers, idx = self.each(2, axes)
        lead = idx[: len(axes) - len(shape) + 1]
        scope, dtype = Scope(), compute_dtype(self.dtype(f.outs[0]))
        x = self.cast(g, self.broadcast(g, idx), dtype, scope)
        at = self.read(i, self.broadcast(i, lead), scope)
        flat = self.flat(idx[len(lead) :], self.steps(shape[1:]))
        add = f"if ({at} >= 0 && {at} < {shape[0]}) {base}[i64({at}) * {math.prod(shape[1:])} + {flat}] += {x};"
        return self.nest(openers, [*self.guard(), *scope.rows, add])

    def spread(self, a: tuple, b: tuple) -> tuple:
        """Axes that two values have together."""
        rank = max(len(a), len(b))
        both = [(1,) * (rank - len(x)) + x for x in (a, b)]
        return tuple([y if x == 1 else x for x, y in zip(*both)])

    def store_edge(self, ref: str) -> list[str]:
        openers, idx = self.each(2, self.axes(ref))
        scope, shape = Scope(), self.shape(ref)
        out, flat = self.argument("out", "out", ref), self.flat(idx, self.steps(shape))
        x = self.cast(ref, self.broadcast(ref, idx), self.dtype(ref), scope)
        return self.nest(openers, [*self.guard(), *scope.rows, f"{out}[{self.edge_number()} * {math.prod(shape)} + {flat}] = {x};"])

    # What the two kinds of loops say.

    def guard(self) -> list[str]:
        """What leaves out pairs that are no edges."""
        return []

    def total_of(self, array: Array) -> str:
        """Where a row's sum begins."""
        return array.name

    def fold(self, k: int, f: Line, state: State) -> list[str]:
        raise NotImplementedError

    def sums(self, sums: list[Sum]) -> list[str]:
        raise NotImplementedError

    def weighted(self, ref: str, dtype: str) -> tuple[str, str] | None:
        """(weight, field) of a product of a number an edge, held in an array, and a vector of the other end."""
        line = self.a.defined.get(ref)
        if line is None or line.op != "mul" or ref in self.arrays or ref in self.work.inputs:
            return None
        for w, x in (line.args, line.args[::-1]):
            if self.is_vector(x, dtype) and self.arrays.get(w) is not None and self.lies(w, dtype):
                return w, x
        return None

    def is_vector(self, x: str, dtype: str) -> bool:
        far = x in self.work.inputs and self.lead(x) == 2 and self.p.types[x].place != "edge"
        return far and self.dtype(x) == dtype and bool(self.shape(x)) and self.shape(x)[-1] > 1

    def lies(self, w: str, dtype: str) -> bool:
        """Whether a weight of all edges has no last feature."""
        array, shape = self.arrays[w], self.shape(w)
        return array.lead == 2 and array.dtype == dtype and (not shape or shape[-1] == 1)

    def parts(self, f: Line) -> str:
        """Where a group keeps its sum over all edges."""
        ref = f.outs[0]
        base, width = self.argument("parts", "parts", ref), math.prod(self.shape(ref))
        return f"({base} + group * {width})"

    def bound(self) -> list[str]:
        """The arguments by name."""
        rows, at = [], {"tensor": 0, "int": 0, "number": 0}
        for name, what, *rest in self.arguments:
            if what == "scalar":
                rows.append(f"const double {name} = numbers[{at['number']}];   // {rest[0]}")
                at["number"] += 1
            elif what in ("row", "int"):
                rows.append(f"const i64 {name} = ints[{at['int']}];")
                at["int"] += 1
            else:
                kind = self.kind(what, rest[0])
                rows.append(f"{kind}* {name} = ({kind}*)tensors[{at['tensor']}];   // {what} {rest[0]}")
                at["tensor"] += 1
        return rows

    def kind(self, what: str, ref: str) -> str:
        if what == "list":
            return "const " + CPP[self.forms[ref]]
        dtype = CPP[compute_dtype(self.dtype(ref))]
        return dtype if what in ("out", "parts") else "const " + dtype


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
        self.bytes += count * 8
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

    def loops(self, lead: int, axes: tuple, narrow: bool = False) -> tuple[list[str], tuple[str, ...]]:
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
            return self.softmax(k, f, state)
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
        rows, alike = [], {}
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

    def softmax(self, k: int, f: Line, state: State) -> list[str]:
        score, value = f.args
        peak, total, mean = state.arrays
        kind, lse = CPP[peak.dtype], self.axes(f.outs[1])
        weight, keep = self.new_array("p", peak.dtype, 2, lse), self.new_array("keep", peak.dtype, 1, lse)
        openers, idx = self.loops(2, lse)
        scope = Scope()
        x = self.cast(score, self.broadcast(score, idx), peak.dtype, scope)
        rows = self.nest(openers, [*scope.rows, f"{self.at(weight, self.flat(idx, weight.steps))} = {x};"])
        openers, idx = self.over(lse, False)
        infinity = f"-std::numeric_limits<{kind}>::infinity()"
        p, flat = self.at(weight, self.flat(idx, weight.steps)), self.flat(idx, peak.steps)
        all_p = p.replace("e]", "b + e]") if weight.width <= NARROW else p.replace("[e *", "[(b + e) *")
        rows += self.nest(
            openers,
            [
                f"{kind} top = {peak.name}[{flat}], all = 0;",
                f"for (i64 e = edges; e < padded; e++) {p} = {infinity};",
                f"#pragma omp simd reduction(max : top)\nfor (i64 e = 0; e < padded; e++) top = {p} > top ? {p} : top;",
                f"{keep.name}[{flat}] = tiga::exp({peak.name}[{flat}] - top);",
                f"{self.PADDED} {p} = tiga::exp({p} - top);",
                f"{kind} some[16] = {{}};",
                f"for (i64 b = 0; b < padded; b += 16) for (int e = 0; e < 16; e++) some[e] += {all_p};",
                f"all = tiga::total<{kind}, 16>(some);",
                f"{total.name}[{flat}] = {total.name}[{flat}] * {keep.name}[{flat}] + all;",
                f"{peak.name}[{flat}] = top;",
            ],
        )
        axes = self.axes(f.outs[0])
        openers, idx = self.loops(1, axes)
        kept = self.at(keep, self.flat(self.broadcast(f.outs[1], idx), keep.steps))
        rows += self.nest(openers, [f"{self.at(mean, self.flat(idx, mean.steps))} *= {kept};"])
        if self.is_vector(value, peak.dtype) and self.shape(value)[-1] == self.shape(f.outs[0])[-1] and (
            weight.width <= NARROW and self.shape(f.outs[1])[-1] == 1
        ):
            return rows + self.rows_added(weight, f.outs[1], value, mean.name, axes)
        openers, idx = self.over(axes)
        scope = Scope()
        x = self.cast(value, self.broadcast(value, idx), mean.dtype, scope)
        p = self.at(weight, self.flat(self.broadcast(f.outs[1], idx), weight.steps))
        add = f"{self.at(mean, self.flat(idx, mean.steps))} += {p} * {x};"
        return rows + self.nest([self.EDGES, *openers], [*scope.rows, add])

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
        relation = ["rowptr", "col", *(["number_of"] if "number_of" in self.forms and self.numbers else [])]
        self.arguments += [(n, "list", n) for n in relation]
        self.arguments += [(n, "int", n) for n in ("num_rows", "num_far", "num_edges", "groups")]
        number = "number_of[at]" if "number_of" in relation else "at"
        keep = ["far[edges] = j;", *([f"number[edges] = {number};"] if self.numbers else [])]
        fetched = [r for r in self.work.inputs if self.lead(r) == 2 and self.p.types[r].place != "edge"]
        ahead = [
            f"tiga::fetch<{min(1024, math.prod(self.shape(r)) * DTYPES[self.dtype(r)].itemsize)}>"
            f"({self.pointer(r)} + next * {self.stride(r)});"
            for r in fetched
        ]
        good = "j >= 0 && j < num_far" + (f" && {number} >= 0 && {number} < num_edges" if self.numbers else "")
        chunk = [
            "i64 edges = 0;",
            "for (; at < last && edges < CHUNK; at++) {",
            *indented(
                [
                    "const i64 j = col[at];",
                    f"if ({good}) {{ {' '.join(keep)} edges++; }}",
                    "const i64 next = col[at + CHUNK < num_edges ? at + CHUNK : at];",
                    f"if (next >= 0 && next < num_far) {{ {' '.join(ahead)} }}",
                ]
            ),
            "}",
            "if (!edges) continue;",
            "const i64 padded = (edges + 15) / 16 * 16;",
            f"for (i64 e = edges; e < padded; e++) {{ far[e] = far[0];{' number[e] = number[0];' * self.numbers} }}",
            *self.edge,
        ]
        rows = [
            *self.row_heads.values(),
            *self.row,
            "i64 at = rowptr[row] < 0 ? 0 : rowptr[row];",
            "const i64 last = rowptr[row + 1] < num_edges ? rowptr[row + 1] : num_edges;",
            *self.nest(["while (at < last)"], chunk),
            *self.finish,
        ]
        group = [
            "i64 far[CHUNK];",
            *(["i64 number[CHUNK];"] if self.numbers else []),
            *self.declared,
            *self.nest(
                ["for (i64 row = num_rows * group / groups; row < num_rows * (group + 1) / groups; row++)"], rows
            ),
        ]
        whole = [
            f"constexpr int CHUNK = {self.chunk};",
            *self.bound(),
            *self.once,
            *self.nest([f"{PARALLEL}\nfor (i64 group = 0; group < groups; group++)"], group),
        ]
        return Source("\n".join([HEAD, *indented(whole), "}"]), tuple(self.arguments))


def indented(rows: list[str]) -> list[str]:
    return ["  " + row if row[:1] != "#" else row for row in rows]
