"""Whether PyTorch's dispatcher would do anything but go to the next kernel of tiga::propagate.

To ask it costs as much as to trace an edge function. What is asked here of its state is what it would ask itself.
"""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


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
