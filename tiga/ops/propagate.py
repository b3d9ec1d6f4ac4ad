"""tiga::propagate - everything PyTorch knows of the operator that runs programs.

    propagate(str program, Tensor[] tensors, SymInt[] ints, float[] scalars) -> Tensor[]

tensors: the program's operands in the order of its head, then the relation's tensors. ints: (num_dst, num_src, ...) as
the relation's kind says. Outputs are contiguous whatever the inputs' strides. The gradient is propagate again, of the
adjoint program; so is the gradient of that.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from tiga import passes, relations
from tiga.adjoint import adjoint, augment
from tiga.derivation import Derived, saved_outputs
from tiga.errors import TigaError
from tiga.layouts import BUDGET
from tiga.ops.autocast import autocast
from tiga.ops.batch import batched, sample_dims
from tiga.ops.library import LIB, outside_dynamo
from tiga.parser import parse
from tiga.program import Program, evaluate_size
from tiga.reference import interpret
from tiga.tangent import tangent
from tiga.types import DTYPES, Total

LIB.define(
    "propagate(str program, Tensor[] tensors, SymInt[] ints, float[] scalars) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_op = torch.ops.tiga.propagate.default

# the numbers each kind's ints hold
_NUM_INTS = {kind: len(row.int_names) for kind, row in relations.RELATIONS.items()}


# What must hold, and what comes out.


def check(p: Program, tensors: Sequence[Tensor], ints: Sequence[Any], scalars: Sequence[float]) -> None:
    """Shapes, dtypes and devices, as the program's head declares them: the same eager and compiled."""
    if len(tensors) != p.num_tensors:
        raise TigaError(
            f"tiga::propagate: the program reads {len(p.operands)} operands and its relation {p.relation_tensors} "
            f"tensors; {len(tensors)} were given."
        )
    if len(ints) != _NUM_INTS[p.kind]:
        raise TigaError(
            f"tiga::propagate: a {p.kind} relation has {_NUM_INTS[p.kind]} ints "
            f"{relations.RELATIONS[p.kind].int_names}; {len(ints)} were given."
        )
    if len(scalars) != len(p.scalars):
        raise TigaError(f"tiga::propagate: the program reads {len(p.scalars)} scalars; {len(scalars)} were given.")
    device = tensors[0].device
    rows = {"dst": ints[1] if p.reverse else ints[0], "src": ints[0] if p.reverse else ints[1]}
    edges = (
        relations.num_edges(p.kind, tuple(ints), tuple(tensors[len(p.operands) :]))
        if p.kind in ("dense", "csr")
        else None
    )
    for o, t in zip(p.operands, tensors):
        _check_operand(o, t, device)
        wanted = rows.get(o.place, edges if o.place == "edge" else None)
        if wanted is not None and t.shape[0] != wanted:
            raise TigaError(
                f"{o.place} field {o.name!r} has {t.shape[0]} rows, but the graph has {wanted} {_ROWS[o.place]}."
            )
    for t in tensors[len(p.operands) :]:
        if t.device != device:
            raise TigaError(
                f"the graph's tensors are on {t.device}, {p.operands[0].place} field {p.operands[0].name!r} on "
                f"{device}. Move the graph with graph.to(...)."
            )
        if t.dim() != 1 or t.dtype not in (torch.int32, torch.int64):
            raise TigaError(
                f"tiga::propagate: a {p.kind} relation's tensors are lists of int32 or int64; "
                f"one is {t.dtype} with {t.dim()} dimensions."
            )
    _check_sizes(p, tensors)
    passes.ran("check")


def check_relation(p: Program, relation: Sequence[Tensor], ints: Sequence[int]) -> None:
    """The lengths of the relation's tensors; asked where they run, so that no compiler equates sizes."""
    lengths = tuple([t.shape[0] for t in relation])
    wanted = (
        {
            "csr": (ints[0] + 1, *[lengths[1]] * (len(lengths) - 1)),
            "intervals": (ints[0],) * len(lengths),
            "blocks": (lengths[-1] + 1,) * 2 + (lengths[-1],) * 2,
        }[p.kind]
        if lengths
        else ()
    )
    if lengths != wanted:
        raise TigaError(
            f"tiga::propagate: a {p.kind} relation of {ints[0]} by {ints[1]} has tensors of lengths {wanted}; "
            f"{lengths} were given."
        )


_ROWS = {"dst": "destinations", "src": "sources", "edge": "edges"}


def _check_operand(o: Any, t: Tensor, device: torch.device) -> None:
    if t.device != device:
        raise TigaError(
            f"{o.place} field {o.name!r} is on {t.device}, others on {device}. Put all fields on one device."
        )
    if t.dtype != DTYPES[o.dtype]:
        raise TigaError(f"{o.place} field {o.name!r} is {t.dtype}, but the program was traced for {DTYPES[o.dtype]}.")
    features = t.shape if o.place == "shared" else t.shape[1:]
    if o.flag == "number":
        features = features[:0]
    if len(features) != len(o.sizes) or (o.place != "shared" and t.dim() == 0):
        raise TigaError(
            f"{o.place} field {o.name!r} has {len(features)} feature dimensions, but the program was traced for "
            f"{len(o.sizes)}."
        )
    for k, (size, mark) in enumerate(zip(features, o.sizes)):
        if (mark == 1) != bool(size == 1):
            raise TigaError(
                f"{o.place} field {o.name!r} has size {size} in feature dimension {k}, but the program was traced for "
                f"{'1' if mark == 1 else 'another size than 1'}."
            )


def _check_sizes(p: Program, tensors: Sequence[Tensor]) -> None:
    if not p.conditions:
        return
    shapes = tuple([t.shape for t in tensors])
    for a, b in p.conditions:
        have = evaluate_size(a, shapes, p.operands)
        if isinstance(b, Total) and b.rule == "at least":
            if have < b.parts[0]:
                raise TigaError(f"a slice needs a feature size of at least {b.parts[0]}; {_where(a, p)} is {have}.")
            continue
        want = evaluate_size(b, shapes, p.operands)
        if have != want:
            raise TigaError(f"feature sizes differ: {_where(a, p)} is {have}, {_where(b, p)} is {want}.")


def _where(size: Any, p: Program) -> str:
    if isinstance(size, tuple) and not isinstance(size, Total):
        o = p.operands[size[0]]
        return f"feature dimension {size[1]} of {o.place} field {o.name!r}"
    return "the other" if isinstance(size, Total) else "the size written in the program"


def allocate(p: Program, tensors: Sequence[Tensor], ints: Sequence[Any]) -> list[Tensor]:
    """Empty outputs: rows of the value's place, then its feature sizes; contiguous."""
    shapes = tuple([t.shape for t in tensors])
    outputs = []
    for ref in p.returns:
        t = p.types[ref]
        sizes = [evaluate_size(s, shapes, p.operands) for s in t.sizes]
        rows = [] if t.place == "shared" else [_rows(p, t.place, tensors, ints)]
        outputs.append(tensors[0].new_empty(rows + sizes, dtype=DTYPES[t.dtype]))
    return outputs


def _rows(p: Program, place: str, tensors: Sequence[Tensor], ints: Sequence[Any]) -> Any:
    """A tensor's own row count where there is one, so that no condition between sizes is asked of a compiler."""
    for o, t in zip(p.operands, tensors):
        if o.place == place:
            return t.shape[0]
    if place == "edge":
        relation = tuple(tensors[len(p.operands) :])
        if (
            p.kind in ("blocks", "intervals")
            and isinstance(ints[2], int)
            and ints[2] < 0
            and torch._subclasses.fake_tensor.is_fake(tensors[0])
        ):
            return torch.library.get_ctx().new_dynamic_size()
        return relations.num_edges(p.kind, tuple(ints), relation)
    return ints[(0 if place == "dst" else 1) ^ int(p.reverse)]


# Implementations.


def composite(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
    """Kernels where they fit, else torch operations, range by range, on any device."""
    passes.running(program)
    p = parse(program)
    check(p, tensors, ints, scalars)
    check_relation(p, tensors[len(p.operands) :], ints)
    _check_edges(p, tensors, ints)
    outputs = allocate(p, tensors, ints)
    device = tensors[0].device.type
    if device in KERNEL_DEVICES:
        from tiga.ops import tiles  # Triton is imported where a kernel runs, not before

        reason = tiles.run(p, tensors, ints, scalars, outputs)
        if not reason:
            return outputs
        if device == "cuda":
            _say_composite(reason)
    interpret(p, tensors, ints, scalars, outputs)
    return outputs


def _check_edges(p: Program, tensors: Sequence[Tensor], ints: Sequence[int]) -> None:
    """Rows of edge fields, also where the number of edges must be counted."""
    if any([x < 0 for x in ints[:2]]):
        raise TigaError(f"a graph of {ints[0]} destinations and {ints[1]} sources; sizes are not negative.")
    fields = [(o, t) for o, t in zip(p.operands, tensors) if o.place == "edge"]
    if fields:
        wanted = relations.num_edges(p.kind, tuple(ints), tuple(tensors[len(p.operands) :]))
        for o, t in fields:
            if t.shape[0] != wanted:
                raise TigaError(f"edge field {o.name!r} has {t.shape[0]} rows, but the graph has {wanted} edges.")


KERNEL_DEVICES = {"cuda"}
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
    check(p, tensors, ints, scalars)
    return allocate(p, tensors, ints)


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
    return _op(d.text, [*chosen, *tensors[len(p.operands) :]], list(ints), [scalars[k] for k in d.scalars])


@functools.lru_cache(8192)
def _kept(program: str) -> tuple[int, ...]:
    """The outputs of an augmented program that its derivatives read."""
    return tuple(sorted(set(saved_outputs(parse(program)).values())))


class _Propagate(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, program: str, ints: list, scalars: list, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            if torch._C._are_functorch_transforms_active():
                # both modes are off in here; an inner functorch level must see them on, or it builds no graph and
                # carries no tangent
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    outputs = tuple(_op(program, list(tensors), ints, scalars))
            else:
                outputs = tuple(_op(program, list(tensors), ints, scalars))
        ctx.call = (program, ints, scalars)
        ctx.kept = _kept(program)
        integers = [o for o in outputs if not o.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *[outputs[k] for k in ctx.kept])
        ctx.save_for_forward(*tensors, *[outputs[k] for k in ctx.kept])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        program, ints, scalars = ctx.call
        p = parse(program)
        saved = ctx.saved_tensors
        tensors, kept = saved[: p.num_tensors], dict(zip(ctx.kept, saved[p.num_tensors :]))
        given = tuple([k for k, g in enumerate(grads) if g is not None])
        wanted = tuple([i for i, o in enumerate(p.operands) if ctx.needs_input_grad[3 + i] and p.types[o.ref].floating])
        result: list[Tensor | None] = [None] * (3 + p.num_tensors)
        if given and wanted:
            d = adjoint(program, wanted, given)
            if d.returns:
                gradients = derived_call(d, p, tensors, dict(enumerate(grads)), kept, ints, scalars)
                for i, g in zip(d.returns, gradients):
                    assert i is not None
                    result[3 + i] = g
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple:
        program, ints, scalars = ctx.call
        p = parse(program)
        saved = ctx.saved_tensors
        tensors, kept = saved[: p.num_tensors], dict(zip(ctx.kept, saved[p.num_tensors :]))
        moving = tuple([i for i in range(len(p.operands)) if tangents[3 + i] is not None])
        passes.applied("tangent")
        d = tangent(program, moving)
        result: list[Tensor | None] = [None] * len(p.returns)
        if d.returns:
            extra = {i: tangents[3 + i] for i in moving}
            # forward mode is off in here; an outer level must see it on, and this level's own tangents are not to be
            # seen again
            with forward_ad._set_fwd_grad_enabled(True):
                tensors = tuple([_dual(t)[0] for t in tensors])
                kept = {k: _dual(t)[0] for k, t in kept.items()}
                for k, t in zip(d.returns, derived_call(d, p, tensors, extra, kept, ints, scalars)):
                    assert k is not None
                    result[k] = t
        return tuple(result)


def autograd(program: str, tensors: list[Tensor], ints: list[int], scalars: list[float]) -> list[Tensor]:
    moving = _has_tangent(tensors)
    if moving or (torch.is_grad_enabled() and any([t.requires_grad for t in tensors])):
        visible = len(parse(program).returns)
        passes.applied("augment")
        full = augment(program)
        if torch._C._are_functorch_transforms_active():
            from torch._functorch.utils import enable_single_level_autograd_function

            with enable_single_level_autograd_function():
                return list(_Propagate.apply(full, ints, scalars, *tensors)[:visible])  # type: ignore[attr-defined]
        return list(_Propagate.apply(full, ints, scalars, *tensors)[:visible])  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return _op(program, tensors, ints, scalars)


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


LIB.impl("propagate", outside_dynamo(composite), "CompositeExplicitAutograd")
LIB.impl("propagate", outside_dynamo(autograd), "Autograd")
LIB.impl("propagate", outside_dynamo(_autocast_kernel("cpu")), "AutocastCPU")
LIB.impl("propagate", outside_dynamo(_autocast_kernel("cuda")), "AutocastCUDA")
torch.library.register_fake("tiga::propagate", fake, lib=LIB)
torch.library.register_vmap("tiga::propagate", vmap, lib=LIB)
