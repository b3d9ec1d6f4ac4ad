"""Gluon source of a work on edges, for Hopper: warpgroups that each do a different thing.

One warp brings tiles of the owners' and the other end's vectors into shared memory. Each consumer, a warpgroup of 64
owners, multiplies them, does the edge function's lines, and adds to its sums. Programs stay and take one tile of
owners after another. A row whose sum is no number is noted, for a kernel of the tiles skeleton to do again with care.
"""

from __future__ import annotations

import re

from tiga.codegen.emit_hopper_tiles import ConsumerEmitter
from tiga.codegen.emit_nodes import Parameter, Source
from tiga.codegen.ranges_hopper import NUMBERED, RANGES, REACH, TAKEN, TILES, TOLD
from tiga.codegen.tiles import Input
from tiga.codegen.values import TRITON
from tiga.types import compute_dtype

HEAD = """from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from tiga.codegen import device_hopper as tl
from tiga.codegen.device_hopper import back_and_forth, edges_only, following, furthest, load_numbers, load_through
from tiga.codegen.device_hopper import not_zero, over_features, packed, place, reach_of_rows, sign, spoiled_rows
from tiga.codegen.device_hopper import store_rows, store_through, tanh, tell, tile_at, unpacked, word
"""
_WORD = re.compile(r"\b[A-Za-z_]\w*")


class HopperEmitter(ConsumerEmitter):
    head = HEAD
    carried: tuple[str, ...] = ("stage", "phase")  # what consumers go on with from one tile of owners to the next
    place: tuple[str, ...] = ("stage", "phase", "own_stage")  # and what they need of where they are

    def source(self) -> Source:
        self.read_parameters()
        self.buffers = self.shared_memory()
        functions = [
            self.function("reach", ["program"], self.reach()),
            self.function("masked", ["WG: gl.constexpr", "own_stage", "step", "x", "instead"], self.mask_of_tile()),
            self.function("rows_of", ["WG: gl.constexpr", *self.place], self.owners()),
            self.function("consume", ["WG: gl.constexpr"], self.consumer()),
            self.function("produce", [], self.producer()),
        ]
        text = self.head + self.constants() + "".join(functions) + self.kernel()
        return Source(text, tuple(self.parameters), tuple(self.vectors))

    # Arguments and memory.

    def read_parameters(self) -> None:
        add, work = self.parameter, self.work
        for x in work.inputs:
            n = self.at(x)
            if x.ref in self.p.scalars:
                add(n, "scalar", x.ref)
            elif x.mode == "vector" and x not in self.afterwards:
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
        for axis in dict.fromkeys([o.vector for o in work.outputs if o.vector is not None]):
            add(self.width_of(axis), "width", axis)
        add("spoiled", "spoiled")
        for k, a in enumerate(work.axes):
            add(f"H{k}", "size", a)
        for name in ("num_own", "num_other", "num_heads", "group", "num_tiles"):
            add(name, name)
        for name in TOLD[self.span]:
            add(name, name)

    def constants(self) -> str:
        plan, rows = self.plan, ["", "LOG2E = gl.constexpr(1.4426950408889634)"]
        numbers = {"CONSUMERS": plan.consumers, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}
        numbers.update(STAGES=plan.stages, OWNS=plan.owns, PLACE_WORDS=len(REACH), **self.more_numbers())
        rows += [f"{name} = gl.constexpr({n})" for name, n in numbers.items()]
        rows.append("S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 16]))  # of scores")
        rows += ["ROWS = gl.constexpr(gl.SliceLayout(1, S.value))", "COLS = gl.constexpr(gl.SliceLayout(0, S.value))"]
        rows.append("LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))")
        for d in sorted({self.widths[x.vector] for x in self.summed}):
            rows.append(f"O{d} = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {d}, 16]))  # of sums")
            rows.append(f"W{d} = gl.constexpr(gl.DotOperandLayout(0, O{d}.value, 2))  # of weights")
        return "\n".join(rows) + "\n"

    def more_numbers(self) -> dict[str, int]:
        return {}

    def shared_memory(self) -> dict[str, str]:
        """Buffers and barriers by name: how each is made."""
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
        words = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
        found["told"] = f"gl.allocate_shared_memory(gl.int32, [OWNS * PLACE_WORDS, 1], {words})"
        for name, (count, _) in self.barriers().items():
            found[name] = f"gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())"
        return found

    def barriers(self) -> dict[str, tuple[str, str]]:
        """By name: how many there are, and how many arrive at each."""
        found = {"own_full": ("OWNS * CONSUMERS", "1"), "own_empty": ("OWNS * CONSUMERS", "1")}
        if self.plan.turns:
            found["turns"] = ("CONSUMERS", "1")
        for n in [self.at(x) for x in self.far] + (["numbers"] if self.brought else []):
            found |= {f"{n}_full": ("STAGES", "1"), f"{n}_empty": ("STAGES", "CONSUMERS")}
        return found

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
        for name, (count, arrive) in self.barriers().items():
            self.put(1, f"for i in gl.static_range({count}):")
            self.put(2, f"mbarrier.init({name}.index(i), count={arrive})")
        self.put(1, f"produced = {self.call('produce')}")
        self.put(1, f"consumed = {self.call('consume')}")
        groups = self.plan.consumers
        for k in range(groups):
            self.put(1, f"W{k}: gl.constexpr = {k}")
        parts = [*[f"(consume, (W{k}, consumed))" for k in range(groups)], "(produce, (produced,))"]
        more, less = self.plan.registers
        registers = f"{[4] * (groups - 1) + [1]}, {[more] * (groups - 1) + [less]}"
        self.put(1, f"gl.warp_specialize([{', '.join(parts)}], {registers})")
        head = ["", "", f"@gluon.jit(do_not_specialize={quiet!r})"]
        head.append(f"def propagate({', '.join([q.name for q in self.parameters])}):")
        return "\n".join([*head, *self.body()]) + "\n"

    def specialised(self, q: Parameter) -> bool:
        """Whether Triton may know of an argument that it is a multiple of 16. Not where it could be 1: that would be no
        argument but a constant, which a tuple of arguments cannot hold."""
        if q.kind in ("output row", "output stride"):
            return self.work.outputs[q.of[1]].vector is not None
        if q.kind in ("row", "stride"):
            return any(x.ref == q.of[0] for x in self.afterwards)
        return q.kind in ("tensor", "output", "descriptor", "width", "spoiled", *TOLD["rows1"], *TOLD["blocks"])

    def reach(self) -> list[str]:
        """Where a program is, and the tiles of others that it visits."""
        where = RANGES[self.span].format(last_first=self.owners_are_rows()).splitlines()
        for text in (*where, *([] if self.work.tile is None else [NUMBERED]), *TILES.splitlines()):
            self.put(1, text)
        self.put(1, f"return {', '.join(REACH)}")
        return self.body()

    def heads_of(self, depth: int) -> None:
        rest, last = "head", len(self.work.axes) - 1
        for k, _ in enumerate(self.work.axes):
            self.put(depth, f"h{k} = {rest}{f' % H{k}' if k != last else ''}")
            rest = f"({rest} // H{k})"

    def zeros(self) -> str:
        names = dict.fromkeys([*self.place, "own_phase"])
        return f"{', '.join(names)} = {', '.join('0' * len(names))}"

    # The producer.

    def producer(self) -> list[str]:
        """One tile of owners after another: in the order of turns, or, of packed sequences, whose tiles differ the
        most, the next that no program has taken. It tells the consumers of each, and of the end."""
        put = self.put
        put(1, self.zeros())
        put(1, "turn = tl.program_id(0)")
        put(1, "while turn < num_tiles:")
        put(2, f"program = {'back_and_forth(turn, num_tiles)' if self.span == 'band' else 'turn'}")
        taken = "tl.atomic_add(taken, 1, sem='relaxed')" if self.span in TAKEN else "turn"
        put(2, f"turn = {taken} + tl.num_programs(0)")
        put(2, f"{', '.join(REACH)} = reach(program, {self.call('reach')})")
        self.heads_of(2)
        put(2, "for w in gl.static_range(CONSUMERS):")
        put(3, "mbarrier.wait(own_empty.index(own_stage * CONSUMERS + w), own_phase ^ 1)")
        put(2, f"tell(told, own_stage * PLACE_WORDS, ({', '.join(REACH)}))")
        size = sum([64 * 2 * self.widths[x.vector] for x in self.near])
        put(2, "for w in gl.static_range(CONSUMERS):")
        put(3, "near = own_stage * CONSUMERS + w")
        put(3, f"mbarrier.expect(own_full.index(near), {size})")
        for x in self.near:
            put(3, self.copied(x, "own_first + w * 64", "own_full.index(near)", "near"))
        put(2, "own_stage, own_phase = following(own_stage, own_phase, OWNS)")
        self.bring_tiles()
        put(1, "for w in gl.static_range(CONSUMERS):")
        put(2, "mbarrier.wait(own_empty.index(own_stage * CONSUMERS + w), own_phase ^ 1)")
        put(1, "tell(told, own_stage * PLACE_WORDS, (-1,))")
        put(1, "for w in gl.static_range(CONSUMERS):")
        put(2, "mbarrier.arrive(own_full.index(own_stage * CONSUMERS + w), count=1)")
        return self.body()

    def bring_tiles(self) -> None:
        put = self.put
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
        put(1, self.zeros())
        put(1, "mbarrier.wait(own_full.index(WG), 0)")
        put(1, "while word(told, own_stage * PLACE_WORDS) >= 0:")
        put(2, f"{', '.join(self.carried)} = rows_of(WG, {', '.join(self.place)}, {self.call('rows_of')})")
        put(2, "own_stage, own_phase = following(own_stage, own_phase, OWNS)")
        put(2, "mbarrier.wait(own_full.index(own_stage * CONSUMERS + WG), own_phase)")
        return self.body()

    def owners(self) -> list[str]:
        """One tile of owners, from edges to results."""
        put = lambda text: self.put(1, text)
        self.enter_rows()
        for text in _ROW_RANGES[self.span].splitlines() if not self.finds_again() else ():
            put(text)
        self.own_values()
        put("zero = tl.zeros([64, BLOCK_N], tl.float32, layout=S)")
        self.start(1)
        put("near = own_stage * CONSUMERS + WG")
        self.how, self.block = "full", "BLOCK_N"  # of all tiles: what is no edge is left out by `only_edges`
        self.visit_first()
        self.visit_rest()
        self.last_sums()
        self.enter_rows()  # again: no register holds it meanwhile
        for k, f in enumerate(self.work.folds):
            self.result(k, f)
        self.note_spoiled()
        self.finish()
        put(f"return {', '.join(self.carried)}")
        return self.body()

    def mask_of_tile(self) -> list[str]:
        """For pairs of a tile: what is told of its rows is read again, which holds no register meanwhile."""
        self.masked_rows()
        self.put(1, "at = tile_at(step, steps, all_steps, begin, next_begin, inner_begin, BLOCK_N)")
        self.put(1, "return edges_only(x, at, row_start, row_stop, instead, COLS)")
        return self.body()

    def masked_rows(self) -> None:
        self.enter_rows()
        for text in _ROW_RANGES[self.span].splitlines():
            self.put(1, text)

    def enter_rows(self) -> None:
        for k, name in enumerate(REACH):
            self.put(1, f"{name} = word(told, own_stage * PLACE_WORDS + {k})")
        self.heads_of(1)
        self.put(1, "own = own_first + WG * 64 + tl.arange(0, 64, layout=ROWS)")
        self.put(1, "live_own = own < own_end")


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
