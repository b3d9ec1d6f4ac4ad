"""Microseconds of the host's time on the path of kernels: `python -m benchmarks.host`.

The median of calls one after another, the device working on behind them. `--device cpu` runs the same path where there
is no GPU, with launches mocked: kernels are planned, written and looked up, outputs and memory between kernels are made
on the CPU, and what would launch does nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

import tiga as tg
from benchmarks import command
from benchmarks.measure import Line, Setting, Table, environment, figure, host_call
from benchmarks.throughput import Attention
from tiga.codegen import kernels, launch, launch_rows
from tiga.ops import propagate

COLUMNS = ("operator", "module", "operator, grad", "module, grad", "forward and backward", "kernels, forward")


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((torch.nn.functional.leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


def listed(n: int, device: str) -> tg.Graph:
    dst = torch.arange(n, device=device).repeat_interleave(8)
    return tg.Graph.from_edge_index(torch.stack([torch.randint(n, dst.shape, device=device), dst]), n, n).prepare()


def packed(n: int, device: str) -> tg.Graph:
    boundaries = torch.tensor([0, n // 3, n], dtype=torch.int32, device=device)
    return tg.Graph.cu_seqlens(boundaries, num_dst=n, num_src=n)


def attention(n: int, heads: int, dtype: torch.dtype, graph: Callable[..., tg.Graph], setting: Setting) -> tuple:
    """(graph, module, arguments of a call, inputs): heads lie first in memory, as the published examples have them."""
    n, device = setting.rows(n), setting.device
    q, k, v = (torch.randn(heads, n, 64, device=device, dtype=dtype).transpose(0, 1) for _ in range(3))
    named = lambda q, k, v: {"src": {"key": k, "value": v}, "dst": {"query": q}, "scale": 0.125}
    return graph(n, device=device), Attention(), named, (q, k, v)


def gat(setting: Setting) -> tuple:
    n, device = setting.rows(256), setting.device
    named = lambda x, att: {"src": {"x": x}, "dst": {"x": x}, "att": att}
    return listed(n, device), Gat(), named, (torch.randn(n, 4, 32, device=device), torch.randn(4, 32, device=device))


WORKS = {
    "dense, N 1024 H 4 D 64, float16": partial(attention, 1024, 4, torch.float16, tg.Graph.dense),
    "causal, N 256 H 2 D 64, float16": partial(attention, 256, 2, torch.float16, tg.Graph.triangular),
    "two packed, N 256 H 2 D 64, float16": partial(attention, 256, 2, torch.float16, packed),
    "8 edges a row, N 256 H 2 D 64, float32": partial(attention, 256, 2, torch.float32, listed),
    "8 edges a row, GATv2, N 256 H 4 D 32, float32": gat,
}


@contextlib.contextmanager
def mocked_launches() -> Iterator[None]:
    """CPU tensors take the path of kernels, which are launched by functions that do nothing."""

    def bare(kernel: Any, programs: int) -> kernels.Bare:
        return kernels.Bare(
            lambda *words: None, (programs, 1, 1), (0, False, False, None, None, (4, 1, 0), *[None] * 3)
        )

    def runner(text: str, values: list, plan: Any, grid: tuple, device: Any) -> kernels.Runner:
        return kernels.Runner(lambda *words: None, 0, None, bare(None, grid[0]))

    def made(source: Any, plan: Any, tensors: dict, constants: dict, sizes: dict, device: Any, *_: Any) -> Any:
        values, changing = launch_rows.arguments(source, plan, tensors, constants, sizes, device)
        return launch_rows.Call(lambda grid, values: None, [None] * len(values), changing, 0, "nothing")

    with (
        mock.patch.object(propagate, "KERNEL_DEVICES", {"cpu"}),
        mock.patch.object(launch, "runner", runner),
        mock.patch.object(launch_rows, "made", made),
        mock.patch.object(launch_rows, "bare", bare),
    ):
        yield


def line(setting: Setting, make: Callable[[Setting], tuple]) -> Line:
    graph, module, named, inputs = make(setting)
    moving = [x.clone().requires_grad_() for x in inputs]
    operator = torch.ops.tiga.propagate.default
    call = lambda inputs: module(graph=graph, **named(*inputs))
    plain, with_grad = (module.lower(graph, **named(*x)) for x in (inputs, moving))
    grad = torch.randn_like(call(inputs))
    times = []
    for fn, enabled in (
        (lambda: operator(*plain), False),
        (lambda: call(inputs), False),
        (lambda: operator(*with_grad), True),
        (lambda: call(moving), True),
        (lambda: torch.autograd.grad(call(moving), moving, grad), True),
    ):
        with torch.set_grad_enabled(enabled):
            for _ in range(100):
                fn()
            times.append(min(host_call(fn, setting) for _ in range(3)))
    cells = [*map(figure, times), str(len(module.last_variant.runs[0].sources))]
    return Line(tuple(cells))


def main() -> None:
    options = command.arguments(__doc__).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # memory of a few rows is not asked of the system at every call
    setting = Setting(options.device, options.rows or (None if options.device == "cuda" else 32))
    says = "Microseconds a call."
    if not setting.on_gpu:
        says += f" Launches are mocked and cost nothing, at most {setting.most_rows} rows."
    text = command.head("host", environment(setting))
    rows = {name: lambda make=make: line(setting, make) for name, make in WORKS.items()}
    names = [name for name in rows if any(word in name for word in options.only)]
    with contextlib.nullcontext() if setting.on_gpu else mocked_launches():
        for name in names:  # once before any is timed: a row after compilations took up to 1.8 times as long
            rows[name]()
        found, lines = command.run(Table("Host time", says, COLUMNS, rows), names, setting)
    command.leave("host", options.out, text + found, lines, environment(setting), ("", ""))


if __name__ == "__main__":
    main()
