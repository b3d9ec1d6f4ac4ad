"""Calls as they were prepared: one look-up from all that decides a call's launches to straight-line code for them.

A call that is met again is noted while it runs (`Tape`): its launches, and what torch was asked for besides. Later
calls like it (`again`) run a function written from that (`Recipe`): no program is read, nothing is checked or looked
for again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga import alike, passes
from tiga.codegen import tuning
from tiga.codegen.kernels import float32_setting, hooked
from tiga.codegen.tape import Launch, Operation, Part, Tape, Word

KEPT = alike.Recent(most=4096, each=8)
"""Calls that were met, by program and numbers."""

_ALIGNED = 256  # bytes, at least what memory of torch's own is aligned to and kernels are specialised on
# what Inductor's output allocates and views with, a third and half of the time of torch's own
_QUICK = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
_view = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None) or (
    lambda t, shape, strides, offset: t.as_strided(shape, strides, t.storage_offset() + offset)
)
# functions of torch's that read the arguments of these operations as they are, and sooner
_NAMED = {getattr(torch.ops.aten, x): getattr(torch, x) for x in "mm addmm bmm add sub mul div sum cat where".split()}


@dataclass(slots=True, eq=False)
class Met:
    """A call that was met: `like` knows another of its kind, `low` are the last bits of its addresses. The second of a
    kind is noted, and leaves the recipe. No tensor is held."""

    like: Callable[..., bool]
    low: list[int]
    twice: bool = False
    recipe: Recipe | None = None

    def tape(self, tensors: Sequence[Tensor], outputs: list[Tensor], scalars: Sequence[str]) -> Tape | None:
        """What notes this call, where one like it was met before: sizes that change at every call are not worth it."""
        noted = self.twice and not torch._C._are_functorch_transforms_active()
        return Tape(tensors, outputs, scalars) if noted else None

    def keep(self, program: str, tape: Tape) -> None:
        """Make the recipe; a call that was more than is noted has none."""
        if tape.whole:
            self.recipe = Recipe(program, tape)


def _key(program: str, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float]) -> tuple:
    """All that decides a call's checks and launches, but the device's state, and what the tensors are."""
    return (program, float32_setting(), len(tensors), len(scalars), *ints)


def again(
    program: str, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float]
) -> list[Tensor] | None:
    """The outputs of a call that has a recipe, below autograd; None while plans are timed, or a profiler is told of
    launches."""
    for met in KEPT.get(_key(program, tensors, ints, scalars), ()):
        recipe = met.recipe
        if recipe is not None and met.like(*tensors) and not tuning.asked() and not hooked():
            outputs = recipe(tensors, scalars)
            if outputs is not None:
                passes.repeated(recipe.note)  # checked as well: calls of one kind differ in values alone
                return outputs
    return None


def meet(program: str, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float]) -> Met:
    """The call, met once or twice."""
    key, low = _key(program, tensors, ints, scalars), [t.data_ptr() & 15 for t in tensors]
    for met in KEPT.get(key, ()):
        if met.low == low and met.like(*tensors):
            met.twice = True
            return met
    met = Met(alike.like(tensors), low)
    KEPT.add(key, met)
    return met


class Recipe:
    """A call to repeat. `text` is its code: of tensors, scalars, the stream and what allocates. It does nothing where
    a tensor that a kernel reads lies otherwise, by the last bits of its address.

    bare: whether every launcher takes addresses. bytes: of memory that nobody but launches with addresses reads, which
    is one block.
    """

    def __init__(self, program: str, tape: Tape) -> None:
        self.device, self.index, self.note = tape.device, tape.device.index, passes.Run(program)
        self.quick = _QUICK.get(tape.device.type) or self.filled
        self.note.visit, self.note.sources = tape.name, tape.texts
        self.note.names = {"verify", "check", tape.name, *tape.passes}
        writer = Writer(tape)
        self.text, self.constants = writer.text(), writer.constants
        self.bare, self.bytes = writer.bare, writer.bytes
        scope: dict[str, Any] = {"view": _view, **self.constants}
        exec(compile(self.text, "<tiga call>", "exec"), scope)  # written here
        self.repeat: Callable[..., list[Tensor] | None] = scope["repeat"]

    def __call__(self, tensors: Sequence[Tensor], scalars: Sequence[float]) -> list[Tensor] | None:
        """The outputs."""
        if self.index is None:
            return self.run(tensors, scalars, 0)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if torch._C._cuda_getDevice() == self.index:
            return self.run(tensors, scalars, stream)
        with torch.cuda.device(self.index):
            return self.run(tensors, scalars, stream)

    def run(self, tensors: Sequence[Tensor], scalars: Sequence[float], stream: int) -> list[Tensor] | None:
        # torch.empty_strided fills memory where torch was asked to
        empty = self.filled if torch._C._get_deterministic_algorithms() else self.quick
        return self.repeat(tensors, scalars, stream, empty)

    def filled(self, shape: tuple, strides: tuple, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)


class Writer:
    """Writes the code of a recipe: a line a step, after the lines that make what it reads."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.constants = tape, dict[str, Any]()
        self.outputs = [Part(f"o{k}", tape.forms[f"o{k}"]) for k in range(len(tape.outputs))]
        self.steps = self.needed(self.joined(self.instead(list(tape.steps))))
        self.bare = all([by_address(step) for step in self.steps if isinstance(step, Launch)])
        self.lines: list[tuple[str, list[str]]] = []  # each with the names in it
        self.there: dict[Part, str] = {}  # names of tensors that the code has
        self.offsets, self.bytes = self.placed()

    def instead(self, steps: list[Launch | Operation]) -> list[Launch | Operation]:
        """An output into which all of what the call made is copied, and nothing else, is that itself."""
        used = [part.name for step in steps for part in step.reads()]
        kept = []
        for at, step in enumerate(steps):
            to, x = step.reads()[:2] if is_copy(step) else (None, None)
            if to is not None and x is not None and to.form == x.form and to in self.outputs:
                whole = self.tape.bytes.get(x.name) == math.prod(x.form.shape) * x.form.dtype.itemsize
                after = [part.name for later in steps[at + 1 :] for part in later.writes()]
                if whole and used.count(to.name) == 1 and x.name not in (*after, *[o.name for o in self.outputs]):
                    self.outputs[self.outputs.index(to)] = x
                    continue
            kept.append(step)
        return kept

    def joined(self, steps: list[Launch | Operation]) -> list[Launch | Operation]:
        """A sum of gradients of slices, which side by side are the whole, is these side by side."""
        made = {name: step for step in steps if isinstance(step, Operation) for name in step.made}
        uses = Counter([part.name for step in steps for part in step.reads()] + [o.name for o in self.outputs])

        found = list(steps)
        for at, step in enumerate(steps):
            if isinstance(step, Operation) and step.target is torch.ops.aten.add.Tensor and not step.kwargs:
                parts = [self.slices(x, made, uses) for x in step.args]
                whole = side_by_side([y for part in parts for y in part]) if [] not in parts else None
                if whole is not None:
                    found[at] = Operation(torch.ops.aten.cat.default, whole, {}, step.made)
        return found

    def slices(self, x: Any, made: dict[str, Operation], uses: Counter[str]) -> list[Operation]:
        """Those whose sum a value is, itself or nothing else."""
        step = made.get(x.name) if isinstance(x, Part) and x.form == self.tape.forms[x.name] else None
        if step is None or uses[x.name] != 1 or step.kwargs:
            return []
        if step.target is torch.ops.aten.slice_backward.default:
            return [step]
        parts = [self.slices(y, made, uses) for y in step.args] if step.target is torch.ops.aten.add.Tensor else []
        return [] if [] in parts else [y for part in parts for y in part]

    def needed(self, steps: list[Launch | Operation]) -> list[Launch | Operation]:
        """All but operations whose results nobody reads."""
        read, kept = {part.name for part in self.outputs}, []
        for step in reversed(steps):
            if isinstance(step, Launch) or not step.made or not read.isdisjoint(step.made):
                read.update([part.name for part in step.reads()])
                kept.append(step)
        return kept[::-1]

    def placed(self) -> tuple[dict[str, int], int]:
        """Where memory begins that is a part of one block, and the bytes of that."""
        others = [part for step in self.steps if not by_address(step) for part in step.reads()]
        tensors = {part.name for part in (*others, *self.outputs)}
        offsets: dict[str, int] = {}
        total = 0
        for name in dict.fromkeys([part.name for step in self.steps for part in step.reads()]):
            if name[0] == "m" and name not in tensors:
                offsets[name] = total
                total += -(-self.tape.bytes[name] // _ALIGNED) * _ALIGNED
        return offsets, total

    def places(self) -> None:
        """The addresses of the call's tensors that kernels read, and whether they end as they did."""
        launches = [step for step in self.steps if isinstance(step, Launch)]
        read = {part.name for step in launches for part in step.reads() if part.name[0] == "t"}
        low = {f"t{k}": t.data_ptr() & 15 for k, t in enumerate(self.tape.tensors)}
        names = [name for name in low if name in read or self.tape.computed]
        self.lines += [(f"a{name[1:]} = t[{name[1:]}].data_ptr()", []) for name in names]
        even = " | ".join([f"a{name[1:]}" for name in names if not low[name]])
        odd = [f"a{name[1:]} & 15 != {low[name]}" for name in names if low[name]]
        for condition in ([f"({even}) & 15"] if even else []) + odd:
            self.lines.append((f"if {condition}: return None", []))

    def text(self) -> str:
        self.places()
        if self.bytes:
            self.lines.append((f"block = empty(({self.bytes},), (1,), {self.constant(torch.uint8)})", []))
            self.lines.append(("b = block.data_ptr()", []))
        for k, again in enumerate(self.tape.computed):
            self.lines.append((f"d{k} = {self.constant(again)}(t)", []))
        for step in self.steps:
            self.launch(step) if isinstance(step, Launch) else self.operation(step)
        names: list[str] = []
        returned = ", ".join([self.tensor(part, names) for part in self.outputs])
        self.lines.append((f"return [{returned}]", names))
        last = {name: at for at, (_, names) in enumerate(self.lines) for name in names}
        lines = ["def repeat(t, s, stream, empty):"]
        for at, (line, names) in enumerate(self.lines):
            over = [name for name in dict.fromkeys(names) if last[name] == at < len(self.lines) - 1]
            lines.append(f"    {line}; del {', '.join(over)}" if over else "    " + line)
        return "\n".join([*lines, ""])

    def launch(self, step: Launch) -> None:
        run, bare = step.runner.run, step.runner.bare
        names: list[str] = []
        if bare is None:
            words = [self.word(x, names) for x in step.arguments]
        else:
            run, before, after = bare
            words = [*[self.word(x, names) for x in before], "stream", *[self.word(x, names) for x in after]]
            words += [self.address(x, names) if isinstance(x, Part) else self.word(x, names) for x in step.arguments]
        self.lines.append((f"{self.constant(run)}({', '.join(words)})", names))

    def operation(self, step: Operation) -> None:
        names = list(step.made)
        words = [self.word(x, names) for x in step.args]
        words += [f"{name}={self.word(x, names)}" for name, x in step.kwargs.items()]
        run = self.constant(_NAMED.get(step.target.overloadpacket, step.target._op))
        made = ", ".join(step.made) + " = " if step.made else ""
        self.lines.append((f"{made}{run}({', '.join(words)})", names))

    def word(self, x: Any, names: list[str]) -> str:
        if isinstance(x, Part):
            return self.tensor(x, names)
        if isinstance(x, list):
            return f"[{', '.join([self.word(y, names) for y in x])}]"
        return x if isinstance(x, Word) else self.constant(x)

    def constant(self, x: Any) -> str:
        if type(x) in (int, bool, type(None)):
            return repr(x)
        name = next((name for name, known in self.constants.items() if known is x), f"c{len(self.constants)}")
        self.constants[name] = x
        return name

    def base(self, name: str, names: list[str]) -> str:
        """The tensor that a memory was given or made as; memory for kernels is made where it is first met."""
        if name[0] == "t":
            return f"t[{name[1:]}]"
        form, held = self.tape.forms[name], [name] if name[0] != "o" else []
        if name[0] in "mo" and Part(name, form) not in self.there:
            self.there[Part(name, form)] = name
            self.lines.append((f"{name} = empty({form.shape}, {form.strides}, {self.constant(form.dtype)})", held))
        names += held
        return name

    def tensor(self, part: Part, names: list[str]) -> str:
        if part == Part(part.name, self.tape.forms[part.name]):
            return self.base(part.name, names)
        if part not in self.there:
            read: list[str] = []
            view = f"view({self.base(part.name, read)}, {part.form.shape}, {part.form.strides}, {part.offset})"
            self.there[part] = f"w{len(self.there)}"
            self.lines.append((f"{self.there[part]} = {view}", [*read, self.there[part]]))
        names.append(self.there[part])
        return self.there[part]

    def address(self, part: Part, names: list[str]) -> str:
        start = part.offset * part.form.dtype.itemsize
        if part.name in self.offsets:
            return f"b + {self.offsets[part.name] + start}"
        address = f"a{part.name[1:]}" if part.name[0] == "t" else f"{self.base(part.name, names)}.data_ptr()"
        return f"{address} + {start}" if start else address


def by_address(step: Launch | Operation) -> bool:
    return isinstance(step, Launch) and step.runner.bare is not None


def is_copy(step: Launch | Operation) -> bool:
    return isinstance(step, Operation) and step.target is torch.ops.aten.copy_.default


def side_by_side(slices: list[Operation]) -> list | None:
    """The arguments of cat that gives the sum of these gradients of slices; None where they are not all of it."""
    kinds = {(tuple(sizes), dim % len(sizes), step) for _, sizes, dim, _, _, step in [x.args for x in slices]}
    if len(kinds) != 1:
        return None
    ((sizes, dim, step),) = kinds
    ordered = sorted(slices, key=lambda x: x.args[3])
    ends = [0, *[min(x.args[4], sizes[dim]) for x in ordered]]
    if step != 1 or ends[-1] != sizes[dim] or [x.args[3] for x in ordered] != ends[:-1]:
        return None
    return [[x.args[0] for x in ordered], dim]
