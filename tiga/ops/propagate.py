"""tiga::propagate - everything PyTorch knows of the operator that runs programs.

    propagate(str program, Tensor[] tensors, SymInt[] ints, float[] scalars) -> Tensor[]

tensors: the program's operands in the order of its head, then the relation's tensors. ints: (num_dst, num_src, ...) as
the relation's kind says. Outputs are contiguous whatever the inputs' strides. The gradient is propagate again, of the
adjoint program; so is the gradient of that.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from tiga import alike, dispatch, passes, prune
from tiga.adjoint import adjoint, augment, keeps_sums
from tiga.codegen import replay
from tiga.derivation import Derived, saved_outputs
from tiga.errors import TigaError
from tiga.layouts import BUDGET
from tiga.ops import sharding
from tiga.ops.autocast import autocast
from tiga.ops.batch import batched, sample_dims
from tiga.ops.checks import allocate, check, check_edges, check_relation
from tiga.ops.library import LIB, outside_dynamo
from tiga.parser import parse
from tiga.preparation import KERNEL_DEVICES
from tiga.program import Program
from tiga.reference import interpret
from tiga.tangent import tangent

LIB.define(
    "propagate(str program, Tensor[] tensors, SymInt[] ints, float[] scalars) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_op = torch.ops.tiga.propagate.default

# Implementations.


def composite(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
    """Kernels where they fit, else torch operations, range by range, on any device."""
    outputs = replay.again(program, tensors, ints, scalars)
    if outputs is not None:
        return outputs
    device = tensors[0].device.type if tensors else ""
    passes.running(program)
    p = parse(program)
    sizes = check(p, tensors, ints, scalars)
    check_relation(p, tensors[len(p.operands) :], ints)
    check_edges(p, tensors, ints)
    outputs = allocate(p, tensors, ints, sizes)
    if p.pruned:
        prune.refuse(p.pruned, None, device, p.kind)
    if device in KERNEL_DEVICES:
        from tiga.ops import rows, tiles  # Triton is imported where a kernel runs, not before

        kernels = rows if p.kind == "csr" else tiles
        met = replay.meet(program, tensors, ints, scalars) if _repeats(p, ints) else None
        tape = None if met is None else met.tape(tensors, outputs, p.scalars)
        if tape is None:
            reason = kernels.run(p, tensors, ints, scalars, outputs)
        else:
            with tape:
                reason = kernels.run(p, tape.tensors, ints, scalars, outputs, tape)
        if not reason:
            if met is not None and tape is not None:
                met.keep(program, tape)
            return outputs
        if p.pruned:
            prune.refuse(p.pruned, None, device, p.kind, f"no kernel fits this program ({reason})")
        if device == "cuda":
            _say_composite(reason)
    elif device == "cpu":
        from tiga.ops import cpp

        reason = cpp.run(p, tensors, ints, scalars, outputs)
        if not reason:
            return outputs
        passes.kept(reason)
    interpret(p, tensors, ints, scalars, outputs)
    return outputs


def _repeats(p: Program, ints: Sequence[int]) -> bool:
    """Whether a call follows from forms alone: not where values count edges, nor where maps are made and read."""
    counted = p.kind in ("blocks", "intervals") and ints[2] < 0
    places = [o.place for o in p.operands] + [p.types[ref].place for ref in p.returns]
    return not p.pruned and not (counted and "edge" in places)


_warned: set[str] = set()


def _say_composite(reason: str) -> None:
    """A cliff is never silent: one warning a reason, an error where the path cannot run."""
    if torch.cuda.is_current_stream_capturing():
        raise TigaError(
            f"no kernel fits this program ({reason}), and the composite path reads sizes of its ranges on the host: "
            "it cannot be captured into a CUDA graph."
        )
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"tiga: no kernel fits this program ({reason}): it runs on CUDA through torch operations, range by range - "
            f"correct, not fused. Edge values of about {BUDGET * 4 >> 20} MiB are materialised at a time.",
            stacklevel=2,
        )


def fake(program: str, tensors: list[Tensor], ints: list[Any], scalars: list[float]) -> list[Tensor]:
    _install_inductor()
    p = parse(program)
    if p.pruned:
        prune.refuse(p.pruned, None, tensors[0].device.type, p.kind)
    return allocate(p, tensors, ints, check(p, tensors, ints, scalars))


def _install_inductor() -> None:
    try:
        from tiga import inductor
    except ImportError:
        return  # tiga/inductor may be deleted: the operator then stays opaque
    inductor.install()


# Autograd.


def derived_call(
    d: Derived,
    p: Program,
    tensors: Sequence[Tensor],
    extra: Mapping[int, Tensor | None],
    saved: Mapping[int, Tensor],
    ints: Sequence[Any],
    scalars: Sequence[float],
) -> list[Tensor]:
    """Run a program that was derived from `p`."""
    read: dict[str, Any] = {"operand": tensors, "extra": extra, "saved": saved}
    chosen = [read[what][k] for what, k in d.reads]
    return call(d.text, [*chosen, *tensors[len(p.operands) :]], list(ints), [scalars[k] for k in d.scalars])


@functools.lru_cache(8192)
def _outputs(program: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The outputs of an augmented program that its derivatives read, and those without a derivative."""
    p = parse(program)
    kept = tuple(sorted(set(saved_outputs(p).values())))
    return kept, tuple([k for k, ref in enumerate(p.returns) if not p.types[ref].floating])


_LEAD = 4  # arguments before the tensors


class _Gradient(NamedTuple):
    """The adjoint of a program, for some of its results and operands: picked gives its tensors out of those that were
    saved and the results' gradients; places: the arguments of which its outputs are gradients."""

    text: str
    picked: Callable[[tuple], tuple]
    scalars: tuple[int, ...]
    places: tuple[int, ...]


@functools.lru_cache(8192)
def _gradient(program: str, given: tuple[bool, ...], needed: tuple[bool, ...]) -> _Gradient | None:
    p = parse(program)
    results = tuple([k for k, there in enumerate(given) if there])
    wanted = tuple([i for i, o in enumerate(p.operands) if needed[_LEAD + i] and p.types[o.ref].floating])
    d = adjoint(program, wanted, results) if results and wanted else None
    if d is None or not d.returns:
        return None
    kept = _outputs(program)[0]
    first = {"operand": list(range(p.num_tensors)), "saved": [-1] * len(p.returns)}
    for at, k in enumerate(kept):
        first["saved"][k] = p.num_tensors + at
    first["extra"] = [p.num_tensors + len(kept) + k for k in range(len(p.returns))]
    chosen = [first[what][k] for what, k in d.reads] + list(range(len(p.operands), p.num_tensors))
    picked = operator.itemgetter(*chosen) if len(chosen) > 1 else lambda pool: (pool[chosen[0]],)
    return _Gradient(d.text, picked, d.scalars, tuple([_LEAD + i for i in d.returns if i is not None]))


class _Propagate(_SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, run: Callable, program: str, ints: list, scalars: list, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            if torch._C._are_functorch_transforms_active():
                # both modes are off in here; an inner functorch level must see them on, or it builds no graph and
                # carries no tangent
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    outputs = tuple(run(program, list(tensors), ints, scalars))
            else:
                outputs = tuple(run(program, list(tensors), ints, scalars))
        ctx.call = (program, ints, scalars)
        ctx.kept, integers = _outputs(program)
        if integers:
            ctx.mark_non_differentiable(*[outputs[k] for k in integers])
        ctx.set_materialize_grads(False)
        saved = (*tensors, *[outputs[k] for k in ctx.kept])
        ctx.save_for_backward(*saved)
        if run is not composite or forward_ad._current_level >= 0:
            ctx.save_for_forward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        program, ints, scalars = ctx.call
        needed = ctx.needs_input_grad
        result: list[Tensor | None] = [None] * len(needed)
        d = _gradient(program, tuple([g is not None for g in grads]), needed)
        if d is not None:
            tensors = d.picked((*ctx.saved_tensors, *[_written(g) for g in grads]))
            for i, g in zip(d.places, call(d.text, list(tensors), list(ints), [scalars[k] for k in d.scalars])):
                result[i] = g
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple:
        program, ints, scalars = ctx.call
        p = parse(program)
        saved = ctx.saved_tensors
        tensors, kept = saved[: p.num_tensors], dict(zip(ctx.kept, saved[p.num_tensors :]))
        moving = tuple([i for i in range(len(p.operands)) if tangents[_LEAD + i] is not None])
        passes.applied("tangent")
        d = tangent(program, moving)
        result: list[Tensor | None] = [None] * len(p.returns)
        if d.returns:
            extra = {i: tangents[_LEAD + i] for i in moving}
            # forward mode is off in here; an outer level must see it on, and this level's own tangents are not to be
            # seen again
            with forward_ad._set_fwd_grad_enabled(True):
                tensors = tuple([_dual(t)[0] for t in tensors])
                kept = {k: _dual(t)[0] for k, t in kept.items()}
                for k, t in zip(d.returns, derived_call(d, p, tensors, extra, kept, ints, scalars)):
                    assert k is not None
                    result[k] = t
        return tuple(result)


def _written(g: Tensor | None) -> Tensor | None:
    """A gradient that repeats along its features, as that of a sum does, in memory: it is read as vectors, at edges."""
    stride = g.stride(-1) if g is not None and g.dim() > 1 else 1
    return g.contiguous() if g is not None and isinstance(stride, int) and stride == 0 and g.shape[-1] != 1 else g


def differentiable(
    run: Callable, program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]
) -> list[Tensor]:
    """`run`, the implementation or the operator below autograd, with the adjoint program as its derivative."""
    if not _has_tangent(tensors) and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors])):
        with torch._C._AutoDispatchBelowAutograd():
            return run(program, tensors, ints, scalars)
    p = parse(program)
    if p.pruned and p.kind == "blocks":
        raise TigaError(
            "prune_backward over packed sequences: their tiles are no grid, and no gradient kernel reads them. Give "
            "the same graph as tg.Graph.intervals, or leave pruning out."
        )
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.utils import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return recorded(run, program, tensors, ints, scalars)
    return recorded(run, program, tensors, ints, scalars)


def recorded(run: Callable, program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
    """`run`, noted for autograd."""
    passes.applied("augment")
    if keeps_sums(program):
        passes.applied("keep-sums")
    outputs = _Propagate.apply(run, augment(program), ints, scalars, *tensors)  # type: ignore[attr-defined]
    return list(outputs[: len(parse(program).returns)])


KNOWN = alike.Recent(most=4096, each=4)
"""Calls that autograd alone looks at: how to know them, and whether it does."""


def _again(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor] | None:
    """The outputs of a call like one that was met, where but for autograd nothing would look at it."""
    if not dispatch.is_bare():
        return None
    grad = torch.is_grad_enabled()
    if grad or not replay.KEPT:
        for like, moving in KNOWN.get((program, grad, len(tensors), *ints), ()):
            if like(*tensors):
                if moving:
                    return recorded(composite, program, tensors, ints, scalars)
                with torch._C._AutoDispatchBelowAutograd():
                    return composite(program, tensors, ints, scalars)
    if not replay.KEPT or (grad and any([t.requires_grad for t in tensors])):
        return None
    with torch._C._AutoDispatchBelowAutograd():
        return replay.again(program, tensors, ints, scalars)


def _plain(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
    """Where but for autograd nothing looks at a call."""
    outputs, grad = differentiable(composite, program, tensors, ints, scalars), torch.is_grad_enabled()
    if (grad or not replay.KEPT) and dispatch.is_bare():
        moving = grad and any([t.requires_grad for t in tensors])
        KNOWN.add((program, grad, len(tensors), *ints), (alike.like(tensors), moving))
    return outputs


def autograd(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
    outputs = _again(program, tensors, ints, scalars)
    if outputs is not None:
        return outputs
    if dispatch.is_plain(tensors):
        return _plain(program, tensors, ints, scalars)
    sharding.install()
    return differentiable(_op, program, tensors, ints, scalars)


def call(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
    """tiga::propagate, without the dispatcher where only autograd and the implementation would take part."""
    if torch.compiler.is_compiling():
        return _op(program, tensors, ints, scalars)
    outputs = _again(program, tensors, ints, scalars) if dispatch.is_direct() else None
    if outputs is not None:
        return outputs
    first = dispatch.first(tensors)
    if first == "autograd":
        return _differentiable(program, tensors, ints, scalars)
    return (_implementation if first else _op)(program, tensors, ints, scalars)


def _has_tangent(tensors: Sequence[Tensor]) -> bool:
    if (
        forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    ):
        return False
    return any([_dual(t)[1] is not None for t in tensors])


def _dual(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Primal and tangent. Not unpack_dual: a tracing compiler enters dual levels without telling forward_ad."""
    return torch._VF._unpack_dual(t, level=0)


# Autocast, vmap.


def _autocast_kernel(device_type: str) -> Any:
    keys = torch._C.DispatchKeySet(
        getattr(torch._C.DispatchKey, "AutocastCPU" if device_type == "cpu" else "AutocastCUDA")
    )

    def kernel(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
        passes.applied("autocast")
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return _op(autocast(program, dtype), tensors, ints, scalars)

    return kernel


def vmap(
    info: Any, in_dims: tuple, program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]
) -> tuple:
    dims = in_dims[1]
    p = parse(program)
    for k, d in enumerate(dims):
        if d is not None and k >= len(p.operands):
            raise TigaError(
                "vmap over a graph: the graph's own tensors cannot be mapped. "
                "Map over fields, and use one graph for all."
            )
    passes.applied("batch")
    text, moved = batched(p, tensors, tuple(dims))
    return sample_dims(_op(text, moved, ints, scalars), text, info.batch_size)


_implementation, _differentiable = outside_dynamo(composite), outside_dynamo(_plain)
LIB.impl("propagate", _implementation, "CompositeExplicitAutograd")
LIB.impl("propagate", outside_dynamo(autograd), "Autograd")
LIB.impl("propagate", outside_dynamo(_autocast_kernel("cpu")), "AutocastCPU")
LIB.impl("propagate", outside_dynamo(_autocast_kernel("cuda")), "AutocastCUDA")
torch.library.register_fake("tiga::propagate", fake, lib=LIB)
torch.library.register_vmap("tiga::propagate", vmap, lib=LIB)
