"""Which programs the tiles skeleton runs, and how their values lie in a tile.

Within a program of the kernel one head and one tile of owners are fixed. An edge value is then one number a pair,
[owners, others]; a node's field is one number a row, or a vector of its last feature, which only matrix products touch.
Size expressions that the program's conditions call equal are one axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiga.primitives import PRIMITIVES
from tiga.program import Line, Program, read_number
from tiga.types import Total, is_one

ELEMENTWISE = (
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "norm",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
    "relu",
    "lt",
    "le",
    "eq",
    "ne",
    "and",
    "or",
    "xor",
    "not",
    "isnan",
    "isinf",
    "isfinite",
    "where",
)
MOST_AXES = 4


class Refused(Exception):
    """The skeleton does not fit the program; the text says why."""


@dataclass(frozen=True)
class Input:
    """A tensor the kernel reads: a node's, edge or shared field. vector: its last feature is loaded whole."""

    ref: str
    place: str
    dtype: str
    axes: tuple  # of each feature before the vector: an axis, or 1
    vector: Any | None = None


@dataclass(frozen=True)
class Fold:
    """A reduce of the kernel. weight: the edge value that multiplies the vector; None: 1."""

    line: Line
    weight: str | None
    field: Input | None  # the vector that is summed; None: a number a pair


@dataclass(frozen=True)
class Pass:
    """One kernel: all folds to `owner`, dst or src, of a program."""

    owner: str
    folds: tuple[Fold, ...]
    lines: tuple[Line, ...]  # edge values, in order
    inputs: tuple[Input, ...]
    inners: dict  # value of sum -> (src input, dst input)
    axes: tuple  # the heads


class Analysis:
    def __init__(self, p: Program, lazy: frozenset) -> None:
        self.p, self.lazy = p, lazy
        self.parent: dict[Any, Any] = {}
        for a, b in p.conditions:
            if not (isinstance(b, Total) and b.rule == "at least"):
                self.union(a, b)
        self.uses_number = False

    def find(self, size: Any) -> Any:
        while self.parent.get(size, size) != size:
            size = self.parent[size]
        return size

    def union(self, a: Any, b: Any) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[b if isinstance(a, int) else a] = a if isinstance(a, int) else b

    def axes(self, ref: str) -> tuple:
        t = self.p.types.get(ref)
        return () if t is None else tuple([1 if is_one(s) else self.find(s) for s in t.sizes])

    def passes(self) -> list[Pass]:
        p = self.p
        if p.batch:
            raise Refused("a batch dimension (vmap)")
        if p.functions:
            raise Refused("a user's reducer")
        for t in p.types.values():
            if t.dtype == "f64" and not t.weak:
                raise Refused("float64")
        for r in p.returns:
            if p.types[r].place == "edge":
                raise Refused("a bare edge value is returned")
        made = []
        for owner in ("dst", "src"):
            folds = [line for line in p.lines if line.op == "reduce" and line.attrs[0] == owner]
            if folds:
                made.append(self.one(owner, folds))
        shared = [
            line
            for line in p.lines
            if line.op == "reduce"
            and line.attrs[0] == "shared"
            and any(p.types[a].place in ("edge", "dst") for a in line.args)
        ]
        if any(p.types[a].place == "edge" for line in shared for a in line.args):
            raise Refused("a parameter's gradient is summed over edges")
        if not made:
            raise Refused("no fold over edges")
        return made

    def one(self, owner: str, lines: list[Line]) -> Pass:
        self.inputs: dict[tuple, Input] = {}
        self.inners: dict[str, tuple] = {}
        self.needed: list[Line] = []
        self.seen: set[str] = set()
        folds = tuple([self.fold(owner, line) for line in lines])
        axes: dict[Any, None] = {}
        for x in self.inputs.values():
            for a in x.axes:
                if a != 1:
                    axes[a] = None
        if len(axes) > MOST_AXES:
            raise Refused(f"{len(axes)} head dimensions")
        return Pass(owner, folds, tuple(self.needed), tuple(self.inputs.values()), dict(self.inners), tuple(axes))

    def fold(self, owner: str, line: Line) -> Fold:
        name = line.attrs[1]
        if name == "count":
            return Fold(line, None, None)
        if name == "softmax":
            score, value = line.args
            self.scalar(score)
            at = self.axes(value)
            if (
                self.place(value) == "src"
                and at
                and at[-1] != 1
                and (not self.axes(score) or self.axes(score)[-1] == 1)
            ):
                return Fold(line, None, self.vector(value))
            self.scalar(value)
            return Fold(line, None, None)
        if name != "sum":
            raise Refused(f"the reducer {name}")
        arg = line.args[0]
        far = "src" if owner == "dst" else "dst"
        if arg in self.lazy:
            for weight, field in (self.p.definitions[arg].args, self.p.definitions[arg].args[::-1]):
                at, w = self.axes(field), self.axes(weight)
                if self.place(field) == far and at and at[-1] != 1 and (not w or w[-1] == 1):
                    self.scalar(weight)
                    return Fold(line, weight, self.vector(field))
            for a in self.p.definitions[arg].args:  # feature by feature
                self.scalar(a)
            return Fold(line, None, None)
        if self.place(arg) == far and self.axes(arg) and self.axes(arg)[-1] != 1:
            return Fold(line, None, self.vector(arg))
        self.scalar(arg)
        return Fold(line, None, None)

    def place(self, ref: str) -> str:
        return self.p.types[ref].place if ref in self.p.types else "shared"

    def vector(self, ref: str) -> Input:
        ref = self.narrow(ref)
        at = self.axes(ref)
        return self.read(Input(ref, self.place(ref), self.p.types[ref].dtype, at[:-1], at[-1]))

    def narrow(self, ref: str) -> str:
        """A 16-bit field behind its widening: the product reads it as it is, which loses nothing."""
        line = self.p.definitions.get(ref)
        if (
            line is not None
            and line.op == "to"
            and line.attrs == ("f32",)
            and self.p.types[line.args[0]].dtype in ("f16", "bf16")
            and line.args[0][0] != "%"
        ):
            return line.args[0]
        return ref

    def read(self, x: Input) -> Input:
        return self.inputs.setdefault((x.ref, x.vector is not None), x)

    def scalar(self, ref: str) -> None:
        """A value as one number a pair: its lines, down to the fields they read."""
        if ref in self.seen or ref not in self.p.types:
            return
        self.seen.add(ref)
        t = self.p.types[ref]
        if t.place != "edge" or ref[0] != "%":
            self.read(Input(ref, t.place, t.dtype, self.axes(ref)))
            return
        line = self.p.definitions[ref]
        heads = [a for a in self.axes(ref) if a != 1]
        if len(set(heads)) != len(heads):
            raise Refused("an edge value with one size twice")
        if line.op == "sum" and line.attrs == ("-1",) and line.args[0] in self.lazy:
            self.inner(line)
        elif line.op in ("unsqueeze", "squeeze", "to", "spread"):
            if line.op == "to" and line.attrs[0] not in ("f32", "i64", "i32", "bool"):
                raise Refused(f"rounding to {line.attrs[0]} on the edge")
            self.scalar(line.args[0])
        elif line.op in ELEMENTWISE and PRIMITIVES[line.op].elementwise:
            for a in line.args:
                self.scalar(a)
        elif line.op == "zeros_like" or line.op == "number":
            self.uses_number = self.uses_number or line.op == "number"
        else:
            raise Refused(f"{line.op} on the edge")
        self.needed.append(line)

    def inner(self, line: Line) -> None:
        args = self.p.definitions[line.args[0]].args
        places = tuple([self.place(a) for a in args])
        if set(places) != {"src", "dst"}:
            raise Refused("a sum over features on the edge that is no inner product")
        at = [self.axes(a) for a in args]
        if at[0][-1:] == at[1][-1:] == (1,):  # one feature: a product of numbers
            for a in args:
                self.scalar(a)
            return
        if at[0][-1:] != at[1][-1:] or not at[0]:
            raise Refused("an inner product of different sizes")
        pair = {place: self.vector(a) for place, a in zip(places, args)}
        self.inners[line.outs[0]] = (pair["src"], pair["dst"])


def literal_text(word: str) -> str | None:
    number = read_number(word)
    if number is None:
        return None
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        return f"float('{number}')"
    return repr(number)
