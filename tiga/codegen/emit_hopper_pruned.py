"""Gluon source of works that skip tiles, for Hopper: scores of all tiles, weights and values of those that are kept.

A tile is of one warpgroup's owners, which judges it alone. The producer hears what each tile is judged by, and judges
alike: it brings values of one that any warpgroup keeps, and, ahead of the verdict, of one that follows such a tile. The
weights of a kept tile meet their values beside the next tile, of which there are three texts, for what came before it.
"""

from __future__ import annotations

import math
from typing import Any

from tiga.codegen.emit_hopper import HEAD, HopperEmitter
from tiga.codegen.emit_hopper_tiles import TILES
from tiga.codegen.emit_pruned import CERTIFICATE, GAPS, KEPT, SKIPPED, VISITED
from tiga.codegen.plan_hopper import PrunedHopperPlan
from tiga.codegen.ranges_hopper import REACH
from tiga.codegen.tiles import Fold, Input
from tiga.codegen.values import Value, Values
from tiga.prune import TOGETHER

MORE = """from tiga.codegen.device_hopper_pruned import NOTHING, SLACK, allowed, certificate, edges_and_count, hear
from tiga.codegen.device_hopper_pruned import left_out, row_tops, say
"""
# Before a tile: no kept tile waits for its values; one does, the first after one that was skipped; or a later one of a
# row of kept tiles, whose values are there.
STATES = {"NONE": 0, "FRESH": 1, "STEADY": 2}
# The published rule in base 2; of owners without an edge in the tile there is nothing to keep.
_BEYOND = "(({gap} > limit0) | ({top} == float('-inf'))).to(tl.int32)"


class PrunedHopperEmitter(HopperEmitter):
    plan: PrunedHopperPlan
    head = HEAD + MORE
    carried = ("stage", "phase", "slot", "slot_phase")
    place = (*carried, "own_stage", "own_phase")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.plan.block_m == TOGETHER and self.plan.stages >= 3
        self.pruned = self.work.folds[0]
        assert self.pruned.field is not None
        self.values: Input = self.pruned.field
        self.keys = next(x for x in self.far if x != self.values)
        self.mass = not self.by_peak(self.pruned)

    # Memory.

    def more_numbers(self) -> dict[str, int]:
        return {"KEPT": self.plan.kept, "AHEAD": self.plan.stages - 1, **STATES}

    def shared_memory(self) -> dict[str, str]:
        found = super().shared_memory()
        n = f"{self.at(self.values)}_s"
        found[n] = found[n].replace("[STAGES,", "[KEPT,")
        words = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
        found["said"] = f"gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CONSUMERS], {words})"
        return found

    def barriers(self) -> dict[str, tuple[str, str]]:
        found = super().barriers()
        for end in ("full", "empty"):
            n = f"{self.at(self.values)}_{end}"
            found[n] = ("KEPT", found[n][1])
        return found

    def read_parameters(self) -> None:
        super().read_parameters()
        for k, _ in enumerate(self.work.maps):
            self.parameter(f"map{k}", "output", "map", k)

    def mask_of_tile(self) -> list[str]:
        self.masked_rows()
        self.put(1, "at = tile_at(step, steps, all_steps, begin, next_begin, inner_begin, BLOCK_N)")
        self.put(1, "return edges_and_count(x, at, row_start, row_stop, instead, COLS)")
        return self.body()

    # The producer.

    def bring_tiles(self) -> None:
        """Keys some tiles ahead of values: a tile is heard of while the scores of the next ones are multiplied."""
        put = lambda text: self.put(2, text)
        n, v = self.at(self.keys), self.at(self.values)
        at = "tile_at({}, steps, all_steps, begin, next_begin, inner_begin, BLOCK_N)"
        if not self.mass:
            self.limit()
            for w in range(self.plan.consumers):
                put(f"highest{w} = float('-inf')")
        put("kept, behind = 1, 0")
        put("for step in range(0, all_tiles + AHEAD):")
        put("    if step < all_tiles:")
        put(f"        at = {at.format('step')}")
        put(f"        mbarrier.wait({n}_empty.index(stage), phase ^ 1)")
        put(f"        mbarrier.expect({n}_full.index(stage), BLOCK_N * {2 * self.widths[self.keys.vector]})")
        put(f"        {self.copied(self.keys, 'at', f'{n}_full.index(stage)', 'stage')}")
        put("        stage, phase = following(stage, phase, STAGES)")
        put("    tile = step - AHEAD")
        put("    if tile >= 0:")
        put("        if behind > 0:")
        self.hear_of_tile(5)
        put(f"        mbarrier.wait({v}_empty.index(slot), slot_phase ^ 1)")
        put("        behind = kept")
        put("        if kept == 0:")
        self.hear_of_tile(5)
        put("        if kept > 0:")
        put(f"            at = {at.format('tile')}")
        put(f"            mbarrier.expect({v}_full.index(slot), BLOCK_N * {2 * self.widths[self.values.vector]})")
        put(f"            {self.copied(self.values, 'at', f'{v}_full.index(slot)', 'slot')}")
        put("        else:")
        put(f"            mbarrier.arrive({v}_full.index(slot), count=1)")
        put("        slot, slot_phase = following(slot, slot_phase, KEPT)")
        put("if behind > 0:")
        put("    ear, ear_phase = following(ear, ear_phase, STAGES)")

    def hear_of_tile(self, depth: int) -> None:
        """What the warpgroups told of the next tile, before they gave the place of its keys back."""
        put = lambda text: self.put(depth, text)
        put(f"mbarrier.wait({self.at(self.keys)}_empty.index(ear), ear_phase)")
        put("kept = 0")
        for w in range(self.plan.consumers):
            put(f"top = hear(said, ear, {w})")
            if self.mass:
                put("kept += (top > 0).to(tl.int32)")
                continue
            put(f"kept += 1 - {_BEYOND.format(gap=f'highest{w} - top', top='top')}")
            put(f"highest{w} = tl.where(top > highest{w}, top, highest{w})")
        put("kept = tl.where(kept > 0, 1, 0)")
        put("ear, ear_phase = following(ear, ear_phase, STAGES)")

    def limit(self) -> None:
        """What tiles are judged by, where no line of the program has read it."""
        ref = self.axes.same(self.pruned.line.args[2])
        x = next((x for x in self.work.inputs if x.ref == ref), None)
        if x is None:  # a number that the program has written
            self.put(2, f"limit0 = -LOG2E * {self.nodes.text(ref, 'f32')}")
            return
        n = self.at(x)
        if ref in self.p.scalars:
            self.put(2, f"limit0 = -LOG2E * tl.cast({n}, tl.float32)")
            return
        heads = [f" + h{k}.to(tl.int64) * {n}_h{k}" for k, a in enumerate(self.work.axes) if a in x.heads]
        self.put(2, f"limit0 = -LOG2E * tl.load({n}{''.join(heads)}).to(tl.float32)")

    def producer(self) -> list[str]:
        self.put(1, "ear, ear_phase = 0, 0")
        return super().producer()

    # The consumers.

    def visit_first(self) -> None:
        """The first tile, which is kept."""
        self.depth = 1
        self.put(1, "skipped0 = 0")
        self.put(1, "visited0 = 0")
        self.put(1, "some_rows = tl.cast(own_first + WG * 64 < own_end, tl.int32)")
        for n, o in enumerate(self.work.maps):
            tiles = f"({self.head_of(o.dims)}) * tl.cdiv(num_own, 64) + own_first // 64 + WG"
            self.put(1, f"at_map{n} = ({tiles}).to(tl.int64) * tl.cdiv(num_other, BLOCK_N)")
        self.tile_after("nothing")
        self.put(1, "state0 = STEADY")

    def visit_rest(self) -> None:
        self.put(1, "for step in range(1, all_tiles):")
        self.put(2, "stage, phase = following(stage, phase, STAGES)")
        for head, state in (("if state0 == STEADY:", "steady"), ("elif state0 == FRESH:", "fresh"), ("else:", "none")):
            self.put(2, head)
            self.depth = 3
            self.tile_after(state)

    def tile_after(self, state: str) -> None:
        put = lambda text: self.put(self.depth, text)
        self.state, self.first, self.waited = state, state == "nothing", set[str]()
        self.edges = Values(self.axes, put, self.short, self.nodes)
        if state == "steady":
            self.unpack()
        own, far = self.ends[self.products[0]]
        self.arrived(far)
        a, b = f"{self.at(own)}_s.index(near)", f"{self.at(far)}_s.index(stage).permute((1, 0))"
        put(f"t0 = warpgroup_mma({a}, {b}, zero, use_acc=False, is_async=True)")
        self.flying.append("t0")
        if state == "steady":
            self.begin_kept()
        self.lines_of_tile()

    def begin_kept(self) -> None:
        """The products of the kept tile's weights and values."""
        self.put(self.depth, f"mbarrier.wait({self.at(self.values)}_full.index(slot), slot_phase)")
        self.add_all("slot")

    def end_kept(self) -> None:
        self.put(self.depth, "mbarrier.wait(own_full.index(near), own_phase)")  # ends a block of instructions
        self.wait_for_sums("slot")
        self.put(self.depth, "slot, slot_phase = following(slot, slot_phase, KEPT)")
        self.put(self.depth, f"packed0 = packed(weight0, {self.short_dtype()})")

    def pass_over(self) -> None:
        """The place of values that were skipped."""
        v = self.at(self.values)
        self.put(self.depth, f"mbarrier.wait({v}_full.index(slot), slot_phase)")
        self.put(self.depth, f"mbarrier.arrive({v}_empty.index(slot), count=1)")
        self.put(self.depth, "slot, slot_phase = following(slot, slot_phase, KEPT)")

    def free(self, x: Input, slot: str) -> None:
        """The place of keys is given back once all is told of their tile: who waits for one has heard the other."""
        if x != self.keys:
            super().free(x, slot)

    def fold(self, k: int, f: Fold) -> None:
        """Scores are judged in base 2, as weights are made of them."""
        put = lambda text: self.put(self.depth, text)
        score, factor = self.scaled(f.line.args[0]) or (self.pair(f.line.args[0], "f32"), "")
        by = "by0" if factor else "LOG2E"
        if factor and self.first:
            put(f"by0 = not_zero({factor} * LOG2E)")
        put(f"score0 = {score}")
        put(f"count0 = tl.full([64], {math.log2(self.plan.block_n)} + SLACK, tl.float32, layout=ROWS)")
        put("some0 = some_rows")
        step = "0" if self.first else "step"
        instead = f"tl.where({by} > 0, float('-inf'), float('inf'))" if factor else "float('-inf')"
        put(f"if {step} < {'1' if self.first else 'all_steps'}:")
        told = f"WG, own_stage, {step}, score0, {instead}, {self.call('masked')}"
        put(f"    score0, count0, some0 = masked({told})")
        put(f"tops0 = tl.where(live_own, row_tops(score0, {by}), float('-inf'))")
        if self.mass and not self.first:
            limit = self.edges.text(f.line.args[2], "f32", "m")
            put("left0, rest_left0 = left_out(exponent0, rest0, tops0, count0)")
            put(f"against0 = allowed(left0, rest_left0, peak0, total0, {limit}, count0, live_own)")
        getattr(self, f"weigh_{self.state}")(by)

    def weigh_nothing(self, by: str) -> None:
        """The first tile, which is kept."""
        self.tell()
        self.hear()
        self.weights(by)
        self.put(self.depth, f"packed0 = packed(weight0, {self.short_dtype()})")

    def weigh_none(self, by: str) -> None:
        put = lambda text: self.put(self.depth, text)
        self.tell()
        self.hear()
        put("if skip0 == 0:")
        self.depth += 1
        self.weights(by)
        put(f"packed0 = packed(weight0, {self.short_dtype()})")
        self.depth -= 1
        put("else:")
        put(f"    exponent0, rest0 = {self.left()}")
        put("state0 = tl.where(skip0 > 0, NONE, FRESH)")
        self.pass_over()

    def weigh_fresh(self, by: str) -> None:
        """The values were asked for just now: the verdict on this tile comes first."""
        put = lambda text: self.put(self.depth, text)
        self.tell()
        self.hear()
        self.unpack()
        self.begin_kept()
        put("weight0 = score0")
        put("if skip0 == 0:")
        self.depth += 1
        self.weights(by)
        self.depth -= 1
        put("else:")
        put(f"    exponent0, rest0 = {self.left()}")
        self.end_kept()
        put("state0 = tl.where(skip0 > 0, NONE, STEADY)")

    def weigh_steady(self, by: str) -> None:
        """Weights in any case, while the products run: the verdict has the time to get around."""
        put = lambda text: self.put(self.depth, text)
        put("last_peak0, last_total0 = peak0, total0")
        self.weights(by)
        self.tell()
        self.end_kept()
        self.hear()
        put("if skip0 > 0:")
        put(f"    exponent0, rest0 = {self.left()}")
        put("    peak0, total0 = last_peak0, last_total0")
        put("state0 = tl.where(skip0 > 0, NONE, STEADY)")

    def tell(self) -> None:
        """All that a tile is judged by, to all who judge; with it the place of its keys is given back."""
        word = "tops0"
        if self.mass:
            word = "tl.full([64], 1.0, tl.float32, layout=ROWS)" if self.first else "tl.where(against0, 0.0, 1.0)"
        self.put(self.depth, f"say(said, stage, WG, {word})")
        super().free(self.keys, "stage")

    def hear(self) -> None:
        """skip0: of any tile but the first, which is kept."""
        put = lambda text: self.put(self.depth, text)
        put("top0 = hear(said, stage, WG)")
        if self.mass:
            put(f"skip0 = {'0' if self.first else '(top0 == 0).to(tl.int32)'}")
        elif self.first:
            put("gap0, skip0 = float('-inf'), 0")
            put("highest0 = tl.where(top0 == top0, top0, float('-inf'))")
        else:
            put("gap0 = highest0 - top0")
            put(f"skip0 = {_BEYOND.format(gap='gap0', top='top0')}")
            put("highest0 = tl.where(top0 > highest0, top0, highest0)")
        put("visited0 += some0")
        put("skipped0 += some0 * skip0")
        self.note_tile()

    def left(self) -> str:
        return "left0, rest_left0" if self.mass else "left_out(exponent0, rest0, tops0, count0)"

    def note_tile(self) -> None:
        """Stores what is asked of the tile, unless it holds no edge of these owners."""
        if not self.work.maps:
            return
        words = [f"word(told, own_stage * PLACE_WORDS + {REACH.index(name)})" for name in TILES]
        self.put(self.depth, f"at = tile_at({'0' if self.first else 'step'}, {', '.join(words)}, BLOCK_N)")
        gap = "gap0 / LOG2E"
        values = {KEPT: "tl.cast(1 - skip0, tl.uint8)", GAPS: f"tl.where(gap0 == gap0, {gap}, float('-inf'))"}
        for n, o in enumerate(self.work.maps):
            for which, value in values.items():
                if o.ref == self.pruned.line.outs[which]:
                    self.put(self.depth, "if some0 > 0:")
                    self.put(self.depth, f"    tl.store(map{n} + at_map{n} + at // BLOCK_N, {value})")

    def weights(self, by: str) -> None:
        put = lambda text: self.put(self.depth, text)
        put("higher0 = tl.maximum(peak0, tops0)")
        put("safe0 = tl.where(higher0 == float('-inf'), 0.0, higher0)")
        put(f"weight0 = tl.exp2(score0 * {by} - safe0[:, None])")
        put("keep0 = tl.exp2(peak0 - safe0)")
        put("peak0 = higher0")
        put("total0 = total0 * keep0 + tl.sum(weight0, 1)")

    def last_sums(self) -> None:
        put = lambda text: self.put(1, text)
        put(f"mbarrier.wait({self.at(self.values)}_full.index(slot), slot_phase)")
        put("if state0 != NONE:")
        self.depth = 2
        self.unpack()
        self.add_all("slot")
        put("    sum0 = warpgroup_mma_wait(0, [sum0])")
        self.flying.clear()
        self.depth = 1
        self.pass_over()
        put("stage, phase = following(stage, phase, STAGES)")

    def start(self, depth: int, only: int | None = None) -> None:
        super().start(depth, only)
        self.put(depth, "exponent0 = tl.full([64], NOTHING, tl.float32, layout=ROWS)")
        self.put(depth, "rest0 = tl.full([64], 0.0, tl.float32, layout=ROWS)")

    def own_values(self) -> None:
        super().own_values()
        if not self.mass:
            self.put(1, f"limit0 = -LOG2E * {self.nodes.text(self.pruned.line.args[2], 'f32')}")

    def result(self, k: int, f: Fold) -> None:
        super().result(k, f)
        outs = f.line.outs
        share = "certificate(exponent0, rest0, peak0, total0)"
        self.nodes.known[outs[CERTIFICATE]] = Value(share, "m", "f32")
        for out, name in ((outs[VISITED], "visited0"), (outs[SKIPPED], "skipped0")):
            text = f"tl.full([64], 0, tl.int32, layout=ROWS) + {name}"
            self.nodes.known[out] = Value(text, "m", "i32")
