"""Forward and backward of attention over dense, windowed and packed rows, in TFLOP/s, beside the peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import tiga as tg
from benchmarks import peers
from benchmarks.measure import Line, Setting, Table, check, figure, in_turns, of_each, pair, peak_mib, relative

BACKWARD = 2.5  # of the forward's matrix products
CHUNK = 2048  # rows of the float64 reference at once
ROUNDING = torch.finfo(torch.bfloat16).eps / 4  # of a bfloat16 result, about, relative to its norm


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Softcap(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(-1) * scale
        return self.reducer(torch.tanh(score / 30) * 30, src.value)


class Alibi(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale, slope):
        score = (src.key * dst.query).sum(-1) * scale
        return self.reducer(score + (src.pos - dst.pos)[..., None] * slope, src.value)


@dataclass(frozen=True)
class Score:
    """modify: of a slope a head, the score_mod that FlexAttention and the reference take."""

    module: type[tg.MessagePassing]
    modify: Callable[[Tensor], Callable | None]


SCORES = {
    "plain": Score(Attention, lambda slope: None),
    "softcap": Score(Softcap, lambda slope: lambda s, b, h, i, j: torch.tanh(s / 30) * 30),
    "alibi": Score(Alibi, lambda slope: lambda s, b, h, i, j: s + (j - i) * slope[h]),
}


def log_normal(total: int) -> list[int]:
    """Lengths of documents that fill `total`, of about 400 rows in the median."""
    draw, lengths = torch.Generator().manual_seed(0), []
    while sum(lengths) < total:
        length = int(torch.empty(1).log_normal_(6.0, 1.0, generator=draw).item())
        lengths.append(max(1, min(length, total - sum(lengths))))
    return lengths


def equal(total: int) -> list[int]:
    return [total // 8] * 8


@dataclass(frozen=True)
class Relation:
    """The graph of `rows` (and boundaries), the same as a mask, whether SDPA has it, and the window of varlen_attn."""

    graph: Callable[[int, Tensor | None], tg.Graph]
    mask: Callable[[int, Tensor | None], Callable | None]
    lengths: Callable[[int], list[int]] | None = None
    dense: bool = False
    window: Callable[[int], tuple[int, int]] | None = None


def wide(rows: int) -> int:
    """Sources before one's own in the window."""
    return min(1024, rows // 2) - 1


def same_document(rows: int, boundaries: Tensor) -> Callable:
    of = torch.bucketize(torch.arange(rows, device=boundaries.device), boundaries[1:].long(), right=True)
    return lambda b, h, i, j: (i >= j) & (of[i] == of[j])


PACKED = {
    "graph": lambda n, ends: tg.Graph.cu_seqlens(ends, num_dst=n, num_src=n),
    "mask": same_document,
    "window": lambda n: (-1, 0),
}
RELATIONS = {
    "full": Relation(lambda n, _: tg.Graph.dense(n), lambda n, _: None, dense=True),
    "causal": Relation(lambda n, _: tg.Graph.triangular(n), lambda n, _: lambda b, h, i, j: i >= j, dense=True),
    "window": Relation(
        lambda n, _: tg.Graph.window(n, wide(n)),
        lambda n, _: lambda b, h, i, j: (i >= j) & (i - j <= wide(n)),
        window=lambda n: (wide(n), 0),
    ),
    "documents": Relation(lengths=log_normal, **PACKED),
    "equal": Relation(lengths=equal, **PACKED),
}
WORKS = {
    # name: rows, width, batch, heads, relation, score
    "D128 full 8k": (8192, 128, 2, 16, "full", "plain"),
    "D128 causal 8k": (8192, 128, 2, 16, "causal", "plain"),
    "D128 full 16k": (16384, 128, 1, 16, "full", "plain"),
    "D128 causal 16k": (16384, 128, 1, 16, "causal", "plain"),
    "D64 full 8k": (8192, 64, 2, 32, "full", "plain"),
    "D64 causal 8k": (8192, 64, 2, 32, "causal", "plain"),
    "softcap 30, D128 causal 8k": (8192, 128, 2, 16, "causal", "softcap"),
    "ALiBi, D128 causal 8k": (8192, 128, 2, 16, "causal", "alibi"),
    "varlen, 54 log-normal documents, D128 causal 32k": (32768, 128, 1, 16, "documents", "plain"),
    "varlen, 8 x 4096, D128 causal": (32768, 128, 1, 16, "equal", "plain"),
    "window 1024 of 32k, D128": (32768, 128, 1, 16, "window", "plain"),
}
PEERS = ("tiga", "FlexAttention", "cuDNN", "flash", "FA3", "FA4", "varlen_attn")
RATIOS = ("FlexAttention", "cuDNN", "varlen_attn")


@dataclass(frozen=True)
class Figures:
    """Milliseconds, MiB of forward and backward, relative errors of (out, dq, dk, dv) of one head against float64.

    Not a number: of a peer without a backward.
    """

    forward: float
    backward: float
    peak: float
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Checked:
    """A run that was right, and its result, which gradients are taken of; None: it has none."""

    run: Callable[[], Tensor]
    out: Tensor | None
    peak: float
    errors: tuple[float, ...]


class Work:
    """The same numbers for tiga and its peers; every call takes and gives [batch, heads, rows, width]."""

    def __init__(self, setting: Setting, rows, width, batch, heads, relation, score) -> None:
        self.setting, self.rows, self.width, self.heads = setting, setting.rows(rows), width, heads
        self.relation, self.score = RELATIONS[relation], SCORES[score]
        self.batch, n, device = batch, self.rows, setting.device
        # packed rows lie as (rows, heads, width), batches as (batch, heads, rows, width)
        packed = self.relation.lengths is not None
        numbers = lambda *shape: torch.randn(shape, device=device, dtype=torch.bfloat16)
        draw = lambda: numbers(batch, n, heads, width).transpose(1, 2) if packed else numbers(batch, heads, n, width)
        self.inputs = [draw().requires_grad_() for _ in range(3)]
        self.grad = draw()
        self.slope = torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)
        self.pos = torch.arange(n, device=device, dtype=torch.int32)
        self.lengths = self.relation.lengths(n) if packed else [n]
        self.boundaries = torch.tensor([0, *self.lengths], device=device).cumsum(0).int()
        self.graph = self.relation.graph(n, self.boundaries)
        self.module = self.score.module()
        self.mask = self.relation.mask(n, self.boundaries)

    def flops(self) -> float:
        edges = sum(m * (m + 1) // 2 for m in self.lengths) if self.relation.lengths else self.graph.num_edges
        return 4.0 * self.batch * self.heads * self.width * edges

    def runs(self) -> dict[str, Callable[[], Tensor]]:
        found = {"tiga": self.tiga, "FlexAttention": self.flex()}
        relation, options = self.relation, {"is_causal": self.mask is not None}
        if relation.dense and self.score.module is Attention:
            found |= {name: partial(peers.sdpa, name, *self.inputs, **options) for name in ("cuDNN", "flash")}
            found |= {name: partial(run, *self.inputs, **options) for name, run in peers.flash_attentions().items()}
        if relation.window is not None:
            limits = (self.boundaries, max(self.lengths), relation.window(self.rows))
            found["varlen_attn"] = partial(peers.varlen, *self.inputs, *limits)
        return found

    def tiga(self) -> Tensor:
        q, k, v = (x.permute(2, 0, 1, 3) for x in self.inputs)
        src, dst, more = {"key": k, "value": v}, {"query": q}, {}
        if self.score.module is Alibi:
            src, dst, more = src | {"pos": self.pos}, dst | {"pos": self.pos}, {"slope": self.slope}
        out = self.module(graph=self.graph, src=src, dst=dst, scale=self.width**-0.5, **more)
        return out.permute(1, 2, 0, 3)

    def flex(self) -> Callable[[], Tensor]:
        attend, blocks = peers.fresh_flex(), peers.block_mask(self.mask, self.rows, self.setting.device)
        options = {"score_mod": self.score.modify(self.slope), "block_mask": blocks, "scale": self.width**-0.5}
        return lambda: attend(*self.inputs, **options)

    def exact(self, b: int, h: int) -> list[Tensor]:
        """(out, dq, dk, dv) of one head in float64, by plain torch, some rows at a time."""
        q, k, v = (x[b, h].detach().double().requires_grad_() for x in self.inputs)
        outs, total = [], [torch.zeros_like(x) for x in (q, k, v)]
        modify, j = self.score.modify(self.slope.double()), self.pos[None]
        for i in self.pos[:, None].split(CHUNK):
            score = q[i[:, 0]] @ k.t() * self.width**-0.5
            score = score if modify is None else modify(score, b, h, i, j)
            score = score if self.mask is None else score.masked_fill(~self.mask(b, h, i, j), -torch.inf)
            out = score.softmax(-1) @ v
            for t, g in zip(total, torch.autograd.grad(out, (q, k, v), self.grad[b, h, i[:, 0]].double())):
                t += g
            outs.append(out.detach())
        return [torch.cat(outs), *total]

    def gradient(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.grad, retain_graph=True)

    def checked(self, run: Callable[[], Tensor], exact: list[Tensor], head: tuple[int, int]) -> Checked:
        b, h = head
        out = run()
        found = (out, *self.gradient(out)) if out.requires_grad else (out,)
        errors = tuple(relative(x[b, h], z) for x, z in zip(found, exact))
        check("a peer or tiga against float64", max(errors), 0.0, 2e-2)
        peak = peak_mib(lambda: self.gradient(run()), self.setting) if out.requires_grad else 0.0
        return Checked(run, out if out.requires_grad else None, peak, errors)

    def timed(self, found: dict[str, Checked]) -> dict[str, Figures]:
        """Once all are right: tiga and its peers in turns."""
        with torch.no_grad():
            forward = in_turns({n: c.run for n, c in found.items()}, self.setting)
        made = {n: c.out for n, c in found.items() if c.out is not None}
        backward = in_turns({n: partial(self.gradient, out) for n, out in made.items()}, self.setting)
        return {n: Figures(forward[n], backward.get(n, math.nan), c.peak, c.errors) for n, c in found.items()}

    def lowering(self) -> str:
        return next(x.split(": ")[1] for x in self.module.explain().splitlines() if x.startswith("lowering: "))

    def line(self) -> Line:
        setting, head = self.setting, (self.batch - 1, self.heads - 1)
        exact, runs = self.exact(*head), self.runs()
        right, why = of_each(runs, lambda name: self.checked(runs[name], exact, head), setting)
        found = self.timed(right)
        lowering = self.lowering()
        if setting.on_gpu and "composite" in lowering:
            raise RuntimeError(f"no kernel ran: lowering {lowering}")
        ours, flex = found["tiga"], found.get("FlexAttention")
        if flex is not None:
            for name, x, y in zip(("out", "dq", "dk", "dv"), ours.errors, flex.errors):
                check(name, x, y, ROUNDING)
        speed = {
            n: (self.flops() / f.forward / 1e9, BACKWARD * self.flops() / f.backward / 1e9) for n, f in found.items()
        }
        cells = [
            *[pair(speed.get(name)) for name in PEERS],
            *[times(speed["tiga"], speed.get(name)) for name in RATIOS],
            pair((ours.peak, flex.peak)) if flex else figure(ours.peak),
            " / ".join(f"{max(f.errors):.1e}" for f in (ours, flex) if f),
            f"{lowering} {why}".strip(),
        ]
        return Line(tuple(cells), speed)


def times(ours: tuple[float, float], theirs: tuple[float, float] | None) -> str:
    """How many times the peer's speed, forward / backward."""
    return "" if theirs is None else " / ".join(f"{a / b:.2f}x" if b == b else "-" for a, b in zip(ours, theirs))


def table(setting: Setting) -> Table:
    ratios = (*[f"tiga / {name}" for name in RATIOS], "peak MiB, tiga / Flex", "error, tiga / Flex", "how it ran")
    says = (
        "bfloat16, TFLOP/s forward / backward, by pairs that are edges (backward: 2.5 times the forward's products); "
        "medians of device time, tiga and its peers in turns, forward without grad. tiga and FlexAttention are "
        "deterministic as they run here; SDPA "
        "and varlen_attn may add gradients in any order. Peak: forward and backward, above the inputs. Error: the "
        "largest of ||x - exact|| / ||exact|| over out, dq, dk, dv of one head against float64."
    )

    def line(name: str) -> Callable[[], Line]:
        return lambda: Work(setting, *WORKS[name]).line()

    return Table("Throughput", says, (*PEERS, *ratios), {name: line(name) for name in WORKS})
