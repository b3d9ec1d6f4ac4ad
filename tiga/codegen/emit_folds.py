"""Kernel source of folds: their states, a tile added to them, their results, and states of parts merged."""

from __future__ import annotations

from tiga.codegen.emit_nodes import RowEmitter
from tiga.codegen.tiles import Fold
from tiga.codegen.values import TRITON, Value, Values
from tiga.types import compute_dtype


class FoldEmitter(RowEmitter):
    """Folds at `depth`, of the values in `edges`, in the loop `how` over tiles of `block` others."""

    edges: Values
    depth: int
    how: str
    block: str

    def arrive(self, ref: str) -> None:
        """A vector of the others is about to be read."""

    def live(self) -> str:
        """The pairs of a tile that are edges."""
        return "live" if self.how != "full" else "live_own[:, None]"

    def start(self, depth: int, only: int | None = None) -> None:
        for k, f in enumerate(self.work.folds):
            if only is not None and k != only:
                continue
            put = lambda text: self.put(depth, text)
            name, dtype = f.reducer, TRITON[self.states(f)[0]]
            if name == "scatter":
                put(f"sum{k} = tl.zeros([BLOCK_M, BLOCK_{self.width(self.work.tables[k].vector)}], tl.float32)")
                continue
            if name in ("max", "min"):
                put(f"best{k} = tl.full([BLOCK_M], float('{'-' if name == 'max' else ''}inf'), tl.float32)")
                put(f"found{k} = tl.full([BLOCK_M], -1, tl.int64)")
                continue
            if name == "softmax":
                put(f"peak{k} = tl.full([BLOCK_M], float('-inf'), tl.float32)")
                put(f"total{k} = tl.zeros([BLOCK_M], tl.float32)")
            shape = f"[BLOCK_M, BLOCK_{self.width(f.field.vector)}]" if f.field is not None else "[BLOCK_M]"
            put(f"sum{k} = tl.zeros({shape}, {dtype})")

    def pair(self, ref: str, dtype: str) -> str:
        """A value as [owners, others], whatever it varies over."""
        v = self.edges.value(ref)
        dtype = dtype or v.dtype or "i64"
        text = self.edges.text(ref, dtype, "mn")
        return text if v.shape == "mn" else f"tl.zeros([BLOCK_M, {self.block}], {TRITON[dtype]}) + {text}"

    def fold(self, k: int, f: Fold) -> None:
        name, masked = f.reducer, self.how != "full"
        put = lambda text: self.put(self.depth, text)
        if name == "softmax":
            self.softmax(k, f)
        elif name == "scatter":
            d, value = self.width(self.work.tables[k].vector), self.pair(f.line.args[0], "f32")
            live = self.live() if self.how != "full" else f"tl.zeros([BLOCK_M, {self.block}], tl.int1) | {self.live()}"
            put(f"sum{k} = scattered(sum{k}, {value}, {self.pair(f.line.args[1], 'i64')}, {live}, {d}, BLOCK_{d})")
        elif name in ("max", "min"):
            put(f"best{k}, found{k} = further({'1' if name == 'max' else '-1'}, best{k}, found{k}, ")
            put(f"    {self.pair(f.line.args[0], 'f32')}, number, {self.live()})")
        elif name == "count":
            live = f"tl.zeros([BLOCK_M, {self.block}], tl.int64) + {self.live()}.to(tl.int64)"
            put(f"sum{k} += tl.sum({live}, 1)")
        elif f.field is not None:
            put(f"weight{k} = {self.pair(f.weight if f.weight is not None else '0x1.0p+0', 'f32')}")
            self.add(k, f)
        else:
            dtype = self.states(f)[0]
            arg = f.line.args[0]
            if self.axes.place(arg) == "edge" and arg in self.p.definitions and arg not in f.lines:
                a, b = self.p.definitions[arg].args
                text = f"tl.zeros([BLOCK_M, {self.block}], {TRITON[dtype]}) + {self.edges.text(a, dtype, 'mn')} * "
                text += self.edges.text(b, dtype, "mn")
            else:
                text = self.pair(arg, dtype)
            put(f"sum{k} += tl.sum({f'tl.where(live, {text}, 0)' if masked else text}, 1)")

    def add(self, k: int, f: Fold) -> None:
        assert f.field is not None
        n = self.names[f.field.ref, "vector"]
        put = lambda text: self.put(self.depth, text)
        self.arrive(f.field.ref)
        if self.how == "careful":
            d = self.width(f.field.vector)
            rows = f"{n}, at, {n}_row, {n}_d, num_other, {d}, BLOCK_{d}, PRECISION"
            put(f"sum{k} = careful(weight{k}, live, {n}_v, sum{k}, {rows})")
            return
        weight = f"tl.where(live, weight{k}, 0.0)" if self.how == "masked" else f"weight{k}"
        if self.wide_vectors:
            put(f"sum{k} = summed(sum{k}, {weight}, {n}_v, PRECISION)")
        else:
            put(f"sum{k} = tl.dot({weight}.to({n}_v.dtype), {n}_v, sum{k}, input_precision=PRECISION)")

    def softmax(self, k: int, f: Fold) -> None:
        self.scores(k, f)
        self.weigh(k, f, f"tl.max(score{k}, 1)")

    def scores(self, k: int, f: Fold) -> None:
        self.put(self.depth, f"score{k} = {self.pair(f.line.args[0], 'f32')}")
        if self.how != "full":
            self.put(self.depth, f"score{k} = tl.where(live, score{k}, float('-inf'))")

    def weigh(self, k: int, f: Fold, top: str, less: str = "safe", by: str = "LOG2E") -> None:
        """The tile's weights and values into the state; of 16-bit vectors the scores' peak is kept in base 2, so that
        a weight takes one fused multiply-add. less: what is taken off the scores; by: what makes them of base 2."""
        value = f.line.args[1]
        put = lambda text: self.put(self.depth, text)
        log2e = f" * {by}" if self.short else ""
        put(f"higher{k} = tl.maximum(peak{k}, {top}{log2e})")
        put(f"safe{k} = tl.where(higher{k} == float('-inf'), 0.0, higher{k})")
        if less != "safe":
            put(f"{less}{k} = tl.where(skip{k}, float('inf'), safe{k})")
        if self.short:
            put(f"weight{k} = tl.exp2(score{k} * {by} - {less}{k}[:, None])")
            put(f"keep{k} = tl.exp2(peak{k} - safe{k})")
        else:
            put(f"weight{k} = tl.exp2((score{k} - {less}{k}[:, None]) * LOG2E)")
            put(f"keep{k} = tl.exp2((peak{k} - safe{k}) * LOG2E)")
        put(f"peak{k} = higher{k}")
        put(f"total{k} = total{k} * keep{k} + tl.sum(weight{k}, 1)")
        if f.field is not None:
            self.rescale(k)
            self.add(k, f)
        else:
            each = f"weight{k} * {self.edges.text(value, 'f32', 'mn')}"
            each = each if self.how == "full" else f"tl.where(live, {each}, 0.0)"
            put(f"sum{k} = sum{k} * keep{k} + tl.sum({each}, 1)")

    def rescale(self, k: int) -> None:
        self.put(self.depth, f"sum{k} = sum{k} * keep{k}[:, None]")

    # Results.

    def result(self, k: int, f: Fold) -> None:
        """The finished fold, as node values; or its state over a part of the sources, stored."""
        name, put = f.reducer, lambda text: self.put(1, text)
        if name == "scatter":
            self.store_table(k)
            return
        shape = "md" if f.field is not None else "m"
        side = "[:, None]" if f.field is not None else ""
        if name == "softmax" and self.stage != "merge":
            lse = "(peak{0} + tl.log2({1})) / LOG2E" if self.short else "peak{0} + tl.log({1})"
            one = f"tl.where(none{k}, 1.0, total{k})"
            put(f"none{k} = total{k} == 0")
            put(f"sum{k} = tl.where(none{k}{side}, 0.0, sum{k} / {one}{side})")
            put(f"lse{k} = tl.where(none{k}, float('-inf'), {lse.format(k, one)})")
        for ref in f.factors if self.stage != "part" else ():
            put(f"sum{k} = sum{k} * {self.nodes.text(ref, 'f32', shape)}")
        texts = {"softmax": (f"sum{k}", f"lse{k}"), "max": (f"best{k}", f"found{k}"), "min": (f"best{k}", f"found{k}")}
        held = texts.get(name, (f"sum{k}",))
        if self.stage == "part":
            for j, text in enumerate(held):
                self.store_state(k, j, text, f)
            return
        if name in ("max", "min"):
            put(f"best{k} = tl.where(found{k} < 0, 0.0, best{k})")
        for j, (o, text) in enumerate(zip(f.line.outs, held)):
            t = self.p.types[o]
            dtype = compute_dtype("f32" if t.dtype == "f64" else t.dtype)
            kept = self.states(f)[j]
            text = text if dtype == kept else f"{text}.to({TRITON[dtype]})"
            self.nodes.known[o] = Value(text, shape if j == 0 else "m", dtype)

    def store_table(self, k: int) -> None:
        """The sums of this tile's owners; tiles are summed later, in order."""
        o = self.work.tables[k]
        d = self.width(o.vector)
        heads = "".join([f" + h{j} * table{k}_h{j}" for j, a in enumerate(self.work.axes) if a in o.dims[:-1]])
        self.put(1, f"d{k} = tl.arange(0, BLOCK_{d})")
        value = f"tl.sum(tl.where(live_own[:, None], sum{k}, 0.0), 0)"
        self.put(1, f"tl.store(table{k} + slot * table{k}_row{heads} + d{k}, {value}, mask=d{k} < {d})")

    # Parts of the sources.

    def state_rows(self, k: int, j: int, split: str) -> str:
        item = "item" if self.work.packed is not None else "own"
        unit = f" * H{self.work.axes.index(self.work.packed)}" if self.work.packed is not None else ""
        return f"(({split} * num_heads + head).to(tl.int64) * (num_own{unit}) + {item})"

    def store_state(self, k: int, j: int, text: str, f: Fold) -> None:
        rows = self.state_rows(k, j, "split")
        if f.field is not None and j == 0:
            d = self.width(f.field.vector)
            self.put(1, f"store_rows(state{k}_{j} + {rows} * {d}, {text}, live_own, {d}, BLOCK_{d})")
        else:
            self.put(1, f"tl.store(state{k}_{j} + {rows}, {text}, mask=live_own)")

    def load_state(self, k: int, j: int, f: Fold) -> str:
        rows = self.state_rows(k, j, "parts")
        if f.field is not None and j == 0:
            d = self.width(f.field.vector)
            return f"load_rows(state{k}_{j}, {rows}, 0, {d}, 1, live, {d}, BLOCK_{d})"
        none = "float('-inf')" if f.line.attrs[1] == "softmax" and j == 1 else "-1" if j == 1 else "0"
        return f"tl.load(state{k}_{j} + {rows}, mask=live, other={none})"

    def merge(self) -> None:
        """The states of all parts, in order: of one owner, many parts at a time."""
        self.start(1)
        self.put(1, "for part in tl.range(0, splits, BLOCK_N):")
        put = lambda text: self.put(2, text)
        put("parts = part + tl.arange(0, BLOCK_N)")
        put("live = parts < splits")
        for k, f in enumerate(self.work.folds):
            name, wide = f.line.attrs[1], f.field is not None
            column, row, across = ("[:, None]", "[None, :]", "[:, None]") if wide else ("", "", "")
            for j in range(len(self.states(f))):
                put(f"state{k}_{j}_v = {self.load_state(k, j, f)}")
            if name == "softmax":
                put(f"higher{k} = tl.maximum(peak{k}, tl.max(state{k}_1_v, 0))")
                put(f"safe{k} = tl.where(higher{k} == float('-inf'), 0.0, higher{k})")
                put(f"keep{k} = tl.exp2((peak{k} - safe{k}) * LOG2E)")
                put(f"weight{k} = tl.exp2((state{k}_1_v - safe{k}) * LOG2E)")
                put(f"peak{k} = higher{k}")
                put(f"total{k} = total{k} * keep{k} + tl.sum(weight{k}, 0)")
                put(f"sum{k} = sum{k} * keep{k}{across} + tl.sum(state{k}_0_v * weight{k}{column}, 0){row}")
            elif name in ("max", "min"):
                put(f"best{k}, found{k} = further({'1' if name == 'max' else '-1'}, best{k}, found{k}, ")
                put(f"    state{k}_0_v[None, :], state{k}_1_v[None, :], (state{k}_1_v >= 0)[None, :])")
            else:
                put(f"sum{k} += tl.sum(state{k}_0_v, 0){row}")
        for k, f in enumerate(self.work.folds):
            if f.line.attrs[1] == "softmax":
                side, one = "[:, None]" if f.field is not None else "", f"tl.where(total{k} == 0, 1.0, total{k})"
                self.put(1, f"sum{k} = sum{k} / {one}{side}")
                self.put(1, f"lse{k} = tl.where(total{k} == 0, float('-inf'), peak{k} + tl.log({one}))")
