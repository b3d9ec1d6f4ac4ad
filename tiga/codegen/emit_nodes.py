"""Kernel source of a work on rows of nodes: arguments, which rows and head a program has, node values, results.

Sources are text, compiled once a text; sizes and strides are arguments, so no size makes another kernel. Widths of
vectors are constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiga.codegen.tiles import Axes, Fold, Input, Work
from tiga.codegen.values import TRITON, Value, Values
from tiga.program import Line, Program
from tiga.types import compute_dtype

HEAD = """import triton
import triton.language as tl
from tiga.codegen.device import careful, features, features_only, find_block, further, gathered
from tiga.codegen.device import load_numbers, load_rows, part_of, place, poisoned, scattered, sign, store_rows
from tiga.codegen.device import tanh, uniform
from tiga.codegen.device_products import inner, load_rows_again, pieces, summed

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""
# span: what a kernel is told of its relation. band: one low <= j - i <= high; blocks: a band a block, tiles within
# blocks; rows: intervals of its owners; cols: intervals of the others, and the reach of its tiles.
SPANS = {
    "nodes": (),
    "band": ("low", "high"),
    "blocks": ("prefix", "own_bounds", "other_bounds", "block_low", "block_high", "num_blocks"),
    "rows1": ("start", "stop"),
    "rows2": ("start", "stop", "start2", "stop2"),
    "cols1": ("start", "stop", "reach_low", "reach_high"),
    "cols2": ("start", "stop", "start2", "stop2", "reach_low", "reach_high"),
}


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel: its name, and what a launch passes: a kind and what it is of."""

    name: str
    kind: str
    of: tuple = ()


@dataclass(frozen=True)
class Source:
    """text of one kernel; parameters: how to fill its arguments; vectors: the axes whose widths are constants."""

    text: str
    parameters: tuple[Parameter, ...]
    vectors: tuple


class RowEmitter:
    """stage: "whole" from edges to results; "part" of the sources each, states stored; "merge" of such states."""

    more_head = ""

    def __init__(self, axes: Axes, work: Work, span: str, stage: str = "whole") -> None:
        self.p, self.axes, self.work, self.span, self.stage = axes.p, axes, work, span, stage
        self.numbers = work.reads_numbers and stage != "merge"
        self.names = {(x.ref, x.mode): f"x{k}" for k, x in enumerate(work.inputs)}
        vectors = [x.vector for x in work.inputs if x.mode == "vector"] + [o.vector for o in work.outputs]
        vectors += [o.vector for o in work.tables.values()]
        vectors += [f.field.vector for f in work.folds if f.field is not None]
        self.vectors = list(dict.fromkeys([v for v in vectors if v is not None]))
        self.columns = list(dict.fromkeys([axis for axis, _ in work.loops.values()]))
        self.rows: list[str] = []
        self.vector_loads: dict[str, str] = {}
        self.parameters: list[Parameter] = []
        self.short = any(x.mode == "vector" and x.dtype in ("f16", "bf16") for x in work.inputs)
        self.wide_vectors = any(x.mode == "vector" and x.dtype == "f32" for x in work.inputs)
        self.nodes = Values(self.axes, lambda text: self.put(1, text), self.short)

    def put(self, depth: int, text: str) -> None:
        self.rows.append("    " * depth + text)

    def width(self, axis: Any) -> str:
        return f"D{self.vectors.index(axis)}"

    def source(self) -> Source:
        self.read_parameters()
        self.signature()
        self.where()
        self.own_values()
        self.folds()
        if self.stage != "part":
            self.finish()
        return Source(
            HEAD + self.more_head + "\n\n" + "\n".join(self.rows) + "\n", tuple(self.parameters), tuple(self.vectors)
        )

    def owners_are_rows(self) -> bool:
        """Whether the owners are the rows that edges are numbered by."""
        return (self.work.owner == "dst") != self.p.reverse

    # Arguments.

    def read_parameters(self) -> None:
        add, work = self.parameter, self.work
        for x in work.inputs:
            n = self.names[x.ref, x.mode]
            if x.ref in self.p.scalars:
                add(n, "scalar", x.ref)
                continue
            add(n, "tensor", x.ref)
            if x.side != "shared" or x.mode == "table":
                add(n + "_row", "row", x.ref)
            self.strides(n, x.heads, "stride", x.ref, x)
            if x.mode in ("vector", "column"):
                add(n + "_d", "stride", x.ref, x, x.vector)
            if x.mode == "table":
                add(n + "_count", "count", x.ref)
            if x.mode == "map":
                for word, axis in zip(("q", "k"), x.dims[-2:]):
                    add(f"{n}_{word}", "stride", x.ref, x, axis)
                    add(f"{n}_{word}s", "size", axis)
        if self.stage != "part":
            for k, o in enumerate(work.outputs):
                add(f"out{k}", "output", "node", k)
                add(f"out{k}_row", "output row", "node", k)
                self.strides(f"out{k}", o.dims, "output stride", "node", k)
        for k, o in work.tables.items():
            add(f"table{k}", "table", k)
            add(f"table{k}_row", "table row", k)
            self.strides(f"table{k}", o.dims[:-1], "table stride", k)
        if self.stage != "merge":
            for k, o in enumerate(work.edge_outputs):
                add(f"edge{k}", "output", "edge", k)
                add(f"edge{k}_row", "output row", "edge", k)
                self.strides(f"edge{k}", o.dims, "output stride", "edge", k)
        if self.stage != "whole":
            for k, f in enumerate(work.folds):
                for j, _ in enumerate(self.states(f)):
                    add(f"state{k}_{j}", "state", k, j)
        for k, a in enumerate(work.axes):
            add(f"H{k}", "size", a)
        for name in ("num_own", "num_other", "num_heads", "group", "splits"):
            add(name, name)
        if self.stage != "merge":
            for name in SPANS[self.span]:
                add(name, name)
            if self.numbers:
                add("first", "first")
        for k, a in enumerate(self.vectors):
            add(f"D{k}", "width", a)
            add(f"BLOCK_D{k}", "block", a)
        for k, a in enumerate(self.columns):
            add(f"C{k}", "size", a)
        for name in ("BLOCK_M", "BLOCK_N", "MASKED", "PRECISION"):
            add(name, name)

    def parameter(self, name: str, kind: str, *of: Any) -> None:
        self.parameters.append(Parameter(name, kind, of))

    def strides(self, name: str, dims: tuple, kind: str, *of: Any) -> None:
        """One argument for each head that a tensor has."""
        for k, a in enumerate(self.work.axes):
            if a in dims:
                self.parameters.append(Parameter(f"{name}_h{k}", kind, (*of, a)))

    def names_of_arguments(self) -> str:
        constants = ("width", "block", "BLOCK_M", "BLOCK_N", "MASKED", "PRECISION", "EARLY")
        return ", ".join([q.name + (": tl.constexpr" if q.kind in constants else "") for q in self.parameters])

    def signature(self) -> None:
        sizes = ("size", "count", "num_tiles", "num_own", "num_other", "num_heads", "num_blocks")
        plain = (*sizes, "group", "splits", "low", "high")
        quiet = [q.name for q in self.parameters if q.kind in plain]
        self.put(0, f"@triton.jit(do_not_specialize={quiet!r})")
        self.put(0, f"def propagate({self.names_of_arguments()}):")

    # Where this program is.

    def where(self) -> None:
        put = lambda text: self.put(1, text)
        packed = self.work.packed
        unit = f" * H{self.work.axes.index(packed)}" if packed is not None else ""
        splits = "1" if self.stage == "merge" else "splits"
        heads = f"num_heads, group, {splits}, {self.owners_are_rows()}"
        if self.span == "blocks" and self.stage != "merge":
            put(self.placed("tl.num_programs(0) // (num_heads * splits)", heads))
            put("tile, own_low, own_high, other_low, other_high, low, high = find_block(")
            put("    slot, prefix, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other,")
            put(f"    {not self.owners_are_rows()})")
            put(f"own_first = own_low{unit} + tile * BLOCK_M")
            put(f"own_end = own_high{unit}")
        else:
            put(self.placed(f"tl.cdiv(num_own{unit}, BLOCK_M)", heads))
            put("own_first = slot * BLOCK_M")
            put(f"own_end = num_own{unit}")
        put("item = own_first + tl.arange(0, BLOCK_M)" if unit else "own = own_first + tl.arange(0, BLOCK_M)")
        put(f"live_own = {'item' if unit else 'own'} < own_end")
        rest = "head"
        for k, a in enumerate(self.work.axes):
            if a == packed:
                put(f"h{k} = (item % H{k}).to(tl.int64)")
                put(f"own = item // H{k}")
            else:
                put(f"h{k} = ({rest} % H{k}).to(tl.int64)")
                rest = f"({rest} // H{k})"
        put(f"first_row = own_first{unit.replace('*', '//')}")
        put(f"last_row = (tl.minimum(own_first + BLOCK_M, own_end) - 1){unit.replace('*', '//')}")

    def placed(self, tiles: str, heads: str) -> str:
        return f"slot, head, split = place({tiles}, {heads})"

    def base(self, x: Input) -> tuple[str, str]:
        """The pointer of a field at this program's head, and what a packed head adds a row."""
        n = self.names[x.ref, x.mode]
        more = ""
        for k, a in enumerate(self.work.axes):
            if a in x.heads:
                if a == self.work.packed:
                    more = f" + h{k} * {n}_h{k}"
                else:
                    n_h = f"h{k} * {n}_h{k}"
                    self.put(1, f"{n} += {n_h}")
        return n, more

    def own_values(self) -> None:
        """Fields of the owners and of all, and the node values computed from them, as far as the edges need them."""
        self.waiting = list(self.work.inputs)
        before, needed = self.factor_needs() if self.stage == "merge" else (self.work.before, self.edge_needs())
        for x in self.work.inputs:
            if x.ref in self.p.scalars:
                n = self.names[x.ref, x.mode]
                self.put(1, f"{n} = tl.cast({n}, tl.float32)")
                self.nodes.known[x.ref] = Value(n, "", "f32")
                self.waiting.remove(x)
            elif x.mode in ("column", "table", "map") or x.side in ("far", "edge"):
                if self.stage != "merge":
                    self.base(x)
                self.waiting.remove(x)
        self.load_own(needed)
        for line in before:
            self.node_line(line)

    def factor_needs(self) -> tuple[list[Line], set[str]]:
        """Of the lines before the edges, and of the fields, what the factors of finished sums are made of."""
        needed = {r for f in self.work.folds for r in f.factors}
        lines: list[Line] = []
        for line in reversed(self.work.before):
            if any(o in needed for o in line.outs):
                lines.append(line)
                needed.update(line.args)
        return lines[::-1], needed | {self.axes.same(r) for r in needed}

    def edge_needs(self) -> set[str]:
        """The fields that lines before and on the edges read; all, where there are no edges."""
        work = self.work
        if self.span == "nodes":
            return {x.ref for x in work.inputs}
        inside = [r for _, refs in work.loops.values() for r in refs]
        refs = [*work.for_edge_outputs, *inside, *[r for f in work.folds for r in f.lines]]
        lines = [*work.before, *[self.p.definitions[r] for r in refs], *[f.line for f in work.folds]]
        read = [a for line in lines for a in line.args]
        # a product that only folds or sums read has no line of its own; what is a field is not computed
        given = {x.ref for x in work.inputs}
        behind = [self.p.definitions[r] for r in read if r in self.p.definitions and self.axes.same(r) not in given]
        read += [a for line in behind for a in line.args]
        read += [r for f in work.folds for r in (f.weight, *f.factors) if r is not None]
        return {self.axes.same(r) for r in read} | {r for pair in work.inners.values() for r in pair}

    def load_own(self, needed: set[str] | None) -> None:
        """Loads fields of the owners and of all that are `needed`; None: all that wait."""
        for x in [x for x in self.waiting if needed is None or x.ref in needed]:
            self.waiting.remove(x)
            wide = compute_dtype("f32" if self.p.types[x.ref].weak or x.dtype == "f64" else x.dtype)
            n, more = self.base(x)
            cast = f".to({TRITON[wide]})"
            name, shape, dtype = x.ref, "m" if more or x.side == "own" else "", wide
            if x.mode == "vector":
                d = self.width(x.vector)
                name, shape, dtype = self.wide(x.ref), "md" if x.side == "own" else "d", x.dtype
                rows = f"own, {more[3:] or '0'}, {n}_row, {n}_d, live_own" if x.side == "own" else f"{n}_d"
                text = f"{'load_rows' if x.side == 'own' else 'features'}({n}, {rows}, {d}, BLOCK_{d})"
                self.vector_loads[x.ref] = text
            elif x.side == "own":
                text = f"load_numbers({n}, own, {more[3:] or '0'}, {n}_row, live_own){cast}"
            else:
                text = f"tl.load({n}{more}){cast}"
            self.put(1, f"{n}_v = {text}")
            self.nodes.known[name] = Value(f"{n}_v", shape, dtype)

    def wide(self, ref: str) -> str:
        """The name of a vector: its own where its axis is also a head, as its number there has the value's name."""
        return ref + " vector" if self.axes.of(ref)[-1] in self.work.axes else ref

    def node_line(self, line: Line) -> None:
        """A line on nodes; a sum over a vector's features is one number a row."""
        if line.op != "sum" or self.nodes.value(line.args[0]).shape not in ("md", "d"):
            self.nodes.line(line)
            return
        axis = next(a for a in self.axes.of(line.args[0]) if a not in self.work.axes)
        d, wide = self.width(axis), self.nodes.value(line.args[0]).shape == "md"
        text = f"features_only({self.nodes.text(line.args[0], 'f32')}, {d}, BLOCK_{d})"
        self.nodes.set(line.outs[0], f"tl.sum({text}, {int(wide)})", "m" if wide else "", "f32", line)

    # Folds: of a kernel over edges.

    def folds(self) -> None:
        pass

    def states(self, f: Fold) -> tuple[str, ...]:
        return states(self.p, f)

    # Results.

    def finish(self) -> None:
        self.load_own(None)
        for line in self.work.after:
            self.node_line(line)
        for k, o in enumerate(self.work.outputs):
            heads = "".join([f" + h{j} * out{k}_h{j}" for j, a in enumerate(self.work.axes) if a in o.dims])
            rows = f"out{k} + own.to(tl.int64) * out{k}_row{heads}"
            t = self.p.types[o.ref]
            if o.vector is None:
                value = self.nodes.text(o.ref, "", "m")
                self.put(1, f"tl.store({rows}, {value}, mask=live_own)")
                continue
            d = self.width(o.vector)
            value = self.nodes.text(o.ref, "f32" if t.floating else "", "md")
            self.put(1, f"store_rows({rows}, {value}, live_own, {d}, BLOCK_{d})")


def states(p: Program, f: Fold) -> tuple[str, ...]:
    """dtypes of what stands for a fold over a part of the sources."""
    of_sum = ("f32" if p.types[f.line.outs[0]].floating else "i64",)
    return {"softmax": ("f32", "f32"), "max": ("f32", "i64"), "min": ("f32", "i64")}.get(f.reducer, of_sum)
