"""Gluon source of the consumers of a work: one tile of owners, from its edges to its results."""

from __future__ import annotations

from typing import Any

from tiga.codegen.emit_tiles import Emitter
from tiga.codegen.hopper import far_numbers, late_vectors, near_vectors, products_of, vectors
from tiga.codegen.plan_hopper import HopperPlan
from tiga.codegen.ranges_hopper import REACH
from tiga.codegen.tiles import Axes, Fold, Input, Work
from tiga.codegen.values import TRITON, Value, Values
from tiga.program import Line
from tiga.types import compute_dtype

TILES = ("steps", "all_steps", "begin", "next_begin", "inner_begin")  # where the others of a tile's number begin
FOUND_AGAIN = ("band", "blocks")  # relations whose tiles are masked by what is found again; of others it takes too long


class RowValues(Values):
    """Node values after the edges: a number a row meets vectors in the layout of their sums."""

    layout = ""

    def text(self, ref: str, dtype: str = "", shape: str = "") -> str:
        if self.value(ref).shape == "m" and shape == "md":
            return f"over_features({super().text(ref, dtype)}, {self.layout})"
        return super().text(ref, dtype, shape)


class ConsumerEmitter(Emitter):
    """Tiles and folds, in the registers and the shared memory of one warpgroup."""

    nodes: RowValues

    def __init__(self, axes: Axes, work: Work, span: str, plan: HopperPlan, widths: dict[Any, int]) -> None:
        super().__init__(axes, work, span)
        self.plan, self.widths = plan, widths
        self.nodes = RowValues(axes, lambda text: self.put(1, text), self.short)
        self.near, self.afterwards = near_vectors(work), late_vectors(work)
        self.far, self.brought = vectors(work, "far"), far_numbers(work)
        self.products = products_of(axes, work)
        self.levels: dict[str, int] = {}
        self.flying: list[str] = []  # matrix products that were begun and not waited for, in order
        self.factors: list[int] = []  # folds whose scores have a factor that is the same for all pairs
        self.summed = [f.field for f in work.folds if f.field is not None]
        self.ends: dict[str, tuple[Input, Input]] = {}  # of a product the vectors, the owners' first
        for ref in self.products:
            pair = [next(x for x in (*self.near, *self.far) if x.ref == r) for r in work.inners[ref]]
            self.ends[ref] = (pair[0], pair[1]) if pair[0].side == "own" else (pair[1], pair[0])

    def at(self, x: Input) -> str:
        return self.names[x.ref, x.mode]

    def width_of(self, axis: Any) -> str:
        """The name of a vector's width, which its tiles may be wider than: the copy engine fills them up with 0."""
        return f"D{list(self.widths).index(axis)}"

    def short_dtype(self) -> str:
        return TRITON[self.far[0].dtype]

    def call(self, name: str) -> str:
        """The arguments of an emitted function as a tuple."""
        raise NotImplementedError

    def finds_again(self) -> bool:
        return self.plan.ahead and self.span in FOUND_AGAIN

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
        self.depth = 1
        self.tile_of("first", "masked")

    def visit_rest(self) -> None:
        """A loop over tiles with a mask, and one over tiles of edges only, which branches nowhere.

        Scores of a factor below 0 have their peaks at the other end: then the first loop takes all tiles.
        """
        signs = " & ".join([f"(by{k} > 0)" for k in self.factors])
        end = f"tl.where({signs}, all_steps, all_tiles)" if signs else "all_steps"
        self.put(1, f"careful = tl.maximum({end}, 1)")
        for steps, what in (("1, careful", "either" if signs else "masked"), ("careful, all_tiles", "edges")):
            self.put(1, f"for step in range({steps}):")
            self.depth = 2
            self.tile_of("next", what)

    def only_edges(self, name: str, instead: str) -> None:
        """What stands for pairs that are no edges, in the tiles that hold such."""
        depth = self.depth
        if self.what == "edges":
            return
        if self.what == "either":
            self.put(depth, "if step < all_steps:")
            depth += 1
        step = "0" if self.first else "step"
        if self.finds_again():
            self.put(depth, f"{name} = masked(WG, own_stage, {step}, {name}, {instead}, {self.call('masked')})")
            return
        words = [f"word(told, own_stage * PLACE_WORDS + {REACH.index(name)})" for name in TILES]
        self.put(depth, f"at = tile_at({step}, {', '.join(words)}, BLOCK_N)")
        self.put(depth, f"{name} = edges_only({name}, at, row_start, row_stop, {instead}, COLS)")

    def tile_of(self, which: str, what: str) -> None:
        """which: the first, or a next one; what: masked, of edges only, or either, which its number says."""
        put = lambda text: self.put(self.depth, text)
        self.first, self.what, self.waited = which == "first", what, set[str]()
        self.edges = Values(self.axes, put, self.short, self.nodes)
        ahead = self.plan.ahead
        if not self.first:
            put("before = stage")
            put("stage, phase = following(stage, phase, STAGES)")
        if ahead and not self.first:
            self.unpack()
        for k, ref in enumerate(self.products):
            own, far = self.ends[ref]
            self.arrived(far)
            if k == 0:
                self.wait_for_turn()
            a, b = f"{self.at(own)}_s.index(near)", f"{self.at(far)}_s.index(stage).permute((1, 0))"
            put(f"t{k} = warpgroup_mma({a}, {b}, zero, use_acc=False, is_async=True)")
            self.flying.append(f"t{k}")
        if ahead and not self.first:
            self.add_all("before")
        self.end_turn()
        self.lines_of_tile()
        if self.brought:
            self.wait_for_numbers()
            put("mbarrier.arrive(numbers_empty.index(stage), count=1)")
        if ahead:
            self.end_ahead()
        else:
            self.wait_for_sums("stage")

    def wait_for_turn(self) -> None:
        """The consumer before has begun its products of this tile; the first one waits for those of the last tile."""
        if self.plan.turns:
            tile = "stage" if self.plan.stages % 2 == 0 else "stage + phase"  # odd or even
            self.put(self.depth, f"mbarrier.wait(turns.index(WG), ({tile} + (1 if WG == 0 else 0)) & 1)")

    def end_turn(self) -> None:
        if self.plan.turns:
            self.put(self.depth, "mbarrier.arrive(turns.index((WG + 1) % CONSUMERS), count=1)")

    def lines_of_tile(self) -> None:
        done: set[str] = set()
        for k, f in enumerate(self.work.folds):
            for ref in sorted(f.lines, key=self.last_product):
                if ref not in done:
                    done.add(ref)
                    self.bring_to_line(self.p.definitions[ref])
                    self.line(self.p.definitions[ref])
            self.number_of(f.line.args[0] if f.reducer == "softmax" else f.weight)
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
        self.wait_for_numbers()
        self.put(self.depth, f"{self.at(x)}_v = {self.at(x)}_s.index(stage).load(COLS)")
        self.edges.known[x.ref] = Value(f"{self.at(x)}_v", "n", compute_dtype(x.dtype))

    def wait_for_numbers(self) -> None:
        if "numbers" not in self.waited:
            self.waited.add("numbers")
            self.put(self.depth, "mbarrier.wait(numbers_full.index(stage), phase)")

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

    def softmax(self, k: int, f: Fold) -> None:
        """A uniform factor of the scores is multiplied in where they are made weights of."""
        score, factor = self.scaled(f.line.args[0]) or (self.pair(f.line.args[0], "f32"), "")
        self.put(self.depth, f"score{k} = {score}")
        if not factor:
            self.only_edges(f"score{k}", "float('-inf')")
            self.weigh(k, f, f"tl.max(score{k}, 1)")
            return
        if self.first:
            self.factors.append(k)
            self.put(self.depth, f"by{k} = not_zero({factor} * LOG2E)")
        self.only_edges(f"score{k}", f"tl.where(by{k} > 0, float('-inf'), float('inf'))")
        top = f"tl.max(score{k}, 1)" if self.what == "edges" else f"furthest(score{k}, by{k})"
        self.weigh(k, f, top, by=f"by{k}")

    def scaled(self, ref: str) -> tuple[str, str] | None:
        """(pairs, factor) of a product of numbers of pairs and a number of all."""
        line = self.p.definitions.get(self.edges.behind(ref))
        if line is None or line.op != "mul" or not self.short:
            return None
        for a, b in (line.args, line.args[::-1]):
            x, y = self.edges.value(a), self.edges.value(b)
            if x.shape == "mn" and x.dtype == "f32" and y.shape == "" and y.dtype in ("f32", ""):
                return x.text, y.text
        return None

    def rescale(self, k: int) -> None:
        """The sum may fly: it is rescaled once it has landed."""

    def add(self, k: int, f: Fold) -> None:
        if f.reducer != "softmax":  # which has made these weights 0
            self.only_edges(f"weight{k}", "0.0")
        if self.plan.ahead:
            return
        self.operand(k, f, f"packed(weight{k}, {self.short_dtype()})")
        self.begin_sum(k, f, "stage")

    def operand(self, k: int, f: Fold, packed: str) -> None:
        assert f.field is not None
        self.put(self.depth, f"part{k} = unpacked({packed}, {self.short_dtype()}, W{self.widths[f.field.vector]})")

    def begin_sum(self, k: int, f: Fold, slot: str) -> None:
        assert f.field is not None
        if slot == "stage" and not self.plan.ahead:
            self.arrived(f.field)
        vector = f"{self.at(f.field)}_s.index({slot})"
        self.put(self.depth, f"sum{k} = warpgroup_mma(part{k}, {vector}, sum{k}, is_async=True)")
        self.flying.append(f"sum{k}")

    def add_all(self, slot: str) -> None:
        """The products of a tile's scores fly already: what is done here takes no time of its own."""
        for k, f in enumerate(self.work.folds):
            assert f.field is not None
            if f.reducer == "softmax":
                layout = f"O{self.widths[f.field.vector]}"
                self.put(self.depth, f"sum{k} = sum{k} * over_features(keep{k}, {layout})")
            self.begin_sum(k, f, slot)

    def unpack(self) -> None:
        """The weights of the tile before, as operands."""
        for k, f in enumerate(self.work.folds):
            self.operand(k, f, f"packed{k}")

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
        for k, _ in enumerate(self.work.folds):
            self.put(self.depth, f"packed{k} = packed(weight{k}, {self.short_dtype()})")

    def last_sums(self) -> None:
        self.depth = 1
        if self.plan.ahead:
            self.unpack()
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
        """Stores results: those of 16 bits by way of the owners' vectors' place, as nobody reads these any more."""
        self.load_own(None)
        places = {self.widths[x.vector]: f"{self.at(x)}_s.index(near)" for x in self.near}
        for x in self.afterwards:
            n, d = self.base(x)[0], self.widths[x.vector]
            where = f"{n}, {n}_row, own_first + WG * 64, own_end, {self.width_of(x.vector)}"
            self.put(1, f"{n}_v = load_through({places[d]}, {where}, {d}, O{d})")
            self.nodes.known[self.wide(x.ref)] = Value(f"{n}_v", "md", x.dtype)
        for line in self.work.after:
            self.node_line(line)
        for k, o in enumerate(self.work.outputs):
            heads = "".join(
                [f" + h{j}.to(tl.int64) * out{k}_h{j}" for j, a in enumerate(self.work.axes) if a in o.dims]
            )
            rows = f"out{k} + own.to(tl.int64) * out{k}_row{heads}"
            if o.vector is None:
                value = self.nodes.text(o.ref, "", "m")
                self.put(1, f"tl.store({rows}, {value}, mask=live_own)")
                continue
            d, short = self.widths[o.vector], self.p.types[o.ref].dtype == self.near[0].dtype
            value = self.nodes.text(o.ref, "f32" if self.p.types[o.ref].floating else "", "md")
            if not short or d not in places:
                self.put(1, f"store_rows({rows}, {value}, live_own, {self.width_of(o.vector)}, {d}, O{d})")
                continue
            where = f"out{k}{heads}, out{k}_row, own_first + WG * 64, own_end, {self.width_of(o.vector)}"
            self.put(1, f"store_through({places[d]}, {where}, {value}, {self.short_dtype()}, {d})")
        self.put(1, "fence_async_shared()")
        self.put(1, "mbarrier.arrive(own_empty.index(near), count=1)")
