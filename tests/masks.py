"""Patterns that libraries name, each as it is written with graphs and as the pairs that it keeps."""

from typing import NamedTuple

import torch

import tiga as tg


class Mask(NamedTuple):
    """graph: tiga's spelling; keep: the pairs (i, j) of destination and source; kind: what the graph is, or becomes."""

    name: str
    called: str
    graph: str
    keep: str
    kind: str


MASKS = [
    Mask("full", "bidirectional (HF)", "Graph.dense(n, m)", "j >= 0", "dense"),
    Mask(
        "causal, first rows meet",
        "causal; LowerTriangularMask (xformers)",
        "Graph.triangular(n, m, offset=0)",
        "j <= i",
        "triangular",
    ),
    Mask(
        "causal, last rows meet",
        "decoding with a cache; LowerTriangularFromBottomRightMask (xformers)",
        "Graph.triangular(n, m, offset=m - n)",
        "j <= i + m - n",
        "triangular",
    ),
    Mask(
        "sliding window",
        "sliding_window (HF, attention-gym, FlashMask)",
        "Graph.window(n, left=w - 1)",
        "(j <= i) & (i - j < w)",
        "window",
    ),
    Mask(
        "window to both sides",
        "local attention; bidirectional sliding window (HF)",
        "Graph.window(n, left=w, right=2)",
        "(j >= i - w) & (j <= i + 2)",
        "window",
    ),
    Mask(
        "window, last rows meet",
        "LowerTriangularFromBottomRightLocalAttentionMask (xformers)",
        "Graph.window(n, left=w - 1, num_src=m, offset=m - n)",
        "(j <= i + m - n) & (i + m - n - j < w)",
        "window",
    ),
    Mask(
        "documents",
        "BlockDiagonalMask (xformers); document (FlashMask)",
        "Graph.cu_seqlens(ends, causal=False)",
        "doc[i] == doc[j]",
        "blocks",
    ),
    Mask(
        "causal documents",
        "packed sequences (HF); BlockDiagonalCausalMask (xformers); causal document (FlashMask)",
        "Graph.cu_seqlens(ends)",
        "(doc[i] == doc[j]) & (j <= i)",
        "blocks",
    ),
    Mask(
        "causal documents, queries and keys of other lengths",
        "BlockDiagonalCausalFromBottomRightMask (xformers); varlen (flash-attn)",
        'Graph.cu_seqlens(ends, src_boundaries=src_ends, align="bottom-right")',
        "(doc[i] == src_doc[j]) & (src_stop[doc[i]] - j >= stop[doc[i]] - i)",
        "blocks",
    ),
    Mask(
        "causal documents with a window",
        "BlockDiagonalCausalLocalAttentionMask (xformers)",
        "Graph.cu_seqlens(ends) & Graph.window(n, left=w - 1)",
        "(doc[i] == doc[j]) & (j <= i) & (i - j < w)",
        "intervals",
    ),
    Mask(
        "chunked",
        "chunked attention (HF, Llama 4)",
        "Graph.cu_seqlens([*range(0, n, c), n])",
        "(j <= i) & (j // c == i // c)",
        "blocks",
    ),
    Mask(
        "causal between blocks, full inside",
        "block-causal; autoregressive blocks",
        "Graph.intervals(row * 0, (row // c * c + c).clamp(max=n), n)",
        "j // c <= i // c",
        "intervals",
    ),
    Mask(
        "prefix-LM",
        "prefix_lm (attention-gym); prefix LM causal (FlashMask)",
        "Graph.triangular(n) | Graph.intervals(row * 0, row * 0 + p, n)",
        "(j <= i) | (j < p)",
        "intervals",
    ),
    Mask(
        "prefix-LM of documents",
        "prefix LM document (FlashMask)",
        "Graph.cu_seqlens(ends) | Graph.intervals(first, (first + 2).minimum(last), n)",
        "(doc[i] == doc[j]) & ((j <= i) | (j - first[i] < 2))",
        "intervals",
    ),
    Mask(
        "images in text",
        "blockwise_overlay (HF); transfusion, vision causal (attention-gym)",
        "Graph.triangular(n) | Graph.intervals(image, image_stop, n)",
        "(j <= i) | ((image[i] <= j) & (j < image_stop[i]))",
        "intervals",
    ),
    Mask(
        "sinks and a window",
        "StreamingLLM; global + sliding window (FlashMask)",
        "(Graph.window(n, left=w) | Graph.intervals(row * 0, row * 0 + 2, n)) & Graph.triangular(n)",
        "(j <= i) & ((i - j <= w) | (j < 2))",
        "intervals",
    ),
    Mask(
        "global and local",
        "Longformer; BigBird without its random part",
        "Graph.window(n, w, w) | Graph.intervals(row * 0, torch.where(row < 2, n, 2), n)",
        "((j - i).abs() <= w) | (i < 2) | (j < 2)",
        "intervals",
    ),
    Mask(
        "shared prefix",
        "shared question (FlashMask); several continuations of one prompt",
        "Graph.cu_seqlens(ends) | Graph.intervals(row * 0, (row + 1).clamp(max=4), n)",
        "(j <= i) & ((doc[i] == doc[j]) | (j < 4))",
        "intervals",
    ),
    Mask(
        "examples, then a question that sees them all",
        "causal blockwise (FlashMask)",
        "Graph.cu_seqlens(ends) | Graph.intervals(row * 0, torch.where(row >= 9, row + 1, 0), n)",
        "(j <= i) & ((doc[i] == doc[j]) | (i >= 9))",
        "intervals",
    ),
    Mask(
        "padding on the right",
        "padding mask (HF); BlockDiagonalPaddedKeysMask (xformers)",
        "Graph.intervals(batch[seq], batch[seq] + kept[seq], 3 * m)",
        "(j // m == i // 5) & (j % m < kept[i // 5])",
        "intervals",
    ),
    Mask(
        "padding on the left",
        "padding mask (HF)",
        "Graph.intervals(batch[seq] + m - kept[seq], batch[seq] + m, 3 * m)",
        "(j // m == i // 5) & (m - j % m <= kept[i // 5])",
        "intervals",
    ),
    Mask(
        "keys with gaps between sequences",
        "BlockDiagonalGappyKeysMask (xformers)",
        "Graph.intervals(batch[seq] + 1, batch[seq] + kept[seq], 3 * m)",
        "(j // m == i // 5) & (j % m >= 1) & (j % m < kept[i // 5])",
        "intervals",
    ),
    Mask(
        "keys that are evicted",
        "random eviction (FlashMask)",
        "Graph.intervals(row, evicted, n).reverse()",
        "(j <= i) & (i < evicted[j])",
        "intervals, reversed",
    ),
    Mask(
        "dilated window",
        "dilated_sliding_window (attention-gym)",
        "Graph.from_edge_index(listed((row[:, None] - 2 * torch.arange(w)), n), n, n)",
        "(j <= i) & (i - j < 2 * w) & ((i - j) % 2 == 0)",
        "csr",
    ),
    Mask(
        "strided",
        "Sparse Transformer",
        "Graph.window(n, left=c - 1) | Graph.from_edge_index(listed(row[:, None] - c * (row + 1), n), n, n)",
        "(j <= i) & ((i - j < c) | ((i - j) % c == 0))",
        "csr",
    ),
    Mask(
        "tree",
        "speculative decoding; each node sees its ancestors",
        "Graph.from_edge_index(listed(ancestors, n), n, n)",
        "(ancestors[i] == j[..., None]).any(-1)",
        "csr",
    ),
    Mask(
        "neighbourhood in an image",
        "natten (attention-gym), unclamped at borders",
        "Graph.radius(grid, 1.5, loop=True)",
        "(grid[i] - grid[j]).abs().amax(-1) <= 1",
        "csr",
    ),
    Mask(
        "blocks of a list",
        "BigBird's random blocks; block-sparse (xformers)",
        "Graph.from_edge_index(pairs.nonzero().T.flip(0), m, n)",
        "pairs[i, j]",
        "csr",
    ),
]


def listed(sources: torch.Tensor, num_src: int) -> torch.Tensor:
    """Edges (2, num_edges) of the sources of each row (rows, k) that exist."""
    valid = (sources >= 0) & (sources < num_src)
    rows = torch.arange(len(sources))[:, None].expand_as(sources)
    return torch.stack([sources[valid], rows[valid]])


def names(n: int, m: int) -> dict:
    """What the expressions may speak of: n destinations of which 13 or more, m sources."""
    ends, src_ends = [0, 4, 4, 9, n], [0, 3, 5, 5, m]
    row = torch.arange(n)
    doc, src_doc = (torch.bucketize(torch.arange(e[-1]), torch.tensor(e), right=True) - 1 for e in (ends, src_ends))
    starts, stops = torch.tensor(ends[:-1]), torch.tensor(ends[1:])
    parents = [-1, 0, 0, 1, 1, 2, 5, 6, *range(7, n - 1)]
    ancestors = torch.full((n, n), -1)
    for i in range(n):
        path = [i]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        ancestors[i, : len(path)] = torch.tensor(path)
    return {
        "torch": torch, "Graph": tg.Graph, "listed": listed, "n": n, "m": m, "w": 4, "c": 5, "p": 3, "row": row,
        "ends": ends, "src_ends": src_ends, "doc": doc, "src_doc": src_doc, "stop": stops,
        "src_stop": torch.tensor(src_ends[1:]), "first": starts[doc], "last": stops[doc],
        "image": torch.where((row >= 6) & (row < 10), 6, 0), "image_stop": torch.where((row >= 6) & (row < 10), 10, 0),
        "batch": torch.arange(3) * m, "seq": torch.arange(15) // 5, "kept": torch.tensor([m, 0, 2]),
        "evicted": (row + 1 + row * 7 % 5).clamp(max=n), "ancestors": ancestors,
        "grid": torch.stack([row // 4, row % 4], 1).double(),
        "pairs": (torch.arange(n)[:, None] // 3 * 5 + torch.arange(m) // 4 * 3) % 4 == 0,
    }  # fmt: skip


def graph_of(mask: Mask, n: int, m: int) -> tg.Graph:
    return eval(mask.graph, names(n, m))


def keep_of(mask: Mask, n: int, m: int, graph: tg.Graph) -> torch.Tensor:
    """Bool (num_dst, num_src), from the expression alone."""
    i, j = torch.arange(graph.num_dst)[:, None], torch.arange(graph.num_src)
    return eval(mask.keep, {**names(n, m), "i": i, "j": j}).expand(graph.num_dst, graph.num_src)


def table() -> str:
    """The table of docs/masks.md."""
    rows = [
        f"| {mask.name} | {mask.called} | `{escaped(mask.graph)}` | `{escaped(mask.keep)}` | {mask.kind} |"
        for mask in MASKS
    ]
    return "\n".join(["| pattern | also called | written | pairs kept | kind |", "|---|---|---|---|---|", *rows])


def escaped(code: str) -> str:
    return code.replace("|", "\\|")


class Score(NamedTuple):
    """line: how an edge function says it; src.pos and dst.pos are the rows' own numbers, features are heads."""

    name: str
    called: str
    line: str


SCORES = [
    Score("softcap", "Gemma 2; attention-gym", "2 * torch.tanh(score / 2)"),
    Score("ALiBi", "Press et al. 2022", "score + slopes * (src.pos - dst.pos).unsqueeze(-1)"),
    Score(
        "relative bias",
        "T5, Swin: a learned table of distances",
        "score + torch.nn.functional.embedding((dst.pos - src.pos).clamp(-4, 4) + 4, distances)",
    ),
    Score("bias of each pair", "LowerTriangularMaskWithTensorBias (xformers), AlphaFold", "score + edge.bias"),
    Score("temperature", "one for each query and head", "score * dst.temperature"),
    Score(
        "logarithmic decay",
        "KERPLE",
        "score + slopes * (dst.pos - src.pos).abs().log1p().unsqueeze(-1)",
    ),
    Score(
        "a mask of each head",
        "heads with windows of their own",
        "torch.where((dst.pos - src.pos).unsqueeze(-1) < widths, score, -torch.inf)",
    ),
]


def scores_table() -> str:
    rows = [f"| {s.name} | {s.called} | `{escaped(s.line)}` |" for s in SCORES]
    return "\n".join(["| score | as in | written in `edge` |", "|---|---|---|", *rows])
