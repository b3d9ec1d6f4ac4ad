"""Values under construction: `Builder` appends typed lines, `Value` is one of their results with Python's operators.

The tracer, the adjoint and the tangent all build programs here, so that each knows only values, never text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiga.errors import TigaError
from tiga.infer import infer
from tiga.primitives import PRIMITIVES
from tiga.program import Line, number_text, read_number
from tiga.types import Type, is_one

WEAK_INT, WEAK_FLOAT = Type("shared", "i64", (), True), Type("shared", "f64", (), True)


class Value:
    """A value of a program: `ref` is its word in the text, `type` what is known of it."""

    def __init__(self, builder: Builder, ref: str, type: Type) -> None:
        self.builder = builder
        self.ref = ref
        self.type = type

    def emit(self, op: str, *attrs: str) -> Value:
        return self.builder.emit(op, (self,), attrs)

    def __add__(self, other: Any) -> Value:
        return self.builder.emit("add", (self, other))

    def __radd__(self, other: Any) -> Value:
        return self.builder.emit("add", (other, self))

    def __sub__(self, other: Any) -> Value:
        return self.builder.emit("sub", (self, other))

    def __rsub__(self, other: Any) -> Value:
        return self.builder.emit("sub", (other, self))

    def __mul__(self, other: Any) -> Value:
        return self.builder.emit("mul", (self, other))

    def __rmul__(self, other: Any) -> Value:
        return self.builder.emit("mul", (other, self))

    def __truediv__(self, other: Any) -> Value:
        return self.builder.emit("div", (self, other))

    def __rtruediv__(self, other: Any) -> Value:
        return self.builder.emit("div", (other, self))

    def __neg__(self) -> Value:
        return self.builder.emit("neg", (self,))


class Path:
    """A trace so far, by what was done: each step leads to the trace one step longer, with the line that it wrote.

    A trace that was met before is found step by step, without inferring a type; its programs hang at its end.
    steps: (the longer trace, the result's word, its type), by what was asked.
    """

    __slots__ = ("before", "line", "programs", "steps", "types")
    most = 1 << 16  # paths that are kept; then all are forgotten
    kept = 0
    root: Path | None = None

    def __init__(self, before: Path | None = None, line: Line | None = None, types: tuple = ()) -> None:
        Path.kept += 1
        self.before = before
        self.line = line
        self.types = types
        self.steps: dict[tuple, tuple] = {}
        self.programs: dict[tuple, Any] = {}

    @staticmethod
    def start() -> Path:
        """The trace that has done nothing yet."""
        if Path.root is None or Path.kept > Path.most:
            Path.kept = 0
            Path.root = Path()
        return Path.root

    def since(self, earlier: Path) -> list[Path]:
        """The traces between an earlier one and this, which is the last."""
        found, path = [], self
        while path is not earlier:
            found.append(path)
            path = path.before  # type: ignore[assignment]
        return found[::-1]


class Builder:
    """Lines with their types. The same line is never emitted twice; commutative arguments stand in one order."""

    def __init__(self, unify: Callable[[Any, Any], None], batch: int = 0) -> None:
        self.unify = unify
        self.batch = batch
        self.lines: list[Line] = []
        self.line_types: list[Type] = []  # of each line's first result
        self.known: dict[tuple, tuple[tuple, tuple]] = {}  # words and types of each line's results
        self.origin: dict[str, tuple] = {}  # op and argument values behind a word
        self.outs = 0
        self.functions: list[Any] = []

    def value(self, ref: str, type: Type) -> Value:
        return Value(self, ref, type)

    def lift(self, x: Any) -> Value:
        """A value, or a Python number as a literal."""
        if isinstance(x, Value):
            return x
        if isinstance(x, (bool, int)):
            return self.value(number_text(x), WEAK_INT)
        if isinstance(x, float):
            return self.value(number_text(x), WEAK_FLOAT)
        raise TigaError(f"cannot use {type(x).__name__} as a value of a program")

    def emit(self, op: str, args: tuple, attrs: tuple = ()) -> Value:
        """The value of `op args attrs`, a new line unless it is there."""
        values = ordered(op, [a if isinstance(a, Value) else self.lift(a) for a in args])
        out = self.line(op, values, attrs)[0]
        self.origin[out.ref] = (op, values)
        return out

    def line(self, op: str, values: list, attrs: tuple) -> tuple:
        """The results of a line, which is typed and appended unless it is there."""
        refs = tuple([v.ref for v in values])
        found = self.known.get((op, refs, attrs))
        if found is None:
            types = tuple([v.type for v in values])
            types = infer(Line((), op, refs, attrs), types, self.unify, self.batch, tuple(self.functions))
            outs = tuple(["%" + str(self.outs + k) for k in range(len(types))])
            found = self.append(Line(outs, op, refs, attrs), types)
        return tuple([self.value(o, t) for o, t in zip(*found)])

    def append(self, line: Line, types: tuple) -> tuple[tuple, tuple]:
        """A typed line; its results' words and types."""
        self.outs += len(types)
        self.lines.append(line)
        self.line_types.append(types[0])
        self.known[line.op, line.args, line.attrs] = (line.outs, types)
        return line.outs, types

    def reduce(self, place: str, reducer: str, args: tuple) -> tuple:
        """Fold edge values to `place`; the reducer's results, the value first."""
        return self.line("reduce", [self.lift(a) for a in args], (place, reducer))

    def function(self, f: Any) -> str:
        """The number of a function of this program."""
        for n, known in enumerate(self.functions):
            if known == f:
                return str(n)
        self.functions.append(f)
        return str(len(self.functions) - 1)

    def scan(self, direction: str, f: Any, states: int, args: tuple, gradient: Any = None) -> tuple:
        """Visit each segment's edges in order, (states, values) -> (states, results): last states, all results."""
        values = [self.lift(a) for a in args]
        attrs = (direction, self.function(f), str(states), "-1" if gradient is None else self.function(gradient))
        return self.line("scan", values, attrs)

    # What adjoint and tangent need beyond single lines.

    def fold_edges(self, place: str, x: Value) -> Value:
        return self.reduce(place, "sum", (x,))[0]

    def widen(self, x: Value, dtype: str) -> Value:
        """x in the dtype it is accumulated in, where that is wider."""
        return x.emit("to", dtype) if x.type.dtype in ("f16", "bf16") or dtype == "f64" != x.type.dtype else x

    def fold(self, x: Value, wide: Value, narrow: Value) -> Value:
        """Undo broadcasting: sum x, shaped as `wide`, down to the feature sizes of `narrow`."""
        have, want, rank = wide.type.sizes, narrow.type.sizes, len(wide.type.sizes)
        missing = rank - len(want)
        lead = min(self.batch, len(want))  # a number has no batch dimensions
        want = tuple(want[:lead]) + (1,) * missing + tuple(want[lead:])
        for d in range(rank):
            if is_one(want[d]) and not is_one(have[d]):
                if is_one(x.type.sizes[d]):
                    x = self.stretch(x, wide)
                x = x.emit("sum", str(d - rank)).emit("unsqueeze", str(d - rank))
        for k in range(missing):
            x = x.emit("squeeze", str(lead - rank + k))
        return x

    def fold_batch(self, x: Value, like: Value) -> Value:
        """Sum the batch dimensions that `like` does not have."""
        for d, (have, want) in enumerate(zip(x.type.sizes[: self.batch], like.type.sizes[: self.batch])):
            if is_one(want) and not is_one(have):
                dim = str(d - len(x.type.sizes))
                x = x.emit("sum", dim).emit("unsqueeze", dim)
        return x

    def stretch(self, x: Value, like: Value) -> Value:
        """x with every feature size of `like`."""
        same = all(is_one(a) == is_one(b) for a, b in zip(x.type.sizes, like.type.sizes))
        return x if same else self.emit("expand_like", (x, like))


def ordered(op: str, values: list) -> list:
    """Arguments of a commutative operation stand in one order."""
    swap = len(values) == 2 and values[0].ref > values[1].ref and PRIMITIVES[op].commutative
    return [values[1], values[0]] if swap else values


def literal(ref: str) -> int | float | None:
    return read_number(ref) if ref[:1] not in "%" else None
