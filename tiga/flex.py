"""FlexAttention's shape of attention: a score_mod, and a graph in the place of the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tiga.errors import TigaError, TraceError
from tiga.graph import Graph
from tiga.message_passing import MessagePassing, said_unread
from tiga.reducer import online_softmax
from tiga.symbols import Sym

ASKED = "tg.flex_attention"


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    graph: Graph | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """out[b, h, i] = sum_j softmax_j(score_mod(scale <query[b, h, i], key[b, h, j]>, b, h, i, j)) value[b, h, j].

    query (batch, heads, num_dst, width), key (batch, heads, num_src, width), value (batch, heads, num_src, features);
    with enable_gqa, key and value may have fewer heads, a divisor. Over the edges j -> i of graph, every pair by
    default, the same for all batches and heads. score_mod(score, b, h, q_idx, kv_idx) is that of
    torch.nn.attention.flex_attention, traced as it is: pointwise torch functions, and reads of captured tensors at b,
    h, q_idx and kv_idx; gradients reach those tensors. Scores are float32 (float64 of float64). scale defaults to
    width ** -0.5. With return_lse, (out, lse), lse (batch, heads, num_dst), natural logarithm. A row without edges
    gives 0 and lse -inf. Results repeat bit for bit; differentiable to any order. Raises TigaError for shapes that do
    not fit, TraceError for a score_mod that cannot be traced.

    >>> import tiga as tg, torch
    >>> x = torch.tensor([[1.0], [3.0]])[None, None]
    >>> tg.flex_attention(x, x, x, lambda score, b, h, q_idx, kv_idx: score * 0 - 99 * (kv_idx > q_idx)).flatten()
    tensor([1., 2.])
    """
    _check(query, key, value, enable_gqa)
    batch, heads, rows, width = query.shape
    groups, columns = key.shape[1], key.shape[2]
    graph = Graph.dense(rows, columns) if graph is None else graph
    if graph.num_dst != rows or graph.num_src != columns:
        raise TigaError(
            f"{ASKED}: {graph!r}, but query has {rows} rows and key {columns}. Build the graph for these; one graph "
            "serves the whole batch, and sequences of their own lie one after another in one row of it."
        )
    each = heads // max(groups, 1)
    q, k, v = (t.permute(2, 0, 1, 3) for t in (query, key, value))  # batch and heads are features of a row
    if each != 1:
        q = q.unflatten(2, (groups, each))
        k, v = k.unsqueeze(3), v.unsqueeze(3).expand(-1, -1, -1, each, -1)
    device = query.device
    h = torch.arange(heads, device=device)
    result = _module(
        graph,
        src={"key": k, "value": v, "kv_idx": torch.arange(columns, device=device)},
        dst={"query": q, "q_idx": torch.arange(rows, device=device)},
        scale=width**-0.5 if scale is None else scale,
        score_mod=score_mod,
        b=torch.arange(batch, device=device).reshape(-1, *[1] * (q.dim() - 3)),
        h=h if each == 1 else h.unflatten(0, (groups, each)),
        return_lse=return_lse,
    )
    if not return_lse:
        return result.flatten(2, -2).permute(1, 2, 0, 3)
    out, lse = result
    return out.flatten(2, -2).permute(1, 2, 0, 3), lse.flatten(2).permute(1, 2, 0)


class FlexAttention(MessagePassing):
    """One edge of attention whose score a function of (score, b, h, q_idx, kv_idx) changes."""

    softmax, softmax_and_lse = online_softmax(), online_softmax(return_lse=True)

    def edge(self, src: Any, dst: Any, edge: Any, scale: Any, score_mod: Any, b: Any, h: Any, return_lse: bool) -> Any:
        score = (src.key * dst.query).sum(dim=-1) * scale
        if score_mod is not None:
            with Reads():
                score = score_mod(score, b, h, dst.q_idx, src.kv_idx)
        if return_lse:
            return self.softmax_and_lse(score, src.value)
        return self.softmax(score, src.value)


_module = FlexAttention()
# a score_mod may well not ask for its rows
said_unread.update([(FlexAttention, "src.kv_idx"), (FlexAttention, "dst.q_idx")])


class Reads(TorchFunctionMode):
    """table[i, j] of a tensor, where i or j is traced, is a gather: torch itself would ask for their values."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any([isinstance(i, Sym) for i in at]):
                return read(args[0], at)
        return function(*args, **(kwargs or {}))


def read(table: Tensor, at: tuple) -> Any:
    """table[at] where each of `at` is an integer, a tensor of integers or a traced one; what it leaves out is whole."""
    if len(at) > table.dim():
        raise TraceError(f"{len(at)} positions in a tensor of {table.dim()} dimensions.")
    place: Any = 0
    for size, i in zip(table.shape, at):
        if not isinstance(i, (int, Sym, Tensor)) or isinstance(i, bool):
            raise TraceError(
                f"a tensor read at {type(i).__name__} beside a traced position. "
                "Give integers for the first dimensions, and all of the last ones."
            )
        place = place * size + _counted(i, size)
    rows = table.reshape(-1, *table.shape[len(at) :])
    return torch.nn.functional.embedding(place, rows)


def _counted(i: Any, size: Any) -> Any:
    """From the front, as torch counts negative positions from the end."""
    if isinstance(i, int):
        return i + size if i < 0 else i
    return torch.where(i < 0, i + size, i)


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 4:
            raise TigaError(f"{ASKED}: {name} has shape {tuple(t.shape)}. Give (batch, heads, rows, width).")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise TigaError(
            f"{ASKED}: query has shape {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}. "
            "Batches are equal, widths of query and key, and heads and rows of key and value."
        )
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups and (not enable_gqa or groups == 0 or heads % groups):
        raise TigaError(
            f"{ASKED}: query has {heads} heads, key {groups}. "
            "Write enable_gqa=True where each head of keys serves the same number of heads of queries."
        )
