"""Jagged tensors of torch.nested through attention, against plain torch sequence by sequence."""

import doctest

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tiga as tg
from tiga.integrations import nested

ROWS, SOURCES = (3, 0, 5, 1), (2, 4, 5, 0)


def jagged(lengths, *features, grad=False):
    parts = [torch.randn(n, *features, dtype=torch.float64) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=grad)


def plain(query, key, value, offset=None):
    """Sequences apart; offset: of the causal diagonal, by the numbers of rows, or None."""
    outs = []
    for q, k, v in zip(query.unbind(), key.unbind(), value.unbind()):
        n, m = len(q), len(k)
        keep = torch.ones(n, m, dtype=torch.bool) if offset is None else torch.ones(n, m).tril(offset(n, m)).bool()
        out = sdpa(*[t.transpose(0, 1) for t in (q, k, v)], attn_mask=keep).transpose(0, 1)
        outs.append(torch.where(keep.any(1)[:, None, None], out, 0.0))
    return torch.cat(outs)


CALLS = {
    "full": ({}, None),
    "top-left": ({"causal": True, "align": "top-left"}, lambda n, m: 0),
    "bottom-right": ({"causal": True, "align": "bottom-right"}, lambda n, m: m - n),
}


@pytest.mark.parametrize("name", CALLS)
def test_sequences_attend_to_their_own(name):
    given, offset = CALLS[name]
    query, key = jagged(ROWS, 2, 4, grad=True), jagged(SOURCES, 2, 4, grad=True)
    value = key * 2 + 1
    out = nested.attention(query, key, value, **given)
    assert out.is_nested and out.shape[1] == query.shape[1] and torch.equal(out.offsets(), query.offsets())
    wanted = plain(query, key, value, offset)
    torch.testing.assert_close(out.values(), wanted)
    weight = torch.randn_like(wanted)
    grads = torch.autograd.grad((out.values() * weight).sum(), (query, key), retain_graph=True)
    for ours, theirs in zip(grads, torch.autograd.grad((wanted * weight).sum(), (query, key))):
        torch.testing.assert_close(ours.values(), theirs.values())


def test_causal_needs_no_alignment_where_lengths_are_equal():
    query, key = jagged(ROWS, 1, 4), jagged(ROWS, 1, 4)  # made apart: equal, and not the same
    out = nested.attention(query, key, key, causal=True)
    torch.testing.assert_close(out.values(), plain(query, key, key, lambda n, m: 0))
    with pytest.raises(tg.TigaError, match="src_boundaries.*bottom-right"):
        nested.attention(query, jagged(SOURCES, 1, 4), jagged(SOURCES, 1, 4), causal=True)


def test_compiles_whole():
    def attend(x):
        return nested.attention(x, x, x.sin(), causal=True)

    for lengths in (ROWS, SOURCES):
        x = jagged(lengths, 2, 4)
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(out.values(), attend(x).values())


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: nested.attention(x, x.values(), x), "key is Tensor, not a jagged tensor.*layout=torch.jagged"),
        (lambda x: nested.attention(x.transpose(1, 2), x, x), r"rows of query are dimension 2.*transpose\(2, 1\)"),
        (lambda x: nested.attention(x, x, jagged(SOURCES, 2, 4)), "key and value are packed differently"),
        (
            lambda x: nested.attention(
                torch.nested.narrow(
                    torch.randn(2, 5, 2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
                ),
                x,
                x,
            ),
            r"query has holes.*query.contiguous\(\)",
        ),
    ],
)
def test_refuses(call, words):
    with pytest.raises(tg.TigaError, match=words):
        call(jagged(ROWS, 2, 4))


def test_doctest():
    assert doctest.testmod(nested) == (0, 3)
