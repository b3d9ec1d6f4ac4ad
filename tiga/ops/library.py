"""The one torch.library namespace of tiga."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiga.dispatch import compiler

LIB = torch.library.Library("tiga", "DEF")


def outside_dynamo(fn: Callable) -> Callable:
    """Keeps Dynamo out of the body of an operator called eagerly, without importing it for those who never compile."""
    disabled: Any = None

    def call(*args: Any) -> Any:
        nonlocal disabled
        if compiler() is None:
            return fn(*args)
        if disabled is None:
            disabled = torch._dynamo.disable(fn)
        return disabled(*args)

    call.__name__, call.__doc__ = fn.__name__, fn.__doc__
    return call
