"""Skipping tiles on a CUDA device, against the rules in float64; pruned_interpreted.py runs these on a CPU."""

import math

import pruning
import pytest
import test_gpu_sample
import torch
import triton
import triton.language as tl

import tiga as tg
from tiga.codegen import calls, device_pruned, emit_pruned, plan_pruned, steps
from tiga.codegen.plan_pruned import PrunedPlan

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


def planted(n, m, dtype=torch.float32, loud=10.0):
    """Queries, keys and values; every other tile of keys matters, more or less by head."""
    draw = lambda rows: torch.randn(rows, HEADS, WIDTH, device=DEVICE, dtype=dtype)
    q, k, v = draw(n), draw(m), draw(m)
    near = torch.arange(m, device=DEVICE) // TILE[1] % 2 == 0
    direction = torch.randn(HEADS, WIDTH, device=DEVICE, dtype=dtype)
    q = q / 2 + direction
    k = k / 4 + torch.where(near[:, None, None], loud, 0.0) * direction / WIDTH * torch.tensor(
        [[1.0], [2.0]], device=DEVICE
    )
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
    together = TILE[0] if graph.kind == "intervals" else 0
    return graph, mask, pruning.starts(segments(name, n), TILE[0], together), order, first


def attend(module, graph, q, k, v, scale=0.5):
    return module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=scale)


def compare(out, report, score, mask, value, judged):
    """The result, the counts and the certificate of every head against those of the rule written out."""
    assert report.tile == TILE
    for h, j in enumerate(judged):
        assert [
            tuple(x) for x in zip(*(y[:, h].tolist() for y in (report.visited, report.skipped, report.absent)))
        ] == (j.counts)
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
    judged = [
        pruning.judge(score[h], mask, TILE, blocks, **RULES[rule], order=order, first=first) for h in range(HEADS)
    ]
    report = module.last_report
    compare(out, report, score, mask, v, judged)
    assert 0 < report.skipped.sum() < report.visited.sum()
    exact = attend(test_gpu_sample.Attention(), graph, q, k, v)
    lost = (out - exact).norm() / exact.norm()
    assert lost > (1e-5 if rule == "peak" else 1e-6), lost
    if rule == "mass":
        assert report.certificate.max() <= 0.02


# What the certificate promises.


def report_of(module, graph, q, k, v, **more):
    out = module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5, **more)
    return out, module.last_report


def adversarial(n):
    """The mass of most rows lies in the first tile, whose scores are far below those that two rows of each block have
    in every other tile."""
    draw = lambda: torch.randn(n, HEADS, WIDTH, device=DEVICE) / 4
    towards, tile = torch.randn(HEADS, WIDTH, device=DEVICE).sign(), torch.arange(n, device=DEVICE) // TILE[1]
    size = torch.where(tile == 0, 12.0, torch.where(tile % 2 == 0, 6.0, -6.0)) / WIDTH
    q, k = towards + draw(), size[:, None, None] * towards + draw()
    q[:: TILE[0] // 2] *= -16
    return q, k, draw()


SCORES = {"random": lambda n: planted(n, n, loud=0.0), "planted": lambda n: planted(n, n), "adversarial": adversarial}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("option", [{"block_prune_threshold": 0.3}, {"prune_mass": 0.05}], ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("name", SCORES)
def test_certificate_covers_what_is_left_out(name, option, dtype):
    """The omitted mass in float64, of the pairs that the result itself says were kept: one-hot values show them."""
    q, k, _ = SCORES[name](ROWS)
    q, k = q.to(dtype), k.to(dtype)
    graph, cols = tg.Graph.triangular(ROWS), -(-ROWS // TILE[1])
    tiles = torch.nn.functional.one_hot(torch.arange(ROWS, device=DEVICE) // TILE[1], cols).to(dtype)
    module = Attention(**option)
    out, report = report_of(module, graph, q, k, tiles[:, None].expand(ROWS, HEADS, cols))
    score = scores(q, k, 0.5)
    mask = torch.ones(ROWS, ROWS).tril().bool()
    for h in range(HEADS):
        weight = score[h].masked_fill(~mask, -math.inf).softmax(1)
        per_tile = torch.stack([x.sum(1) for x in weight.split(TILE[1], 1)], 1)
        # all rows of a block keep a tile, or none does
        kept = torch.cat([x.any(0).expand_as(x) for x in (out[:, h] > 0).cpu().split(TILE[0])])
        lost = (per_tile * ~kept).sum(1)
        assert (report.certificate[:, h].double().cpu() >= lost).all()
        if "prune_mass" in option:
            assert lost.max() <= option["prune_mass"]
    if name == "planted":
        assert report.skipped.sum() > 0 and report.certificate.max() > 0
    if name == "adversarial" and "block_prune_threshold" in option:  # what a block's maximum can lose
        assert report.certificate.max() > 0.5


@triton.jit
def skip_all(tops, peak, out, shares, tiles, BLOCK: tl.constexpr):
    """Of each row: what is left out when all tiles of 64 scores are, beside one score that is kept."""
    rows = tl.arange(0, BLOCK)
    omitted = tl.full([BLOCK], float("-inf"), tl.float32)
    for t in range(0, tiles):
        omitted = device_pruned.left_out(omitted, tl.load(tops + t * BLOCK + rows), tl.full([BLOCK], 64.0, tl.float32))
    tl.store(out + rows, omitted)
    kept = tl.load(peak + rows)
    tl.store(shares + rows, device_pruned.certificate(omitted, kept, tl.full([BLOCK], 1.0, tl.float32)))


@pytest.mark.parametrize("high", [-120.0, -0.5, 0.3, 60.0, 120.0])
def test_bounds_hold_over_many_tiles(high):
    """Of tiles that add less than the last digit of what was left out before, and beside what dwarfs all of it."""
    tiles, rows = 400, 16
    steps = torch.logspace(-8, 0, rows, dtype=torch.float64).log() - torch.rand(tiles, 1, dtype=torch.float64)
    steps[0] = 0
    tops = (high + steps).float().to(DEVICE)
    peak = torch.linspace(high - 50, high + 250, rows).to(DEVICE)  # in base 2
    out, shares = torch.empty(2, rows, device=DEVICE)
    skip_all[(1,)](tops, peak, out, shares, tiles, rows)
    exact = (tops.double().logsumexp(0) + math.log(64)) / math.log(2)
    assert (out.double() >= exact).all() and (out.double() <= exact + 0.02).all()
    exact = torch.sigmoid((exact - peak.double()) * math.log(2))
    assert (shares.double() >= exact).all() and (shares.double() <= exact * 1.015 + 2.0**-119).all()


@pytest.mark.parametrize("option", [{"block_prune_threshold": 1.0}, {"prune_mass": 0.5}], ids=lambda x: next(iter(x)))
def test_a_needle_in_the_last_tile_survives(option):
    n = ROWS
    q, k, v = planted(n, n)
    q, k = q.abs() / 4, k * 0.01
    k[: TILE[1]] += 1.0  # the first tile is far above all others
    k[-1] = 8.0
    v[-1] = 100.0
    module = Attention(**option)
    out, report = report_of(module, tg.Graph.dense(n), q, k, v)
    assert report.skipped.sum() > 0
    exact = attend(test_gpu_sample.Attention(), tg.Graph.dense(n), q, k, v)
    assert exact.min() > 90 and out.min() > 90


class Shifted(Attention):
    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale + dst.shift, src.value)


def test_a_constant_added_to_a_row_changes_nothing_under_prune_mass():
    """The block's maximum sees it: there the skipped tiles, and the result, are others."""
    q, k, v = planted(ROWS, ROWS, loud=24.0)
    q[:: TILE[0]] /= 4
    graph = tg.Graph.triangular(ROWS)
    shift = torch.randint(-20, 20, (ROWS, 1), device=DEVICE).float()
    shift[:: TILE[0]] = 100  # the maximum is this row's, whose scores differ less from tile to tile
    found = {}
    for name, option in (("mass", {"prune_mass": 0.2}), ("peak", {"block_prune_threshold": math.exp(-9)})):
        for moved in (0.0, 1.0):
            module = Shifted(**option)
            dst = {"query": q, "shift": shift * moved}
            out = module(graph=graph, src={"key": k, "value": v}, dst=dst, scale=0.5)
            found[name, moved] = out, module.last_report.skipped, module.last_report.certificate
    (a, skipped, certificate), (b, skipped_b, certificate_b) = found["mass", 0.0], found["mass", 1.0]
    assert skipped.sum() > 0 and torch.equal(skipped, skipped_b)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(certificate, certificate_b, rtol=1e-3, atol=1e-6)
    assert not torch.equal(found["peak", 0.0][1], found["peak", 1.0][1])


# Rows that do not exist, rows without keys, numbers that are none.


@pytest.mark.parametrize("option", [{"block_prune_threshold": 0.05}, {"prune_mass": 0.05}], ids=lambda x: next(iter(x)))
def test_padding_rows_neither_veto_nor_count(option):
    """The last block has one row: it is judged as it is alone."""
    n = 2 * TILE[0] + 1
    q, k, v = planted(n, ROWS)
    q[-1] *= -8  # by the padding's scores of 0 none of its tiles would be skipped, nor by its neighbours'
    many, one = Attention(**option), Attention(**option)
    out, report = report_of(many, tg.Graph.dense(n, ROWS), q, k, v)
    alone, single = report_of(one, tg.Graph.dense(1, ROWS), q[-1:], k, v)
    assert single.skipped.sum() > 0
    assert torch.equal(report.skipped[-1], single.skipped[0]) and torch.equal(report.visited[-1], single.visited[0])
    assert report.visited.shape == (3, HEADS) and report.visited.eq(-(-ROWS // TILE[1])).all()
    torch.testing.assert_close(out[-1:], alone)
    torch.testing.assert_close(report.certificate[-1:], single.certificate)


class Masked(Attention):
    def edge(self, src, dst, edge, scale):
        score = torch.where(dst.blind, float("-inf"), (src.key * dst.query).sum(-1) * scale)
        return self.reducer(score, src.value)


@pytest.mark.parametrize("option", [{"block_prune_threshold": 0.05}, {"prune_mass": 0.05}], ids=lambda x: next(iter(x)))
def test_fully_masked_rows_give_zero_and_do_not_veto(option):
    """By -inf scores and by the graph; a block of such rows alone too."""
    sources = ROWS // TILE[1] * TILE[1]  # whole tiles, so that both graphs are judged in one order
    q, k, v = planted(ROWS, sources)
    blind = torch.zeros(ROWS, 1, dtype=torch.bool, device=DEVICE)
    blind[::7], blind[: TILE[0]] = True, True
    module = Masked(return_lse=True, **option)
    dst = {"query": q, "blind": blind}
    out, lse = module(graph=tg.Graph.dense(ROWS, sources), src={"key": k, "value": v}, dst=dst, scale=0.5)
    report = module.last_report
    assert out[blind[:, 0]].eq(0).all() and lse[blind[:, 0]].eq(-math.inf).all()
    assert report.certificate[blind[:, 0]].eq(0).all() and out[~blind[:, 0]].isfinite().all()
    assert report.skipped[1:].sum() > 0
    stop = torch.where(blind[:, 0], 0, sources)
    graph = tg.Graph.intervals(torch.zeros_like(stop), stop, sources)
    plain = Attention(return_lse=True, **option)
    listed, listed_lse = plain(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
    again = plain.last_report
    assert listed[blind[:, 0]].eq(0).all() and listed_lse[blind[:, 0]].eq(-math.inf).all()
    assert again.visited[0].eq(0).all() and again.absent[0].eq(sources // TILE[1]).all()
    assert torch.equal(again.skipped[1:], report.skipped[1:])
    torch.testing.assert_close(listed, out)


@pytest.mark.parametrize("option", [{"block_prune_threshold": 0.05}, {"prune_mass": 0.05}], ids=lambda x: next(iter(x)))
def test_no_number_reaches_another_row(option):
    """A row of nan is nan and all others are what they are without it; values that are no edge's reach nobody."""
    q, k, v = planted(ROWS, ROWS)
    graph, module = tg.Graph.triangular(ROWS), Attention(**option)
    clean, report = report_of(module, graph, q, k, v)
    # the last value of the first tile that the last block judges, which is always kept; not an edge of all its rows
    last = min(ROWS - ROWS % TILE[0] + TILE[1], ROWS) - 1
    poisoned_v = v.clone()
    poisoned_v[last] = math.nan
    out, again = report_of(module, graph, q, k, poisoned_v)
    assert torch.equal(again.skipped, report.skipped) and torch.equal(again.visited, report.visited)
    assert out[last:].isnan().all()
    torch.testing.assert_close(out[:last], clean[:last])
    poisoned_q = q.clone()
    poisoned_q[-3] = math.nan
    out, again = report_of(module, graph, poisoned_q, k, v)
    assert out[-3].isnan().all() and out[:-3].isfinite().all() and out[-2:].isfinite().all()
    torch.testing.assert_close(out[: ROWS - ROWS % TILE[0]], clean[: ROWS - ROWS % TILE[0]])
    q, k = torch.ones_like(q), k.abs() / 8
    k[TILE[1]] = math.nan  # of a tile that every other score of it lets skip
    k[: TILE[1]] += 8
    out, _ = report_of(module, tg.Graph.dense(1, ROWS), q[:1], k, v)
    assert out.isnan().all()


# Heads, plans, calls.


@pytest.mark.parametrize("option", [{"block_prune_threshold": 0.05}, {"prune_mass": 0.05}], ids=lambda x: next(iter(x)))
def test_results_are_equal_whatever_the_plan(option, monkeypatch):
    q, k, v = planted(ROWS, ROWS)
    found = []
    for early, warps, stages, probe, enough in ((True, 4, 1, 8, 4), (False, 2, 2, 1, 1000), (True, 4, 2, 1, 0)):
        plan = PrunedPlan(*TILE, warps, stages, 1, early)
        monkeypatch.setattr(plan_pruned, "pruned_plans", lambda *of, plan=plan: [plan])
        monkeypatch.setattr(emit_pruned, "PROBE", probe)  # tiles before a loop is chosen, and which one
        monkeypatch.setattr(emit_pruned, "ENOUGH", enough)
        steps._records.clear()
        calls._source.cache_clear()
        found.append(report_of(Attention(**option), tg.Graph.triangular(ROWS), q, k, v))
    steps._records.clear()
    calls._source.cache_clear()
    out, report = found[0]
    assert report.skipped.sum() > 0
    for other, said in found[1:]:
        torch.testing.assert_close(other, out, rtol=1e-5, atol=1e-5)
        assert torch.equal(said.skipped, report.skipped) and torch.equal(said.visited, report.visited)
        torch.testing.assert_close(said.certificate, report.certificate, rtol=1e-4, atol=1e-7)


def test_grouped_queries_are_judged_head_by_head():
    n, groups = ROWS, 3
    q, k, v = planted(n, n)
    q = torch.stack([q, q + torch.randn_like(q), q - torch.randn_like(q)], 2)
    module = Attention(block_prune_threshold=0.05)
    out = module(
        graph=tg.Graph.triangular(n), src={"key": k[:, :, None], "value": v[:, :, None]}, dst={"query": q}, scale=0.5
    )
    assert out.shape == q.shape and module.last_report.visited.shape[1:] == (HEADS, groups)
    for g in range(groups):
        single = Attention(block_prune_threshold=0.05)
        alone, report = report_of(single, tg.Graph.triangular(n), q[:, :, g], k, v)
        torch.testing.assert_close(out[:, :, g], alone)
        assert report.skipped.sum() > 0 and torch.equal(module.last_report.skipped[:, :, g], report.skipped)


def test_thresholds_of_heads():
    q, k, v = planted(ROWS, ROWS)
    q[:, 1] *= 1e-3  # scores so close that no tile of this head can be skipped
    rho = torch.tensor([0.3, 1e-6], dtype=torch.float64, device=DEVICE)
    _, both = report_of(Attention(block_prune_threshold=rho), tg.Graph.triangular(ROWS), q, k, v)
    for h in range(HEADS):
        _, one = report_of(Attention(block_prune_threshold=rho[h].item()), tg.Graph.triangular(ROWS), q, k, v)
        assert torch.equal(both.skipped[:, h], one.skipped[:, h])
    assert both.skipped[:, 0].sum() > both.skipped[:, 1].sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_reports_of_compiled_calls(backend):
    """One graph, and the report of each call."""
    if DEVICE == "cpu" and backend == "inductor":
        backend = "eager"
    torch._dynamo.reset()
    q, k, v = planted(ROWS, ROWS)
    module, graph = Attention(block_prune_threshold=0.05), tg.Graph.triangular(ROWS)
    call = torch.compile(lambda q: attend(module, graph, q, k, v) * 2, fullgraph=True, backend=backend)
    for loud in (1.0, 0.5):
        out = call(q * loud)
        compiled = module.last_report
        eager, report = report_of(module, graph, q * loud, k, v)
        torch.testing.assert_close(out, eager * 2)
        assert report.skipped.sum() > 0 and torch.equal(compiled.skipped, report.skipped)
        assert torch.equal(compiled.certificate, report.certificate)


def test_a_captured_call_reports_each_replay():
    q, k, v = planted(ROWS, ROWS)
    module, graph = Attention(prune_mass=0.05), tg.Graph.triangular(ROWS)
    for _ in range(3):
        attend(module, graph, q, k, v)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = attend(module, graph, q, k, v)
    report = module.last_report
    for loud in (1.0, 0.2):
        q.mul_(loud)
        captured.replay()
        eager, again = report_of(Attention(prune_mass=0.05), graph, q, k, v)
        assert torch.equal(out, eager) and torch.equal(report.skipped, again.skipped)
        assert torch.equal(report.certificate, again.certificate)


# Calibration.


@pytest.mark.parametrize("per_head", [False, True])
def test_calibrated_thresholds_skip_the_share_that_was_asked_for(per_head):
    torch.manual_seed(1)
    q, k, v = planted(2 * ROWS, 2 * ROWS, loud=1.0)
    calls = [
        {"graph": tg.Graph.triangular(n), "src": {"key": k[:n], "value": v[:n]}, "dst": {"query": q[:n]}, "scale": 0.5}
        for n in (ROWS, 2 * ROWS)
    ]
    module = Attention()
    rho = tg.calibrate_prune(module, calls, 0.3, per_head)
    pruned = Attention(block_prune_threshold=rho)
    visited, skipped = 0, 0
    for call in calls:
        pruned(**call)
        visited, skipped = visited + pruned.last_report.visited.sum(0), skipped + pruned.last_report.skipped.sum(0)
    shares = skipped / visited if per_head else skipped.sum() / visited.sum()
    # of few tiles the nearest share
    assert (shares - 0.3).abs().max() <= max(0.01, 0.5 / visited.min().item()) + 1e-6
    assert isinstance(rho, float) != per_head
    with pytest.raises(tg.TigaError, match="no call was pruned"):
        _ = module.last_report


def test_calibration_says_what_cannot_be():
    q, k, v = planted(ROWS, ROWS)
    call = {"graph": tg.Graph.dense(ROWS), "src": {"key": k, "value": v}, "dst": {"query": q}, "scale": 0.5}
    with pytest.raises(tg.TigaError, match="Ask for less"):
        tg.calibrate_prune(Attention(), [call], 0.99)
    with pytest.raises(tg.TigaError, match="target=1.5"):
        tg.calibrate_prune(Attention(), [call], 1.5)
    with pytest.raises(tg.TigaError, match="too equal"):  # one tile far above, all others level
        k[: TILE[1]], k[TILE[1] :], q[:] = 1.0, 0.0, 1.0
        tg.calibrate_prune(Attention(), [call], 0.1)
    with pytest.raises(tg.TigaError, match="prune_mass"):
        tg.calibrate_prune(Attention(prune_mass=0.1), [call], 0.1)


# Gradients.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "blocks"])
def test_gradients_are_those_of_the_pairs_that_were_kept(kind, rule):
    """Of the result and of lse, against float64 over the pairs that the rule keeps; some tiles were skipped."""
    graph, mask, blocks, order, first = relation(kind, ROWS)
    leaves = [x.requires_grad_() for x in planted(graph.num_dst, graph.num_src)]
    q, k, v = leaves
    module = Attention(prune_backward=True, return_lse=True, **{OPTIONS[x]: y for x, y in RULES[rule].items()})
    out, lse = attend(module, graph, q, k, v)
    weight, weight_lse = torch.randn_like(out), torch.randn_like(lse)
    empty = ~mask.any(1).to(DEVICE)
    loss = (out * weight).sum() + (torch.where(empty[:, None], 0.0, lse) * weight_lse).sum()
    got = torch.autograd.grad(loss, leaves)
    assert module.last_report.skipped.sum() > 0
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    score = torch.einsum("ihd,jhd->hij", exact[0], exact[1]) * 0.5
    total = 0.0
    for h in range(HEADS):
        j = pruning.judge(score[h].detach(), mask, TILE, blocks, **RULES[rule], order=order, first=first)
        some = j.kept.any(1)
        kept = score[h][some].masked_fill(~j.kept[some], -math.inf)
        result = kept.softmax(1) @ exact[2][:, h]
        total = total + (result * weight[:, h].double().cpu()[some]).sum()
        total = total + (kept.logsumexp(1) * weight_lse[:, h].double().cpu()[some]).sum()
    for x, y in zip(got, torch.autograd.grad(total, exact)):
        torch.testing.assert_close(x.double().cpu(), y, rtol=1e-3, atol=1e-4 * y.abs().max().item())


def test_gradients_are_finite_differences():
    """Once and twice, along a direction in which no tile changes sides."""
    leaves = [x.requires_grad_() for x in planted(ROWS, ROWS)]
    graph, weight = tg.Graph.triangular(ROWS), torch.randn(ROWS, HEADS, WIDTH, device=DEVICE)
    module = Attention(prune_backward=True, block_prune_threshold=0.05)

    def value(*x):
        return (attend(module, graph, *x).tanh() * weight).sum()

    def slope(*x):
        first = torch.autograd.grad(value(*x), x, create_graph=True)
        return sum((g * d).sum() for g, d in zip(first, other))

    step = 2e-3
    direction, other = ([torch.randn_like(x) / 4 for x in leaves] for _ in range(2))
    for fn in (value, slope):
        found = torch.autograd.grad(fn(*leaves), leaves)
        skipped = module.last_report.skipped
        moved = []
        for sign in (1, -1):
            at = [(x + sign * step * d).detach().requires_grad_() for x, d in zip(leaves, direction)]
            moved.append(fn(*at).detach().double())
            assert torch.equal(module.last_report.skipped, skipped)
        assert skipped.sum() > 0
        along = sum((g * d).sum() for g, d in zip(found, direction)).double()
        torch.testing.assert_close((moved[0] - moved[1]) / (2 * step), along, rtol=2e-2, atol=2e-2)


def test_a_gradient_must_be_asked_for():
    q, k, v = planted(ROWS, ROWS)
    q.requires_grad_()
    graph = tg.Graph.triangular(ROWS)
    with pytest.raises(tg.TigaError, match="prune_backward=True"):
        attend(Attention(prune_mass=0.1), graph, q, k, v)
    with torch.no_grad():
        attend(Attention(prune_mass=0.1), graph, q, k, v)
    packed = tg.Graph.cu_seqlens([0, ROWS]).to(DEVICE)
    with pytest.raises(tg.TigaError, match="packed sequences"):
        attend(Attention(prune_mass=0.1, prune_backward=True), packed, q, k, v)
