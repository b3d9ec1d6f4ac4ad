"""What gradients and tangents share: the primal's values in a new program, the operands it reads, their sources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tiga.builder import Builder, Value
from tiga.program import Line, Operand, Program, prune, read_number, to_text
from tiga.types import Type, is_one


@dataclass(frozen=True)
class Derived:
    """A derived program and the list of tensors it reads: ("operand" | "extra" | "saved", number), in order;
    then the relation's tensors.

    extra: gradients of outputs (adjoint) or tangents of operands (tangent). returns: what each output is for.
    """

    text: str
    reads: tuple[tuple[str, int], ...]
    returns: tuple[int | None, ...]
    scalars: tuple[int, ...]


def folded(p: Program) -> list[str]:
    """What folds over edges gave: all results of reduces, the last states of scans."""
    return [
        o
        for line in p.lines
        if line.op in ("reduce", "scan")
        for o in (line.outs if line.op == "reduce" else line.outs[: int(line.attrs[2])])
    ]


def saved_outputs(p: Program) -> dict[str, int]:
    """For each reduce result that an augmented program returns: the number of that output."""
    found = {o: p.returns.index(o) for o in folded(p) if o in p.returns}
    for k, r in enumerate(p.returns):  # 16-bit results that are returned in float32
        line = p.definitions.get(r)
        if (
            line is not None
            and line.op == "to"
            and line.attrs == ("f32",)
            and p.types[line.args[0]].dtype in ("f16", "bf16")
            and saved_dtype(p, line.args[0]) == "f32"
        ):
            source = p.definitions.get(line.args[0])
            if source is not None and source.op in ("reduce", "scan"):
                found[line.args[0]] = k
    return found


def saved_dtype(p: Program, ref: str) -> str:
    """That of a fold's result as derivatives read it: where it is of 16 bits, the one it accumulates in, but of an
    implicit relation's result that the program returns that result itself. There edge values are rounded to 16 bits as
    well, for products of matrices; on a list of edges they are not, and a rounded result would err the most of all."""
    t = p.types[ref].dtype
    return "f32" if t in ("f16", "bf16") and (p.kind == "csr" or ref not in p.returns) else t


def is_lse(line: Line, ref: str) -> bool:
    """Whether a fold's result follows from scores alone."""
    return line.attrs[1] == "softmax" and ref == line.outs[1]


def fresh(stem: str, taken: set[str]) -> str:
    """An operand name that is not taken yet."""
    number = 0
    while stem + str(number) in taken:
        number += 1
    taken.add(stem + str(number))
    return stem + str(number)


class Derivation:
    """Rebuilds the primal's values in a builder: results of folds are saved operands, the rest is computed again."""

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
        lse: dict[tuple, Value] = {}  # of softmax by what it follows from: the scores, whatever is weighted
        for line in self.p.lines:
            if line.op == "reduce":
                for o in line.outs:
                    known = lse.get((line.attrs, line.args[0])) if is_lse(line, o) else None
                    self.values[o] = self.saved_value(o) if known is None else known
                    if is_lse(line, o):
                        lse[line.attrs, line.args[0]] = self.values[o]
            elif line.op == "scan":
                states = int(line.attrs[2])
                again = self.builder.scan(
                    line.attrs[0],
                    self.p.functions[int(line.attrs[1])],
                    states,
                    tuple([self.argument(a) for a in line.args]),
                )
                for k, o in enumerate(line.outs):
                    self.values[o] = self.saved_value(o) if k < states else again[k]
            else:
                self.values[line.outs[0]] = self.builder.emit(
                    line.op, tuple([self.argument(a) for a in line.args]), line.attrs
                )

    def saved_value(self, ref: str) -> Value:
        t, dtype = self.p.types[ref], saved_dtype(self.p, ref)
        x = self.new_operand("saved", t.place, dtype, t.sizes, ("saved", self.saved.get(ref, -1)))
        return x.emit("to", "f32") if dtype in ("f16", "bf16") else x

    def finish(self, outputs: list[tuple[int | None, Value]]) -> Derived:
        p = self.p
        whole = p.untyped(
            operands=tuple(self.operands),
            lines=tuple(self.builder.lines),
            returns=tuple([v.ref for _, v in outputs]),
            functions=tuple(self.builder.functions),
        )
        small = prune(whole, whole.returns)
        if not small.operands:  # keeps a device to run on
            small = replace(small, operands=p.operands[:1])
        reads = tuple([self.sources[o.ref] for o in small.operands])
        return Derived(
            to_text(small), reads, tuple([k for k, _ in outputs]), tuple([p.scalars.index(s) for s in small.scalars])
        )
