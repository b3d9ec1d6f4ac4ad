"""Launches of the hopper skeleton: on sm_90, where a work has its form and there is enough of it.

Whatever it does not take - a work, a plan that spills or whose products wait for each other, another version of
Triton - runs in the tiles skeleton; the log says why.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tiga import passes
from tiga.codegen import bounds, hopper, plan_hopper
from tiga.codegen.calls import Call, Prepared, Steps
from tiga.codegen.emit_nodes import Parameter, Source
from tiga.codegen.kernels import multiprocessors
from tiga.codegen.launch import Launch
from tiga.codegen.plan import Plan
from tiga.codegen.plan_hopper import HopperPlan, hopper_plans
from tiga.codegen.tiles import Input, Refused
from tiga.passes import LOG

TRITON = "3.6."  # Gluon is private there: another version may mean something else by the same words
_TOLD = (
    "places prefix own_bounds other_bounds block_low block_high ordered taken num_blocks num_own num_other slots "
    "BLOCK_M REDO_M REVERSED BLOCK ORDERED"
)
_SCHEDULE = Source(
    "from tiga.codegen.device_schedule import schedule_tiles as propagate\n",
    tuple([Parameter(word, word) for word in _TOLD.split()]),
    (),
)
REDO = Plan(64, 32, 4, 1)  # little memory: many such tiles of owners find at a time that there is nothing to do
_ALIGNED = 16  # bytes: of addresses and strides that the copy engine reads by
_HOPPER = (9, 0)
UNEVEN = 0.75  # of the most others that a row reaches
ORDERED = 16  # tiles whose places one program finds


def unavailable(device: torch.device) -> str:
    """Why no kernel of this skeleton runs on a device; "" where one does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _HOPPER:
        return "not sm_90"
    return _gluon()


@functools.cache
def _gluon() -> str:
    import triton

    if not triton.__version__.startswith(TRITON):
        return f"Triton {triton.__version__}, not {TRITON}x"
    try:
        from tiga.codegen import device_hopper  # noqa: F401
    except ImportError as e:
        return f"no Gluon: {e}"
    return ""


def hopper_steps(ready: Prepared, call: Call, spans: Callable) -> Steps | None:
    """The launches of a work; None where the tiles skeleton is to do it."""
    reason = unavailable(call.device) or _refusal(ready)
    if not reason:
        try:
            return HopperLaunch(_alone(ready), call, spans).steps()
        except Refused as e:
            reason = str(e)
    LOG.debug("hopper does not take the work by %s: %s", ready.work.owner, reason)
    return None


def takes(ready: Prepared, call: Call, spans: Callable) -> bool:
    """Whether a call like this is this skeleton's, before anything is compiled: no code of others holds its kernels."""
    if unavailable(call.device) or _refusal(ready):
        return False
    try:
        return bool(HopperLaunch(_alone(ready), call, spans).plans())
    except Refused:
        return False


_known: weakref.WeakKeyDictionary[Prepared, tuple[str, Prepared]] = weakref.WeakKeyDictionary()


def _refusal(ready: Prepared) -> str:
    if ready not in _known:
        work = dataclasses.replace(ready.work, packed=None)  # heads that share others meet again in the cache
        alone = ready if ready.work.packed is None else dataclasses.replace(ready, work=work)
        _known[ready] = hopper.refusal(ready.axes, work, ready.span), alone
    return _known[ready][0]


def _alone(ready: Prepared) -> Prepared:
    return _known[ready][1]


@functools.lru_cache(4096)
def _source(ready: Prepared, plan: HopperPlan | None, widths: tuple) -> Source:
    from tiga.codegen.emit_hopper import HopperEmitter
    from tiga.codegen.emit_hopper_pruned import PrunedHopperEmitter
    from tiga.codegen.emit_redo import RedoEmitter

    passes.ran("emit-tiles")
    if plan is None:
        return RedoEmitter(ready.axes, ready.work, ready.span).source()
    emitter = HopperEmitter if ready.work.tile is None else PrunedHopperEmitter
    return emitter(ready.axes, ready.work, ready.span, plan, dict(widths)).source()


class HopperLaunch(Launch):
    plan: Any  # of this skeleton, or of the one that does rows again

    def steps(self) -> Steps:
        self.precision = "ieee"
        reason = ""
        for plan in self.plans():
            steps, reason = self.with_hopper_plan(plan)
            if steps is not None:
                return steps
            LOG.debug("hopper, %s: %s", plan, reason)
        raise Refused(reason)

    def plans(self) -> list[HopperPlan]:
        """The plans to try, before anything is compiled."""
        if self.items == 0 or self.heads == 0:
            raise Refused(f"{self.items} rows of {self.heads} heads")
        found = [x for x in self.work.inputs if x.mode == "vector"]
        for x in found:
            self.check(x)
        vectors = dict.fromkeys([x.vector for x in found] + [o.vector for o in self.work.outputs if o.vector])
        self.vectors = tuple([(a, hopper.padded(self.call.size(a))) for a in vectors])
        self.padded = dict(self.vectors)
        places = {self.padded[x.vector] for x in hopper.near_vectors(self.work)}
        for x in hopper.late_vectors(self.work):
            if self.padded[x.vector] not in places:
                raise Refused(f"{x.ref} of {self.padded[x.vector]} features, which no vector of a product has")
        width = max(self.padded.values())
        softmax = any(f.reducer == "softmax" for f in self.work.folds)
        fewest = plan_hopper.FEWEST.get((self.ready.span, width))
        if fewest is None or self.reach() < fewest[0 if softmax else 1]:
            raise Refused(f"rows of vectors of {width} that reach {self.reach()} others of a {self.ready.span}")
        if self.work.tile is not None:
            return self.plans_of_tile(width)
        products = len(hopper.products_of(self.ready.axes, self.work))
        some = hopper_plans(width, products, len(self.work.folds), softmax)
        if not some:
            raise Refused(f"no plan for {products} products and {len(self.work.folds)} sums of vectors of {width}")
        return self.busy_plans(some)

    def plans_of_tile(self, width: int) -> list[HopperPlan]:
        assert self.work.tile is not None
        some = plan_hopper.pruned_plans(self.work.tile, width)
        if not some:
            raise Refused(f"no plan for tiles of {self.work.tile} to skip and vectors of {width}")
        return self.busy_plans(some)

    def busy_plans(self, some: Sequence[HopperPlan]) -> list[HopperPlan]:
        busy = [plan for plan in some if self.busy(plan)]
        if not busy:
            raise Refused(f"{self.tiles()} tiles of {self.heads} heads leave multiprocessors idle")
        return busy

    def reach(self) -> int:
        """The others that a row reaches, at most; of packed sequences those of a mean one."""
        if self.ready.span != "band":
            return self.other // max(1, self.blocks()) if self.ready.span == "blocks" else self.other
        told = self.spans(self.ready, self.call, 0)
        return max(0, min(self.other, told["&high0"] - told["&low0"] + 1))

    def group(self) -> int:
        """Heads at a time. All, where tiles of a band differ in weight: only then has each program some of all weights.
        Tiles of packed sequences that run beside one another share few of the others: their heads stay in the cache."""
        return self.heads if self.ready.span == "band" and self.uneven() else super().group()

    def uneven(self) -> bool:
        told = self.spans(self.ready, self.call, 0)
        rows = [self.own * k // 8 for k in (1, 3, 5, 7)]
        low, high = told["&low0"], told["&high0"]
        reached = [min(i + high + 1, self.other) - max(i + low, 0) for i in rows]
        return min(reached) < UNEVEN * max(reached)

    def busy(self, plan: HopperPlan) -> bool:
        self.plan = plan
        return self.tiles() * self.heads >= multiprocessors(self.call.device)

    def check(self, x: Input) -> None:
        """The copy engine reads vectors whose addresses and strides are multiples of 16 bytes."""
        t, size = self.call.tensors[x.ref], self.call.size(x.vector)
        if not hopper.padded(size):
            raise Refused(f"vectors of {size}")
        strides = [s for n, s in zip(t.shape, t.stride()) if n != 1][:-1]
        aligned = all(s > 0 and s * t.element_size() % _ALIGNED == 0 for s in strides)
        at = t.storage_offset() * t.element_size() if isinstance(t, FakeTensor) else t.data_ptr()
        if not aligned or t.stride(-1) != 1 or at % _ALIGNED:
            raise Refused(f"{x.ref} with strides {tuple(t.stride())}")

    def with_hopper_plan(self, plan: HopperPlan) -> tuple[Steps | None, str]:
        self.states.clear()
        self.splits = 1
        self.plan, blocks = plan, self.ready.span == "blocks"
        try:
            before = ("schedule",) if blocks else bounds.stages(self.ready.span)
            first = [self.record(stage) for stage in before]
            main = self.record("hopper")
            fault = faults(main.runner.compiled) if main is not None else "more shared memory than there is"
        except Exception as e:  # whatever a compiler or its tools raise, the tiles skeleton does the work
            return None, f"{type(e).__name__}: {e}"
        if fault or main is None:
            return None, fault
        self.plan = REDO if self.work.tile is None else Plan(*self.work.tile, min(8, self.work.tile[0] // 16), 1)
        records = [*first, main, self.record("redo")]
        if any(r is None for r in records):
            return None, "the kernel that does rows again does not fit"
        states = tuple([(n, *x) for n, x in self.states.items()])
        return Steps(tuple([r for r in records if r]), states, timed=True, noted=("launch-hopper",)), ""

    def source(self, stage: str) -> Source:
        if stage == "hopper":
            return _source(self.ready, self.plan, self.vectors)
        if stage == "redo":
            return _source(self.ready, None, ())
        return _SCHEDULE if stage == "schedule" else super().source(stage)

    def grid(self, stage: str) -> tuple:
        if stage == "schedule":
            return (-(-self.tiles() // ORDERED),)
        if stage == "redo":
            return (min(self.tiles() * self.heads, 2 * multiprocessors(self.call.device)),)
        if stage == "hopper":
            return (min(self.tiles() * self.heads, multiprocessors(self.call.device)),)
        return super().grid(stage)

    def value(self, kind: str, of: tuple, made: dict) -> Any:
        if kind == "descriptor":
            return self.descriptor(of[1])(self.call)
        if kind == "num_tiles":
            return self.tiles() * self.heads
        if kind == "taken":
            return self.made_state(kind, (1,), torch.int32)
        if kind == "ordered":
            return self.made_state(kind, (self.tiles() * 8,), torch.int32)
        if kind == "places":
            return self.made_state(kind, (self.blocks() + 3,), torch.int32)
        fixed = {
            "slots": self.tiles(),
            "ORDERED": ORDERED,
            "REDO_M": REDO.block_m,
            "REVERSED": (self.work.owner == "dst") == self.call.p.reverse,
        }
        if kind in fixed:
            return fixed[kind]
        if kind == "spoiled":
            return self.made_state("spoiled", (self.heads * self.own,), torch.int8)
        return super().value(kind, of, made)

    def descriptor(self, x: Input) -> Callable[[Call], Any]:
        """How the descriptor of a field's tiles is made: of its heads, rows and features."""
        from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        t = self.call.tensors[x.ref]
        heads = [hopper.stride_of(t, x.dims, a) for a in self.work.axes if a in x.heads]
        wide = self.padded[x.vector]
        shape = [*[n for n, _ in heads], t.shape[0], self.call.size(x.vector)]
        strides = [*[s if n != 1 else wide for n, s in heads], t.stride(0) if t.shape[0] != 1 else wide, 1]
        block = [1] * len(heads) + [64 if x.side == "own" else self.plan.block_n, wide]
        layout = NVMMASharedLayout.get_default_for(block, bfloat16 if t.dtype == torch.bfloat16 else float16)
        return lambda call: TensorDescriptor(call.tensors[x.ref], shape, strides, block, layout)


MOST_LOCAL = 8  # loads and stores a tile; with half of them slopes of positions ran 1.4 times as fast as plain kernels
_PRODUCT, _WAIT = re.compile(r"\bHGMMA\b"), re.compile(r"WARPGROUP\.DEPBAR")
_LOCAL, _LABEL = re.compile(r"\b(STL|LDL)\b"), re.compile(r"^(\.L_x_\d+):", re.MULTILINE)
_ROW = re.compile(r"^(?!\.L_x_|\s*/\* 0x).+$", re.MULTILINE)
# One that is always taken ends a loop too, unless it comes right after another: that is the end of a wait, which stands
# behind everything.
_BRANCH = re.compile(r"(@!?U?P\d+ +)?BRA `\((\.L_x_\d+)\)")


def faults(compiled: Any) -> str:
    """What makes a compiled kernel slow: memory for registers in a loop over tiles, or matrix products that each wait
    for the one before. What is kept in memory once a tile of owners is no fault."""
    return "" if compiled is None else _faults(compiled.asm["cubin"])  # None: of Triton's interpreter


@functools.lru_cache(1024)
def _faults(cubin: bytes) -> str:
    text = machine_code(cubin)
    products, waits = len(_PRODUCT.findall(text)), len(_WAIT.findall(text))
    if 2 * waits > products:
        return f"{waits} waits for {products} matrix products"
    spilled = max([len(_LOCAL.findall(loop)) for loop in loops(text)], default=0)
    return f"registers in memory {spilled} times a tile" if spilled > MOST_LOCAL else ""


def machine_code(cubin: bytes) -> str:
    """As text, with labels, all of it: what Triton makes of it ends too early."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        asked = [triton.knobs.nvidia.nvdisasm.path, "-c", f.name]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


def loops(text: str) -> list[str]:
    """The machine code of the innermost loops that multiply matrices."""
    start = {m[1]: m.start() for m in _LABEL.finditer(text)}
    spans, before = [], ""
    for m in _ROW.finditer(text):
        branch = _BRANCH.search(m[0])
        if branch is not None and (branch[1] or "BRA" not in before) and start.get(branch[2], len(text)) < m.start():
            spans.append((start[branch[2]], m.end()))
        before = m[0]
    spans = [(a, b) for a, b in spans if _PRODUCT.search(text, a, b)]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [text[a:b] for a, b in inner]
