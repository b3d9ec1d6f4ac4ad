"""A program: the typed canonical text of an edge function over one relation, and what follows from the text alone.

    tiga/1 relation triangular
    operand 0 src key f32 [*, *]
    operand 1 dst query f32 [*, *]
    scalar 0 scale
    %0 = mul src.key dst.query
    %1 = sum %0 -1
    %2 = mul %1 scale
    %3 = reduce dst sum %2
    return %3

The text is the operator's argument, Dynamo's guard, the export payload and the cache key. It may come from anyone: it
is read by the small parser of tiga.parser, verified before any use, and never evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiga.errors import TigaError
from tiga.reducers import PRUNED
from tiga.types import Dim, Total, Type

VERSION = "tiga/1"

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})\Z", re.ASCII)
_FLOAT = re.compile(r"-?0x[01]\.?[0-9a-f]{0,14}p[+-][0-9]{1,4}\Z|\+inf\Z|-inf\Z|\+nan\Z", re.ASCII)


@dataclass(frozen=True)
class Operand:
    """One tensor read by the program. sizes: 1 for a feature dimension of size 1, '*' for any other."""

    place: str
    name: str
    dtype: str
    sizes: tuple
    flag: str = ""

    @property
    def ref(self) -> str:
        return self.place + "." + self.name


@dataclass(frozen=True)
class Line:
    """outs = op args attrs; for reduce, attrs are (place, reducer)."""

    outs: tuple[str, ...]
    op: str
    args: tuple[str, ...]
    attrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Function:
    """A function of a program, for `scan`: parameters a0, a1, ..., pointwise lines; typed where it is used."""

    params: int
    lines: tuple[Line, ...]
    returns: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Program:
    kind: str
    relation_tensors: int
    reverse: bool
    batch: int
    operands: tuple[Operand, ...]
    scalars: tuple[str, ...]
    lines: tuple[Line, ...]
    returns: tuple[str, ...]
    types: dict[str, Type] = field(compare=False, repr=False)
    conditions: tuple = field(compare=False, repr=False, default=())
    definitions: dict[str, Line] = field(compare=False, repr=False, default_factory=dict)
    functions: tuple[Function, ...] = ()
    launch: tuple[int, int] = (0, 0)  # edges a program visits at a time, and warps, that were asked for

    @property
    def num_tensors(self) -> int:
        return len(self.operands) + self.relation_tensors

    def untyped(self, **changed: Any) -> Program:
        """The same head with other lines and returns, whose types are not known yet."""
        return dataclasses.replace(self, types={}, conditions=(), definitions={}, **changed)

    def reduces(self) -> tuple[Line, ...]:
        return tuple([line for line in self.lines if line.op == "reduce"])

    @functools.cached_property
    def pruned(self) -> str:
        """The option by which tiles of edges are left out; "" where none are."""
        asked = [PRUNED.get(line.attrs[1], "") for line in self.lines if line.op == "reduce"]
        asked += ["prune_backward" for line in self.lines if line.op == "kept"]
        return max(asked, default="")

    def phase(self, ref: str) -> int:
        """0: known before any edge is visited; 1: while visiting a destination's edges; 2: only after all edges."""
        return self.phases.get(ref, 0)

    @functools.cached_property
    def phases(self) -> dict[str, int]:
        return _phases(self)


def head_text(kind: str, tensors: int, reverse: bool, batch: int, launch: tuple[int, int] = (0, 0)) -> str:
    text = VERSION + " relation " + kind
    if tensors:
        text += " " + str(tensors)
    if reverse:
        text += " reverse"
    if batch:
        text += " batch " + str(batch)
    if launch != (0, 0):
        text += " launch " + str(launch[0]) + " " + str(launch[1])
    return text


def operand_text(number: int, place: str, name: str, dtype: str, sizes: tuple, flag: str) -> str:
    pattern = ", ".join(["1" if s == 1 else "*" for s in sizes])
    return (
        "operand "
        + str(number)
        + " "
        + place
        + " "
        + name
        + " "
        + dtype
        + " ["
        + pattern
        + "]"
        + (" " + flag if flag else "")
    )


def line_text(outs: tuple, op: str, args: tuple, attrs: tuple) -> str:
    words = [op, *attrs, *args] if op in ("reduce", "scan") else [op, *args, *attrs]
    return ", ".join(outs) + " = " + " ".join(words)


def function_text(number: int, f: Function) -> list[str]:
    rows = ["function " + str(number) + " " + str(f.params)]
    rows += ["| " + line_text(line.outs, line.op, line.args, line.attrs) for line in f.lines]
    return [*rows, "| return " + " ".join(f.returns)]


def to_text(p: Program) -> str:
    rows = [head_text(p.kind, p.relation_tensors, p.reverse, p.batch, p.launch)]
    rows += [operand_text(i, o.place, o.name, o.dtype, o.sizes, o.flag) for i, o in enumerate(p.operands)]
    rows += ["scalar " + str(i) + " " + name for i, name in enumerate(p.scalars)]
    for i, f in enumerate(p.functions):
        rows += function_text(i, f)
    rows += [line_text(line.outs, line.op, line.args, line.attrs) for line in p.lines]
    return "\n".join([*rows, "return " + " ".join(p.returns)])


def number_text(value: Any) -> str:
    """A Python number as a literal of the text: exact, and the same under every locale and compiler."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, int):
        return str(int(value))
    if value != value:
        return "+nan"
    if value == float("inf"):
        return "+inf"
    if value == float("-inf"):
        return "-inf"
    return float.hex(value)


@functools.lru_cache(65536)
def read_number(word: str) -> int | float | None:
    """The number a literal stands for; None where the word is no literal."""
    if _INTEGER.match(word):
        return int(word)
    if _FLOAT.match(word):
        return float(word) if word[-1] in "fn" else float.fromhex(word)
    return None


def literal_type(word: str) -> Type:
    """The type of a literal: a Python number, of its partner's dtype."""
    return Type("shared", "i64" if isinstance(read_number(word), int) else "f64", (), True)


def _phases(p: Program) -> dict[str, int]:
    """When each value is known; refuses what one pass over the edges cannot compute."""
    phase: dict[str, int] = {o.ref: 0 if o.place in ("src", "shared") else 1 for o in p.operands}
    reduced: set[str] = set()
    for line in p.lines:
        when = max([phase.get(a, 0) for a in line.args], default=0)
        place = p.types[line.outs[0]].place
        if line.op == "scan":
            states = int(line.attrs[2])
            if when == 2 or any(a in reduced for a in line.args[states:]):
                raise TigaError(f"{line.outs[0]} scans a reduce of the same program; it belongs into a second program")
            phase.update({o: 1 for o in line.outs})
            reduced.update(line.outs[:states])
            continue
        if line.op == "reduce":
            when = 1 if line.attrs[0] == "dst" else 2
            if any(phase.get(a, 0) == 2 for a in line.args) and (
                line.attrs[0] != "shared" or any(phase.get(a, 0) == 1 for a in line.args)
            ):
                raise TigaError(f"{line.outs[0]} folds a value that is known only after all edges")
        elif place in ("edge", "dst"):
            if when == 2 or (place == "edge" and any(a in reduced for a in line.args)):
                raise TigaError(
                    f"{line.outs[0]} reads a reduce of the same program on the edge; it belongs into a second program"
                )
            when = 1
        for o in line.outs:
            phase[o] = when
            if (line.op == "reduce" and line.attrs[0] == "dst") or (
                place == "dst" and any(a in reduced for a in line.args)
            ):
                reduced.add(o)
    return phase


# What the text and the operands' shapes give.


def evaluate_size(size: Any, shapes: tuple, operands: tuple[Operand, ...]) -> Any:
    """A size expression with the operands' shapes put in."""
    if isinstance(size, Dim):
        return shapes[size.operand][size.dim + (operands[size.operand].place != "shared")]
    if isinstance(size, Total) and size.rule != "tiles":  # a number of tiles follows from rows
        parts = [evaluate_size(part, shapes, operands) for part in size.parts]
        if size.rule == "quotient":
            return parts[0] // parts[1]
        total = parts[0]
        for part in parts[1:]:
            total = total + part if size.rule == "sum" else total * part
        return total
    return size


def prune(p: Program, returns: tuple[str, ...]) -> Program:
    """The program that gives `returns` only: dead lines go, operands and values are numbered anew."""
    live: set[str] = set(returns)
    kept: list[Line] = []
    for line in reversed(p.lines):
        if any(o in live for o in line.outs):
            kept.append(line)
            live.update(line.args)
    lines, names = numbered(kept[::-1])
    operands = tuple([o for o in p.operands if o.ref in live])
    scalars = tuple([s for s in p.scalars if s in live])
    lines, functions = used_functions(lines, p.functions)
    returned = tuple([names.get(r, r) for r in returns])
    return p.untyped(operands=operands, scalars=scalars, lines=lines, returns=returned, functions=functions)


def numbered(lines: Sequence[Line]) -> tuple[tuple[Line, ...], dict[str, str]]:
    """The lines with their values numbered in order, and the new word of each."""
    names: dict[str, str] = {}
    for line in lines:
        for o in line.outs:
            names[o] = "%" + str(len(names))
    words = lambda refs: tuple([names.get(r, r) for r in refs])
    return tuple([Line(words(x.outs), x.op, words(x.args), x.attrs) for x in lines]), names


def used_functions(
    lines: tuple[Line, ...], functions: tuple[Function, ...]
) -> tuple[tuple[Line, ...], tuple[Function, ...]]:
    """The functions that scans read, numbered anew."""
    order: dict[int, int] = {}
    new = []
    for line in lines:
        if line.op == "scan":
            direction, number, states, gradient = line.attrs
            numbers = [order.setdefault(int(k), len(order)) if k != "-1" else -1 for k in (number, gradient)]
            line = Line(line.outs, "scan", line.args, (direction, str(numbers[0]), states, str(numbers[1])))
        new.append(line)
    return tuple(new), tuple([functions[k] for k in order])
