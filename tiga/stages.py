"""From a traced edge function to programs, one a pass: no edge value may read a finished fold of its own program."""

from __future__ import annotations

import torch

from tiga import passes
from tiga.program import function_text, head_text, line_text, operand_text, used_functions
from tiga.trace import Tracer
from tiga.types import NAMES, Type


class Stage:
    """One program of a traced edge function, and where its tensors come from.

    reads: ("operand", tensor number) or ("pass", (stage, output)). returns: how many results the caller sees; the
    rest feed later stages.
    """

    def __init__(self, text: str, reads: list, scalars: list, outputs: list) -> None:
        self.text = text
        self.reads = reads
        self.scalars = scalars
        self.outputs = outputs


def stages(tracer: Tracer, kind: str, count: int, reverse: bool, roots: list) -> list[Stage]:
    """The programs of `roots`: one, unless an edge value reads a finished fold; then one more for each such pass."""
    if tracer.path is None:
        return _stages(tracer, kind, count, reverse, roots)
    key = (kind, count, reverse, tuple([r.ref for r in roots]))
    made = tracer.path.stages.get(key)
    if made is None:
        made = tracer.path.stages[key] = _stages(tracer, kind, count, reverse, roots)
    return made


def _stages(tracer: Tracer, kind: str, count: int, reverse: bool, roots: list) -> list[Stage]:
    level: dict[str, int] = {}
    reduced: dict[str, bool] = {}
    types: dict[str, Type] = {}
    for line, type_ in zip(tracer.lines, tracer.line_types):
        types[line.outs[0]] = type_
        on_edge = line.op in ("reduce", "scan") or type_.place == "edge"
        deep, folded = 0, False
        for a in line.args:
            if a in level:
                after = level[a] + 1 if on_edge and reduced[a] else level[a]
                if after > deep:
                    deep = after
                folded = folded or reduced[a]
        for o in line.outs:
            level[o] = deep
            reduced[o] = line.op in ("reduce", "scan") or (folded and type_.place == "dst")
    last = 0
    for r in roots:
        last = max(last, level.get(r.ref, 0))
    if last == 0:
        return [_stage(tracer, kind, count, reverse, [r.ref for r in roots], {}, {})]
    return _passes(tracer, kind, count, reverse, roots, level, reduced, last)


def _passes(
    tracer: Tracer, kind: str, count: int, reverse: bool, roots: list, level: dict, reduced: dict, last: int
) -> list[Stage]:
    if not torch.compiler.is_compiling():
        passes.ran("split")
    outputs: list[list[str]] = [[] for _ in range(last + 1)]
    for r in roots:
        outputs[level.get(r.ref, 0)].append(r.ref)
    by_out = {o: line for line in tracer.lines for o in line.outs}
    for k in range(last, 0, -1):  # what a pass reads of earlier ones, those must return
        for ref in _reads_of(by_out, outputs[k], k, level, reduced):
            if ref not in outputs[level[ref]]:
                outputs[level[ref]].append(ref)
    made: list[Stage] = []
    passed: dict[str, tuple[int, int]] = {}
    for k in range(last + 1):
        held = {ref: at for ref, at in passed.items()}
        made.append(_stage(tracer, kind, count, reverse, outputs[k], held, tracer.types()))
        for n, ref in enumerate(outputs[k]):
            if reduced.get(ref, False):
                passed[ref] = (k, n)
    return made


def _reads_of(by_out: dict, wanted: list, k: int, level: dict, reduced: dict) -> list:
    found, todo, seen = [], list(wanted), set()
    while todo:
        ref = todo.pop()
        if ref in seen or ref not in by_out:
            continue
        seen.add(ref)
        if level[ref] < k and reduced[ref]:
            found.append(ref)
        else:
            todo.extend(by_out[ref].args)
    return sorted(found, key=lambda r: int(r[1:]))


def _stage(tracer: Tracer, kind: str, count: int, reverse: bool, returns: list, passed: dict, types: dict) -> Stage:
    """Text of the lines that `returns` need; values in `passed` are operands."""
    live = set(returns)
    kept = []
    for line in reversed(tracer.lines):
        needed = False
        for o in line.outs:
            if o in live and o not in passed:
                needed = True
        if needed:
            kept.append(line)
            live.update(line.args)
    kept.reverse()
    reads: list = []
    rows: list[str] = []
    names: dict[str, str] = {}
    for n, (entry, sym) in enumerate(zip(tracer.operands, tracer.syms)):
        if sym.ref in live:
            _, place, name, sizes, flag = entry
            rows.append(operand_text(len(reads), place, name, NAMES[entry[0].dtype], sizes, flag))
            reads.append(("operand", n))
    for ref, at in passed.items():
        if ref in live:
            name = "pass" + str(len(reads))
            rows.append(operand_text(len(reads), "dst", name, types[ref].dtype, types[ref].sizes, ""))
            names[ref] = "dst." + name
            reads.append(("pass", at))
    scalars: list[int] = []
    for n, (name, _) in enumerate(tracer.scalars):
        if name in live:
            rows.append("scalar " + str(len(scalars)) + " " + name)
            scalars.append(n)
    outs = 0
    kept_lines, functions = used_functions(tuple(kept), tuple(tracer.functions)) if tracer.functions else (kept, ())
    for n, f in enumerate(functions):
        rows.extend(function_text(n, f))
    for line in kept_lines:
        for o in line.outs:
            names[o] = "%" + str(outs)
            outs += 1
        rows.append(
            line_text(
                tuple([names[o] for o in line.outs]), line.op, tuple([names.get(a, a) for a in line.args]), line.attrs
            )
        )
    head = head_text(kind, count, reverse, 0)
    text = "\n".join([head, *rows, "return " + " ".join([names.get(r, r) for r in returns])])
    return Stage(text, reads, scalars, returns)
