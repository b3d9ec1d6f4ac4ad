"""Gluon source of works that skip tiles, for Hopper: scores of all tiles, weights and values of those that are kept.

While a tile is judged the scores of the next one are multiplied. Each warp tells its largest number, all warpgroups and
the producer hear all of them and judge alike: the producer then brings the values of a tile that is kept. Its weights
meet them when the next kept tile has its weights computed. There are two sets of scores, a and b, in turn, and so an
odd number of tiles: the first is always kept, and one that holds no edge is added to an even number.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from tiga.codegen.emit_hopper import HEAD, HopperEmitter
from tiga.codegen.emit_pruned import CERTIFICATE, GAPS, KEPT, SKIPPED, VISITED
from tiga.codegen.plan_hopper import PrunedHopperPlan
from tiga.codegen.tiles import Fold, Input
from tiga.codegen.values import Value, Values
from tiga.program import Line

MORE = """from tiga.codegen.device_hopper_pruned import NOTHING, SLACK, allowed, certificate, edges_and_count, hear
from tiga.codegen.device_hopper_pruned import left_out, row_tops, say, tile_from
"""
# `careful` tiles with a mask, and an odd number of all; `some`: those that hold edges.
_MORE_TILES = """some = all_steps + (next_begin - inner_begin) // BLOCK_N
careful = all_steps + 1 - (some & 1)
all_tiles = some + careful - all_steps
"""
_AT = "tile_from({}, steps, all_steps, careful, begin, next_begin, inner_begin, num_other, BLOCK_N)"
_OTHER = {"a": "b", "b": "a"}


class PrunedHopperEmitter(HopperEmitter):
    plan: PrunedHopperPlan
    head = HEAD + MORE
    carried = ("stage", "phase", "slot", "slot_phase")
    place = (*carried, "own_stage", "own_phase")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.k = 0
        self.pruned = self.work.folds[0]
        assert self.pruned.field is not None
        self.values: Input = self.pruned.field
        self.keys = next(x for x in self.far if x != self.values)
        self.mass = not self.by_peak(self.pruned)
        self.early = self.plan.early and not self.mass  # which row may lose how much is known later

    # Memory.

    def more_numbers(self) -> dict[str, int]:
        return {"KEPT": self.plan.kept}

    def shared_memory(self) -> dict[str, str]:
        found = super().shared_memory()
        n = f"{self.at(self.values)}_s"
        found[n] = found[n].replace("[STAGES,", "[KEPT,")
        for of in "ab":  # apart, so that no warpgroup waits for its own reading of one before it writes the other
            found[f"said_{of}"] = "gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CONSUMERS], WORDS)"
        return found

    def constants(self) -> str:
        return super().constants() + "WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))\n"

    def barriers(self) -> dict[str, tuple[str, str]]:
        """What a tile is judged by is told when its keys are read and the values of all but the last kept are added:
        no other word is needed for their memory."""
        found = {"own_full": ("OWNS * CONSUMERS", "1"), "own_empty": ("OWNS * CONSUMERS", "1")}
        found[f"{self.at(self.keys)}_full"] = ("STAGES", "1")
        found[f"{self.at(self.values)}_full"] = ("KEPT", "1")
        return found | {"said": ("STAGES", "CONSUMERS")}

    def read_parameters(self) -> None:
        super().read_parameters()
        for k, _ in enumerate(self.work.maps):
            self.parameter(f"map{k}", "output", "map", k)

    # Where a program is.

    def enter_rows(self) -> None:
        super().enter_rows()
        for text in _MORE_TILES.splitlines():
            self.put(1, text)

    def mask_of_tile(self) -> list[str]:
        self.masked_rows()
        self.put(1, f"at = {_AT.format('step')}")
        self.put(1, "return edges_and_count(x, at, row_start, row_stop, instead, COLS)")
        return self.body()

    # The producer.

    def bring_tiles(self) -> None:
        put = lambda text: self.put(2, text)
        n, v = self.at(self.keys), self.at(self.values)
        for text in _MORE_TILES.splitlines():
            put(text)
        if not self.mass:
            self.limit()
            put("highest = float('-inf')")
        put("for step in range(0, all_tiles + STAGES):")
        put("    if step >= STAGES:")
        put("        tile = step - STAGES")
        put("        mbarrier.wait(said.index(stage), phase ^ 1)")
        put("        if tile & 1:")
        put("            most = hear(said_b, stage)")
        put("        else:")
        put("            most = hear(said_a, stage)")
        self.judge_tile(4)
        put("        skip = skip & (tile > 0)")
        put(f"        at = {_AT.format('tile')}")
        self.note_tile()
        put("        if skip == 0:")
        put(f"            mbarrier.expect({v}_full.index(slot), BLOCK_N * {2 * self.widths[self.values.vector]})")
        put(f"            {self.copied(self.values, 'at', f'{v}_full.index(slot)', 'slot')}")
        put("            slot = tl.where(slot == KEPT - 1, 0, slot + 1)")
        put("    if step < all_tiles:")
        put(f"        at = {_AT.format('step')}")
        put(f"        mbarrier.expect({n}_full.index(stage), BLOCK_N * {2 * self.widths[self.keys.vector]})")
        put(f"        {self.copied(self.keys, 'at', f'{n}_full.index(stage)', 'stage')}")
        put("    stage, phase = following(stage, phase, STAGES)")
        put("phase = phase ^ 1")  # once round more than there are tiles

    def judge_tile(self, depth: int) -> None:
        """skip: of a tile whose word was heard."""
        if self.mass:
            self.put(depth, "skip = most == 0")
            return
        self.put(depth, "gap = highest - most")
        self.put(depth, "skip = gap > -limit")
        self.put(depth, "highest = tl.where(most > highest, most, highest)")

    def note_tile(self) -> None:
        """What is asked of the tile, unless it is the one that holds no edge."""
        values = {KEPT: "tl.where(skip, 0, 1).to(tl.uint8)", GAPS: "tl.where(gap == gap, gap, float('-inf'))"}
        for n, o in enumerate(self.work.maps):
            for which, value in values.items():
                if o.ref == self.pruned.line.outs[which]:
                    tiles = f"({self.head_of(o.dims)}) * tl.cdiv(num_own, BLOCK_M) + own_first // BLOCK_M"
                    place = f"(({tiles}).to(tl.int64) * tl.cdiv(num_other, BLOCK_N) + at // BLOCK_N)"
                    self.put(4, "if at < num_other:")
                    self.put(5, f"tl.store(map{n} + {place}, {value})")

    def limit(self) -> None:
        """What tiles are judged by, where no line of the program has read it."""
        ref = self.axes.same(self.pruned.line.args[2])
        x = next((x for x in self.work.inputs if x.ref == ref), None)
        if x is None:  # a number that the program has written
            self.put(2, f"limit = {self.nodes.text(ref, 'f32')}")
            return
        n = self.at(x)
        if ref in self.p.scalars:
            self.put(2, f"limit = tl.cast({n}, tl.float32)")
            return
        heads = [f" + h{k}.to(tl.int64) * {n}_h{k}" for k, a in enumerate(self.work.axes) if a in x.heads]
        self.put(2, f"limit = tl.load({n}{''.join(heads)}).to(tl.float32)")

    # The consumers.

    def visit_first(self) -> None:
        put = lambda text: self.put(1, text)
        self.depth, self.how, self.block = 1, "full", "BLOCK_N"
        n = self.at(self.keys)
        self.first = True
        put(f"mbarrier.wait({n}_full.index(stage), phase)")
        self.multiply("a", "stage")
        put("stage_a, phase_a = stage, phase")
        self.judged("a", "0", "1")
        self.weigh_kept("a", first=True)
        k = self.k
        if not self.mass:
            self.hear("highest", "a", "a")
            put("highest = tl.where(highest == highest, highest, float('-inf'))")
            put(f"held{k} = tl.full([64], float('-inf'), tl.float32, layout=ROWS)")
            put(f"held_count{k} = held{k}")
        put(f"skipped{k} = 0")
        put("none_there = tl.where(careful > all_steps, all_steps, -1)")
        self.first = False
        self.judged("b", "1", "2")

    def visit_rest(self) -> None:
        self.put(1, "for step in range(1, all_tiles, 2):")
        self.depth = 2
        for now, then in (("b", "step"), ("a", "step + 1")):
            judge = partial(self.judged, _OTHER[now], f"{then} + 1", f"{then} + 2")
            if self.early:
                self.put(2, f"stage_now, phase_now = stage_{now}, phase_{now}")
                judge()
                self.weigh_heard(now, then, "now")
            else:
                self.weigh_heard(now, then, now)
                judge()
        if self.early:
            self.depth = 1
            self.leave("held")

    def multiply(self, of: str, stage: str) -> None:
        own = self.near[0]
        a, b = f"{self.at(own)}_s.index(near)", f"{self.at(self.keys)}_s.index({stage}).permute((1, 0))"
        self.put(self.depth, f"fly_{of} = warpgroup_mma({a}, {b}, zero, use_acc=False, is_async=True)")

    def judged(self, of: str, step: str, following: str) -> None:
        """Scores of tile `step` have landed: those of the following one take off, and all is told of these."""
        put = lambda text: self.put(self.depth, text)
        self.of, self.step, self.next = of, step, following
        self.edges = Values(self.axes, put, self.short, self.nodes)
        self.lines_of_tile()

    def inner(self, line: Line) -> None:
        put = lambda text: self.put(self.depth, text)
        of, other, n = self.of, _OTHER[self.of], self.at(self.keys)
        put(f"more = {self.next} < all_tiles")
        put(f"stage_{other}, phase_{other} = following(stage_{of}, phase_{of}, STAGES)")
        for word in ("stage", "phase"):
            put(f"{word}_{other} = tl.where(more, {word}_{other}, {word}_{of})")
        put(f"mbarrier.wait({n}_full.index(stage_{other}), phase_{other}, pred=more)")
        self.edges.set(line.outs[0], f"warpgroup_mma_wait(0, [fly_{of}])", "mn", "f32", line)
        self.multiply(other, f"stage_{other}")  # of none, if there is none: nobody reads it
        if not self.first and not self.mass:
            self.leave("held")

    def fold(self, k: int, f: Fold) -> None:
        put = lambda text: self.put(self.depth, text)
        of, self.k = self.of, k
        score, factor = self.scaled(f.line.args[0]) or (self.pair(f.line.args[0], "f32"), "")
        if factor:
            if self.first:
                put(f"by{k} = not_zero({factor})")
            score = f"({score}) * by{k}"  # in registers of its own: those of the product are soon another's
        put(f"score_{of} = {score}")
        put(f"count_{of} = tl.full([64], {math.log2(self.plan.block_n)} + SLACK, tl.float32, layout=ROWS)")
        put(f"if {self.step} < careful:")
        told = f"WG, own_stage, {self.step}, score_{of}, float('-inf'), {self.call('masked')}"
        put(f"    score_{of}, count_{of} = masked({told})")
        put(f"tops_{of} = tl.where(live_own, row_tops(score_{of}), float('-inf'))")
        word = f"tops_{of}"
        if self.mass and not self.first:
            self.leave("candidate")
            limit = self.edges.text(f.line.args[2], "f32", "m")
            state = f"candidate{k}, candidate_rest{k}, peak{k}, total{k}, {limit}, count_{of}, live_own"
            put(f"word_{of} = tl.where(allowed({state}), 0.0, 1.0)")
            word = f"word_{of}"
        told = f"say(said_{of}, said, stage_{of}, WG, {word})"
        if of == "a":
            put(told)
        else:  # which there may not be
            put(f"if {self.step} < all_tiles:")
            put(f"    {told}")

    def hear(self, name: str, of: str, at: str) -> None:
        self.put(self.depth, f"mbarrier.wait(said.index(stage_{at}), phase_{at})")
        self.put(self.depth, f"{name} = hear(said_{of}, stage_{at})")

    def leave(self, which: str) -> None:
        """What is left out, with one more tile: that before if it was skipped, or this one should it be."""
        k, put = self.k, lambda text: self.put(self.depth, text)
        if which == "held":
            put(f"exponent{k}, rest{k} = left_out(exponent{k}, rest{k}, held{k}, held_count{k})")
            return
        state = f"exponent{k}, rest{k}, tops_{self.of}, count_{self.of}"
        put(f"candidate{k}, candidate_rest{k} = left_out({state})")

    def weigh_heard(self, of: str, step: str, at: str) -> None:
        k, put = self.k, lambda text: self.put(self.depth, text)
        self.hear("most", of, at)
        self.judge_tile(self.depth)
        put("if skip == 0:")
        self.depth += 1
        self.weigh_kept(of)
        self.depth -= 1
        if self.mass:
            for name in ("exponent", "rest"):
                new = f"candidate{k}" if name == "exponent" else f"candidate_rest{k}"
                put(f"{name}{k} = tl.where(skip, {new}, {name}{k})")
        else:
            put(f"held{k} = tl.where(skip, tops_{of}, float('-inf'))")
            put(f"held_count{k} = count_{of}")
        put(f"skipped{k} += (skip & ({step} != none_there)).to(tl.int32)")

    def weigh_kept(self, of: str, first: bool = False) -> None:
        """The weights of a tile, while those of the kept tile before meet their values."""
        k, put = self.k, lambda text: self.put(self.depth, text)
        v, layout = self.at(self.values), f"O{self.widths[self.values.vector]}"
        if not first:
            self.unpack()
            put(f"sum{k} = sum{k} * over_features(keep{k}, {layout})")
            put(f"mbarrier.wait({v}_full.index(slot), slot_phase)")
            put(f"sum{k} = warpgroup_mma(part{k}, {v}_s.index(slot), sum{k}, is_async=True)")
            if self.plan.begun:
                put("mbarrier.wait(own_empty.index(near), own_phase ^ 1)")
        put(f"higher{k} = tl.maximum(peak{k}, tops_{of} * LOG2E)")
        put(f"safe{k} = tl.where(higher{k} == float('-inf'), 0.0, higher{k})")
        put(f"weight{k} = tl.exp2(score_{of} * LOG2E - safe{k}[:, None])")
        put(f"keep{k} = tl.exp2(peak{k} - safe{k})")
        put(f"peak{k} = higher{k}")
        put(f"total{k} = total{k} * keep{k} + tl.sum(weight{k}, 1)")
        if not first:
            put("mbarrier.wait(own_full.index(near), own_phase)")  # ends a block of instructions
            put(f"sum{k} = warpgroup_mma_wait(0, [sum{k}])")
            put("slot, slot_phase = following(slot, slot_phase, KEPT)")
        put(f"packed{k} = packed(weight{k}, {self.short_dtype()})")

    def last_sums(self) -> None:
        k, put = self.k, lambda text: self.put(1, text)
        v, layout = self.at(self.values), f"O{self.widths[self.values.vector]}"
        self.depth = 1
        put("warpgroup_mma_wait(0, [fly_a])")
        self.unpack()
        put(f"sum{k} = sum{k} * over_features(keep{k}, {layout})")
        put(f"mbarrier.wait({v}_full.index(slot), slot_phase)")
        put(f"sum{k} = warpgroup_mma(part{k}, {v}_s.index(slot), sum{k}, is_async=True)")
        put(f"sum{k} = warpgroup_mma_wait(0, [sum{k}])")
        put("slot, slot_phase = following(slot, slot_phase, KEPT)")
        put("stage, phase = following(stage_b, phase_b, STAGES)")

    def start(self, depth: int, only: int | None = None) -> None:
        super().start(depth, only)
        for k, _ in enumerate(self.work.folds):
            self.put(depth, f"exponent{k} = tl.full([64], NOTHING, tl.float32, layout=ROWS)")
            self.put(depth, f"rest{k} = tl.full([64], 0.0, tl.float32, layout=ROWS)")

    def own_values(self) -> None:
        super().own_values()
        if not self.mass:
            self.put(1, f"limit = {self.nodes.text(self.pruned.line.args[2], 'f32')}")

    def result(self, k: int, f: Fold) -> None:
        super().result(k, f)
        outs = f.line.outs
        share = f"certificate(exponent{k}, rest{k}, peak{k}, total{k})"
        self.nodes.known[outs[CERTIFICATE]] = Value(share, "m", "f32")
        for out, name in ((outs[VISITED], "some"), (outs[SKIPPED], f"skipped{k}")):
            text = f"tl.full([64], 0, tl.int32, layout=ROWS) + {name}"
            self.nodes.known[out] = Value(text, "m", "i32")
