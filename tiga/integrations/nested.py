"""torch.nested in and out: jagged tensors (batch, rows of each, *features) lie packed already, as tiga wants them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiga.errors import TigaError

Jagged = Any  # a torch.nested tensor: Tensor declares none of its methods


def attention(
    query: Jagged,
    key: Jagged,
    value: Jagged,
    scale: float | None = None,
    causal: bool = False,
    align: str | None = None,
) -> Jagged:
    """out[b, i] = sum_j softmax_j(scale <query[b, i], key[b, j]>) value[b, j], j in sequence b.

    Over j <= i + offset where causal. query (batch, j1, *heads, width), key and value (batch, j2, *heads, ...): jagged
    tensors of torch.nested, made with layout=torch.jagged, without holes; heads come after the rows, and broadcast. The
    result is jagged as query is. What `align` and `scale` mean, and how it is accumulated, is said of
    torch.ops.tiga.attention, which this calls on the packed values: nothing is padded and no length is read. An empty
    sequence gives no rows. Raises TigaError for tensors that are not jagged or not packed alike, and for causal with
    other lengths in key and no align.

    >>> import tiga as tg, torch
    >>> x = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    >>> [y.tolist() for y in tg.integrations.nested.attention(x, x, x, causal=True).unbind()]
    [[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]]]
    """
    given = {"query": query, "key": key, "value": value}
    for name, t in given.items():
        _check(name, t)
    if not _same(key, value):
        raise TigaError(
            "nested.attention: key and value are packed differently, but each source has one key and one value. "
            "Give both the same lengths."
        )
    boundaries, sources = query.offsets(), key.offsets()
    src_boundaries = None if boundaries is sources else sources
    if causal and align is None and src_boundaries is not None and _same(query, key):
        src_boundaries = None
    fields = query.values(), key.values(), value.values()
    out = torch.ops.tiga.attention(*fields, scale, causal, align, boundaries, src_boundaries)
    return torch.nested.nested_tensor_from_jagged(
        out, boundaries, min_seqlen=_kept(query, "min"), max_seqlen=_kept(query, "max")
    )


def _check(name: str, given: Any) -> None:
    t: Jagged = given
    if not isinstance(given, Tensor) or not given.is_nested or given.layout != torch.jagged:
        raise TigaError(
            f"nested.attention: {name} is {type(t).__name__}, not a jagged tensor. Write "
            "torch.nested.nested_tensor([...], layout=torch.jagged), or torch.ops.tiga.attention with boundaries."
        )
    if getattr(t, "_ragged_idx", 1) != 1:
        raise TigaError(
            f"nested.attention: the rows of {name} are dimension {t._ragged_idx}, not 1. "
            f"Write {name}.transpose({t._ragged_idx}, 1): heads come after the rows."
        )
    if t.lengths() is not None:
        raise TigaError(f"nested.attention: {name} has holes between its sequences. Write {name}.contiguous().")


def _same(a: Jagged, b: Jagged) -> bool:
    """Whether two tensors are jagged alike: by the size they share, or, eagerly, by one read of their offsets."""
    if a.shape[1] == b.shape[1]:
        return True
    return not torch.compiler.is_compiling() and torch.equal(a.offsets(), b.offsets())


def _kept(t: Jagged, which: str) -> int | None:
    """The least or greatest length, where it is known without reading."""
    return getattr(t, f"_maybe_{which}_seqlen", None)
