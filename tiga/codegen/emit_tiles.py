"""Kernel source of a work on edges: the loops over tiles of the other end, and the edge function's lines.

A kernel visits tiles that hold pairs which are no edges, then tiles of edges only. Should a sum come out as not a
number, it starts again with care, so that nothing but an edge's own values can have made it so.
"""

from __future__ import annotations

from tiga.codegen.emit_pruned import PrunedEmitter
from tiga.codegen.tiles import Input, Output
from tiga.codegen.values import TRITON, Value, Values
from tiga.program import Line
from tiga.types import compute_dtype

CAREFUL = 16  # others a tile where a value that is no number is looked for


class Emitter(PrunedEmitter):
    def folds(self) -> None:
        if self.stage == "merge":
            self.merge()
        else:
            self.ranges()
            if self.lists():
                self.find_lists()
            self.take_apart()
            self.start(1)
            self.loop("masked")
            if self.span in ("band", "blocks", "rows1"):
                self.loop("full")
            self.again()
            self.bring_back()
        for k, f in enumerate(self.work.folds):
            self.result(k, f)

    def take_apart(self) -> None:
        """The owners' float32 vectors as pieces for products: once, before the loops."""
        self.pieces: dict[str, str] = {}
        for line in [self.p.definitions[ref] for ref in self.work.inners] if self.wide_vectors else ():
            own, _ = self.ends_of(line)
            if own not in self.pieces:
                self.pieces[own] = f"{self.names.get((own, 'vector')) or self.nodes.name(own)}_p"
                vector = self.nodes.text(self.wide(own), "f32")
                self.put(1, f"{self.pieces[own]} = pieces({vector}, PRECISION)")

    def bring_back(self) -> None:
        """Loads such vectors again that results read: the loops have no registers to keep them in."""
        after = [a for line in self.work.after for a in line.args] + [o.ref for o in self.work.outputs]
        after += [ref for f in self.work.folds for ref in f.factors]
        read = {self.axes.same(a) for a in after} if self.stage == "whole" else set()
        found = [ref for ref in self.pieces if ref in read and ref in self.vector_loads]
        if found and self.work.packed is None:
            self.put(1, "own = own_first + tl.minimum(num_heads, 0) + tl.arange(0, BLOCK_M)  # nor for addresses")
        for ref in found:
            load = self.vector_loads[ref].replace("load_rows(", "load_rows_again(")
            self.put(1, f"{self.names[ref, 'vector']}_v = {load}")

    def ends_of(self, line: Line) -> tuple[str, str]:
        """The owners' and the others' vector of an inner product."""
        src, dst = self.work.inners[line.outs[0]]
        return (dst, src) if self.work.owner == "dst" else (src, dst)

    # Which tiles.

    def ranges(self) -> None:
        """begin .. end: the others that are reached; inner_begin .. inner_end: those of tiles without a mask.

        Tiles that are numbered, as those that may be skipped, begin at multiples of their size. Others begin with the
        first edge: so packed sequences have the fewest tiles, and the fewest with a mask, wherever they lie.
        """
        put = lambda text: self.put(1, text)
        if self.span == "band":
            put("other_low = 0")
            put("other_high = num_other")
        if self.span in ("band", "blocks"):
            put("row_start = tl.maximum(own + low, other_low)")
            put("row_stop = tl.where(live_own, tl.minimum(own + high + 1, other_high), 0)")
            put("begin = tl.maximum(first_row + low, other_low)")
            put("end = tl.minimum(last_row + high + 1, other_high)")
            first, last = self.rows_in_one_order()
            put(f"inner_begin = tl.maximum({last} + low, other_low)")
            put(f"inner_end = tl.minimum({first} + high + 1, other_high)")
        elif self.span[:4] == "rows":
            for k in ("", "2")[: int(self.span[4])]:
                put(f"row_start{k} = tl.load(start{k} + own, mask=live_own, other=0)")
                put(f"row_stop{k} = tl.load(stop{k} + own, mask=live_own, other=0)")
                put(f"some{k} = row_start{k} < row_stop{k}")
                put(f"begin{k} = tl.min(tl.where(some{k}, row_start{k}, num_other), 0)")
                put(f"end{k} = tl.max(tl.where(some{k}, row_stop{k}, 0), 0)")
            if self.span == "rows1":
                put("inner_begin = tl.max(tl.where(live_own, row_start, 0), 0)")
                put("inner_end = tl.min(tl.where(live_own, row_stop, num_other), 0)")
        else:
            put("begin = tl.load(reach_low + own_first // BLOCK_M)")
            put("end = tl.load(reach_high + own_first // BLOCK_M)")
        numbered = self.work.tile is not None or self.work.within is not None
        for k in ("", "2")[: 1 + (self.span == "rows2")] if numbered else ():
            put(f"begin{k} = begin{k} // BLOCK_N * BLOCK_N")
        if self.span == "rows2":
            put("steps = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)")
            put("all_steps = steps + tl.cdiv(tl.maximum(end2 - begin2, 0), BLOCK_N)")
            put("next_begin = begin2")
            return
        put("begin, end = part_of(begin, end, split, splits, BLOCK_N)")
        if self.span[:4] == "cols":
            put("steps = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)")
            put("all_steps = steps")
            put("next_begin = begin")
            return
        if numbered:
            size = self.size_of_full()
            put(f"inner_begin = tl.maximum(tl.cdiv(inner_begin, {size}) * {size}, begin)")
            put(f"inner_end = tl.minimum(inner_end // {size} * {size}, end // {size} * {size})")
        else:
            put("inner_begin = begin + tl.cdiv(tl.maximum(inner_begin - begin, 0), BLOCK_N) * BLOCK_N")
            put("inner_end = begin + tl.maximum(tl.minimum(inner_end, end) - begin, 0) // BLOCK_N * BLOCK_N")
        put("inner_end = tl.maximum(inner_begin, inner_end)")
        put("some_inner = inner_begin < inner_end")
        put("steps = tl.cdiv(tl.maximum(tl.where(some_inner, inner_begin, end) - begin, 0), BLOCK_N)")
        put("all_steps = steps + tl.where(some_inner, tl.cdiv(tl.maximum(end - inner_end, 0), BLOCK_N), 0)")
        put("next_begin = inner_end")

    # The loops.

    def again(self) -> None:
        """Sums of products in which a weight of 0 may have met inf or nan: each visited again if it is not a number.

        One at a time, which takes fewer registers than the loops above.
        """
        for k, f in enumerate(self.work.folds):
            if f.field is not None:
                self.put(1, f"if poisoned(sum{k}):")
                self.start(2, k)
                self.loop_again(k) if f.pruned else self.loop("careful", k)

    def visit(self, how: str, only: int | None, depth: int, low: str = "inner_begin", high: str = "inner_end") -> None:
        """how: masked tiles, full tiles (low .. high), or all of them again, careful; only: of one fold."""
        if how == "full" and self.lists():
            self.full_loop(depth)
        elif how == "full":
            comment = "# tiles of edges only"
            self.put(depth, f"{f'for at in tl.range({low}, {high}, BLOCK_N):':<72}{comment}")
        elif how == "masked":
            comment = "# tiles that hold pairs which are no edges"
            self.put(depth, f"{'for step in tl.range(0, all_steps, num_stages=MASKED):':<72}{comment}")
            self.put(
                depth + 1,
                "at = tl.where(step < steps, begin + step * BLOCK_N, next_begin + (step - steps) * BLOCK_N)",
            )
        else:
            two = self.span == "rows2"
            count = f"tl.cdiv(tl.maximum(end - begin, 0), {CAREFUL})"
            more = f" + tl.cdiv(tl.maximum(end2 - begin2, 0), {CAREFUL})" if two else ""
            if two:
                self.put(depth, f"steps = {count}")
            self.put(depth, f"for step in tl.range(0, {count}{more}, num_stages=1):")
            at = f"begin + step * {CAREFUL}"
            if two:
                at = f"tl.where(step < steps, {at}, begin2 + (step - steps) * {CAREFUL})"
            self.put(depth + 1, f"at = {at}")
        self.depth = depth + 1
        self.how, self.block = how, str(CAREFUL) if how == "careful" else "BLOCK_N"
        self.tile(only)

    def tile(self, only: int | None) -> None:
        put = lambda text: self.put(self.depth, text)
        masked = self.how != "full"
        values = self.edges = Values(self.axes, put, self.short, self.nodes)
        self.enter()
        self.unread = {x.ref: x for x in self.work.inputs if self.is_last_minute(x)}
        put(f"other = at + tl.arange(0, {self.block})")
        for x in self.work.inputs:
            if x.side == "far" and x.mode in ("number", "vector") and not self.is_last_minute(x):
                self.bring(x)
        if masked:
            self.mask()
        if self.numbers:
            self.number()
        for x in self.work.inputs:
            if x.side == "edge" and x.mode == "number":
                n = self.names[x.ref, x.mode]
                put(f"{n}_v = tl.load({self.edge_row(x)}, mask={self.live()}, other=0)")
                wide = compute_dtype(x.dtype)
                values.known[x.ref] = Value(f"{n}_v" if wide == x.dtype else f"{n}_v.to({TRITON[wide]})", "mn", wide)
        done: set[str] = set()
        for k, f in enumerate(self.work.folds):
            for ref in f.lines if only in (None, k) else ():
                if ref not in done:
                    done.add(ref)
                    self.line(self.p.definitions[ref])
            if only in (None, k):
                self.fold(k, f)
        if self.how != "careful":
            for ref in self.work.for_edge_outputs:
                if ref not in done:
                    done.add(ref)
                    self.line(self.p.definitions[ref])
            for k, o in enumerate(self.work.edge_outputs):
                self.store_edge(k, o)

    def store_edge(self, k: int, o: Output) -> None:
        more = ""
        for j, a in enumerate(self.work.axes):
            if a in o.dims:
                more += f" + (h{j} * edge{k}_h{j})" + ("[:, None]" if a == self.work.packed else "")
        dtype = "f32" if self.p.types[o.ref].floating else ""
        live = f"{self.live()} & (other < num_other)[None, :]" if self.how == "full" else "live"
        self.put(self.depth, f"tl.store(edge{k} + number * edge{k}_row{more}, {self.pair(o.ref, dtype)}, mask={live})")

    def is_last_minute(self, x: Input) -> bool:
        """Whether a vector is loaded where a product first reads it: fewer wait in registers to be taken apart."""
        return self.wide_vectors and self.work.tile is None and x.side == "far" and x.mode == "vector"

    def arrive(self, ref: str) -> None:
        x = self.unread.pop(ref, None)
        if x is not None:
            self.load_far(x)

    def load_far(self, x: Input) -> None:
        n, masked = self.names[x.ref, x.mode], self.how != "full"
        if x.mode == "vector":
            d = self.width(x.vector)
            text = (
                f"load_rows({n}, other, 0, {n}_row, {n}_d, {'other < num_other' if masked else 'None'}, {d}, BLOCK_{d})"
            )
            self.put(self.depth, f"{n}_v = {text}  # [others, {d}]")
            return
        wide = compute_dtype(x.dtype)
        cast = f".to({TRITON[wide]})" if wide != x.dtype else ""
        live = "other < num_other" if masked else "None"
        self.put(self.depth, f"{n}_v = load_numbers({n}, other, 0, {n}_row, {live}){cast}")
        self.edges.known[x.ref] = Value(f"{n}_v", "n", wide)

    def mask(self) -> None:
        put = lambda text: self.put(self.depth, text)
        if self.span == "rows2" and self.work.tile:
            self.mask_of_both()
        elif self.span == "rows2":
            put("span_start = tl.where(step < steps, row_start, row_start2)")
            put("span_stop = tl.where(step < steps, row_stop, row_stop2)")
            put("live = (other[None, :] >= span_start[:, None]) & (other[None, :] < span_stop[:, None])")
        elif self.span[:4] != "cols":
            put("live = (other[None, :] >= row_start[:, None]) & (other[None, :] < row_stop[:, None])")
        else:
            inside = []
            for k in ("", "2")[: int(self.span[4])]:
                put(f"other_start{k} = tl.load(start{k} + other, mask=other < num_other, other=0)")
                put(f"other_stop{k} = tl.load(stop{k} + other, mask=other < num_other, other=0)")
                inside.append(f"(own[:, None] >= other_start{k}[None, :]) & (own[:, None] < other_stop{k}[None, :])")
            put(f"live = ({' | '.join(f'({x})' for x in inside)}) & live_own[:, None]")

    def number(self) -> None:
        """first + rank of the source among its row's sources."""
        rows = self.owners_are_rows()
        col, side = ("other[None, :]", "[:, None]") if rows else ("own[:, None]", "[None, :]")
        first = f"load_numbers(first, {'own, 0, 1, live_own' if rows else 'other, 0, 1, other < num_other'}){side}"
        which = "row_start" if rows else "other_start"
        if not rows and self.span in ("band", "blocks"):
            low = "own_low" if self.span == "blocks" else "0"
            self.put(self.depth, f"other_start = tl.maximum(other - high, {low})")
        text = f"{first} + ({col} - {which}{side})"
        self.put(self.depth, f"number = {text}")
        if self.span in ("rows2", "cols2"):
            end = "row_stop" if rows else "other_stop"
            later = f"{first} + ({col} - {which}2{side} + ({end} - {which}){side})"
            self.put(self.depth, f"number = tl.where({col} >= {which}2{side}, {later}, number)")

    def edge_row(self, x: Input) -> str:
        n = self.names[x.ref, x.mode]
        return f"{n} + number * {n}_row"

    # Edge values.

    def line(self, line: Line) -> None:
        out = line.outs[0]
        if out in self.work.inners:
            self.inner(line)
        elif out in self.work.loops:
            self.feature_loop(line)
        elif line.op == "number":
            self.edges.known[out] = Value("number", "mn", "i64")
        elif line.op == "kept":
            self.edges.known[out] = Value(f"{self.names[line.args[0], 'map']}_kept", "", "bool")
        elif line.op == "arange":
            self.arange(line)
        elif line.op == "gather":
            self.gather(line)
        elif line.op == "rand":
            self.rand(line)
        else:
            self.edges.line(line)

    def inner(self, line: Line) -> None:
        own, far = self.ends_of(line)
        self.arrive(far)
        x = f"{self.names[far, 'vector']}_v"
        kept = self.nodes.value(self.wide(own))
        far_dtype, own_dtype = self.p.types[far].dtype, self.p.types[own].dtype
        a = kept.text
        if far_dtype == own_dtype:
            a += "" if kept.dtype == own_dtype else f".to({x}.dtype)"
        else:
            a, x = f"{a}.to(tl.float32)", f"{x}.to(tl.float32)"
        text = f"tl.dot({a}, tl.trans({x}), input_precision=PRECISION)"
        if own in self.pieces:
            text = f"inner({self.pieces[own]}, {self.names[far, 'vector']}_v, PRECISION)"
        self.edges.set(line.outs[0], text, "mn", "f32", line)

    def feature_loop(self, line: Line) -> None:
        """A sum over features that is no inner product: one feature at a time."""
        axis, inside = self.work.loops[line.outs[0]]
        name, at = self.edges.name(line.outs[0]), self.columns.index(axis)
        for ref in inside:
            if ref in self.work.inners:
                self.arrive(self.ends_of(self.p.definitions[ref])[1])
        kept, depth = self.edges, self.depth
        self.put(depth, f"{name} = tl.zeros([BLOCK_M, {self.block}], tl.float32)  # sum over features, one at a time")
        self.put(depth, f"for c in tl.range(0, C{at}, num_stages=1):")
        self.depth = depth + 1
        self.edges = Values(self.axes, lambda text: self.put(depth + 1, text), self.short, kept, "c")
        read = {self.axes.same(a) for ref in inside for a in self.p.definitions[ref].args}
        read.add(self.axes.same(line.args[0]))
        for x in self.work.inputs:
            if x.mode == "column" and x.vector == axis and x.ref in read:
                self.load_column(x)
        for ref in inside:
            self.line(self.p.definitions[ref])
        self.put(depth + 1, f"{name} += {self.edges.text(line.args[0], 'f32', 'mn')}")
        self.edges, self.depth = kept, depth
        self.edges.known[line.outs[0]] = Value(name, "mn", "f32")

    def load_column(self, x: Input) -> None:
        n, wide = self.names[x.ref, x.mode], compute_dtype(x.dtype)
        packed = self.work.packed
        more = f"h{self.work.axes.index(packed)} * {n}_h{self.work.axes.index(packed)}" if packed in x.heads else "0"
        cast = f".to({TRITON[wide]})"
        at = f"{n} + c * tl.cast({n}_d, tl.int64)"
        if x.side == "shared":
            text, shape = f"tl.load({at}{' + ' + more if more != '0' else ''}){cast}", "m" if more != "0" else ""
        elif x.side == "own":
            text, shape = f"load_numbers({at}, own, {more}, {n}_row, live_own){cast}", "m"
        elif x.side == "far":
            text, shape = f"load_numbers({at}, other, 0, {n}_row, other < num_other){cast}", "n"
        else:
            row = f"{self.edge_row(x)} + c * tl.cast({n}_d, tl.int64)"
            text, shape = f"tl.load({row}, mask={self.live()}, other=0){cast}", "mn"
        self.put(self.depth, f"{n}_c = {text}")
        self.edges.known[x.ref] = Value(f"{n}_c", shape, wide)

    def arange(self, line: Line) -> None:
        axis = self.axes.of(line.outs[0])
        k = self.work.axes.index(axis[0]) if axis else None
        text = "0" if k is None else f"h{k}"
        packed = k is not None and axis[0] == self.work.packed
        self.edges.known[line.outs[0]] = Value(text, "m" if packed else "", "i64" if k is not None else "")

    def gather(self, line: Line) -> None:
        table, i = line.args
        x = next(x for x in self.work.inputs if x.ref == self.axes.same(table) and x.mode == "table")
        n, packed = self.names[x.ref, "table"], self.work.packed
        wide = compute_dtype(x.dtype)
        k = self.work.axes.index(packed) if packed in x.dims[1:] else None
        more = f"(h{k} * {n}_h{k})[:, None]" if k is not None else "0"
        text = f"gathered({n}, {self.edges.text(i, 'i64', 'mn')}, {n}_row, {n}_count, {more}).to({TRITON[wide]})"
        shape = self.edges.value(i).shape
        self.edges.set(line.outs[0], text, shape if k is None or shape == "mn" else "mn", wide, line)

    def rand(self, line: Line) -> None:
        dims = self.axes.dims(line.args[1])
        feature = "0"
        for a in dims:
            if a != 1:
                k = self.work.axes.index(a)
                side = "[:, None]" if a == self.work.packed else ""
                feature = f"({feature}) * H{k} + h{k}{side}"
        text = f"uniform({self.edges.text(line.args[0], 'i64')}, number, {feature})"
        self.edges.set(line.outs[0], text, "mn", "f32", line)
