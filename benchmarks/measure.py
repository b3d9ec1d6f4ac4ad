"""Times, memory and tables of the benchmarks.

On a CPU a wall clock stands in for CUDA events and memory is not measured: a command can be tried out there.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """Where a benchmark runs, the most rows of its works (None: each its own), and milliseconds a figure."""

    device: str = "cuda"
    most_rows: int | None = None
    budget: int = 100

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def rows(self, count: int) -> int:
        return count if self.most_rows is None else min(count, self.most_rows)


@dataclass(frozen=True)
class Line:
    """One line of a table; bars: what its plot shows, by name, in its two panels."""

    cells: tuple[str, ...]
    bars: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """rows: what measures a line, by the line's name; says: what was measured, and how."""

    title: str
    says: str
    columns: tuple[str, ...]
    rows: dict[str, Callable[[], Line]]


# Times.


def synchronize(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize()


def milliseconds(fn: Callable[[], Any], setting: Setting) -> float:
    """Median of the device's time of a call, its cache emptied before each."""
    if setting.on_gpu:
        from triton.testing import do_bench

        return do_bench(fn, warmup=setting.budget // 4, rep=setting.budget, return_mode="median")
    return a_call(fn, setting, calls=1, batches=3) / 1000


def in_turns(runs: dict[str, Callable[[], Any]], setting: Setting, turns: int = 5) -> dict[str, float]:
    """Of each the median over turns of `milliseconds`: a device that slows as it warms slows them all alike. Every turn
    begins with another of them, so that none always follows the one that leaves the device the warmest."""
    short = dataclasses.replace(setting, budget=max(setting.budget // turns, 5))
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(turns):
        first = turn * len(names) // turns
        for name in names[first:] + names[:first]:
            found[name].append(milliseconds(runs[name], short))
    return {name: statistics.median(times) for name, times in found.items()}


def a_call(fn: Callable[[], Any], setting: Setting, calls: int = 100, batches: int = 15) -> float:
    """Microseconds of one call, host and device: the median of batches of calls between two synchronizations; of slow
    calls fewer a batch, so that it takes a tenth of a second."""
    fn()
    synchronize(setting)
    begun = time.perf_counter()
    fn()
    synchronize(setting)
    calls = max(1, min(calls, int(0.1 / (time.perf_counter() - begun))))
    for _ in range(calls // 10):
        fn()
    return _batches(fn, setting, calls, batches, wait=True)


def host_call(fn: Callable[[], Any], setting: Setting, calls: int = 50, batches: int = 15) -> float:
    """Microseconds that the host spends on one call; the device works on behind it."""
    return _batches(fn, setting, calls, batches, wait=False)


def _batches(fn: Callable[[], Any], setting: Setting, calls: int, batches: int, wait: bool) -> float:
    times = []
    for _ in range(batches):
        synchronize(setting)
        start = time.perf_counter_ns()
        for _ in range(calls):
            fn()
        if wait:
            synchronize(setting)
        times.append((time.perf_counter_ns() - start) / calls)
    synchronize(setting)
    return statistics.median(times) / 1000


def replayed(fn: Callable[[], Any], setting: Setting, calls: int = 1) -> Callable[[], Any]:
    """A replay of `calls` captured calls; on a CPU the calls themselves."""
    if not setting.on_gpu:
        return lambda: [fn() for _ in range(calls)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kept = [fn() for _ in range(calls)]

    def replay(kept: list = kept) -> None:
        captured.replay()

    return replay


def copy_bandwidth(setting: Setting) -> float:
    """Bytes read and written a second by a large copy, in GB/s."""
    size = 2**31 if setting.on_gpu else 2**22
    x = torch.empty(size, dtype=torch.uint8, device=setting.device).random_()
    y = torch.empty_like(x)
    return 2 * size / milliseconds(lambda: y.copy_(x), setting) / 1e6


# Memory and compilations.


def peak_mib(fn: Callable[[], Any], setting: Setting) -> float:
    """The most memory of a call above what was held before it; nan on a CPU."""
    if not setting.on_gpu:
        fn()
        return float("nan")
    fn()
    clear(setting)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = fn()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def clear(setting: Setting) -> None:
    gc.collect()
    if setting.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Compilations:
    """Counts, while it is entered, the kernels that Triton compiled, or took from its cache on disk."""

    def __enter__(self) -> Compilations:
        from triton import knobs

        self.count, self.kept = 0, knobs.compilation.listener
        knobs.compilation.listener = self.add
        return self

    def add(self, **of: Any) -> None:
        self.count += 1

    def __exit__(self, *exception: object) -> None:
        from triton import knobs

        knobs.compilation.listener = self.kept


def device_microseconds(fn: Callable[[], Any], setting: Setting, calls: int = 15) -> dict[str, float]:
    """Microseconds a call of every kernel by name: the median of calls that launch the same."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        fn()
    synchronize(setting)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            fn()
        synchronize(setting)
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    found: dict[str, list[float]] = {}
    for event in events:
        found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    each = {name: len(times) // calls for name, times in found.items()}
    return {
        name: statistics.median([sum(times[at * each[name] : (at + 1) * each[name]]) for at in range(calls)])
        for name, times in found.items()
        if each[name]
    }


# Correctness.


def relative(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact||; nan passes no comparison."""
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def check(name: str, error: float, usual: float, ulps: float) -> None:
    """At most twice the usual error and some units of rounding."""
    if not error <= 2 * usual + ulps:
        raise AssertionError(f"{name}: relative error {error:.2e} where {usual:.2e} is usual")


# Failures, and what is printed.


def attempt(fn: Callable[[], Any], setting: Setting) -> Any:
    """(what fn returns, ""), or (None, the first line of its error): a failing work leaves the others alone."""
    try:
        return fn(), ""
    except Exception as e:
        traceback.print_exc(limit=-3, file=sys.stderr)
        return None, f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0][:120]}"
    finally:
        try:
            clear(setting)
        except RuntimeError as e:  # a fault of the device ends all that follows; each line says so
            print(e, file=sys.stderr)


def of_each(runs: Iterable[str], measure: Callable[[str], Any], setting: Setting) -> tuple[dict[str, Any], str]:
    """(figures by name, which peers failed and how); that tiga fails is an error."""
    found: dict[str, Any] = {}
    why = []
    for name in runs:
        figures, said = attempt(lambda name=name: measure(name), setting)
        if figures is not None:
            found[name] = figures
        elif name == "tiga":
            raise RuntimeError(said)
        else:
            why.append(f"{name} failed: {said}.")
    return found, " ".join(why)


def figure(x: float) -> str:
    """Three digits."""
    if x != x:
        return "-"
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def pair(values: tuple[float, float] | None) -> str:
    return "" if values is None else " / ".join(map(figure, values))


def environment(setting: Setting) -> str:
    import triton

    name = torch.cuda.get_device_name() if setting.on_gpu else "CPU"
    driver = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if setting.on_gpu else ""
    return f"{name}, torch {torch.__version__}{driver}, triton {triton.__version__}"
