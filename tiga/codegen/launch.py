"""From a work's source texts to its launches: the first plan that neither spills nor outgrows the chip."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiga.codegen import bounds, tuning
from tiga.codegen.calls import Call, Prepared, Record, Steps, execute, stride
from tiga.codegen.emit_nodes import Parameter, Source, states
from tiga.codegen.kernels import Runner, multiprocessors, precision, runner
from tiga.codegen.lists_pruned import LIST, list_name, list_rows, list_value, the_map
from tiga.codegen.plan import Plan, at_once, merge, plans
from tiga.codegen.plan_pruned import plans_of
from tiga.codegen.tiles import Refused

# the tensors of a block-diagonal relation by what a kernel calls them; None: made for it
BLOCKS = {"own_bounds": 0, "other_bounds": 1, "block_low": 2, "block_high": 3, "prefix": None}
COUNT = Source(
    "from tiga.codegen.device import count_tiles as propagate\n",
    tuple([Parameter(x, x) for x in ("own_bounds", "prefix", "num_blocks", "num_own", "unit", "BLOCK_M", "BLOCK")]),
    (),
)
BETWEEN = ("spoiled", "places", "ordered", "taken")  # memory between the launches of the hopper skeleton
_FIXED = {"count": COUNT, "list": LIST, **bounds.STAGES}
WIDEST = 512  # of a vector that a tile holds whole
GROUP = 32 << 20  # bytes of the other end's fields that heads visited at a time may have: what a cache keeps
FEW_OWNERS = 32  # of a tile
SHORT = 16  # tiles of up to 64 others: of few owners, so many take no more time than parts, a launch, and their merge
FEW_SPILLED = 64  # registers of a thread in memory, which cost less than
TINY = 256  # numbers of a tile
IN_PIECES = 64  # numbers of float32 vectors that kernels take apart: wider ones leave room for small tiles only
HARDLY_SPILLED = 8  # registers, which cost less than tiles whose products no warpgroup makes: of fewer owners than
WARPGROUP = 64


def most_spilled(plan: Plan, best: Plan | None) -> int:
    """The registers that the best plan so far may spill for this one, further down the list, not to be tried."""
    if plan.block_m * plan.block_n <= TINY:
        return FEW_SPILLED
    return HARDLY_SPILLED if best is not None and plan.block_m < WARPGROUP <= best.block_m else 0


class Launch:
    """Prepares the launches of one work for sizes and strides not seen before. make: what gives a runner."""

    def __init__(
        self, ready: Prepared, call: Call, spans: Any, make: Callable[..., Runner | None] | None = None
    ) -> None:
        self.ready, self.call, self.spans, self.work = ready, call, spans, ready.work
        self.make = runner if make is None else make
        work = ready.work
        self.sizes = {a: call.size(a) for a in work.axes}
        self.unit = self.sizes[work.packed] if work.packed is not None else 1
        self.own = call.rows(work.owner)
        self.other = call.rows("src" if work.owner == "dst" else "dst") if ready.span != "nodes" else 0
        self.heads = 1
        for a, n in self.sizes.items():
            self.heads *= n if a != work.packed else 1
        self.items = self.own * self.unit
        self.lists = ready.span in ("band", "rows1") and the_map(work) is not None
        self.states: dict[str, tuple] = {}

    def steps(self) -> Steps:
        if self.items == 0 or self.heads == 0:
            return Steps((), ())
        source, itemsize = self.ready.source(), self.widths()
        padded = self.padded.values()
        sums = sum([f.field is not None for f in self.work.folds])
        some = plans(max(padded, default=16), itemsize, max(sums, 1), self.items)
        some = [*self.smaller(some[0]), *some]
        timed = self.work.tile is None and self.work.within is None and tuning.tuning(self.call.device)
        some = self.tuned(source, some, (*padded, itemsize), timed)
        best: Steps | None = None
        for plan in plans_of(self.work, some, itemsize, self.items):
            if best is not None and best.spilled <= most_spilled(plan, best.plan):
                break
            found = self.with_plan(plan)
            if found is not None and (best is None or found.spilled < best.spilled):
                best = found
            if best is not None and not best.spilled:
                break
        if best is None:
            tiles = "" if self.work.tile is None else f" with prune_tile={self.work.tile}"
            widths = [str(self.call.size(v)) for v in source.vectors]
            raise Refused(f"no plan fits vectors of {' and '.join(widths)}{tiles} on this device")
        return dataclasses.replace(best, timed=timed)

    def widths(self) -> int:
        """Finds the padded widths of vectors, and how their products are made; gives the widest item of them."""
        vectors = self.ready.source().vectors
        widths = [int(self.call.size(v)) for v in vectors]
        if max(widths, default=0) > WIDEST:
            raise Refused(f"a vector of {max(widths)}, wider than {WIDEST}")
        self.padded = {v: max(16, 1 << (w - 1).bit_length()) for v, w in zip(vectors, widths)}
        itemsize = max(
            [self.call.tensors[x.ref].element_size() for x in self.work.inputs if x.mode == "vector"], default=4
        )
        several = "bf16x6" if max(self.padded.values(), default=0) <= IN_PIECES else "tf32x3"
        self.precision = precision(itemsize, self.call.device, several)
        return itemsize

    def tuned(self, source: Source, some: list[Plan], words: tuple, timed: bool) -> list[Plan]:
        """The plans to try: first that which was the fastest, where it was looked for."""
        key = tuning.key_of(
            source.text, self.call.device, (self.items, self.other, self.heads), (*words, self.precision)
        )
        if timed and tuning.kept(key) is None:
            run = lambda steps: execute(steps, self.ready, self.call, self.spans)
            tuning.best(key, f"tiga: plans by {self.work.owner}", some, self.with_plan, run, self.call.device)
        found = tuning.kept(key)
        return some if found is None else [found, *some]

    def with_plan(self, plan: Plan) -> Steps | None:
        """The launches with one plan; None where it does not fit."""
        self.plan, self.splits = plan, 1
        self.splits = self.parts()
        stages = ("part", "merge") if self.splits > 1 else ("whole",)
        if self.ready.span == "blocks":
            stages = ("count", *stages)
        if self.lists:
            stages = ("list", *stages)
        stages = (*bounds.stages(self.ready.span), *stages)
        self.states.clear()
        records = []
        for stage in stages:
            self.plan = merge(self.splits, max(self.padded.values(), default=16)) if stage == "merge" else plan
            found = self.record(stage)
            if found is None:
                return None
            records.append(found)
        return Steps(tuple(records), tuple([(n, *x) for n, x in self.states.items()]), plan)

    def tiles(self) -> int:
        """Tiles of owners; of blocks at most so many."""
        tiles = -(-self.items // self.plan.block_m)
        return tiles + self.blocks() + 2 if self.ready.span == "blocks" else tiles

    def blocks(self) -> int:
        return self.call.relation[2].shape[0] if self.ready.span == "blocks" else 0

    def block_tensor(self, kind: str) -> str:
        """The name of a tensor of a block-diagonal relation: bounds of owners and others as this work sees them."""
        p = self.call.p
        rows = (self.work.owner == "dst") != p.reverse
        number = BLOCKS[kind]
        return "prefix" if number is None else f"relation{number if rows or number > 1 else 1 - number}"

    def smaller(self, first: Plan) -> list[Plan]:
        """The plan with fewer owners a tile, where its tiles would leave most of the chip idle and no parts would pay:
        few owners' tiles take less time each."""
        self.plan = first
        if self.ready.span == "nodes" or self.work.tile or self.work.within:
            return []
        if self.divisible() and self.long():
            return []
        while self.idle() and self.plan.block_m > FEW_OWNERS:
            self.plan = dataclasses.replace(self.plan, block_m=self.plan.block_m // 2, warps=4)
        return [self.plan] if self.plan is not first else []

    def idle(self) -> bool:
        return 2 * self.tiles() * self.heads <= multiprocessors(self.call.device)

    def long(self) -> bool:
        """Whether parts of a row and their merge take less time than the row."""
        return self.other > SHORT * min(self.plan.block_n, 64)

    def divisible(self) -> bool:
        return self.ready.span in ("band", "rows1") and not (self.work.tables or self.work.tile or self.work.within)

    def parts(self) -> int:
        """Into how many parts the sources are split: where few programs would leave most of the chip idle."""
        if not self.divisible() or not self.idle() or not self.long():
            return 1
        wanted = at_once(self.plan) * multiprocessors(self.call.device) // (self.tiles() * self.heads)
        wanted = max(1, min(wanted, self.other // (2 * self.plan.block_n)))
        tiles = -(-self.other // self.plan.block_n)
        return -(-tiles // -(-tiles // wanted))  # no more than shorten the longest

    def record(self, stage: str) -> Record | None:
        """The launch of one kernel; None where the plan does not fit."""
        source = self.source(stage)
        values, tensors, scalars, outputs, descriptors = [], [], [], [], []
        self.constants = self.numbers()
        made: dict[str, Any] = {}
        if stage not in ("merge", *_FIXED) and self.ready.span != "nodes":
            made = self.spans(self.ready, self.call, self.plan.block_m)
        for at, q in enumerate(source.parameters):
            value = self.value(q.kind, q.of, made)
            if q.kind == "tensor":
                tensors.append((at, q.of[0]))
            elif q.kind == "state":
                tensors.append((at, f"state{q.of[0]}_{q.of[1]}"))
            elif q.kind in ("kept kept", "kept tiles", "kept before"):
                tensors.append((at, list_name(self.work, q.kind)))
            elif q.kind == "table":
                tensors.append((at, "table " + self.work.tables[q.of[0]].ref))
            elif q.kind in BLOCKS:
                tensors.append((at, self.block_tensor(q.kind)))
            elif q.kind in bounds.TENSORS:
                tensors.append((at, bounds.tensor(q.kind, self.ready.span)))
            elif q.kind == "scalar":
                scalars.append((at, q.of[0]))
            elif q.kind in BETWEEN:
                tensors.append((at, q.kind))
            elif q.kind == "descriptor":
                descriptors.append((at, self.descriptor(q.of[1])))
            elif q.kind == "output":
                o = self.output(q.of)
                if o.result is None:
                    tensors.append((at, o.ref))
                else:
                    outputs.append((at, o.result))
            elif isinstance(value, Tensor):
                tensors.append((at, "&" + q.kind + str(self.plan.block_m)))
            values.append(value)
        found = self.make(source.text, values, self.plan, self.grid(stage), self.call.device)
        if found is None:
            return None
        for at, name in tensors:
            values[at] = self.plan.block_m if name[0] == "&" else None
        for at, _ in (*outputs, *descriptors):
            values[at] = None
        changing = (tensors, scalars, outputs, descriptors)
        return Record(source.text, found, tuple(values), *[tuple(x) for x in changing])

    def source(self, stage: str) -> Source:
        return _FIXED[stage] if stage in _FIXED else self.ready.source(stage)

    def grid(self, stage: str) -> tuple:
        if stage in bounds.STAGES:
            return (bounds.programs(stage, self.call.ints, self.plan.block_m),)
        if stage in _FIXED:
            return (list_rows(self.work, self.call.tensors) if stage == "list" else 1,)
        tiles = self.tiles() if stage != "merge" else -(-self.items // self.plan.block_m)
        return (tiles * self.heads * (self.splits if stage == "part" else 1),)

    def descriptor(self, x: Any) -> Callable[[Call], Any]:
        raise NotImplementedError

    def value(self, kind: str, of: tuple, made: dict) -> Any:
        call = self.call
        if kind == "tensor":
            return call.tensors[of[0]]
        if kind == "scalar":
            return call.scalars[of[0]]
        if kind in ("row", "count"):
            t = call.tensors[of[0]]
            return t.stride(0) if kind == "row" else t.shape[0]
        if kind == "stride":
            ref, x, axis = of
            t = call.tensors[ref]
            return stride(t, x.dims, axis, x.side != "shared")
        if kind in ("output", "output row", "output stride"):
            o = self.output(of)
            t = call.outputs[o.result] if o.result is not None else call.tensors[o.ref]
            if kind == "output":
                return t
            return t.stride(0) if kind == "output row" else stride(t, o.dims, of[2], True)
        if kind == "state":
            return self.state(*of)
        if kind[:5] == "kept ":
            return list_value(self, kind)
        if kind[:5] == "table":
            return self.table(kind, *of)
        if kind in bounds.KINDS:
            return bounds.value(self, kind)
        if kind in BLOCKS:
            name = self.block_tensor(kind)
            return call.tensors[name] if name in call.tensors else self.made_state(name, self.blocks() + 3, torch.int32)
        if kind in ("size", "width"):
            return call.size(of[0])
        if kind == "block":
            return self.padded[of[0]]
        return self.constants[kind] if kind in self.constants else made["&" + kind + str(self.plan.block_m)]

    def numbers(self) -> dict[str, Any]:
        """Arguments of a stage that are the same whatever they are of."""
        return {
            "num_own": self.own,
            "num_other": self.other,
            "num_heads": self.heads,
            "num_blocks": self.blocks(),
            "unit": self.unit,
            "BLOCK": 1024,
            "group": self.group(),
            "splits": self.splits,
            "BLOCK_M": self.plan.block_m,
            "BLOCK_N": self.plan.block_n,
            "MASKED": self.plan.masked,
            "PRECISION": self.precision,
            "EARLY": getattr(self.plan, "early", False),
        }

    def output(self, of: tuple) -> Any:
        outputs = {"node": self.work.outputs, "edge": self.work.edge_outputs, "map": self.work.maps}
        return outputs[of[0]][of[1]]

    def group(self) -> int:
        """How many heads are visited at a time."""
        bytes_of = 0
        for x in self.work.inputs:
            if x.side == "far" and x.mode == "vector":
                bytes_of += self.other * self.padded[x.vector] * self.call.tensors[x.ref].element_size()
        return max(1, min(self.heads, GROUP // max(bytes_of, 1)))

    def state(self, k: int, j: int) -> Tensor:
        f = self.work.folds[k]
        wide = (self.call.size(f.field.vector),) if f.field is not None and j == 0 else ()
        dtype = torch.int64 if states(self.ready.axes.p, f)[j] == "i64" else torch.float32
        return self.made_state(f"state{k}_{j}", (self.splits * self.heads * self.items, *wide), dtype)

    def table(self, kind: str, k: int, axis: Any = None) -> Any:
        """The sums into a table, of each tile of owners apart, contiguous; or a stride of them."""
        o = self.work.tables[k]
        sizes = [self.call.size(a) for a in o.dims]
        if kind == "table":
            return self.made_state("table " + o.ref, (self.tiles(), *sizes), torch.float32)
        at = -1 if axis is None else o.dims.index(axis)
        return math.prod(sizes[at + 1 :])

    def made_state(self, name: str, shape: Any, dtype: torch.dtype) -> Tensor:
        """Memory between the launches of a work, made at every call."""
        self.states[name] = (shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.call.device)
