"""Skipping tiles on a CUDA device, against the rules written out in float64; pruned_interpreted.py runs these on a CPU."""

import math

import pruning
import pytest
import test_gpu_sample
import torch

import tiga as tg

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TILE = (64, 32)
ROWS, HEADS, WIDTH = 300, 2, 32


def intervals(n):
    """Of different starts and lengths; every fifth row is empty."""
    start = torch.randint(n // 4, (n,), device=DEVICE)
    stop = start + torch.randint(1, n // 2, (n,), device=DEVICE)
    stop[::5] = start[::5]
    j = torch.arange(n, device=DEVICE)
    return tg.Graph.intervals(start, stop, n), (j >= start[:, None]) & (j < stop[:, None])


KINDS = test_gpu_sample.KINDS | {"intervals": intervals}


class Attention(tg.MessagePassing):
    def __init__(self, **options):
        super().__init__()
        self.reducer = tg.online_softmax(prune_tile=TILE, **options)

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def planted(n, m, dtype=torch.float32, loud=6.0):
    """Queries, keys and values; every other tile of keys matters, more or less by head."""
    draw = lambda rows: torch.randn(rows, HEADS, WIDTH, device=DEVICE, dtype=dtype)
    q, k, v = draw(n), draw(m), draw(m)
    near = torch.arange(m, device=DEVICE) // TILE[1] % 2 == 0
    direction = torch.randn(HEADS, WIDTH, device=DEVICE, dtype=dtype)
    q = q / 2 + direction
    k = k / 4 + torch.where(near[:, None, None], loud, 0.0) * direction / WIDTH * torch.tensor([[1.0], [2.0]], device=DEVICE)
    return q.to(dtype), k.to(dtype), v


def scores(q, k, scale):
    return torch.einsum("ihd,jhd->hij", q.double(), k.double()).cpu() * scale


def segments(name, n):
    return [0, n // 50, n // 50, n // 3, n] if name == "blocks" else [0, n]


def relation(name, n):
    """(graph, mask, query blocks, order, pairs of first intervals)."""
    graph, mask = KINDS[name](n)
    mask = mask.expand(graph.num_dst, graph.num_src).cpu()
    order = {"double": "in turn", "reversed": "ascending"}.get(name, "once")
    first = mask & (torch.arange(mask.shape[1]) < 4) if name == "double" else None
    return graph, mask, pruning.starts(segments(name, n), TILE[0]), order, first


def attend(module, graph, q, k, v, scale=0.5):
    return module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=scale)


def compare(out, report, score, mask, value, judged):
    """The result, the counts and the certificate of every head against those of the rule written out."""
    assert report.tile == TILE
    for h, j in enumerate(judged):
        assert [tuple(x) for x in zip(*(y[:, h].tolist() for y in (report.visited, report.skipped, report.absent)))] == (
            j.counts
        )
        exact = pruning.softmax(score[h], j.kept, value[:, h].double().cpu())
        eps = torch.finfo(out.dtype).eps
        torch.testing.assert_close(out[:, h].double().cpu(), exact, rtol=8 * eps, atol=40 * eps)
        certificate = report.certificate[:, h].double().cpu()
        assert (certificate >= pruning.omitted(score[h], mask, j.kept)).all()
        torch.testing.assert_close(certificate, j.bound, rtol=1e-3, atol=1e-6)


RULES = {"peak": {"rho": 0.05}, "mass": {"eps": 0.02}}
OPTIONS = {"rho": "block_prune_threshold", "eps": "prune_mass"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_is_the_rule(kind, rule):
    """Something is skipped, and what is skipped is exactly what the rule says, tile by tile."""
    q, k, v = planted(ROWS, KINDS[kind](ROWS)[0].num_src)
    graph, mask, blocks, order, first = relation(kind, ROWS)
    module = Attention(**{OPTIONS[x]: y for x, y in RULES[rule].items()})
    out = attend(module, graph, q, k, v)
    score = scores(q, k, 0.5)
    judged = [pruning.judge(score[h], mask, TILE, blocks, **RULES[rule], order=order, first=first) for h in range(HEADS)]
    report = module.last_report
    compare(out, report, score, mask, v, judged)
    assert 0 < report.skipped.sum() < report.visited.sum()
    exact = attend(test_gpu_sample.Attention(), graph, q, k, v)
    lost = (out - exact).norm() / exact.norm()
    assert lost > (1e-3 if rule == "peak" else 1e-6), lost
    if rule == "mass":
        assert report.certificate.max() <= 0.02
