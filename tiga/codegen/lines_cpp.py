"""A program's lines as C++: expressions of one number, inside loops over edges and features.

A value is written where it is read, unless it is a root: a sum over features, a product with a matrix, what is costly
and read twice, and whatever is the same for many edges. Roots are small arrays, filled by a loop of their own. Feature
sizes are constants of the text. How loops run and how arrays lie is left to the two frames (emit_cpp, tiles_cpp).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from tiga.codegen.rows import Analysis, Pass, Refused, folded_args, read_args
from tiga.codegen.words_cpp import Array, Scope, literal, plain, power
from tiga.primitives import PRIMITIVES
from tiga.program import Line, evaluate_size, literal_type, read_number
from tiga.types import promote

# fmt: off
CPP = {"bool": "bool", "u8": "uint8_t", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "i64",
       "f32": "float", "f64": "double"}
TEXTS = {
    **{name: "{0} " + sign + " {1}" for name, sign in (
        ("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"), ("lt", "<"), ("le", "<="), ("eq", "=="), ("ne", "!="),
        ("and", "&"), ("or", "|"), ("xor", "^"))},
    **{name: "tiga::" + name + "({0}, {1})" for name in ("pow", "maximum", "minimum", "fmod", "remainder")},
    **{name: "tiga::" + name + "({0})" for name in ("exp", "exp2", "tanh", "sigmoid", "rsqrt", "sign")},
    **{name: "std::" + name + "({0})" for name in (
        "floor", "ceil", "trunc", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos", "tan", "atan", "asin", "acos",
        "sinh", "cosh", "erf", "isnan", "isinf", "isfinite")},
    "atan2": "std::atan2({0}, {1})", "norm": "std::sqrt({0})", "abs": "tiga::absolute({0})",
    "round": "tiga::round_even({0})", "neg": "-{0}", "not": "~{0}", "where": "{0} ? {1} : {2}",
    "relu": "{0} < 0 ? 0 : {0}",
}
CHEAP = {"add", "sub", "mul", "neg", "abs", "relu", "lt", "le", "eq", "ne", "and", "or", "xor", "not", "where",
         "maximum", "minimum", "isnan", "isinf", "isfinite", "sign"}
INTEGER = {"floor": "{0}", "ceil": "{0}", "trunc": "{0}", "round": "{0}", "isnan": "false", "isinf": "false",
           "isfinite": "true"}
# fmt: on
INLINE = {"to", "spread", "unsqueeze", "squeeze", "permute", "expand_like", "zeros_like", "arange", "size", "number"}
MOVES = {"part", "slice", "unslice", "reshape", "reshape_like", "rand"}
ROOTS = {"sum", "amax", "amin", "linear", "cat", "gather"}
NARROW = 8
"""Features up to which a value's edges lie beside each other in memory, so that vectors hold edges."""


class Lines:
    def __init__(self, analysis: Analysis, work: Pass, shapes: tuple, forms: dict) -> None:
        """forms: dtypes of the tensors that are read, by reference."""
        self.a, self.p, self.work, self.shapes, self.forms = analysis, analysis.p, work, shapes, forms
        self.arrays: dict[str, Array] = {}
        self.arguments: list[tuple] = []
        self.counter = itertools.count()
        self.peel: Any = None  # an axis whose loop stands around all others
        self.declared: list[str] = []
        self.once: list[str] = []
        self.row: list[str] = []
        self.edge: list[str] = []
        self.finish: list[str] = []
        self.bytes = 0
        self.numbers = False
        self.finishing = False
        if any(0 in self.shape(ref) for ref in self.p.types):
            raise Refused("a feature of size 0")
        self.rooted = self.weights()
        self.find_roots()

    # Shapes.

    def axes(self, ref: str) -> tuple:
        return self.a.axes(ref)

    def size(self, axis: Any) -> int:
        return evaluate_size(axis, self.shapes, self.p.operands) if isinstance(axis, tuple) else axis

    def shape(self, ref: str) -> tuple[int, ...]:
        return tuple([self.size(a) for a in self.axes(ref)])

    def dtype(self, ref: str) -> str:
        t = self.p.types.get(ref)
        if t is None:
            return "i64" if ref not in self.p.scalars and isinstance(read_number(ref), int) else "f64"
        if t.dtype not in CPP:
            raise Refused(f"{t.dtype}, which C++ computes no faster than torch")
        return t.dtype

    def lead(self, ref: str) -> int:
        t = self.p.types.get(ref)
        return 0 if t is None or t.place == "shared" else 1 if t.place == self.work.owner else 2

    # Which values are arrays.

    def weights(self) -> set[str]:
        """What multiplies a vector of the other end in a sum: such sums are products, of a weight in an array."""
        found = set()
        for f in (*self.work.folds, *self.work.shared):
            line = self.a.defined.get(f.args[0]) if f.attrs[-1] == "sum" else None
            if line is not None and line.op == "mul":
                for w, x in (line.args, line.args[::-1]):
                    if x in self.work.inputs and self.lead(x) == 2 and w in self.a.defined and self.lead(w) == 2:
                        if math.prod(self.shape(w)) < math.prod(self.shape(x)):
                            found.add(w)
        return found

    def find_roots(self) -> None:
        """Of each value the readers are the roots, folds and results that it goes into through what is no root."""
        uses: dict[str, set[str]] = {}
        ends = [*[(f.outs[0], folded_args(f)) for f in (*self.work.folds, *self.work.shared)]]
        ends += [("store " + r, (r,)) for r in (*self.work.stored, *self.work.results)]
        for end, args in ends:
            for a in args:
                uses.setdefault(a, set()).add(end)
        for line in reversed(self.work.lines):
            out = line.outs[0]
            readers = uses.get(out, set())
            if self.must_root(line, readers):
                self.rooted.add(out)
            into = {out} if out in self.rooted else readers
            for a in read_args(line):
                uses.setdefault(a, set()).update(into)
            if line.op in ("reshape", "reshape_like"):
                self.rooted.add(line.args[0])

    def must_root(self, line: Line, readers: set[str]) -> bool:
        out = line.outs[0]
        if line.op in ROOTS or out in self.rooted:
            return True
        lead = self.lead(out)
        for r in readers:
            reader = self.a.defined.get(r)
            after = 2 if reader is None else self.lead(r)
            if lead < after and out not in self.a.late and not r.startswith("store "):
                return line.op not in INLINE
        if line.op in CHEAP or line.op in INLINE or line.op in MOVES:
            return False
        return len(readers) > 1 or any(self.wider(r, out) for r in readers)

    def wider(self, end: str, ref: str) -> bool:
        """Whether the loops of a root or fold run over more than the value's features."""
        line = self.a.defined.get(end)
        most = [self.shape(end)] if line is not None else []
        if line is not None:
            most += [self.shape(a) for a in folded_args(line) if a in self.p.types] if line.op == "reduce" else []
            most += [self.shape(a) for a in read_args(line) if a in self.p.types] if line.op in ROOTS else []
        return any(math.prod(s) > math.prod(self.shape(ref)) for s in most)

    # Text.

    def name(self, stem: str = "v") -> str:
        return stem + str(next(self.counter))

    def argument(self, stem: str, *what: Any) -> str:
        for name, *known in self.arguments:
            if tuple(known) == what:
                return name
        name = self.name(stem)
        self.arguments.append((name, *what))
        return name

    def new_array(self, stem: str, dtype: str, lead: int, axes: tuple) -> Array:
        sizes = [1 if a == self.peel else self.size(a) for a in axes]
        steps = tuple([math.prod(sizes[k + 1 :]) if s > 1 else 0 for k, s in enumerate(sizes)])
        found = Array(self.name(stem), dtype, lead, steps, math.prod(sizes))
        self.declare(found)
        return found

    def flat(self, idx: tuple[str, ...], steps: tuple) -> str:
        terms = [i if s == 1 else f"{i} * {s}" for i, s in zip(idx, steps) if s and i != "0"]
        return " + ".join(terms) or "0"

    def steps(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([math.prod(shape[k + 1 :]) if s != 1 else 0 for k, s in enumerate(shape)])

    def broadcast(self, ref: str, idx: tuple[str, ...]) -> tuple[str, ...]:
        """The feature numbers of an argument, from those of a result: aligned from the right."""
        shape = self.shape(ref) if ref in self.p.types else ()
        own = idx[len(idx) - len(shape) :]
        return tuple(["0" if s == 1 else i for s, i in zip(shape, own)])

    # Reading.

    def read(self, ref: str, idx: tuple[str, ...], scope: Scope) -> str:
        """The number of a value at these features, as an expression of its dtype."""
        if ref not in self.p.types and ref not in self.p.scalars:
            return literal(ref)
        key = (ref, idx)
        if key not in scope.known:
            scope.known[key] = self.expression(ref, idx, scope)
        return scope.known[key]

    def cast(self, ref: str, idx: tuple[str, ...], dtype: str, scope: Scope) -> str:
        text = self.read(ref, idx, scope)
        own = self.dtype(ref)
        if own == dtype:
            return text
        return f"{CPP[dtype]}({text})" if dtype != "bool" else f"({text} != 0)"

    def expression(self, ref: str, idx: tuple[str, ...], scope: Scope) -> str:
        if ref in self.p.scalars:
            return self.argument("c", "scalar", ref)
        if ref in self.arrays:
            array = self.arrays[ref]
            return self.at(array, self.flat(idx, array.steps))
        line = self.a.defined.get(ref)
        if ref in self.work.inputs or line is None:
            return self.field(ref, self.flat(idx, self.steps(self.shape(ref))))
        if self.finishing and ref not in self.a.late and ref not in self.rooted and self.lead(ref) == 2:
            raise Refused(f"{line.op} after the edges")
        text = self.inline(line, idx, scope)
        name = self.name()
        scope.rows.append(f"const {CPP[self.dtype(ref)]} {name} = {text};")
        return name

    def inline(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        if PRIMITIVES[line.op].elementwise:
            return self.pointwise(line, idx, scope)
        write = getattr(self, "inline_" + line.op, None)
        if write is None:
            raise Refused(f"{line.op} on the edge")
        return write(line, idx, scope)

    def pointwise(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        t = self.p.types[line.outs[0]]
        types = tuple([self.p.types.get(a) or literal_type(a) for a in line.args])
        dtype = promote(types)[0] if t.dtype == "bool" and line.op not in ("and", "or", "xor", "not") else t.dtype
        if dtype not in CPP:
            raise Refused(f"{dtype}, which C++ computes no faster than torch")
        args = [
            self.cast(a, self.broadcast(a, idx), "bool" if line.op == "where" and k == 0 else dtype, scope)
            for k, a in enumerate(line.args)
        ]
        integer = dtype not in ("f32", "f64")
        text = INTEGER.get(line.op, TEXTS[line.op]) if integer else TEXTS[line.op]
        if line.op == "not" and dtype == "bool":
            text = "!{0}"
        if line.op == "pow":
            text = power(args, line.args[1]) or text
        return text.format(*[plain(a) for a in args])

    def inline_to(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        return self.cast(line.args[0], idx, line.attrs[0], scope)

    def inline_spread(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        return self.cast(line.args[0], self.broadcast(line.args[0], idx), self.dtype(line.outs[0]), scope)

    def inline_unsqueeze(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        k = len(idx) + int(line.attrs[0])
        return self.read(line.args[0], idx[:k] + idx[k + 1 :], scope)

    def inline_squeeze(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        k = len(idx) + 1 + int(line.attrs[0])
        return self.read(line.args[0], idx[:k] + ("0",) + idx[k:], scope)

    def inline_permute(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        rank, moved = len(idx), list(idx)
        for k, d in enumerate(line.attrs):
            moved[rank + int(d)] = idx[rank - len(line.attrs) + k]
        return self.read(line.args[0], tuple(moved), scope)

    def inline_expand_like(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        return self.read(line.args[0], self.broadcast(line.args[0], idx), scope)

    def inline_zeros_like(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        return "0"

    def inline_arange(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        return f"i64({idx[0]})"

    def inline_size(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        return f"i64({self.shape(line.args[0])[int(line.attrs[0])]})"

    def inline_number(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        return self.edge_number()

    def inline_part(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        dim, k = int(line.attrs[0]), int(line.attrs[1])
        start = sum([self.shape(a)[dim] for a in line.args[1 : 1 + k]])
        return self.shifted(line.args[0], idx, dim, str(start), "1", scope)

    def inline_slice(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        dim, start, _, step = line.attrs
        return self.shifted(line.args[0], idx, int(dim), start, step, scope)

    def shifted(self, ref: str, idx: tuple[str, ...], dim: int, start: str, step: str, scope: Scope) -> str:
        k = len(idx) + dim
        at = idx[k] if step == "1" else f"{idx[k]} * {step}"
        moved = f"({start} + {at})" if self.shape(ref)[dim] != 1 else "0"
        return self.read(ref, idx[:k] + (moved,) + idx[k + 1 :], scope)

    def inline_unslice(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        dim, (start, length, step) = int(line.attrs[0]), [int(x) for x in line.attrs[1:]]
        if not length:
            return "0"
        k = len(idx) + dim
        at = f"({idx[k]} - {start})"
        inside = f"{at} >= 0 && {at} % {step} == 0 && {at} / {step} < {length}"
        # where there is nothing to read the first is read, and not used
        where = f"({inside} ? {at} / {step} : 0)" if self.shape(line.args[0])[dim] != 1 else "0"
        x = self.read(line.args[0], idx[:k] + (where,) + idx[k + 1 :], scope)
        return f"({inside}) ? {x} : 0"

    def inline_reshape(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        source, flat = line.args[0], self.flat(idx, self.steps(self.shape(line.outs[0])))
        if source in self.arrays:
            return self.at(self.arrays[source], flat)
        return self.field(source, flat)

    inline_reshape_like = inline_reshape

    def inline_rand(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        flat = self.flat(idx, self.steps(self.shape(line.outs[0])))
        return f"tiga::hash_uniform({self.read(line.args[0], (), scope)}, {self.edge_number()}, {flat})"

    def inline_gather(self, line: Line, idx: tuple[str, ...], scope: Scope) -> str:
        table, i = line.args
        rank = len(self.shape(i))
        at, row = self.read(i, self.broadcast(i, idx[:rank]), scope), math.prod(self.shape(table)[1:])
        flat = self.flat(idx[rank:], self.steps(self.shape(table)[1:]))
        base = self.pointer(table)
        return f"{at} >= 0 && {at} < {self.shape(table)[0]} ? {base}[i64({at}) * {row} + {flat}] : 0"

    # Tensors.

    def pointer(self, ref: str) -> str:
        return self.argument("x", "field", ref)

    def stride(self, ref: str) -> str:
        return self.argument("x_row", "row", ref)

    def field(self, ref: str, flat: str) -> str:
        self.dtype(ref)
        if self.lead(ref) == 0:
            return f"{self.pointer(ref)}[{flat}]"
        if self.lead(ref) == 1:
            return self.owner_field(ref, flat)
        return self.edge_field(ref, flat) if self.p.types[ref].place == "edge" else self.far_field(ref, flat)

    # What the frames say.

    def declare(self, array: Array) -> None:
        raise NotImplementedError

    def at(self, array: Array, flat: str) -> str:
        raise NotImplementedError

    def owner_row(self) -> str:
        raise NotImplementedError

    def edge_number(self) -> str:
        raise NotImplementedError

    def owner_field(self, ref: str, flat: str) -> str:
        raise NotImplementedError

    def edge_field(self, ref: str, flat: str) -> str:
        raise NotImplementedError

    def far_field(self, ref: str, flat: str) -> str:
        raise NotImplementedError

    def loops(self, lead: int, axes: tuple) -> tuple[list[str], tuple[str, ...]]:
        """Loops over all that a value has, the innermost of vectors, and its feature numbers in them."""
        raise NotImplementedError

    def each(self, lead: int, axes: tuple, skip: int = 0) -> tuple[list[str], tuple[str, ...]]:
        """Loops without vectors over all but the last `skip` features: bodies have vectors of their own."""
        raise NotImplementedError

    def filled(self, array: Array, start: str) -> list[str]:
        """Every row's features set to a number."""
        raise NotImplementedError
