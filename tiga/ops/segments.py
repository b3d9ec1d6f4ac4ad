"""tiga::segment_* and tiga::edge_softmax: reductions of the edges of each destination, as programs over CSR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiga import reducer as reducers
from tiga.errors import TigaError
from tiga.graph_checks import integers, one_device
from tiga.ops.friendly import apply, declare
from tiga.types import FLOATS, NAMES

_softmax = reducers.online_softmax(return_lse=True)


def _on_segments(asked: str, edge: Callable, value: Tensor, rowptr: Tensor, number: Tensor | None = None) -> Tensor:
    """The result of edge(value of an edge) over the segments rowptr[i]:rowptr[i + 1]."""
    rowptr = integers(rowptr, "rowptr", asked)
    if value.dim() == 0 or rowptr.shape[0] == 0:
        raise TigaError(
            f"{asked}: value has shape {tuple(value.shape)}, rowptr {tuple(rowptr.shape)}. "
            "Give (num_edges, *features) and the num_dst + 1 running totals of the segments' lengths, from 0."
        )
    # a relation has sources; here nothing reads them: all edges come from one
    relation = [rowptr, rowptr.new_zeros(value.shape[0])]
    if number is not None:
        relation.append(integers(number, "number", asked))
        if relation[2].shape[0] != value.shape[0]:
            raise TigaError(
                f"{asked}: number has {relation[2].shape[0]} entries, but there are {value.shape[0]} edges. "
                "Give one for each entry of col."
            )
    one_device(asked, value=value, **dict(zip(("rowptr", "col", "number"), relation)))
    return apply(
        lambda src, dst, edges, scalars: edge(edges.value),
        "csr",
        (rowptr.shape[0] - 1, 1),
        relation,
        edges={"value": value},
    )


def _folded(name: str, reducer: reducers.Reducer, value: Tensor, rowptr: Tensor) -> Tensor:
    return _on_segments("tiga::segment_" + name, reducer, value, rowptr)


def _needs_floats(asked: str, name: str, t: Tensor) -> None:
    if NAMES.get(t.dtype) not in FLOATS:
        raise TypeError(f"{asked}: {name} is {t.dtype}, but exp and log need floating point. Write {name}.float().")


@declare("segment_sum(Tensor value, Tensor rowptr) -> Tensor")
def segment_sum(value: Tensor, rowptr: Tensor) -> Tensor:
    """out[i] = sum of value[e] over rowptr[i] <= e < rowptr[i + 1].

    value (num_edges, *features), rowptr [num_dst + 1] int32 or int64; result (num_dst, *features) in value's dtype
    (int64 for smaller integers and bool). 16-bit values are added in float32, in order, without atomics: results
    repeat bit for bit. An empty segment gives 0. Values of rowptr are not read: what lies outside num_edges is no
    edge. Differentiable to any order. Raises TigaError for ranks that do not fit.

    >>> import tiga, torch
    >>> torch.ops.tiga.segment_sum(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [3.0, 0.0, 3.0]
    """
    return _folded("sum", reducers.sum(), value, rowptr)


@declare("segment_mean(Tensor value, Tensor rowptr) -> Tensor")
def segment_mean(value: Tensor, rowptr: Tensor) -> Tensor:
    """out[i] = sum of value[e] / max(1, number of e), over rowptr[i] <= e < rowptr[i + 1].

    Shapes, accumulation and determinism of segment_sum; integers give float32. An empty segment gives 0.
    Differentiable to any order.

    >>> import tiga, torch
    >>> torch.ops.tiga.segment_mean(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [1.5, 0.0, 3.0]
    """
    return _folded("mean", reducers.mean(), value, rowptr)


@declare("segment_max(Tensor value, Tensor rowptr) -> Tensor")
def segment_max(value: Tensor, rowptr: Tensor) -> Tensor:
    """out[i] = max of value[e] over rowptr[i] <= e < rowptr[i + 1]; nan if any is.

    Shapes of segment_sum; result in value's dtype. An empty segment gives 0, with gradient 0; of equal values the
    first edge gets the gradient.

    >>> import tiga, torch
    >>> torch.ops.tiga.segment_max(torch.tensor([-1.0, -2.0, 3.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [-1.0, 0.0, 3.0]
    """
    return _folded("max", reducers.max(), value, rowptr)


@declare("segment_min(Tensor value, Tensor rowptr) -> Tensor")
def segment_min(value: Tensor, rowptr: Tensor) -> Tensor:
    """out[i] = min of value[e] over rowptr[i] <= e < rowptr[i + 1]; nan if any is.

    Shapes of segment_sum; result in value's dtype. An empty segment gives 0, with gradient 0; of equal values the
    first edge gets the gradient.

    >>> import tiga, torch
    >>> torch.ops.tiga.segment_min(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [1.0, 0.0, 3.0]
    """
    return _folded("min", reducers.min(), value, rowptr)


@declare("segment_logsumexp(Tensor value, Tensor rowptr) -> Tensor")
def segment_logsumexp(value: Tensor, rowptr: Tensor) -> Tensor:
    """out[i] = log sum of exp(value[e]) over rowptr[i] <= e < rowptr[i + 1], in one pass around the running maximum.

    Shapes of segment_sum; result in value's dtype, accumulated in float32 (float64 for float64), in order. An empty
    segment gives -inf, with gradient 0. Differentiable to any order. Raises TypeError unless value is floating point.

    >>> import tiga, torch
    >>> torch.ops.tiga.segment_logsumexp(torch.tensor([1.0, 1000.0]), torch.tensor([0, 1, 1, 2])).tolist()
    [1.0, -inf, 1000.0]
    """
    _needs_floats("tiga::segment_logsumexp", "value", value)
    return _on_segments("tiga::segment_logsumexp", lambda x: _softmax(x, x)[1].to(value.dtype), value, rowptr)


def _weight(score: Any) -> Any:
    lse = _softmax(score, score)[1]
    # where no score is finite, exp(-inf - 0) is the 0 that is wanted, with gradient 0
    return torch.exp(score - torch.where(lse == -torch.inf, 0.0, lse)).to(score.dtype)


@declare("segment_softmax(Tensor value, Tensor rowptr) -> Tensor")
def segment_softmax(value: Tensor, rowptr: Tensor) -> Tensor:
    """out[e] = exp(value[e]) / sum of exp(value[f]) over the segment rowptr[i] <= f < rowptr[i + 1] that e lies in.

    value (num_edges, *features), rowptr [num_dst + 1]; result as value, feature by feature; computed in float32
    (float64 for float64). Where all values of a segment are -inf it is 0; an edge in no segment gives 0.
    Deterministic; differentiable to any order. Raises TypeError unless value is floating point.

    >>> import tiga, torch
    >>> torch.ops.tiga.segment_softmax(torch.tensor([5.0, 5.0, 3.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [0.5, 0.5, 1.0]
    """
    _needs_floats("tiga::segment_softmax", "value", value)
    return _on_segments("tiga::segment_softmax", _weight, value, rowptr)


@declare("edge_softmax(Tensor score, Tensor rowptr, Tensor? number=None) -> Tensor")
def edge_softmax(score: Tensor, rowptr: Tensor, number: Tensor | None = None) -> Tensor:
    """out[e] = exp(score[e]) / sum of exp(score[f]) over the edges f that reach the destination of e.

    score (num_edges, *heads), in the order of the edges' numbers: destination i has the edges
    number[rowptr[i]:rowptr[i + 1]], as coo_to_csr gives them; without `number` the edges lie by destination and this
    is segment_softmax, whose accumulation and limits it has.

    >>> import tiga, torch
    >>> rowptr, col, number = torch.ops.tiga.coo_to_csr(torch.tensor([[0, 1, 2], [1, 0, 1]]), 2)
    >>> torch.ops.tiga.edge_softmax(torch.tensor([5.0, 3.0, 5.0]), rowptr, number).tolist()
    [0.5, 1.0, 0.5]
    """
    _needs_floats("tiga::edge_softmax", "score", score)
    return _on_segments("tiga::edge_softmax", _weight, score, rowptr, number)
