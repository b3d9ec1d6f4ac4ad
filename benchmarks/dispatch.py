"""What a call costs before any arithmetic: `python -m benchmarks.dispatch`.

Causal attention of 4 nodes, 1 head of 4 features, three tensors, on one CPU thread. The operator and the module are
timed with the implementation replaced by one that returns tensors made beforehand, so that what is left is dispatch,
autograd's bookkeeping and the trace; then with the real one (a tenth as many calls). Each figure is the median of
10,000 calls, the least of several such medians: other programs on the machine only ever add.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable

import torch

import tiga as tg

TARGETS = {"operator, no grad": 15, "operator, with grad": 20, "module, no grad": 50}


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def calls() -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    program, graph, propagate = Attention(), tg.Graph.triangular(4), torch.ops.tiga.propagate.default
    query, key, value = (torch.randn(4, 1, 4) for _ in range(3))
    moving = [t.clone().requires_grad_() for t in (query, key, value)]
    plain = program.lower(graph, src={"key": key, "value": value}, dst={"query": query}, scale=0.5)
    with_grad = program.lower(graph, src={"key": moving[1], "value": moving[2]}, dst={"query": moving[0]}, scale=0.5)

    return {
        "operator, no grad": lambda: propagate(*plain),
        "operator, with grad": lambda: propagate(*with_grad),
        "module, no grad": lambda: program(
            graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=0.5
        ),
        "trace and text alone": lambda: program.lower(
            graph, src={"key": key, "value": value}, dst={"query": query}, scale=0.5
        ),
    }


def median(fn: Callable[[], object], count: int) -> float:
    """Microseconds of one call."""
    for _ in range(count // 20):
        fn()
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        fn()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def replaced() -> torch.library.Library:
    """An implementation, until the library object dies, that returns the output, and the lse that gradients keep."""
    outputs = [torch.empty(4, 1, 4), torch.empty(4, 1, 1)]
    library = torch.library.Library("tiga", "IMPL")
    augmented = tg.adjoint.augment(
        Attention()
        .lower(
            tg.Graph.triangular(4), src={"key": outputs[0], "value": outputs[0]}, dst={"query": outputs[0]}, scale=0.5
        )
        .program
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(
            "propagate", lambda text, tensors, ints, scalars: outputs[:] if text == augmented else outputs[:1], "CPU"
        )
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="calls a median")
    parser.add_argument("--repeats", type=int, default=5, help="medians, of which the least is shown")
    parser.add_argument("--profile", action="store_true", help="where the module's time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed = calls()
    real = {name: min(median(fn, options.count // 10) for _ in range(options.repeats)) for name, fn in timed.items()}
    library = replaced()
    bare = {name: min(median(fn, options.count) for _ in range(options.repeats)) for name, fn in timed.items()}
    print(f"{'microseconds a call':24} {'replaced':>9} {'target':>7} {'real':>9}")
    for name in timed:
        print(f"{name:24} {bare[name]:9.1f} {TARGETS.get(name, ''):>7} {real[name]:9.1f}")
    if options.profile:
        with cProfile.Profile() as profile:
            for _ in range(options.count):
                timed["module, no grad"]()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    del library


if __name__ == "__main__":
    main()
