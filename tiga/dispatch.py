"""Whether PyTorch's dispatcher would do anything but go to the next kernel of tiga::propagate.

To ask it costs as much as to trace an edge function. What is asked here of its state is what it would ask itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn


def _bits(*names: str) -> int:
    """Dispatch keys as a set of bits."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # of frames, on this thread
_included, _excluded, _keys = (
    torch._C._dispatch_tls_local_include_set,
    torch._C._dispatch_tls_local_exclude_set,
    torch._C._dispatch_keys,
)
_MODES = ~_bits("BackendSelect", "ADInplaceOrView")  # all but what is always included
_AUTOCAST, _AUTOGRAD = _bits("AutocastCPU", "AutocastCUDA"), _bits("AutogradFunctionality")
# dense tensors, as they are made outside and inside inference mode
_PLAIN = {
    _bits(device, *more)
    for device in ("CPU", "CUDA")
    for more in (("ADInplaceOrView", "Autograd" + device, "Autocast" + device), ("Autocast" + device,))
}


def is_plain(tensors: list[Tensor]) -> bool:
    """Whether what follows autograd is the implementation: no mode is on, no tensor is more than dense memory."""
    return not _included().raw_repr() & _MODES and _PLAIN.issuperset([_keys(t).raw_repr() for t in tensors])


def first(tensors: list[Tensor]) -> str:
    """What a call goes to first that does anything: "autograd" or, where that is passed by, as in inference mode, the
    "implementation"; "" where something else looks at the call before them or in between."""
    excluded = _excluded().raw_repr()
    if (
        excluded & _AUTOCAST != _AUTOCAST  # where it is on
        or torch.overrides.has_torch_function(tensors)
        or torch.autograd._profiler_enabled()
        or not is_plain(tensors)
    ):
        return ""
    return "implementation" if excluded & _AUTOGRAD else "autograd"


def is_bare() -> bool:
    """Whether no mode is on and no tensor can have a tangent. What the tensors of a call are is not asked."""
    return not _included().raw_repr() & _MODES and forward_ad._current_level < 0


def is_direct() -> bool:
    """Whether a Python function may stand for a call of the operator: autocast is off, nobody is told of torch's
    functions, and Dynamo does not look at the frames that run."""
    return (
        _excluded().raw_repr() & _AUTOCAST == _AUTOCAST
        and not torch._C._len_torch_function_stack()
        and not torch.autograd._profiler_enabled()
        and compiler() is None
    )


# Tensors alike.


class Recent(dict[tuple, list[Any]]):
    """The last calls by what they are told apart by first, the newest first: at most `each` of a key, and when there
    would be more than `most` keys all are forgotten."""

    def __init__(self, most: int, each: int) -> None:
        self.most, self.each = most, each

    def add(self, key: tuple, call: Any) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        self[key] = [call, *self.get(key, ())][: self.each]

    def calls(self) -> list[Any]:
        return [call for held in self.values() for call in held]


def like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """check(*others), of as many: whether they are to torch what these are. Types, dtypes, devices, sizes, strides,
    dispatch keys, whether they ask for gradients, and which are one and the same. Modes that are on are not looked at.
    Holds none."""
    first: dict[int, int] = {}
    at = [first.setdefault(id(t), k) for k, t in enumerate(tensors)]
    check = _compared([tensors[k] for k in first.values()])
    if len(first) == len(tensors):
        return check
    return _twice(tuple(at))(check)  # which says no to whatever is given twice


@functools.lru_cache(256)
def _twice(at: tuple[int, ...]) -> Callable[[Callable], Callable[..., bool]]:
    """check -> a check of tensors of which the k-th is the at[k]-th."""
    names = ", ".join([f"t{k}" for k in range(len(at))])
    same = " and ".join([f"t{k} is t{n}" for k, n in enumerate(at) if k != n])
    once = ", ".join([f"t{k}" for k in dict.fromkeys(at)])
    return eval(f"lambda check: lambda {names}: {same} and check({once})")


def _compared(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    make = _guards() or _Forms
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


class _Forms:
    """The comparison of `like`, for a torch that lacks that of its compiler."""

    def __init__(self, *tensors: Tensor, **_: list) -> None:
        self.forms = self.of(tensors)

    def check(self, *tensors: Tensor) -> bool:
        return self.forms == self.of(tensors)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> list | None:
        forms = [(t.shape, t.stride(), t.dtype, t.device) if t.layout == torch.strided else None for t in tensors]
        kinds = [(type(t), _keys(t).raw_repr(), t.requires_grad) for t in tensors]
        return [*zip(forms, kinds)] if len({id(t) for t in tensors}) == len(tensors) else None


def _guards() -> type | None:
    """The comparison that compiled code makes of its inputs, in C++; None where it is gone, or is another."""
    try:
        return _checked_guards()
    except RuntimeError:  # under a transform no tensor may ask for gradients: it is looked at later
        return None


@functools.cache
def _checked_guards() -> type | None:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(2, 3, device="cpu")
        wide, asking = torch.empty(2, 4, device="cpu")[:, 1:], x.clone().requires_grad_()
        try:
            made: Any = torch._C._dynamo.guards.TensorGuards
            check = made(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
            others = [
                x.reshape(3, 2),
                x.reshape(3, 2).mT,
                wide,
                x.double(),
                x.to("meta"),
                nn.Parameter(x, False),
                asking,
            ]
            return made if check(x) and not any([check(y) for y in others]) else None
        except (AttributeError, TypeError):
            return None
