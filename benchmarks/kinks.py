"""How far apart the gradients of a layer's two sides lie, where a score is 0 but for rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

NEAR = 2.0**-20
"""Of the root of a layer's mean squared score: 4.5 times as much as scores of two float32 projections err by."""


class OtherSide(TorchFunctionMode):
    """Inside, leaky_relu of what lies within rounding of 0 has the slope of the other side.

    Its value hardly changes there, but its slope is 0.2 or 1, and which of them float32 takes is chance: of 4.7 million
    scores one or two flip, and each moves the gradients of the edge's two ends, 1e-4 of the norm of all. Gradients are
    right to within the distance of the two sides, and no nearer.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (_other if function is F.leaky_relu else function)(*args, **(kwargs or {}))


def _other(x: Tensor, negative_slope: float, inplace: bool = False) -> Tensor:
    near = x.abs() < NEAR * x.detach().square().mean().sqrt()
    return torch.where((x > 0) != near, x, negative_slope * x)
