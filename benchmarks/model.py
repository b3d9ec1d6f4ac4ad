"""Compiled models with tiga beside the same with SDPA, FlexAttention, PyG or plain torch, in one run on one GPU.

`python -m benchmarks.model [--only WORDS ...] [--out FOLDER]`

Every model's results and gradients are checked against plain torch in float64 before it is timed: none may err by more
than twice what plain torch errs in the model's own dtype, and some units of rounding. `--device cpu --rows 64 --backend
aot_eager` tries the command out without a GPU, and without Inductor's code.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiga as tg
from benchmarks import command
from benchmarks.measure import (
    Line,
    Setting,
    Table,
    attempt,
    check,
    clear,
    environment,
    figure,
    milliseconds,
    of_each,
    peak_mib,
    relative,
    replayed,
)
from benchmarks.models import Attention, Block, EdgeModel, EdgeNetwork, Gatv2, Layers, angles, segment_softmax

WIDTH, HEADS = 2048, 16
TIMES = ("ms forward / step", "replayed forward / step")
COLUMNS = ("", "kernels forward / step", *TIMES, "peak MiB of a step", "s to compile cold / warm")


@dataclass(frozen=True)
class Work:
    """One model in several ways: each makes a module from the open part; all get the same parameters and inputs.

    plain: the way that runs without a compiler, in float64 as well.
    """

    ways: dict[str, Callable[[], nn.Module]]
    plain: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    ulps: float

    def module(self, made: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return made().to(self.inputs[0].device, self.inputs[0].dtype)


def transformer(setting: Setting, lengths: list[int]) -> Work:
    """A block of bf16 over documents of these lengths; where they are one length, SDPA has them as a batch."""
    device, rows = setting.device, sum(lengths)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    width = WIDTH if setting.on_gpu else 32
    heads = HEADS if setting.on_gpu else 2
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    program, graph = Attention(), tg.Graph.cu_seqlens(bounds.to(device), num_dst=rows, num_src=rows)
    scale = (width // heads) ** -0.5

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return program(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=scale)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(len(lengths), lengths[0], heads, -1).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(1, 2).reshape(rows, heads, -1)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Document by document, each computed again in backward: no more than one's scores are there at a time."""
        parts = zip(*[x.split(lengths) for x in (q, k, v)])
        return torch.cat([checkpoint(one_document, *part, scale, use_reentrant=False) for part in parts])

    def flex() -> Callable[..., Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        inside = lambda b, h, i, j: (document[i] == document[j]) & (j <= i)
        mask = create_block_mask(inside, None, None, rows, rows, device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return flex_attention(q, k, v, block_mask=mask, scale=scale)[0].transpose(0, 1)

        return attend

    ways: dict[str, Callable[[], nn.Module]] = {"tiga": lambda: Block(width, heads, ours)}
    if len(set(lengths)) == 1:
        ways["SDPA"] = lambda: Block(width, heads, sdpa)
    if setting.on_gpu:
        ways["FlexAttention"] = lambda: Block(width, heads, flex())
    x = torch.randn(rows, width, device=device, dtype=dtype)
    inputs = x, *angles(positions, width // heads, dtype)
    return Work(ways, lambda: Block(width, heads, plain), inputs, 1e-2 if setting.on_gpu else 1e-5)


def one_document(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of rows (tokens, heads, width)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)


def random_edges(rows: int, count: int, device: str) -> Tensor:
    return torch.randint(rows, (2, count), generator=torch.Generator().manual_seed(1)).to(device)


def two_layers(setting: Setting, rows: int, degree: int, width: int, heads: int) -> Work:
    """GATv2, twice, in float32: shaped as a citation graph."""
    n = setting.rows(rows)
    edges = random_edges(n, n * degree, setting.device)
    program, graph = Gatv2(), tg.Graph.from_edge_index(edges, num_src=n, num_dst=n)

    def ours(left: Tensor, right: Tensor, att: Tensor) -> Tensor:
        return program(graph=graph, src={"x": left}, dst={"x": right}, att=att)

    def pyg(left: Tensor, right: Tensor, att: Tensor) -> Tensor:
        """GATv2Conv's message and aggregation on projected fields, by PyG's own softmax and scatter."""
        from torch_geometric.utils import scatter, softmax

        score = (F.leaky_relu(left[edges[0]] + right[edges[1]], 0.2) * att).sum(-1)
        weight = softmax(score, edges[1], num_nodes=n)
        return scatter(left[edges[0]] * weight[..., None], edges[1], 0, dim_size=n, reduce="sum")

    def plain(left: Tensor, right: Tensor, att: Tensor) -> Tensor:
        score = (F.leaky_relu(left[edges[0]] + right[edges[1]], 0.2) * att).sum(-1)
        return segment_softmax(score, left[edges[0]], edges[1], n)

    ways = {name: functools.partial(Layers, width, heads, mix) for name, mix in (("tiga", ours), ("plain", plain))}
    if setting.on_gpu:
        ways["PyG"] = functools.partial(Layers, width, heads, pyg)
    return Work(ways, ways["plain"], (torch.randn(n, width, device=setting.device),), 1e-4)


def edge_network(setting: Setting, rows: int, degree: float, width: int, hidden: int) -> Work:
    """A network of both ends scores each edge, in float32."""
    n = setting.rows(rows)
    edges = random_edges(n, int(n * degree), setting.device)
    graph = tg.Graph.from_edge_index(edges, num_src=n, num_dst=n)

    def ours(network: nn.Module) -> Callable[..., Tensor]:
        program = EdgeNetwork(network)
        return lambda x, h: program(graph=graph, src={"x": x, "h": h}, dst={"x": x})

    def plain(network: nn.Module) -> Callable[..., Tensor]:
        def mix(x: Tensor, h: Tensor) -> Tensor:
            score = network(torch.cat([x[edges[0]], x[edges[1]]], -1)).squeeze(-1)
            return segment_softmax(score, h[edges[0]], edges[1], n)

        return mix

    def pyg(network: nn.Module) -> Callable[..., Tensor]:
        def mix(x: Tensor, h: Tensor) -> Tensor:
            from torch_geometric.utils import scatter, softmax

            score = network(torch.cat([x[edges[0]], x[edges[1]]], -1)).squeeze(-1)
            weight = softmax(score, edges[1], num_nodes=n)
            return scatter(h[edges[0]] * weight[:, None], edges[1], 0, dim_size=n, reduce="sum")

        return mix

    ways = {
        name: functools.partial(EdgeModel, width, hidden, make) for name, make in (("tiga", ours), ("plain", plain))
    }
    if setting.on_gpu:
        ways["PyG"] = functools.partial(EdgeModel, width, hidden, pyg)
    return Work(ways, ways["plain"], (torch.randn(n, width, device=setting.device),), 1e-4)


# Measuring.


@dataclass(frozen=True)
class Figures:
    """replayed: times of CUDA graphs of the same calls, nan where none could be made."""

    kernels: tuple[float, float]
    times: tuple[float, float]
    replayed: tuple[float, float]
    peak: float
    compiled: tuple[float, float]

    def cells(self) -> list[str]:
        both = lambda values: " / ".join("-" if x != x else figure(x) for x in values)
        return [*[both(x) for x in (self.kernels, self.times, self.replayed)], figure(self.peak), both(self.compiled)]


def step(fn: Callable[..., Tensor], module: nn.Module, inputs: tuple, given: Tensor) -> list[Tensor]:
    """The result, and the gradients of the first input and of every parameter."""
    x = inputs[0].detach().requires_grad_()
    out = fn(x, *inputs[1:])
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], given)]


def seconds_to_compile(module: nn.Module, work: Work, given: Tensor, backend: str) -> tuple[Any, float, float]:
    """The compiled module, and the seconds of its first step without a cache of compiled code and with it."""
    from torch._inductor.utils import fresh_cache

    found = []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            fn = torch.compile(module, backend=backend)
            start = time.perf_counter()
            step(fn, module, work.inputs, given)
            found.append(time.perf_counter() - start)
    return fn, found[0], found[1]


def kernels(fn: Callable[[], Any], setting: Setting) -> float:
    """Kernels launched by one call; nan on a CPU."""
    if not setting.on_gpu:
        return float("nan")
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        fn()
        torch.cuda.synchronize()
    on_device = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return float(len([e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))]))


@dataclass(frozen=True)
class Reference:
    """Plain torch: what a step gives in float64, and how far it is from that in the model's own dtype."""

    exact: list[Tensor]
    usual: list[float]
    names: list[str]


def reference(work: Work, given: Tensor) -> Reference:
    module = work.module(work.plain)
    rounded = step(module, module, work.inputs, given)
    module.double()
    exact = step(module, module, tuple([t.double() for t in work.inputs]), given.double())
    usual = [relative(a, b) for a, b in zip(rounded, exact)]
    return Reference(
        exact, usual, ["result", *[f"gradient of {n}" for n, _ in [("x", None), *module.named_parameters()]]]
    )


def measured(work: Work, name: str, backend: str, of: Reference, given: Tensor, setting: Setting) -> Figures:
    module = work.module(work.ways[name])
    fn, cold, warm = seconds_to_compile(module, work, given, backend)
    for what, got, want, usual in zip(of.names, step(fn, module, work.inputs, given), of.exact, of.usual):
        check(f"{name}, {what}", relative(got, want), usual, work.ulps)

    def forward() -> Tensor:
        with torch.no_grad():
            return fn(*work.inputs)

    train = lambda: step(fn, module, work.inputs, given)
    counts = kernels(forward, setting), kernels(train, setting)
    times = milliseconds(forward, setting), milliseconds(train, setting)
    graphs = lambda: tuple([milliseconds(replayed(fn, setting), setting) for fn in (forward, train)])
    found = attempt(graphs, setting)[0] if setting.on_gpu else None
    return Figures(counts, times, found or (float("nan"), float("nan")), peak_mib(train, setting), (cold, warm))


def line(make: Callable[[], Work], backend: str, setting: Setting) -> Line:
    work = make()
    given = torch.ones_like(work.inputs[0])
    of = reference(work, given)
    clear(setting)
    figures, why = of_each(work.ways, lambda name: measured(work, name, backend, of, given, setting), setting)
    columns = zip(*[[name, *f.cells()] for name, f in figures.items()])
    cells = ["<br>".join(column) for column in columns]
    cells[0] += f" {why}" if why else ""
    return Line(tuple(cells), {name: f.times for name, f in figures.items()})


def table(backend: str, setting: Setting) -> Table:
    long, documents = setting.rows(32768), [517, 3000, 64, 1400, 2900, 311]
    same, mixed = max(1, long // 4096), [max(1, n * long // 32768) for n in documents * 4]
    works = {
        "transformer block, causal 4k": lambda: transformer(setting, [long // same] * same),
        "transformer block, documents": lambda: transformer(setting, mixed),
        "two layers of GATv2": lambda: two_layers(setting, 169_343, 7, 128 if setting.on_gpu else 16, 4),
        "edge network": lambda: edge_network(setting, 20_000, 6.8, 64 if setting.on_gpu else 8, 64),
    }
    says = (
        f"torch.compile(backend={backend!r}) of each. A step is forward and backward. Kernels are what one call "
        "launched. Replayed: of CUDA graphs of the same calls, which leave out what the host does. Cold: no cache of "
        "compiled code; warm: from that cache."
    )
    rows = {name: functools.partial(line, make, backend, setting) for name, make in works.items()}
    return Table("Compiled models", says, COLUMNS, rows)


def main() -> None:
    parser = command.arguments(__doc__)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    setting = Setting(options.device, options.rows)
    where, made = environment(setting), table(options.backend, setting)
    head = command.head("model", where)
    text, lines = command.run(made, [n for n in made.rows if any(w in n for w in options.only)], setting)
    command.leave("model", options.out, [*head, *text], lines, where, ("ms, forward", "ms, a training step"))


if __name__ == "__main__":
    main()
