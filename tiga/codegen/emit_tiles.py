"""Kernel source of a pass: the loop over tiles of the other end is here, the edge function's lines the program's.

Sources are text, compiled once a text; sizes and strides are arguments, so no size makes another kernel. Widths of
vectors are constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiga.codegen.tiles import Fold, Input, Pass, literal_text
from tiga.primitives import PRIMITIVES
from tiga.program import Line, Program
from tiga.types import Type, compute_dtype, promote

_TRITON = {
    "bool": "tl.int1",
    "u8": "tl.uint8",
    "i8": "tl.int8",
    "i16": "tl.int16",
    "i32": "tl.int32",
    "i64": "tl.int64",
    "f32": "tl.float32",
}
HEAD = """import triton
import triton.language as tl
from tiga.codegen.device import load_rows, load_scalars, sign, tanh, weighted
"""


@dataclass(frozen=True)
class Source:
    """text of one kernel; inputs, outputs: which tensors its pointers are, in order; vectors: the width constants."""

    text: str
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, tuple, Any], ...]  # result, head axes, vector axis or None
    vectors: tuple
    reads_numbers: bool


class Emitter:
    def __init__(self, p: Program, work: Pass, span: str, reads_numbers: bool) -> None:
        self.p, self.work, self.span = p, work, span  # span: "band", "rows1", "rows2", "cols1", "cols2"
        self.numbers = reads_numbers or any(x.place == "edge" for x in work.inputs)
        self.names = {(x.ref, x.vector is not None): "x" + str(k) for k, x in enumerate(work.inputs)}
        self.vectors = list(dict.fromkeys([x.vector for x in work.inputs if x.vector is not None]))
        self.rows: list[str] = []
        self.outputs: list[tuple[str, tuple, Any]] = []
        for f in work.folds:
            for o in f.line.outs:
                dims = [1 if not isinstance(s, tuple) and s == 1 else s for s in p.types[o].sizes]
                vector = f.field.vector if f.field is not None and o == f.line.outs[0] else None
                self.outputs.append((o, tuple(dims[:-1] if vector is not None else dims), vector))

    def put(self, depth: int, text: str) -> None:
        self.rows.append("    " * depth + text)

    def width(self, axis: Any) -> str:
        return "D" + str(self.vectors.index(axis))

    # The whole.

    def source(self) -> Source:
        self.signature()
        self.prologue()
        self.ranges()
        self.loop(masked=True)
        if self.span in ("band", "rows1"):
            self.loop(masked=False)
        self.epilogue()
        return Source(
            HEAD + "\n\n" + "\n".join(self.rows) + "\n",
            self.work.inputs,
            tuple(self.outputs),
            tuple(self.vectors),
            self.numbers,
        )

    def signature(self) -> None:
        names = []
        for x in self.work.inputs:
            n = self.names[x.ref, x.vector is not None]
            names += [
                n,
                n + "_row",
                *[f"{n}_h{k}" for k in range(len(self.work.axes))],
                *([n + "_d"] if x.vector is not None else []),
            ]
        for k in range(len(self.outputs)):
            names += [f"out{k}", f"out{k}_row", *[f"out{k}_h{a}" for a in range(len(self.work.axes))]]
        names += [f"H{k}" for k in range(len(self.work.axes))]
        sizes = ["num_own", "num_other", "num_heads"]
        spans = {
            "band": ["low", "high"],
            "rows1": ["start", "stop"],
            "rows2": ["start", "stop", "start2", "stop2"],
            "cols1": ["start", "stop", "reach_low", "reach_high"],
            "cols2": ["start", "stop", "start2", "stop2", "reach_low", "reach_high"],
        }[self.span]
        if self.numbers:
            spans = [*spans, "first"]
        constants = [f"D{k}: tl.constexpr, BLOCK_D{k}: tl.constexpr" for k in range(len(self.vectors))]
        quiet = [
            n
            for n in [*sizes, *[f"H{k}" for k in range(len(self.work.axes))], "low", "high"]
            if n in (*names, *sizes, *spans)
        ]
        self.put(0, f"@triton.jit(do_not_specialize={quiet!r})")
        blocks = [f"{name}: tl.constexpr" for name in ("BLOCK_M", "BLOCK_N", "PRECISION")]
        self.put(0, f"def propagate({', '.join([*names, *sizes, *spans, *constants, *blocks])}):")

    def prologue(self) -> None:
        self.put(1, "program = tl.program_id(0)")
        self.put(1, "tiles = tl.cdiv(num_own, BLOCK_M)")
        self.put(1, "head = program % num_heads")
        self.put(1, "own_first = (tiles - 1 - program // num_heads) * BLOCK_M")
        rest = "head"
        for k in range(len(self.work.axes)):
            self.put(1, f"h{k} = ({rest} % H{k}).to(tl.int64)")
            rest = f"({rest} // H{k})"
        self.put(1, "own = own_first + tl.arange(0, BLOCK_M)")
        self.put(1, "own_last = tl.minimum(own_first + BLOCK_M, num_own) - 1")
        for x in self.work.inputs:
            n = self.names[x.ref, x.vector is not None]
            heads = "".join([f" + h{k} * {n}_h{k}" for k, a in enumerate(self.work.axes) if a in x.axes])
            if heads:
                self.put(1, f"{n} += {heads[3:]}")
            if x.place == self.work.owner:
                self.put(1, self.load(x, n, "own", "num_own"))
            elif x.place == "shared":
                self.put(1, f"{n}_v = tl.load({n})")
        for k, f in enumerate(self.work.folds):
            self.start(k, f)

    def load(self, x: Input, n: str, rows: str, count: str) -> str:
        if x.vector is not None:
            d = self.width(x.vector)
            return f"{n}_v = load_rows({n}, {rows}, {n}_row, {n}_d, {count}, {d}, BLOCK_{d})   # [{rows}, {d}]"
        return f"{n}_v = load_scalars({n}, {rows}, {n}_row, {count})"

    def start(self, k: int, f: Fold) -> None:
        if f.line.attrs[1] == "softmax":
            self.put(1, f"peak{k} = tl.full([BLOCK_M], float('-inf'), tl.float32)")
            self.put(1, f"total{k} = tl.zeros([BLOCK_M], tl.float32)")
        shape = f"[BLOCK_M, BLOCK_{self.width(f.field.vector)}]" if f.field is not None else "[BLOCK_M]"
        self.put(1, f"sum{k} = tl.zeros({shape}, {'tl.int64' if self.is_integer(f) else 'tl.float32'})")

    def is_integer(self, f: Fold) -> bool:
        return not self.p.types[f.line.outs[0]].floating

    # Which tiles.

    def ranges(self) -> None:
        """begin .. end: all tiles of the other end; inner_begin .. inner_end: those without a mask."""
        put = self.put
        if self.span == "band":
            put(1, "begin = tl.maximum(own_first + low, 0)")
            put(1, "end = tl.minimum(own_last + high + 1, num_other)")
            put(1, "inner_begin = tl.maximum(own_last + low, 0)")
            put(1, "inner_end = tl.minimum(own_first + high + 1, num_other)")
        elif self.span == "rows1":
            put(1, "row_start = tl.load(start + own, mask=own < num_own, other=0)")
            put(1, "row_stop = tl.load(stop + own, mask=own < num_own, other=0)")
            put(1, "some = row_start < row_stop")
            put(1, "begin = tl.min(tl.where(some, row_start, num_other), 0)")
            put(1, "end = tl.max(tl.where(some, row_stop, 0), 0)")
            put(1, "inner_begin = tl.max(tl.where(own < num_own, row_start, 0), 0)")
            put(1, "inner_end = tl.min(tl.where(own < num_own, row_stop, num_other), 0)")
        elif self.span == "rows2":
            for k in ("", "2"):
                put(1, f"row_start{k} = tl.load(start{k} + own, mask=own < num_own, other=0)")
                put(1, f"row_stop{k} = tl.load(stop{k} + own, mask=own < num_own, other=0)")
                put(1, f"some{k} = row_start{k} < row_stop{k}")
                put(1, f"begin{k} = tl.min(tl.where(some{k}, row_start{k}, num_other), 0) // BLOCK_N * BLOCK_N")
                put(1, f"end{k} = tl.max(tl.where(some{k}, row_stop{k}, 0), 0)")
            put(1, "steps = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)")
            put(1, "all_steps = steps + tl.cdiv(tl.maximum(end2 - begin2, 0), BLOCK_N)")
        else:
            put(1, "begin = tl.load(reach_low + own_first // BLOCK_M)")
            put(1, "end = tl.load(reach_high + own_first // BLOCK_M)")
        if self.numbers and self.work_is_rows():
            put(1, "own_number = tl.load(first + own, mask=own < num_own, other=0)")
        if self.span in ("band", "rows1"):
            put(1, "begin = begin // BLOCK_N * BLOCK_N")
            put(1, "inner_begin = tl.maximum(tl.cdiv(inner_begin, BLOCK_N) * BLOCK_N, begin)")
            put(1, "inner_end = inner_end // BLOCK_N * BLOCK_N")
            put(1, "has_inner = inner_begin < inner_end")
            put(1, "steps = tl.cdiv(tl.maximum(tl.where(has_inner, inner_begin, end) - begin, 0), BLOCK_N)")
            put(1, "all_steps = steps + tl.where(has_inner, tl.cdiv(tl.maximum(end - inner_end, 0), BLOCK_N), 0)")
            put(1, "inner_end = tl.where(has_inner, inner_end, inner_begin)")
        elif self.span in ("cols1", "cols2"):
            put(1, "begin = begin // BLOCK_N * BLOCK_N")

    def work_is_rows(self) -> bool:
        """Whether the owners are the rows that edges are numbered by."""
        return (self.work.owner == "dst") != self.p.reverse

    # The loop.

    def loop(self, masked: bool) -> None:
        if masked and self.span in ("band", "rows1", "rows2"):
            comment = "# tiles that hold pairs which are no edges"
            self.put(1, f"{'for step in tl.range(0, all_steps, num_stages=1):':<72}{comment}")
            second = (
                "begin2 + (step - steps) * BLOCK_N" if self.span == "rows2" else "inner_end + (step - steps) * BLOCK_N"
            )
            self.put(2, f"at = tl.where(step < steps, begin + step * BLOCK_N, {second})")
        else:
            low, high = ("begin", "end") if masked else ("inner_begin", "inner_end")
            self.put(
                1,
                f"for at in tl.range({low}, {high}, BLOCK_N{', num_stages=1' if masked else ''}):"
                + ("" if masked else "                       # tiles of edges only"),
            )
        self.put(2, "other = at + tl.arange(0, BLOCK_N)")
        for x in self.work.inputs:
            if x.place not in (self.work.owner, "shared", "edge"):
                self.put(2, self.load(x, self.names[x.ref, x.vector is not None], "other", "num_other"))
        if masked:
            self.mask()
        if self.numbers:
            self.number()
        for x in self.work.inputs:
            if x.place == "edge":
                n = self.names[x.ref, False]
                live = "live" if masked else "(own < num_own)[:, None] & (other < num_other)[None, :]"
                self.put(2, f"{n}_v = tl.load({n} + number * {n}_row, mask={live}, other=0)")
        self.body: dict[str, str] = {}
        for line in self.work.lines:
            self.line(line)
        for k, f in enumerate(self.work.folds):
            self.fold(k, f, masked)

    def mask(self) -> None:
        bounds = "(own < num_own)[:, None] & (other < num_other)[None, :]"
        if self.span == "band":
            self.put(2, "apart = other[None, :] - own[:, None]")
            self.put(2, f"live = (apart >= low) & (apart <= high) & {bounds}")
        elif self.span == "rows1":
            self.put(
                2, f"live = (other[None, :] >= row_start[:, None]) & (other[None, :] < row_stop[:, None]) & {bounds}"
            )
        elif self.span == "rows2":
            self.put(2, "span_start = tl.where(step < steps, row_start, row_start2)")
            self.put(2, "span_stop = tl.where(step < steps, row_stop, row_stop2)")
            self.put(
                2, f"live = (other[None, :] >= span_start[:, None]) & (other[None, :] < span_stop[:, None]) & {bounds}"
            )
        else:
            inside = []
            for k in ("", "2") if self.span == "cols2" else ("",):
                self.put(2, f"other_start{k} = tl.load(start{k} + other, mask=other < num_other, other=0)")
                self.put(2, f"other_stop{k} = tl.load(stop{k} + other, mask=other < num_other, other=0)")
                inside.append(f"(own[:, None] >= other_start{k}[None, :]) & (own[:, None] < other_stop{k}[None, :])")
            self.put(2, f"live = ({' | '.join(inside)}) & {bounds}")

    def number(self) -> None:
        """first + rank of the source among its row's sources."""
        rows = self.work_is_rows()
        row, col = ("own[:, None]", "other[None, :]") if rows else ("other[None, :]", "own[:, None]")
        first = "own_number[:, None]" if rows else "tl.load(first + other, mask=other < num_other, other=0)[None, :]"
        if self.span == "band":
            low = "low" if rows else "-high"
            self.put(2, f"number = {first} + {col}.to(tl.int64) - tl.maximum({row}.to(tl.int64) + {low}, 0)")
            return
        which = "row" if rows else "other"
        side = "[:, None]" if rows else "[None, :]"
        self.put(2, f"number = {first} + {col}.to(tl.int64) - {which}_start{side}")
        if self.span in ("rows2", "cols2"):
            start2, before = f"{which}_start2{side}", f"({which}_stop - {which}_start){side}"
            later = f"{first} + {col}.to(tl.int64) - {start2} + {before}"
            self.put(2, f"number = tl.where({col} >= {start2}, {later}, number)")

    # Values.

    def scalar(self, ref: str, dtype: str | None = None) -> str:
        """A value as [owners, others], or something that broadcasts to it."""
        literal = literal_text(ref)
        if ref not in self.p.types:
            assert literal is not None
            return literal
        t = self.p.types[ref]
        if ref in self.body:
            text = self.body[ref]
        else:
            n = self.names[ref, False] + "_v"
            text = (
                n
                if t.place in ("shared", "edge")
                else f"{n}[:, None]"
                if t.place == self.work.owner
                else f"{n}[None, :]"
            )
        have = "f32" if t.weak else compute_dtype(t.dtype)
        stored = ref not in self.body and (t.dtype in ("f16", "bf16") or t.weak)
        return f"{text}.to({_TRITON[dtype or have]})" if stored or (dtype is not None and dtype != have) else text

    def line(self, line: Line) -> None:
        out, name = line.outs[0], "v" + line.outs[0][1:]
        if out in self.work.inners:
            src, dst = self.work.inners[out]
            own, other = (dst, src) if self.work.owner == "dst" else (src, dst)
            wide = "" if own.dtype == other.dtype else ".to(tl.float32)"
            a, b = (self.names[x.ref, True] + "_v" + wide for x in (own, other))
            self.put(
                2, f"{name} = tl.dot({a}, tl.trans({b}), input_precision=PRECISION)   # {line.op} {' '.join(line.args)}"
            )
        elif line.op == "sum":
            a, b = (self.scalar(x, "f32") for x in self.p.definitions[line.args[0]].args)
            self.put(2, f"{name} = ({a}) * ({b})  # {line.op} {' '.join(line.args)}")
        elif line.op in ("unsqueeze", "squeeze", "spread"):
            self.body[out] = self.scalar(line.args[0])
            return
        elif line.op == "to":
            self.body[out] = self.scalar(line.args[0], line.attrs[0])
            return
        elif line.op == "number":
            self.body[out] = "number"
            return
        elif line.op == "zeros_like":
            self.body[out] = "0.0"
            return
        else:
            self.put(2, f"{name} = {self.elementwise(line)}   # {line.op} {' '.join(line.args)}")
        self.body[out] = name

    def elementwise(self, line: Line) -> str:
        t = self.p.types[line.outs[0]]
        types = tuple(
            [self.p.types.get(a) or Type("shared", "i64" if literal_is_int(a) else "f64", (), True) for a in line.args]
        )
        dtype = promote(types)[0] if t.dtype == "bool" and line.op not in ("and", "or", "xor", "not") else t.dtype
        dtype = "f32" if dtype in ("f64", "f16", "bf16") else dtype
        args = [
            self.scalar(a, dtype if a in self.p.types and not (line.op == "where" and k == 0) else None)
            for k, a in enumerate(line.args)
        ]
        return PRIMITIVES[line.op].triton.format(
            *[a if a.isidentifier() or literal_text(a) else f"({a})" for a in args]
        )

    # Folds.

    def fold(self, k: int, f: Fold, masked: bool) -> None:
        name = f.line.attrs[1]
        if name == "softmax":
            self.softmax(k, f, masked)
        elif name == "count":
            live = "live" if masked else "tl.full([BLOCK_M, BLOCK_N], 1, tl.int64)"
            self.put(2, f"sum{k} += tl.sum(({live}).to(tl.int64), 1)")
        elif f.field is not None:
            weight = self.scalar(f.weight, "f32") if f.weight is not None else "1.0"
            self.put(2, f"weight{k} = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + {weight}")
            self.add(k, f, f"weight{k}", masked)
        else:
            dtype = "i64" if self.is_integer(f) else "f32"
            zero = f"tl.zeros([BLOCK_M, BLOCK_N], {_TRITON[dtype]})"
            arg = f.line.args[0]
            if arg in self.p.definitions and arg not in self.body and arg not in [i.ref for i in self.work.inputs]:
                a, b = self.p.definitions[arg].args
                value = f"{self.scalar(a, dtype)} * {self.scalar(b, dtype)}"
            else:
                value = self.scalar(arg, dtype)
            self.put(2, f"each{k} = {zero} + {value}")
            self.put(2, f"sum{k} += tl.sum({f'tl.where(live, each{k}, 0)' if masked else f'each{k}'}, 1)")

    def add(self, k: int, f: Fold, weight: str, masked: bool) -> None:
        field = f.field
        assert field is not None
        n = self.names[field.ref, True]
        d = self.width(field.vector)
        if masked:
            where, rows = f"tl.where(live, {weight}, 0.0), live", f"{n}_v, {n}, at, {n}_row, {n}_d, num_other"
            self.put(2, f"sum{k} += weighted({where}, {rows}, {d}, BLOCK_{d}, PRECISION)")
        else:
            self.put(2, f"sum{k} += tl.dot({weight}.to({n}_v.dtype), {n}_v, input_precision=PRECISION)")

    def softmax(self, k: int, f: Fold, masked: bool) -> None:
        score, value = f.line.args
        self.put(2, f"score{k} = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + {self.scalar(score, 'f32')}")
        if masked:
            self.put(2, f"score{k} = tl.where(live, score{k}, float('-inf'))")
        self.put(2, f"higher{k} = tl.maximum(peak{k}, tl.max(score{k}, 1))")
        self.put(2, f"safe{k} = tl.where(higher{k} == float('-inf'), 0.0, higher{k})")
        # the difference is taken before the change to base 2, which then rounds once
        self.put(2, f"weight{k} = tl.exp2((score{k} - safe{k}[:, None]) * 1.4426950408889634)")
        self.put(2, f"keep{k} = tl.exp2((peak{k} - safe{k}) * 1.4426950408889634)")
        self.put(2, f"peak{k} = higher{k}")
        self.put(2, f"total{k} = total{k} * keep{k} + tl.sum(weight{k}, 1)")
        if f.field is not None:
            self.put(2, f"sum{k} = sum{k} * keep{k}[:, None]")
            self.add(k, f, f"weight{k}", masked)
        else:
            each = f"weight{k} * ({self.scalar(value, 'f32')})"
            self.put(2, f"sum{k} = sum{k} * keep{k} + tl.sum({f'tl.where(live, {each}, 0.0)' if masked else each}, 1)")

    def epilogue(self) -> None:
        for k, f in enumerate(self.work.folds):
            if f.line.attrs[1] == "softmax":
                self.put(1, f"none{k} = total{k} == 0")
                side = "[:, None]" if f.field is not None else ""
                self.put(1, f"sum{k} = tl.where(none{k}{side}, 0.0, sum{k} / tl.where(none{k}, 1.0, total{k}){side})")
                self.put(
                    1, f"lse{k} = tl.where(none{k}, float('-inf'), peak{k} + tl.log(tl.where(none{k}, 1.0, total{k})))"
                )
        number = 0
        for k, f in enumerate(self.work.folds):
            for j, _ in enumerate(f.line.outs):
                self.store(number, f"sum{k}" if j == 0 else f"lse{k}")
                number += 1

    def store(self, k: int, value: str) -> None:
        _, axes, vector = self.outputs[k]
        heads = "".join([f" + h{a} * out{k}_h{a}" for a in range(len(self.work.axes))])
        rows = f"out{k} + own.to(tl.int64) * out{k}_row{heads}"
        if vector is None:
            self.put(1, f"tl.store({rows}, {value}, mask=own < num_own)")
            return
        d = self.width(vector)
        self.put(1, f"d{k} = tl.arange(0, BLOCK_{d})")
        mask = f"(own < num_own)[:, None] & (d{k} < {d})[None, :]"
        self.put(1, f"tl.store(({rows})[:, None] + d{k}[None, :], {value}, mask={mask})")


def literal_is_int(word: str) -> bool:
    text = literal_text(word)
    return text is not None and text.lstrip("-").isdigit()
