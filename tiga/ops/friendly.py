"""How a friendly operator is declared, and how one that is a program runs.

An operator that is a program is CompositeImplicitAutograd: autograd, vmap, autocast, compile and export see
tiga::propagate in its place.
The others compute integers with torch operations, have a fake, and no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tiga.errors import TigaError
from tiga.fields import forms_of, places
from tiga.ops.library import LIB, outside_dynamo
from tiga.ops.propagate import call as propagate
from tiga.stages import programs
from tiga.symbols import Sym
from tiga.trace import Tracer

PROGRAM, TORCH = "CompositeImplicitAutograd", "CompositeExplicitAutograd"


def declare(schema: str, fake: Callable | None = None) -> Callable[[Callable], Callable]:
    """Registers the decorated function as torch.ops.tiga.NAME, its docstring too. Without a fake it is a program."""

    def register(fn: Callable) -> Callable:
        LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.partition("(")[0]
        LIB.impl(name, outside_dynamo(fn), PROGRAM if fake is None else TORCH)
        if fake is not None:
            torch.library.register_fake("tiga::" + name, fake, lib=LIB)
            op = getattr(torch.ops.tiga, name).default
            LIB.impl(name, outside_dynamo(_below_functorch(op)), "FuncTorchDynamicLayerFrontMode")
        getattr(torch.ops.tiga, name).__doc__ = fn.__doc__
        return fn

    return register


def _below_functorch(op: Any) -> Callable:
    """Integers have no derivative: torch.func's levels are passed by, and a compiler sees plain tensors."""

    def kernel(*args: Any) -> Any:
        with torch._C._DisableFuncTorch():
            return op(*[_plain(op, a) if isinstance(a, Tensor) else a for a in args])

    return kernel


def _plain(op: Any, t: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        if torch._C._functorch.is_batchedtensor(t):
            raise TigaError(
                f"vmap over {op.name()}: one relation serves all that is mapped. Call it outside vmap; "
                "several relations at once lie side by side in one, as batch= and Graph.cat make them."
            )
        t = torch._C._functorch.get_unwrapped(t)
    return t


def apply(
    edge: Callable[..., Sym],
    kind: str,
    ints: Sequence[Any],
    relation: Sequence[Tensor],
    src: dict[str, Tensor] | None = None,
    dst: dict[str, Tensor] | None = None,
    edges: dict[str, Tensor] | None = None,
    scalars: Sequence[tuple[str, float]] = (),
) -> Tensor:
    """The result of an edge function over a relation (kind, ints, tensors), given the fields of its three places."""
    tracer = Tracer()
    tracer.home = [t for fields in (src, dst, edges) for t in (fields or {}).values()][0].device
    src, dst, edges = src or {}, dst or {}, edges or {}
    forms = (*forms_of("src", src), *forms_of("dst", dst), *forms_of("edge", edges))
    root = edge(*places(tracer, src, dst, edges, {}, forms), [tracer.scalar(*scalar) for scalar in scalars])
    results: list[list[Tensor]] = []
    for stage in programs(tracer, kind, len(relation), False, [root]).stages:
        read = [tracer.operands[k][0] if what == "operand" else results[k[0]][k[1]] for what, k in stage.reads]
        results.append(
            propagate(stage.text, [*read, *relation], list(ints), [tracer.scalars[k][1] for k in stage.scalars])
        )
    return results[-1][0]
