"""What an implementation does with tensors that have no memory, written down, and done again in the compiler's terms.

The tensors are fake: their sizes may be symbols. Operations of torch and launches of kernels come in order; what a
kernel is told are those tensors, numbers that may be symbols, and constants.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import ReadWrites, StarDep
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode

from tiga.codegen.kernels import Geometry, load
from tiga.inductor.meanings import Unfit

aten = torch.ops.aten
FILLS = (aten.copy_.default, aten.zero_.default, aten.fill_.Scalar)
"""What may change memory: of tensors that were made here, whole, and of views of memory that was made empty."""
EMPTY = (aten.empty.memory_format, aten.empty_strided.default)


class Operation(NamedTuple):
    target: Any
    args: tuple
    kwargs: dict[str, Any]
    made: Any


class Kernel(NamedTuple):
    text: str
    values: list[Any]
    plan: Geometry
    grid: Any


class Tape(TorchDispatchMode):
    """Steps in order, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Operation | Kernel] = []
        self.table = select_decomp_table()
        self.own: set[int] = set()  # tensors that were made here, by ids that are no other's while the steps live
        self.memory: set[int] = set()  # of them and of their views, those that were made empty: kernels fill them

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks, and computes nothing
            return func(*args, **kwargs)
        for simpler in (self.table.get(func), func.decompose):
            if simpler is not None:
                with self:
                    made = simpler(*args, **kwargs)
                if made is not NotImplemented:
                    return made
        if func._schema.is_mutable and (func not in FILLS or id(args[0]) not in self.own | self.memory):
            raise Unfit(f"{func} in place between kernels")
        made = func(*args, **kwargs)
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves(made)):
            self.steps.append(Operation(func, args, kwargs, made))
            found = [id(x) for x in pytree.tree_leaves(made)]
            if not func.is_view or (func is aten.alias.default and id(args[0]) in self.own):
                self.own.update(found)
            if func in EMPTY or (func.is_view and id(args[0]) in self.memory):
                self.memory.update(found)
        return made

    def kernel(self, text: str, values: list[Any], plan: Geometry, grid: Any) -> None:
        """A launch: values that are constants of the kernel are numbers that the graph is guarded by."""
        parameters = inspect.signature(load(text).fn).parameters.values()
        values = [int(x) if _is_constant(k) and isinstance(x, torch.SymInt) else x for k, x in zip(parameters, values)]
        self.steps.append(Kernel(text, values, plan, grid))

    def kernels(self) -> list[Kernel]:
        return [step for step in self.steps if isinstance(step, Kernel)]

    def replay(self, given: dict[int, Any]) -> dict[int, Any]:
        """Every step as nodes of the compiler. given, and what comes out: what stands for a tensor there, by its id."""
        graph, boxes = torch.fx.Graph(), dict(given)
        nodes = {at: graph.placeholder(f"given{k}") for k, at in enumerate(given)}
        V.graph.env.update({nodes[at]: box for at, box in given.items()})

        def shown(x: Any, tensors: dict[int, Any] = boxes) -> Any:
            if isinstance(x, Tensor):
                return tensors[id(x)]
            return x.node.expr if isinstance(x, torch.SymInt) else x

        written: list[tuple[torch.fx.Node, Operation | Kernel]] = []
        for step in self.steps:
            if isinstance(step, Kernel):  # a reader of its tensors
                args = tuple([nodes[id(x)] for x in step.values if isinstance(x, Tensor)])
                written.append((graph.call_function(launch, args), step))
                continue
            args, kwargs = pytree.tree_map(lambda x: shown(x, nodes), (step.args, step.kwargs))
            node = graph.call_function(step.target, args, kwargs)
            node.meta["val"] = step.made
            written.append((node, step))
            if isinstance(step.made, Tensor):
                nodes[id(step.made)] = node
            else:
                for k, x in enumerate(step.made):
                    nodes[id(x)] = graph.call_function(operator.getitem, (node, k))
                    nodes[id(x)].meta["val"] = x
                    written.append((nodes[id(x)], Operation(operator.getitem, (), {}, x)))
        for node, step in written:
            if isinstance(step, Operation):
                V.graph.env[node] = made = V.graph.run_node(node)
                if isinstance(step.made, Tensor):
                    boxes[id(step.made)] = made
                continue
            for x in step.values:
                if isinstance(x, Tensor) and id(x) not in given:
                    strides = [shown(n) for n in x.stride()]
                    boxes[id(x)] = ir.ExternKernel.require_exact_strides(boxes[id(x)], strides)
            filled = [isinstance(x, Tensor) and id(x) in self.memory for x in step.values]
            launch(step, [shown(x) for x in step.values], shown(step.grid), filled)
        return boxes


def _is_constant(parameter: inspect.Parameter) -> bool:
    return "constexpr" in str(parameter.annotation)


def launch(step: Kernel, values: list[Any], grid: Any, filled: list[bool]) -> None:
    """A kernel of the compiler's code; its plan is the one configuration that is tried. filled: what it may change."""
    import triton

    fn = load(step.text)
    config = triton.Config({}, num_warps=step.plan.warps, num_stages=step.plan.stages)
    # of one memory one name: what else fills it are other views
    changed = {x.get_name(): name for name, x, changes in zip(fn.arg_names, values, filled) if changes}
    with _known([*changed.values()]):
        lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(triton.autotune(configs=[config], key=[])(fn)),
            constant_args_idx=kernel_side_table.add_constant_args({}),
            grid=[(grid, 1, 1)],
            tma_descriptor_metadata={},
            kwargs=dict(zip(fn.arg_names, values)),
        )


@contextlib.contextmanager
def _known(filled: list[str]) -> Iterator[None]:
    """The compiler would look for the tensors that a kernel changes, and takes lists of rows for such: it is told."""
    deps: OrderedSet[Any] = OrderedSet([StarDep(name) for name in filled])
    # before torch 2.12, and since then
    answers: dict[str, Any] = {"identify_mutated_tensors": filled}
    if hasattr(triton_kernel_wrap, "TensorAccesses"):
        accesses = ReadWrites(reads=deps, writes=deps, index_exprs=OrderedSet())
        answers["identify_accessed_tensors"] = triton_kernel_wrap.TensorAccesses(accesses, can_fuse_epilogue=False)
    asked = {name: getattr(triton_kernel_wrap, name) for name in answers if hasattr(triton_kernel_wrap, name)}
    try:
        for name in asked:
            setattr(triton_kernel_wrap, name, lambda *arguments, name=name: answers[name])
        yield
    finally:
        for name, function in asked.items():
            setattr(triton_kernel_wrap, name, function)
