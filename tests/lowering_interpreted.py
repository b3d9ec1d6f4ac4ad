"""Launches that a compiler is given, run at other sizes than those that they were planned by, under Triton's
interpreter: test_tiles.py starts them.

The steps are written for tensors whose sizes are symbols, with an example each; then they run with numbers put in.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from programs import Attention, graph_of
from torch._dynamo.source import ConstantSource
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from tiga.codegen.kernels import load
from tiga.inductor.concatenation import Concatenation
from tiga.inductor.launches import Writer
from tiga.inductor.tape import Kernel, Tape
from tiga.ops import propagate
from tiga.ops.checks import allocate
from tiga.parser import parse

op = torch.ops.tiga.propagate.default


class Calls(TorchDispatchMode):
    """The operator's calls, with what they gave."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is op:
            self.found.append((*args, made))
        return made


class Symbols:
    """Numbers of one call as symbols; a number stands for the same symbol wherever it is."""

    def __init__(self, many):
        self.env, self.known, self.values = ShapeEnv(), {}, {}
        for n, value in many.items():
            symbol = self.env.create_symbol(n, source=ConstantSource(f"n{n}"))
            self.known[n] = self.env.create_symintnode(symbol, hint=n)
            self.values[symbol] = value

    def sizes(self, numbers):
        return [self.known.get(n, n) for n in numbers]

    def number(self, x):
        return int(x.node.expr.subs(self.values)) if isinstance(x, torch.SymInt) else x


def written(call, symbols, joined=False):
    """(steps, fakes of the tensors, fakes of the results; joined: of their concatenation)."""
    text, tensors, ints, scalars, made = call
    p, tape = parse(text), Tape()
    mode = FakeTensorMode(shape_env=symbols.env)
    with V.set_graph_handler(SimpleNamespace(aot_mode=False, sizevars=SizeVarAllocator(symbols.env))), mode:
        fakes = [torch.empty(symbols.sizes(t.shape), dtype=t.dtype) for t in tensors]
        with tape:
            numbers = symbols.sizes(ints)
            outputs = allocate(p, fakes, numbers)
            results, first = outputs, [sum(t.shape[1:].numel() for t in made[:k]) for k in range(len(made))]
            if joined:
                like = torch.empty(*symbols.sizes([made[0].shape[0]]), sum(t.shape[1:].numel() for t in made))
                outputs = [Concatenation(like, 1, dict(enumerate(first)), {}).place(results)]
            Writer(p, tape).write(fakes, numbers, list(scalars), results)
    return tape, fakes, outputs


def run(tape, fakes, outputs, tensors, symbols):
    """The results of the steps, of these tensors."""
    real = dict(zip(map(id, fakes), tensors))

    def shown(x):
        return real[id(x)] if isinstance(x, torch.Tensor) else symbols.number(x)

    for step in tape.steps:
        if isinstance(step, Kernel):
            grid, values = shown(step.grid), [shown(x) for x in step.values]
            if grid:
                load(step.text)[(grid,)](*values, num_warps=step.plan.warps, num_stages=step.plan.stages)
            continue
        args, kwargs = pytree.tree_map(shown, (step.args, step.kwargs))
        made = step.target(*args, **kwargs)
        if step.target is torch.ops.aten.empty.memory_format and made.is_floating_point():
            made.fill_(torch.nan)
        real.update(zip(map(id, pytree.tree_leaves(step.made)), pytree.tree_leaves(made)))
    return [real[id(t)] for t in outputs]


def calls(kind, n, heads=2, width=16):
    """Forward and backward of attention over a graph of n nodes, by torch operations."""
    torch.manual_seed(n)
    graph = graph_of(kind, n)
    if kind == "csr":
        graph = graph.prepare()
    q, k, v = (torch.randn(n, heads, width, requires_grad=True) for _ in range(3))
    with mock.patch.object(propagate, "KERNEL_DEVICES", set()), Calls() as seen:
        out = Attention()(graph=graph, src={"key": k, "value": v}, dst={"query": q})
        torch.autograd.grad(out.square().sum(), (q, k, v))
    return seen.found


def numbers_of(call):
    return [*[n for t in call[1] for n in t.shape], *call[2]]


@pytest.mark.parametrize("kind", ["triangular", "blocks", "intervals", "csr"])
def test_steps_planned_by_an_example_are_right_at_other_sizes(kind):
    """Forward and backward: by torch operations on plain tensors. What guards the graph holds at both sizes."""
    for example, other in zip(calls(kind, 61), calls(kind, 35)):
        assert example[0] == other[0]
        symbols = Symbols({a: b for a, b in zip(numbers_of(example), numbers_of(other)) if a != b})
        tape, fakes, outputs = written(example, symbols)
        assert not [str(guard.expr) for guard in symbols.env.guards if not guard.expr.subs(symbols.values)]
        assert len(tape.kernels()) >= 1
        torch.testing.assert_close(run(tape, fakes, outputs, other[1], symbols), other[4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["triangular", "blocks", "intervals", "csr"])
def test_results_side_by_side_in_one_memory_are_right(kind):
    """As above, of rows that are as far apart as all results together are wide."""
    for example, other in zip(calls(kind, 61), calls(kind, 35)):
        symbols = Symbols({a: b for a, b in zip(numbers_of(example), numbers_of(other)) if a != b})
        tape, fakes, outputs = written(example, symbols, joined=True)
        wanted = torch.cat([t.flatten(1) for t in other[4]], 1)
        torch.testing.assert_close(run(tape, fakes, outputs, other[1], symbols), [wanted], rtol=1e-4, atol=1e-5)
