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

The text is the operator's argument, Dynamo's guard, the export payload and the cache key. It may come from anyone: it is read by the small
parser below, verified before any use, and never evaluated.
"""
from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

from tiga import passes
from tiga.errors import TigaError
from tiga.primitives import PRIMITIVES
from tiga.reducers import REDUCERS
from tiga.types import DTYPES, PLACES, Dim, Total, Type, broadcast_sizes, compute_dtype, is_one

VERSION = "tiga/1"
KINDS = ("dense", "triangular", "window", "blocks", "intervals", "csr")
MAX_LINES, MAX_RANK, MAX_TEXT, MAX_WEIGHT = 20_000, 16, 4_000_000, 512
FLAGS = ("position", "number")           # position: autocast leaves it alone; number: a Python number carried as a 0-d float64 tensor

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z", re.ASCII)
_VALUE = re.compile(r"%(0|[1-9][0-9]{0,5})\Z", re.ASCII)
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
    """A function of a program, for `scan`: parameters a0, a1, ... and pointwise lines; its types follow from where it is used."""

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

    @property
    def num_tensors(self) -> int:
        return len(self.operands) + self.relation_tensors

    def reduces(self) -> tuple[Line, ...]:
        return tuple([line for line in self.lines if line.op == "reduce"])

    def phase(self, ref: str) -> int:
        """0: known before any edge is visited; 1: known while visiting a destination's edges; 2: only after all edges."""
        return self.phases.get(ref, 0)

    @functools.cached_property
    def phases(self) -> dict[str, int]:
        return _phases(self)


# ---- text -----------------------------------------------------------------------------------------------------------------------------------

def head_text(kind: str, tensors: int, reverse: bool, batch: int) -> str:
    text = VERSION + " relation " + kind
    if tensors:
        text += " " + str(tensors)
    if reverse:
        text += " reverse"
    if batch:
        text += " batch " + str(batch)
    return text


def operand_text(number: int, place: str, name: str, dtype: str, sizes: tuple, flag: str) -> str:
    pattern = ", ".join(["1" if s == 1 else "*" for s in sizes])
    return "operand " + str(number) + " " + place + " " + name + " " + dtype + " [" + pattern + "]" + (" " + flag if flag else "")


def line_text(outs: tuple, op: str, args: tuple, attrs: tuple) -> str:
    words = [op, *attrs, *args] if op in ("reduce", "scan") else [op, *args, *attrs]
    return ", ".join(outs) + " = " + " ".join(words)


def function_text(number: int, f: Function) -> list[str]:
    rows = ["function " + str(number) + " " + str(f.params)]
    rows += ["| " + line_text(line.outs, line.op, line.args, line.attrs) for line in f.lines]
    return [*rows, "| return " + " ".join(f.returns)]


def to_text(p: Program) -> str:
    rows = [head_text(p.kind, p.relation_tensors, p.reverse, p.batch)]
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


# ---- reading ----------------------------------------------------------------------------------------------------------------------------------

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
        self.head: tuple = ()
        self.operands: list[Operand] = []
        self.scalars: list[str] = []
        self.lines: list[Line] = []
        self.returns: tuple[str, ...] = ()
        self.types: dict[str, Type] = {}
        self.conditions: list = []
        self.outs = 0
        self.functions: list[Function] = []
        self.body: list | None = None                          # of the function being read: [parameters, lines]

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
        if rest or tensors not in _RELATION_TENSORS[words[2]] or (reverse and words[2] == "csr"):
            raise TigaError(f"relation {words[2]} takes {' or '.join(map(str, _RELATION_TENSORS[words[2]]))} tensors, then 'reverse', then 'batch N'")
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
        line = (_reduce_line(outs, words) if words[0] == "reduce" else self.scan_line(outs, words) if words[0] == "scan"
                else self.primitive_line(outs, words))
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
        if states < 1 or len(args) != f.params or states > f.params or len(outs) != len(f.returns) or len(f.returns) < states:
            raise TigaError(f"function {number} takes {f.params} values, {states} of them states, and gives {len(f.returns)}")
        if gradient >= 0 and (self.functions[gradient].params != 3 * states or len(self.functions[gradient].returns) != states or f.params != 2 * states):
            raise TigaError("a gradient function takes lifted, final and gradient states and gives the lifted states' gradients")
        return Line(outs, "scan", args, tuple(words[1:5]))

    def primitive_line(self, outs: tuple, words: list[str]) -> Line:
        row = PRIMITIVES.get(words[0])
        if row is None:
            raise TigaError(f"no operation {words[0]!r}")
        arity = row.arity if row.arity >= 0 else len(words) - 1 - row.attrs
        if arity < (1 if row.arity < 0 else 0) or (row.attrs >= 0 and len(words) != 1 + arity + row.attrs) or len(words) < 1 + arity or len(outs) != 1:
            raise TigaError(f"{row.name} takes {row.arity if row.arity >= 0 else 'any number of'} arguments and {row.attrs} attributes and gives one value")
        return Line(outs, words[0], tuple(words[1:1 + arity]), tuple(words[1 + arity:]))

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
        p = Program(*self.head, tuple(self.operands), tuple(self.scalars), tuple(self.lines), self.returns, self.types,
                    tuple(dict.fromkeys(self.conditions)), definitions, tuple(self.functions))
        if not p.operands:
            raise TigaError("a program reads at least one operand")
        p.phases                                               # an edge value that reads a finished reduce is refused here
        return p


_RELATION_TENSORS = {"dense": (0,), "triangular": (0,), "window": (0,), "blocks": (4,), "intervals": (2, 4), "csr": (2, 3)}


def _weight(size: Any) -> int:
    """How many sizes a size is computed from: shared ones count again, so that whoever walks the expression is done soon."""
    return sum([_weight(part) for part in size.parts]) if isinstance(size, Total) else 1


def _small(word: str) -> int:
    if not word.isdigit() or len(word) > 2:
        raise TigaError(f"expected a small number, found {word!r}")
    return int(word)


def _reduce_line(outs: tuple, words: list[str]) -> Line:
    if len(words) < 3 or words[2] not in REDUCERS:
        raise TigaError(f"expected: reduce PLACE REDUCER VALUES, with a reducer of {', '.join(REDUCERS)}")
    row = REDUCERS[words[2]]
    if words[1] not in row.places or len(words) != 3 + row.arity or len(outs) != len(row.keeps):
        raise TigaError(f"{row.name} folds to {' or '.join(row.places)}, takes {row.arity} values and gives {len(row.keeps)}")
    return Line(outs, "reduce", tuple(words[3:]), (words[1], words[2]))


def infer(line: Line, types: tuple, unify: Any, batch: int = 0, functions: tuple = ()) -> tuple[Type, ...]:
    """The types of a line's results from those of its arguments."""
    if line.op == "scan":
        return scan_types(line, types, unify, batch, functions)
    if line.op == "reduce":
        place, name = line.attrs
        for t in types:
            if place != "shared" and t.place not in ("edge", "shared", "src", "dst"):
                raise TigaError(f"reduce {place} of a value at {t.place}")
        if batch and place == "shared" and name != "sum":
            return (_beside_batch("join", lambda inner: REDUCERS[name].rule(place, inner, unify)[0], types, unify, batch),)
        return REDUCERS[name].rule(place, types, unify)
    row = PRIMITIVES[line.op]
    if batch and row.elementwise:
        types = _align_batch(types, batch)
    if batch and row.batch:
        return (_beside_batch(row.batch, lambda inner: row.rule(inner, line.attrs, unify), types, unify, batch),)
    return (row.rule(types, line.attrs, unify),)


def _beside_batch(how: str, rule: Any, types: tuple, unify: Any, batch: int) -> Type:
    """The type by a rule that is shown the features alone, with its batch dimensions put back."""
    leads = tuple([t.sizes[:batch] for t in types])
    t = rule(tuple([t._replace(sizes=t.sizes[batch:]) for t in types]))
    lead = {"first": leads[0], "join": broadcast_sizes(leads, unify), "ones": (1,) * batch, "none": ()}[how]
    return t._replace(sizes=lead + t.sizes)


def scan_types(line: Line, types: tuple, unify: Any, batch: int, functions: tuple) -> tuple[Type, ...]:
    """States at destinations, other results on edges. A state's type is what the function makes of it, the second time as the first."""
    f, states = functions[int(line.attrs[1])], int(line.attrs[2])
    for t in types[:states]:
        if t.place not in ("dst", "shared"):
            raise TigaError(f"scan starts from a value at {t.place}")
    known = [Type("edge", "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes) for t in types[states:]]
    begin = [Type("edge", t.dtype, t.sizes, t.weak) for t in types[:states]]
    for _ in range(3):
        out = apply_types(f, (*begin, *known), unify, batch)
        begin, before = [Type("edge", "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes) for t in out[:states]], begin
    if [(t.dtype, t.sizes) for t in begin] != [(t.dtype, t.sizes) for t in before]:
        raise TigaError("a scan's states change their type from edge to edge")
    return (*[Type("dst", t.dtype, t.sizes) for t in out[:states]], *[Type("edge", t.dtype, t.sizes) for t in out[states:]])


def apply_types(f: Function, types: tuple, unify: Any, batch: int = 0) -> tuple[Type, ...]:
    return body_types(f, types, unify, batch)[1]


def body_types(f: Function, types: tuple, unify: Any, batch: int = 0) -> tuple[dict[str, Type], tuple[Type, ...]]:
    """The types of a function's values where its parameters have `types`."""
    found: dict[str, Type] = {"a" + str(k): t for k, t in enumerate(types)}

    def of(word: str) -> Type:
        return found[word] if word in found else Type("shared", "i64" if isinstance(read_number(word), int) else "f64", (), True)
    for line in f.lines:
        found[line.outs[0]] = infer(line, tuple([of(a) for a in line.args]), unify, batch)[0]
    return found, tuple([of(r) for r in f.returns])


def _align_batch(types: tuple, batch: int) -> tuple:
    """Batch dimensions stay leftmost: ones are put between them and the features of values of lower rank."""
    rank = max(len(t.sizes) for t in types)
    return tuple([t if t.weak or len(t.sizes) == rank else
                  Type(t.place, t.dtype, t.sizes[:batch] + (1,) * (rank - len(t.sizes)) + t.sizes[batch:], t.weak) for t in types])


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
            if any(phase.get(a, 0) == 2 for a in line.args) and (line.attrs[0] != "shared" or any(phase.get(a, 0) == 1 for a in line.args)):
                raise TigaError(f"{line.outs[0]} folds a value that is known only after all edges")
        elif place in ("edge", "dst"):
            if when == 2 or (place == "edge" and any(a in reduced for a in line.args)):
                raise TigaError(f"{line.outs[0]} reads a reduce of the same program on the edge; it belongs into a second program")
            when = 1
        for o in line.outs:
            phase[o] = when
            if (line.op == "reduce" and line.attrs[0] == "dst") or (place == "dst" and any(a in reduced for a in line.args)):
                reduced.add(o)
    return phase


# ---- what the text and the operands' shapes give ------------------------------------------------------------------------------------------------

def evaluate_size(size: Any, shapes: tuple, operands: tuple[Operand, ...]) -> Any:
    """A size expression with the operands' shapes put in."""
    if isinstance(size, Dim):
        return shapes[size.operand][size.dim + (operands[size.operand].place != "shared")]
    if isinstance(size, Total):
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
    names: dict[str, str] = {}
    for line in reversed(kept):
        for o in line.outs:
            names[o] = "%" + str(len(names))
    lines = tuple([Line(tuple([names[o] for o in line.outs]), line.op, tuple([names.get(a, a) for a in line.args]), line.attrs)
                   for line in reversed(kept)])
    operands = tuple([o for o in p.operands if o.ref in live])
    scalars = tuple([s for s in p.scalars if s in live])
    lines, functions = used_functions(lines, p.functions)
    return Program(p.kind, p.relation_tensors, p.reverse, p.batch, operands, scalars, lines, tuple([names.get(r, r) for r in returns]), {},
                   functions=functions)


def used_functions(lines: tuple[Line, ...], functions: tuple[Function, ...]) -> tuple[tuple[Line, ...], tuple[Function, ...]]:
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


def held_dtype(t: Type) -> str:
    return compute_dtype(t.dtype)


__all__ = ["KINDS", "Line", "Operand", "Program", "VERSION", "evaluate_size", "infer", "is_one", "parse", "prune", "read_number", "to_text"]
