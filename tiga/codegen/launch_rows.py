"""Launches of the rows skeleton: what follows from layouts is found once; the first plan without spills is taken.

The tensors of a call are named (what, which): ("field", ref) that the kernel reads, ("out", ref) that it fills,
("list", name) of the relation, ("slots", state) and ("parts", ref) that are made here, ("scalar", name) a number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga import passes
from tiga.codegen.emit_rows import Emitter, Source
from tiga.codegen.kernels import Runner, bare, compiled, float32_setting, keep, load, multiprocessors, precision
from tiga.codegen.plan_rows import Plan, bucket, plans, programs, whole_waves
from tiga.codegen.rows import Analysis, Pass, Refused
from tiga.codegen.tape import Tape
from tiga.preparation import Direction, directions, work_list
from tiga.program import Program, evaluate_size
from tiga.types import DTYPES, compute_dtype

WIDEST = 2048  # features of a tile, a row
CHUNK = 8  # slots that are merged at a time
MOST_PARTS = 16 << 20  # bytes of the sums that programs keep to themselves, of all of them
HOPELESS = 512  # bytes of spills, after which only more warps help
MOST_RECORDS = 4096
FAR_AWAY = 1 << 31  # elements, from which on offsets of rows have 64 bits


@dataclass(frozen=True, eq=False)
class Prepared:
    """A pass with its sources: what a program needs, whatever the sizes.

    given: the tensors and numbers of a call. gathered: those of them that are read where an edge says.
    """

    work: Pass
    main: Source
    merge: Source | None
    given: tuple[tuple, ...]
    gathered: tuple[tuple, ...]


def prepare(a: Analysis, work: Pass) -> Prepared:
    passes.ran("emit-rows")
    main, merge = Emitter(a, work).source(), Emitter(a, work).merge()
    arguments = (*main.arguments, *(merge.arguments if merge is not None else ()))
    given = dict.fromkeys([a[1:] for a in arguments if a[1] in ("field", "out", "scalar")])
    far = [x for x in given if x[0] == "field" and a.p.types[x[1]].place not in ("shared", work.owner)]
    return Prepared(work, main, merge, tuple(given), tuple(far))


class Listed(NamedTuple):
    """One direction of a relation: the items of its owners, the rows that were cut, the other end of each entry."""

    items: Tensor
    merges: Tensor
    col: Tensor
    number: Tensor | None
    num_own: int
    num_far: int


class Lists:
    """Both directions of a call's relation; what the graph was not prepared for is made when it is asked for."""

    def __init__(self, relation: tuple[Tensor, ...], ints: Sequence[int]) -> None:
        self.ints, self.num_edges = ints, relation[1].shape[0]
        self.found = directions(relation)

    def there(self, work: Pass) -> bool:
        """Whether all that a pass reads of the relation was given, and is not made in the call."""
        direction = self.found[work.owner == "src"]
        return direction is not None and direction.items is not None and not work.scans

    def of(self, work: Pass) -> Listed:
        """The direction that a pass visits."""
        num_own, num_far = self.ints[:2]
        direction = self.found[0]
        if work.owner == "src":
            num_own, num_far = num_far, num_own
            direction = self.found[1] or self.turned()
        rowptr, col, number, items, merges = direction
        # states of a user's reducer pass from edge to edge of a whole row
        if items is None or merges is None or (work.scans and merges.shape[0]):
            items, merges = work_list(rowptr, self.num_edges, 0 if work.scans else None)
        return Listed(items, merges, col, number, num_own, num_far)

    def turned(self) -> Direction:
        rowptr, col, number = self.found[0][:3]
        rowptr, col, number = torch.ops.tiga.csr_transpose(rowptr, col, number, self.ints[1])
        return Direction(rowptr, col, number, None, None)


@dataclass(frozen=True)
class Call:
    """A compiled kernel and its arguments; `changing`: (where, which) of those that every call gives anew."""

    run: Callable[[int, list], Any]
    values: list
    changing: tuple[tuple[int, tuple], ...]
    spills: int = 0
    kernel: Any = None
    registers: int = 0

    def __call__(self, grid: int, tensors: dict, tape: Tape | None = None) -> None:
        values = list(self.values)
        for at, name in self.changing:
            values[at] = tensors[name]
        if tape is None:
            self.run(grid, values)
        else:
            tape.launch(self.runner(grid), values, {at: name for at, (what, name) in self.changing if what == "scalar"})

    def runner(self, grid: int) -> Runner:
        """What launches so many programs."""
        address = None if self.kernel is None else bare(self.kernel, grid)
        return Runner(lambda *values: self.run(grid, list(values)), self.spills, self.kernel, address)


@dataclass(frozen=True)
class Record:
    """All that a pass needs at tensors of one layout, however many rows and edges there are.

    slots: (which, elements a slot, dtype) of the states that pieces leave; parts: (which, shape, dtype) of the sums
    that each program keeps, of `most` programs; sizes, constants: what the kernels were told of these tensors.
    """

    plan: Plan
    main: Call
    merge: Call | None
    slots: tuple[tuple[tuple, int, torch.dtype], ...]
    parts: tuple[tuple[tuple, tuple, torch.dtype], ...]
    most: int
    sizes: dict[Any, int]
    constants: dict[str, bool]


_records: dict[tuple, Record] = {}


def layout_key(p: Program, tensors: Sequence[Tensor], shapes: tuple, lists: Lists) -> tuple:
    """All of a call that decides its kernels, but addresses and numbers of rows and edges.

    What is made in the call has a layout that follows from this.
    """
    sizes = [bucket(n, lists.num_edges) for n in lists.ints[:2]]
    key: list[Any] = [tensors[0].device, float32_setting(), *sizes]
    for o, t, shape in zip(p.operands, tensors, shapes):
        key += (shape if o.place == "shared" else shape[1:], t.stride(), t.data_ptr() & 15)
    return (*key, *[t.dtype for t in tensors[len(p.operands) :]])


def launch(
    p: Program, ready: Prepared, tensors: dict, shapes: tuple, graph: Listed, key: tuple, tape: Tape | None = None
) -> None:
    """Run one pass; partial sums of its sums over all edges are left in tensors["parts", ref]."""
    num_items, num_merges, num_edges = graph.items.shape[0], graph.merges.shape[0], graph.col.shape[0]
    num_far, device = graph.num_far, graph.col.device
    if num_items == 0:
        return
    num_slots = listed(tensors, graph)
    wide = any([t.shape[0] * t.stride(0) >= FAR_AWAY for t in [tensors[name] for name in ready.gathered]])
    key = (ready, num_merges > 0, max(num_items, num_far, num_edges) >> 31 > 0, wide, key)
    record = _records.get(key)
    if record is None:
        if len(_records) >= MOST_RECORDS:
            _records.clear()
        record = _records[key] = recorded(p, ready, tensors, shapes, graph, wide)
    grid = programs(-(-num_items // record.plan.rows), multiprocessors(device), record.most)
    memory(record, tensors, grid, num_slots, device)
    with current(device):
        record.main(grid, tensors, tape)
        if record.merge is not None:
            record.merge(num_merges, tensors, tape)


def listed(tensors: dict, graph: Listed) -> Any:
    """Names a relation's lists and numbers among the tensors of a call; how many slots pieces have."""
    items, merges, col, number, num_own, num_far = graph
    num_slots = items.shape[0] - num_own + merges.shape[0]
    tensors.update(zip(_LISTS, (items, merges, col, col if number is None else number)))
    tensors.update(zip(_NUMBERS, (items.shape[0], num_own, num_far, col.shape[0], num_slots)))
    return num_slots


def memory(record: Record, tensors: dict, grid: Any, num_slots: Any, device: torch.device) -> None:
    """What a pass of so many programs leaves for its merge, and for the sums over all edges."""
    for name, width, dtype in record.slots:
        tensors[name] = torch.empty(num_slots * width, dtype=dtype, device=device)
    for name, shape, dtype in record.parts:
        tensors[name] = torch.empty((grid, *shape), dtype=dtype, device=device)


_LISTS = tuple([("list", name) for name in ("items", "merges", "col", "number_of")])
_NUMBERS = tuple([("number", name) for name in ("num_items", "num_own", "num_far", "num_edges", "num_slots")])


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels are launched on the current device."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def recorded(
    p: Program, ready: Prepared, tensors: dict, shapes: tuple, graph: Listed, wide: bool, compiling: Any = compiled
) -> Record:
    """Kernels for tensors of this layout: of the first plan that does not spill, else of that which spills least.

    What some functions of CUDA's library keep in local memory counts as spilled, and is the same in every plan.
    """
    device, cut = graph.col.device, graph.merges.shape[0] > 0
    sizes = {a: evaluate_size(a, shapes, p.operands) if isinstance(a, tuple) else a for a in ready.main.axes}
    slots = [(("slots", s), blocks(s.axes, sizes), DTYPES[s.dtype]) for state in ready.main.states for s in state]
    sums = [
        (f.outs[0], full_shape(p, f.outs[0], shapes), DTYPES[compute_dtype(p.types[f.outs[0]].dtype)])
        for f in ready.work.shared
    ]
    parts = [(("parts", ref), shape, dtype) for ref, shape, dtype in sums]
    most = 0
    if sums:
        bytes_of = sum([math.prod(shape) * dtype.itemsize for _, shape, dtype in sums])
        most = max(MOST_PARTS // max(1, bytes_of), multiprocessors(device))
    every = dict(tensors)
    every.update({x: torch.empty(n, dtype=dtype, device=device) for x, n, dtype in slots} if cut else {})
    every.update({x: torch.empty(shape, dtype=dtype, device=device) for x, shape, dtype in parts})
    constants = {"NUMBERED": graph.number is not None, "CUT": cut, "WIDE": wide}
    size = bucket(graph.num_own, graph.col.shape[0])
    best: tuple[Call, Plan] | None = None
    factor = matrix(ready.main, sizes)
    rescaled = any(f.op == "reduce" and f.attrs[1] == "softmax" for f in ready.work.folds)
    needs = (*widths(p, ready, tensors), factor, size, p.launch, held(p, ready), rescaled)
    for plan in plans(*needs):
        if best is not None and best[0].spills > HOPELESS and best[1].warps == plan.warps and not factor:
            continue
        main = made(ready.main, plan, every, constants, sizes, device, compiling)
        if main is not None and (best is None or main.spills < best[0].spills):
            best = (main, plan)
        if best is not None and best[0].spills == 0:
            break
    if best is None:
        raise Refused("no plan fits this program's widths on this device")
    main, plan = best
    if most and main.registers:
        most = whole_waves(most, main.registers, plan.warps, multiprocessors(device))
    end = None
    if cut and ready.merge is not None:
        end = made(ready.merge, merging(plan), every, constants, sizes, device, compiling)
        if end is None:
            raise Refused("the states of a row's pieces do not fit this device")
    return Record(plan, main, end, tuple(slots if cut else ()), tuple(parts), most, sizes, constants)


def merging(plan: Plan) -> Plan:
    """The plan of the kernel that ends rows whose pieces ran with this one."""
    return Plan(1, CHUNK, plan.warps)


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


def held(p: Program, ready: Prepared) -> bool:
    """Whether edges hold what a map that was taken apart makes of them."""
    makers = [p.definitions.get(line.outs[0]) for line in ready.work.lines]
    return bool(ready.main.apart) and any([m is not None and m.op in ("linear", "reshape") for m in makers])


def matrix(source: Source, sizes: dict) -> int:
    """The widest factor of a matrix product of the kernel; 0 where there is none."""
    return max([block(sizes.get(a, 1)) for a in source.factors], default=0)


def made(
    source: Source, plan: Plan, tensors: dict, constants: dict, sizes: dict, device: torch.device, compiling: Any
) -> Call | None:
    """The kernel for these arguments; None where it outgrows the chip."""
    values, changing = arguments(source, plan, tensors, constants, sizes, device)
    given = {at for at, _ in changing}
    kept = [None if at in given else x for at, x in enumerate(values)]  # no record keeps a tensor alive
    if device.type != "cuda":  # Triton's interpreter
        fn = load(source.text)
        return Call(lambda grid, values: fn[(grid,)](*values, num_warps=plan.warps), kept, changing)
    kernel = compiling(source.text, load(source.text), values, plan, device)
    if kernel is None:
        return None
    keep(source.text, kernel)
    return Call(
        lambda grid, values: kernel[grid, 1, 1](*values), kept, changing, kernel.n_spills, kernel, kernel.n_regs
    )


def arguments(
    source: Source, plan: Plan, tensors: dict, constants: dict, sizes: dict, device: torch.device
) -> tuple[list, tuple]:
    """A kernel's arguments, and where those stand that every call gives anew."""
    values: list[Any] = []
    changing = []
    for name, what, *rest in source.arguments:
        if what == "work":
            if name in constants:
                values.append(constants[name])
                continue
            what, rest = ("number" if name[:4] == "num_" else "list"), [name]
        if (what, *rest) in tensors:
            changing.append((len(values), (what, *rest)))
            values.append(tensors[what, rest[0]])
        else:
            values.append(None if what == "slots" else layout(what, rest, tensors))
    for a in source.axes:
        values += [sizes[a], block(sizes[a])]
    values += [plan.rows, plan.block_e, precision(4, device), lanes(source, plan, tensors)]
    return values, tuple(changing)


def lanes(source: Source, plan: Plan, tensors: dict) -> int:
    """How many numbers of a vector a thread takes, where a program's rows of the widest ones fill its warps.

    At most 16 bytes of each vector that edges gather, or of all where they gather none; 0 leaves it to Triton, where
    that is what it does anyway and where a vector's numbers do not lie side by side.
    """
    wide = {}
    for _, what, *rest in source.arguments:
        if what in ("field", "out") and rest[0] not in source.apart:
            t = tensors[what, rest[0]]
            shared = what == "field" and ("row", rest[0]) not in {a[1:] for a in source.arguments}
            wide[what, rest[0]] = t, list(zip(t.shape, t.stride()))[not shared :]  # features, never rows
    widths = [math.prod([block(n) for n, _ in features]) for _, features in wide.values()]
    most = max(widths, default=1)
    each, usual = most * plan.rows // (32 * plan.warps), set()
    at_edges = [2 * width >= most and name[1] in source.gathered for name, width in zip(wide, widths)]
    for (t, features), width, gathered in zip(wide.values(), widths, at_edges):
        if 2 * width >= most:
            last = [(n, s) for n, s in features if n != 1][-1:]
            if not last or last[0][1] != 1:
                return 0
            if gathered or not any(at_edges):
                each = min(each, 16 // t.element_size())
            each = min(each, block(last[0][0]))
            usual.add(16 // t.element_size())
    return 0 if usual == {each} else each


def layout(what: str, rest: list, tensors: dict) -> int:
    """An integer that follows from a tensor's layout."""
    t = tensors["out" if what == "out_row" else "field", rest[0]]
    if what == "rows":
        return t.shape[0]
    return t.stride(0) if what in ("row", "out_row") else t.stride(rest[1])
