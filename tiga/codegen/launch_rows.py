"""Launches of the rows skeleton: what follows from layouts is found once; the first plan without spills is taken.

The tensors of a call are named (what, which): ("field", ref) that the kernel reads, ("out", ref) that it fills,
("list", name) of the relation, ("slots", state) and ("parts", ref) that are made here, ("scalar", name) a number.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import passes
from tiga.codegen.emit_rows import Emitter, Source
from tiga.codegen.kernels import keep, load, precision
from tiga.codegen.plan_rows import Plan, plans, split_of
from tiga.codegen.rows import Analysis, Pass, Refused
from tiga.program import Program, evaluate_size
from tiga.types import DTYPES, compute_dtype

WIDEST = 2048  # features of a tile, a row
CHUNK = 8  # slots that are merged at a time
PROGRAMS = 32  # a multiprocessor, where programs keep sums to themselves
MOST_PARTS = 16 << 20  # bytes of these sums, of all programs
MOST_RECORDS = 4096


@dataclass(frozen=True, eq=False)
class Prepared:
    """A pass with its sources: what a program needs, whatever the sizes. given: the tensors and numbers of a call."""

    work: Pass
    main: Source
    merge: Source | None
    given: tuple[tuple, ...]


def prepare(a: Analysis, work: Pass) -> Prepared:
    passes.ran("emit-rows")
    main, merge = Emitter(a, work).source(), Emitter(a, work).merge()
    arguments = (*main.arguments, *(merge.arguments if merge is not None else ()))
    given = dict.fromkeys([a[1:] for a in arguments if a[1] in ("field", "out", "scalar")])
    return Prepared(work, main, merge, tuple(given))


@dataclass(frozen=True)
class Listed:
    """One direction of a relation: the items of its owners, the rows that were cut, the other end of each entry."""

    items: Tensor
    merges: Tensor
    col: Tensor
    number: Tensor | None
    num_far: int


def listed(p: Program, ints: tuple, relation: tuple, work: Pass) -> Listed:
    """The direction that a pass visits; what the graph was not prepared for is made here."""
    rowptr, col = relation[:2]
    number = relation[2] if len(relation) > 2 else None
    num_far = ints[1]
    if (work.owner == "dst") == p.reverse:
        rowptr, col, number = torch.ops.tiga.csr_transpose(rowptr, col, number, ints[1])
        num_far = ints[0]
    edges = col.shape[0]
    # states of a user's reducer pass from edge to edge of a whole row
    split = max(1, edges) if any(f.op == "scan" for f in work.folds) else split_of(edges)
    items, merges = torch.ops.tiga.work_list(rowptr, edges, split)
    return Listed(items, merges, col, number, num_far)


@dataclass(frozen=True)
class Call:
    """A compiled kernel, its grid and arguments; `changing`: (where, which) of those that every call gives anew."""

    run: Callable[[int, list], Any]
    grid: int
    values: list
    changing: tuple[tuple[int, tuple], ...]
    spills: int = 0


@dataclass(frozen=True)
class Record:
    """All that a pass needs at tensors of one layout. memory: (which, elements or shape, dtype) of what it makes."""

    calls: tuple[Call, ...]
    memory: tuple[tuple[tuple, Any, torch.dtype], ...]


_records: dict[tuple, Record] = {}


def launch(p: Program, ready: Prepared, tensors: dict, shapes: tuple, graph: Listed, rows: int) -> None:
    """Run one pass of `rows` owners; partial sums of its sums over all edges are left in tensors["parts", ref]."""
    device = graph.col.device
    tensors["list", "items"], tensors["list", "merges"], tensors["list", "col"] = graph.items, graph.merges, graph.col
    tensors["list", "number_of"] = graph.col if graph.number is None else graph.number
    key: list[Any] = [ready, rows, graph.num_far, graph.number is None, device, precision(4, device)]
    for name in (*ready.given, ("list", "items"), ("list", "merges"), ("list", "col"), ("list", "number_of")):
        t = tensors[name]
        if isinstance(t, Tensor):
            key += (t.dtype, t.shape, t.stride(), t.data_ptr() % 16)
    record = _records.get(tuple(key))
    if record is None:
        if len(_records) >= MOST_RECORDS:
            _records.clear()
        record = _records[tuple(key)] = recorded(p, ready, tensors, shapes, graph, rows)
    for name, shape, dtype in record.memory:
        tensors[name] = torch.empty(shape, dtype=dtype, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for call in record.calls:
            values = list(call.values)
            for at, name in call.changing:
                values[at] = tensors[name]
            call.run(call.grid, values)


def recorded(p: Program, ready: Prepared, tensors: dict, shapes: tuple, graph: Listed, rows: int) -> Record:
    """Kernels for tensors of this layout: of the first plan that does not spill, else of that which spills least.

    What some functions of CUDA's library keep in local memory counts as spilled, and is the same in every plan.
    """
    num_edges, num_items, device = graph.col.shape[0], graph.items.shape[0], graph.col.device
    if num_items == 0:
        return Record((), ())
    sizes = {a: evaluate_size(a, shapes, p.operands) if isinstance(a, tuple) else a for a in ready.main.axes}
    cut = graph.merges.shape[0] > 0
    slots = 2 * num_edges // split_of(num_edges) if cut else 1
    memory: list[tuple] = [
        (("slots", s), slots * blocks(s.axes, sizes), DTYPES[s.dtype]) for state in ready.main.states for s in state
    ]
    numbers = {
        "num_items": num_items,
        "num_far": graph.num_far,
        "num_edges": num_edges,
        "NUMBERED": graph.number is not None,
    }
    best: tuple[Call, Plan, list] | None = None
    for plan in plans(*widths(p, ready, tensors), matrix(ready.main, sizes), rows, num_edges / max(1, rows)):
        grid = -(-num_items // plan.rows)
        sums = [
            (f.outs[0], full_shape(p, f.outs[0], shapes), DTYPES[compute_dtype(p.types[f.outs[0]].dtype)])
            for f in ready.work.shared
        ]
        if sums:
            most = MOST_PARTS // max(1, sum([math.prod(shape) * dtype.itemsize for _, shape, dtype in sums]))
            grid = min(grid, processors(device) * PROGRAMS, max(most, processors(device)))
        parts = [(("parts", ref), (grid, *shape), dtype) for ref, shape, dtype in sums]
        every = {**tensors, **{x: torch.empty(n, dtype=dtype, device=device) for x, n, dtype in (*memory, *parts)}}
        main = made(ready.main, plan, grid, every, numbers, sizes, device)
        if main is not None and (best is None or main.spills < best[0].spills):
            best = (main, plan, parts)
        if best is not None and best[0].spills == 0:
            break
    if best is None:
        raise Refused("no plan fits this program's widths on this device")
    main, plan, parts = best
    if not cut or ready.merge is None:
        return Record((main,), (*memory, *parts))
    every = {**tensors, **{x: torch.empty(n, dtype=dtype, device=device) for x, n, dtype in memory}}
    end = made(ready.merge, Plan(1, CHUNK, plan.warps), graph.merges.shape[0], every, numbers, sizes, device)
    if end is None:
        raise Refused("the states of a row's pieces do not fit this device")
    return Record((main, end), (*memory, *parts))


def full_shape(p: Program, ref: str, shapes: tuple) -> tuple:
    return tuple([evaluate_size(s, shapes, p.operands) for s in p.types[ref].sizes])


def blocks(axes: tuple, sizes: dict) -> int:
    """Elements of a row's tile: powers of two."""
    width = 1
    for a in axes:
        if a != 1:
            width *= block(sizes[a])
    return width


def block(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def widths(p: Program, ready: Prepared, tensors: dict) -> tuple[int, int]:
    """Bytes of the widest vector that an edge gathers, numbers of the widest that it or its row holds."""
    most_bytes, most = 4, 1
    for what, ref in ready.given:
        if (what == "field" and p.types[ref].place != "shared") or what == "out":
            t, numel = tensors[what, ref], 1
            for n in t.shape[1:]:
                numel *= block(n)
            most = max(most, numel)
            if what == "field" and p.types[ref].place != ready.work.owner:
                most_bytes = max(most_bytes, numel * t.element_size())
    if most > WIDEST:
        raise Refused(f"a value of {most} features an edge, more than {WIDEST}")
    return most_bytes, most


def matrix(source: Source, sizes: dict) -> int:
    """The widest factor of a matrix product of the kernel; 0 where there is none."""
    return max([block(sizes.get(a, 1)) for a in source.factors], default=0)


def made(
    source: Source, plan: Plan, grid: int, tensors: dict, numbers: dict, sizes: dict, device: torch.device
) -> Call | None:
    """The kernel for these arguments; None where it outgrows the chip."""
    values, changing = arguments(source, plan, tensors, numbers, sizes)
    fn = load(source.text)
    given = {at for at, _ in changing}
    kept = [None if at in given else x for at, x in enumerate(values)]  # no record keeps a tensor alive
    if device.type != "cuda":  # Triton's interpreter
        return Call(lambda grid, values: fn[(grid,)](*values, num_warps=plan.warps), grid, kept, changing)
    kernel = compiled(fn, values, plan, device)
    if kernel is None:
        return None
    keep(source.text, kernel)
    return Call(lambda grid, values: kernel[grid, 1, 1](*values), grid, kept, changing, kernel.n_spills)


def arguments(source: Source, plan: Plan, tensors: dict, numbers: dict, sizes: dict) -> tuple[list, tuple]:
    """A kernel's arguments, and where those stand that every call gives anew."""
    values: list[Any] = []
    changing = []
    for name, what, *rest in source.arguments:
        if what == "work":
            what, rest = ("number", [name]) if name in numbers else ("list", [name])
        if what == "number":
            values.append(numbers[name])
        elif (what, *rest) in tensors:
            changing.append((len(values), (what, *rest)))
            values.append(tensors[what, rest[0]])
        else:
            values.append(layout(what, rest, tensors))
    for a in source.axes:
        values += [sizes[a], block(sizes[a])]
    device = tensors["list", "items"].device
    return [*values, plan.rows, plan.block_e, precision(4, device)], tuple(changing)


def layout(what: str, rest: list, tensors: dict) -> int:
    """An integer that follows from a tensor's layout."""
    t = tensors["out" if what == "out_row" else "field", rest[0]]
    if what in ("row", "out_row"):
        return t.stride(0)
    if what == "rows":
        return t.shape[0]
    return t.stride(rest[1])


def compiled(fn: Any, values: list, plan: Plan, device: Any) -> Any:
    """The kernel; None where it outgrows the chip."""
    from triton.runtime.errors import OutOfResources

    try:
        with torch.cuda.device(device):
            kernel = fn.warmup(*values, grid=(1,), num_warps=plan.warps)
            kernel._init_handles()  # loads it: only then are spills and shared memory known
    except OutOfResources:
        return None
    return kernel


@functools.lru_cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
