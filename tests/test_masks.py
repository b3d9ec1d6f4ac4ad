"""The mask zoo: every pattern of tests/masks.py against a boolean mask, and attention over it against whole matrices.

`python tests/test_masks.py` writes the tables of docs/masks.md, which a test holds against the same rows.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiga as tg

from masks import MASKS, SCORES, graph_of, keep_of, scores_table, table  # isort: skip

PAGE = Path(__file__).parent.parent / "docs" / "masks.md"
SIZES = [(13, 17), (14, 9)]
HEADS, WIDTH = 2, 4


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax(return_lse=True)

    def edge(self, src, dst, edge):
        return self.reducer((src.key * dst.query).sum(-1), src.value)


def plain(score, value, keep):
    """(out, lse) of scores (n, m, heads) and values (m, heads, features) over the pairs that are kept."""
    score = score.masked_fill(~keep[..., None], -torch.inf)
    weight = torch.where(score.isneginf().all(1, keepdim=True), 0.0, score.softmax(1))
    return torch.einsum("ijh,jhd->ihd", weight, value), score.logsumexp(1)


def fields(n, m):
    shapes = (n, HEADS, WIDTH), (m, HEADS, WIDTH), (m, HEADS, 3)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("n, m", SIZES)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_graph_is_the_mask(mask, n, m):
    graph = graph_of(mask, n, m)
    keep = keep_of(mask, n, m, graph)
    assert torch.equal(graph.to_mask(), keep) and graph.num_edges == keep.sum() and keep.any()
    assert graph.kind + (", reversed" if graph.reversed else "") == mask.kind


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_attention_over_the_graph_is_masked_attention(mask):
    n, m = SIZES[1]
    graph = graph_of(mask, n, m)
    query, key, value = given = fields(graph.num_dst, graph.num_src)
    out = Attention()(graph, src={"key": key, "value": value}, dst={"query": query})
    score = torch.einsum("ihd,jhd->ijh", query, key)
    wanted = plain(score, value, keep_of(mask, n, m, graph))
    torch.testing.assert_close(out, wanted)
    weight = torch.randn_like(wanted[0])
    grads = [torch.autograd.grad(result[0], given, weight) for result in (out, wanted)]
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)


def test_some_rows_are_empty():
    """So that the zoo says what becomes of them."""
    n, m = SIZES[1]
    empty = [
        mask.name for mask in MASKS if (graph := graph_of(mask, n, m)).num_dst and bool((~graph.to_mask().any(1)).any())
    ]
    assert {"causal, last rows meet", "padding on the right", "blocks of a list"} <= set(empty)


class Scored(tg.MessagePassing):
    reducer = tg.online_softmax(return_lse=True)

    def edge(self, src, dst, edge, line, **tensors):
        score = (src.key * dst.query).sum(-1)
        return self.reducer(
            eval(line, {"torch": torch, "score": score, "src": src, "dst": dst, "edge": edge, **tensors}), src.value
        )


@pytest.mark.filterwarnings("ignore:Scored")
@pytest.mark.parametrize("score", SCORES, ids=lambda score: score.name)
def test_scores(score):
    n, m = 6, 9
    query, key, value = fields(n, m)
    tensors = {
        "slopes": -torch.rand(HEADS, dtype=torch.float64),
        "distances": torch.randn(9, HEADS, dtype=torch.float64),
        "widths": torch.tensor([1, 4]),
    }
    bias, temperature = torch.randn(n * m, HEADS, dtype=torch.float64), torch.rand(n, HEADS, dtype=torch.float64)
    i, j = torch.arange(n), torch.arange(m)
    out = Scored()(
        tg.Graph.dense(n, m),
        src={"key": key, "value": value, "pos": j},
        dst={"query": query, "pos": i, "temperature": temperature},
        edge={"bias": bias},
        line=score.line,
        **tensors,
    )
    whole = {
        "torch": torch, "score": torch.einsum("ihd,jhd->ijh", query, key), "src": SimpleNamespace(pos=j),
        "dst": SimpleNamespace(pos=i[:, None], temperature=temperature[:, None]),
        "edge": SimpleNamespace(bias=bias.unflatten(0, (n, m))), **tensors,
    }  # fmt: skip
    wanted = plain(eval(score.line, whole), value, torch.ones(n, m, dtype=torch.bool))
    torch.testing.assert_close(out, wanted)


TABLES = {"masks": table, "scores": scores_table}


def held(name):
    return rf"(?s)(<!-- {name}: written by tests/test_masks.py -->\n\n).*?(\n\n<!-- end -->)"


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_this_table(name):
    found = re.search(held(name), PAGE.read_text(encoding="utf-8"))
    assert found and found[0] == found[1] + TABLES[name]() + found[2]


def main():
    page = PAGE.read_text(encoding="utf-8")
    for name, made in TABLES.items():
        page, count = re.subn(held(name), lambda found, made=made: found[1] + made() + found[2], page)
        assert count == 1
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
