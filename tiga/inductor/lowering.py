"""The operator in Inductor's code: its kernels themselves, where the call is launches of them; else a call.

What is inlined needs no tiga at run time: the source of a kernel stands in the code with all that it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tiga.codegen import rows, tiles
from tiga.errors import TigaError
from tiga.inductor import fusion
from tiga.inductor.concatenation import Concatenation, concatenations
from tiga.inductor.launches import Writer
from tiga.inductor.meanings import Unfit
from tiga.inductor.tape import Tape
from tiga.ops.checks import allocate
from tiga.parser import parse
from tiga.preparation import KERNEL_DEVICES
from tiga.program import Program

_op = torch.ops.tiga.propagate.default
LEFT = (
    Unfit,
    tiles.Refused,
    rows.Refused,
    TigaError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
"""Why a call may stay a call."""


class Shown(str):
    """A program's text, of which the compiler writes the first line in its comments: a comment has one line."""

    def _custom_fx_repr_fn(self) -> str:
        return f"'{self.splitlines()[0]} ...'"


def lower(program: str, tensors: Sequence[Any], ints: Sequence[Any], scalars: Sequence[float]) -> Any:
    """Results of a call, as the compiler's buffers."""
    p = parse(program)
    V.graph.current_node.update_arg(0, Shown(program))
    opaque = fallback_handler(_op, add_to_fallback_set=False)
    if tensors[0].get_device().type not in KERNEL_DEVICES:
        return opaque(program, tensors, ints, scalars)
    joined = concatenations(V.graph.current_node, p)
    try:
        tape, boxes, outputs, wholes = written(p, tensors, ints, scalars, joined)
    except LEFT as e:
        _say(p, f"left a call of the operator: {e}")
        return opaque(program, tensors, ints, scalars)
    boxes = tape.replay(boxes)
    _say(p, f"kernels in the compiler's own code: {len(tape.kernels())}")
    for x, whole in zip(joined, wholes):
        x.finish(boxes[id(whole)])
        _say(p, f"results that are written where they are concatenated: {len(x.first)}")
    return [boxes[id(t)] for t in outputs]


def written(
    p: Program, tensors: Sequence[Any], ints: Sequence[Any], scalars: Sequence[float], joined: list[Concatenation]
) -> tuple[Tape, dict[int, Any], list[Any], list[Any]]:
    """(steps, what stands for each given tensor, the tensors that are results, those in which these are put)."""
    if p.pruned:
        raise Unfit("what a pruned program skips is asked for later")
    boxes = [laid_out(x) for x in tensors]
    numbers = ir.convert_shape_to_symint(ints)
    tape = Tape()
    with V.fake_mode:
        fakes = [like(x) for x in boxes]
        with tape:
            outputs = allocate(p, fakes, numbers)
            wholes = [x.place(outputs) for x in joined]
            Writer(p, tape).write(fakes, numbers, list(scalars), outputs)
    return tape, {id(t): x for t, x in zip(fakes, boxes)}, outputs, wholes


def laid_out(x: Any) -> Any:
    """A tensor in memory whose strides are known, whatever they are: views stay views."""
    inner = ir.ExternKernel.realize_input(x)
    inner.freeze_layout()
    return ir.TensorBox(inner)


def like(x: Any) -> torch.Tensor:
    sizes = ir.convert_shape_to_symint(x.get_size())
    strides = ir.convert_shape_to_symint(x.get_stride())
    with V.graph.sizevars.shape_env.suppress_guards():
        return torch.empty_strided(sizes, strides, dtype=x.get_dtype(), device=x.get_device())


def _say(p: Program, text: str) -> None:
    origin = V.graph.current_node.meta.get("tiga")
    fusion.say(origin if origin is not None else (fusion.signature(p), ""), text)


def install() -> None:
    register_lowering(_op, type_promotion_kind=None)(lower)
