"""The launches of a program, planned as they are eagerly, and written on a tape with sizes that may be symbols.

Which kernels, plans and parts there are is decided by example sizes; then every argument is found again, as an
expression of the sizes. What is a constant of a kernel, the widths of vectors, guards the graph; numbers of rows and
edges never do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tiga.codegen import calls, launch, launch_rows
from tiga.codegen.apart_rows import few
from tiga.codegen.kernels import Runner, compiled, keep, multiprocessors, runner
from tiga.codegen.launch_hopper import takes
from tiga.codegen.plan_rows import programs
from tiga.inductor.meanings import Unfit
from tiga.inductor.tape import Tape
from tiga.ops import rows, tiles
from tiga.program import Program, evaluate_size
from tiga.relations import largest, least


class Hints:
    """Examples of sizes, and tensors without memory that have them."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def number(self, n: Any) -> Any:
        return V.graph.sizevars.optimization_hint(n.node.expr) if isinstance(n, torch.SymInt) else n

    def numbers(self, many: Sequence[Any]) -> tuple:
        return tuple([self.number(n) for n in many])

    def tensors(self, many: Sequence[Any]) -> list[Any]:
        return [self.tensor(t) for t in many]

    def tensor(self, t: Any) -> Any:
        """The example of a tensor, or of a number."""
        if not isinstance(t, Tensor):
            return self.number(t)
        if id(t) not in self.known:
            with self.alone():
                sizes, strides = self.numbers(t.shape), self.numbers(t.stride())
                like = torch.empty_strided(sizes, strides, dtype=t.dtype, device=t.device)
            self.known[id(t)] = (t, like)
        return self.known[id(t)][1]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, tensors are made without memory, and nobody takes notes."""
        with _disable_current_modes(), self.mode:
            yield


def addressed(values: Sequence[Any]) -> list[Any]:
    """What a kernel is compiled for, of tensors without memory: they begin where memory does."""
    from triton.runtime.jit import MockTensor

    return [MockTensor(x.dtype, list(x.shape)) if isinstance(x, Tensor) else x for x in values]


def compiled_for(text: str, fn: Any, values: Sequence[Any], plan: Any, device: Any) -> Any:
    return compiled(text, fn, addressed(values), plan, device)


def runner_for(text: str, values: list[Any], plan: Any, grid: tuple, device: torch.device) -> Runner | None:
    made = runner(text, addressed(values), plan, grid, device)
    if made is not None:
        keep(text, made.compiled)
    return made


class Traced(launch.Launch):
    """The launches of one work at sizes that may be symbols, as `first` found them at example sizes."""

    def __init__(self, ready: Any, call: Any, spans: Any, first: launch.Launch, tape: Tape) -> None:
        super().__init__(ready, call, spans, self.write)
        self.first, self.tape = first, tape
        self.memory: dict[str, Tensor] = {}

    def write(self, text: str, values: list[Any], plan: Any, grid: tuple, device: Any) -> Runner:
        self.tape.kernel(text, values, plan, grid[0])
        return Runner(lambda *arguments: None, 0)

    def parts(self) -> int:
        return self.first.parts()

    def group(self) -> int:
        return self.first.group()

    def made_state(self, name: str, shape: Any, dtype: torch.dtype) -> Tensor:
        if name not in self.memory:
            self.memory[name] = self.call.tensors[name] = super().made_state(name, shape, dtype)
        return self.memory[name]


class Writer:
    """One call: its tape, and the examples of what is on it."""

    def __init__(self, p: Program, tape: Tape) -> None:
        self.p, self.tape, self.hints = p, tape, Hints()

    def write(self, tensors: list[Tensor], ints: list[Any], scalars: list[float], outputs: list[Tensor]) -> None:
        """Puts the steps that fill `outputs` on the tape, or raises."""
        if self.p.kind != "csr":
            plan, kernels, reason = tiles.planned(self.p)
            if plan is None:
                raise Unfit(reason)
            call = calls.Call(self.p, tensors, tuple(ints), scalars, outputs)
            tiles.visit(plan, kernels, call, tensors, scalars, self.tile_work)
            return
        planned = rows.planned(self.p, few(self.p, [t.shape for t in tensors[: len(self.p.operands)]]))
        if planned.reason:
            raise Unfit(planned.reason)
        TracedRows(self, tensors, ints, scalars, outputs, planned).run()

    def tile_work(self, ready: Any, call: Any, spans: Any) -> tuple[str, ...]:
        many = self.hints.tensors
        like = calls.Call(self.p, many(call.given), tuple(many(call.ints)), call.scalars, many(call.outputs))
        like.tensors.update(zip(call.tensors, many(list(call.tensors.values()))))
        with self.hints.alone():
            if not V.graph.aot_mode and takes(ready, like, spans):  # a package has no operator to leave it to
                raise Unfit("a warp-specialised kernel, which stays in the operator")
            first = launch.Launch(ready, like, spans, runner_for)
            steps = first.steps()
        traced = Traced(ready, call, spans, first, self.tape)
        if steps.plan is None:
            if traced.items == 0 or traced.heads == 0:
                return ()
            raise Unfit("an example without rows, of rows that there may be")
        first.plan = steps.plan
        traced.widths()
        traced.with_plan(steps.plan)
        return steps.texts


class TracedRows(rows.Rows):
    def __init__(self, writer: Writer, tensors: Any, ints: Any, scalars: Any, outputs: Any, planned: Any) -> None:
        super().__init__(writer.p, tensors, ints, scalars, outputs, planned)
        self.writer = writer

    def start(self, ready: launch_rows.Prepared, tensors: dict) -> None:
        graph, hints, p = self.lists.of(ready.work), self.writer.hints, self.p
        num_items, device = graph.items.shape[0], self.device
        if num_items == 0:
            return
        slots = launch_rows.listed(tensors, graph)
        reach = [tensors[name].shape[0] * tensors[name].stride(0) for name in ready.gathered]
        wide = any([bool(elements >= launch_rows.FAR_AWAY) for elements in reach])
        like = launch_rows.Listed(*hints.tensors(graph))
        if isinstance(graph.merges.shape[0], torch.SymInt) and like.merges.shape[0] == 0:
            with hints.alone():  # there may be some
                like = like._replace(merges=like.merges.new_empty(1, 3))
        shapes = tuple([torch.Size(hints.numbers(shape)) for shape in self.shapes])
        with hints.alone():
            given = {name: hints.tensor(t) for name, t in tensors.items()}
            record = launch_rows.recorded(p, ready, given, shapes, like, wide, compiled_for)
        for axis in record.sizes:
            int(evaluate_size(axis, self.shapes, p.operands))  # a constant of the kernel
        groups = -(-num_items // record.plan.rows)
        grid = programs(groups, multiprocessors(device), record.most, largest, least)
        launch_rows.memory(record, tensors, grid, slots, device)
        found = [(ready.main, record.plan, grid)]
        if record.merge is not None and ready.merge is not None:
            found.append((ready.merge, launch_rows.merging(record.plan), graph.merges.shape[0]))
        for source, plan, programs_of in found:
            values, _ = launch_rows.arguments(source, plan, tensors, record.constants, record.sizes, device)
            self.writer.tape.kernel(source.text, values, plan, programs_of)
