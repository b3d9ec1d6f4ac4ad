"""Where the host decides: the published examples' own sizes, and building a relation that changes at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import tiga as tg
from benchmarks import peers
from benchmarks.measure import (
    Compilations,
    Line,
    Setting,
    Table,
    a_call,
    attempt,
    check,
    device_microseconds,
    figure,
    host_call,
    milliseconds,
    of_each,
    peak_mib,
    relative,
    replayed,
)
from benchmarks.throughput import Attention
from tiga import passes

PUBLISHED = {
    # name: rows, heads, causal
    "published, full, N 1024 H 4 D 64": (1024, 4, False),
    "published, causal, N 256 H 2 D 64": (256, 2, True),
}
WIDTH = 64


def published(setting: Setting, rows: int, heads: int, causal: bool) -> Line:
    rows = setting.rows(rows)
    q, k, v = (torch.randn(1, heads, rows, WIDTH, device=setting.device, dtype=torch.float16) for _ in range(3))
    module, graph = Attention(), (tg.Graph.triangular if causal else tg.Graph.dense)(rows)
    query, key, value = (x[0].transpose(0, 1) for x in (q, k, v))
    blocks = peers.block_mask((lambda b, h, i, j: i >= j) if causal else None, rows, setting.device)
    runs = {
        "tiga": lambda: module(graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=WIDTH**-0.5),
        "SDPA": partial(peers.sdpa, None, q, k, v, is_causal=causal),
        "FlexAttention": partial(peers.fresh_flex(), q, k, v, block_mask=blocks),
    }
    mask = torch.ones(rows, rows, dtype=torch.bool, device=setting.device).tril() if causal else None
    exact = peers.plain(q.double(), k.double(), v.double(), mask)[0]

    def measure(name: str) -> tuple[float, ...]:
        run = runs[name]
        with torch.no_grad():
            out = run()
            error = relative(out.transpose(0, 1) if name == "tiga" else out[0], exact)
            check("a peer or tiga against float64", error, 0.0, 2e-3)
            once, many = replayed(run, setting), replayed(run, setting, calls=20)
            return a_call(run, setting), a_call(once, setting), 1000 * milliseconds(many, setting) / 20

    found, why = of_each(runs, measure, setting)
    cells = [" / ".join(map(figure, found[name])) if name in found else "failed" for name in runs]
    ratios = [
        " / ".join(f"{a / b:.2f}x" for a, b in zip(found["tiga"], found[name])) if name in found else ""
        for name in ("SDPA", "FlexAttention")
    ]
    return Line((*cells, *ratios, why))


def published_table(setting: Setting) -> Table:
    says = (
        "float16, no grad, microseconds: an eager call, host and device, of calls one after another / a replay of a "
        "CUDA graph of one call / one of 20 calls in a graph."
    )
    columns = ("tiga", "SDPA", "FlexAttention, compiled", "tiga / SDPA (time)", "tiga / Flex (time)", "remarks")
    lines = {name: lambda w=w: published(setting, *w) for name, w in PUBLISHED.items()}
    return Table("Published sizes", says, columns, lines)


# Relations that change.

STEPS = 6
DOCUMENTS = 54


@dataclass(frozen=True)
class Changing:
    """build: the graph of a step; mask: a mask_mod that reads tensors which `move` sets to that step's."""

    build: Callable[[int], tg.Graph]
    mask: Callable
    move: Callable[[int], Any]


def packed(rows: int, device: str) -> Changing:
    draw = torch.Generator().manual_seed(1)
    cuts = [
        torch.randperm(rows - 1, generator=draw)[: min(DOCUMENTS, rows) - 1].sort().values + 1 for _ in range(STEPS)
    ]
    edges = torch.tensor([0]), torch.tensor([rows])
    boundaries = [torch.cat([edges[0], c, edges[1]]).to(device, torch.int32) for c in cuts]
    row = torch.arange(rows, device=device)
    documents = [torch.bucketize(row, b[1:].long(), right=True) for b in boundaries]
    of = documents[0].clone()
    return Changing(
        lambda step: tg.Graph.cu_seqlens(boundaries[step], num_dst=rows, num_src=rows),
        lambda b, h, i, j: (i >= j) & (of[i] == of[j]),
        lambda step: of.copy_(documents[step]),
    )


def window(rows: int, device: str) -> Changing:
    left = torch.zeros((), dtype=torch.int64, device=device)
    widths = [min(1024 + 64 * step, rows) - 1 for step in range(STEPS)]
    return Changing(
        lambda step: tg.Graph.window(rows, widths[step]),
        lambda b, h, i, j: (i >= j) & (i - j <= left),
        lambda step: left.fill_(widths[step]),
    )


RELATIONS = {"relation, 54 documents of 32k": packed, "relation, window of 32k": window}


def relation(setting: Setting, make: Callable[[int, str], Changing]) -> Line:
    n = setting.rows(32768)
    changing = make(n, setting.device)
    x = torch.randn(n, 1, WIDTH, device=setting.device, dtype=torch.bfloat16)
    module, dense = Attention(), tg.Graph.dense(n)
    attend = lambda graph: module(graph=graph, src={"key": x, "value": x}, dst={"query": x}, scale=WIDTH**-0.5)
    steps = cycle(range(STEPS))
    build = lambda: changing.build(next(steps))
    with torch.no_grad():
        attend(changing.build(0)), attend(dense)
        written = passes.COUNTS["emit-tiles"]
        with Compilations() as compiled:
            for step in range(1, STEPS):
                attend(changing.build(step))
        new = f"{passes.COUNTS['emit-tiles'] - written} / {compiled.count}"
        graph = changing.build(0)
        host = host_call(lambda: attend(graph), setting) - host_call(lambda: attend(dense), setting)
        beside = besides_kernels(lambda: attend(graph), setting) if setting.on_gpu else float("nan")
        extra = peak_mib(lambda: attend(graph), setting) - peak_mib(lambda: attend(dense), setting)
        ours = [a_call(build, setting), peak_mib(build, setting)]
    blocks = lambda create: lambda: (changing.move(next(steps)), create(changing.mask, n, n, setting.device))[1]
    ways = {"eager": bare_mask, "compiled": torch.compile(bare_mask)}
    peer, why = {}, ""
    for name, create in ways.items():
        run = blocks(create)
        figures, said = attempt(lambda run=run: [a_call(run, setting, 5, 5), peak_mib(run, setting)], setting)
        peer[name] = figures if figures is not None else [float("nan")] * 2
        why += f"{name} failed: {said}. " if figures is None else ""
    cells = [figure(ours[0]), figure(host), figure(beside), f"{figure(ours[1])} / {figure(extra)}", new]
    return Line((*cells, *[f"{figure(us)}, {figure(mib)} MiB" for us, mib in peer.values()], why))


def bare_mask(mask: Callable, num_dst: int, num_src: int, device: str) -> Any:
    return create_block_mask(mask, None, None, num_dst, num_src, device=device)


def besides_kernels(fn: Callable[[], Tensor], setting: Setting) -> float:
    """Microseconds of a call on the device outside the kernels that visit edges."""
    found = device_microseconds(fn, setting)
    visiting = [name for name in found if name.startswith("propagate")]
    if not visiting:
        raise RuntimeError(f"no kernel is named propagate: {', '.join(name[:40] for name in found)}")
    return sum(us for name, us in found.items() if name not in visiting)


def relation_table(setting: Setting) -> Table:
    says = (
        "32,768 rows; new boundaries or a new width at every step, sizes given, nothing read from the device. "
        "Microseconds, host and device, of building the graph; what a call of it costs above one of a dense graph "
        "(host), and on the device outside the kernels that visit edges; MiB of building, and of a call above a dense "
        "graph's; kernels written / compiled over five new steps. Beside it create_block_mask over tensors changed in "
        "place."
    )
    columns = ("build us", "call, host us", "call, device us", "MiB, build / call", "new kernels")
    lines = {name: lambda make=make: relation(setting, make) for name, make in RELATIONS.items()}
    return Table("Building the relation", says, (*columns, "create_block_mask", "the same, compiled", "remarks"), lines)
