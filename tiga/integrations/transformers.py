"""Attention of Hugging Face transformers: after register(), attn_implementation="tiga" runs it here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tiga.errors import TigaError
from tiga.graph import Graph
from tiga.graph_algebra import base_intervals
from tiga.integrations import bands
from tiga.message_passing import MessagePassing
from tiga.reducer import online_softmax


def register(name: str = "tiga") -> None:
    """out[b, i] = sum_j softmax_j(scale <query[b, i], key[b, j]>) value[b, j], j as the model's mask says.

    Registers attention and its masks under `name`, so that `from_pretrained(..., attn_implementation=name)` and
    `config._attn_implementation = name` use them. Causal, sliding-window, chunked and packed masks, and padding at
    either side, become graphs: no mask is made. Of a mask function of the user's own, of padding with gaps, of a static
    cache and while compiling, transformers' boolean mask (batch, 1, queries, keys) is made and read instead. Grouped
    queries, dropout, score caps, sinks and position biases are computed in the same operator; gradients of any order.
    Rows without keys give 0. Needs transformers 5.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise TigaError(
            "tg.integrations.transformers.register: transformers 5 is not installed. Write pip install transformers."
        ) from None
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **rest: Any,
) -> GraphMask | Tensor:
    """The graph that a mask function and a padding mask (batch, keys) describe, or the boolean mask where none does."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    if not isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
        shape = bands.Shape(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
        pairs = bands.pairs_of(function, shape)
        padding = bands.Pairs() if attention_mask is None else bands.padded(attention_mask, shape)
        if pairs is not None and padding is not None:
            return GraphMask(bands.graph_of(pairs & padding, shape), (batch_size, 1, q_length, kv_length))
    rest |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, device=device, **rest
    )
    assert made is not None  # it is left out only where a skip is allowed
    return made


class GraphMask(BlockMask):
    """A graph in the place of a mask. A BlockMask is handed through; of other objects transformers asks more."""

    def __init__(self, graph: Graph, shape: tuple[int, ...]) -> None:
        self.graph, self._shape = graph, shape

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, 1, queries, keys)"""
        return self._shape

    def __repr__(self) -> str:
        return f"GraphMask({self.graph!r})"

    __str__ = __repr__


class Attention(MessagePassing):
    """One edge of scaled dot-product attention with what models add to it."""

    softmax, softmax_and_lse = online_softmax(), online_softmax(return_lse=True)

    def edge(
        self, src: Any, dst: Any, edge: Any, scale: Any, dropout: tuple, softcap: Any = None, sink: Any = None
    ) -> Any:
        score = (src.key * dst.query).sum(dim=-1) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if "bias" in edge:
            score = score + edge.bias
        if "keep" in edge:
            score = torch.where(edge.keep, score, -torch.inf)
        value = src.value
        if dropout:
            # weights are dropped after they are normalised: what they multiply is dropped instead
            kept = torch.nn.functional.dropout(torch.ones_like(score), *dropout)
            value = value * kept.unsqueeze(-1)
        if sink is None:
            return self.softmax(score, value)
        out, lse = self.softmax_and_lse(score, value)
        # a sink takes part in the softmax and gives nothing
        return out * torch.sigmoid(lse - sink).unsqueeze(-1)


_attention = Attention()


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: GraphMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """(out (batch, queries, heads, width), None) of query (batch, heads, queries, width), key, value of fewer heads.

    attention_mask: what `mask` gave; or (batch | 1, heads | 1, queries, keys), booleans that keep pairs or numbers that
    are added; or None, which is causal where the module says so. position_bias: added, of that shape. s_aux: (heads,).
    """
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    given: Graph | Tensor
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        given = _graph(rows, key.shape[2], causal and rows > 1, sliding_window)
    else:
        given = attention_mask if isinstance(attention_mask, Tensor) else attention_mask.graph
    graph, edge = _pairs(given, position_bias, rows, key.shape[2], groups)
    fields = [t.permute(2, 0, 1, 3) for t in (query, key, value)]  # a batch is one more dimension of heads
    packed = batch > 1 and graph.num_dst == batch * rows
    if packed or batch == 1:
        fields = [t.transpose(0, 1).flatten(0, 1) for t in fields]
        edge = {name: t.squeeze(1) for name, t in edge.items()}
    q, k, v = fields
    q = q.unflatten(-2, (groups, heads // groups))
    k, v = k.unsqueeze(-2), v.unsqueeze(-2)
    out = _attention(
        graph,
        src={"key": k, "value": v.expand(*v.shape[:-2], q.shape[-2], v.shape[-1])},
        dst={"query": q},
        edge=edge,
        scale=width**-0.5 if scaling is None else float(scaling),
        dropout=(dropout,) if dropout else (),
        softcap=None if softcap is None else float(softcap),
        sink=None if s_aux is None else s_aux.reshape(groups, heads // groups),
    )
    out = out.flatten(-3, -2)
    if packed or batch == 1:
        return out.unflatten(0, (batch, rows)), None
    return out.transpose(0, 1), None


def _graph(rows: int, keys: int, causal: bool, sliding_window: int | None) -> Graph:
    if not causal:
        return Graph.dense(rows, keys)
    if sliding_window is not None:
        return Graph.window(rows, sliding_window - 1, num_src=keys)
    return Graph.triangular(rows, keys, offset=0)


def _pairs(given: Graph | Tensor, bias: Tensor | None, rows: int, keys: int, groups: int) -> tuple[Graph, dict]:
    """The graph, and the edge fields (rows * keys, batch, groups, heads of a group) of a dense one."""
    if isinstance(given, Graph):
        if bias is None:
            return given, {}
        # biases of pairs are numbered over all pairs, and so is what is kept of them
        given = _kept(given, rows, keys)
    fields = {"keep" if given.dtype == torch.bool else "bias": given[..., :keys]}
    if bias is not None:
        fields["bias"] = bias + fields["bias"] if "bias" in fields else bias
    return Graph.dense(rows, keys), {name: _by_edge(t, rows, keys, groups) for name, t in fields.items()}


def _kept(graph: Graph, rows: int, keys: int) -> Tensor:
    """Bool (batch, 1, rows, keys) of a graph of a whole batch, or (1, 1, rows, keys) of one that all members share."""
    kept = None
    for start, stop in base_intervals(graph):
        j = torch.arange(keys, device=start.device)
        first = torch.arange(graph.num_dst // rows, device=start.device)[:, None, None] * keys
        low, high = (bound.reshape(-1, rows, 1) - first for bound in (start, stop))
        inside = (j >= low) & (j < high)
        kept = inside if kept is None else kept | inside
    assert kept is not None
    return kept.unsqueeze(1)


def _by_edge(t: Tensor, rows: int, keys: int, groups: int) -> Tensor:
    batch, heads = t.shape[:2]
    t = t.expand(batch, heads, rows, keys).permute(2, 3, 0, 1).reshape(rows * keys, batch, heads)
    return t.unflatten(-1, (groups, heads // groups)) if heads > 1 else t.unsqueeze(-1)
