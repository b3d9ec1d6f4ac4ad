"""The text of a program, read and verified line by line; nothing in it is ever evaluated."""

from __future__ import annotations

import functools
import re
from typing import Any

from tiga import passes
from tiga.errors import TigaError
from tiga.infer import infer
from tiga.primitives import PRIMITIVES
from tiga.program import VERSION, Function, Line, Operand, Program, read_number
from tiga.reducers import REDUCERS
from tiga.relations import RELATIONS
from tiga.types import DTYPES, PLACES, Dim, Total, Type

MAX_LINES, MAX_RANK, MAX_TEXT, MAX_WEIGHT = 20_000, 16, 4_000_000, 512

KINDS = tuple(RELATIONS)
# position: autocast leaves it alone; number: a Python number carried as a 0-d float64 tensor
FLAGS = ("position", "number")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z", re.ASCII)
_VALUE = re.compile(r"%(0|[1-9][0-9]{0,5})\Z", re.ASCII)


@functools.lru_cache(8192)
def parse(text: str) -> Program:
    """Read and verify. Raises TigaError naming the line; never evaluates anything."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise TigaError(f"a program is text of at most {MAX_TEXT} characters")
    rows = text.split("\n")
    if len(rows) > MAX_LINES:
        raise TigaError(f"a program of {len(rows)} lines; at most {MAX_LINES} are read")
    reader = _Reader()
    for number, row in enumerate(rows):
        try:
            reader.row(number, row)
        except TigaError as e:
            raise TigaError(f"program line {number + 1}, {row[:120]!r}: {e}") from None
        except (KeyError, IndexError, ValueError, TypeError, OverflowError, AttributeError) as e:
            raise TigaError(f"program line {number + 1}, {row[:120]!r}: cannot be read ({type(e).__name__})") from None
    program = reader.finish()
    passes.ran("verify")
    return program


class _Reader:
    def __init__(self) -> None:
        self.head: tuple[str, int, bool, int] = ("", 0, False, 0)
        self.launch = (0, 0)
        self.operands: list[Operand] = []
        self.scalars: list[str] = []
        self.lines: list[Line] = []
        self.returns: tuple[str, ...] = ()
        self.types: dict[str, Type] = {}
        self.conditions: list = []
        self.outs = 0
        self.functions: list[Function] = []
        self.body: list | None = None  # of the function being read: [parameters, lines]

    def row(self, number: int, row: str) -> None:
        words = row.split(" ")
        if number == 0:
            self.read_head(words)
        elif self.returns:
            raise TigaError("nothing may follow the return line")
        elif words[0] == "operand":
            self.read_operand(words, row)
        elif words[0] == "scalar":
            self.read_scalar(words)
        elif words[0] == "|":
            self.read_body(row[2:])
        elif self.body is not None:
            raise TigaError("a function ends with '| return'")
        elif words[0] == "function":
            self.read_function(words)
        elif words[0] == "return":
            self.read_return(words[1:])
        else:
            self.read_line(row)

    def read_head(self, words: list[str]) -> None:
        if words[0] != VERSION:
            raise TigaError(f"the first line must start with {VERSION!r}; this version of tiga reads no other format")
        if len(words) < 3 or words[1] != "relation" or words[2] not in KINDS:
            raise TigaError(f"expected 'relation' and one of {', '.join(KINDS)}")
        rest, tensors, reverse, batch = words[3:], 0, False, 0
        if rest and rest[0].isdigit():
            tensors = _small(rest.pop(0))
        if rest and rest[0] == "reverse":
            reverse = rest.pop(0) == "reverse"
        if rest and rest[0] == "batch":
            batch = _small(rest[1])
            rest = rest[2:]
        if rest and rest[0] == "launch":
            self.launch = (_power_of_two(rest[1], 1 << 16), _power_of_two(rest[2], 32))
            rest = rest[3:]
        counts = RELATIONS[words[2]].tensor_counts
        if rest or tensors not in counts or (reverse and words[2] == "csr"):
            raise TigaError(
                f"relation {words[2]} takes {' or '.join(map(str, counts))} tensors, then 'reverse', 'batch N', "
                "'launch BLOCK_E NUM_WARPS'"
            )
        self.head = (words[2], tensors, reverse, batch)

    def define(self, ref: str, t: Type) -> None:
        if ref in self.types:
            raise TigaError(f"{ref} is defined twice")
        if len(t.sizes) > MAX_RANK:
            raise TigaError(f"{ref} has {len(t.sizes)} feature dimensions; at most {MAX_RANK}")
        if any(_weight(size) > MAX_WEIGHT for size in t.sizes):
            raise TigaError(f"a size of {ref} is made of more than {MAX_WEIGHT} others")
        self.types[ref] = t

    def read_operand(self, words: list[str], row: str) -> None:
        if self.scalars or self.lines:
            raise TigaError("operands come first")
        match = re.match(r"operand (\d{1,5}) (\w+) (\w+) (\w+) \[([1*, ]*)\](?: (\w+))?\Z", row, re.ASCII)
        if not match:
            raise TigaError("expected: operand NUMBER PLACE NAME DTYPE [SIZES] FLAG")
        number, place, name, dtype, pattern, flag = match.groups()
        marks = pattern.split(", ") if pattern else []
        if int(number) != len(self.operands) or place not in PLACES or dtype not in DTYPES or not _NAME.match(name):
            raise TigaError(f"operands are numbered from 0, have a place ({', '.join(PLACES)}), a name and a dtype")
        if any(m not in ("1", "*") for m in marks) or (flag and flag not in FLAGS):
            raise TigaError("sizes are 1 or *, a flag is " + " or ".join(FLAGS))
        if marks and len(marks) < self.head[3]:
            raise TigaError(f"the first {self.head[3]} sizes are the batch")
        sizes = tuple([1 if m == "1" else Dim(int(number), i) for i, m in enumerate(marks)])
        o = Operand(place, name, dtype, tuple([1 if m == "1" else "*" for m in marks]), flag or "")
        if flag == "number" and (place != "shared" or any(m != "1" for m in marks)):
            raise TigaError("a number is a shared operand without features")
        self.define(o.ref, Type(place, dtype, () if flag == "number" else sizes, flag == "number"))
        self.operands.append(o)

    def read_scalar(self, words: list[str]) -> None:
        if len(words) != 3 or words[1] != str(len(self.scalars)) or not _NAME.match(words[2]) or self.lines:
            raise TigaError("expected: scalar NUMBER NAME")
        self.define(words[2], Type("shared", "f64", (), True))
        self.scalars.append(words[2])

    def read_return(self, words: list[str]) -> None:
        for ref in words:
            if ref not in self.types:
                raise TigaError(f"{ref} is not defined")
            if self.types[ref].weak:
                raise TigaError(f"{ref} is a number, not a value of nodes or edges")
        if not words:
            raise TigaError("a program returns at least one value")
        self.returns = tuple(words)

    def type_of(self, word: str) -> Type:
        t = self.types.get(word)
        if t is not None:
            return t
        value = read_number(word)
        if value is None:
            raise TigaError(f"{word!r} is not defined")
        return Type("shared", "i64" if isinstance(value, int) else "f64", (), True)

    def read_line(self, row: str) -> None:
        left, equals, right = row.partition(" = ")
        words = right.split(" ")
        outs = tuple(left.split(", "))
        if not equals or any(not _VALUE.match(o) for o in outs):
            raise TigaError("expected: %N = OPERATION ...")
        for o in outs:
            if int(o[1:]) != self.outs:
                raise TigaError(f"values are numbered in order; expected %{self.outs}")
            self.outs += 1
        line = (
            _reduce_line(outs, words)
            if words[0] == "reduce"
            else self.scan_line(outs, words)
            if words[0] == "scan"
            else self.primitive_line(outs, words)
        )
        types = tuple([self.type_of(a) for a in line.args])
        for o, t in zip(outs, infer(line, types, self.unify, self.head[3], tuple(self.functions))):
            self.define(o, t)
        self.lines.append(line)

    def read_function(self, words: list[str]) -> None:
        if len(words) != 3 or words[1] != str(len(self.functions)) or self.lines:
            raise TigaError("expected: function NUMBER PARAMETERS, before the program's lines")
        self.body = [_small(words[2]), []]

    def read_body(self, row: str) -> None:
        if self.body is None:
            raise TigaError("a function's lines follow its head")
        params, lines = self.body
        defined = {"a" + str(k) for k in range(params)} | {line.outs[0] for line in lines}

        def known(words: list[str] | tuple[str, ...]) -> None:
            for w in words:
                if w not in defined and read_number(w) is None:
                    raise TigaError(f"{w!r} is not defined in this function")

        if row.startswith("return "):
            known(row.split(" ")[1:])
            self.functions.append(Function(params, tuple(lines), tuple(row.split(" ")[1:])))
            self.body = None
            return
        left, equals, right = row.partition(" = ")
        if not equals or left != "%" + str(len(lines)):
            raise TigaError(f"expected: %{len(lines)} = OPERATION ...")
        line = self.primitive_line((left,), right.split(" "))
        if line.op in ("number", "rand", "gather", "linear", "spread", "size"):
            raise TigaError(f"{line.op} in a function; functions are pointwise in the edges")
        known(line.args)
        lines.append(line)

    def scan_line(self, outs: tuple, words: list[str]) -> Line:
        if len(words) < 6 or words[1] not in ("forward", "reverse"):
            raise TigaError("expected: scan forward|reverse FUNCTION STATES GRADIENT VALUES")
        number, states = _small(words[2]), _small(words[3])
        gradient = -1 if words[4] == "-1" else _small(words[4])
        if number >= len(self.functions) or gradient >= len(self.functions):
            raise TigaError("no such function")
        f, args = self.functions[number], tuple(words[5:])
        if (
            states < 1
            or len(args) != f.params
            or states > f.params
            or len(outs) != len(f.returns)
            or len(f.returns) < states
        ):
            raise TigaError(
                f"function {number} takes {f.params} values, {states} of them states, and gives {len(f.returns)}"
            )
        if gradient >= 0 and (
            self.functions[gradient].params != 3 * states
            or len(self.functions[gradient].returns) != states
            or f.params != 2 * states
        ):
            raise TigaError(
                "a gradient function takes lifted, final and gradient states and gives the lifted states' gradients"
            )
        return Line(outs, "scan", args, tuple(words[1:5]))

    def primitive_line(self, outs: tuple, words: list[str]) -> Line:
        row = PRIMITIVES.get(words[0])
        if row is None:
            raise TigaError(f"no operation {words[0]!r}")
        arity = row.arity if row.arity >= 0 else len(words) - 1 - row.attrs
        if (
            arity < (1 if row.arity < 0 else 0)
            or (row.attrs >= 0 and len(words) != 1 + arity + row.attrs)
            or len(words) < 1 + arity
            or len(outs) != 1
        ):
            raise TigaError(
                f"{row.name} takes {row.arity if row.arity >= 0 else 'any number of'} arguments and {row.attrs} "
                "attributes and gives one value"
            )
        return Line(outs, words[0], tuple(words[1 : 1 + arity]), tuple(words[1 + arity :]))

    def unify(self, a: Any, b: Any) -> None:
        symbolic = isinstance(a, tuple) or isinstance(b, tuple)
        if symbolic:
            if a != b:
                self.conditions.append((a, b))
        elif a != b:
            raise TigaError(f"sizes {a} and {b} differ")

    def finish(self) -> Program:
        if not self.returns or self.body is not None:
            raise TigaError("a program ends with a return line")
        definitions = {o: line for line in self.lines for o in line.outs}
        p = Program(
            *self.head,
            tuple(self.operands),
            tuple(self.scalars),
            tuple(self.lines),
            self.returns,
            self.types,
            tuple(dict.fromkeys(self.conditions)),
            definitions,
            tuple(self.functions),
            self.launch,
        )
        if not p.operands:
            raise TigaError("a program reads at least one operand")
        p.phase("")  # an edge value that reads a finished reduce is refused here
        return p


def _weight(size: Any) -> int:
    """How many sizes a size is computed from, shared ones again: whoever walks the expression is done soon."""
    return sum([_weight(part) for part in size.parts]) if isinstance(size, Total) else 1


def _small(word: str) -> int:
    if not word.isdigit() or len(word) > 2:
        raise TigaError(f"expected a small number, found {word!r}")
    return int(word)


def _power_of_two(word: str, most: int) -> int:
    """A power of two, or 0."""
    if not word.isdigit() or len(word) > 6 or int(word) > most or int(word) & (int(word) - 1):
        raise TigaError(f"expected a power of two of at most {most}, or 0; found {word!r}")
    return int(word)


def _reduce_line(outs: tuple, words: list[str]) -> Line:
    if len(words) < 3 or words[2] not in REDUCERS:
        raise TigaError(f"expected: reduce PLACE REDUCER VALUES, with a reducer of {', '.join(REDUCERS)}")
    row = REDUCERS[words[2]]
    if words[1] not in row.places or len(words) != 3 + row.arity or len(outs) != len(row.keeps):
        raise TigaError(
            f"{row.name} folds to {' or '.join(row.places)}, takes {row.arity} values and gives {len(row.keeps)}"
        )
    return Line(outs, "reduce", tuple(words[3:]), (words[1], words[2]))
