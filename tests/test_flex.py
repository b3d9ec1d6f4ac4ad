"""tg.flex_attention beside torch's own, whose score_mods it takes unchanged."""

import doctest

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention as plain

import tiga as tg
from tiga import flex

BATCH, HEADS, ROWS, COLUMNS = 2, 4, 5, 7
SLOPES = torch.rand(HEADS, dtype=torch.float64)
TABLE = torch.randn(32, dtype=torch.float64)
BIAS = torch.randn(HEADS, ROWS, COLUMNS, dtype=torch.float64)
OF_BATCH = torch.randn(BATCH, COLUMNS, dtype=torch.float64)
DOCUMENT = torch.tensor([0, 0, 1, 1, 1, 2, 2])
PER_HEAD = torch.randn(12, HEADS, dtype=torch.float64)

SCORE_MODS = {
    "noop": None,
    "softcap": lambda score, b, h, q_idx, kv_idx: 2 * torch.tanh(score / 2),
    "alibi": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "alibi of slopes": lambda score, b, h, q_idx, kv_idx: score + SLOPES[h] * (kv_idx - q_idx),
    "relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "relative table": lambda score, b, h, q_idx, kv_idx: score + TABLE[q_idx - kv_idx + COLUMNS],
    "relative table of heads": lambda score, b, h, q_idx, kv_idx: score + PER_HEAD[kv_idx - q_idx + ROWS - 1, h],
    "bias": lambda score, b, h, q_idx, kv_idx: score + BIAS[h, q_idx, kv_idx],
    "bias from the end": lambda score, b, h, q_idx, kv_idx: score + BIAS[-1, q_idx - ROWS, -kv_idx],
    "of the batch": lambda score, b, h, q_idx, kv_idx: score * OF_BATCH[b, kv_idx] + b,
    "tanh of distance": lambda score, b, h, q_idx, kv_idx: score * torch.tanh((q_idx - kv_idx).abs() + SLOPES[h]),
    "causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
    "documents": lambda score, b, h, q_idx, kv_idx: torch.where(
        (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) | (kv_idx % 3 == 0), score, -float("inf")
    ),
    "dilated": lambda score, b, h, q_idx, kv_idx: torch.where((q_idx - kv_idx) % 2 == 0, score, -float("inf")),
    "checkerboard": lambda score, b, h, q_idx, kv_idx: torch.where(
        torch.abs(q_idx - kv_idx) % 2 == 1, score * 0.5, torch.where((q_idx + kv_idx) // 2 > h, score * 2, score)
    ),
}


def fields(heads=HEADS, rows=ROWS, columns=COLUMNS):
    query = torch.randn(BATCH, HEADS, rows, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(BATCH, heads, columns, d, dtype=torch.float64, requires_grad=True) for d in (8, 6))
    return query, key, value


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_are_traced_unchanged(name, groups):
    given, score_mod = fields(groups), SCORE_MODS[name]
    more = {"enable_gqa": groups != HEADS, "scale": 8**-0.5}
    out = tg.flex_attention(*given, score_mod, **more)
    # torch's own has no gradient on a CPU
    torch.testing.assert_close(out.detach(), plain(*[t.detach() for t in given], score_mod, **more))
    query, key, value = given
    keys, values = (t.repeat_interleave(HEADS // groups, 1) for t in (key, value))
    wanted, _ = attend(query, keys, values, torch.ones(ROWS, COLUMNS, dtype=torch.bool), score_mod)
    weight = torch.randn_like(wanted)
    for ours, theirs in zip(torch.autograd.grad(out, given, weight), torch.autograd.grad(wanted, given, weight)):
        torch.testing.assert_close(ours, theirs)


def attend(query, key, value, keep, score_mod):
    """(out, lse) by whole score matrices."""
    score = query @ key.mT * query.shape[-1] ** -0.5
    places = [torch.arange(n).reshape(-1, *[1] * (3 - d)) for d, n in enumerate(score.shape)]
    score = (score if score_mod is None else score_mod(score, *places)).masked_fill(~keep, -torch.inf)
    return torch.where(keep.any(-1)[:, None], score.softmax(-1), 0.0) @ value, score.logsumexp(-1)


@pytest.mark.parametrize(
    "graph",
    [
        tg.Graph.triangular(ROWS, COLUMNS, offset=-2),
        tg.Graph.window(ROWS, 1, num_src=COLUMNS),
        tg.Graph.dense(ROWS, COLUMNS).to_csr(),
    ],
    ids=repr,
)
def test_a_graph_stands_for_the_mask(graph):
    given = fields()
    out, lse = tg.flex_attention(*given, SCORE_MODS["bias"], graph=graph, return_lse=True)
    wanted = attend(*given, graph.to_mask(), SCORE_MODS["bias"])
    torch.testing.assert_close((out, lse), wanted)


def test_gradients_reach_captured_tensors():
    table = torch.randn(ROWS + COLUMNS, dtype=torch.float64, requires_grad=True)
    given, graph = fields(), tg.Graph.triangular(ROWS, COLUMNS, offset=2)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + COLUMNS]

    out = tg.flex_attention(*given, relative, graph=graph)
    wanted, _ = attend(*given, graph.to_mask(), relative)
    weight = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(x, table, weight)[0] for x in (out, wanted))
    assert theirs.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs)


def test_compiles_whole():
    given, score_mod = fields(), SCORE_MODS["relative table"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(query, key, value):
        return tg.flex_attention(query, key, value, score_mod, graph=tg.Graph.triangular(ROWS, COLUMNS, offset=2))

    eager = tg.flex_attention(*given, score_mod, graph=tg.Graph.triangular(ROWS, COLUMNS, offset=2))
    torch.testing.assert_close(call(*given), eager)


X = torch.zeros(1, 2, 3, 4)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: tg.flex_attention(X[0], X, X), r"query has shape \(2, 3, 4\).*\(batch, heads, rows, width\)"),
        (lambda: tg.flex_attention(X, X[..., :2], X), r"key \(1, 2, 3, 2\).*widths"),
        (lambda: tg.flex_attention(X, X[:, :1], X[:, :1]), "query has 2 heads, key 1.*enable_gqa=True"),
        (lambda: tg.flex_attention(X, X, X, graph=tg.Graph.dense(4)), r"Graph.dense\(4\).*query has 3 rows and key 3"),
        (lambda: tg.flex_attention(X, X, X, lambda s, b, h, q, kv: s if q > kv else -s), "`if`.*torch.where"),
        (lambda: tg.flex_attention(X, X, X, lambda s, b, h, q, kv: s + TABLE[q, kv]), "2 positions.*1 dimensions"),
        (
            lambda: tg.flex_attention(X, X, X, lambda s, b, h, q, kv: s + BIAS[:, q, kv]),
            "at slice.*first dimensions",
        ),
    ],
)
def test_refuses(call, words):
    with pytest.raises(tg.TigaError, match="(?s)" + words):
        call()


def test_doctest():
    assert doctest.testmod(flex) == (0, 3)
