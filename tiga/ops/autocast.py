"""Autocast as a rewriting of programs: operands of inner products and linears and reduced values are brought to the
autocast dtype.

Positions, edge displacements and distances, whatever is computed from them pointwise, and float64 are left alone.
"""

from __future__ import annotations

import functools

import torch

from tiga import passes
from tiga.builder import Builder, Value
from tiga.parser import parse
from tiga.primitives import PRIMITIVES
from tiga.program import Program, read_number, to_text
from tiga.reducers import PRUNED
from tiga.types import NAMES

_POSITION_NAMES = ("pos", "position", "positions")
# which argument is the value that is reduced
_REDUCED = {"sum": 0, "max": 0, "min": 0, "softmax": 1, **dict.fromkeys(PRUNED, 1)}


@functools.lru_cache(4096)
def autocast(text: str, dtype: torch.dtype) -> str:
    """The program with the casts that autocast to `dtype` makes."""
    p = parse(text)
    passes.ran("autocast")
    return _Autocast(p, NAMES[dtype]).rewrite()


class _Autocast:
    def __init__(self, p: Program, dtype: str) -> None:
        self.p, self.dtype = p, dtype
        self.builder = Builder(lambda a, b: None, p.batch)
        self.values: dict[str, Value] = {ref: self.builder.value(ref, t) for ref, t in p.types.items() if ref[0] != "%"}
        self.exact = {o.ref for o in p.operands if o.flag == "position" or o.name in _POSITION_NAMES}

    def argument(self, ref: str) -> object:
        return self.values[ref] if ref in self.values else read_number(ref)

    def cast(self, ref: str) -> object:
        x = self.argument(ref)
        if (
            isinstance(x, Value)
            and not x.type.weak
            and x.type.dtype in ("f16", "bf16", "f32")
            and ref not in self.exact
            and x.type.dtype != self.dtype
        ):
            return x.emit("to", self.dtype)
        return x

    def rewrite(self) -> str:
        inner = self.inner_products()
        for line in self.p.lines:
            spread = PRIMITIVES.get(line.op)
            if (
                any(a in self.exact for a in line.args)
                and spread is not None
                and line.op not in ("linear", "gather")
                and all(
                    a in self.exact or a not in self.p.types or self.p.types[a].weak or not self.p.types[a].floating
                    for a in line.args
                )
            ):
                self.exact.update(line.outs)
            if line.op == "scan":
                made = self.builder.scan(
                    line.attrs[0],
                    self.p.functions[int(line.attrs[1])],
                    int(line.attrs[2]),
                    tuple([self.argument(a) for a in line.args]),
                    None if line.attrs[3] == "-1" else self.p.functions[int(line.attrs[3])],
                )
                self.values.update(zip(line.outs, made))
                continue
            if line.op == "reduce":
                place, name = line.attrs
                value = _REDUCED.get(name)
                wanted = [self.cast(a) if k == value else self.argument(a) for k, a in enumerate(line.args)]
                for o, v in zip(line.outs, self.builder.reduce(place, name, tuple(wanted))):
                    self.values[o] = v
                continue
            cast = line.op == "linear" or line.outs[0] in inner
            args = tuple([self.cast(a) if cast else self.argument(a) for a in line.args])
            self.values[line.outs[0]] = self.builder.emit(line.op, args, line.attrs)
        returns = tuple([self.values[r].ref for r in self.p.returns])
        lines, functions = tuple(self.builder.lines), tuple(self.builder.functions)
        return to_text(self.p.untyped(lines=lines, returns=returns, functions=functions))

    def inner_products(self) -> set[str]:
        """Products that are summed over their last feature, of a source's with a destination's."""
        found = set()
        for line in self.p.lines:
            source = self.p.definitions.get(line.args[0]) if line.op == "sum" and line.attrs == ("-1",) else None
            if source is not None and source.op == "mul":
                places = {self.p.types[a].place for a in source.args if a in self.p.types}
                if places == {"src", "dst"}:
                    found.add(source.outs[0])
        return found
