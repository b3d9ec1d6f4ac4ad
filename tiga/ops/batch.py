"""vmap as a rewriting of programs: one more leading feature dimension, which no line of the program ever touches."""
from __future__ import annotations

import functools
from typing import Sequence

from torch import Tensor

from tiga import passes
from tiga.builder import Builder, Value
from tiga.program import Operand, Program, parse, read_number, to_text
from tiga.types import Type


def batched(p: Program, tensors: Sequence[Tensor], dims: tuple) -> tuple[str, list[Tensor]]:
    """The text that computes all samples at once, and its tensors; dims[k] is the mapped dimension of tensor k, or None."""
    moved = []
    for k, (t, d) in enumerate(zip(tensors, dims)):
        if k >= len(p.operands):
            moved.append(t)
            continue
        o = p.operands[k]
        lead = 0 if o.place == "shared" else 1
        if d is not None:
            moved.append(t.movedim(d, lead))
        elif lead or o.sizes:
            moved.append(t.unsqueeze(lead))
        else:
            moved.append(t)
    sizes = tuple([None if d is None else int(t.shape[d]) == 1 for t, d in zip(tensors[:len(p.operands)], dims)])
    return _text(to_text(p), sizes), moved


@functools.lru_cache(4096)
def _text(text: str, sizes: tuple) -> str:
    """sizes[k]: None for an operand that is not mapped, else whether the batch has size 1."""
    p = parse(text)
    passes.ran("batch")
    builder = Builder(lambda a, b: None, p.batch + 1)
    operands, values = [], {}
    for o, one in zip(p.operands, sizes):
        bare = one is None and o.place == "shared" and not o.sizes
        extra: tuple = () if bare else (1 if one is None or one else "*",)
        flag = "" if o.flag == "number" and one is not None else o.flag
        new = Operand(o.place, o.name, o.dtype, extra + o.sizes, flag)
        operands.append(new)
        values[o.ref] = builder.value(o.ref, Type(o.place, o.dtype, new.sizes, flag == "number"))
    for s in p.scalars:
        values[s] = builder.value(s, p.types[s])

    def argument(ref: str) -> object:
        return values[ref] if ref in values else read_number(ref)
    for line in p.lines:
        args = tuple([argument(a) for a in line.args])
        if line.op == "reduce":
            values.update(zip(line.outs, builder.reduce(*line.attrs, args)))
        elif line.op == "scan":
            gradient = None if line.attrs[3] == "-1" else p.functions[int(line.attrs[3])]
            values.update(zip(line.outs, builder.scan(line.attrs[0], p.functions[int(line.attrs[1])], int(line.attrs[2]), args, gradient)))
        elif line.op == "linear" and isinstance(args[1], Value) and len(args[1].type.sizes) > 2:
            values[line.outs[0]] = _batched_linear(builder, args[0], args[1])
        else:
            values[line.outs[0]] = builder.emit(line.op, args, line.attrs)
    return to_text(Program(p.kind, p.relation_tensors, p.reverse, p.batch + 1, tuple(operands), p.scalars, tuple(builder.lines),
                           tuple([values[r].ref for r in p.returns]), {}, functions=tuple(builder.functions)))


def _batched_linear(b: Builder, x: Value, weight: Value) -> Value:
    """A weight a sample: products summed over the last feature."""
    return (x.emit("unsqueeze", "-2") * weight).emit("sum", "-1")
