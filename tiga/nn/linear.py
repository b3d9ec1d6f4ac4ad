"""Linear maps of layers: torch's, with the starting weights of graph layers, and sizes learned from the first input."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiga.preparation import KERNEL_DEVICES

ALIGNED = 8
"""Numbers of two bytes in 16."""


def glorot(weight: Tensor | None) -> None:
    """Uniform in +-sqrt(6 / (fan in + fan out)), of the last two sizes."""
    if weight is not None:
        bound = (6.0 / (weight.shape[-2] + weight.shape[-1])) ** 0.5
        nn.init.uniform_(weight, -bound, bound)


class GlorotLinear(nn.Linear):
    """y = x W^T + b, W drawn as by `glorot`."""

    def reset_parameters(self) -> None:
        glorot(self.weight)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.in_features**-0.5), self.in_features**-0.5)


class _Lazy(nn.LazyLinear):
    def reset_parameters(self) -> None:
        # torch begins with no inputs, and a bias has its size before the weight has
        if not self.has_uninitialized_params() and self.in_features:
            self.cls_to_become.reset_parameters(self)  # type: ignore[union-attr, arg-type]


class _LazyLinear(_Lazy):
    cls_to_become = nn.Linear  # type: ignore[assignment]


class _LazyGlorot(_Lazy):
    cls_to_become = GlorotLinear  # type: ignore[assignment]


def linear(inputs: int, outputs: int, bias: bool, glorot: bool = False) -> nn.Linear:
    """A map to `outputs` features; inputs -1: as many as the first input has."""
    if inputs < 0:
        return (_LazyGlorot if glorot else _LazyLinear)(outputs, bias)
    return (GlorotLinear if glorot else nn.Linear)(inputs, outputs, bias)


def projected(x: Tensor, *parts: nn.Module) -> tuple[Tensor, ...]:
    """Each map of x (rows, features): one product with all their weights, where launches cost more than strides do.

    That is where all are linear and nothing more, on devices with kernels: those read rows wherever they lie, and as
    vectors of 16 bytes where each map's features are some multiple of that.
    """
    if x.device.type in KERNEL_DEVICES and len(parts) > 1 and all([_plain(part) for part in parts]):
        maps = cast(tuple[nn.Linear, ...], parts)
        biases: list[Tensor] = [part.bias for part in maps if part.bias is not None]
        if len(biases) in (0, len(maps)):
            weight, bias = torch.cat([part.weight for part in maps]), torch.cat(biases) if biases else None
            every = F.linear(x, weight, bias)
            return every.split([part.out_features for part in maps], dim=1)
    return tuple([part(x) for part in parts])


def _plain(part: nn.Module) -> bool:
    """Whether calling it is an aligned product and no more: no other class, no hook, no `forward` of its own."""
    if not isinstance(part, nn.Linear) or type(part) not in (nn.Linear, GlorotLinear) or "forward" in part.__dict__:
        return False
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return part.out_features % ALIGNED == 0 and not any(hooks)
