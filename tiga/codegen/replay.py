"""Calls as they were prepared: one look-up from all that decides a call's launches to the list of them.

A call that is met again, and whose work is kernels alone, is noted while it runs (`Tape`): what was launched, and where
each argument came from. Later calls like it (`key_of`) make their outputs and the memory between kernels, and launch
(`Recipe`): no program is read, nothing is checked or looked for again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga import passes
from tiga.codegen import tuning
from tiga.codegen.kernels import Runner, float32_setting, hooked

MOST = 4096
KEPT: dict[tuple, Recipe | None] = {}
"""Recipes by key; None of a call that was met once. They hold no tensor."""

_ALIGNED = 256  # bytes, at least what memory of torch's own is aligned to and kernels are specialised on
# what Inductor's output allocates with, a third of torch.empty's time
_QUICK = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}


class Source(NamedTuple):
    """Where an argument comes from: the number of one of the call's "tensors", "outputs" or "scalars", of its
    "scratch", of the "constants", or the "stream"."""

    of: str
    number: int = 0


class Form(NamedTuple):
    """A tensor to make."""

    shape: tuple
    strides: tuple
    dtype: torch.dtype


def form_of(t: Tensor) -> Form:
    return Form(tuple(t.shape), t.stride(), t.dtype)


def key_of(
    program: str, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float]
) -> tuple[tuple, list[int]]:
    """All that decides a call's checks and launches, but the device's state; and the tensors' addresses."""
    addresses = [t.data_ptr() for t in tensors]
    forms = [(t.shape, t.stride(), t.dtype, t.device, a & 15) for t, a in zip(tensors, addresses)]
    return (program, float32_setting(), len(scalars), *ints, *forms), addresses


def found(key: tuple) -> Recipe | None:
    """The recipe of calls like this: none while plans are timed, or a profiler is told of launches."""
    recipe = KEPT.get(key)
    return None if recipe is None or tuning.asked() or hooked() else recipe


def tape(key: tuple, tensors: Sequence[Tensor], outputs: list[Tensor], scalars: Sequence[float]) -> Tape | None:
    """What notes this call, where one like it was met before: sizes that change at every call are not worth it."""
    if key in KEPT:
        return Tape(tensors, outputs, len(scalars))
    if len(KEPT) >= MOST:
        KEPT.clear()
    KEPT[key] = None
    return None


class Tape:
    """What a call did. `whole`: whether that was all launches, of tensors whose origin is known."""

    def __init__(self, tensors: Sequence[Tensor], outputs: list[Tensor], scalars: int) -> None:
        self.device, self.outputs = tensors[0].device, outputs
        self.whole, self.name = True, ""
        self.noted: set[str] = set()  # passes that ran besides
        self.counts = {"tensors": len(tensors), "outputs": len(outputs), "scalars": scalars}
        self.scratch: list[Any] = []  # held until the recipe is made, so that none takes the place of another
        self.zeroed: list[int] = []
        self.sums: dict[int, int] = {}  # output by number of scratch
        self.made: dict[int, Callable[[list[Tensor]], Any]] = {}
        self.launches: list[tuple[Runner, list[Source]]] = []
        self.texts: tuple[str, ...] = ()
        self.constants: list[Any] = []

    def launch(self, runner: Runner, arguments: Sequence[Any], sources: Iterable[tuple[int, Source]]) -> None:
        """A kernel was launched. sources: (position, origin) of what the call was given; the rest is known as it is."""
        known = dict(sources)
        words = [known[at] if at in known else self.source(x) for at, x in enumerate(arguments)]
        self.launches.append((runner, words))

    def source(self, x: Any) -> Source:
        """The origin of what the call did not get: constants, its outputs, and what it made."""
        if x is None or isinstance(x, (int, float, str)):
            return self.constant(x)
        for of, known in (("outputs", self.outputs), ("scratch", self.scratch)):
            for k, t in enumerate(known):
                if t is x:
                    return Source(of, k)
        self.scratch.append(x)
        return Source("scratch", len(self.scratch) - 1)

    def constant(self, x: Any) -> Source:
        self.constants.append(x)
        return Source("constants", len(self.constants) - 1)

    def ran(self, name: str, texts: tuple[str, ...]) -> None:
        """The call is over: what explain says of it."""
        self.name, self.texts = name, texts

    def computed(self, x: Any, again: Callable[[list[Tensor]], Any]) -> None:
        """An argument that was made from the call's tensors, by no kernel; again(tensors) does so for another call."""
        self.made[self.source(x).number] = again

    def sum_of(self, parts: Tensor, output: int) -> None:
        """An output is the sum of what programs kept apart."""
        self.sums[self.source(parts).number] = output

    def keep(self, key: tuple) -> None:
        """Make the recipe; a call that was more than launches has none."""
        known = [isinstance(x, Tensor) and not x.storage_offset() or k in self.made for k, x in enumerate(self.scratch)]
        if self.whole and all(known):
            KEPT[key] = Recipe(key[0], self)


class Recipe:
    """A call to repeat.

    Each launch picks its arguments from one list: addresses of the call's tensors, of outputs and of what it makes,
    scalars, the stream, constants; then, where a launch takes no addresses, the tensors again. What a call makes is,
    in this order, the parts whose sum is an output, what is computed, and the memory between kernels.
    """

    def __init__(self, program: str, tape: Tape) -> None:
        self.device, self.note = tape.device, passes.Run(program)
        self.note.visit, self.note.sources = tape.name, tape.texts
        self.note.names = {"verify", "check", tape.name, *tape.noted}
        between = [k for k in range(len(tape.scratch)) if k not in tape.sums and k not in tape.made]
        self.outputs = tuple([form_of(t) for t in tape.outputs])
        self.parts = tuple([form_of(tape.scratch[k]) for k in tape.sums])
        self.between = tuple([form_of(tape.scratch[k]) for k in between])
        self.bytes, self.offsets = _placed([tape.scratch[k] for k in between])
        self.sums, self.computed = tuple(tape.sums.values()), tuple(tape.made.values())
        self.zeroed = tuple(tape.zeroed)
        self.bare = all([runner.bare is not None for runner, _ in tape.launches])
        self.steps = self._steps(tape, [*tape.sums, *tape.made, *between])
        self.constants = tuple(tape.constants)

    @staticmethod
    def _steps(tape: Tape, made: list[int]) -> tuple[tuple[Callable, Callable], ...]:
        """What launches, and what picks its arguments. made: numbers of scratch, as the list has them."""
        launches = []
        for runner, words in tape.launches:
            run = runner.run
            if runner.bare is not None:
                run, before, after = runner.bare
                words = [*map(tape.constant, before), Source("stream"), *map(tape.constant, after), *words]
            launches.append((run, words, runner.bare is not None))
        counts = {**tape.counts, "scratch": len(made), "stream": 1, "constants": len(tape.constants)}
        addresses, tensors, at = {}, {}, 0
        for of in ("tensors", "outputs", "scratch", "scalars", "stream", "constants"):
            addresses[of], at = at, at + counts[of]
        for of in ("tensors", "outputs", "scratch"):
            tensors[of], at = at, at + counts[of]
        steps: list[tuple[Callable, Callable]] = []
        for run, words, bare in launches:
            first = addresses if bare else {**addresses, **tensors}
            picked = [first[of] + (made.index(k) if of == "scratch" else k) for of, k in words]
            steps.append((run, operator.itemgetter(*picked)))
        return tuple(steps)

    def __call__(self, tensors: list[Tensor], addresses: list[int], scalars: Sequence[float]) -> list[Tensor]:
        """The outputs."""
        here = self.device.index
        if here is not None and torch._C._cuda_getDevice() != here:
            with torch.cuda.device(here):
                return self.run(tensors, addresses, scalars)
        return self.run(tensors, addresses, scalars)

    def run(self, tensors: list[Tensor], addresses: list[Any], scalars: Sequence[float]) -> list[Tensor]:
        # torch.empty_strided fills memory where torch was asked to
        empty = self.filled if torch._C._get_deterministic_algorithms() else _QUICK.get(self.device.type) or self.filled
        outputs = [empty(*form) for form in self.outputs]
        for k in self.zeroed:
            outputs[k].zero_()
        made = [empty(*form) for form in self.parts]
        made += [again(tensors) for again in self.computed]
        pool = addresses
        pool += [t.data_ptr() for t in outputs]
        if self.bare:
            # what lies between kernels is one block, held until they are queued
            pool += [t.data_ptr() for t in made]
            held = empty((self.bytes,), (1,), torch.uint8) if self.bytes else None
            first = 0 if held is None else held.data_ptr()
            pool += [first + x for x in self.offsets]
        else:
            made += [empty(*form) for form in self.between]
            pool += [x.data_ptr() if isinstance(x, Tensor) else 0 for x in made]
        pool += scalars
        pool.append(0 if self.device.index is None else torch._C._cuda_getCurrentRawStream(self.device.index))
        pool += self.constants
        if not self.bare:
            pool += [*tensors, *outputs, *made]
        for launch, arguments in self.steps:
            launch(*arguments(pool))
        for x, k in zip(made, self.sums):
            _sum(x, outputs[k])
        return outputs

    def filled(self, shape: tuple, strides: tuple, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)


def _sum(parts: Tensor, out: Tensor) -> None:
    if parts.dtype == out.dtype and parts.shape[1:] == out.shape:
        torch.sum(parts, 0, out=out)
    else:
        out.copy_(parts.sum(0))


def _placed(scratch: list[Tensor]) -> tuple[int, tuple[int, ...]]:
    """One block for memory between kernels: its bytes, and where in it each tensor begins."""
    total, offsets = 0, []
    for t in scratch:
        offsets.append(total)
        total += -(-t.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
    return total, tuple(offsets)
