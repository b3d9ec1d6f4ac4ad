"""Linear maps of layers: torch's, with the starting weights of graph layers, and sizes learned from the first input."""

from __future__ import annotations

from torch import Tensor, nn


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
