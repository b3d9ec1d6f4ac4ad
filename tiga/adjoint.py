"""Gradients and tangents of message passing are message passing: Program -> Program.

`adjoint` names no primitive and no reducer: the rules are the rows of the tables. A value's cotangent is gathered where the value is used; where it is
used at another place - a node's field on its edges, a parameter anywhere - it comes home by a sum, and that is all there is to the gradient of
gather, broadcast and parameters.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Optional

from tiga import passes
from tiga.builder import Builder, Value
from tiga.errors import TigaError
from tiga.primitives import PRIMITIVES
from tiga.program import Function, Line, Operand, Program, body_types, parse, prune, read_number, to_text
from tiga.reducers import REDUCERS
from tiga.types import Type, is_one

# cotangents may stay broadcast (size 1 for a size that is not) through these
_LAZY = ("sum", "unsqueeze", "squeeze", "permute", "to", "spread", "expand_like")


@dataclass(frozen=True)
class Derived:
    """A derived program and the list of tensors it reads: ("operand" | "extra" | "saved", number), in order; then the relation's tensors.

    extra: gradients of outputs (adjoint) or tangents of operands (tangent). returns: what each output is for.
    """

    text: str
    reads: tuple[tuple[str, int], ...]
    returns: tuple[Optional[int], ...]
    scalars: tuple[int, ...]


@functools.lru_cache(8192)
def augment(text: str) -> str:
    """The program that also returns what its derivatives read: results of its folds before the epilogue, in the dtype they are accumulated in."""
    passes.ran("augment")
    grown = _augment_once(text)
    while grown != text:                                       # a result returned may get a gradient, and that may read another
        text, grown = grown, _augment_once(grown)
    return text


def _augment_once(text: str) -> str:
    p = parse(text)
    results = folded(p)
    if not results:
        return text
    everything = tuple([i for i, o in enumerate(p.operands) if p.types[o.ref].floating])
    given = tuple([i for i, r in enumerate(p.returns) if p.types[r].floating])
    trial = _Adjoint(p, everything, given, {ref: k for k, ref in enumerate(results)}).derive()
    held = saved_outputs(p)
    lines, returns, outs = list(p.lines), list(p.returns), sum(len(line.outs) for line in p.lines)
    for k in sorted({k for what, k in trial.reads if what == "saved"}):
        ref = results[k]
        narrow = p.types[ref].dtype in ("f16", "bf16")
        if ref in held and not (narrow and p.returns[held[ref]] == ref):
            continue
        if narrow:
            lines.append(Line(("%" + str(outs),), "to", (ref,), ("f32",)))
            ref, outs = "%" + str(outs), outs + 1
        returns.append(ref)
    return to_text(Program(p.kind, p.relation_tensors, p.reverse, p.batch, p.operands, p.scalars, tuple(lines), tuple(returns), {},
                           functions=p.functions))


def folded(p: Program) -> list[str]:
    """What folds over edges gave: all results of reduces, the last states of scans."""
    return [o for line in p.lines if line.op in ("reduce", "scan") for o in (line.outs if line.op == "reduce" else line.outs[:int(line.attrs[2])])]


def saved_outputs(p: Program) -> dict[str, int]:
    """For each reduce result that an augmented program returns: the number of that output."""
    found: dict[str, int] = {}
    for o in folded(p):
        if o in p.returns:
            found[o] = p.returns.index(o)
    for k, r in enumerate(p.returns):                      # 16-bit results are returned in float32
        line = p.definitions.get(r)
        if line is not None and line.op == "to" and line.attrs == ("f32",) and p.types[line.args[0]].dtype in ("f16", "bf16"):
            source = p.definitions.get(line.args[0])
            if source is not None and source.op in ("reduce", "scan"):
                found[line.args[0]] = k
    return found


@functools.lru_cache(8192)
def adjoint(text: str, wanted: tuple[int, ...], given: tuple[int, ...]) -> Derived:
    """The program of the gradients of operands `wanted`, for gradients of outputs `given`, of an augmented program.

    returns[k] is the operand whose gradient output k is.
    """
    p = parse(text)
    passes.derived("adjoint", text)
    return _Adjoint(p, wanted, given, saved_outputs(p)).derive()


@functools.lru_cache(8192)
def tangent(text: str, moving: tuple[int, ...]) -> Derived:
    """The program of the tangents of the outputs of an augmented program, for tangents of operands `moving`."""
    p = parse(text)
    passes.ran("tangent")
    return _Tangent(p, moving, saved_outputs(p)).derive()


def fresh(stem: str, taken: set[str]) -> str:
    """An operand name that is not taken yet."""
    number = 0
    while stem + str(number) in taken:
        number += 1
    taken.add(stem + str(number))
    return stem + str(number)


class _Derivation:
    """Rebuilds the primal's values in a builder: reduce results are read as saved operands, the rest is computed again."""

    def __init__(self, p: Program, saved: dict[str, int]) -> None:
        self.p = p
        self.saved = saved
        self.builder = Builder(lambda a, b: None, p.batch)
        self.operands: list[Operand] = list(p.operands)
        self.sources: dict[str, tuple[str, int]] = {o.ref: ("operand", i) for i, o in enumerate(p.operands)}
        self.taken = {o.name for o in p.operands} | set(p.scalars)
        self.values: dict[str, Value] = {}
        for ref, t in p.types.items():
            if ref[0] != "%":
                self.values[ref] = self.builder.value(ref, t)

    def new_operand(self, stem: str, place: str, dtype: str, sizes: tuple, source: tuple[str, int]) -> Value:
        name = fresh(stem, self.taken)
        o = Operand(place, name, dtype, tuple([1 if is_one(s) else "*" for s in sizes]))
        self.operands.append(o)
        self.sources[o.ref] = source
        return self.builder.value(o.ref, Type(place, dtype, sizes))

    def argument(self, ref: str) -> Any:
        number = read_number(ref) if ref[0] != "%" and ref not in self.values else None
        return number if number is not None else self.values[ref]

    def replay(self) -> None:
        for line in self.p.lines:
            if line.op == "reduce":
                for o in line.outs:
                    self.values[o] = self.saved_value(o)
            elif line.op == "scan":
                states = int(line.attrs[2])
                again = self.builder.scan(line.attrs[0], self.p.functions[int(line.attrs[1])], states, tuple([self.argument(a) for a in line.args]))
                for k, o in enumerate(line.outs):
                    self.values[o] = self.saved_value(o) if k < states else again[k]
            else:
                self.values[line.outs[0]] = self.builder.emit(line.op, tuple([self.argument(a) for a in line.args]), line.attrs)

    def saved_value(self, ref: str) -> Value:
        t = self.p.types[ref]
        dtype = "f32" if t.dtype in ("f16", "bf16") else t.dtype
        return self.new_operand("saved", t.place, dtype, t.sizes, ("saved", self.saved.get(ref, -1)))

    def finish(self, outputs: list[tuple[Optional[int], Value]]) -> Derived:
        p = self.p
        whole = Program(p.kind, p.relation_tensors, p.reverse, p.batch, tuple(self.operands), p.scalars, tuple(self.builder.lines),
                        tuple([v.ref for _, v in outputs]), {}, functions=tuple(self.builder.functions))
        small = prune(whole, whole.returns)
        if not small.operands:                                 # keeps a device to run on
            small = Program(p.kind, p.relation_tensors, p.reverse, p.batch, p.operands[:1], *_tail(small), functions=small.functions)
        reads = tuple([self.sources[o.ref] for o in small.operands])
        return Derived(to_text(small), reads, tuple([k for k, _ in outputs]), tuple([p.scalars.index(s) for s in small.scalars]))


def _tail(p: Program) -> tuple:
    return p.scalars, p.lines, p.returns, {}


class _Adjoint(_Derivation):
    def __init__(self, p: Program, wanted: tuple[int, ...], given: tuple[int, ...], saved: dict[str, int]) -> None:
        super().__init__(p, saved)
        self.wanted, self.given = wanted, given
        self.cotangents: dict[str, list[Value]] = {}           # by the word of the primal value
        self.active: set[str] = {p.operands[i].ref for i in wanted}
        for line in p.lines:
            if any(a in self.active for a in line.args):
                self.active.update(o for o in line.outs if p.types[o].floating)

    def derive(self) -> Derived:
        self.replay()
        for k in self.given:
            ref = self.p.returns[k]
            t = self.p.types[ref]
            self.add(ref, self.new_operand("grad", t.place, t.dtype, t.sizes, ("extra", k)))
        for line in reversed(self.p.lines):
            if any(o in self.cotangents for o in line.outs):
                (self.reduce_line if line.op == "reduce" else self.scan_line if line.op == "scan" else self.primitive_line)(line)
        return self.finish([(i, self.operand_gradient(i)) for i in self.wanted if self.p.operands[i].ref in self.cotangents])

    def add(self, ref: str, cotangent: Optional[Value]) -> None:
        if cotangent is not None and ref in self.active:
            self.cotangents.setdefault(ref, []).append(self.builder.fold_batch(cotangent, self.values[ref]))

    def total(self, ref: str) -> Optional[Value]:
        """The cotangent of a value at its own place: contributions made elsewhere are summed home."""
        place = self.p.types[ref].place
        at: dict[str, Optional[Value]] = {}
        home: Optional[Value] = None
        for c in self.cotangents.get(ref, ()):
            c = self.full_rank(c, self.values[ref])
            if c.type.place in (place, "shared") or place == "edge":
                home = c if home is None else home + c
            elif self.is_contraction(c, place):
                part = self.builder.fold_edges(place, c)
                home = part if home is None else home + part
            else:
                held = at.get(c.type.place)
                at[c.type.place] = c if held is None else held + c
        for c in at.values():
            if c is not None:
                if place == "shared" and c.type.place == "edge":
                    c = self.builder.fold_edges("dst", c)          # a row first: then no edge value outlives its tile
                part = self.builder.fold_edges(place, c)
                home = part if home is None else home + part
        return home

    def full_rank(self, c: Value, like: Value) -> Value:
        while len(c.type.sizes) < len(like.type.sizes):
            c = c.emit("unsqueeze", str(min(self.p.batch, len(c.type.sizes)) - len(c.type.sizes) - 1))
        return c

    def is_contraction(self, c: Value, place: str) -> bool:
        """mul of an edge value of one feature with a field of the other end: its sum is a matrix product, so it is folded by itself."""
        op, args = self.builder.origin.get(c.ref, ("", ()))
        if op != "mul":
            return False
        far = {"src": "dst", "dst": "src"}.get(place)
        return any(x.type.place == "edge" and y.type.place == far and len(x.type.sizes) == len(y.type.sizes) > 0 and is_one(x.type.sizes[-1])
                   for x, y in (args, args[::-1]))

    def primitive_line(self, line: Line) -> None:
        g = self.total(line.outs[0])
        if g is None:
            return
        out, args = self.values[line.outs[0]], [self.argument(a) for a in line.args]
        row = PRIMITIVES[line.op]
        if not row.elementwise and line.op not in _LAZY:
            g = self.builder.stretch(g, out)
        if line.op in _SPECIAL:
            for ref, c in _SPECIAL[line.op](self, g, line, args):
                self.add(ref, c)
            return
        assert row.derivative is not None
        for ref, x, rule in zip(line.args, args, row.derivative(out, *args, *line.attrs)):
            if rule is None or ref not in self.active:
                continue
            c = rule(g)
            if c is None:
                continue
            if x.type.place != out.type.place != c.type.place:
                c = c.emit("spread", out.type.place)
            if row.elementwise or line.op == "expand_like":
                c = self.full_rank(c, out)
                if x.type.place in ("src", "dst") and c.type.place == "edge" and self.narrower(x, out):
                    c = self.builder.fold_edges(x.type.place, c)   # edges first: what is left is work on nodes
                c = self.builder.fold(c, out, x)
            self.add(ref, c)

    def narrower(self, x: Value, out: Value) -> bool:
        missing = len(out.type.sizes) - len(x.type.sizes)
        return missing > 0 or any(is_one(a) and not is_one(b) for a, b in zip(x.type.sizes, out.type.sizes))

    def reduce_line(self, line: Line) -> None:
        place, name = line.attrs
        row = REDUCERS[name]
        grads = tuple([self.full(o) for o in line.outs])
        if all(g is None for g in grads) or row.adjoint is None:
            return
        args = tuple([self.builder.lift(self.argument(a)) for a in line.args])
        results = tuple([self.values[o] for o in line.outs])
        for ref, c in zip(line.args, row.adjoint(self.builder, place, args, results, grads)):
            if c is None or ref not in self.active:
                continue
            own = self.p.types[ref].place
            rows = own if place == "shared" else "edge"            # a node's field folded over edges counts once an edge
            if c.type.place != rows and (own != "edge" or place == "shared"):
                c = c.emit("spread", rows)
            x = self.values[ref]
            if place != "shared" and self.narrower(x, c):
                c = self.builder.fold(self.builder.fold_edges(own, c) if own in ("src", "dst") else c, c, x)
            self.add(ref, c)

    def scan_line(self, line: Line) -> None:
        """The scan backwards: the cotangent of a state goes from edge to edge, leaving the cotangents of the values it met."""
        f, states = self.p.functions[int(line.attrs[1])], int(line.attrs[2])
        grads = [self.full(o) for o in line.outs]
        args = [self.argument(a) for a in line.args]
        if line.attrs[3] != "-1":
            self.given_gradient(line, states, args, grads)
            return
        kinds = [self.values[o].type for o in line.outs]
        inputs = (*[Type("edge", t.dtype, t.sizes) for t in kinds[:states]],
                  *[Type("edge", _strong(self.builder.lift(a).type), self.builder.lift(a).type.sizes) for a in args[states:]])
        before = self.builder.scan(line.attrs[0], keeps_states(f, states), states, tuple(args))[len(f.returns):]
        back = transposed(f, states, inputs)
        moving = [g if g is not None else 0.0 if k < states else self.zero(self.values[line.outs[k]]) for k, g in enumerate(grads)]
        result = self.builder.scan("reverse" if line.attrs[0] == "forward" else "forward", back, states,
                                   (*moving[:states], *before, *args[states:], *moving[states:]))
        for ref, x, c in zip(line.args, args, result):
            if ref in self.active:
                if self.p.types[ref].place != "edge" and c.type.place == "edge":
                    c = self.builder.fold(c, c, x)
                self.add(ref, c)

    def given_gradient(self, line: Line, states: int, args: list, grads: list) -> None:
        """The user's own rule: gradients of the lifted states from them, the final states and their gradients."""
        final = [self.values[o] for o in line.outs]
        moving = [0.0 if g is None else g for g in grads]
        rule = self.p.functions[int(line.attrs[3])]
        given = dict(zip(["a" + str(k) for k in range(3 * states)], [*args[states:], *final, *moving]))
        for step in rule.lines:
            given[step.outs[0]] = self.builder.emit(step.op, tuple([given.get(a, read_number(a)) for a in step.args]), step.attrs)
        for ref, r in zip(line.args[states:], rule.returns):
            c = self.builder.lift(given.get(r, read_number(r)))
            if ref in self.active:
                self.add(ref, c if c.type.place == "edge" else c.emit("spread", "edge"))

    def zero(self, like: Value) -> Value:
        return self.builder.emit("zeros_like", (like,))

    def full(self, ref: str) -> Optional[Value]:
        g = self.total(ref)
        return None if g is None else self.builder.stretch(g, self.values[ref])

    def operand_gradient(self, i: int) -> Value:
        """In the operand's own dtype, sizes and place."""
        o = self.p.operands[i]
        x, g = self.values[o.ref], self.total(o.ref)
        assert g is not None
        g = self.builder.stretch(g, x)
        if g.type.dtype != o.dtype:
            g = g.emit("to", o.dtype)
        return g if g.type.place == o.place else g.emit("spread", o.place)


def _strong(t: Type) -> str:
    return "f32" if t.weak and t.dtype == "f64" else t.dtype


def keeps_states(f: Function, states: int) -> Function:
    """f, which also returns the states it was given."""
    return Function(f.params, f.lines, (*f.returns, *["a" + str(k) for k in range(states)]))


@functools.lru_cache(1024)
def transposed(f: Function, states: int, types: tuple) -> Function:
    """The vector-Jacobian product of f at parameters of `types`.

    (gradients of the new states, old states, values, gradients of the other results) -> (gradients of the old states, of the values).
    """
    found, results = body_types(f, types, lambda a, b: None)
    operands = tuple([Operand("edge", "a" + str(k), t.dtype, tuple([1 if is_one(s) else "*" for s in t.sizes])) for k, t in enumerate(types)])
    named = {"a" + str(k): "edge.a" + str(k) for k in range(f.params)}
    lines = tuple([Line(x.outs, x.op, tuple([named.get(a, a) for a in x.args]), x.attrs) for x in f.lines])
    returns = tuple([named.get(r, r) for r in f.returns])
    known = {named.get(ref, ref): t for ref, t in found.items()}
    body = Program("dense", 0, False, 0, operands, (), lines, returns, known, (), {x.outs[0]: x for x in lines})
    inputs = tuple([i for i, t in enumerate(types) if t.floating])
    given = tuple([k for k, t in enumerate(results) if t.floating])
    d = _Adjoint(body, inputs, given, {}).derive()
    p = parse(d.text)
    at = {}
    for o, (what, k) in zip(p.operands, d.reads):
        at[o.ref] = "a" + str(states + k if what == "operand" else k if k < states else states + f.params + k - states)
    made = [Line(x.outs, x.op, tuple([at.get(a, a) for a in x.args]), x.attrs) for x in p.lines]
    gradients = dict(zip(d.returns, [at.get(r, r) for r in p.returns]))
    words = []
    for i in range(f.params):
        if i in gradients:
            words.append(gradients[i])
        else:
            made.append(Line(("%" + str(len(made)),), "zeros_like", ("a" + str(states + i),)))
            words.append(made[-1].outs[0])
    return Function(states + f.params + len(f.returns) - states, tuple(made), tuple(words))


def _linear(d: _Adjoint, g: Value, line: Line, args: list) -> list:
    """y = x W^T: the gradient of W is a sum over rows of outer products, a reducer of its own."""
    x, weight = args
    b = d.builder
    out = [(line.args[0], b.emit("linear", (g, weight.emit("permute", "-1", "-2"))))]
    if line.args[1] in d.active:
        if x.type.place == "shared" or len(x.type.sizes) > 0:
            out.append((line.args[1], b.reduce("shared", "dot", (g, x))[0]))
    return out


def _gather(d: _Adjoint, g: Value, line: Line, args: list) -> list:
    table, i = args
    return [(line.args[0], d.builder.reduce("shared", "scatter", (g, i, table))[0])]


_SPECIAL = {"linear": _linear, "gather": _gather}


class _Tangent(_Derivation):
    def __init__(self, p: Program, moving: tuple[int, ...], saved: dict[str, int]) -> None:
        super().__init__(p, saved)
        self.moving = moving
        self.tangents: dict[str, Value] = {}

    def derive(self) -> Derived:
        self.replay()
        for i in self.moving:
            o = self.p.operands[i]
            self.tangents[o.ref] = self.new_operand("tangent", o.place, o.dtype, self.p.types[o.ref].sizes, ("extra", i))
        for line in self.p.lines:
            if any(a in self.tangents for a in line.args):
                if line.op == "scan":
                    raise TigaError("forward mode through a user's reducer is not supported. Use reverse mode (grad, vjp, jacrev).")
                self.reduce_line(line) if line.op == "reduce" else self.primitive_line(line)
        outputs: list[tuple[Optional[int], Value]] = []
        for k, r in enumerate(self.p.returns):
            if self.p.types[r].floating:
                t = self.tangents[r] if r in self.tangents else self.builder.emit("zeros_like", (self.values[r],))
                outputs.append((k, t if t.type.dtype == self.p.types[r].dtype else t.emit("to", self.p.types[r].dtype)))
        return self.finish(outputs)

    def primitive_line(self, line: Line) -> None:
        row, out = PRIMITIVES[line.op], self.values[line.outs[0]]
        if not out.type.floating:
            return
        args = [self.argument(a) for a in line.args]
        moved = [self.tangents.get(a) for a in line.args]
        if line.op in ("linear", "gather") or (row.linear and line.op not in ("part", "cat", "unslice", "expand_like", "reshape_like")):
            for k, t in enumerate(moved):
                if t is not None:
                    parts = [t if j == k else a for j, a in enumerate(args)]
                    self.add(line.outs[0], self.builder.emit(line.op, tuple(parts), line.attrs))
        elif row.linear:                                   # linear in all arguments that carry values, jointly
            values = [0] if line.op in ("part", "unslice", "expand_like", "reshape_like") else range(len(args))
            parts = [(moved[k] if moved[k] is not None else self.builder.emit("zeros_like", (a,))) if k in values else a for k, a in enumerate(args)]
            if any(moved[k] is not None for k in values):
                self.add(line.outs[0], self.builder.emit(line.op, tuple(parts), line.attrs))
        else:
            assert row.derivative is not None
            for t, rule, x in zip(moved, row.derivative(out, *args, *line.attrs), args):
                if t is not None and rule is not None:
                    part = self.jacobian(line, rule, t, out)
                    if part is not None:
                        self.add(line.outs[0], part)

    def jacobian(self, line: Line, rule: Any, t: Value, out: Value) -> Optional[Value]:
        """Elementwise rows: the cotangent's factor is the tangent's. Extremes over features: the mean over those that tie."""
        if line.op in ("amax", "amin"):
            one = self.builder.emit("to", (self.builder.emit("zeros_like", (out,)) + 1.0,), (out.type.dtype,))
            return (rule(one) * t).emit("sum", line.attrs[0])
        return rule(t)

    def add(self, ref: str, t: Value) -> None:
        out = self.values[ref]
        while len(t.type.sizes) < len(out.type.sizes):
            t = t.emit("unsqueeze", str(self.p.batch - len(t.type.sizes) - 1))
        t = self.builder.stretch(t, out)
        held = self.tangents.get(ref)
        self.tangents[ref] = t if held is None else held + t

    def reduce_line(self, line: Line) -> None:
        place, name = line.attrs
        row = REDUCERS[name]
        if row.tangent is None:
            return
        args = tuple([self.builder.lift(self.argument(a)) for a in line.args])
        moved = tuple([self.tangents.get(a) for a in line.args])
        results = row.tangent(self.builder, place, args, tuple([self.values[o] for o in line.outs]), moved)
        for o, t in zip(line.outs, results):
            if t is not None:
                self.add(o, t)
