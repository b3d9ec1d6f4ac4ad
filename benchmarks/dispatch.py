"""What a call costs before any arithmetic: `python -m benchmarks.dispatch`.

Causal attention of 4 nodes, 1 head of 4 features, three tensors, on one CPU thread. The operator and the module are
timed with the implementation replaced by one that returns tensors made beforehand, so that what is left is dispatch,
autograd's bookkeeping and the trace; then with the real one (a tenth as many calls). The operator is called through
the dispatcher, which a module leaves out where nothing in it would take part. Each figure is the median of 10,000
calls, the least of several such medians: other programs on the machine only ever add.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator

import torch

import tiga as tg
from tiga.ops import propagate

TARGETS = {"operator, no grad": 15, "operator, with grad": 20, "module, no grad": 50}


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def calls() -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    program, graph, operator = Attention(), tg.Graph.triangular(4), torch.ops.tiga.propagate.default
    query, key, value = (torch.randn(4, 1, 4) for _ in range(3))
    moving = [t.clone().requires_grad_() for t in (query, key, value)]
    plain = program.lower(graph, src={"key": key, "value": value}, dst={"query": query}, scale=0.5)
    with_grad = program.lower(graph, src={"key": moving[1], "value": moving[2]}, dst={"query": moving[0]}, scale=0.5)

    return {
        "operator, no grad": lambda: operator(*plain),
        "operator, with grad": lambda: operator(*with_grad),
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


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """The implementation returns the output made beforehand, and the lse that gradients keep."""
    implementation, outputs = propagate.composite, [torch.empty(4, 1, 4), torch.empty(4, 1, 1)]
    augmented = tg.adjoint.augment(calls()["trace and text alone"]().program)
    propagate.composite = lambda text, tensors, ints, scalars: outputs[:] if text == augmented else outputs[:1]
    try:
        yield
    finally:
        propagate.composite = implementation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="calls a median")
    parser.add_argument("--repeats", type=int, default=5, help="medians, of which the least is shown")
    parser.add_argument("--profile", action="store_true", help="where the module's time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed = calls()
    real = {name: min(median(fn, options.count // 10) for _ in range(options.repeats)) for name, fn in timed.items()}
    with replaced():
        bare = {name: min(median(fn, options.count) for _ in range(options.repeats)) for name, fn in timed.items()}
        print(f"{'microseconds a call':24} {'replaced':>9} {'target':>7} {'real':>9}")
        for name in timed:
            print(f"{name:24} {bare[name]:9.1f} {TARGETS.get(name, ''):>7} {real[name]:9.1f}")
        if options.profile:
            with cProfile.Profile() as profile:
                for _ in range(options.count):
                    timed["module, no grad"]()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
