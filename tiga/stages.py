"""From a traced edge function to programs, one a pass: no edge value may read a finished fold of its own program."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiga import passes
from tiga.program import function_text, head_text, line_text, operand_text, used_functions
from tiga.trace import Tracer
from tiga.types import PLACES, Type


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


class Programs(NamedTuple):
    """The programs of a traced edge function.

    at: for each value that it returned, the stage and the output that it is. unread: fields that no line reads.
    """

    stages: list[Stage]
    texts: tuple[str, ...]
    at: list[tuple[int, int]]
    unread: list[str]


def programs(tracer: Tracer, kind: str, count: int, reverse: bool, roots: list) -> Programs:
    """The programs of `roots`: one, unless an edge value reads a finished fold; then one more for each such pass."""
    path = tracer.path
    if path is None:
        return _programs(tracer, kind, count, reverse, roots)
    key = (kind, count, reverse, *[r.ref for r in roots])
    made = path.programs.get(key)
    if made is None:
        made = path.programs[key] = _programs(tracer, kind, count, reverse, roots)
    return made


def _programs(tracer: Tracer, kind: str, count: int, reverse: bool, roots: list) -> Programs:
    tracer.catch_up()
    leaves = [tracer.returned(r) for r in roots]
    made = _stages(tracer, kind, count, reverse, leaves)
    at = {}
    for k, stage in enumerate(made):
        for n, ref in enumerate(stage.outputs):
            at[ref] = (k, n)
    read = {a for line in tracer.lines for a in line.args}
    read.update([leaf.ref for leaf in leaves])
    unread = [x.ref for _, x in tracer.operands if x.place != "shared" and x.ref not in read]
    return Programs(made, tuple([stage.text for stage in made]), [at[leaf.ref] for leaf in leaves], unread)


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
    for n in _order_of_use(tracer, kept, returns):
        x = tracer.operands[n][1]
        rows.append(operand_text(len(reads), x.place, x.name, x.dtype, x.sizes, x.flag))
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
    head = head_text(kind, count, reverse, 0, tracer.launch)
    text = "\n".join([head, *rows, "return " + " ".join([names.get(r, r) for r in returns])])
    return Stage(text, reads, scalars, returns)


def _order_of_use(tracer: Tracer, lines: list, returns: list) -> list[int]:
    """The numbers of the operands that are read, by the line that does it first; within a line by their places."""
    numbers = {x.ref: n for n, (_, x) in enumerate(tracer.operands)}
    found: dict[int, None] = {}
    for words in [*[line.args for line in lines], returns]:
        for place in PLACES:
            for a in words:
                if a in numbers and tracer.operands[numbers[a]][1].place == place:
                    found[numbers[a]] = None
    return list(found)
