"""Forward mode: the tangents of a program's outputs are a program. The rules are the rows of the tables."""

from __future__ import annotations

import functools
from typing import Any

from tiga import passes
from tiga.builder import Value
from tiga.derivation import Derivation, Derived, saved_outputs
from tiga.errors import TigaError
from tiga.parser import parse
from tiga.primitives import PRIMITIVES
from tiga.program import Line, Program
from tiga.reducers import REDUCERS


@functools.lru_cache(8192)
def tangent(text: str, moving: tuple[int, ...]) -> Derived:
    """The program of the tangents of the outputs of an augmented program, for tangents of operands `moving`."""
    p = parse(text)
    passes.ran("tangent")
    return _Tangent(p, moving, saved_outputs(p)).derive()


class _Tangent(Derivation):
    def __init__(self, p: Program, moving: tuple[int, ...], saved: dict[str, int]) -> None:
        super().__init__(p, saved)
        self.moving = moving
        self.tangents: dict[str, Value] = {}

    def derive(self) -> Derived:
        self.replay()
        for i in self.moving:
            o = self.p.operands[i]
            self.tangents[o.ref] = self.new_operand(
                "tangent", o.place, o.dtype, self.p.types[o.ref].sizes, ("extra", i)
            )
        for line in self.p.lines:
            if any(a in self.tangents for a in line.args):
                if line.op == "scan":
                    raise TigaError(
                        "forward mode through a user's reducer is not supported. Use reverse mode (grad, vjp, jacrev)."
                    )
                self.reduce_line(line) if line.op == "reduce" else self.primitive_line(line)
        outputs: list[tuple[int | None, Value]] = []
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
        if line.op in ("linear", "gather") or (
            row.linear and line.op not in ("part", "cat", "unslice", "expand_like", "reshape_like")
        ):
            for k, t in enumerate(moved):
                if t is not None:
                    parts = [t if j == k else a for j, a in enumerate(args)]
                    self.add(line.outs[0], self.builder.emit(line.op, tuple(parts), line.attrs))
        elif row.linear:  # linear in all arguments that carry values, jointly
            values = [0] if line.op in ("part", "unslice", "expand_like", "reshape_like") else range(len(args))
            parts = [
                (moved[k] if moved[k] is not None else self.builder.emit("zeros_like", (a,))) if k in values else a
                for k, a in enumerate(args)
            ]
            if any(moved[k] is not None for k in values):
                self.add(line.outs[0], self.builder.emit(line.op, tuple(parts), line.attrs))
        else:
            assert row.derivative is not None
            for t, rule in zip(moved, row.derivative(out, *args, *line.attrs)):
                if t is not None and rule is not None:
                    part = self.jacobian(line, rule, t, out)
                    if part is not None:
                        self.add(line.outs[0], part)

    def jacobian(self, line: Line, rule: Any, t: Value, out: Value) -> Value | None:
        """Elementwise rows: the tangent's factor is the cotangent's. Extremes: the mean over those that tie."""
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
