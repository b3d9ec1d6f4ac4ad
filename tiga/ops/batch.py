"""vmap as a rewriting of programs: one more leading feature dimension, which no line of the program ever touches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from tiga import passes
from tiga.builder import Builder
from tiga.parser import parse
from tiga.program import Operand, Program, read_number, to_text
from tiga.types import Dim, Type, is_one


def batched(p: Program, tensors: Sequence[Tensor], dims: tuple) -> tuple[str, list[Tensor]]:
    """The text that computes all samples at once, and its tensors; dims[k]: the mapped dimension of tensor k."""
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
    sizes = tuple([None if d is None else int(t.shape[d]) == 1 for t, d in zip(tensors[: len(p.operands)], dims)])
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
        dims = tuple([1 if mark == 1 else Dim(len(operands) - 1, d) for d, mark in enumerate(new.sizes)])
        values[o.ref] = builder.value(o.ref, Type(o.place, o.dtype, dims, flag == "number"))
    for s in p.scalars:
        values[s] = builder.value(s, p.types[s])

    def argument(ref: str) -> object:
        return values[ref] if ref in values else read_number(ref)

    for line in p.lines:
        args = tuple([argument(a) for a in line.args])
        if line.op == "reduce":
            values.update(zip(line.outs, builder.reduce(line.attrs[0], line.attrs[1], args)))
        elif line.op == "scan":
            gradient = None if line.attrs[3] == "-1" else p.functions[int(line.attrs[3])]
            values.update(
                zip(
                    line.outs,
                    builder.scan(line.attrs[0], p.functions[int(line.attrs[1])], int(line.attrs[2]), args, gradient),
                )
            )
        else:
            values[line.outs[0]] = builder.emit(line.op, args, line.attrs)
    returns = tuple([values[r].ref for r in p.returns])
    lines, functions = tuple(builder.lines), tuple(builder.functions)
    return to_text(
        p.untyped(batch=p.batch + 1, operands=tuple(operands), lines=lines, returns=returns, functions=functions)
    )


def sample_dims(outputs: Sequence[Tensor], text: str, samples: int) -> tuple[list[Tensor], list]:
    """Where the outputs of a batched program hold the samples: None where an output is the same for all."""
    p = parse(text)
    held: list[Tensor] = []
    dims: list[int | None] = []
    for out, ref in zip(outputs, p.returns):
        t = p.types[ref]
        lead = 0 if t.place == "shared" else 1
        if len(t.sizes) < p.batch:
            held.append(out)
            dims.append(None)
        else:
            one = is_one(t.sizes[0]) and samples != 1
            held.append(out.squeeze(lead) if one else out)
            dims.append(None if one else lead)
    return held, dims
