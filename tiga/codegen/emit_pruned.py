"""Kernel source of folds that skip tiles: scores are computed, the tile is judged, and weights and values wait for it.

Tiles are judged in one order, whatever the plan: those that hold pairs which are no edges, then tiles of edges only.
Which is which, of a band or packed sequences, goes by some owners together, so that all skeletons agree.
"""

from __future__ import annotations

from tiga.codegen.emit_folds import FoldEmitter
from tiga.codegen.lists_pruned import the_map
from tiga.codegen.tiles import Fold, Input
from tiga.codegen.values import Value
from tiga.prune import TOGETHER

HEAD = "from tiga.codegen.device_pruned import all_allow, certificate, left_out, row_tops, tile_top\n"
CERTIFICATE, VISITED, SKIPPED, KEPT, GAPS = range(2, 7)  # results of a pruned softmax


PROBE = 8  # tiles after which a loop is chosen
ENOUGH = 4  # one in so many skipped is worth a branch that hides no way to memory


class PrunedEmitter(FoldEmitter):
    branches = True  # over what is skipped
    programs = "tl.num_programs(0)"  # how many there are, one a tile of owners and head

    @property
    def more_head(self) -> str:  # type: ignore[override]
        return HEAD if self.work.tile else ""

    def read_parameters(self) -> None:
        super().read_parameters()
        for k, _ in enumerate(self.work.maps):
            self.parameter(f"map{k}", "output", "map", k)
        if self.work.tile:
            self.parameter("EARLY", "EARLY")
        if self.lists():
            self.parameter("tiles", "kept tiles")
            self.parameter("before", "kept before")

    def rows_in_one_order(self) -> tuple[str, str]:
        """The first and the last of the owners for which a tile must hold edges only to be visited without a mask."""
        if self.work.tile is None or self.work.tile[0] >= TOGETHER:
            return "first_row", "last_row"
        place = "tile" if self.span == "blocks" else "slot"
        self.put(1, f"first_together = first_row - {place} % {TOGETHER // self.work.tile[0]} * BLOCK_M")
        return "first_together", f"(tl.minimum(first_together + {TOGETHER}, own_end) - 1)"

    def lists(self) -> bool:
        """Whether tiles of edges only are visited by lists of those that were kept."""
        return self.span in ("band", "rows1") and the_map(self.work) is not None

    def late(self) -> set[Input]:
        """The vectors that wait until a tile is judged: those that no score and no other fold reads."""
        fields = {f.field for f in self.work.folds if f.pruned and f.field is not None}
        others = {f.field for f in self.work.folds if not f.pruned}
        inner = {ref for pair in self.work.inners.values() for ref in pair}
        return {x for x in fields - others if x.ref not in inner}

    def bring(self, x: Input) -> None:
        """Loads a field of the other end, unless it waits until the tile is judged.

        A plan may ask for it early: then the next tile's is on its way while this one is worked on.
        """
        if self.work.tile is None or not self.branches or x not in self.late():
            self.load_far(x)
        elif self.how == "full":
            self.ahead(self.depth, x, "next", "other + BLOCK_N")

    def ahead(self, depth: int, x: Input, suffix: str, rows: str) -> None:
        n, d = self.names[x.ref, x.mode], self.width(x.vector)
        self.put(depth, "if EARLY:")
        self.put(depth, f"    rows = {rows}")
        load = f"load_rows({n}, rows, 0, {n}_row, {n}_d, rows < num_other, {d}, BLOCK_{d})"
        self.put(depth, f"    {n}_{suffix} = {load}")

    def loop(self, how: str, only: int | None = None) -> None:
        """Tiles of edges only: some in a loop that branches over what is skipped, and all others if enough was.

        Else the others in a loop without a branch, whose values arrive in time and weigh 0 where a tile is skipped.
        """
        self.branches = True
        if how != "full" or self.work.tile is None:
            self.visit(how, only, 2 if how == "careful" else 1)
            return
        put = lambda text: self.put(1, text)
        put("low = inner_begin")
        put(f"high = tl.minimum(inner_begin + {PROBE} * BLOCK_N, inner_end)")
        put(f"{'for _ in tl.range(0, 2, num_stages=1):':<72}# some tiles, then all if enough of those were skipped")
        waiting = sorted(self.late(), key=lambda x: x.ref)
        for x in waiting:
            self.ahead(2, x, "v", "low + tl.arange(0, BLOCK_N)")
        self.visit("full", None, 2, "low", "high")
        for x in waiting:
            n = self.names[x.ref, x.mode]
            self.put(3, "if EARLY:")
            self.put(3, f"    {n}_v = {n}_next")
        k = next(k for k, f in enumerate(self.work.folds) if f.pruned)
        put("    low = high")
        if any([f.pruned and f.field is None for f in self.work.folds]):
            put("    high = inner_end")  # a number times a weight of 0 is not looked at again: never without a branch
            return
        put(f"    high = tl.where(skipped{k} * {ENOUGH} > visited{k}, inner_end, low)")
        self.branches = False
        self.visit("full", None, 1, "low", "inner_end")

    def visit(self, how: str, only: int | None, depth: int, low: str = "", high: str = "") -> None:
        raise NotImplementedError

    def load_far(self, x: Input) -> None:
        raise NotImplementedError

    # States.

    def start(self, depth: int, only: int | None = None) -> None:
        super().start(depth, only)
        for k, f in enumerate(self.work.folds):
            if f.pruned and only in (None, k):
                self.put(
                    depth, f"omitted{k} = tl.full([BLOCK_M], float('-inf'), tl.float32)  # log2 of what is left out"
                )
                self.put(depth, f"visited{k} = tl.full((), 0, tl.int32)")
                self.put(depth, f"skipped{k} = tl.full((), 0, tl.int32)")
                if self.by_peak(f):
                    self.put(depth, f"highest{k} = tl.full((), float('-inf'), tl.float32)")

    def by_peak(self, f: Fold) -> bool:
        return f.line.attrs[1] == "softmax_by_peak"

    def peak(self, k: int) -> str:
        return f"peak{k}" if self.short else f"peak{k} * LOG2E"

    # A tile.

    def enter(self) -> None:
        """Whether the tile was kept in the forward; where nothing is to be done otherwise, all else waits for it."""
        maps = [self.names[x.ref, x.mode] for x in self.work.inputs if x.mode == "map"]
        if not maps:
            return
        assert self.work.within is not None
        tiles = [f"own_first // {self.work.within[0]}", f"at // {self.work.within[1]}"]
        q, k = tiles if self.work.owner == "dst" else tiles[::-1]
        if self.how == "full" and self.lists():
            self.put(self.depth, f"{maps[0]}_kept = at >= 0")
            return
        for n in maps:
            at = f"{n} + tl.cast({q}, tl.int64) * {n}_q + tl.cast({k}, tl.int64) * {n}_k"
            self.put(self.depth, f"{n}_kept = tl.load({at}, mask=({q} < {n}_qs) & ({k} < {n}_ks), other=0) != 0")
        if self.work.skips and not (self.how == "full" and self.lists()):
            self.put(self.depth, f"if {' | '.join([f'{n}_kept' for n in maps])}:")
            self.depth += 1

    def fold(self, k: int, f: Fold) -> None:
        if not f.pruned:
            super().fold(k, f)
            return
        put = lambda text: self.put(self.depth, text)
        self.scores(k, f)
        put(f"tops{k} = row_tops(score{k}, live_own)")
        count = "BLOCK_N" if self.how == "full" else f"count{k}"
        if self.how != "full":
            put(f"{count} = tl.sum(live.to(tl.float32), 1)")
        else:
            count = f"tl.full([BLOCK_M], {count}, tl.float32)"
        self.judge(k, f, count)
        self.note(k, f)
        put(f"if skip{k}:")
        if self.by_peak(f):
            put(f"    bound{k} = left_out(omitted{k}, tops{k}, {count})")
        put(f"    omitted{k} = bound{k}")
        if not self.branches:
            self.weigh(k, f, f"tl.where(skip{k}, float('-inf'), tops{k})", "less")
            return
        put("else:")
        self.depth += 1
        if f.field in self.late():
            full = self.how == "full"
            if full:
                put("if not EARLY:")
            self.depth += full
            self.load_far(f.field)
            self.depth -= full
        self.weigh(k, f, f"tops{k}")
        self.depth -= 1

    def mask_of_both(self) -> None:
        """Of two intervals a row: a tile that both reach is judged once, with the first."""
        put = lambda text: self.put(self.depth, text)
        inside = [
            f"(other[None, :] >= row_start{k}[:, None]) & (other[None, :] < row_stop{k}[:, None])" for k in ("", "2")
        ]
        put(f"live = ({inside[0]}) | ({inside[1]})")
        put("live = live & ((step < steps) | (at < begin) | (at >= end))")

    def judge(self, k: int, f: Fold, count: str) -> None:
        """skip: by the published rule, whose running maximum is of this tile's owners; or by every row's mass."""
        put = lambda text: self.put(self.depth, text)
        limit = self.edges.text(f.line.args[2], "f32", "m")
        if self.by_peak(f):
            put(f"top{k} = tile_top(tops{k})")
            put(f"gap{k} = highest{k} - top{k}")
            put(f"skip{k} = gap{k} > -({limit})")
            put(f"highest{k} = tl.where(top{k} > highest{k}, top{k}, highest{k})")
        else:
            put(f"bound{k} = left_out(omitted{k}, tops{k}, {count})")
            put(f"skip{k} = all_allow(bound{k}, {self.peak(k)}, total{k}, {limit}, {count}, live_own)")

    def note(self, k: int, f: Fold) -> None:
        """Counts the tile, unless it holds no edge at all, and stores what is asked of it."""
        put = lambda text: self.put(self.depth, text)
        some = "1"
        if self.how != "full" and self.span not in ("band", "blocks"):
            some = f"some{k}"
            put(f"{some} = (tl.max(count{k}, 0) > 0).to(tl.int32)")
        put(f"visited{k} += {some}")
        put(f"skipped{k} += {some} * skip{k}.to(tl.int32)")
        values = {KEPT: f"(skip{k} == 0).to(tl.uint8)", GAPS: f"tl.where(gap{k} == gap{k}, gap{k}, float('-inf'))"}
        for n, o in enumerate(self.work.maps):
            for which, value in values.items():
                if o.ref == f.line.outs[which]:
                    self.put(self.depth, f"tl.store(map{n} + {self.tile_at(o.dims)}, {value}, mask={some} > 0)")

    def tile_at(self, dims: tuple) -> str:
        """Where a map holds this tile: [*heads, tiles of owners, tiles of others], contiguous."""
        row = f"({self.head_of(dims)}) * ({self.programs} // num_heads) + slot"
        return f"({row}) * tl.cdiv(num_other, BLOCK_N) + at // BLOCK_N"

    def head_of(self, dims: tuple) -> str:
        """The number of this program's head among those of a map."""
        at = "0"
        for a in dims[:-2]:
            if a != 1:
                j = self.work.axes.index(a)
                at = f"({at}) * H{j} + h{j}" if at != "0" else f"h{j}"
        return at

    def size_of_full(self) -> str:
        """Others of a tile without a mask: with lists, of the map's."""
        return str(self.work.within[1]) if self.work.within is not None and self.lists() else "BLOCK_N"

    def find_lists(self) -> None:
        """Where this program's list is, and which of its entries are tiles without a mask."""
        x = the_map(self.work)
        if x is None or not self.lists():
            return
        assert self.work.within is not None
        own_tile, other_tile = self.work.within
        n = self.names[x.ref, x.mode]
        own, other = (f"{n}_qs", f"{n}_ks") if self.work.owner == "dst" else (f"{n}_ks", f"{n}_qs")
        put = lambda text: self.put(1, text)
        put(f"list = tl.cast({self.head_of(x.dims)}, tl.int64) * {own} + own_first // {own_tile}")
        put(f"tiles += list * {other}")
        put(f"before += list * ({other} + 1)")
        put(f"known = own_first // {own_tile} < {own}")
        for name in ("begin", "end"):
            at = f"tl.minimum(inner_{name} // {other_tile}, {other})"
            put(f"list_{name} = tl.load(before + {at}, mask=known, other=0)")

    def full_loop(self, depth: int) -> None:
        """The head of the loop over tiles of edges only, of those that were kept."""
        assert self.work.within is not None
        size = self.work.within[1]
        comment = "# tiles of edges only that were kept"
        each = f"({size} // BLOCK_N)"
        head = f"for step in tl.range(list_begin * {each}, list_end * {each}):"
        self.put(depth, f"{head:<72}{comment}")
        self.put(depth + 1, f"at = tl.load(tiles + step // {each}) * {size} + step % {each} * BLOCK_N")

    def loop_again(self, k: int) -> None:
        """All tiles in the same order as before, with care."""
        put = lambda text: self.put(2, text)
        full = self.span in ("band", "blocks", "rows1")
        steps = " + tl.cdiv(tl.maximum(inner_end - inner_begin, 0), BLOCK_N)" if full else ""
        put(f"for step in tl.range(0, all_steps{steps}, num_stages=1):")
        put("    at = tl.where(step < steps, begin + step * BLOCK_N, next_begin + (step - steps) * BLOCK_N)")
        if full:
            put("    at = tl.where(step < all_steps, at, inner_begin + (step - all_steps) * BLOCK_N)")
        self.depth, self.how, self.block, self.branches = 3, "careful", "BLOCK_N", True
        self.tile(k)

    def tile(self, only: int | None) -> None:
        raise NotImplementedError

    # Results.

    def result(self, k: int, f: Fold) -> None:
        super().result(k, f)
        if f.pruned:
            outs = f.line.outs
            text = f"certificate(omitted{k}, {self.peak(k)}, total{k})"
            self.nodes.known[outs[CERTIFICATE]] = Value(text, "m", "f32")
            for out, name in ((outs[VISITED], "visited"), (outs[SKIPPED], "skipped")):
                self.nodes.known[out] = Value(f"{name}{k} + tl.zeros([BLOCK_M], tl.int32)", "m", "i32")
