"""tiga::attention: scaled dot-product attention over the dense, causal and packed relations, as a program."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiga import graph_build, graph_checks
from tiga.errors import TigaError
from tiga.ops.friendly import apply, declare
from tiga.reducer import online_softmax
from tiga.types import FLOATS, NAMES

ASKED = "tiga::attention"
_softmax = online_softmax()


@declare(
    "attention(Tensor query, Tensor key, Tensor value, float? scale=None, bool causal=False, str? align=None, "
    "Tensor? boundaries=None, Tensor? src_boundaries=None) -> Tensor"
)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    causal: bool = False,
    align: str | None = None,
    boundaries: Tensor | None = None,
    src_boundaries: Tensor | None = None,
) -> Tensor:
    """out[i] = sum_j softmax_j(scale <query[i], key[j]>) value[j], over all j, or j <= i + offset if causal.

    query (num_dst, *heads, width), key (num_src, *heads, width), value (num_src, *heads, features): heads broadcast,
    so that grouped queries are a head dimension of size 1 in key and value. Result (num_dst, *heads, features) in
    value's dtype. scale defaults to width ** -0.5. boundaries, and src_boundaries where the sources are packed
    differently: running totals from 0 of packed sequences, which do not see each other; rows after the last get 0.
    Causal sequences of different lengths need align: "bottom-right" (the last rows meet: offset = sources -
    destinations) or "top-left" (offset 0). Boundaries are not read: rows outside them have no edges; Graph.cu_seqlens
    checks them. Accumulates in float32 (float64 for float64), in order: results repeat bit for bit. A row without
    sources gives 0 and gradient 0. Differentiable to any order. Compiled, each value of scale is one compilation: where
    it changes, multiply query by it. Raises TigaError for shapes that do not fit, TypeError for dtypes.
    Source: Vaswani et al. 2017; Rabe & Staats 2021; Dao et al. 2022.

    >>> import tiga, torch
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> torch.ops.tiga.attention(torch.zeros(2, 1), x, x, causal=True).tolist()
    [[1.0], [1.5]]
    """
    _check(query, key, value)
    kind, ints, relation = _relation(query.shape[0], key.shape[0], causal, align, boundaries, src_boundaries)
    width = query.shape[-1]
    if scale is None:
        scale = 1.0 if width == 0 else width**-0.5
    # softmax takes its heads from value: one head of values serves all heads of queries
    heads = [_one_head(*sizes) for sizes in zip(query.shape[1:-1], key.shape[1:-1], value.shape[1:-1])]
    value = value.expand(value.shape[0], *heads, value.shape[-1])
    return apply(
        _attend, kind, ints, relation, {"key": key, "value": value}, {"query": query}, scalars=[("scale", scale)]
    )


def _attend(src: Any, dst: Any, edge: Any, scalars: Any) -> Any:
    return _softmax((src.key * dst.query).sum(dim=-1) * scalars[0], src.value)


def _one_head(*sizes: Any) -> Any:
    for size in sizes:
        if size != 1:
            return size
    return 1


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    given = {"query": query, "key": key, "value": value}
    for name, t in given.items():
        if NAMES.get(t.dtype) not in FLOATS:
            raise TypeError(f"{ASKED}: {name} is {t.dtype}, but attention needs floating point. Write {name}.float().")
        if t.dim() < 2 or t.dim() != query.dim():
            raise TigaError(
                f"{ASKED}: {name} has shape {tuple(t.shape)}, query {tuple(query.shape)}. "
                "Give each (rows, *heads, width), with as many head dimensions; a batch is packed, with boundaries."
            )
    if query.shape[-1] != key.shape[-1]:
        raise TigaError(
            f"{ASKED}: query has width {query.shape[-1]}, key {key.shape[-1]}. Their inner product needs equal widths."
        )
    if key.shape[0] != value.shape[0]:
        raise TigaError(
            f"{ASKED}: key has {key.shape[0]} rows, value {value.shape[0]}. Each source has one key and one value."
        )
    for d in range(1, query.dim() - 1):
        sizes = [t.shape[d] for t in given.values()]
        if any([size not in (1, _one_head(*sizes)) for size in sizes]):
            raise TigaError(
                f"{ASKED}: head dimension {d} has sizes {sizes} in query, key and value. Each is 1 or the same; "
                "write grouped heads as two dimensions, (groups, heads of a group) and (groups, 1)."
            )


def _relation(
    num_dst: Any,
    num_src: Any,
    causal: bool,
    align: str | None,
    boundaries: Tensor | None,
    src_boundaries: Tensor | None,
) -> tuple[str, tuple[Any, ...], tuple[Tensor, ...]]:
    if align is not None and (align not in graph_build.ALIGNMENTS or not causal):
        raise TigaError(
            f"{ASKED}: align={align!r} with causal={causal}, but align is one of {graph_build.ALIGNMENTS} "
            "and belongs to causal=True."
        )
    instead = 'Write align="bottom-right" (the last rows meet) or align="top-left" (the first rows meet).'
    if boundaries is None:
        if src_boundaries is not None:
            raise TigaError(
                f"{ASKED}: src_boundaries without boundaries. "
                "Give both, or boundaries alone where sources are packed alike."
            )
        if not causal:
            return "dense", (num_dst, num_src), ()
        if align is None and num_dst != num_src:
            raise TigaError(f"{ASKED}: causal=True with {num_dst} destinations and {num_src} sources. {instead}")
        return "triangular", (num_dst, num_src, num_src - num_dst if align == "bottom-right" else 0), ()
    dst = graph_checks.integers(boundaries, "boundaries", ASKED)
    src = dst if src_boundaries is None else graph_checks.integers(src_boundaries, "src_boundaries", ASKED)
    if dst.shape != src.shape or dst.shape[0] == 0:
        raise TigaError(
            f"{ASKED}: boundaries has {dst.shape[0]} entries, src_boundaries {src.shape[0]}. "
            "Both have one more than sequences."
        )
    if causal and align is None and src is not dst:
        raise TigaError(f"{ASKED}: causal=True with src_boundaries, whose values are not read. {instead}")
    return "blocks", (num_dst, num_src, -1), (dst, src, *graph_build.segment_band(dst, src, causal, align))
