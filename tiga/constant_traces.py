"""Traces while torch compiles: an edge function is called as it is where the compiler need not follow it.

Dynamo runs Python an instruction at a time, which takes it about half a second for the trace of one layer. Where an
edge function reads only its fields and arguments, torch's functions, and reducers, tensors and plain values of its
module, it is run outside, on tensors without memory, and the programs are constants of the compiled code. All that they
depend on is read here as Dynamo sees it, so that it guards it. Sizes that the compiler holds for symbols, other
arguments and other functions are traced through it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiga import traces
from tiga.errors import TigaError
from tiga.fields import NUMBERED, places
from tiga.reducer import OnlineSoftmaxReducer
from tiga.shortcuts import REDUCERS
from tiga.stages import Programs, Stage, programs
from tiga.trace import Tracer, flattened, static

_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


# What Dynamo follows.


def constant_trace(module: Any, graph: Any, forms: tuple, home: torch.device, given: dict[str, dict]) -> Any:
    """The trace of a call, its tensors and its numbers; None where the compiler is to follow the edge function."""
    uniform = given["uniform"]
    if graph.positions is not None or not all([static(n) for form in forms for n in form[3]]):
        return None
    try:
        scope = module.edge.__func__.__globals__  # of another function Dynamo sees that it is another
    except AttributeError:
        return None
    read = module._edge_reads_of(tuple([form[1] for form in forms]))
    if read is None:
        return None
    names, own = read
    arguments = [(name, *(("number",) if isinstance(x, float) else word(x))) for name, x in uniform.items()]
    attributes = [(name, *word(getattr(module, name))) for name in own]
    for x in (*arguments, *attributes):
        if x[1] == "":
            return None
    count = len(graph.tensors) + len(graph.prepared if torch.is_grad_enabled() else graph.prepared[:2])
    relation, objects = (graph.kind, count, graph.reversed), tuple([scope[name] for name in names])
    found = module._constant_trace(relation, forms, tuple(arguments), tuple(attributes), objects)
    if found is None:
        return None
    stages, texts, at, structure, results, operands = found
    tensors = []
    for place, name in operands:
        if place == "number":
            tensors.append((torch.ones((), dtype=torch.float64, device=home) * uniform[name],))
        else:
            tensors.append((getattr(module, name) if place == "module" else given[place][name],))
    made = Programs([Stage(*stage) for stage in stages], texts, at, [])
    return traces.Known(made, opened(structure), results, (), ()), tensors


def opened(structure: Any) -> Any:
    """What an edge function returns, from its words."""
    if isinstance(structure, int):
        return structure
    names, parts = structure
    return tuple([opened(x) for x in parts]) if names is None else {n: opened(x) for n, x in zip(names, parts)}


def word(x: Any) -> tuple:
    """What a trace can depend on of an argument or an attribute; ("",) where that is not known."""
    if isinstance(x, Tensor):
        return ("tensor", x.dtype, tuple(x.shape)) if all([static(n) for n in x.shape]) else ("",)
    if isinstance(x, OnlineSoftmaxReducer):
        pruned = x.block_prune_threshold is not None or x.prune_mass is not None
        return ("",) if pruned else ("reducer", bool(x.return_lse))
    if isinstance(x, REDUCERS):
        return ("reducer",)
    if isinstance(x, (bool, str)) or x is None:
        return ("value", x)
    return ("value", x) if isinstance(x, (int, float)) and static(x) else ("",)


# What runs outside of it.


def reads_of(module: Any, fields: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The names of its file and the attributes of its module that an edge function reads; None where it may depend on
    more than such, or does more."""
    held = traces.made_for(module)
    own = None if held is None or held.reads is None else held.attributes(module, fields)
    if held is None or held.reads is None or own is None:
        return None
    names = [name for name in held.reads.scope if name in held.function.__globals__]
    scope = [held.function.__globals__[name] for name in names]
    if not all([isinstance(x, _FUNCTIONS) for x in scope]):
        return None
    try:
        for name in held.reads.scope:
            traces.global_word(name, held.named(name))
        for name in own:
            x = getattr(module, name)
            if type(x) not in (*_PLAIN, *REDUCERS) and not isinstance(x, Tensor):
                return None
            traces.see(x, [], [])
    except (traces.Unseen, KeyError):
        return None
    return tuple(names), own


def trace(module: Any, relation: tuple, forms: tuple, arguments: tuple, attributes: tuple, objects: tuple) -> Any:
    """The programs of a call of these forms, as constants, and the place and name of each operand. objects: those of
    its file that the edge function reads, which are given so that Dynamo sees them read."""
    own: dict[str, Any] = {name: getattr(module, name) for name, what, *_ in attributes if what == "tensor"}
    tracer, found = Tracer(compiling=True), [(form[0], form[1]) for form in forms]
    fields: dict[str, dict] = {"src": {}, "dst": {}, "edge": {}}
    for place, name, dtype, sizes, _ in forms:
        fields[place][name] = blank((2, *sizes), dtype)
    made = places(tracer, fields["src"], fields["dst"], fields["edge"], NUMBERED, forms)
    uniform: dict[str, Any] = {}
    for name, what, *rest in arguments:
        if what == "number":
            found.append(("number", name))
            x: Any = tracer.numbered(blank((), torch.float64), name)
        elif what == "tensor":
            x = blank(rest[1], rest[0])
            tracer.names.append((x, name))
        else:
            (x,) = rest
        uniform[name] = x
    watch, roots = traces.Watch(), list[Any]()
    try:
        with watch:
            result = module.edge(*made, **uniform)
        structure = flattened(type(module).__name__, result, roots)
        for root in roots:
            tracer.lift(root)
        kind, count, reverse = relation
        done = programs(tracer, kind, count, reverse, roots)
    except TigaError:
        return None  # which is raised where the compiler follows
    if watch.computed or tracer.notes or tracer.functions or tracer.scalars:
        return None
    for t, _ in tracer.operands[len(found) :]:
        at = [("uniform", name) for name, x in uniform.items() if x is t]
        at += [("module", name) for name, x in own.items() if x is t]
        if len(at) != 1:
            return None
        found += at
    stages = tuple([(s.text, tuple(s.reads), tuple(s.scalars), tuple(s.outputs)) for s in done.stages])
    return stages, done.texts, tuple(done.at), closed(structure), len(roots), tuple(found)


def closed(structure: Any) -> Any:
    """The same as words: numbers, and (names or None, parts). Dynamo does not look into a constant dictionary."""
    if isinstance(structure, int):
        return structure
    names = tuple(structure) if isinstance(structure, dict) else None
    return names, tuple([closed(x) for x in (structure.values() if isinstance(structure, dict) else structure)])


def blank(sizes: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def constant(fn: Callable) -> Callable:
    """What torch.compiler.assume_constant_result does, without the import of the compiler."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
