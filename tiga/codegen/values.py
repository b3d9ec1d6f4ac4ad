"""Values of a program as Triton text: a shape (which of owners, others, features) and a dtype each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tiga.codegen.tiles import SAME, Axes, literal_text
from tiga.primitives import PRIMITIVES
from tiga.program import Line
from tiga.types import Type, compute_dtype, promote

TRITON = {
    "bool": "tl.int1",
    "u8": "tl.uint8",
    "i8": "tl.int8",
    "i16": "tl.int16",
    "i32": "tl.int32",
    "i64": "tl.int64",
    "f16": "tl.float16",
    "bf16": "tl.bfloat16",
    "f32": "tl.float32",
    "f64": "tl.float64",
}

# m: owners, n: others, d: features. A shape joined with a wider one is written with the missing dimensions.
_INTO = {
    ("m", "mn"): "[:, None]",
    ("n", "mn"): "[None, :]",
    ("m", "md"): "[:, None]",
    ("d", "md"): "[None, :]",
}
_JOINED = {frozenset("mn"): "mn", frozenset("md"): "md"}


class Value(NamedTuple):
    """text computes in `dtype`; shape: "", "m", "n", "d", "mn" or "md"."""

    text: str
    shape: str
    dtype: str


class Values:
    """What is known at one place of a kernel; `put` writes a line there."""

    def __init__(
        self, axes: Axes, put: Callable[[str], None], short: bool, outer: Values | None = None, letter: str = "v"
    ) -> None:
        # short: 16-bit vectors leave no digits that one rounding more in an exponent could cost
        self.axes, self.p, self.put, self.short, self.letter = axes, axes.p, put, short, letter
        self.known: dict[str, Value] = dict(outer.known) if outer is not None else {}

    def value(self, ref: str) -> Value:
        found = self.known.get(ref) or self.known.get(self.axes.same(ref))
        if found is None:
            text = literal_text(ref)
            assert text is not None, ref
            found = Value(text, "", "")
        return found

    def text(self, ref: str, dtype: str = "", shape: str = "") -> str:
        """The value in a dtype ("": its own), written so that it broadcasts to a shape."""
        v = self.value(ref)
        text = v.text
        if v.shape and shape and v.shape != shape:
            text = (text if text.isidentifier() else f"({text})") + _INTO[v.shape, shape]
        if dtype and v.dtype and v.dtype != dtype:
            text = (text if text.isidentifier() else f"({text})") + f".to({TRITON[dtype]})"
        return text

    def joined(self, refs: tuple[str, ...]) -> str:
        shape = frozenset("".join([self.value(r).shape for r in refs]))
        return "".join(shape) if len(shape) < 2 else _JOINED[shape]

    def name(self, ref: str) -> str:
        return self.letter + ref[1:]

    def line(self, line: Line) -> None:
        """A line of pointwise work, or one that changes dimensions only."""
        out = line.outs[0]
        t = self.p.types[out]
        if line.op in SAME or (line.op == "sum"):
            v = self.value(line.args[0])
            self.known[out] = v if v.dtype else Value(v.text, "", "")
        elif line.op == "to":
            self.convert(line)
        elif line.op == "zeros_like":
            self.known[out] = Value("0.0" if t.floating else "0", "", "")
        else:
            self.set(out, self.elementwise(line), self.joined(line.args), compute_dtype(self.of(t)), line)

    def of(self, t: Type) -> str:
        return "f32" if t.dtype == "f64" else t.dtype

    def set(self, out: str, text: str, shape: str, dtype: str, line: Line) -> None:
        name = self.name(out)
        self.put(f"{name} = {text}  # {line.op} {' '.join(line.args)}")
        self.known[out] = Value(name, shape, dtype)

    def convert(self, line: Line) -> None:
        out, to = line.outs[0], line.attrs[0]
        v = self.value(line.args[0])
        dtype = "f32" if to == "f64" else compute_dtype(to)
        if not v.dtype:  # a literal
            self.known[out] = v
        elif to in ("f16", "bf16"):
            self.known[out] = Value(f"({v.text}).to({TRITON[to]}).to(tl.float32)", v.shape, "f32")
        else:
            self.known[out] = Value(self.text(line.args[0], dtype), v.shape, dtype)

    def elementwise(self, line: Line) -> str:
        t = self.p.types[line.outs[0]]
        types = tuple(
            [self.p.types.get(a) or Type("shared", "i64" if is_integer(a) else "f64", (), True) for a in line.args]
        )
        dtype = promote(types)[0] if t.dtype == "bool" and line.op not in ("and", "or", "xor", "not") else t.dtype
        dtype = "f32" if dtype in ("f64", "f16", "bf16") else dtype
        shape = self.joined(line.args)
        args = [self.text(a, "" if line.op == "where" and k == 0 else dtype, shape) for k, a in enumerate(line.args)]
        fused = self.exponent(line, shape) if self.short and line.op == "exp" else None
        if fused is not None:
            return fused
        row = PRIMITIVES[line.op]
        return row.triton.format(*[a if a.isidentifier() or literal_text(a) else f"({a})" for a in args])

    def exponent(self, line: Line, shape: str) -> str | None:
        """exp(pair - number of a node) as exp2(pair * log2(e) - number * log2(e)): one fused multiply-add a pair."""
        inner = self.p.definitions.get(self.behind(line.args[0]))
        if inner is None or inner.op != "sub" or shape != "mn" or inner.args[1] not in self.p.types:
            return None
        a, b = (self.value(x) for x in inner.args)
        if a.shape != "mn" or b.shape not in ("m", "n") or a.dtype != "f32" or b.dtype != "f32":
            return None
        text, side = f"{a.text} * LOG2E", _INTO[b.shape, "mn"]
        scaled = self.p.definitions.get(self.behind(inner.args[0]))
        if scaled is not None and scaled.op == "mul":
            for x, y in (scaled.args, scaled.args[::-1]):
                if self.value(x).shape == "mn" and self.value(y).shape == "" and self.value(x).dtype == "f32":
                    text = f"{self.value(x).text} * ({self.text(y, 'f32')} * LOG2E)"
        return f"tl.exp2({text} - ({b.text} * LOG2E){side})"

    def behind(self, ref: str) -> str:
        """The value behind lines that change dimensions only."""
        line = self.p.definitions.get(ref)
        while line is not None and line.op in SAME:
            ref = line.args[0]
            line = self.p.definitions.get(ref)
        return ref


def is_integer(word: str) -> bool:
    text: Any = literal_text(word)
    return text is not None and text.lstrip("-").isdigit()
