"""Gradients and tangents of message passing are message passing: Program -> Program.

`adjoint` names no primitive and no reducer: the rules are the rows of the tables. A value's cotangent is gathered where
the value is used; where it is used at another place - a node's field on its edges, a parameter anywhere - it comes home
by a sum, and that is all there is to the gradient of gather, broadcast and parameters.
"""

from __future__ import annotations

import functools

from tiga import passes
from tiga.builder import Value
from tiga.derivation import Derivation, Derived, folded, saved_dtype, saved_outputs
from tiga.infer import body_types
from tiga.kept_sums import FOLD, KeptSums
from tiga.parser import parse
from tiga.primitives import PRIMITIVES
from tiga.program import Function, Line, Operand, Program, read_number, to_text
from tiga.reducers import REDUCERS
from tiga.types import Type, is_one

# cotangents may stay broadcast (size 1 for a size that is not) through these
_LAZY = ("sum", "unsqueeze", "squeeze", "permute", "to", "spread", "expand_like")


@functools.lru_cache(8192)
def augment(text: str) -> str:
    """The program that also returns what its derivatives read: results of folds (`saved_dtype`)."""
    passes.ran("augment")
    p = parse(text)
    own = tuple([k for k, r in enumerate(p.returns) if p.types[r].floating])
    return _grown(_with_kept_sums(_grown(text), own))


@functools.lru_cache(8192)
def keeps_sums(text: str) -> bool:
    """Whether `augment` added sums that no fold of the program gives."""
    p, full = parse(text), parse(augment(text))
    return len(full.reduces()) > len(p.reduces())


def _grown(text: str) -> str:
    grown = _augment_once(text)
    while grown != text:  # a result returned may get a gradient, and that may read another
        text, grown = grown, _augment_once(grown)
    return text


def _with_kept_sums(text: str, given: tuple[int, ...]) -> str:
    """The program that also returns sums by which no gradient of its results visits a row's edges again, if it can.

    On a list of edges, where a visit costs as much as all that is read there.
    """
    p = parse(text)
    if p.kind != "csr" or not any([line.op == "reduce" and line.attrs == FOLD for line in p.lines]):
        return text
    everything = tuple([i for i, o in enumerate(p.operands) if p.types[o.ref].floating])
    trial = _Adjoint(p, everything, given, saved_outputs(p), more=True)
    left = [line for line in parse(trial.derive().text).lines if line.op in ("reduce", "scan")]
    if trial.kept is None or not trial.kept.wished or any([x.op == "scan" or x.attrs[0] == "dst" for x in left]):
        return text
    passes.ran("keep-sums")
    return to_text(trial.kept.extended())


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
        if ref in held and saved_dtype(p, ref) == p.types[p.returns[held[ref]]].dtype:
            continue
        if saved_dtype(p, ref) != p.types[ref].dtype:
            lines.append(Line(("%" + str(outs),), "to", (ref,), ("f32",)))
            ref, outs = "%" + str(outs), outs + 1
        returns.append(ref)
    return to_text(p.untyped(lines=tuple(lines), returns=tuple(returns)))


@functools.lru_cache(8192)
def adjoint(text: str, wanted: tuple[int, ...], given: tuple[int, ...]) -> Derived:
    """The program of the gradients of operands `wanted`, for those of outputs `given`, of an augmented program.

    returns[k] is the operand whose gradient output k is.
    """
    p = parse(text)
    passes.derived("adjoint", text)
    return _Adjoint(p, wanted, given, saved_outputs(p)).derive()


class _Adjoint(Derivation):
    """more: whether kept sums that the program does not have yet may be wished for (`KeptSums`)."""

    def __init__(
        self, p: Program, wanted: tuple[int, ...], given: tuple[int, ...], saved: dict[str, int], more: bool = False
    ) -> None:
        super().__init__(p, saved)
        self.more = more
        self.kept: KeptSums | None = None
        self.wanted, self.given = wanted, given
        self.cotangents: dict[str, list[Value]] = {}  # by the word of the primal value
        self.active: set[str] = {p.operands[i].ref for i in wanted}
        for line in p.lines:
            if any(a in self.active for a in line.args):
                self.active.update(o for o in line.outs if p.types[o].floating)

    def derive(self) -> Derived:
        self.replay()
        grads = []
        for k in self.given:
            ref = self.p.returns[k]
            t = self.p.types[ref]
            grads.append(self.new_operand("grad", t.place, t.dtype, t.sizes, ("extra", k)))
            self.add(ref, grads[-1])
        scores = [line.args[0] for line in self.p.lines if line.op == "reduce" and line.attrs == FOLD]
        if self.more or len(set(scores)) < len(scores):
            self.kept = KeptSums(self, grads, self.more)
        for line in reversed(self.p.lines):
            if any(o in self.cotangents for o in line.outs):
                (
                    self.reduce_line
                    if line.op == "reduce"
                    else self.scan_line
                    if line.op == "scan"
                    else self.primitive_line
                )(line)
        return self.finish(
            [(i, self.operand_gradient(i)) for i in self.wanted if self.p.operands[i].ref in self.cotangents]
        )

    def add(self, ref: str, cotangent: Value | None) -> None:
        if cotangent is not None and ref in self.active:
            self.cotangents.setdefault(ref, []).append(self.builder.fold_batch(cotangent, self.values[ref]))

    def total(self, ref: str) -> Value | None:
        """The cotangent of a value at its own place: contributions made elsewhere are summed home."""
        place = self.p.types[ref].place
        at: dict[str, Value] = {}
        home: Value | None = None
        for c in self.cotangents.get(ref, ()):
            c = self.full_rank(c, self.values[ref])
            if c.type.place in (place, "shared") or place == "edge":
                home = c if home is None else home + c
            elif self.is_contraction(c, place):
                part = self.fold_edges(place, c)
                home = part if home is None else home + part
            else:
                held = at.get(c.type.place)
                at[c.type.place] = c if held is None else held + c
        for c in at.values():
            if place == "shared" and c.type.place == "edge":
                c = self.fold_edges("dst", c)  # a row first: then no edge value outlives its tile
            part = self.fold_edges(place, c)
            home = part if home is None else home + part
        return home

    def fold_edges(self, place: str, c: Value) -> Value:
        """The sum of a cotangent home: of sums that forward kept where it follows from them; of what a linear map gives
        the map of the sum, which is work on nodes."""
        op, args = self.builder.origin.get(c.ref, ("", ()))
        if c.type.place == "edge" and op == "neg":
            return -self.fold_edges(place, args[0])
        if c.type.place == "edge" and op == "linear" and (args[0].type.place, args[1].type.place) == ("edge", "shared"):
            return self.builder.emit("linear", (self.fold_edges(place, args[0]), args[1]))
        found = self.kept.home(c) if self.kept is not None and (place, c.type.place) == ("dst", "edge") else None
        return self.builder.fold_edges(place, c) if found is None else found

    def full_rank(self, c: Value, like: Value) -> Value:
        while len(c.type.sizes) < len(like.type.sizes):
            c = c.emit("unsqueeze", str(min(self.p.batch, len(c.type.sizes)) - len(c.type.sizes) - 1))
        return c

    def is_contraction(self, c: Value, place: str) -> bool:
        """mul of an edge value of one feature with a field of the other end: its sum is a matrix product."""
        op, args = self.builder.origin.get(c.ref, ("", ()))
        if op != "mul":
            return False
        far = {"src": "dst", "dst": "src"}.get(place)
        return any(
            x.type.place == "edge"
            and y.type.place == far
            and len(x.type.sizes) == len(y.type.sizes) > 0
            and is_one(x.type.sizes[-1])
            for x, y in (args, args[::-1])
        )

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
                    c = self.fold_edges(x.type.place, c)  # edges first: what is left is work on nodes
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
            rows = own if place == "shared" else "edge"  # a node's field folded over edges counts once an edge
            if c.type.place != rows and (own != "edge" or place == "shared"):
                c = c.emit("spread", rows)
            x = self.values[ref]
            if place != "shared" and self.narrower(x, c):
                c = self.builder.fold(self.fold_edges(own, c) if own in ("src", "dst") else c, c, x)
            self.add(ref, c)

    def scan_line(self, line: Line) -> None:
        """The scan backwards: a state's cotangent goes from edge to edge, leaving those of the values it met."""
        f, states = self.p.functions[int(line.attrs[1])], int(line.attrs[2])
        grads = [self.full(o) for o in line.outs]
        args = [self.argument(a) for a in line.args]
        if line.attrs[3] != "-1":
            self.given_gradient(line, states, args, grads)
            return
        kinds = [self.values[o].type for o in line.outs]
        inputs = (
            *[Type("edge", t.dtype, t.sizes) for t in kinds[:states]],
            *[Type("edge", _strong(self.builder.lift(a).type), self.builder.lift(a).type.sizes) for a in args[states:]],
        )
        before = self.builder.scan(line.attrs[0], keeps_states(f, states), states, tuple(args))[len(f.returns) :]
        back = transposed(f, states, inputs)
        moving = [
            g if g is not None else 0.0 if k < states else self.zero(self.values[line.outs[k]])
            for k, g in enumerate(grads)
        ]
        result = self.builder.scan(
            "reverse" if line.attrs[0] == "forward" else "forward",
            back,
            states,
            (*moving[:states], *before, *args[states:], *moving[states:]),
        )
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
            given[step.outs[0]] = self.builder.emit(
                step.op, tuple([given.get(a, read_number(a)) for a in step.args]), step.attrs
            )
        for ref, r in zip(line.args[states:], rule.returns):
            c = self.builder.lift(given.get(r, read_number(r)))
            if ref in self.active:
                self.add(ref, c if c.type.place == "edge" else c.emit("spread", "edge"))

    def zero(self, like: Value) -> Value:
        return self.builder.emit("zeros_like", (like,))

    def full(self, ref: str) -> Value | None:
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

    (gradients of the new states, old states, values, gradients of the other results) -> (gradients of the old
    states, of the values).
    """
    found, results = body_types(f, types, lambda a, b: None)
    operands = tuple(
        [
            Operand("edge", "a" + str(k), t.dtype, tuple([1 if is_one(s) else "*" for s in t.sizes]))
            for k, t in enumerate(types)
        ]
    )
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
    """y = x W^T: the gradient of W is a sum over rows of outer products, a reducer of its own. Of W = V^T that of V."""
    x, weight = args
    b, (_, ref) = d.builder, line.args
    made = d.p.definitions.get(ref)
    back, pair = weight.emit("permute", "-1", "-2"), (g, x)
    if made is not None and (made.op, made.attrs) == ("permute", ("-1", "-2")):
        ref = made.args[0]
        back, pair = d.values[ref], (x, g)
    out = [(line.args[0], b.emit("linear", (g, back)))]
    if ref in d.active and (x.type.place == "shared" or len(x.type.sizes) > 0):
        out.append((ref, b.reduce("shared", "dot", pair)[0]))
    return out


def _gather(d: _Adjoint, g: Value, line: Line, args: list) -> list:
    table, i = args
    return [(line.args[0], d.builder.reduce("shared", "scatter", (g, i, table))[0])]


_SPECIAL = {"linear": _linear, "gather": _gather}
