"""What a module's last call was and ran: explain(), ir(), last_variant. Texts and numbers only, never a tensor."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tiga import layouts
from tiga.errors import TigaError
from tiga.parser import parse
from tiga.passes import PASSES, Record, Run, derived_from
from tiga.reducers import PRUNED
from tiga.relations import is_implicit

KERNEL_LEVELS = ("iter", "kernel", "ttir", "ttgir", "ptx")
SPELLINGS = {"kernel_ttir": "ttir", "gf.kernel.ttir": "ttir"}
LOWERINGS = {
    "interpret-blocked": "composite-blocked",
    "interpret-listed": "composite-listed",
    "launch-tiles": "tiles",
    "launch-rows": "rows",
    "launch-cpp": "cpp",
    "": "composite",
}
MOST_VARIANTS = 256


class Explanation(str):
    """Text that a prompt shows as it prints."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from tiga.program_pictures import explanation

        return explanation(self)


class Artifacts(Mapping[str, str]):
    """Texts by level. A level that was not made raises TigaError saying why."""

    def __init__(self, programs: tuple[str, ...], sources: tuple[str, ...] = ()) -> None:
        self._texts = {"domain": "\n\n".join(programs)}
        if sources:
            from tiga.codegen.kernels import compiled_text

            self._texts["kernel"] = "\n\n".join(sources)
            for level in ("ttir", "ttgir", "ptx"):
                texts = [compiled_text(source, level) for source in sources]
                if all(texts):
                    self._texts[level] = "\n\n".join(texts)

    def __getitem__(self, level: str) -> str:
        name = SPELLINGS.get(level, level)
        if name in self._texts:
            return self._texts[name]
        if name in KERNEL_LEVELS:
            raise (
                TigaError(
                    f"level {level!r}: the composite path makes none, it runs torch operations and generates "
                    "no kernel.\n  Read 'domain', the program itself."
                )
                if "kernel" not in self._texts
                else TigaError(f"level {level!r} is not made on this device. Read {', '.join(map(repr, self._texts))}.")
            )
        kernels = ", ".join(map(repr, KERNEL_LEVELS))
        raise TigaError(f"level {level!r} is unknown. Levels: 'domain', and of kernels {kernels}.")

    def __contains__(self, level: object) -> bool:
        return level in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass(frozen=True)
class Variant:
    """A call's programs and how they were run.

    programs: as traced; runs: as executed, after autocast, vmap and with what derivatives need.
    """

    name: str
    programs: tuple[str, ...] = field(repr=False)
    device: str
    runs: tuple[Run, ...] = field(repr=False)
    names: frozenset[str] = field(repr=False)
    hits: int
    misses: int

    @property
    def key(self) -> str:
        """torch, device, tiga, and a hash of these and of the program texts."""
        from tiga import __version__

        words = [f"torch@{torch.__version__}", self.device, f"tiga@{__version__}"]
        content = "\0".join([*words, *self.programs, "", *[run.program for run in self.runs]])
        return " | ".join([*words, hashlib.sha256(content.encode()).hexdigest()[:16]])

    @property
    def artifacts(self) -> Artifacts:
        """Texts by level: "domain" is the program, or the programs one after another."""
        return Artifacts(self.programs, tuple([text for run in self.runs for text in run.sources]))

    @property
    def passes(self) -> tuple[str, ...]:
        """Passes that made and ran this variant, in working order; adjoint, once the text's gradient was derived."""
        later = set[str]().union(*[derived_from(run.program) for run in self.runs])
        return tuple([name for name in PASSES if name in self.names or name in later])


class Variants:
    """The variants that a module met: a hit is a call whose programs and device were met before."""

    def __init__(self) -> None:
        self.met: dict[tuple, None] = {}
        self.hits = self.misses = 0
        self.last: Any = None

    def add(self, name: str, programs: tuple[str, ...], device: torch.device, record: Record) -> None:
        last = self.last
        if last is not None and last[1] is programs and last[2] == device.type and last[3].runs == record.runs:
            self.hits += 1  # the very programs, executed by the same recipes
            self.last = (name, programs, device.type, record)
            return
        key = (device.type, *programs, "", *[run.program for run in record.runs])
        if key in self.met:
            self.hits += 1
        else:
            self.misses += 1
            if len(self.met) >= MOST_VARIANTS:
                del self.met[next(iter(self.met))]
            self.met[key] = None
        self.last = (name, programs, device.type, record)


def remember(module: Any, programs: tuple[str, ...], device: torch.device, record: Record) -> None:
    """Note a finished call; a plain attribute, so that neither state_dict nor Dynamo sees it."""
    if len(programs) > 1:
        record.names.add("split")
    variants = module.__dict__.get("_variants")
    if variants is None:
        variants = module.__dict__["_variants"] = Variants()
    variants.add(type(module).__name__, programs, device, record)


def last_variant(module: Any) -> Variant:
    """The variant of the last call."""
    variants = module.__dict__.get("_variants")
    if variants is None:
        raise TigaError(f"{type(module).__name__}: {_NOT_CALLED}")
    name, programs, device, record = variants.last
    names = record.names.union(*[run.names for run in record.runs], ["hoist"] if _hoisted(programs) else [])
    return Variant(name, programs, device, tuple(record.runs), frozenset(names), variants.hits, variants.misses)


def ir(module: Any, level: str) -> str:
    """The text of one level of the last call's variant."""
    return Explanation(last_variant(module).artifacts[level])


_NOT_CALLED = (
    "no call has been recorded. Call the module once, outside torch.compile and torch.export:\n"
    "  inside, nothing remains of it but the operator and the program that lower(...) gives."
)


def explain(module: Any) -> Explanation:
    """The last call: backend, provider, lowering, passes, cache key, accepted, unknown, remarks, variant cache."""
    name = type(module).__name__
    if "_variants" not in module.__dict__:
        return Explanation(f"### {name}\n{_NOT_CALLED}")
    v = last_variant(module)
    rows = [
        f"### {name}",
        f"backend: {v.device}",
        f"provider: {_provider(v)}",
        f"lowering: {_lowering(v)}",
        f"passes: {', '.join(v.passes)}",
        f"provider cache key: {v.key}",
        *[f"accepted: {text}" for text in _accepted(v)],
        *[f"unknown: {text}" for text in _unknown(v)],
        *[f"remark: {text}" for text in _remarks(v)],
        f"variant cache: hits={v.hits}, misses={v.misses}",
    ]
    return Explanation("\n".join([*rows, *_programs(v)]))


def _provider(v: Variant) -> str:
    if any(run.visit == "launch-cpp" for run in v.runs):
        from tiga.codegen.launch_cpp import compiler

        return f"{compiler()}, torch@{torch.__version__}"
    if any(run.sources for run in v.runs):
        import triton

        return f"triton-nvidia@{triton.__version__}"
    return f"torch@{torch.__version__}"


def _lowering(v: Variant) -> str:
    ways = dict.fromkeys([LOWERINGS[run.visit] for run in v.runs])
    return ", ".join(ways) or "none (traced with shapes only, nothing was computed)"


def _accepted(v: Variant) -> list[str]:
    products = ("inner-products-as-matmul", "weighted-sums-as-matmul")
    return [f"[schedule] {PASSES[name]}" for name in products if name in v.names]


def _unknown(v: Variant) -> list[str]:
    return [] if v.runs else ["[schedule] how the programs would be run"]


def _remarks(v: Variant) -> list[str]:
    found = []
    if v.device == "cuda" and not all(run.sources for run in v.runs):
        found.append(
            "[provider] composite path on CUDA: no kernel fits; correct, not fused. "
            "The warning at the first call says why"
        )
    found.append(_relation(v.programs[0]))
    found += [f"[planning] {text}" for program in v.programs for text in _pruned(program)]
    if len(v.programs) > 1:
        found.append(
            f"[planning] {len(v.programs)} programs, each a pass over the edges: an edge value reads a finished fold"
        )
    once = _hoisted(v.programs)
    if once:
        found.append(
            f"[planning] a product with joined features was split: that of {', '.join(once)} is made once a node"
        )
    for number, run in enumerate(v.runs):
        which = f"program {number + 1}: " if len(v.runs) > 1 else ""
        found.extend(["[planning] " + which + text for text in _visits(run)])
        if run.reason:
            found.append(f"[provider] {which}torch operations, no C++: {run.reason}")
    if "segment-scan" in v.names:
        found.append(f"[planning] {PASSES['segment-scan']}: one step for each edge of the longest segment")
    found.extend(["[fusion] where such a program was compiled: " + text for text in _fused(v)])
    if "adjoint" in v.passes:
        found.append(
            "[autograd] the gradient is programs too: operands and results of folds are kept, "
            "edge values are computed again"
        )
    return found


def _hoisted(programs: tuple[str, ...]) -> list[str]:
    """What of one node is multiplied by its own columns of a matrix, by how the programs write it."""
    found = []
    for p in map(parse, programs):
        for line in p.lines:
            if line.op == "linear" and p.types[line.outs[0]].place in ("src", "dst"):
                cut = p.definitions.get(line.args[1])
                found += [line.args[0]] if cut is not None and cut.op == "slice" else []
    return found


def _pruned(program: str) -> list[str]:
    lines = [line for line in parse(program).reduces() if line.attrs[1] in PRUNED]
    return [
        f"tiles of {line.args[3]} x {line.args[4]} are skipped by {PRUNED[line.attrs[1]]}: last_report says which"
        for line in lines
    ]


def _relation(program: str) -> str:
    kind = parse(program).kind
    if is_implicit(kind):
        return f"[planning] {kind} relation remained implicit: no edge is listed"
    return f"[planning] {kind} relation is listed: col and rowptr by destination"


def _fused(v: Variant) -> list[str]:
    """What was said of these programs' neighbours where this process has compiled them with Inductor."""
    fusion = sys.modules.get("tiga.inductor.fusion")
    return [] if fusion is None else [text for program in v.programs for text in fusion.notes(program)]


def _visits(run: Run) -> list[str]:
    if not run.visit:
        return ["no edge was visited"]
    if run.sources:
        what = "C++ loop" if run.visit == "launch-cpp" else "kernel"
        return [
            f"{len(run.sources)} {what}{'s' * (len(run.sources) != 1)}; "
            "no score and no weight of a pair was materialized"
        ]
    # the planner counts elements of 4 bytes, 8-byte ones twice
    held, limit = run.most * run.width, _size(4 * layouts.BUDGET)
    why = f"limit {limit}, however many edges"
    if held > layouts.BUDGET:
        why = f"above {limit}: one destination's sources are not divided"
    ranges = f"{run.ranges} range{'s' * (run.ranges != 1)}"
    found = [
        f"{run.visited} pairs in {ranges}, at most {run.most} at once, planned for {run.width} elements each",
        f"edge values take at most {_size(4 * held)} at once ({why})",
    ]
    if _has_inner_product(run.program) and "inner-products-as-matmul" not in run.names:
        reason = "the ranges are small, or the two fields differ in rank or width"
        if run.visit == "interpret-listed":
            reason = "the edges are a list"
        found.append(f"inner products ran pair by pair: {reason}")
    return found


def _has_inner_product(program: str) -> bool:
    """Whether a source's field times a destination's is summed over the last feature."""
    p = parse(program)
    for line in p.lines:
        source = p.definitions.get(line.args[0]) if line.op == "sum" and line.attrs == ("-1",) else None
        if source is not None and source.op == "mul":
            if {p.types[a].place for a in source.args if a in p.types} == {"src", "dst"}:
                return True
    return False


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def _programs(v: Variant) -> list[str]:
    if len(v.programs) == 1:
        return []
    return [
        row
        for number, text in enumerate(v.programs)
        for row in (f"program {number + 1} of {len(v.programs)}:", *["    " + line for line in text.split("\n")])
    ]
