"""Which programs the tiles skeleton runs, and what each of its kernels does.

Within a program of a kernel one head and one tile of owners are fixed. An edge value is then one number a pair,
[owners, others]; a node's field is one number a row, or a vector of its last feature, which matrix products touch. A
sum over features that is no inner product is a loop over features. Size expressions that the program's conditions call
equal are one axis; a value is known by its axes, so a dimension of size 1 is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiga.primitives import PRIMITIVES
from tiga.program import Line, Program, read_number
from tiga.reducers import PRUNED
from tiga.types import Total, is_one

ELEMENTWISE = frozenset(
    (
        "add sub mul div maximum minimum neg abs sign floor ceil exp exp2 log log2 sqrt norm rsqrt sin cos tanh "
        "sigmoid erf relu lt le eq ne and or xor not isnan isinf isfinite where"
    ).split()
)
SAME = ("unsqueeze", "squeeze", "spread", "expand_like")  # the same number, under other dimensions
FOLDS = ("sum", "softmax", "count", "max", "min", "scatter", *PRUNED)
MOST_AXES = 4
# sums of vectors a kernel, of 16 and of 32 bits: more than these take the registers that its products need
MOST_VECTORS = {"f16": 2, "bf16": 2, "f32": 1}


class Refused(Exception):
    """The skeleton does not fit the program; the text says why."""


@dataclass(frozen=True)
class Input:
    """A tensor the kernel reads. side: own, far, edge, shared. dims: the axis of every feature dimension, or 1.

    mode: "number" a row; "vector", its axis `vector` whole; "column", one feature of `vector` at a time; "table", rows
    of a shared table by a computed number; "map", one number a tile.
    """

    ref: str
    side: str
    dtype: str
    dims: tuple
    mode: str = "number"
    vector: Any | None = None

    @property
    def heads(self) -> tuple:
        """The dimensions of which a program of the kernel reads one number."""
        return self.dims if self.vector is None else self.dims[:-1]


@dataclass(frozen=True)
class Fold:
    """A reduce of the kernel. weight: the edge value that multiplies the vector; None: 1.

    field: the vector that is summed; None: a number a pair. lines: the edge values it needs, in order. factors: what
    of the weight does not vary over the other end, which the finished sum is multiplied by.
    """

    line: Line
    weight: str | None
    field: Input | None
    lines: tuple[str, ...]
    factors: tuple[str, ...] = ()

    @property
    def pruned(self) -> bool:
        return self.line.attrs[1] in PRUNED

    @property
    def reducer(self) -> str:
        """What it is but for tiles that it skips."""
        return "softmax" if self.pruned else self.line.attrs[1]


@dataclass(frozen=True)
class Output:
    """A tensor the kernel fills: with `ref`, the program's result number `result`, or None: for torch to read."""

    ref: str
    dims: tuple
    result: int | None
    vector: Any | None


@dataclass(frozen=True)
class Work:
    """One kernel over the rows of `owner`: before and after are node values, lines edge values; no folds: no edges."""

    owner: str
    inputs: tuple[Input, ...]
    before: tuple[Line, ...]
    folds: tuple[Fold, ...]
    after: tuple[Line, ...]
    outputs: tuple[Output, ...]
    axes: tuple  # the heads
    packed: Any | None  # a head that no other end's field has: its numbers lie beside the owners in a tile
    reads_numbers: bool
    edge_outputs: tuple[Output, ...]
    for_edge_outputs: tuple[str, ...]  # the edge values these need, in order
    tables: dict[int, Output]  # a fold into a table -> its sums, of each tile of owners apart
    inners: dict[str, tuple[str, str]]  # a sum that is an inner product -> the vectors of src and dst
    loops: dict[str, tuple[Any, tuple[str, ...]]]  # any other sum over features -> its axis, the edge values inside
    maps: tuple[Output, ...] = ()  # one number a tile
    within: tuple[int, int] | None = None  # tiles of owners and others, of a map that is read, that tiles must divide
    skips: bool = False  # whether a tile that no map kept adds nothing at all

    @property
    def tile(self) -> tuple[int, int] | None:
        """The owners and others of a tile, where what is computed depends on them."""
        return next((tile_of(f.line) for f in self.folds if f.pruned), None)


@dataclass(frozen=True)
class Tiles:
    """A program on the skeleton: works in order; early and late are what torch does on nodes before and after."""

    works: tuple[Work, ...]
    early: tuple[Line, ...]
    late: tuple[Line, ...]
    axes: Axes


def tile_of(line: Line) -> tuple[int, int]:
    return int(line.args[3]), int(line.args[4])


def literal_text(word: str) -> str | None:
    number = read_number(word)
    if number is None:
        return None
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        return f"float('{number}')"
    return repr(number)


class Axes:
    """Sizes that are one: those that the conditions unify."""

    def __init__(self, p: Program) -> None:
        self.p = p
        self.parent: dict[Any, Any] = {}
        for a, b in p.conditions:
            if not (isinstance(b, Total) and b.rule == "at least"):
                self.union(a, b)

    def find(self, size: Any) -> Any:
        while self.parent.get(size, size) != size:
            size = self.parent[size]
        return size

    def union(self, a: Any, b: Any) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[b if isinstance(a, int) else a] = a if isinstance(a, int) else b

    def dims(self, ref: str) -> tuple:
        t = self.p.types.get(ref)
        return () if t is None else tuple([1 if is_one(s) else self.find(s) for s in t.sizes])

    def of(self, ref: str) -> tuple:
        """The axes of a value, dimensions of size 1 left out."""
        return tuple([a for a in self.dims(ref) if a != 1])

    def place(self, ref: str) -> str:
        return self.p.types[ref].place if ref in self.p.types else "shared"

    def same(self, ref: str) -> str:
        """The value behind those lines that change dimensions only, and keep the place."""
        line = self.p.definitions.get(ref)
        while line is not None and line.op in SAME and self.place(line.args[0]) == self.place(ref):
            ref = line.args[0]
            line = self.p.definitions.get(ref)
        return ref


class EdgeWork:
    """Collects what one kernel over edges needs: folds, edge values returned, and the node values they read."""

    def __init__(self, axes: Axes, lazy: frozenset, owner: str, folds: list[Line], returned: list[str]) -> None:
        self.axes, self.p, self.lazy, self.owner = axes, axes.p, lazy, owner
        self.reads: dict[tuple[str, str], Any] = {}  # (value, mode) -> vector axis
        self.heads: dict[Any, None] = {}
        self.numbers = False
        self.order: dict[str, None] = {}
        self.inners: dict[str, tuple[str, str]] = {}  # a sum -> the vectors of src and dst
        self.loops: dict[str, tuple[Any, tuple[str, ...]]] = {}  # a sum -> its axis, the edge values inside its loop
        self.within: tuple[int, int] | None = None
        self.lines, self.returned = folds, returned
        self.folds = sorted([self.fold(line) for line in folds], key=lambda f: len(f[3]))
        summed = [f[2] for f in self.folds if f[2] is not None]
        most = min([MOST_VECTORS[self.p.types[ref].dtype] for ref in summed], default=len(folds))
        if len(summed) > most:
            raise Refused(f"more than {most} sums of vectors")
        if len({tile_of(line) for line in folds if line.attrs[1] in PRUNED}) > 1:
            raise Refused("tiles of two shapes")
        self.order = {}
        for ref in returned:
            self.numbers = True
            self.number(ref)
        self.for_returns = tuple(self.order)
        if len(self.heads) > MOST_AXES:
            raise Refused(f"{len(self.heads)} head dimensions")

    def fold(self, line: Line) -> tuple[Line, str | None, str | None, tuple[str, ...], tuple[str, ...]]:
        """(line, weight, vector field, edge values needed, factors)."""
        name = line.attrs[1]
        if name not in FOLDS:
            raise Refused(f"the reducer {name}")
        self.order = {}
        weight, field, numbers = None, None, line.args
        factors: tuple[str, ...] = ()
        if name in ("max", "min"):
            self.numbers = True
            if self.p.types[line.outs[0]].dtype not in ("f16", "bf16", "f32"):
                raise Refused(f"the {name} of integers")
        if name == "scatter":  # into a shared table, by a computed number
            numbers = line.args[:2]
            if self.p.batch:
                raise Refused("the gradient of a table under vmap")
        elif name == "softmax" or name in PRUNED:
            score, value, *limit = line.args[:3]
            numbers = (score, value, *limit)
            if self.is_far_vector(value, score):
                field, numbers = value, (score, *limit)
        elif name == "sum":
            arg = line.args[0]
            pair = self.p.definitions[arg].args if arg in self.lazy else ()
            numbers = pair or line.args
            for w, f in (pair, pair[::-1]) if pair else ():
                if self.is_far_vector(f, w):
                    weight, factors = self.factored(w)
                    field, numbers = f, (weight, *factors)
                    break
            if not pair and self.is_far_vector(arg, None):
                field, numbers = arg, ()
        for ref in numbers:
            self.number(ref)
        if field is not None:
            field = self.vector(field)
        elif name == "scatter":
            self.head(*[a for a in self.axes.dims(line.args[0]) if a != 1])
        elif line.args:
            self.head(*self.axes.of(line.outs[0]))
        return line, weight, field, tuple(self.order), factors

    def factored(self, weight: str) -> tuple[str, tuple[str, ...]]:
        """A weight without the factors that are the owner's or everyone's: they wait until the sum is known."""
        factors: list[str] = []
        line = self.p.definitions.get(weight)
        while line is not None and line.op in ("mul", *SAME) and self.axes.place(weight) == "edge":
            if line.op == "mul":
                near = [a for a in line.args if self.axes.place(a) in (self.owner, "shared")]
                if len(near) != 1 or self.p.types[line.outs[0]].dtype != "f32":
                    break
                factors += near
                weight = next(a for a in line.args if a != near[0])
            else:
                weight = line.args[0]
            line = self.p.definitions.get(weight)
        return weight, tuple(factors)

    def head(self, *axes: Any) -> None:
        if len(set(axes)) != len(axes):
            raise Refused("an edge value with one size twice")
        self.heads.update(dict.fromkeys(axes))

    def is_far_vector(self, ref: str, beside: str | None) -> bool:
        """Whether a value is the other end's, with a last feature that the number beside it has not."""
        far = "src" if self.owner == "dst" else "dst"
        dims = self.axes.dims(ref)
        if self.axes.place(ref) != far or not dims or dims[-1] == 1 or not self.p.types[ref].floating:
            return False
        other = self.axes.dims(beside) if beside is not None else ()
        return not other or other[-1] == 1

    def vector(self, ref: str) -> str:
        ref = self.narrow(self.axes.same(ref))
        dims = self.axes.dims(ref)
        self.head(*[a for a in dims[:-1] if a != 1])
        self.reads[ref, "vector"] = dims[-1]
        return ref

    def narrow(self, ref: str) -> str:
        """A 16-bit field behind its widening: the product reads it as it is, which loses nothing."""
        line = self.p.definitions.get(ref)
        if line is not None and line.op == "to" and line.attrs == ("f32",):
            inner = self.axes.same(line.args[0])
            if inner[0] != "%" and self.p.types[inner].dtype in ("f16", "bf16"):
                return inner
        return ref

    def number(self, ref: str, column: Any | None = None) -> None:
        """A value as one number a pair (column: of each feature of that axis): its lines, down to what nodes hold."""
        if ref in self.order or ref not in self.p.types:
            return
        axes = [a for a in self.axes.of(ref) if a != column]
        self.head(*axes)
        line = self.p.definitions.get(ref)
        if self.axes.place(ref) != "edge" or line is None:
            ref = self.axes.same(ref)
            has_column = column is not None and column in self.axes.of(ref)
            self.reads[ref, "column" if has_column else "number"] = column if has_column else None
            self.numbers = self.numbers or self.axes.place(ref) == "edge"
            return
        if line.op == "sum" and line.attrs == ("-1",):
            self.sum_features(line, column)
        elif line.op == "gather":
            self.gather(line, column)
        elif line.op == "rand":
            if column is not None or self.p.batch:
                raise Refused("rand a feature, or under vmap")
            self.numbers = True
            self.head(*self.axes.of(line.args[1]))
            self.number(line.args[0])
        elif line.op in SAME or line.op == "to":
            self.number(line.args[0], column)
        elif line.op in ELEMENTWISE and PRIMITIVES[line.op].elementwise:
            for a in line.args:
                self.number(a, column)
        elif line.op == "arange":
            if column is not None:
                raise Refused("arange a feature")
        elif line.op == "number":
            self.numbers = True
        elif line.op == "kept":
            self.kept(line)
        elif line.op != "zeros_like":
            raise Refused(f"{line.op} on the edge")
        self.order[ref] = None

    def kept(self, line: Line) -> None:
        rows, cols = (int(x) for x in line.attrs)
        within = (rows, cols) if self.owner == "dst" else (cols, rows)
        if self.within not in (None, within):
            raise Refused("maps of two tiles")
        if self.p.kind == "blocks":
            raise Refused("a map of the tiles of packed sequences")
        self.within = within
        self.reads[line.args[0], "map"] = None

    def gather(self, line: Line, column: Any | None) -> None:
        table, i = line.args
        if self.p.batch or column is not None or self.axes.place(table) != "shared":
            raise Refused("gather a feature, or under vmap")
        rest = self.axes.dims(table)[1:]
        self.head(*[a for a in rest if a != 1])
        self.number(i)
        self.reads[self.axes.same(table), "table"] = None

    def sum_features(self, line: Line, column: Any | None) -> None:
        arg = line.args[0]
        last = self.axes.dims(arg)[-1]
        if last == 1:
            self.number(arg, column)
            return
        if column is not None:
            raise Refused("a sum over features within another")
        if arg in self.lazy:
            args = self.p.definitions[arg].args
            if {self.axes.place(a) for a in args} == {"src", "dst"} and all(
                self.axes.dims(a)[-1:] == (last,) for a in args
            ):
                pair = {self.axes.place(a): self.vector(a) for a in args}
                self.inners[line.outs[0]] = (pair["src"], pair["dst"])
                return
        kept, self.order = self.order, {}
        self.number(arg, last)
        inside = tuple([r for r in self.order if last in self.axes.of(r)])
        self.loops[line.outs[0]] = (last, inside)
        self.order = {**kept, **{r: None for r in self.order if r not in inside}}
