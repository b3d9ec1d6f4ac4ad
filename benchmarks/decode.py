"""A few rows against a long cache of keys and values, grouped queries: bound by reading the cache once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import tiga as tg
from benchmarks import peers
from benchmarks.measure import (
    Line,
    Setting,
    Table,
    a_call,
    check,
    copy_bandwidth,
    figure,
    milliseconds,
    of_each,
    relative,
    replayed,
)
from benchmarks.throughput import ROUNDING, Attention

SOURCES, GROUPS, MEMBERS, WIDTH = 65536, 4, 8, 128
ROWS = (1, 4, 16)
CALLS = 20  # in one graph: its launch is not the call's


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64; [heads, rows, width]."""
    q, k, v = (x[0].double() for x in (q, k, v))
    score = q.unflatten(0, (GROUPS, MEMBERS)) @ k[:, None].transpose(-1, -2) * WIDTH**-0.5
    return (score.softmax(-1) @ v[:, None]).flatten(0, 1)


def line(setting: Setting, rows: int, copied: dict[str, float]) -> Line:
    n = setting.rows(SOURCES)
    draw = lambda *shape: torch.randn(shape, device=setting.device, dtype=torch.bfloat16)
    q, k, v = draw(1, GROUPS * MEMBERS, rows, WIDTH), draw(1, GROUPS, n, WIDTH), draw(1, GROUPS, n, WIDTH)
    module, graph = Attention(), tg.Graph.dense(rows, n)
    query = q[0].unflatten(0, (GROUPS, MEMBERS)).permute(2, 0, 1, 3)  # (rows, groups, members, width)
    src = {"key": k[0].transpose(0, 1)[:, :, None], "value": v[0].transpose(0, 1)[:, :, None]}

    def ours() -> Tensor:
        out = module(graph=graph, src=src, dst={"query": query}, scale=WIDTH**-0.5)
        return out.flatten(1, 2).transpose(0, 1)[None]

    runs = {"tiga": ours, "SDPA": partial(peers.sdpa, None, q, k, v, enable_gqa=True)}
    runs["cuDNN"] = partial(peers.sdpa, "cuDNN", q, k, v, enable_gqa=True)
    runs["FlexAttention"] = partial(peers.fresh_flex(), q, k, v, enable_gqa=True, scale=WIDTH**-0.5)
    want = exact(q, k, v)

    def measure(name: str) -> tuple[float, float, float]:
        run = runs[name]
        with torch.no_grad():
            error = relative(run()[0], want)
            check("a peer or tiga against float64", error, 0.0, 2e-2)
            many = replayed(run, setting, CALLS)
            return error, a_call(run, setting), 1000 * milliseconds(many, setting) / CALLS

    found, why = of_each(runs, measure, setting)
    if "SDPA" in found:
        check("out", found["tiga"][0], found["SDPA"][0], ROUNDING)
    if not copied:
        copied["GB/s"] = copy_bandwidth(setting)
    cache = 2 * n * GROUPS * WIDTH * 2
    rate = {name: cache / us / 1000 for name, (_, _, us) in found.items()}
    cells = [f"{figure(found[name][1])} / {figure(found[name][2])}" if name in found else "failed" for name in runs]
    best = max((x for name, x in rate.items() if name != "tiga"), default=float("nan"))
    return Line(
        (
            *cells,
            figure(rate["tiga"]),
            f"{100 * rate['tiga'] / copied['GB/s']:.0f} %",
            f"{100 * best / copied['GB/s']:.0f} %",
            figure(copied["GB/s"]),
            why,
        )
    )


def table(setting: Setting) -> Table:
    says = (
        "bfloat16, one batch, 65,536 sources, 4 heads of keys and values for 32 of queries, width 128, every row reads "
        "every source. Microseconds of an eager call, host and device / of one of 20 in a CUDA graph. GB/s: the bytes "
        "of keys and values over the latter; the copy reads and writes 2 GiB."
    )
    columns = ("tiga us", "SDPA us", "SDPA cuDNN us", "FlexAttention us", "tiga GB/s", "tiga of copy")
    more = ("best peer of copy", "copy GB/s", "remarks")
    copied: dict[str, float] = {}
    lines = {f"decode, {rows} row{'s' * (rows > 1)}": lambda rows=rows: line(setting, rows, copied) for rows in ROWS}
    return Table("Decode", says, (*columns, *more), lines)
