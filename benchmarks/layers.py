"""Graph attention layers beside PyG's, eager and compiled, in one run on one GPU.

`python -m benchmarks.layers [--only WORDS ...] [--quick] [--out FOLDER]`

Layers are called as their users call them; PyG's get the edge list, tiga's a graph of it that was prepared before, and
the time of building it is a line of its own. Outputs and all gradients of a line are compared, with PyG's in float64
where that fits and else with PyG's as timed, before it is timed: gradients to within what the slope of leaky_relu
leaves open where a score is 0 but for rounding. `--device cpu --rows 200` tries the command out without a GPU.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tiga as tg
from benchmarks import command
from benchmarks.kinks import OtherSide
from benchmarks.measure import (
    Line,
    Setting,
    Table,
    attempt,
    check,
    environment,
    figure,
    milliseconds,
    of_each,
    pair,
    peak_mib,
    replayed,
)

HEADS, WIDTH, FEATURES = 4, 32, 128
LAYERS = {"GATConv": {"add_self_loops": False}, "GATv2Conv": {"add_self_loops": False}, "TransformerConv": {}}
MOST_DOUBLE = 3_000_000  # edges whose float64 features PyG still holds


@dataclass(frozen=True)
class Shape:
    """A random graph: rows, edges, the exponent by which degrees fall at both ends, edges of one hub row."""

    rows: int
    edges: int
    fall: float = 0.0
    hub: int = 0
    empty: float = 0.0


SHAPES = {
    "arxiv-shaped, 169k nodes, 1.17M edges": Shape(169_343, 1_166_243, 0.55),
    "products-shaped, 400k nodes, 20M edges": Shape(400_000, 20_000_000, 0.45),
    "hub of 21,810, 63k nodes, 299k edges": Shape(63_000, 299_000, hub=21_810, empty=1 / 3),
}
QUICK = ("arxiv", "hub")
PANELS = ("billion edges a second, forward", "billion edges a second, forward and backward")


def edge_list(shape: Shape, most: int | None) -> tuple[Tensor, int]:
    """(edges sorted by destination, rows) on the host; with `most` rows as many edges a row as otherwise."""
    rows = shape.rows if most is None else min(shape.rows, most)
    part, draw = rows / shape.rows, torch.Generator().manual_seed(0)
    edges, hub = int(shape.edges * part), int(shape.hub * part)

    def ends(count: int, among: Tensor) -> Tensor:
        weight = torch.arange(1, len(among) + 1, dtype=torch.float64) ** -shape.fall
        below = weight.cumsum(0) / weight.sum()
        at = torch.searchsorted(below, torch.rand(count, generator=draw, dtype=torch.float64))
        return among[at.clamp_(max=len(among) - 1)]

    every = torch.randperm(rows, generator=draw)
    reached = every[: rows - int(rows * shape.empty)]
    dst = torch.cat([ends(edges - hub, reached), reached[:1].expand(hub)]).sort().values
    return torch.stack([ends(edges, every), dst]), rows


@dataclass
class Work:
    """One layer on one graph: its peers' calls by name, on the same parameters and inputs."""

    x: Tensor
    edges: Tensor
    calls: dict[str, tuple[Any, Callable[[Tensor], Tensor]]]

    def outputs(self, name: str, x: Tensor | None = None) -> list[Tensor]:
        """The result, and the gradients of x and of all parameters for a cotangent that differs row by row."""
        layer, call = self.calls[name]
        x = self.x if x is None else x
        out = call(x)
        given = torch.linspace(-0.5, 1, out.shape[0], dtype=out.dtype, device=out.device)[:, None]
        return [out, *torch.autograd.grad(out, [x, *layer.parameters()], given.expand_as(out))]


def made(setting: Setting, name: str, edges: Tensor, rows: int) -> Work:
    from torch_geometric import nn as peers

    torch.manual_seed(0)
    torch._dynamo.reset()
    theirs = getattr(peers, name)(FEATURES, WIDTH, heads=HEADS, **LAYERS[name]).to(setting.device)
    ours = getattr(tg.nn, name)(FEATURES, WIDTH, heads=HEADS, **LAYERS[name]).to(setting.device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(rows, FEATURES, device=setting.device, requires_grad=True)
    graph = tg.Graph.from_edge_index(edges, rows, rows).prepare()
    compiled, ours_compiled = torch.compile(theirs, dynamic=False), torch.compile(ours, dynamic=False)
    calls = {
        "tiga": (ours, lambda x: ours(x, graph)),
        "tiga compiled": (ours, lambda x: ours_compiled(x, graph)),
        "PyG compiled": (theirs, lambda x: compiled(x, edges)),
        "PyG": (theirs, lambda x: theirs(x, edges)),
    }
    return Work(x, edges, calls)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of each tensor, relative to its norm; of those that are sums to zero, such as a key's bias, to a large one's."""
    norms = [b.norm().item() for b in exact]
    return [((a.double() - b).norm() / max(n, 1e-2 * max(norms))).item() for a, b, n in zip(found, exact, norms)]


def reference(work: Work) -> tuple[list[Tensor], list[float]]:
    """(outputs, usual errors): PyG's in float64, beside which its float32 errs; of large graphs its float32 alone.

    Where a score is 0 but for rounding either slope of leaky_relu is right: usual is the distance of those two as well.
    """
    exact = usual = [t.detach() for t in work.outputs("PyG")]
    theirs, x = work.calls["PyG"][0], work.x
    small = work.edges.shape[1] <= MOST_DOUBLE
    if small:
        theirs.double()
        x = x.detach().double().requires_grad_()
    try:
        if small:
            exact = [t.detach() for t in work.outputs("PyG", x)]
        with OtherSide():
            other = [t.detach() for t in work.outputs("PyG", x)]
    finally:
        theirs.float()
    exact = [t.double() for t in exact]
    rounding = errors(usual, exact) if small else [1e-4] * len(usual)
    return exact, [a + b for a, b in zip(rounding, errors(other, exact))]


REPLAYED = ("tiga", "tiga compiled", "PyG compiled")


def of_graphs(work: Work, name: str, setting: Setting) -> tuple[float, ...]:
    """Milliseconds of CUDA graphs of forward, and of forward and backward; not a number where none could be made."""
    forward = lambda: work.calls[name][1](work.x).detach()
    both = lambda: [t.detach() for t in work.outputs(name)]
    times = lambda: tuple([milliseconds(replayed(fn, setting), setting) for fn in (forward, both)])
    return (attempt(times, setting)[0] if name in REPLAYED else None) or (float("nan"),) * 2


def line(setting: Setting, layer: str, shape: Shape) -> Line:
    edges, rows = edge_list(shape, setting.most_rows)
    work = made(setting, layer, edges.to(setting.device), rows)
    exact, usual = reference(work)
    names = ["out", "x", *[n for n, _ in work.calls["tiga"][0].named_parameters()]]

    def measure(name: str) -> tuple[float, ...]:
        for of, error, bound in zip(names, errors(work.outputs(name), exact), usual):
            check(f"{layer}, {name}, {of}", error, bound, 1e-5)
        forward = work.calls[name][1]
        return (
            milliseconds(lambda: forward(work.x), setting),
            milliseconds(lambda: work.outputs(name), setting),
            peak_mib(lambda: work.outputs(name), setting),
            *of_graphs(work, name, setting),
        )

    building = milliseconds(lambda: tg.Graph.from_edge_index(work.edges, rows, rows).prepare(), setting)
    # last what a compiler made of the peer: a kernel of its own that faults takes the device away from all that follow
    found, why = of_each(sorted(work.calls, key=lambda name: name == "PyG compiled"), measure, setting)
    bar = found.get("PyG compiled")
    ours = min((found[n] for n in ("tiga", "tiga compiled") if n in found), key=lambda f: f[1])
    times = [pair(found[n][:2]) if n in found else "" for n in work.calls]
    memory = [figure(found[n][2]) if n in found else "" for n in ("tiga", "PyG compiled", "PyG")]
    ratios = lambda a, b: " / ".join(f"{figure(y / x)}x" for x, y in zip(a, b))
    ratio, device = ("", "") if bar is None else (ratios(ours[:2], bar), ratios(ours[3:], bar[3:]))
    graphs = ", ".join([f"{n} {pair(found[n][3:])}" for n in REPLAYED if n in found])
    bars = {n: (edges.shape[1] / f[0] / 1e6, edges.shape[1] / f[1] / 1e6) for n, f in found.items()}
    return Line((*times, ratio, graphs, device, " / ".join(memory), figure(building), why), bars)


def table(setting: Setting, only: list[str], quick: bool) -> Table:
    rows = {
        f"{layer}, {name}": partial(line, setting, layer, shape)
        for name, shape in SHAPES.items()
        for layer in LAYERS
        if any(word in f"{layer}, {name}" for word in only) and (not quick or name.startswith(QUICK))
    }
    says = (
        f"Milliseconds forward / forward and backward, both with gradients asked for, {FEATURES} features to {HEADS} "
        f"heads x {WIDTH}, float32, random power-law graphs, one layer with its projections. Ratios are PyG compiled's "
        "time over that of the faster tiga column; replayed: of CUDA graphs of the same calls, which leave out what "
        "the host does in each; memory is the most above what was held, of forward and backward; "
        "building is of the graph that tiga's columns are given, each list of edges once."
    )
    columns = (
        "tiga",
        "tiga compiled",
        "PyG compiled",
        "PyG",
        "ratio",
        "replayed ms",
        "ratio, replayed",
        "MiB tiga / PyG compiled / PyG",
        "building",
        "remarks",
    )
    return Table("Graph attention layers", says, columns, rows)


def main() -> None:
    options = command.arguments(__doc__, "without the large graph, shorter timings").parse_args()
    warnings.simplefilter("ignore")
    setting = Setting(options.device, options.rows, 40 if options.quick else 100)
    import torch_geometric

    where = f"{environment(setting)}, PyG {torch_geometric.__version__}"
    head, start = command.head("layers", where), time.perf_counter()
    made_table = table(setting, options.only, options.quick)
    text, lines = command.run(made_table, list(made_table.rows), setting)
    print(f"\n{time.perf_counter() - start:.0f} s", flush=True)
    command.leave("layers", options.out, [*head, *text], lines, where, PANELS)


if __name__ == "__main__":
    main()
