"""Second derivatives of dense attention beside attention written in plain torch, which holds every score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import grad

import tiga as tg
from benchmarks.measure import Line, Setting, Table, attempt, check, figure, milliseconds, peak_mib, relative
from benchmarks.peers import plain
from benchmarks.throughput import Attention

WORKS = {
    # name: dtype, rows, heads, width
    "double backward, float32": (torch.float32, 4096, 16, 64),
    "double backward, bfloat16": (torch.bfloat16, 4096, 16, 64),
}


@dataclass(frozen=True)
class Twice:
    """Random inputs and cotangents of [heads, rows, width]; a run gives (out, 3 gradients, 3 second derivatives)."""

    inputs: tuple[Tensor, ...]
    given: Tensor
    directions: tuple[Tensor, ...]

    def run(self, attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = attend(*self.inputs)
        first = grad(out, self.inputs, self.given, create_graph=True)
        return out, *first, *grad(first, self.inputs, self.directions)

    def of_head(self, h: int) -> Twice:
        """The same of one head in float64."""
        alone = lambda x: x[h : h + 1].detach().double()
        leaves = tuple(alone(x).requires_grad_() for x in self.inputs)
        return Twice(leaves, alone(self.given), tuple(map(alone, self.directions)))


def line(setting: Setting, dtype: torch.dtype, rows: int, heads: int, width: int) -> Line:
    n = setting.rows(rows)
    draw = lambda: torch.randn(heads, n, width, device=setting.device, dtype=dtype)
    work = Twice(tuple(draw().requires_grad_() for _ in range(3)), draw(), tuple(draw() for _ in range(3)))
    module, graph = Attention(), tg.Graph.dense(n)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return module(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=width**-0.5).transpose(0, 1)

    exact = work.of_head(heads - 1).run(plain)
    found, why = {}, ""
    for name, attend in (("tiga", ours), ("plain", plain)):
        figures, said = attempt(lambda attend=attend: measure(work, attend, exact, setting), setting)
        if figures is not None:
            found[name] = figures
        elif name == "tiga":
            raise RuntimeError(said)
        else:
            why = said
    (ms, mib, errors), other = found["tiga"], found.get("plain")
    if other is None:
        return Line((figure(ms), f"failed: {why}", "", figure(mib), "", f"{max(errors):.1e}", ""))
    for x, y in zip(errors, other[2]):
        check("out, gradients and second derivatives", x, y, torch.finfo(dtype).eps)
    cells = [figure(ms), figure(other[0]), f"{other[0] / ms:.2f}x", figure(mib), figure(other[1])]
    return Line((*cells, f"{max(errors):.1e}", f"{max(other[2]):.1e}"))


def measure(work: Twice, attend: Callable, exact: tuple[Tensor, ...], setting: Setting) -> tuple:
    """(ms, MiB, relative errors of the last head)."""
    run = lambda: work.run(attend)
    errors = [relative(x[-1], z[0]) for x, z in zip(run(), exact)]
    return milliseconds(run, setting), peak_mib(run, setting), errors


def table(setting: Setting) -> Table:
    says = (
        "Dense attention, 4,096 rows, 16 heads of 64: forward, backward and the gradient of the gradients, random "
        "cotangents. Plain torch is softmax(q k^T) v in the same dtype; its float32 products are ieee, tiga's are of "
        "six bfloat16 products each, unless torch is asked for others. Error: the largest of ||x - exact|| / ||exact|| "
        "over all seven results of one head against float64."
    )
    columns = ("tiga ms", "plain torch ms", "speed", "tiga peak MiB", "plain peak MiB", "tiga error", "plain error")
    return Table("Double backward", says, columns, {n: lambda w=w: line(setting, *w) for n, w in WORKS.items()})
