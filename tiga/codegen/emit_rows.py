"""Kernel source of a pass over a listed relation: the loop over a work list is here, the lines are the program's.

One source runs every schedule: which rows an item holds, and how many items a program takes, are arguments. A row cut
into pieces leaves its states in slots; `merge`, a second source, combines them in the order of the slots and ends as
the first does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiga.codegen.columns_rows import Columns
from tiga.codegen.lines_rows import TRITON, Value
from tiga.codegen.rows import Analysis, Pass, Refused
from tiga.program import Line, literal_type
from tiga.types import Type, compute_dtype

HEAD = "import triton\nimport triton.language as tl\n"
PIECES = {
    "device_items": "NOWHERE edge_at edge_numbers edges_from offset within work_items".split(),
    "device_rows": """
added extreme_step from_bfloat16 largest load_features moved only outer plus power_of_e product reshaped rows_only
smallest softmax_end softmax_merge softmax_step softmax_weights store_features weights_merge
""".split(),
    "device_functions": """
acos asin atan atan2 cosh expm1 hash_uniform log1p pow remainder round_even sign sinh tan tanh trunc
""".split(),
}
LOWEST = {"f32": "-3.4028234663852886e38", "f64": "-1.7976931348623157e308"}


@dataclass(frozen=True)
class State:
    """One component of a fold's state: a name, the axes of its features, the dtype it is kept in, how it begins: a
    number, or nothing where the program says so.
    """

    name: str
    axes: tuple
    dtype: str
    begin: str


@dataclass(frozen=True)
class Source:
    """text; arguments: (name, what, ...) of each, in order; axes: whose sizes and blocks are constants; factors: the
    dimensions of matrix products among them; apart: matrices that are read column by column; gathered:
    fields that are read at every edge.
    """

    text: str
    arguments: tuple[tuple, ...]
    axes: tuple
    states: tuple[tuple[State, ...], ...]
    factors: tuple
    apart: frozenset = frozenset()
    gathered: frozenset = frozenset()


class Emitter(Columns):
    def __init__(self, analysis: Analysis, work: Pass) -> None:
        super().__init__(analysis, work)
        self.states = tuple([self.state(k, f) for k, f in enumerate(work.folds)])

    def state(self, k: int, f: Line) -> tuple[State, ...]:
        """What a row holds of a fold while its edges are visited."""
        name, outs = f.attrs[1], [(self.a.axes(o), compute_dtype(self.p.types[o].dtype)) for o in f.outs]
        if f.op == "scan":
            return tuple([State(f"state{k}_{i}", axes, dtype, "") for i, (axes, dtype) in enumerate(outs)])
        axes, dtype = outs[0]
        if name == "softmax":
            peak_axes, wide = outs[1]
            return (
                State(f"peak{k}", peak_axes, wide, LOWEST[wide]),
                State(f"total{k}", peak_axes, wide, "0"),
                State(f"sum{k}", axes, wide, "0"),
                *[State(f"sum{k}_{i}", axes, wide, "0") for i, axes in enumerate(self.weighed(f), 1)],
            )
        if name in ("max", "min"):
            if dtype in ("bool", "u8"):
                raise Refused(f"{name} of {dtype}")
            return (State(f"best{k}", axes, dtype, "0"), State(f"at{k}", axes, "i64", "NOWHERE"))
        if name == "sum":
            axes = self.joined(self.split(f, f.args[0])[0], len(axes))
        return (State(f"sum{k}", axes, dtype, "0"),)

    # The two sources.

    def source(self) -> Source:
        for line in self.work.lines:
            if line.outs[0] not in self.a.late and line.outs[0] not in self.a.new and not self.lazy(line):
                self.value(line.outs[0])
        for k, f in enumerate(self.work.folds):
            (self.scan if f.op == "scan" else self.fold)(k, f)
        totals = [self.total(k, f) for k, f in enumerate(self.work.shared)]
        for ref in self.work.stored:
            self.store_edge(ref)
        self.finish("whole")
        rows = ["for group in range(tl.program_id(0), tl.cdiv(num_items, R), tl.num_programs(0)):"]
        rows += indented(self.items())
        begin = self.begin()  # which may read a field, before the row's first edge
        rows += indented([*self.body.row, *begin])
        if self.body.edge:
            rows += indented(["for at in range(0, most, BLOCK_E):", *indented(self.edges())])
        rows += indented(self.finished())
        text = [
            *self.body.once,
            *[x for begin, _ in totals for x in begin],
            *rows,
            *[x for _, end in totals for x in end],
        ]
        work = ("items", "num_items", "num_own", "num_edges", "num_slots", *self.relation())
        return self.made(text, work, "R: tl.constexpr, BLOCK_E: tl.constexpr")

    def merge(self) -> Source | None:
        """The source that ends the rows that were cut into pieces; None where nothing is left of a row."""
        if not self.work.folds or any(f.op == "scan" for f in self.work.folds):
            return None
        self.finish("here")
        rows = [
            "merge = merges + tl.program_id(0).to(tl.int64) * 3",
            "row = tl.load(merge).to(tl.int64) + tl.zeros([1], tl.int64)",
            "first = tl.load(merge + 1).to(tl.int64)",
            "last = tl.load(merge + 2).to(tl.int64)",
            "here = (row >= 0) & (row < num_own) & (first >= 0) & (last <= num_slots)",
            *self.body.row,
            *self.begin(),
            "for at in range(first, tl.where(tl.max(here.to(tl.int32), 0) > 0, last, first), BLOCK_E):",
            *indented(self.merged()),
            *self.body.finish,
        ]
        # lists have room for rows that are cut: most of it is for none
        none = ["if tl.load(merges + tl.program_id(0).to(tl.int64) * 3) < 0:", "    return"]
        return self.made(
            [*none, *self.body.once, *rows],
            ("merges", "num_own", "num_slots"),
            "R: tl.constexpr, BLOCK_E: tl.constexpr",
        )

    def relation(self) -> tuple[str, ...]:
        numbers = ("number_of", "NUMBERED: tl.constexpr") if self.numbers else ()
        return ("col", "num_far", "WIDE: tl.constexpr", *numbers, *(("CUT: tl.constexpr",) if self.work.folds else ()))

    def made(self, rows: list[str], work: tuple[str, ...], constants: str) -> Source:
        slots = [f"{s.name}_slots" for state in self.states for s in state]
        typed = [f"{a[0]}: tl.float64" if a[1] == "scalar" else a[0] for a in self.arguments]
        sizes = [f"D{k}: tl.constexpr, B{k}: tl.constexpr" for k in range(len(self.axes))]
        quiet = [n for n in work if n[:4] == "num_"] + [a[0] for a in self.arguments if a[1] == "rows"]
        signature = ", ".join([*typed, *slots, *work, *sizes, constants, "PRECISION: tl.constexpr, EACH: tl.constexpr"])
        # how lists lie in memory makes no other kernel: their entries are read one by one
        lists = [n for n in work if n in ("items", "merges", "col", "number_of")]
        once = f"@triton.jit(do_not_specialize={quiet!r}, do_not_specialize_on_alignment={lists!r})"
        text = [once, f"def propagate({signature}):", *indented(rows)]
        arguments = (
            *self.arguments,
            *[(f"{s.name}_slots", "slots", s) for state in self.states for s in state],
            *[(n.split(":")[0], "work") for n in work],
        )
        body = "\n".join(text)
        head = HEAD
        for module, names in PIECES.items():
            used = [n for n in names if re.search(rf"(?<![\w.]){n}\b", body)]
            head += f"from tiga.codegen.{module} import {', '.join(used)}\n" if used else ""
        return Source(
            f"{head}\n\n{body}\n",
            arguments,
            tuple(self.axes),
            self.states,
            tuple(self.factors),
            frozenset([w for w, _ in self.vectors]),
            frozenset(self.gathered),
        )

    def items(self) -> list[str]:
        known = "group, num_items, num_own, num_edges, num_slots, WIDE, R"
        rows = [f"row, first, entries, slot, most, top = work_items(items, {known})", "here = row >= 0"]
        return [*rows, "whole = here & (slot < 0)"] if self.work.folds else rows

    def edges(self) -> list[str]:
        rows = ["entry, far, live = edges_from(col, first, entries, at, num_far, WIDE, BLOCK_E)"]
        if self.numbers:
            rows += [
                "number, live = edge_numbers(number_of, first, entries, at, entry, live, num_edges, NUMBERED)",
                "number_at = offset(number, WIDE)",
            ]
        return rows + self.body.edge

    def begin(self) -> list[str]:
        sums = [f"{n} = tl.zeros({self.shape(1, axes)}, {TRITON[dtype]})" for n, axes, dtype in self.row_sums]
        for f, states in zip(self.work.folds, self.states):
            for i, s in enumerate(states):
                text = f"tl.full({self.shape(1, s.axes)}, {s.begin}, {TRITON[s.dtype]})"
                if f.op == "scan":
                    text = f"{self.full(self.value(f.args[i]), 1, s.axes)}.to({TRITON[s.dtype]})"
                sums.append(f"{s.name} = {text}")
        return sums

    # Folds.

    def fold(self, k: int, f: Line) -> None:
        put, name, states = self.body.edge.append, f.attrs[1], self.states[k]
        names = ", ".join([s.name for s in states])
        if name == "count":
            put(f"sum{k} += tl.sum(live.to(tl.int64), 1)")
        elif name == "sum":
            x = self.product_of(self.split(f, f.args[0])[0], states[0].dtype, len(states[0].axes))
            self.summed[x] = f"sum{k}"
            put(f"sum{k} = plus(sum{k}, {x})   # reduce {' '.join([*f.attrs, *f.args])}")
        elif name == "softmax" and len(states) > 3:
            self.softmax_of_several(k, f, states)
        elif name == "softmax":
            score, rank = self.value(f.args[0]), len(states[2].axes)
            dtype = states[0].dtype
            put(f"score{k} = tl.where({self.live(rank)}, {self.at(score, 2, rank, dtype)}, float('-inf'))")
            value = self.masked(f.args[1], dtype, rank)
            put(f"{names} = softmax_step(score{k}, {value}, {names})   # reduce {' '.join([*f.attrs, *f.args])}")
        else:
            self.numbers = True
            rank, each = len(states[0].axes), self.value(f.args[0])
            number = self.at(Value("number", 2, (), "i64"), 2, rank)
            put(f"each{k} = {self.full(each, 2, states[0].axes)}.to({TRITON[states[0].dtype]})")
            put(f"{names} = extreme_step(each{k}, {number}, {self.live(rank)}, {names}, {name == 'max'})")

    def scan(self, k: int, f: Line) -> None:
        """A user's reducer: its function takes a row's edges one after another."""
        put, count = self.body.edge.append, int(f.attrs[2])
        function, states = self.p.functions[int(f.attrs[1])], self.states[k]
        known = [Type("edge", s.dtype, self.p.types[o].sizes) for s, o in zip(states, f.outs)]
        given = {"a" + str(i): Value(s.name, 1, s.axes, s.dtype) for i, s in enumerate(states)}
        each = []
        for i, ref in enumerate(f.args[count:], count):
            t = self.p.types.get(ref) or literal_type(ref)
            dtype = "f32" if t.weak and t.dtype == "f64" else compute_dtype(t.dtype)
            put(f"each{k}_{i} = {self.full(self.value(ref), 2, self.a.axes(ref))}.to({TRITON[dtype]})")
            each.append(f"    now{k}_{i} = edge_at(each{k}_{i}, turn)")
            known.append(Type("edge", dtype, t.sizes))
            given["a" + str(i)] = Value(f"now{k}_{i}", 1, self.a.axes(ref), dtype)
        put(f"for turn in tl.static_range(BLOCK_E):   # scan {' '.join([*f.attrs, *f.args])}")
        inner = self.inside(function, known)
        inner.values.update(given)
        new = [inner.value(r) for r in function.returns]
        self.body.edge += [*each, *indented(inner.body.row), "    on = edge_at(live.to(tl.int32), turn) > 0"]
        for s, v in zip(states, new):
            on = "on" + ("[:" + ", None" * len(s.axes) + "]" if s.axes else "")
            put(f"    next_{s.name} = tl.where({on}, {self.full(v, 1, s.axes)}.to({TRITON[s.dtype]}), {s.name})")
        for s in states:
            put(f"    {s.name} = next_{s.name}")

    def merged(self) -> list[str]:
        rows = ["slot = (at + tl.arange(0, BLOCK_E))[None, :]", "live = slot < last"]
        for k, (f, states) in enumerate(zip(self.work.folds, self.states)):
            names, name = ", ".join([s.name for s in states]), f.attrs[1]
            for s in states:
                other = s.begin if f.attrs[1] == "softmax" or s.begin == "NOWHERE" else "0"
                rows += self.slot_load(s, other)
            theirs = ", ".join([s.name + "_of" for s in states])
            if name == "softmax" and len(states) > 3:
                rows += self.merge_of_several(k, states)
            elif name == "softmax":
                rows.append(f"{names} = softmax_merge({theirs}, {names})")
            elif name in ("max", "min"):
                best, number = (s.name for s in states)
                some = f"({number}_of != NOWHERE)"
                rows.append(f"{names} = extreme_step({best}_of, {number}_of, {some}, {names}, {name == 'max'})")
            else:
                rows.append(f"{names} += tl.sum({theirs}, 1)")
        return rows

    def slot_load(self, s: State, other: str) -> list[str]:
        real = [a for a in s.axes if a != 1]
        n = s.name + "_of"
        if not real:
            text = f"tl.load({s.name}_slots + slot, mask=live, other={other})"
        else:
            at, inside, padded = self.features(s.axes)
            width = " * ".join([self.block(a) for a in real])
            text = f"load_features({s.name}_slots, slot * ({width}), live, {at}, {inside}, False)"
            if other != "0":
                text = f"tl.where(live[:, :, None], {text}, {other})"
        if len(s.axes) > 1 or (s.axes and not real):
            text = f"tl.reshape({text}, {self.shape(2, s.axes)})"
        return [f"{n} = {text}"]

    # After the fold.

    def finish(self, live: str) -> None:
        """What the states come to, the lines that follow, and what is stored of it."""
        self.finishing, self.ending = True, live
        put = self.body.finish.append
        for f, states in zip(self.work.folds, self.states):
            names = [s.name for s in states]
            if f.op == "reduce" and f.attrs[1] == "softmax":
                names = [names[2], names[0], *names[3:]]
                for n in names[:1:-1]:
                    put(f"{n}, _ = softmax_end({states[0].name}, {states[1].name}, {n})")
                put(f"{', '.join(names[:2])} = softmax_end({', '.join([s.name for s in states[:3]])})")
            elif f.op == "reduce" and f.attrs[1] in ("max", "min"):
                put(f"none{names[0]} = {names[1]} == NOWHERE")
                put(f"{names[0]} = tl.where(none{names[0]}, 0, {names[0]})")
                put(f"{names[1]} = tl.where(none{names[0]}, -1, {names[1]})")
            for i, (o, n) in enumerate(zip(f.outs, names)):
                axes, dtype = self.a.axes(o), compute_dtype(self.p.types[o].dtype)
                kept = next(s for s in states if s.name == n)
                value = Value(n if kept.dtype == dtype else f"{n}.to({TRITON[dtype]})", 1, axes, dtype)
                if f.op == "reduce" and (f.attrs[1] == "sum" or i > 1):
                    common = self.split(f, f.args[i])[1]
                    value = self.completed("whole" + n[3:], common, o, value._replace(axes=kept.axes), live)
                self.values[o] = value
        for line in self.work.lines:
            if line.outs[0] in self.a.late:
                self.line(line)
        for ref in self.work.results:
            if ref in self.a.late or live == "whole":
                self.store(ref, live)
        self.finishing = False

    def finished(self) -> list[str]:
        rows = []
        if any(self.states):
            rows += ["if CUT and top >= 0:", "    part = here & (slot >= 0)"]
            for s in [s for state in self.states for s in state]:
                text = self.stored(s.name + "_slots", f"slot * {self.width(s.axes)}", "part", s.axes, s.name, True)
                rows.append("    " + text)
        return rows + self.body.finish

    def store(self, ref: str, live: str) -> None:
        v, axes = self.value(ref), self.a.axes(ref)
        base = self.argument(self.name("out"), "out", ref)
        stride = self.argument(base + "_row", "out_row", ref)
        text = self.full(v, 1, axes)
        rows = live if ref in self.a.late else "here"
        self.body.finish.append(self.stored(base, f"row * {stride}", rows, axes, text, False) + f"   # {ref}")

    def stored(self, base: str, first: str, live: str, axes: tuple, text: str, whole: bool) -> str:
        real = [a for a in axes if a != 1]
        if len(axes) > 1 or (axes and not real):
            flat = "[" + ", ".join(["R", " * ".join([self.block(a) for a in real])] if real else ["R"]) + "]"
            text = f"tl.reshape({text}, {flat})"
        if not real:
            return f"tl.store({base} + {first}, {text}, mask={live})"
        n, inside, padded = self.features(axes)
        at = n if whole else self.in_lanes(self.body.finish, n + "_row", self.packed(axes), axes)
        return f"store_features({base}, {first}, {live}, {at}, {inside}, {text}, {'False' if whole else padded})"

    # Sums over all edges, values of edges.

    def total(self, k: int, f: Line) -> tuple[list[str], list[str]]:
        ref = f.outs[0]
        if f.attrs[1] == "columns":
            return self.columns(k, f)
        if f.attrs[1] != "sum":
            return self.matrix(k, f)
        axes, dtype = self.a.axes(ref), compute_dtype(self.p.types[ref].dtype)
        x = self.product_of(self.split(f, f.args[0])[0], dtype, len(axes))
        self.body.edge.append(f"all{k} = plus(all{k}, {x})   # reduce {' '.join([*f.attrs, *f.args])}")
        begin = f"all{k} = tl.zeros({self.shape(1, axes)}, {TRITON[dtype]})"
        base = self.argument(f"all{k}_parts", "parts", ref)
        total = f"tl.reshape(tl.sum(all{k}, 0), [{self.width(axes)[1:-1] or '1'}])" if axes else f"tl.sum(all{k}, 0)"
        program = "tl.program_id(0).to(tl.int64)"
        if not [a for a in axes if a != 1]:
            at = f"{base} + {program}" + (" + tl.arange(0, 1)" if axes else "")
            return [begin], [f"tl.store({at}, {total})"]
        inside = self.features(axes)[1]
        end = f"tl.store({base} + {program} * {self.width(axes, 'D')} + {self.packed(axes)}, {total}, mask={inside})"
        return [begin], [end]

    def matrix(self, k: int, f: Line) -> tuple[list[str], list[str]]:
        dtype = compute_dtype(self.p.types[f.outs[0]].dtype)
        out = self.a.axes(f.outs[0])
        base = self.argument(f"all{k}_parts", "parts", f.outs[0])
        begin, end = [], []
        for name, rows, cols, at in self.outer_sums(k, f):
            begin.append(f"{name} = tl.zeros([{self.block(rows)}, {self.block(cols)}], {TRITON[dtype]})")
            i, j = f"tl.arange(0, {self.block(rows)})[:, None]", f"tl.arange(0, {self.block(cols)})[None, :]"
            where = f"(tl.program_id(0).to(tl.int64) * {self.size(out[0])} + {i}) * {self.width(out[1:], 'D')}"
            inside = f"({i} < {self.size(rows)}) & ({j} < {self.size(cols)})"
            end.append(f"tl.store({base} + {where} + ({at}) + {j}, {name}, mask={inside})")
        return begin, end

    def store_edge(self, ref: str) -> None:
        self.numbers = True
        v, axes = self.value(ref), self.a.axes(ref)
        base = self.argument(self.name("out"), "out", ref)
        text = self.full(v, 2, axes)
        real = [a for a in axes if a != 1]
        if len(axes) > 1 or (axes and not real):
            flat = ["R", "BLOCK_E", *([" * ".join([self.block(a) for a in real])] if real else [])]
            text = f"tl.reshape({text}, [{', '.join(flat)}])"
        if not real:
            self.body.edge.append(f"tl.store({base} + number, {text}.to({base}.dtype.element_ty), mask=live)   # {ref}")
            return
        n, inside, padded = self.features(axes)
        at = self.in_lanes(self.body.edge, n + "_row", self.packed(axes), axes)
        where = f"{base}, number * {self.width(axes, 'D')}, live, {at}, {inside}"
        self.body.edge.append(f"store_features({where}, {text}, {padded})   # {ref}")


def indented(rows: list[str]) -> list[str]:
    return ["    " + row for row in rows]
