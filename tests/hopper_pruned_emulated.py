"""Hopper kernels that skip tiles, on a CPU: their text by threads, all others under Triton's interpreter.

test_hopper_pruned.py starts these with `-p interpreted`.
"""

import gluon_emulated
import pruning
import pytest
import torch
import triton

import tiga as tg
from tiga import prune

TILE, HEADS, WIDTH = (64, 128), 2, 64


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """What Gluon kernels ran."""
    monkeypatch.setattr(prune, "DEVICES", {"cpu"})
    torch.manual_seed(0)
    return gluon_emulated.stand_in(monkeypatch, {("band", WIDTH): (0, 0)})


class Attention(tg.MessagePassing):
    def __init__(self, **options):
        super().__init__()
        self.reducer = tg.online_softmax(prune_tile=TILE, **options)

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Capped(Attention):
    """A score that is no multiple of a product."""

    def edge(self, src, dst, edge, scale):
        score = 30 * torch.tanh((src.key * dst.query).sum(-1) * scale / 30) + dst.shift
        return self.reducer(score, src.value)


def planted(n, m, share=0.4):
    """Of the tiles of keys some, and the first, score far above the others, for every query."""
    draw = lambda rows: torch.randn(rows, HEADS, WIDTH)
    loud = torch.rand(-(-m // TILE[1]), HEADS) < share
    loud[0] = True
    loud = loud.repeat_interleave(TILE[1], 0)[:m, :, None]
    towards = torch.randn(HEADS, WIDTH)
    query = towards + draw(n) / 4
    key = torch.where(loud, 12 * WIDTH**0.5, 0.0) * towards / towards.square().sum(-1, keepdim=True) + draw(m) / 4
    return [x.half() for x in (query, key, draw(m))]


def window(n):
    i = torch.arange(n)
    return tg.Graph.window(n, 300, 20), (i <= i[:, None] + 20) & (i >= i[:, None] - 300)


GRAPHS = {
    "causal": lambda: (tg.Graph.triangular(700), torch.ones(700, 700).tril().bool()),
    "causal, few": lambda: (tg.Graph.triangular(65), torch.ones(65, 65).tril().bool()),
    "one": lambda: (tg.Graph.triangular(1), torch.ones(1, 1).bool()),
    "dense": lambda: (tg.Graph.dense(200, 900), torch.ones(200, 900).bool()),
    "offset": lambda: (tg.Graph.triangular(500, 500, offset=-37), torch.ones(500, 500).tril(-37).bool()),
    "rows without keys": lambda: (tg.Graph.triangular(300, 300, offset=-140), torch.ones(300, 300).tril(-140).bool()),
    "window": lambda: window(500),
}
RULES = {"peak": {"rho": 1e-3}, "nothing": {"rho": 1e-30}, "mass": {"eps": 0.05}}
OPTIONS = {"rho": "block_prune_threshold", "eps": "prune_mass"}


def attend(module, graph, q, k, v, scale=WIDTH**-0.5, **dst):
    out = module(graph=graph, src={"key": k, "value": v}, dst={"query": q, **dst}, scale=scale)
    return out, module.last_report


def check(out, report, q, k, v, mask, scale, head, **rule):
    """One head against the rule written out; what was kept."""
    score = scale * q[:, head].double() @ k[:, head].double().T
    judged = pruning.judge(score, mask, TILE, pruning.starts([0, len(q)], TILE[0]), **rule)
    counts = zip(*(x[:, head].tolist() for x in (report.visited, report.skipped, report.absent)))
    assert list(counts) == judged.counts
    exact = pruning.softmax(score, judged.kept, v[:, head].double())
    torch.testing.assert_close(out[:, head].double(), exact, rtol=2e-3, atol=2e-3)
    certificate = report.certificate[:, head].double()
    assert (certificate >= pruning.omitted(score, mask, judged.kept)).all()
    torch.testing.assert_close(certificate, judged.bound, rtol=1e-3, atol=1e-6)
    return judged


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_rule_is_the_rule(graph, rule, ran):
    name = graph
    graph, mask = GRAPHS[name]()
    q, k, v = planted(*mask.shape)
    with torch.no_grad():
        out, report = attend(Attention(**{OPTIONS[x]: y for x, y in RULES[rule].items()}), graph, q, k, v)
    assert len(ran) == 1
    for head in range(HEADS):
        check(out, report, q, k, v, mask, WIDTH**-0.5, head, **RULES[rule])
    if name in ("causal", "dense", "window"):
        assert (report.skipped.sum() > 0) == (rule != "nothing")


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_any_factor(scale, ran):
    graph, mask = GRAPHS["causal"]()
    q, k, v = planted(700, 700)
    with torch.no_grad():
        out, report = attend(Attention(block_prune_threshold=0.01), graph, q, k, v, scale)
    check(out, report, q, k, v, mask, scale, 1, rho=0.01)
    assert len(ran) == 1


def test_a_threshold_a_head(ran):
    graph, mask = GRAPHS["causal"]()
    q, k, v = planted(700, 700)
    rho = torch.tensor([1e-30, 1e-3])
    with torch.no_grad():
        out, report = attend(Attention(block_prune_threshold=rho), graph, q, k, v)
    for head in range(HEADS):
        check(out, report, q, k, v, mask, WIDTH**-0.5, head, rho=rho[head].item())
    assert len(ran) == 1 and report.skipped[:, 0].sum() == 0 < report.skipped[:, 1].sum()


def test_any_score(ran):
    graph, mask = GRAPHS["causal"]()
    q, k, v = planted(700, 700)
    shift = torch.randn(700, 1)
    with torch.no_grad():
        out, report = attend(Capped(prune_mass=0.05), graph, q, k, v, shift=shift)
    score = 30 * torch.tanh(q[:, 0].double() @ k[:, 0].double().T * WIDTH**-0.5 / 30) + shift
    judged = pruning.judge(score, mask, TILE, pruning.starts([0, 700], TILE[0]), eps=0.05)
    assert report.skipped[:, 0].tolist() == [x[1] for x in judged.counts] and len(ran) == 1
    exact = pruning.softmax(score, judged.kept, v[:, 0].double())
    torch.testing.assert_close(out[:, 0].double(), exact, rtol=2e-3, atol=2e-3)


def test_gaps_are_recorded(ran):
    graph, mask = GRAPHS["causal"]()
    q, k, v = planted(700, 700)
    with torch.no_grad(), prune.recording():
        _, report = attend(Attention(block_prune_threshold=1e-3), graph, q, k, v)
    score = WIDTH**-0.5 * q[:, 1].double() @ k[:, 1].double().T
    judged = pruning.judge(score, mask, TILE, pruning.starts([0, 700], TILE[0]), rho=1e-30)
    found = report.gaps.reshape(HEADS, -1, report.gaps.shape[-1])[1]
    gaps = torch.tensor(sorted(judged.gaps))
    seen = torch.cat([row[: n[0]] for row, n in zip(found, judged.counts)]).double().sort().values
    torch.testing.assert_close(seen, gaps.double(), rtol=1e-4, atol=1e-3)
    assert len(ran) == 1


def test_gradients_are_those_of_the_pairs_that_were_kept(rule="peak"):
    graph, mask = tg.Graph.triangular(200), torch.ones(200, 200).tril().bool()
    leaves = [x.requires_grad_() for x in planted(200, 200)]
    q, k, v = leaves
    out, report = attend(
        Attention(prune_backward=True, **{OPTIONS[x]: y for x, y in RULES[rule].items()}), graph, q, k, v
    )
    given = torch.randn_like(out)
    with torch.no_grad():
        judged = check(out, report, q, k, v, mask, WIDTH**-0.5, 1, **RULES[rule])
    got = torch.autograd.grad(out, leaves, given)
    exact = [x.detach()[:, 1].double().requires_grad_() for x in leaves]
    score = (WIDTH**-0.5 * exact[0] @ exact[1].T).masked_fill(~judged.kept, -torch.inf)
    wanted = torch.autograd.grad(score.softmax(1) @ exact[2], exact, given[:, 1].double())
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x[:, 1].double(), y, rtol=1e-2, atol=1e-2 * y.abs().max().item())


def test_what_is_no_number_is_done_again():
    """A row of nan is nan, a value that is not finite reaches the rows that weigh it, and all else is as without."""
    graph = tg.Graph.triangular(150)
    q, k, v = planted(150, 150)
    module = Attention(block_prune_threshold=1e-3)
    with torch.no_grad():
        clean, report = attend(module, graph, q, k, v)
        q, v = q.clone(), v.clone()
        q[140], v[145] = torch.nan, torch.inf
        out, again = attend(module, graph, q, k, v)
    assert out[140].isnan().all() and out[145:].isinf().all()
    rest = [i for i in range(145) if i != 140]
    torch.testing.assert_close(out[rest], clean[rest], rtol=2e-3, atol=2e-3)
    assert torch.equal(again.visited, report.visited) and torch.equal(again.skipped[0], report.skipped[0])


assert triton.knobs.runtime.interpret
