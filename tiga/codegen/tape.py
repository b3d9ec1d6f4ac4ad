"""What a call did, noted while it ran: the launches, and what torch was asked for besides, as its dispatcher sees it.

Tensors are noted by the memory that they show, so that views cost nothing where the call is repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tiga.codegen.kernels import Runner

_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Form(NamedTuple):
    """A tensor to make."""

    shape: tuple
    strides: tuple
    dtype: torch.dtype


class Part(NamedTuple):
    """A tensor by what it shows of the memory of another, from so many of its numbers on.

    name: t0 is a tensor of the call, o0 an output, m0 memory that was made empty, v0 what an operation made.
    """

    name: str
    form: Form
    offset: int = 0


class Word(str):
    """A value as code has it: s[0] is a scalar of the call, d0 what is made of its tensors and is none."""


class Launch(NamedTuple):
    runner: Runner
    arguments: list

    def reads(self) -> list[Part]:
        return parts_of(self.arguments)

    def writes(self) -> list[Part]:
        """What may be written."""
        return parts_of(self.arguments)


class Operation(NamedTuple):
    """target(*args, **kwargs), whose results are called `made`."""

    target: Any
    args: list
    kwargs: dict[str, Any]
    made: list[str]

    def reads(self) -> list[Part]:
        return parts_of([*self.args, *self.kwargs.values()])

    def writes(self) -> list[Part]:
        return parts_of(self.args[:1]) if self.target._schema.is_mutable else []


class Tape(TorchDispatchMode):
    """Steps in order, while this is on. `whole`: whether they are all that was done, and follow from the call's forms.

    tensors: those of the call, which is to read these: each an object of its own, so that it tells where it was given.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper, which imports torch._dynamo at its first call: that leaves all frames below it, with what they
        hold, to the garbage collector. Calls are noted outside of Dynamo."""
        return False

    def __init__(self, tensors: Sequence[Tensor], outputs: list[Tensor], scalars: Sequence[str]) -> None:
        super().__init__()
        self.device, self.outputs = tensors[0].device, outputs
        self.tensors = [t.detach() if any([t is x for x in tensors[:k]]) else t for k, t in enumerate(tensors)]
        self.scalars = {name: Word(f"s[{k}]") for k, name in enumerate(scalars)}
        self.whole, self.on, self.name = True, True, ""
        self.texts: tuple[str, ...] = ()
        self.passes: set[str] = set()  # that ran besides
        self.steps: list[Launch | Operation] = []
        self.computed: list[Callable[[list[Tensor]], Any]] = []
        self.words: dict[int, Part | Word] = {}  # by ids, which are no other's while what has them is held
        self.held: list[Any] = []
        self.forms: dict[str, Form] = {}
        self.bytes: dict[str, int] = {}  # of what the call makes
        for letter, many in (("t", self.tensors), ("o", outputs)):
            for k, t in enumerate(many):
                self.named(f"{letter}{k}", t)

    def named(self, name: str, t: Tensor) -> None:
        self.forms[name] = form_of(t)
        self.known(t, Part(name, self.forms[name]))

    def known(self, x: Any, word: Part | Word) -> None:
        self.words[id(x)] = word
        self.held.append(x)

    def new(self, letter: str, t: Tensor) -> str:
        """The name of memory that the call makes."""
        name = f"{letter}{len(self.bytes)}"
        self.bytes[name] = t.untyped_storage().nbytes()
        self.named(name, t)
        return name

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what torch is asked for is no part of the call."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.on:
            with self:
                made = func.decompose(*args, **kwargs)  # that which is made of others is noted as these
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        if self.on:
            self.operation(func, args, kwargs, made)
        return made

    def operation(self, func: Any, args: tuple, kwargs: dict, made: Any) -> None:
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        given = tensors_of([*args, *kwargs.values()])
        if func in _EMPTY:
            self.new("m", made)
            return
        here = all([isinstance(x, Tensor) and x.device == self.device for x in results])
        if not here or func.namespace != "aten" or not _READS_VALUES.isdisjoint(func.tags):
            self.whole = False
            return
        step = Operation(func, [self.word(x) for x in args], {name: self.word(x) for name, x in kwargs.items()}, [])
        for x in results:
            of = next((t for t in given if shares_memory(x, t)), None)
            if of is None:
                step.made.append(self.new("v", x))
                self.whole = self.whole and not x.storage_offset()
            elif not any([x is t for t in given]):
                self.known(x, self.part(x, of))
        if step.made or step.writes():
            self.whole = self.whole and len(step.made) in (0, len(results))
            self.steps.append(step)

    def part(self, x: Tensor, of: Tensor) -> Part:
        """What a view shows."""
        word = self.word(of)
        self.whole = self.whole and word is not None and x.dtype == of.dtype
        start = x.storage_offset() - of.storage_offset()
        return Part("", form_of(x)) if word is None else Part(word.name, form_of(x), word.offset + start)

    def launch(self, runner: Runner, arguments: Sequence[Any], scalars: Mapping[int, str]) -> None:
        """Launch a kernel. scalars: those of the call, by position; what else is no tensor is known as it is."""
        words = [self.scalars[scalars[at]] if at in scalars else self.word(x) for at, x in enumerate(arguments)]
        self.whole = self.whole and all([isinstance(x, (Part, int, float, str, type(None))) for x in words])
        self.steps.append(Launch(runner, words))
        with self.paused():
            runner.run(*arguments)

    def word(self, x: Any) -> Any:
        """What stands for a value: lists stay lists, tensors are parts, None where nobody knows of what."""
        word = self.words.get(id(x))
        if word is not None:
            return word
        if isinstance(x, (list, tuple)):
            return [self.word(y) for y in x]
        self.whole = self.whole and not isinstance(x, Tensor)
        return None if isinstance(x, Tensor) else x

    def filled(self, t: Tensor, scalar: str) -> None:
        """The tensor was made full of a scalar of the call."""
        name = self.word(t).name
        (step,) = [step for step in self.steps if isinstance(step, Operation) and name in step.made]
        step.args[1] = self.scalars[scalar]

    def compute(self, x: Any, again: Callable[[list[Tensor]], Any]) -> None:
        """An argument that is no tensor was made from the call's; again(tensors) does so for another call."""
        self.known(x, Word(f"d{len(self.computed)}"))
        self.computed.append(again)

    def ran(self, name: str, texts: tuple[str, ...]) -> None:
        """The edges are visited: what explain says of it."""
        self.name, self.texts = name, texts


def form_of(t: Tensor) -> Form:
    return Form(tuple(t.shape), t.stride(), t.dtype)


def shares_memory(x: Tensor, t: Tensor) -> bool:
    return x is t or x.untyped_storage()._cdata == t.untyped_storage()._cdata


def tensors_of(x: Any) -> list[Tensor]:
    if isinstance(x, (tuple, list)):
        return [t for y in x for t in tensors_of(y)]
    return [x] if isinstance(x, Tensor) else []


def parts_of(x: Any) -> list[Part]:
    """The parts among words."""
    if isinstance(x, Part):
        return [x]
    return [part for y in x for part in parts_of(y)] if isinstance(x, list) else []
