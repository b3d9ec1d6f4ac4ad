"""Calls alike: what an earlier call's tensors were to torch, without the tensors, and the calls met last.

One comparison in C++, the one that compiled code makes of its inputs, stands for a look at each tensor's type, dtype,
device, sizes and strides in Python, which takes ten times as long.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


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
        kinds = [(type(t), torch._C._dispatch_keys(t).raw_repr(), t.requires_grad) for t in tensors]
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
            if check(x) and not any([check(y) for y in others]):
                return made
        except (AttributeError, TypeError):
            pass
    logging.getLogger("tiga").debug("torch compares tensors otherwise in this version: calls are compared in Python")
    return None
