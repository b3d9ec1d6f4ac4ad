"""C++ on the CPU beside torch operations and PyG, in one run: `python -m benchmarks.cpu [--quick] [--out FOLDER]`.

All ways of a line take turns, and the least time of each is shown: other programs on the machine only ever add. Every
way is checked against the first before it is timed. PyG's rows are left out where torch_geometric is not installed.
Memory is the most that the process held during a forward and backward call, above what it held before.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

import tiga as tg

Way = Callable[[], Tensor]


@dataclass(frozen=True)
class Work:
    """Ways to compute one thing, by name, and the tensors that gradients are taken in."""

    title: str
    ways: dict[str, Way]
    inputs: list[Tensor]


class Gatv2(tg.MessagePassing):
    """PyG's GATv2Conv, with its parameters."""

    reducer = tg.online_softmax()

    def __init__(self, layer: nn.Module, heads: int, width: int) -> None:
        super().__init__()
        self.layer, self.heads, self.width = layer, heads, width

    def edge(self, src, dst, edge):
        x = self.layer.lin_l(src.x).unflatten(-1, (self.heads, self.width))
        y = self.layer.lin_r(dst.x).unflatten(-1, (self.heads, self.width))
        return self.reducer((leaky_relu(x + y, 0.2) * self.layer.att[0]).sum(-1), x)


class Projections(nn.Module):
    """The parameters of a GATv2Conv, where PyG is not installed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(width * heads, width * heads), nn.Linear(width * heads, width * heads)
        self.att, self.bias = nn.Parameter(torch.randn(1, heads, width)), nn.Parameter(torch.zeros(width * heads))


def gatv2(nodes: int, edges: int, heads: int = 4, width: int = 32) -> Work:
    edge_index = torch.randint(0, nodes, (2, edges))
    x = torch.randn(nodes, heads * width, requires_grad=True)
    ways: dict[str, Way] = {}
    try:
        from torch_geometric.nn import GATv2Conv
    except ImportError:
        layer: nn.Module = Projections(width, heads)
    else:
        layer = GATv2Conv(heads * width, width, heads, add_self_loops=False)
        compiled = torch.compile(layer, dynamic=False)
        ways = {"PyG eager": lambda: layer(x, edge_index), "PyG compiled": lambda: compiled(x, edge_index)}
    graph, program = tg.Graph.from_edge_index(edge_index, nodes, nodes), Gatv2(layer, heads, width)
    ours = lambda: program(graph=graph, src={"x": x}, dst={"x": x}).flatten(1) + layer.bias
    ways |= {"tiga, torch operations": with_setting("never", ours), "tiga, C++": with_setting("always", ours)}
    title = f"GATv2, {nodes:,} nodes, {edges:,} edges, {heads} x {width}"
    return Work(title, ways, [x, *layer.parameters()])


class Capped(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer(torch.tanh((src.key * dst.query).sum(-1) * scale / 30) * 30, src.value)


def attention(graph: tg.Graph, what: str, heads: int, width: int) -> Work:
    n = graph.num_dst
    query, key, value = (torch.randn(n, heads, width, requires_grad=True) for _ in range(3))
    program = Capped()
    ours = lambda: program(graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=width**-0.5)
    ways = {"tiga, torch operations": with_setting("never", ours), "tiga, C++": with_setting("always", ours)}
    return Work(f"softcapped attention, {what}, {n:,} nodes, {heads} x {width}", ways, [query, key, value])


def with_setting(value: str, fn: Way) -> Way:
    def run() -> Tensor:
        os.environ["TIGA_CPP"] = value
        return fn()

    return run


def step(way: Way, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(way().square().sum(), inputs, allow_unused=True)


@contextlib.contextmanager
def most_held(found: list[float]) -> Iterator[None]:
    """MiB that the process held at most, above what it held before; nan where the system does not say."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not held
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
    except (OSError, AttributeError):
        yield
        found.append(float("nan"))
        return
    yield
    found.append((status("VmHWM") - before) / 1024)


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(work: Work, repeats: int, clock: Callable[[], float]) -> list[str]:
    first, times = None, {(name, kind): float("inf") for name in work.ways for kind in ("forward", "both")}
    memory: dict[str, float] = {}
    for way in work.ways.values():
        found = [way().detach(), *[g for g in step(way, work.inputs) if g is not None]]
        first = found if first is None else first
        for x, y in zip(found, first):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * float(y.abs().max()))
    for name, way in work.ways.items():
        held: list[float] = []
        with most_held(held):
            step(way, work.inputs)
        memory[name] = held[0]
    for _ in range(repeats):
        for name, way in work.ways.items():
            for kind, call in (("forward", way), ("both", lambda way=way: step(way, work.inputs))):
                start = clock()
                with torch.set_grad_enabled(kind == "both"):
                    call()
                times[name, kind] = min(times[name, kind], (clock() - start) * 1e3)
    return [
        f"| {work.title} | {name} | {times[name, 'forward']:.1f} | {times[name, 'both']:.1f} | {memory[name]:.0f} |"
        for name in work.ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small works, to try the command out")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shared", action="store_true", help="others use the machine: processor time of one thread")
    parser.add_argument("--out", help="folder of the dated table")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.shared:
        torch.set_num_threads(1)
    clock = time.process_time if options.shared else time.perf_counter
    what = "processor time" if options.shared else "time"
    small = 8 if options.quick else 1
    works = [
        lambda: gatv2(20_000 // small, 300_000 // small),
        lambda: attention(tg.Graph.dense(2048 // small), "dense", 8, 64),
        lambda: attention(tg.Graph.dense(2048 // small), "dense", 8, 32),
        lambda: attention(tg.Graph.triangular(4096 // small), "causal", 4, 32),
        lambda: attention(tg.Graph.window(16384 // small, 256), "window 257", 4, 32),
    ]
    text = [
        f"# C++ on the CPU, {datetime.date.today()}",
        "",
        f"{os.cpu_count()} {platform.machine()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"`python -m benchmarks.cpu{' --shared' * options.shared}`; float32; "
        f"milliseconds of {what}, the least of {options.repeats} turns.",
        "",
        "| work | way | forward | forward + backward | MiB |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(text), flush=True)
    for make in works:
        rows = measure(make(), options.repeats, clock)
        text += rows
        print("\n".join(rows), flush=True)
    if options.out:
        path = Path(options.out) / f"cpu-{datetime.date.today()}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
