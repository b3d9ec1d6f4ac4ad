"""Tuning: the plans of a kernel are timed on the tensors of a call, and the fastest is kept on disk, by content."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tiga.codegen import cache
from tiga.codegen.plan import Plan, candidates

REPEATS = 10
_active = 0


@contextlib.contextmanager
def tune() -> Iterator[None]:
    """The fastest plan = argmin over plans of the median time of a kernel, for each kernel that runs inside.

    For kernels over implicit relations on CUDA. The first call of a kernel inside runs its candidate plans some times
    on that call's tensors, with a progress bar on a terminal, and takes the fastest whose registers suffice. It is
    kept on disk (`TIGA_CACHE_DIR`, else ~/.cache/tiga) by the kernel's text, the device and the sizes to the next
    power of two, and taken from then on, by later processes as well. Plans are tile sizes, warps and stages: results
    are as accurate with each and repeat bit for bit, but another tile size adds in another order. Nothing is timed
    while a CUDA graph is captured; plans found before serve there too.
    """
    global _active
    _active += 1
    try:
        yield
    finally:
        _active -= 1


def asked() -> bool:
    """Whether a call runs inside `tune`."""
    return _active > 0


def tuning(device: torch.device) -> bool:
    """Whether a kernel that is launched now may be timed."""
    if not _active or torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def key_of(text: str, device: torch.device, sizes: tuple, words: tuple) -> str:
    """A name for a kernel: its text and all that a plan was chosen by. sizes: numbers that go up to powers of two."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    powers = [max(0, n - 1).bit_length() for n in sizes]
    return hashlib.sha256(repr((text, name, _triton(), powers, words)).encode()).hexdigest()[:32]


@functools.cache
def _triton() -> str:
    import triton

    return triton.__version__


_kept: dict[str, Plan | None] = {}


def kept(key: str) -> Plan | None:
    """The plan that was found best before, in this process or another; None where none was looked for."""
    if key not in _kept:
        found = cache.read(f"plans/{key}.json")
        try:
            _kept[key] = Plan(*found) if found else None
        except (TypeError, ValueError):
            _kept[key] = None
    return _kept[key]


def best(
    key: str, title: str, first: list[Plan], make: Callable[[Plan], Any], run: Callable[[Any], None], device: Any
) -> None:
    """Time every candidate that does not spill, and keep the fastest.

    make: the launches with a plan, None where it does not fit; run: launches them once.
    """
    found: list[tuple[float, Plan]] = []
    for plan in _progress(candidates(first), title):
        made = make(plan)
        if made is not None and not made.spilled:
            found.append((timer(functools.partial(run, made), device), plan))
    if found:
        chosen = _kept[key] = min(found, key=lambda x: x[0])[1]
        cache.write(f"plans/{key}.json", dataclasses.astuple(chosen))


def timer(run: Callable[[], None], device: torch.device) -> float:
    """Median milliseconds of a run."""
    run()
    times = []
    for _ in range(REPEATS):
        if device.type != "cuda":
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def _progress(plans: list[Plan], title: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return plans
    return tqdm(plans, desc=title, leave=False, disable=not sys.stderr.isatty())
