"""What a user would take instead of tiga, called as its documentation says: [batch, heads, rows, width] in and out."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def fresh_flex() -> Callable[..., Any]:
    """FlexAttention compiled for the sizes it meets; anew for every work, or it falls back after eight."""
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def block_mask(mask: Callable | None, rows: int, device: str) -> Any:
    return None if mask is None else create_block_mask(mask, None, None, rows, rows, device=device)


def sdpa(backend: str | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """With one backend, or with the one that SDPA picks."""
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel([BACKENDS[backend]]):
        return F.scaled_dot_product_attention(q, k, v, **options)


def varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, window: tuple[int, int]) -> Tensor:
    """torch.nn.attention.varlen on one batch: [1, heads, rows, width] views of packed rows; int32 boundaries."""
    from torch.nn.attention.varlen import varlen_attn

    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5
    out = varlen_attn(*packed, boundaries, boundaries, longest, longest, scale=scale, window_size=window)
    return out.transpose(0, 1)[None]


def flash_attentions() -> dict[str, Callable[..., Tensor]]:
    """FlashAttention-3, forward alone (`pip install fa3-fwd`), and -4 (`flash-attn-4`), where they are installed."""
    found = {}
    for name, module, backward in (("FA3", "fa3_fwd_interface", False), ("FA4", "flash_attn.cute", True)):
        with contextlib.suppress(ImportError):
            found[name] = partial(_flash, importlib.import_module(module).flash_attn_func, backward)
    return found


def _flash(attend: Callable, backward: bool, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """[batch, heads, rows, width] in and out, of a function whose heads come after the rows."""
    given = [x.transpose(1, 2) for x in (q, k, v)]
    out = attend(*(given if backward else [x.detach() for x in given]), causal=is_causal)
    return (out[0] if isinstance(out, (tuple, list)) else out).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention as it is written in mathematics: every score is held."""
    score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    return score.softmax(-1) @ v
