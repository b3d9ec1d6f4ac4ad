"""From source text to a launch: kernels kept by content; the first plan that neither spills nor outgrows the chip."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import passes, relations
from tiga.codegen.emit_tiles import Emitter, Source
from tiga.codegen.plan import Plan, plans
from tiga.codegen.tiles import Pass, Refused
from tiga.program import Program, evaluate_size

WIDEST = 512  # of a vector that a tile holds whole


@functools.lru_cache(4096)
def load(text: str) -> Any:
    """The jitted function of a source, whose text stays readable: in tracebacks, and for whoever asks for the code."""
    name = f"<tiga kernel {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": "tiga.codegen.generated"}
    exec(compile(text, name, "exec"), scope)  # output of our own emitter, of a verified program
    return scope["propagate"]


@dataclass(frozen=True)
class Prepared:
    """A pass with its source: what a program needs, whatever the sizes."""

    work: Pass
    source: Source
    span: str


def prepare(p: Program, work: Pass, reads_number: bool) -> Prepared:
    rows = (work.owner == "dst") != p.reverse
    if p.kind in ("dense", "triangular", "window"):
        span = "band"
    else:
        double = p.kind == "intervals" and p.relation_tensors == 4
        span = ("rows" if rows else "cols") + ("2" if double else "1")
    passes.ran("emit-tiles")
    return Prepared(work, Emitter(p, work, span, reads_number).source(), span)


def launch(
    p: Program,
    ready: Prepared,
    fields: dict[str, Tensor],
    results: dict[str, Tensor],
    shapes: tuple,
    ints: tuple,
    relation: tuple,
    spans: Any,
) -> None:
    """Run one pass: fields are the tensors its inputs name, results the tensors it fills."""
    work, source = ready.work, ready.source
    sizes = [evaluate_size(a, shapes, p.operands) if isinstance(a, tuple) else a for a in work.axes]
    device = next(iter(fields.values())).device
    num_dst, num_src = (ints[1], ints[0]) if p.reverse else (ints[0], ints[1])
    own, other = (num_dst, num_src) if work.owner == "dst" else (num_src, num_dst)
    heads = 1
    for s in sizes:
        heads *= s
    if own == 0 or heads == 0:
        return
    args: list[Any] = []
    for x in source.inputs:
        t = fields[x.ref]
        features = t.stride()[(0 if x.place == "shared" else 1) :]
        args += [t, 0 if x.place == "shared" else t.stride(0)]
        args += [_stride(a, x.axes, features, t.shape[(0 if x.place == "shared" else 1) :]) for a in work.axes]
        if x.vector is not None:
            args.append(features[-1])
    for ref, axes, _ in source.outputs:
        t = results[ref]
        find = [x if not isinstance(x, tuple) else spans.find(x) for x in axes]
        args += [t, t.stride(0), *[_stride(a, find, t.stride()[1:], t.shape[1:]) for a in work.axes]]
    args += [*sizes, own, other, heads]
    widths = [evaluate_size(v, shapes, p.operands) if isinstance(v, tuple) else v for v in source.vectors]
    if max(widths, default=0) > WIDEST:
        raise Refused(f"a vector of {max(widths)}, wider than {WIDEST}")
    constants: list[int] = []
    for w in widths:
        constants += [w, max(16, 1 << (w - 1).bit_length())]
    itemsize = max([fields[x.ref].element_size() for x in source.inputs if x.vector is not None], default=4)
    fn = load(source.text)
    precision = "tf32" if itemsize == 4 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
    for plan in plans(widths, itemsize, len(work.folds)):
        spans_args = _relation_args(p, ready, plan, ints, relation, device)
        values = [*args, *spans_args, *constants, plan.block_m, plan.block_n, precision]
        if fits(source.text, fn, values, tuple(constants), plan, device):
            grid = (-(-own // plan.block_m) * heads,)
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                fn[grid](*values, num_warps=plan.warps, num_stages=plan.stages)
            return
    raise Refused(f"no plan fits vectors of {' and '.join(map(str, widths))} on this device")


_fitting: dict[tuple, bool] = {}
_compiled: dict[str, Any] = {}


def compiled_text(source: str, level: str) -> str:
    """ttir, ttgir or ptx of a kernel that was launched; "" under Triton's interpreter, which compiles nothing."""
    made = _compiled.get(source)
    return made.asm.get(level, "") if made is not None else ""


def fits(text: str, fn: Any, values: list, constants: tuple, plan: Plan, device: Any) -> bool:
    """Whether a plan neither spills nor outgrows the chip; found before its first launch, so that a plan taken stays.

    Keyed by all that may change the machine code: text, plan, widths and dtypes.
    """
    dtypes = tuple([x.dtype for x in values if isinstance(x, Tensor)])
    key = (text, plan, constants, dtypes, device)
    if key not in _fitting:
        _fitting[key] = _compiles(text, fn, values, plan, device)
    return _fitting[key]


def _compiles(text: str, fn: Any, values: list, plan: Plan, device: Any) -> bool:
    if device.type != "cuda":  # Triton's interpreter
        return True
    from triton.runtime.errors import OutOfResources

    try:
        with torch.cuda.device(device):
            made = fn.warmup(*values, grid=(1,), num_warps=plan.warps, num_stages=plan.stages)
            made._init_handles()  # loads it: only then are spills and shared memory known
    except OutOfResources:
        return False
    if made.n_spills and not plan.last:
        return False
    _compiled[text] = made
    return True


def _stride(axis: Any, axes: Any, strides: Any, shape: Any) -> int:
    for a, s, n in zip(axes, strides, shape):
        if a == axis and n != 1:
            return s
    return 0


def _relation_args(p: Program, ready: Prepared, plan: Plan, ints: tuple, relation: tuple, device: Any) -> list:
    args: list[Any] = []
    owners_are_rows = (ready.work.owner == "dst") != p.reverse
    if ready.span == "band":
        band = relations.RELATIONS[p.kind].band
        assert band is not None
        low, high = band(ints)
        low, high = (
            max(low, -(1 << 30)),
            min(high, 1 << 30),
        )  # beyond any size; int32 keeps the mask in half the registers
        args = [low, high] if owners_are_rows else [-high, -low]
    else:
        spans = relations.row_intervals(p.kind, ints, relation, 0, ints[0], device)
        for start, stop in spans:
            args += [start, stop]
        if ready.span[:4] == "cols":
            args += reach(spans, ints[1], plan.block_m)
    if ready.source.reads_numbers:
        args.append(relations.edge_offsets(p.kind, ints, relation, device))
    return args


def reach(spans: tuple, num_src: int, block: int) -> list[Tensor]:
    """For each tile of sources the rows that may reach it: exact where starts and stops grow, else wider. O(rows)."""
    start = torch.stack([torch.where(s < e, s, num_src) for s, e in spans]).amin(0)
    stop = torch.stack([torch.where(s < e, e, 0) for s, e in spans]).amax(0)
    if start.shape[0] == 0:
        tiles = -(-num_src // block)
        return [start.new_zeros(tiles), start.new_zeros(tiles)]
    edge = torch.arange(0, max(num_src, 1), block, device=start.device)
    low = torch.searchsorted(stop.cummax(0).values, edge, right=True)
    falling = start.flip(0).cummin(0).values.flip(0)
    high = torch.searchsorted(falling, edge + block)
    return [low, high]
