"""C++ source of a pass over an implicit relation: blocks of rows in parallel, tiles of BN others, vectors of pairs.

An edge value of a tile is [features][BM rows][BN others]. Fields of the other end come as they are needed: others
beside each other (`columns`) for what is computed pair by pair, features beside each other (`vectors`) for weighted
sums. A tile of edges alone has no mask. In others a mask says which pairs are edges: what are none enter no sum, and no
product.
"""

from __future__ import annotations

import math
from typing import Any

from tiga.codegen.emit_cpp import HEAD, PARALLEL, Frame, Source, State, Sum
from tiga.codegen.lines_cpp import CPP
from tiga.codegen.roots_cpp import indented
from tiga.codegen.rows import Refused
from tiga.codegen.words_cpp import Array, Scope
from tiga.program import Line
from tiga.types import DTYPES

OTHERS = 64
ROWS = (32, 8, 2)
"""Rows of a block: fewer where their arrays would not fit."""
AXIS_WISE = {"sum", "amax", "amin", "part", "slice", "unslice", "cat"}


class Tiled(Frame):
    def __init__(self, *arguments: Any, rows: int = ROWS[0]) -> None:
        super().__init__(*arguments)
        self.rows = rows
        self.tile: dict[str, str] = {}  # pointers into a tile of others
        self.peel = next((a for f in self.work.folds for a in self.axes(f.outs[0]) if self.peels(a)), None)

    # One axis around all loops: heads, one after another, need small arrays.

    def peels(self, axis: Any) -> bool:
        """Whether all that a row adds up has this axis, and nothing moves numbers along it."""
        if self.size(axis) < 2 or any(f.op == "scan" or f.attrs[1] in ("dot", "scatter") for f in self.work.shared):
            return False
        ends = [*[f.outs[0] for f in (*self.work.folds, *self.work.shared)], *self.work.stored]
        ends += [r for r in self.rooted if self.lead(r) == 2]
        if any(self.axes(r).count(axis) != 1 for r in ends):
            return False
        return not any(self.mixes(line, axis) for line in self.work.lines)

    def mixes(self, line: Line, axis: Any) -> bool:
        around = [self.axes(r) for r in (*line.args, *line.outs)]
        if any(axes.count(axis) > 1 for axes in around):
            return True
        if line.op in ("reshape", "reshape_like"):
            return any(axis in axes for axes in around)
        if line.op == "linear":
            return any(axis in axes[-1:] for axes in around)
        return line.op in AXIS_WISE and any(axis == axes[int(line.attrs[0])] for axes in around[:1] if axes)

    # Where things are.

    def declare(self, array: Array) -> None:
        count = (1, self.rows, self.rows * OTHERS)[array.lead] * array.width
        self.bytes += count * DTYPES[array.dtype].itemsize
        place = self.once if array.lead == 0 else self.declared
        place.append(f"alignas(64) {CPP[array.dtype]} {array.name}[{count}];")

    def at(self, array: Array, flat: str) -> str:
        if array.lead == 2:
            return f"{array.name}[(({flat}) * BM + m) * BN + n]"
        return f"{array.name}[m * {array.width} + {flat}]" if array.lead else f"{array.name}[{flat}]"

    def owner_row(self) -> str:
        return "(first + m)"

    def edge_number(self) -> str:
        self.numbers = True
        return "number[m * BN + n]"

    def owner_field(self, ref: str, flat: str) -> str:
        return f"{self.pointer(ref)}[(first + m) * {self.stride(ref)} + {flat}]"

    def edge_field(self, ref: str, flat: str) -> str:
        return f"{self.pointer(ref)}[{self.edge_number()} * {self.stride(ref)} + {flat}]"

    def far_field(self, ref: str, flat: str) -> str:
        return f"{self.others(ref, 'columns')}[({flat}) * BN + n]"

    def others(self, ref: str, what: str) -> str:
        """A field of the tile's others."""
        base = self.argument("x", what, ref)
        self.tile[base + "_tile"] = f"{base} + c * {math.prod(self.shape(ref))} * BN"
        return base + "_tile"

    # Loops.

    TILE = "for (int m = 0; m < rows; m++)"
    PAIRS = "#pragma omp simd\nfor (int n = 0; n < BN; n++)"

    def loops(self, lead: int, axes: tuple) -> tuple[list[str], tuple[str, ...]]:
        openers, idx = self.over(axes, lead < 2)
        if lead == 2:
            return [*openers, self.TILE, self.PAIRS], idx
        return [*([self.TILE] if lead else []), *openers], idx

    def each(self, lead: int, axes: tuple, skip: int = 0) -> tuple[list[str], tuple[str, ...]]:
        openers, idx = self.over(axes, False, skip)
        return [*[self.TILE, "for (int n = 0; n < BN; n++)"][:lead], *openers], idx

    def filled(self, array: Array, start: str) -> list[str]:
        return [f"for (int i = 0; i < BM * {array.width}; i++) {array.name}[i] = {start};"]

    def guard(self) -> list[str]:
        return ["if (!live[m * BN + n]) continue;"]

    def total_of(self, array: Array) -> str:
        return f"({array.name} + m * {array.width})"

    # Sums over features.

    def root_sums(self, lines: list[Line]) -> None:
        if self.lead(lines[0].outs[0]) < 2:
            return super().root_sums(lines)
        plain = [line for line in lines if not self.inner(line)]
        if not plain:
            return None
        axes = self.axes(plain[0].outs[0])
        arrays = [self.new_array("t", self.dtype(x.outs[0]), 2, axes) for x in plain]
        _, inside, k = self.reduced(plain[0])
        openers, idx = self.over(axes, False)
        scope = Scope()
        xs = [self.cast(x.args[0], idx[:k] + ("d",) + idx[k:], a.dtype, scope) for x, a in zip(plain, arrays)]
        rows = [f"{CPP[a.dtype]} s{n}[BN] = {{}};" for n, a in enumerate(arrays)]
        adds = [f"s{n}[n] += {x};" for n, x in enumerate(xs)]
        rows += self.nest([f"for (int d = 0; d < {self.size(inside[k])}; d++)", self.PAIRS], [*scope.rows, *adds])
        kept = [f"{self.at(a, self.flat(idx, a.steps))} = s{n}[n];" for n, a in enumerate(arrays)]
        rows += self.nest([self.PAIRS], kept)
        notes = [f"// {x.op} {' '.join([*x.args, *x.attrs])}" for x in plain]
        self.section(2).extend([*notes, *self.nest([*openers, self.TILE], rows)])
        self.arrays.update(zip([x.outs[0] for x in plain], arrays))
        return None

    def inner(self, line: Line) -> bool:
        """A sum of products of an owner's vector and another's, written as one; False where it is none."""
        out, ref = line.outs[0], line.args[0]
        product, dtype = self.a.defined.get(ref), self.dtype(out)
        if product is None or product.op != "mul" or ref in self.rooted or line.attrs != ("-1",):
            return False
        for a, b in (product.args, product.args[::-1]):
            if self.is_vector(b, dtype) and self.is_row(a, dtype) and self.shape(a)[-1] == self.shape(b)[-1]:
                break
        else:
            return False
        array, size = self.new_array("t", dtype, 2, self.axes(out)), self.shape(a)[-1]
        openers, idx = self.over(self.axes(out), False)
        full = (*idx, "0")
        if a in self.arrays:
            own = self.arrays[a]
            row = f"{own.name} + {self.flat(self.broadcast(a, full), own.steps)}, {own.width}"
        else:
            flat = self.flat(self.broadcast(a, full), self.steps(self.shape(a)))
            row = f"{self.pointer(a)} + first * {self.stride(a)} + {flat}, {self.stride(a)}"
        columns = (
            f"{self.others(b, 'columns')} + ({self.flat(self.broadcast(b, full), self.steps(self.shape(b)))}) * BN"
        )
        call = f"tiga::inner<{CPP[dtype]}, BN>({array.name} + ({self.flat(idx, array.steps)}) * BM * BN, "
        self.section(2).extend([f"// inner {a} {b}", *self.nest(openers, [f"{call}{row}, {columns}, {size}, rows);"])])
        self.arrays[out] = array
        return True

    def is_row(self, a: str, dtype: str) -> bool:
        """Whether an owner's value is a vector in memory."""
        there = a in self.arrays or a in self.work.inputs
        return there and self.lead(a) == 1 and self.dtype(a) == dtype and self.shape(a)[-1:] > (1,)

    # Folds.

    def fold(self, k: int, f: Line, state: State) -> list[str]:
        name = f.attrs[1] if f.op == "reduce" else "scan"
        if name == "count":
            add = f"{state.arrays[0].name}[m] += live[m * BN + n];"
            return self.nest([self.TILE, "for (int n = 0; n < BN; n++)"], [add])
        if name == "softmax":
            return self.softmax(f, state)
        if name in ("max", "min"):
            return self.extreme(f, state)
        raise Refused("a user's reducer")

    def sums(self, sums: list[Sum]) -> list[str]:
        rows: list[str] = []
        alike: dict[tuple, list[Sum]] = {}
        for s in sums:
            pair = self.weighted(s.ref, s.dtype)
            same = pair is not None and self.shape(pair[1])[-1:] == tuple([self.size(a) for a in s.axes[-1:]])
            if pair is not None and same and s.total.startswith("(sum"):
                rows += [s.note, *self.weighted_rows(self.arrays[pair[0]], pair[0], pair[1], s.total, s.axes)]
            else:
                alike.setdefault(s.axes, []).append(s)
        return rows + [row for group in alike.values() for row in self.added(group)]

    def weighted_rows(self, weight: Array, ref: str, x: str, total: str, axes: tuple) -> list[str]:
        """total[m] += the sum over others of weight times a vector of theirs."""
        openers, idx = self.over(axes, False, 1)
        kind, size = CPP[weight.dtype], self.size(axes[-1])
        name, width = total[1:-1].split(" + m * ")
        flat = self.flat(idx, self.kept_steps(axes))
        w = f"{weight.name} + ({self.flat(self.broadcast(ref, idx), weight.steps)}) * BM * BN"
        shape = (*self.shape(x)[:-1], 1)
        v = f"{self.others(x, 'vectors')} + ({self.flat(self.broadcast(x, idx), self.steps(shape))}) * BN * {size}"
        some = (
            f"tiga::weighted_some<{kind}, BN, {size}>({name} + m * {width} + {flat}, {w} + m * BN, {v}, live + m * BN);"
        )
        return self.nest(
            openers,
            [
                f"if (full) tiga::weighted<{kind}, BN, {size}>({name} + {flat}, {width}, {w}, {v}, rows);",
                f"else {self.TILE} {some}",
            ],
        )

    def kept_steps(self, axes: tuple) -> tuple[int, ...]:
        """Steps of a row's features in memory, without the axis around all loops."""
        return self.steps(tuple([1 if a == self.peel else self.size(a) for a in axes]))

    def added(self, sums: list[Sum]) -> list[str]:
        axes = sums[0].axes
        openers, idx = self.over(axes, False)
        scope = Scope()
        xs = [self.cast(s.ref, self.broadcast(s.ref, idx), s.dtype, scope) for s in sums]
        rows = [f"{CPP[s.dtype]} s{n} = 0;" for n, s in enumerate(sums)]
        names = ", ".join([f"s{n}" for n in range(len(sums))])
        simd = f"#pragma omp simd reduction(+ : {names})\nfor (int n = 0; n < BN; n++)"
        adds = [f"s{n} += live[m * BN + n] ? {x} : 0;" for n, x in enumerate(xs)]
        rows += self.nest([simd], [*scope.rows, *adds])
        full = self.steps(tuple([self.size(a) for a in axes]))
        own = self.kept_steps(axes)
        rows += [
            f"{s.total}[{self.flat(idx, own if s.total.startswith('(sum') else full)}] += s{n};"
            for n, s in enumerate(sums)
        ]
        return [*[s.note for s in sums], *self.nest([*openers, self.TILE], rows)]

    def softmax(self, f: Line, state: State) -> list[str]:
        score, value = f.args
        peak, total, mean = state.arrays
        kind, lse, axes = CPP[peak.dtype], self.axes(f.outs[1]), self.axes(f.outs[0])
        weight, keep = self.new_array("p", peak.dtype, 2, lse), self.new_array("keep", peak.dtype, 1, lse)
        openers, idx = self.loops(2, lse)
        scope = Scope()
        x = self.cast(score, self.broadcast(score, idx), peak.dtype, scope)
        p = self.at(weight, self.flat(idx, weight.steps))
        masked = f"{p} = live[m * BN + n] ? {x} : -std::numeric_limits<{kind}>::infinity();"
        rows = self.nest(openers, [*scope.rows, masked])
        openers, idx = self.over(lse, False)
        old, kept, all_of = (self.at(a, self.flat(idx, a.steps)) for a in (peak, keep, total))
        rows += self.nest(
            [*openers, self.TILE],
            [
                f"{kind}* p = {weight.name} + (({self.flat(idx, weight.steps)}) * BM + m) * BN;",
                f"{kind} top = {old}, some[16] = {{}};",
                "#pragma omp simd reduction(max : top)",
                "for (int n = 0; n < BN; n++) top = p[n] > top ? p[n] : top;",
                f"{self.PAIRS} p[n] = tiga::exp(p[n] - top);",
                "for (int b = 0; b < BN; b += 16) for (int n = 0; n < 16; n++) some[n] += p[b + n];",
                f"{kept} = tiga::exp({old} - top);",
                f"{all_of} = {all_of} * {kept} + tiga::total<{kind}, 16>(some);",
                f"{old} = top;",
            ],
        )
        openers, idx = self.loops(1, axes)
        scale = self.at(keep, self.flat(self.broadcast(f.outs[1], idx), keep.steps))
        rows += self.nest(openers, [f"{self.at(mean, self.flat(idx, mean.steps))} *= {scale};"])
        vector = self.is_vector(value, peak.dtype) and self.shape(value)[-1] == self.shape(f.outs[0])[-1]
        if vector and self.shape(f.outs[1])[-1] == 1:
            return rows + self.weighted_rows(weight, f.outs[1], value, self.total_of(mean), axes)
        openers, idx = self.over(axes, False)
        scope = Scope()
        x = self.cast(value, self.broadcast(value, idx), mean.dtype, scope)
        p = self.at(weight, self.flat(self.broadcast(f.outs[1], idx), weight.steps))
        simd = "#pragma omp simd reduction(+ : s)\nfor (int n = 0; n < BN; n++)"
        inner = self.nest([simd], [*scope.rows, f"s += live[m * BN + n] ? {p} * {x} : 0;"])
        kept = f"{self.at(mean, self.flat(idx, mean.steps))} += s;"
        return rows + self.nest([*openers, self.TILE], [f"{CPP[mean.dtype]} s = 0;", *inner, kept])

    def extreme(self, f: Line, state: State) -> list[str]:
        best, at = state.arrays
        openers, idx = self.over(self.axes(f.outs[0]), False)
        scope = Scope()
        x = self.cast(f.args[0], self.broadcast(f.args[0], idx), best.dtype, scope)
        largest = "true" if f.attrs[1] == "max" else "false"
        places = [self.at(a, self.flat(idx, a.steps)) for a in (best, at)]
        call = f"tiga::extreme<{CPP[best.dtype]}, {largest}>({x}, {self.edge_number()}, {', '.join(places)});"
        return self.nest([*openers, self.TILE, "for (int n = 0; n < BN; n++)"], [*self.guard(), *scope.rows, call])

    # The whole.

    def source(self) -> Source:
        self.body()
        turned, second = "low" in self.forms, "start1" in self.forms
        lists = ["start0", "stop0", *(["start1", "stop1"] if second else []), *(["offsets"] if self.numbers else [])]
        lists += ["low", "high", "inner_low", "inner_high"] if turned else []
        self.arguments += [(n, "list", n) for n in lists]
        self.arguments += [(n, "int", n) for n in ("num_rows", "num_far", "num_edges", "groups")]
        # of a pair, i is the destination of the relation as it is stored, j the source
        i, j = ("c * BN + n", "first + m") if turned else ("first + m", "c * BN + n")
        ways = [f"(j >= start{k}[i] && j < stop{k}[i])" for k in range(1 + second)]
        pair = [f"const i64 i = {i}, j = {j};"]
        mask = self.nest(
            [self.TILE, "for (int n = 0; n < BN; n++)"],
            [*pair, f"const bool in = {' || '.join(ways)};", "mask[m * BN + n] = in;", "some |= in;"],
        )
        numbers = ["i64 number[BM * BN];"] if self.numbers else []
        rank = f"{ways[0]} ? j - start0[i] : stop0[i] - start0[i] + j - start1[i]" if second else "j - start0[i]"
        numbers += (
            self.nest(
                [self.TILE, "for (int n = 0; n < BN; n++)"],
                [*pair, f"number[m * BN + n] = live[m * BN + n] ? offsets[i] + ({rank}) : 0;"],
            )
            if self.numbers
            else []
        )
        tile = [
            *(TURNED if turned else STRAIGHT),
            "const unsigned char* live = full ? ones : mask;",
            *self.nest(["if (!full)"], ["bool some = false;", *mask, "if (!some) continue;"]),
            *numbers,
            *[f"const auto* {name} = {text};" for name, text in self.tile.items()],
            *self.edge,
        ]
        limits = [] if turned else (SECOND if second else FIRST)
        chunks = "0, end = (num_far + BN - 1) / BN" if turned else "begin / BN, end = (stop + BN - 1) / BN"
        rows = [*self.row, *self.nest([f"for (i64 c = {chunks}; c < end; c++)"], tile), *self.finish]
        if self.peel is not None:
            rows = self.nest([f"for (int h = 0; h < {self.size(self.peel)}; h++)"], rows)
        block = [
            "const i64 first = block * BM;",
            "const int rows = int(num_rows - first < BM ? num_rows - first : BM);",
            *limits,
            *rows,
        ]
        blocks = "for (i64 block = blocks * group / groups; block < blocks * (group + 1) / groups; block++)"
        group = ["alignas(64) unsigned char mask[BM * BN];", *self.declared, *self.nest([blocks], block)]
        whole = [
            f"constexpr int BM = {self.rows}, BN = {OTHERS};",
            *self.bound(),
            "alignas(64) unsigned char ones[BM * BN];",
            "std::memset(ones, 1, sizeof ones);",
            "const i64 blocks = (num_rows + BM - 1) / BM;",
            *self.once,
            *self.nest([f"{PARALLEL}\nfor (i64 group = 0; group < groups; group++)"], group),
        ]
        return Source("\n".join([HEAD, *indented(whole), "}"]), tuple(self.arguments))


# The sources that a block of rows has any edge with, and those that all of its rows have.
FIRST = [
    "i64 begin = num_far, stop = 0, inner_begin = 0, inner_stop = num_far;",
    "for (int m = 0; m < rows; m++) {",
    "  const i64 a = start0[first + m], b = stop0[first + m];",
    "  if (a < b) { begin = a < begin ? a : begin; stop = b > stop ? b : stop; }",
    "  inner_begin = a > inner_begin ? a : inner_begin; inner_stop = b < inner_stop ? b : inner_stop;",
    "}",
]
SECOND = [
    *FIRST,
    "for (int m = 0; m < rows; m++) {",
    "  const i64 a = start1[first + m], b = stop1[first + m];",
    "  if (a < b) { begin = a < begin ? a : begin; stop = b > stop ? b : stop; }",
    "}",
]
STRAIGHT = ["const bool full = c * BN >= inner_begin && (c + 1) * BN <= inner_stop;"]
TURNED = [
    "if (high[c] <= first || low[c] >= first + rows) continue;",
    "const bool full = inner_low[c] <= first && inner_high[c] >= first + rows;",
]
