"""A program's lines as Triton statements on the tiles of the rows skeleton.

A value's lead says how many dimensions stand before its features: 0 of all edges, 1 [rows] of the owners, 2
[rows, edges]: Triton gives threads to features, then to rows, so that the edges of each are added in registers. A line
is written where its lead allows: once, once a row, or at every chunk of edges.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiga.codegen.rows import Analysis, Pass, Refused
from tiga.codegen.values import TRITON
from tiga.primitives import PRIMITIVES
from tiga.program import Line, literal_type, read_number
from tiga.types import Type, compute_dtype, promote

QUIET = frozenset(["add", "sub", "mul", "neg", "where", "maximum", "minimum", "abs", "tanh", "sigmoid"])
"""Operations that are finite numbers of finite ones; of fields that hold 0 and literals nothing overflows."""
EXTERNAL = ("pow", "tan", "atan", "atan2", "asin", "acos")
"""Functions of CUDA's library: Triton's interpreter has none of them."""
SHORTER = {"exp": "power_of_e({0})"}
"""Of less instructions than Triton's own: of results below 2**-126 nothing is left."""
WHERE = ("once", "row", "edge")


class Value(NamedTuple):
    """text: an expression of shape lead dimensions, then a block an axis.

    loaded: 0 where there is no edge. quiet: a finite number there, whatever the tensors hold.
    """

    text: str
    lead: int
    axes: tuple
    dtype: str
    loaded: bool = False
    quiet: bool = False


@dataclass
class Body:
    """Statements by where they stand, and what the kernel takes as arguments, in order."""

    once: list[str] = field(default_factory=list)
    row: list[str] = field(default_factory=list)
    edge: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)


class Lines:
    def __init__(self, analysis: Analysis, work: Pass) -> None:
        self.a, self.p, self.work = analysis, analysis.p, work
        self.body = Body()
        self.values: dict[str, Value] = {}
        self.arguments: list[tuple] = []  # (name, what it is, ...)
        self.axes: list[Any] = []  # of which D and B are constants
        self.flat: dict[tuple, str] = {}
        self.offsets: dict[tuple, str] = {}
        self.squeezed: dict[str, tuple[Value, int]] = {}
        self.counter = itertools.count()
        self.finishing, self.ending = False, ""  # rows that end are "whole", or "here", joined of pieces
        self.numbers = False
        self.row_sums: list[tuple] = []  # (name, axes, dtype) of sums over a row's edges that are no fold's
        self.weights: dict[tuple, str] = {}
        self.factors: list[Any] = []  # axes of matrix products
        self.gathered: set[str] = set()  # fields that edges read

    # Names and shapes.

    def put(self, lead: int, text: str) -> None:
        (self.body.finish if self.finishing else getattr(self.body, WHERE[lead])).append(text)

    def name(self, stem: str = "v") -> str:
        return stem + str(next(self.counter))

    def argument(self, name: str, *what: Any) -> str:
        if (name, *what) not in self.arguments:
            self.arguments.append((name, *what))
        return name

    def block(self, axis: Any, letter: str = "B") -> str:
        if axis == 1:
            return "1"
        if axis not in self.axes:
            self.axes.append(axis)
        return letter + str(self.axes.index(axis))

    def size(self, axis: Any) -> str:
        return self.block(axis, "D")

    def shape(self, lead: int, axes: tuple) -> str:
        return "[" + ", ".join([*("R", "BLOCK_E")[:lead], *[self.block(a) for a in axes]]) + "]"

    def features(self, axes: tuple) -> tuple[str, str, str]:
        """(flat feature numbers, which of them exist, whether some do not) of sizes other than 1."""
        key = tuple([a for a in axes if a != 1])
        if key not in self.flat:
            n = "f" + str(len(self.flat))
            self.flat[key] = n
            self.body.once.append(f"{n} = tl.arange(0, {' * '.join([self.block(a) for a in key])})")
            inside = []
            for k, a in enumerate(key):
                after = " * ".join([self.block(b) for b in key[k + 1 :]])
                part = f"{n} // ({after})" if after else n
                self.body.once.append(f"{n}_{k} = " + (f"{part} % {self.block(a)}" if k else part))
                inside.append(f"({n}_{k} < {self.size(a)})")
            self.body.once.append(f"{n}_in = {' & '.join(inside)}")
        n = self.flat[key]
        padded = " or ".join([f"{self.block(a)} != {self.size(a)}" for a in key])
        return n, n + "_in", padded

    def packed(self, axes: tuple) -> str:
        """Where features lie in a contiguous row."""
        n, real = self.features(axes)[0], [a for a in axes if a != 1]
        return " + ".join(
            [f"{n}_{k}" + "".join([f" * {self.size(b)}" for b in real[k + 1 :]]) for k in range(len(real))]
        )

    def offset(self, ref: str, axes: tuple, rows: int) -> str:
        """Where a field's features lie, from its row: behind `rows` dimensions."""
        n = self.features(axes)[0]
        stem = self.base(ref)
        if (ref, axes) not in self.offsets:
            terms = [
                f"{n}_{j}.to(tl.int64) * " + self.argument(f"{stem}_s{k}", "stride", ref, rows + k)
                for j, k in enumerate([k for k, a in enumerate(axes) if a != 1])
            ]
            self.offsets[ref, axes] = self.in_lanes(self.body.once, stem + "_at", " + ".join(terms), axes)
        return self.offsets[ref, axes]

    def in_lanes(self, body: list[str], name: str, text: str, axes: tuple) -> str:
        """Offsets of a vector's features, of which a thread takes EACH that lie side by side where they fill warps.

        Left to itself Triton gives a thread 16 bytes, and to the threads left over other edges, whose sums then cross
        threads. It heeds what is said of an operation in the kernel's own text, of none in a function's.
        """
        numbers = " * ".join([self.block(a) for a in axes if a != 1])
        body += [
            f"{name} = {text}",
            f"if EACH > 0 and {numbers} >= 16 * EACH:",
            f"    {name} = tl.max_contiguous({name}, EACH)",
        ]
        return name

    def base(self, ref: str) -> str:
        for a in self.arguments:
            if a[1:] == ("field", ref):
                return a[0]
        return self.argument(self.name("x"), "field", ref)

    # Tensors.

    def field(self, ref: str) -> Value:
        """A tensor's value where the kernel holds it."""
        t, axes = self.p.types[ref], self.a.axes(ref)
        if ref in self.p.scalars:
            name = self.argument(self.name("c"), "scalar", ref)
            value = Value(self.name(), 0, (), "f64")
            self.body.once.append(f"{value.text} = tl.full((), {name}, tl.float64)   # {ref}")
            return value
        if t.place == "shared":
            return self.shared(ref, t, axes)
        base = self.base(ref)
        stride = self.argument(base + "_row", "row", ref)
        row, lead, live = self.rows_read(ref)
        if lead == 2:
            self.gathered.add(ref)
        return self.load(lead, f"{base}, {row} * {stride}, {live}", base, ref, axes, t.dtype)

    def rows_read(self, ref: str) -> tuple[str, int, str]:
        """The rows of a field that are read, how many dimensions they have, and which of them are there."""
        place = self.p.types[ref].place
        self.numbers = self.numbers or place == "edge"
        if place == self.work.owner:
            return "row", 1, "here"
        return "number_at" if place == "edge" else "far", 2, "live"

    def shared(self, ref: str, t: Type, axes: tuple) -> Value:
        base = self.base(ref)
        if not axes:
            value = Value(self.name(), 0, (), "f64" if t.weak else compute_dtype(t.dtype))
            self.body.once.append(f"{value.text} = tl.load({base}).to({TRITON[value.dtype]})   # {ref}")
            return value
        return self.load(0, "", base, ref, axes, t.dtype)

    def load(self, lead: int, where: str, base: str, ref: str, axes: tuple, stored: str) -> Value:
        dtype = compute_dtype(stored)
        name, wide = self.name(), "" if dtype == stored else f".to({TRITON[dtype]})"
        real = [a for a in axes if a != 1]
        if real:
            at, inside, padded = self.offset(ref, axes, int(lead > 0)), *self.features(axes)[1:]
            if lead:
                text = f"load_features({where}, {at}, {inside}, {padded})"
            else:
                text = f"tl.load({base} + {at}, mask={inside}, other=0)"
        else:
            parts = where.split(", ")
            text = f"tl.load({parts[0]} + {parts[1]}, mask={parts[2]}, other=0)" if lead else f"tl.load({base})"
        text = f"from_bfloat16({text})" if (stored, dtype) == ("bf16", "f32") and real else text + wide
        self.put(lead, f"{name} = {self.unflat(text, lead, axes)}   # {ref}")
        return Value(name, lead, axes, dtype, lead == 2, lead == 2)

    def unflat(self, text: str, lead: int, axes: tuple, before: tuple = ()) -> str:
        """Features one after another as their dimensions: sizes of 1 are put in last, which moves nothing."""
        real = tuple([a for a in axes if a != 1])
        if len(real) > 1:
            text = f"tl.reshape({text}, {self.shape(lead, (*before, *real))})"
        if len(real) < len(axes):
            if not real and not lead:
                return f"tl.broadcast_to({text}, {self.shape(0, axes)})"
            text += "[" + ", ".join([":"] * (lead + len(before)) + ["None" if a == 1 else ":" for a in axes]) + "]"
        return text

    # Values.

    def value(self, ref: str) -> Value:
        if ref not in self.values:
            number = read_number(ref) if ref[0] != "%" and ref not in self.p.types else None
            if number is not None:
                finite = abs(number) < float("inf")
                return Value(literal_text(number), 0, (), "i64" if isinstance(number, int) else "f64", False, finite)
            # what the end of a row reads of its beginning stands there
            finishing, self.finishing = self.finishing, False
            if ref in self.work.inputs:
                self.values[ref] = self.field(ref)
            else:
                self.line(self.a.defined[ref])
            self.finishing = finishing
        return self.values[ref]

    def at(self, v: Value, lead: int, rank: int, dtype: str | None = None) -> str:
        """The value's text, to be broadcast with others of this lead and rank of features."""
        text = v.text
        if dtype is not None and dtype != v.dtype and not is_literal(text):
            text = f"{text}.to({TRITON[dtype]})"
        if v.lead == 0:
            return text
        missing = rank - len(v.axes)
        if v.lead < lead or missing:
            text += "[" + ", ".join([":"] * v.lead + ["None"] * (lead - v.lead + missing)) + "]"
        return text

    def live(self, rank: int) -> str:
        return "live" if not rank else "live[" + ", ".join([":", ":"] + ["None"] * rank) + "]"

    def full(self, v: Value, lead: int, axes: tuple) -> str:
        """The value's text with all of its dimensions."""
        missing = lead + len(axes) - v.lead - len(v.axes)
        text = v.text if v.lead == 0 else self.at(v, lead, len(axes))
        if v.lead == 0 and v.axes and missing:
            text += "[" + ", ".join(["None"] * missing + [":"] * len(v.axes)) + "]"
        if is_literal(text):
            text = f"tl.full((), {text}, {TRITON[v.dtype]})"
        return f"tl.broadcast_to({text}, {self.shape(lead, axes)})" if lead or axes else text

    def line(self, line: Line) -> None:
        out = line.outs[0]
        write = getattr(self, "write_" + line.op, None) or (
            self.pointwise if PRIMITIVES[line.op].elementwise else self.refuse
        )
        self.values[out] = write(line)

    def refuse(self, line: Line) -> Value:
        raise Refused(f"{line.op} on the edge")

    def new(self, line: Line, lead: int, axes: tuple, dtype: str, text: str) -> Value:
        name = self.name()
        self.put(lead, f"{name} = {text}   # {line.op} {' '.join([*line.args, *line.attrs])}")
        return Value(name, lead, axes, dtype)

    def pointwise(self, line: Line) -> Value:
        t = self.p.types[line.outs[0]]
        types = tuple([self.p.types.get(a) or literal_type(a) for a in line.args])
        dtype = promote(types)[0] if t.dtype == "bool" and line.op not in ("and", "or", "xor", "not") else t.dtype
        dtype = compute_dtype(dtype)
        values = [self.value(a) for a in line.args]
        lead, axes = max([v.lead for v in values]), self.a.axes(line.outs[0])
        args = [
            self.at(v, lead, len(axes), None if line.op == "where" and k == 0 else dtype) for k, v in enumerate(values)
        ]
        first = 1 if line.op == "where" else 0  # of literals alone Triton makes float32
        if all(is_literal(a) for a in args[first:]):
            args[first] = f"tl.full((), {args[first]}, {TRITON[dtype]})"
        text = power_text(args, line) or SHORTER.get(line.op, PRIMITIVES[line.op].triton).format(
            *[a if a.isidentifier() or is_literal(a) else f"({a})" for a in args]
        )
        quiet = line.op in QUIET and all([v.quiet or v.dtype == "bool" for v in values])
        return self.new(line, lead, axes, compute_dtype(t.dtype), text)._replace(quiet=quiet)

    def write_to(self, line: Line) -> Value:
        v, dtype = self.value(line.args[0]), line.attrs[0]
        wide = compute_dtype(dtype)
        text = v.text
        if is_literal(text):
            text = f"tl.full((), {text}, {TRITON[v.dtype]})"
        if dtype != v.dtype:
            text = f"{text}.to({TRITON[dtype]})" if dtype != "bool" else f"({text} != 0)"
        if wide != dtype:
            text += f".to({TRITON[wide]})"
        return self.new(line, v.lead, v.axes, wide, text)._replace(loaded=v.loaded, quiet=v.quiet)

    def write_spread(self, line: Line) -> Value:
        v = self.value(line.args[0])
        dtype = compute_dtype(self.p.types[line.outs[0]].dtype)
        if is_literal(v.text):
            return self.new(line, 0, (), dtype, f"tl.full((), {v.text}, {TRITON[dtype]})")
        return v if v.dtype == dtype else v._replace(text=f"{v.text}.to({TRITON[dtype]})", dtype=dtype)

    def reduced(self, line: Line, padding: str, text: str) -> Value:
        v, back = self.value(line.args[0]), -int(line.attrs[0])
        dtype = compute_dtype(self.p.types[line.outs[0]].dtype)
        x = v.text if v.dtype == dtype else f"{v.text}.to({TRITON[dtype]})"
        k = len(v.axes) - back
        if v.axes[k] != 1:
            x = f"only({x}, {back}, {self.size(v.axes[k])}, {padding})"
        return self.new(line, v.lead, v.axes[:k] + v.axes[k + 1 :], dtype, text.format(x, v.lead + k))

    def write_sum(self, line: Line) -> Value:
        return self.reduced(line, "0", "tl.sum({0}, {1})")

    def write_amax(self, line: Line) -> Value:
        return self.reduced(line, "float('-inf')", "largest({0}, {1})")

    def write_amin(self, line: Line) -> Value:
        return self.reduced(line, "float('inf')", "smallest({0}, {1})")

    def write_unsqueeze(self, line: Line) -> Value:
        v = self.value(line.args[0])
        k = len(v.axes) + 1 + int(line.attrs[0])
        source, dim = self.squeezed.get(v.text, (None, -1))
        if source is not None and dim == k:
            return source
        axes = v.axes[:k] + (1,) + v.axes[k:]
        out = self.new(line, v.lead, axes, v.dtype, f"tl.expand_dims({v.text}, {v.lead + k})")
        return out._replace(loaded=v.loaded, quiet=v.quiet)

    def write_squeeze(self, line: Line) -> Value:
        v = self.value(line.args[0])
        k = len(v.axes) + int(line.attrs[0])
        axes = v.axes[:k] + v.axes[k + 1 :]
        # the sum of one: it keeps the others where they are
        out = self.new(line, v.lead, axes, v.dtype, f"tl.sum({v.text}, {v.lead + k})")
        self.squeezed[out.text] = (v, k)
        return out

    def write_permute(self, line: Line) -> Value:
        v = self.value(line.args[0])
        rank, kept = len(v.axes), len(v.axes) - len(line.attrs)
        order = [*range(kept), *[rank + int(d) for d in line.attrs]]
        dims = ", ".join([str(d) for d in [*range(v.lead), *[v.lead + d for d in order]]])
        return self.new(line, v.lead, tuple([v.axes[d] for d in order]), v.dtype, f"tl.permute({v.text}, [{dims}])")

    def write_expand_like(self, line: Line) -> Value:
        v, axes = self.value(line.args[0]), self.a.axes(line.outs[0])
        if v.axes == axes:
            return v
        return self.new(line, v.lead, axes, v.dtype, self.full(v, v.lead, axes))

    def write_zeros_like(self, line: Line) -> Value:
        axes, dtype = self.a.axes(line.outs[0]), compute_dtype(self.p.types[line.outs[0]].dtype)
        return self.new(line, 0, axes, dtype, f"tl.zeros({self.shape(0, axes)}, {TRITON[dtype]})")

    def write_arange(self, line: Line) -> Value:
        axes = self.a.axes(line.outs[0])
        text = f"tl.reshape(tl.arange(0, {self.block(axes[0])}).to(tl.int64), {self.shape(0, axes)})"
        return self.new(line, 0, axes, "i64", text)

    def write_size(self, line: Line) -> Value:
        axis = self.a.axes(line.args[0])[int(line.attrs[0])]
        return self.new(line, 0, (), "i64", f"tl.full((), {self.size(axis)}, tl.int64)")

    def write_number(self, line: Line) -> Value:
        self.numbers = True
        return Value("number", 2, (), "i64")


def literal_text(number: int | float) -> str:
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        return f"float('{number}')"
    return repr(number)


def is_literal(text: str) -> bool:
    return text[:1] in "-0123456789" or text[:5] == "float"


def power_text(args: list[str], line: Line) -> str:
    """Powers that are products, or roots."""
    if line.op != "pow" or not is_literal(args[1]):
        return ""
    x = args[0] if args[0].isidentifier() else f"({args[0]})"
    power = float(args[1])
    if power == int(power) and 1 <= power <= 4:
        return " * ".join([x] * int(power))
    return {0.5: f"tl.sqrt({x})", -1.0: f"1 / {x}", -2.0: f"1 / ({x} * {x})", -0.5: f"tl.rsqrt({x})"}.get(power, "")
