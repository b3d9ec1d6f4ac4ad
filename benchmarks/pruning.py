"""Attention that skips tiles beside the same kernels without: planted and natural distributions of scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import tiga as tg
from benchmarks.measure import Line, Setting, Table, figure, milliseconds, relative
from tiga import prune
from tiga.parser import parse
from tiga.program import prune as only
from tiga.program import to_text

WIDTH, HEADS = 128, 4


class Attention(tg.MessagePassing):
    def __init__(self, **options) -> None:
        super().__init__()
        self.reducer = tg.online_softmax(**options)

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def planted(rows: int, device: str) -> list[Tensor]:
    """Of the tiles of keys three in ten, and the first, score about 12 above the others, for every query."""
    draw = lambda *shape: torch.randn(shape, device=device)
    keys = prune.TILE[1]
    loud = torch.rand(-(-rows // keys), HEADS, device=device) < 0.3
    loud[0] = True
    loud = loud.repeat_interleave(keys, 0)[:rows, :, None]
    towards = draw(HEADS, WIDTH)
    query = towards + draw(rows, HEADS, WIDTH) / 4
    key = torch.where(loud, 12 * WIDTH**0.5, 0.0) * towards / towards.square().sum(-1, keepdim=True)
    return [query, key + draw(rows, HEADS, WIDTH) / 4, draw(rows, HEADS, WIDTH)]


def natural(rows: int, device: str) -> list[Tensor]:
    """Neighbours alike, some keys that matter to all, and scores with a deviation of about 3."""
    draw = lambda *shape: torch.randn(shape, device=device)
    knots = -(-rows // 256) + 1
    at = torch.arange(rows, device=device) / 256
    low, part = at.long(), (at - at.floor())[:, None, None]

    def slow() -> Tensor:
        x = draw(knots, HEADS, WIDTH)
        return x[low] * (1 - part) + x[low + 1] * part

    topic, rest = slow(), (draw(rows, HEADS, WIDTH) for _ in range(3))
    query, key = (1.4 * topic + 1.1 * next(rest) for _ in range(2))
    key[:4] += 0.5 * query.mean(0)
    return [query, key, next(rest)]


SCORES = {"planted": planted, "natural": natural}
WORKS = {
    # name: scores, rows, options, or the share to calibrate a threshold for
    "planted, causal 16k, threshold": ("planted", 16384, {"block_prune_threshold": 1e-3}),
    "planted, causal 32k, threshold": ("planted", 32768, {"block_prune_threshold": 1e-3}),
    "planted, causal 64k, threshold": ("planted", 65536, {"block_prune_threshold": 1e-3}),
    "planted, causal 64k, nothing skipped": ("planted", 65536, {"block_prune_threshold": 1e-30}),
    "planted, causal 64k, mass 0.01": ("planted", 65536, {"prune_mass": 0.01}),
    "natural, causal 16k, 70 % calibrated": ("natural", 16384, 0.7),
    "natural, causal 64k, 70 % calibrated": ("natural", 65536, 0.7),
    "natural, causal 64k, mass 0.1": ("natural", 65536, {"prune_mass": 0.1}),
    "natural, causal 64k, mass 0.01": ("natural", 65536, {"prune_mass": 0.01}),
}


def line(setting: Setting, scores: str, rows: int, options: dict | float) -> Line:
    n = setting.rows(rows)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    q, k, v = (x.to(dtype).requires_grad_() for x in SCORES[scores](n, setting.device))
    graph = tg.Graph.triangular(n)
    fields = {"graph": graph, "src": {"key": k, "value": v}, "dst": {"query": q}, "scale": WIDTH**-0.5}
    if isinstance(options, float):
        options = {"block_prune_threshold": tg.calibrate_prune(Attention(), [fields], options)}
    exact, pruned = Attention(), Attention(prune_backward=True, **options)
    out, plain, report = pruned(**fields), exact(**fields), pruned.last_report
    # what is left out can move a result by twice its share of the values
    room = 2 * report.certificate[..., None] * v.detach().float().abs().amax((0, 2))[:, None]
    beyond = ((out - plain).float().abs() - room).max().item()
    if not beyond < 0.05:
        raise AssertionError(f"the result is {beyond:.2e} further from the exact one than its certificate allows")
    run = lambda module: module(**fields)
    with torch.no_grad():
        forward = [milliseconds(partial(run, m), setting) for m in (exact, pruned)]
        bare = milliseconds(without_certificate(pruned, fields), setting)
    given = torch.randn_like(out)
    gradient = lambda o: torch.autograd.grad(o, (q, k, v), given, retain_graph=True)
    backward = [milliseconds(partial(gradient, o), setting) for o in (plain, out)]
    cells = [f"{report.share:.1%}"]
    for before, after in (forward, backward):
        cells += [figure(before), figure(after), f"{before / after:.2f}x"]
    cells.append(f"{forward[1] / bare - 1:+.1%}")
    cells.append(f"{report.certificate.max().item():.1e} / {report.certificate.mean().item():.1e}")
    cells.append(f"{relative(out.detach(), plain.detach().double()):.1e}")
    return Line(tuple(cells))


def without_certificate(module: Attention, fields: dict) -> Callable[[], list[Tensor]]:
    """The same call, of whose program nothing but the result is asked."""
    call = module.lower(**fields)
    p = parse(call.program)
    small = only(p, p.returns[:1])
    tensors = [t for o, t in zip(p.operands, call.tensors) if o in small.operands]
    scalars = [x for name, x in zip(p.scalars, call.scalars) if name in small.scalars]
    text = to_text(small)
    return lambda: torch.ops.tiga.propagate(text, tensors, call.ints, scalars)


def table(setting: Setting) -> Table:
    says = (
        f"Causal attention, bfloat16, {HEADS} heads of {WIDTH}, tiles of {prune.TILE[0]} destinations by "
        f"{prune.TILE[1]} sources; the exact kernels are tiga's own. Skipped: of the tiles that hold edges. "
        "Certificate: the largest and the mean bound on the probability that a row lost, and what it costs, against "
        "the same kernel that does not give it. Difference: ||pruned - exact|| / ||exact||. Every result lies within "
        "what its certificate allows."
    )
    columns = ("skipped", "exact forward ms", "pruned", "speed", "exact backward ms", "pruned", "speed")
    columns += ("certificate's cost", "certificate", "difference")
    return Table("Skipped tiles", says, columns, {n: lambda w=w: line(setting, *w) for n, w in WORKS.items()})
