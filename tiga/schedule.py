"""What the reference path need not hold: products left to folds, values read last or for their shape alone."""

from __future__ import annotations

import functools

from tiga.program import Line, Program

# operations that read shapes of some arguments: from the argument in BY_SHAPE on, others from 1
LIKE = ("expand_like", "reshape_like", "unslice", "part", "zeros_like", "size", "arange", "rand")
BY_SHAPE = {"zeros_like": 0, "size": 0, "arange": 0}


@functools.lru_cache(4096)
def schedule(p: Program) -> tuple[frozenset, dict[str, int], frozenset]:
    """(products that only folds read, the last line that reads each value, values read for their shape alone)."""
    readers: dict[str, list[Line]] = {}
    last: dict[str, int] = {}
    for k, line in enumerate(p.lines):
        for a in line.args:
            readers.setdefault(a, []).append(line)
            last[a] = k
    lazy = frozenset(
        line.outs[0]
        for line in p.lines
        if line.op == "mul"
        and p.types[line.outs[0]].place == "edge"
        and p.types[line.outs[0]].dtype in ("f16", "bf16", "f32", "f64")
        and line.outs[0] not in p.returns
        and readers.get(line.outs[0])
        and all(
            (r.op == "sum" and r.attrs == ("-1",)) or (r.op == "reduce" and r.attrs[1] == "sum")
            for r in readers[line.outs[0]]
        )
    )
    shape_only: set[str] = set()
    for line in reversed(p.lines):
        if (
            line.op not in ("reduce", "scan")
            and line.outs[0] not in p.returns
            and all(
                r.outs[0] in shape_only
                or (
                    r.op in LIKE
                    and line.outs[0] in r.args[BY_SHAPE.get(r.op, 1) :]
                    and line.outs[0] not in r.args[: BY_SHAPE.get(r.op, 1)]
                )
                for r in readers.get(line.outs[0], ())
            )
        ):
            shape_only.add(line.outs[0])
    return lazy - shape_only, last, frozenset(shape_only)
