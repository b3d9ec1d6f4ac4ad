"""Gluon source of a work on edges, for Hopper: warpgroups that each do a different thing.

One warp brings tiles of the owners' and the other end's vectors into shared memory. Each consumer, a warpgroup of 64
owners, multiplies them, does the edge function's lines, and adds to its sums. Programs stay and take one tile of
owners after another. A row whose sum is no number is noted, for a kernel of the tiles skeleton to do again with care.
"""

from __future__ import annotations

import re
from typing import Any

from tiga.codegen.emit_nodes import Parameter, Source
from tiga.codegen.emit_tiles import Emitter
from tiga.codegen.hopper import far_numbers, products_of, vectors
from tiga.codegen.plan_hopper import HopperPlan
from tiga.codegen.ranges_hopper import RANGES, REACH, TOLD
from tiga.codegen.tiles import Axes, Fold, Input, Work
from tiga.codegen.values import TRITON, Value, Values
from tiga.program import Line
from tiga.types import compute_dtype

HEAD = """from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from tiga.codegen import device_hopper as tl
from tiga.codegen.device_hopper import following, load_numbers, over_features, place, reach_of_rows, sign
from tiga.codegen.device_hopper import spoiled_rows, store_rows, tanh, tile_at, unknown

LOG2E = gl.constexpr(1.4426950408889634)
"""
_WORD = re.compile(r"\b[A-Za-z_]\w*")


class RowValues(Values):
    """Node values after the edges: a number a row meets vectors in the layout of their sums."""

    layout = ""

    def text(self, ref: str, dtype: str = "", shape: str = "") -> str:
        if self.value(ref).shape == "m" and shape == "md":
            return f"over_features({super().text(ref, dtype)}, {self.layout})"
        return super().text(ref, dtype, shape)


class HopperEmitter(Emitter):
    def __init__(self, axes: Axes, work: Work, span: str, plan: HopperPlan, widths: dict[Any, int]) -> None:
        super().__init__(axes, work, span)
        self.plan, self.widths = plan, widths
        self.nodes = RowValues(axes, lambda text: self.put(1, text), self.short)
        self.near, self.far, self.brought = vectors(work, "own"), vectors(work, "far"), far_numbers(work)
        self.products = products_of(axes, work)
        self.levels: dict[str, int] = {}
        self.summed = [f.field for f in work.folds if f.field is not None]
        self.ends: dict[str, tuple[Input, Input]] = {}  # of a product the vectors, the owners' first
        for ref in self.products:
            pair = [next(x for x in (*self.near, *self.far) if x.ref == r) for r in work.inners[ref]]
            self.ends[ref] = (pair[0], pair[1]) if pair[0].side == "own" else (pair[1], pair[0])

    def at(self, x: Input) -> str:
        return self.names[x.ref, x.mode]

    def source(self) -> Source:
        self.read_parameters()
        self.buffers = self.shared_memory()
        functions = [
            self.function("reach", ["program"], self.reach()),
            self.function("rows_of", ["WG: gl.constexpr", "program", *_PLACE], self.owners()),
            self.function("consume", ["WG: gl.constexpr"], self.consumer()),
            self.function("produce", [], self.producer()),
        ]
        text = HEAD + self.constants() + "".join(functions) + self.kernel()
        return Source(text, tuple(self.parameters), tuple(self.vectors))

    # Arguments and memory.

    def read_parameters(self) -> None:
        add, work = self.parameter, self.work
        for x in work.inputs:
            n = self.at(x)
            if x.ref in self.p.scalars:
                add(n, "scalar", x.ref)
            elif x.mode == "vector":
                add(n, "descriptor", x.ref, x)
            else:
                add(n, "tensor", x.ref)
                if x.side != "shared":
                    add(n + "_row", "row", x.ref)
                self.strides(n, x.heads, "stride", x.ref, x)
        for k, o in enumerate(work.outputs):
            add(f"out{k}", "output", "node", k)
            add(f"out{k}_row", "output row", "node", k)
            self.strides(f"out{k}", o.dims, "output stride", "node", k)
        add("spoiled", "spoiled")
        for k, a in enumerate(work.axes):
            add(f"H{k}", "size", a)
        for name in ("num_own", "num_other", "num_heads", "group", "num_tiles"):
            add(name, name)
        for name in TOLD[self.span]:
            add(name, name)

    def constants(self) -> str:
        plan, rows = self.plan, []
        numbers = {"CONSUMERS": plan.consumers, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}
        numbers.update(STAGES=plan.stages, OWNS=plan.owns)
        rows += [f"{name} = gl.constexpr({n})" for name, n in numbers.items()]
        rows.append("S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 16]))  # of scores")
        rows += ["ROWS = gl.constexpr(gl.SliceLayout(1, S.value))", "COLS = gl.constexpr(gl.SliceLayout(0, S.value))"]
        rows.append("LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))")
        for d in sorted({self.widths[x.vector] for x in self.summed}):
            rows.append(f"O{d} = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {d}, 16]))  # of sums")
            rows.append(f"W{d} = gl.constexpr(gl.DotOperandLayout(0, O{d}.value, 2))  # of weights")
        return "\n".join(rows) + "\n"

    def shared_memory(self) -> dict[str, str]:
        """Buffers by name: how each is made. Barriers: those of the name's end; how many arrive there."""
        short, found = self.short_dtype(), {}
        for x in (*self.near, *self.far):
            rows, count = ("64", "OWNS * CONSUMERS") if x.side == "own" else ("BLOCK_N", "STAGES")
            d = self.widths[x.vector]
            layout = f"gl.NVMMASharedLayout.get_default_for([{rows}, {d}], {short})"
            found[f"{self.at(x)}_s"] = f"gl.allocate_shared_memory({short}, [{count}, {rows}, {d}], {layout})"
        for x in self.brought:
            dtype = TRITON[compute_dtype(x.dtype)]
            layout = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
            found[f"{self.at(x)}_s"] = f"gl.allocate_shared_memory({dtype}, [STAGES, BLOCK_N], {layout})"
        rings = [self.at(x) for x in self.far] + (["numbers"] if self.brought else [])
        for name, count in [("own", "OWNS * CONSUMERS"), *[(n, "STAGES") for n in rings]]:
            for end in ("full", "empty"):
                found[f"{name}_{end}"] = f"gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())"
        return found

    def short_dtype(self) -> str:
        return TRITON[self.far[0].dtype]

    # Functions.

    def function(self, name: str, leading: list[str], body: list[str]) -> str:
        used = self.used(body)
        rows = ["", "", "@gluon.jit", f"def {name}({', '.join([*leading, 'args'])}):"]
        self.arguments = {**getattr(self, "arguments", {}), name: used}
        rows.append(f"    {', '.join(used)}{',' if len(used) == 1 else ''} = args")
        return "\n".join([*rows, *body]) + "\n"

    def used(self, body: list[str]) -> list[str]:
        """The kernel's arguments and buffers that a text reads."""
        words = set(_WORD.findall("\n".join(body)))
        return [n for n in (*[q.name for q in self.parameters], *self.buffers) if n in words]

    def call(self, name: str) -> str:
        """The arguments of a function as a tuple."""
        used = self.arguments[name]
        return f"({', '.join(used)}{',' if len(used) == 1 else ''})"

    def body(self) -> list[str]:
        rows, self.rows = self.rows, []
        return rows

    def kernel(self) -> str:
        quiet = [q.name for q in self.parameters if not self.specialised(q)]
        for name, made in self.buffers.items():
            self.put(1, f"{name} = {made}")
        for name in self.buffers:
            if name.endswith(("_full", "_empty")):
                own = name[:4] == "own_"
                count = "CONSUMERS" if name.endswith("_empty") and not own else "1"
                self.put(1, f"for i in gl.static_range({'OWNS * CONSUMERS' if own else 'STAGES'}):")
                self.put(2, f"mbarrier.init({name}.index(i), count={count})")
        self.put(1, f"produced = {self.call('produce')}")
        self.put(1, f"consumed = {self.call('consume')}")
        count = self.plan.consumers
        for k in range(count):
            self.put(1, f"W{k}: gl.constexpr = {k}")
        parts = [*[f"(consume, (W{k}, consumed))" for k in range(count)], "(produce, (produced,))"]
        more, less = self.plan.registers
        registers = f"{[4] * (count - 1) + [1]}, {[more] * (count - 1) + [less]}"
        self.put(1, f"gl.warp_specialize([{', '.join(parts)}], {registers})")
        head = ["", "", f"@gluon.jit(do_not_specialize={quiet!r})"]
        head.append(f"def propagate({', '.join([q.name for q in self.parameters])}):")
        return "\n".join([*head, *self.body()]) + "\n"

    def specialised(self, q: Parameter) -> bool:
        """Whether Triton may know of an argument that it is a multiple of 16. Not where it could be 1: that would be no
        argument but a constant, which a tuple of arguments cannot hold."""
        if q.kind in ("output row", "output stride"):
            return self.work.outputs[q.of[1]].vector is not None
        return q.kind in ("tensor", "output", "descriptor", "spoiled", *TOLD["rows1"], *TOLD["blocks"])

    def reach(self) -> list[str]:
        """Where a program is, and the tiles of others that it visits."""
        for text in RANGES[self.span].format(last_first=self.owners_are_rows()).splitlines():
            self.put(1, text)
        self.put(1, f"return {', '.join(REACH)}")
        return self.body()

    def enter_program(self, depth: int, program: str = "program") -> None:
        self.put(depth, f"{', '.join(REACH)} = reach({program}, {self.call('reach')})")
        rest = "head"
        for k, _ in enumerate(self.work.axes):
            self.put(depth, f"h{k} = {rest} % H{k}")
            rest = f"({rest} // H{k})"

    # The producer.

    def producer(self) -> list[str]:
        put = self.put
        put(1, "stage, phase, own_stage, own_phase = 0, 0, 0, 0")
        put(1, "for program in range(tl.program_id(0), num_tiles, tl.num_programs(0)):")
        self.enter_program(2)
        size = sum([64 * 2 * self.widths[x.vector] for x in self.near])
        put(2, "for w in gl.static_range(CONSUMERS):")
        put(3, "near = own_stage * CONSUMERS + w")
        put(3, "mbarrier.wait(own_empty.index(near), own_phase ^ 1)")
        put(3, f"mbarrier.expect(own_full.index(near), {size})")
        for x in self.near:
            put(3, self.copied(x, "own_first + w * 64", "own_full.index(near)", "near"))
        put(2, "own_stage, own_phase = following(own_stage, own_phase, OWNS)")
        put(2, "for step in range(0, all_tiles):")
        put(3, "at = tile_at(step, steps, all_steps, begin, next_begin, inner_begin, BLOCK_N)")
        self.bring_numbers("load")
        for x in self.far:
            n = self.at(x)
            put(3, f"mbarrier.wait({n}_empty.index(stage), phase ^ 1)")
            put(3, f"mbarrier.expect({n}_full.index(stage), BLOCK_N * {2 * self.widths[x.vector]})")
            put(3, self.copied(x, "at", f"{n}_full.index(stage)", "stage"))
        self.bring_numbers("store")
        put(3, "stage, phase = following(stage, phase, STAGES)")
        return self.body()

    def copied(self, x: Input, row: str, barrier: str, slot: str) -> str:
        heads = [f"h{k}" for k, a in enumerate(self.work.axes) if a in x.heads]
        n = self.at(x)
        where = ", ".join([*heads, row, "0"])
        return f"tma.async_copy_global_to_shared({n}, [{where}], {barrier}, {n}_s.index({slot}))"

    def bring_numbers(self, what: str) -> None:
        """Numbers of the other end take the way through registers: they may lie at any stride."""
        if not self.brought:
            return
        put = lambda text: self.put(3, text)
        if what == "load":
            put("other = at + tl.arange(0, BLOCK_N, layout=LINE)")
            for x in self.brought:
                n = self.at(x)
                heads = [f" + h{k}.to(tl.int64) * {n}_h{k}" for k, a in enumerate(self.work.axes) if a in x.heads]
                cast = f".to({TRITON[compute_dtype(x.dtype)]})"
                put(f"{n}_v = load_numbers({n}{''.join(heads)}, other, 0, {n}_row, other < num_other){cast}")
            return
        put("mbarrier.wait(numbers_empty.index(stage), phase ^ 1)")
        for x in self.brought:
            put(f"{self.at(x)}_s.index(stage).store({self.at(x)}_v)")
        put("mbarrier.arrive(numbers_full.index(stage), count=1)")

    # The consumers.

    def consumer(self) -> list[str]:
        put = self.put
        put(1, "stage, phase, own_stage, own_phase = 0, 0, 0, 0")
        put(1, "for program in range(tl.program_id(0), num_tiles, tl.num_programs(0)):")
        put(2, f"stage, phase = rows_of(WG, program, {', '.join(_PLACE)}, {self.call('rows_of')})")
        put(2, "own_stage, own_phase = following(own_stage, own_phase, OWNS)")
        return self.body()

    def owners(self) -> list[str]:
        """One tile of owners, from edges to results."""
        put = lambda text: self.put(1, text)
        self.enter_rows("program")
        for text in _ROW_RANGES[self.span].splitlines():
            put(text)
        self.own_values()
        put("lanes = tl.arange(0, BLOCK_N, layout=COLS)")
        put("zero = tl.zeros([64, BLOCK_N], tl.float32, layout=S)")
        self.start(1)
        put("near = own_stage * CONSUMERS + WG")
        put("mbarrier.wait(own_full.index(near), own_phase)")
        self.flying: list[str] = []  # matrix products that were begun and not waited for, in order
        self.visit_first()
        self.visit_masked()
        self.visit_full()
        self.last_sums()
        put("mbarrier.arrive(own_empty.index(near), count=1)")
        self.enter_rows("unknown(program)")  # again: no register holds it meanwhile
        for k, f in enumerate(self.work.folds):
            self.result(k, f)
        self.note_spoiled()
        self.finish()
        put("return stage, phase")
        return self.body()

    def enter_rows(self, program: str) -> None:
        self.enter_program(1, program)
        self.put(1, "own = own_first + WG * 64 + tl.arange(0, 64, layout=ROWS)")
        self.put(1, "live_own = own < own_end")

    def base(self, x: Input) -> tuple[str, str]:
        n = self.at(x)
        for k, a in enumerate(self.work.axes):
            if a in x.heads:
                self.put(1, f"{n} += h{k}.to(tl.int64) * {n}_h{k}")
        return n, ""

    def own_values(self) -> None:
        self.waiting = [x for x in self.work.inputs if x.mode == "number" and x.side in ("own", "shared")]
        for x in [x for x in self.waiting if x.ref in self.p.scalars]:
            self.put(1, f"{self.at(x)} = tl.cast({self.at(x)}, tl.float32)")
            self.nodes.known[x.ref] = Value(self.at(x), "", "f32")
            self.waiting.remove(x)
        self.load_own(self.edge_needs())
        for line in self.work.before:
            self.node_line(line)

    def node_line(self, line: Line) -> None:
        wide = [a for a in self.axes.of(line.outs[0]) if a not in self.work.axes]
        self.nodes.layout = f"O{self.widths[wide[0]]}" if wide else ""
        self.nodes.line(line)

    def start(self, depth: int, only: int | None = None) -> None:
        for k, f in enumerate(self.work.folds):
            assert f.field is not None
            if f.reducer == "softmax":
                self.put(depth, f"peak{k} = tl.full([64], float('-inf'), tl.float32, layout=ROWS)")
                self.put(depth, f"total{k} = tl.full([64], 0.0, tl.float32, layout=ROWS)")
            d = self.widths[f.field.vector]
            self.put(depth, f"sum{k} = tl.zeros([64, {d}], tl.float32, layout=O{d})")

    # Tiles.

    def visit_first(self) -> None:
        """The first tile, with a mask whatever it is: nothing is there yet to run beside it."""
        self.put(1, "at = tile_at(0, steps, all_steps, begin, next_begin, inner_begin, BLOCK_N)")
        self.depth, self.how, self.block = 1, "masked", "BLOCK_N"
        self.tile_of("first")

    def visit_masked(self) -> None:
        self.put(1, f"{'for step in range(1, all_steps):':<72}# tiles that hold pairs which are no edges")
        self.put(2, "at = tl.where(step < steps, begin + step * BLOCK_N, next_begin + (step - steps) * BLOCK_N)")
        self.depth, self.how = 2, "masked"
        self.tile_of("next")

    def visit_full(self) -> None:
        self.put(1, f"{'for step in range(tl.maximum(all_steps, 1), all_tiles):':<72}# tiles of edges only")
        self.depth, self.how = 2, "full"
        self.tile_of("next")

    def tile_of(self, which: str) -> None:
        put = lambda text: self.put(self.depth, text)
        self.first, self.waited = which == "first", set[str]()
        self.edges = Values(self.axes, put, self.short, self.nodes)
        ahead = self.plan.ahead
        if not self.first:
            put("before = stage")
            put("stage, phase = following(stage, phase, STAGES)")
        for k, ref in enumerate(self.products):
            own, far = self.ends[ref]
            self.arrived(far)
            a, b = f"{self.at(own)}_s.index(near)", f"{self.at(far)}_s.index(stage).permute((1, 0))"
            put(f"t{k} = warpgroup_mma({a}, {b}, zero, use_acc=False, is_async=True)")
            self.flying.append(f"t{k}")
        if ahead and not self.first:
            self.add_all("before")
        if self.how != "full":
            put("other = unknown(at) + lanes")
            self.mask()
        self.lines_of_tile()
        if self.brought:
            put("mbarrier.arrive(numbers_empty.index(stage), count=1)")
        self.end_ahead() if ahead else self.wait_for_sums("stage")

    def lines_of_tile(self) -> None:
        done: set[str] = set()
        for k, f in enumerate(self.work.folds):
            for ref in sorted(f.lines, key=self.last_product):
                if ref not in done:
                    done.add(ref)
                    self.bring_to_line(self.p.definitions[ref])
                    self.line(self.p.definitions[ref])
            for ref in (f.weight, f.line.args[0]) if f.reducer == "softmax" else (f.weight,):
                self.number_of(ref)
            self.fold(k, f)

    def last_product(self, ref: str) -> int:
        """How many of the products must have landed for an edge value."""
        if ref in self.products:
            return self.products.index(ref) + 1
        line = self.p.definitions.get(ref)
        if line is None or self.axes.place(ref) != "edge":
            return 0
        if ref not in self.levels:
            self.levels[ref] = max([self.last_product(a) for a in line.args], default=0)
        return self.levels[ref]

    def bring_to_line(self, line: Line) -> None:
        for a in line.args if line.outs[0] not in self.work.inners else ():
            self.number_of(a)

    def number_of(self, ref: str | None) -> None:
        """A number of the other end, read where it is first needed: so it holds no register before."""
        name = self.axes.same(ref) if ref is not None else None
        x = next((x for x in self.brought if x.ref == name), None)
        if x is None or x.ref in self.edges.known:
            return
        if "numbers" not in self.waited:
            self.waited.add("numbers")
            self.put(self.depth, "mbarrier.wait(numbers_full.index(stage), phase)")
        self.put(self.depth, f"{self.at(x)}_v = {self.at(x)}_s.index(stage).load(COLS)")
        self.edges.known[x.ref] = Value(f"{self.at(x)}_v", "n", compute_dtype(x.dtype))

    def arrived(self, x: Input, again: bool = False) -> None:
        """Waits for a tile of vectors; again: only to end a block of instructions, as ptxas moves waits for products up
        to its beginning."""
        if again or self.at(x) not in self.waited:
            self.waited.add(self.at(x))
            self.put(self.depth, f"mbarrier.wait({self.at(x)}_full.index(stage), phase)")

    def landed(self, count: int, slot: str) -> None:
        """The first `count` of the products that fly are there: nobody reads what only they read."""
        gone, self.flying = self.flying[:count], self.flying[count:]
        for x in self.far:
            if x in self.summed:
                last = max([k for k, f in enumerate(self.work.folds) if f.field == x])
                if f"sum{last}" in gone:
                    self.free(x, slot)
            else:
                last = max([k for k, ref in enumerate(self.products) if self.ends[ref][1] == x])
                if f"t{last}" in gone:
                    self.free(x, "stage")

    def free(self, x: Input, slot: str) -> None:
        self.put(self.depth, f"mbarrier.arrive({self.at(x)}_empty.index({slot}), count=1)")

    def inner(self, line: Line) -> None:
        k = self.products.index(line.outs[0])
        if k:
            self.arrived(self.ends[line.outs[0]][1], again=True)
        count = self.flying.index(f"t{k}") + 1
        text = f"warpgroup_mma_wait({len(self.flying) - count}, [t{k}])"
        self.edges.set(line.outs[0], text, "mn", "f32", line)
        self.landed(count, "stage")

    def pair(self, ref: str, dtype: str) -> str:
        v = self.edges.value(ref)
        dtype = dtype or v.dtype or "i64"
        text = self.edges.text(ref, dtype, "mn")
        return text if v.shape == "mn" else f"tl.zeros([64, BLOCK_N], {TRITON[dtype]}, layout=S) + {text}"

    def rescale(self, k: int) -> None:
        """The sum may fly: it is rescaled once it has landed."""

    def add(self, k: int, f: Fold) -> None:
        masked = f.reducer != "softmax" and self.how != "full"  # a softmax has made these weights 0
        if masked:
            self.put(self.depth, f"weight{k} = tl.where(live, weight{k}, 0.0)")
        if self.plan.ahead:
            return
        self.operand(k, f)
        self.begin_sum(k, f, "stage")

    def operand(self, k: int, f: Fold) -> None:
        assert f.field is not None
        layout, dtype = f"W{self.widths[f.field.vector]}", self.short_dtype()
        self.put(
            self.depth, f"part{k} = tl.convert_layout(weight{k}.to({dtype}), {layout}, assert_trivial=True)"
        )

    def begin_sum(self, k: int, f: Fold, slot: str) -> None:
        assert f.field is not None
        if slot == "stage" and not self.plan.ahead:
            self.arrived(f.field)
        vector = f"{self.at(f.field)}_s.index({slot})"
        self.put(self.depth, f"sum{k} = warpgroup_mma(part{k}, {vector}, sum{k}, is_async=True)")
        self.flying.append(f"sum{k}")

    def add_all(self, slot: str) -> None:
        for k, f in enumerate(self.work.folds):
            self.begin_sum(k, f, slot)

    def wait_for_sums(self, slot: str) -> None:
        sums = [f"sum{k}" for k, _ in enumerate(self.work.folds)]
        text = ", ".join(sums)
        self.put(self.depth, f"{text} = warpgroup_mma_wait(0, [{text}])")
        self.landed(len(self.flying), slot)

    def end_ahead(self) -> None:
        """The sums of the tile before have had the time of this tile's weights."""
        for x in dict.fromkeys(self.summed):
            self.arrived(x, again=True)
        if not self.first:
            self.wait_for_sums("before")
        for k, f in enumerate(self.work.folds):
            if f.reducer == "softmax" and not self.first:
                assert f.field is not None
                layout = f"O{self.widths[f.field.vector]}"
                self.put(self.depth, f"sum{k} = sum{k} * over_features(keep{k}, {layout})")
            self.operand(k, f)

    def last_sums(self) -> None:
        self.depth = 1
        if self.plan.ahead:
            self.add_all("stage")
            self.wait_for_sums("stage")
        self.put(1, "stage, phase = following(stage, phase, STAGES)")

    # Results.

    def result(self, k: int, f: Fold) -> None:
        assert f.field is not None
        put = lambda text: self.put(1, text)
        layout = f"O{self.widths[f.field.vector]}"
        if f.reducer == "softmax":
            lse = "(peak{0} + tl.log2({1})) / LOG2E" if self.short else "peak{0} + tl.log({1})"
            put(f"none{k} = total{k} == 0")
            put(f"some{k} = tl.where(none{k}, 1.0, total{k})")
            put(f"inverse{k} = over_features(1.0 / some{k}, {layout})")
            put(f"sum{k} = tl.where(over_features(none{k}, {layout}), 0.0, sum{k} * inverse{k})")
            put(f"lse{k} = tl.where(none{k}, float('-inf'), {lse.format(k, f'some{k}')})")
        self.nodes.layout = layout
        for ref in f.factors:
            put(f"sum{k} = sum{k} * {self.nodes.text(ref, 'f32', 'md')}")
        for j, (o, text) in enumerate(zip(f.line.outs, (f"sum{k}", f"lse{k}"))):
            dtype = compute_dtype(self.p.types[o].dtype)
            self.nodes.known[o] = Value(text, "m" if j else "md", dtype)

    def note_spoiled(self) -> None:
        each = [f"spoiled_rows(sum{k}, ROWS)" for k, _ in enumerate(self.work.folds)]
        self.put(1, f"bad = {' | '.join(each)}")
        self.put(1, "tl.store(spoiled + head.to(tl.int64) * num_own + own, bad.to(tl.int8), mask=live_own)")

    def finish(self) -> None:
        self.load_own(None)
        for line in self.work.after:
            self.node_line(line)
        for k, o in enumerate(self.work.outputs):
            heads = "".join([f" + h{j}.to(tl.int64) * out{k}_h{j}" for j, a in enumerate(self.work.axes) if a in o.dims])
            rows = f"out{k} + own.to(tl.int64) * out{k}_row{heads}"
            if o.vector is None:
                value = self.nodes.text(o.ref, "", "m")
                self.put(1, f"tl.store({rows}, {value}, mask=live_own)")
                continue
            d = self.widths[o.vector]
            value = self.nodes.text(o.ref, "f32" if self.p.types[o.ref].floating else "", "md")
            self.put(1, f"store_rows({rows}, {value}, live_own, {d}, O{d})")


_PLACE = ("stage", "phase", "own_stage", "own_phase")
_ROW_RANGES = {
    "band": (
        "row_start = tl.maximum(own + low, other_low)\n"
        "row_stop = tl.where(live_own, tl.minimum(own + high + 1, other_high), 0)"
    ),
    "rows1": (
        "row_start = tl.load(start + own, mask=live_own, other=0)\n"
        "row_stop = tl.load(stop + own, mask=live_own, other=0)"
    ),
}
_ROW_RANGES["blocks"] = _ROW_RANGES["band"]
