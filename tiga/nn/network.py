"""A network per edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiga.errors import TigaError
from tiga.networks import NETWORKS
from tiga.symbols import Sym, tracer_of


class EdgeNetwork(nn.Module):
    """y[e] = module(cat(x0[e], x1[e], ..., dim=-1)), for every edge e.

    Use it in an edge function; its parameters get gradients.

    module: Sequential, Linear, activations, norms, or any module of traceable operations. block_e and num_warps ask
    the kernels over listed edges for a launch geometry: edges a program visits at a time, and warps a program. It is
    tried first, and left where it needs more registers than there are; results do not depend on it, but for the order
    of sums. Of several networks in one edge function the last is heard.
    """

    def __init__(self, module: nn.Module, block_e: int | None = None, num_warps: int | None = None) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"tg.nn.trace: module is {type(module).__name__}; give an nn.Module.")
        for name, x, most in (("block_e", block_e, 1 << 16), ("num_warps", num_warps, 32)):
            if x is not None and (not isinstance(x, int) or x < 1 or x & (x - 1) or x > most):
                raise TigaError(
                    f"tg.nn.trace: {name}={x}; it is a power of two of at most {most}, or None for the default."
                )
        self.module = module
        self.block_e, self.num_warps = block_e, num_warps

    def forward(self, *values: Any) -> Any:
        if (self.block_e or self.num_warps) and any([isinstance(x, Sym) for x in values]):
            tracer_of(values).ask(self.block_e or 0, self.num_warps or 0)
        return self.module(torch.cat(list(values), dim=-1) if len(values) > 1 else values[0])


NETWORKS[EdgeNetwork] = ("block_e", "num_warps")


def trace(module: nn.Module, block_e: int | None = None, num_warps: int | None = None) -> EdgeNetwork:
    """y[e] = module(cat(arguments[e])) per edge: see EdgeNetwork."""
    return EdgeNetwork(module, block_e, num_warps)
