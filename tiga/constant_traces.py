"""Traces while torch compiles: an edge function is called as it is where the compiler need not follow it.

Dynamo runs Python an instruction at a time, which takes it about half a second for the trace of one layer. Where an
edge function reads only its fields and arguments, torch's functions, and reducers, tensors, plain values and networks
of torch's own layers of its module, it is run outside, on tensors without memory, and the programs are constants of the
compiled code. All that they depend on is read here as Dynamo sees it, so that it guards it. Sizes that the compiler
holds for symbols, other arguments and other functions are traced through it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tiga import traces
from tiga.errors import TigaError
from tiga.fields import NUMBERED, PLACED, places, positions_of
from tiga.networks import NETWORKS
from tiga.reducer import OnlineSoftmaxReducer
from tiga.shortcuts import REDUCERS
from tiga.stages import Programs, Stage, programs
from tiga.trace import Tracer, flattened, static

_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


# What Dynamo follows.


def constant_trace(module: Any, graph: Any, forms: tuple, home: torch.device, given: dict[str, dict]) -> Any:
    """The trace of a call, its tensors and its numbers; None where the compiler is to follow the edge function."""
    if module._made_while_compiling:
        return None
    try:
        scope = module.edge.__func__.__globals__  # of another function Dynamo sees that it is another
    except AttributeError:
        return None
    placed = tuple([(place, "", x.dtype, x.shape[1:], "position") for place, x in given["position"].items()])
    read = module._edge_reads_of(tuple([form[1] for form in forms]))
    if read is None or not all([static(n) for form in (*forms, *placed) for n in form[3]]):
        return None
    names, paths, networks = read
    forms, placed = numbered(forms), numbered(placed)
    uniform = given["uniform"]
    arguments = [(name, *(("number",) if isinstance(x, float) else word(x))) for name, x in uniform.items()]
    attributes = [(path, *word(reached(module, path))) for path in paths]
    untold = [x for x in (*arguments, *attributes) if x[1] == ""]
    if untold or not all([is_as_made(reached(module, path), parts) for path, parts in networks]):
        return None
    count = len(graph.tensors) + len(graph.prepared if torch.is_grad_enabled() else graph.prepared[:2])
    relation, objects = (graph.kind, count, graph.reversed), tuple([scope[name] for name in names])
    found = module._constant_trace(relation, forms, placed, tuple(arguments), tuple(attributes), objects)
    if found is None:
        return None
    stages, texts, at, structure, results, operands = found
    tensors = []
    for place, name in operands:
        if place == "number":
            tensors.append((torch.ones((), dtype=torch.float64, device=home) * uniform[name],))
        else:
            tensors.append((reached(module, name) if place == "module" else given[place][name],))
    made = Programs([Stage(*stage) for stage in stages], texts, at, [])
    return traces.Known(made, opened(structure), results, (), ()), tensors


def numbered(forms: tuple) -> tuple:
    """The same with sizes that are no symbols."""
    return tuple([(*form[:3], tuple([number(n) for n in form[3]]), form[4]) for form in forms])


def reached(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


def is_as_made(network: Any, parts: tuple[str, ...]) -> bool:
    """Whether a network of torch's is what its class and its parts make of it."""
    try:
        if network.forward.__func__.__globals__ is None:  # as above
            return False
    except AttributeError:
        return False
    return tuple(network._modules) == parts


def opened(structure: Any) -> Any:
    """What an edge function returns, from its words."""
    if isinstance(structure, int):
        return structure
    names, parts = structure
    return tuple([opened(x) for x in parts]) if names is None else {n: opened(x) for n, x in zip(names, parts)}


def word(x: Any) -> tuple:
    """What a trace can depend on of an argument or an attribute; ("",) where that is not known."""
    if isinstance(x, Tensor):
        return ("tensor", x.dtype, tuple([number(n) for n in x.shape])) if all([static(n) for n in x.shape]) else ("",)
    if isinstance(x, OnlineSoftmaxReducer):
        pruned = x.block_prune_threshold is not None or x.prune_mass is not None
        return ("",) if pruned else ("reducer", bool(x.return_lse))
    if isinstance(x, REDUCERS):
        return ("reducer",)
    if isinstance(x, (bool, str)) or x is None:
        return ("value", x)
    if isinstance(x, int) and static(x):
        return ("value", number(x))
    return ("value", x) if isinstance(x, float) and static(x) else ("",)


def number(n: int) -> int:
    """A symbol whose value the compiler knows, as that: int(n) stays one."""
    return range(n).stop


# What runs outside of it.


class Reads(NamedTuple):
    """names: of the function's file; paths: of attributes of its module, and of those of networks that it has;
    networks: each with the names of its parts."""

    names: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]
    networks: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def reads_of(module: Any, fields: tuple[str, ...]) -> tuple | None:
    """What an edge function reads; None where it may depend on more than such, or does more."""
    held = traces.made_for(module)
    own = None if held is None or held.reads is None else held.attributes(module, fields)
    if held is None or held.reads is None or own is None:
        return None
    names = [name for name in held.reads.scope if name in held.function.__globals__]
    paths: list[tuple[str, ...]] = []
    networks: list[tuple] = []
    try:
        for name in held.reads.scope:
            x = held.named(name)
            traces.global_word(name, x)
            if not isinstance(x, _FUNCTIONS):
                return None
        for name in own:
            x = getattr(module, name)
            traces.see(x, [], [])
            if isinstance(x, nn.Module):
                add_network(x, (name,), paths, networks)
            elif type(x) in (*_PLAIN, *REDUCERS) or isinstance(x, Tensor):
                paths.append((name,))
            else:
                return None
    except (traces.Unseen, KeyError):
        return None
    return tuple(Reads(tuple(names), tuple(paths), tuple(networks)))


def add_network(network: nn.Module, path: tuple[str, ...], paths: list, networks: list) -> None:
    networks.append((path, tuple(network._modules)))
    paths += [(*path, name) for name in (*NETWORKS[type(network)], *network._parameters)]
    for name, part in network._modules.items():
        add_network(part, (*path, name), paths, networks)  # type: ignore[arg-type]


def trace(
    module: Any, relation: tuple, forms: tuple, placed: tuple, arguments: tuple, attributes: tuple, objects: tuple
) -> Any:
    """The programs of a call of these forms, as constants, and the place and name of each operand. objects: those of
    its file that the edge function reads, which are given so that Dynamo sees them read."""
    own: dict[tuple, Any] = {path: reached(module, path) for path, what, *_ in attributes if what == "tensor"}
    tracer, found = Tracer(compiling=True), list[tuple]([(form[0], form[1]) for form in forms])
    fields: dict[str, dict] = {"src": {}, "dst": {}, "edge": {}}
    for place, name, dtype, sizes, _ in forms:
        fields[place][name] = blank((2, *sizes), dtype)
    at = {form[0]: blank((2, *form[3]), form[2]) for form in placed}
    if placed:
        tracer.positions = positions_of(at["dst"], at["src"], at.get("edge"), fields)
    made = places(tracer, fields["src"], fields["dst"], fields["edge"], PLACED if placed else NUMBERED, forms)
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
    for t, row in tracer.operands[len(found) :]:
        of: list[tuple] = [("position", row.place)] if row.flag == "position" else []
        of += [("uniform", name) for name, x in uniform.items() if x is t]
        of += [("module", path) for path, x in own.items() if x is t]
        if len(of) != 1:
            return None
        found += of
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
