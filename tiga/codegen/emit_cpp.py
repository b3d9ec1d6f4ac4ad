"""C++ source of a pass over edges: folds, results and arguments, which both kinds of loops write alike.

Each row's numbers come from one thread, edge after edge: results are the same bit for bit, whatever the number of
threads. Sums over all rows are kept a group of rows, and groups do not depend on threads either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiga.codegen.lines_cpp import CPP
from tiga.codegen.roots_cpp import Roots
from tiga.codegen.rows import Refused
from tiga.codegen.words_cpp import Array, Scope
from tiga.program import Line
from tiga.types import compute_dtype

NAME = "KERNEL"
HEAD = f'extern "C" void {NAME}(void* const* tensors, const int64_t* ints, const double* numbers, int64_t threads) {{'
PARALLEL = "#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)"
LOWEST = {"f32": "-3.4028234663852886e38f", "f64": "-1.7976931348623157e308"}
MOST_BYTES = 1 << 21
"""Of a thread's stack, for the arrays of a kernel."""


class TooWide(Refused):
    """The arrays do not fit."""


@dataclass(frozen=True)
class Source:
    """text, with NAME for the function's; arguments: (name, what, ...) of each tensor and number, in order."""

    text: str
    arguments: tuple[tuple, ...]


@dataclass(frozen=True)
class State:
    """What a row holds of a fold while its edges are visited."""

    arrays: tuple[Array, ...]


def means_of(f: Line) -> tuple[str, ...]:
    """The results of a softmax of one value or several, but lse."""
    return (f.outs[0], *f.outs[2:])


@dataclass(frozen=True)
class Sum:
    """total[...] += the sum of an edge value; in its features' order."""

    ref: str
    total: str
    dtype: str
    axes: tuple
    note: str


class Frame(Roots):
    """Rows before and after the edges: `fold`, `sums` and `source` are the two kinds' own."""

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
                    *[made("sum", wide, o, "0") for o in means_of(f)],
                )
            )
        if name in ("max", "min"):
            return State((made("best", dtype, f.outs[0], "0"), made("at", "i64", f.outs[0], "-1")))
        return State((made("sum", dtype, f.outs[0], "0"),))

    def state(self, stem: str, dtype: str, axes: tuple, start: str) -> Array:
        array = self.new_array(stem, dtype, 1, axes)
        self.row += self.filled(array, start)
        return array

    def ended(self, f: Line, state: State) -> list[str]:
        """What a state comes to; the fold's results are read from it."""
        names = state.arrays
        rows: list[str] = []
        if f.attrs[1] == "softmax":
            peak, total, *means = names
            for o, mean in zip(means_of(f), means):
                openers, idx = self.loops(1, self.axes(o))
                of = self.at(total, self.flat(self.broadcast(f.outs[1], idx), total.steps))
                value = self.at(mean, self.flat(idx, mean.steps))
                rows += self.nest(openers, [f"{value} = {of} == 0 ? 0 : {value} / {of};"])
            openers, idx = self.loops(1, self.axes(f.outs[1]))
            top, all_of = (self.at(a, self.flat(idx, a.steps)) for a in (peak, total))
            none = f"-std::numeric_limits<{CPP[peak.dtype]}>::infinity()"
            rows += self.nest(openers, [f"{top} = {all_of} == 0 ? {none} : {top} + std::log({all_of});"])
            names = (means[0], peak, *means[1:])
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
            raise TooWide(f"{self.bytes >> 10} KiB of edge values at once, more than {MOST_BYTES >> 10}")
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
        axes = (
            *self.spread(self.axes(g)[: len(self.axes(g)) - len(shape) + 1], self.axes(i)),
            *self.axes(f.outs[0])[1:],
        )
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
        return self.nest(
            openers, [*self.guard(), *scope.rows, f"{out}[{self.edge_number()} * {math.prod(shape)} + {flat}] = {x};"]
        )

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
