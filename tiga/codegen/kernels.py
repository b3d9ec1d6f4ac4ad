"""Kernels by content: source text compiled once a text, plan and specialisation; how products of float32 are made."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiga.codegen.plan import Plan


@functools.lru_cache(4096)
def load(text: str) -> Any:
    """The jitted function of a source, whose text stays readable: in tracebacks, and for whoever asks for the code."""
    name = f"<tiga kernel {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": "tiga.codegen.generated"}
    exec(compile(text, name, "exec"), scope)  # output of our own emitter, of a verified program
    return scope["propagate"]


def precision(itemsize: int, device: torch.device) -> str:
    """How products of 32-bit vectors are made: of three tf32 products each, which keeps float32's digits.

    tf32 where torch's setting allows it; "ieee", one number at a time, where that setting asks for it or the device has
    no tf32.
    """
    if itemsize < 4:
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    asked = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return "ieee" if old or asked == "ieee" else "tf32x3"


@functools.lru_cache(64)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_made: dict[tuple, Any] = {}
_compiled: dict[str, Any] = {}


def compiled_text(source: str, level: str) -> str:
    """ttir, ttgir or ptx of a kernel that was launched; "" under Triton's interpreter, which compiles nothing."""
    made = _compiled.get(source)
    return made.asm.get(level, "") if made is not None else ""


def runner(
    text: str, values: list, plan: Plan, grid: tuple, device: torch.device
) -> tuple[Callable[..., Any], int] | None:
    """What launches the kernel with arguments like these, and the registers it spills; None where it does not fit."""
    fn = load(text)
    if device.type != "cuda":  # Triton's interpreter
        return lambda *arguments: fn[grid](*arguments, num_warps=plan.warps, num_stages=plan.stages), 0
    made = compiled(text, fn, values, plan, device)
    if made is None:
        return None
    started = made[grid[0], 1, 1]
    if device.index in (None, torch.cuda.current_device()):
        return started, made.n_spills

    def elsewhere(*arguments: Any) -> None:
        with torch.cuda.device(device):
            started(*arguments)

    return elsewhere, made.n_spills


def compiled(text: str, fn: Any, values: list, plan: Plan, device: Any) -> Any:
    """The compiled kernel; None where it outgrows the chip. Known before its first launch, so that a plan stays.

    Keyed by all that may change the machine code: text, plan, dtypes, constants, and the integers' divisibility.
    """
    kinds: list[Any] = []
    for value, parameter in zip(values, fn.params):
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.data_ptr() % 16 == 0))
        elif parameter.is_constexpr or isinstance(value, str):
            kinds.append(value)
        elif isinstance(value, int) and not parameter.do_not_specialize:
            kinds.append((value == 1, value % 16 == 0, abs(value) >> 31 != 0))
        else:
            kinds.append(isinstance(value, int) and abs(value) >> 31 != 0)
    key = (text, plan, tuple(kinds), device)
    if key not in _made:
        _made[key] = _compile(text, fn, values, plan, device)
    return _made[key]


def _compile(text: str, fn: Any, values: list, plan: Plan, device: Any) -> Any:
    from triton.runtime.errors import OutOfResources

    try:
        with torch.cuda.device(device):
            made = fn.warmup(*values, grid=(1,), num_warps=plan.warps, num_stages=plan.stages)
            made._init_handles()  # loads it: only then are spills and shared memory known
    except OutOfResources:
        return None
    keep(text, made)
    return made


def keep(text: str, kernel: Any) -> None:
    """Lets the levels of a kernel be read: of its first plan that was tried without spills, else of the last."""
    held = _compiled.get(text)
    if held is None or held.n_spills:
        _compiled[text] = kernel
