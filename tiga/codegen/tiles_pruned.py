"""Which kernels may pass over a tile that was skipped in the forward."""

from __future__ import annotations

from tiga.codegen.tiles import SAME, EdgeWork
from tiga.program import Program, read_number


def skips_tiles(w: EdgeWork) -> bool:
    """Whether all that a kernel makes of a pair is 0 where no map kept its tile."""
    if w.returned:
        return False
    for line, weight, *_ in w.folds:
        if line.attrs[1] != "sum" or not vanishes(w.p, weight if weight is not None else line.args[0]):
            return False
    return True


def vanishes(p: Program, ref: str) -> bool:
    """Whether a value is 0 on pairs whose tile was not kept, whatever else it is made of."""
    line = p.definitions.get(ref)
    if line is None:
        return read_number(ref) == 0
    if line.op == "where":
        on = p.definitions.get(behind(p, line.args[0]))
        return on is not None and on.op == "kept" and vanishes(p, line.args[2])
    if line.op in ("mul", *SAME, "to", "neg", "sum"):
        return any(vanishes(p, a) for a in (line.args if line.op == "mul" else line.args[:1]))
    if line.op in ("add", "sub"):
        return all(vanishes(p, a) for a in line.args)
    return line.op == "zeros_like"


def behind(p: Program, ref: str) -> str:
    line = p.definitions.get(ref)
    while line is not None and line.op in SAME:
        ref = line.args[0]
        line = p.definitions.get(ref)
    return ref
