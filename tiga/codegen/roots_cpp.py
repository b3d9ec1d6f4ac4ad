"""Arrays of C++ kernels: a loop nest each, or one for several that run over the same numbers."""

from __future__ import annotations

from tiga.codegen.lines_cpp import CPP, Lines
from tiga.codegen.rows import read_args
from tiga.codegen.words_cpp import Array, Scope
from tiga.program import Line


class Roots(Lines):
    LANES = 16  # numbers that are added beside each other

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


def indented(rows: list[str]) -> list[str]:
    return ["  " + row if row[:1] != "#" else row for row in rows]
