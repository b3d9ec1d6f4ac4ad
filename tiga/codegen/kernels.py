"""Kernels by content: source text compiled once a text, plan and specialisation; how products of float32 are made."""

from __future__ import annotations

import functools
import hashlib
import linecache
import sys
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple, Protocol

import torch

from tiga.passes import LOG


class Geometry(Protocol):
    """What a plan of any skeleton says of a launch."""

    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...


def name_of(text: str) -> str:
    """What tracebacks and logs call a source."""
    return f"<tiga kernel {hashlib.sha256(text.encode()).hexdigest()[:12]}>"


@functools.lru_cache(4096)
def load(text: str) -> Any:
    """The jitted function of a source, whose text stays readable: in tracebacks, and for whoever asks for the code."""
    name = name_of(text)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": "tiga.codegen.generated"}
    exec(compile(text, name, "exec"), scope)  # output of our own emitter, of a verified program
    return scope["propagate"]


def precision(itemsize: int, device: torch.device, several: str = "tf32x3") -> str:
    """How products of 32-bit vectors are made: of several each, which keeps about float32's digits.

    Of three tf32 products; or "bf16x6", where a kernel takes numbers apart itself (`device_products.py`): of six of
    bfloat16, which take as long, but three pieces are 6 bytes, and two tf32 numbers 8. "tf32" or "ieee", one number
    at a time and much slower, where `torch.backends.cuda.matmul.fp32_precision` asks for them - the older `allow_tf32`
    and `set_float32_matmul_precision` set it as well; "ieee" on devices without tf32.
    """
    asked = float32_setting()
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if itemsize < 4 or old or asked == "ieee":
        return "ieee"
    return "tf32" if asked == "tf32" else several


def float32_setting() -> str:
    """What torch was asked of float32 products. Not `allow_tf32`: to read it raises once the newer name was set."""
    return _precision("cuda", "matmul")


# what torch.backends.cuda.matmul.fp32_precision reads, at a sixth of its time
_precision = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: torch.backends.cuda.matmul.fp32_precision)


@functools.lru_cache(64)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_made: dict[tuple, Any] = {}
_compiled: dict[str, Any] = {}


def compiled_text(source: str, level: str) -> str:
    """ttir, ttgir or ptx of a kernel that was launched; "" under Triton's interpreter, which compiles nothing."""
    made = _compiled.get(source)
    return made.asm.get(level, "") if made is not None else ""


class Bare(NamedTuple):
    """launch(*before, stream, *after, *arguments): tensors are given by address, and nobody is told of the launch."""

    launch: Callable[..., Any]
    before: tuple
    after: tuple


class Runner(NamedTuple):
    """run(*arguments) launches a kernel; spilled: its registers that went to memory; compiled: what the device runs."""

    run: Callable[..., Any]
    spilled: int
    compiled: Any = None
    bare: Bare | None = None


def runner(text: str, values: list, plan: Geometry, grid: tuple, device: torch.device) -> Runner | None:
    """What launches the kernel with arguments like these; None where it does not fit."""
    fn = load(text)
    if device.type != "cuda":  # Triton's interpreter
        return Runner(lambda *arguments: fn[grid](*arguments, num_warps=plan.warps, num_stages=plan.stages), 0)
    made = compiled(text, fn, values, plan, device)
    if made is None:
        return None
    started = made[grid[0], 1, 1]
    if device.index in (None, torch.cuda.current_device()):
        return Runner(started, made.n_spills, made, bare(made, grid[0]))

    def elsewhere(*arguments: Any) -> None:
        with torch.cuda.device(device):
            started(*arguments)

    return Runner(elsewhere, made.n_spills, made, bare(made, grid[0]))


def bare(made: Any, programs: int) -> Bare | None:
    """The C function behind a compiled kernel's launcher, as Triton 3.6 has it; None of another version's.

    Triton's own way to it looks for the stream, makes what hooks are told, and asks the driver of every tensor where
    it is: together more than the launch.
    """
    import triton

    launcher = made.run
    if not triton.__version__.startswith("3.6.") or type(launcher).__name__ != "CudaLauncher":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if not isinstance(launcher.launch, BuiltinFunctionType):  # what makes descriptors of tensors stands before it
        return None
    words = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, made.packed_metadata, None, None, None)
    return Bare(launcher.launch, (programs, 1, 1), (made.function, *words))


def hooked() -> bool:
    """Whether someone, a profiler, is to be told of every launch."""
    triton = sys.modules.get("triton")
    if triton is None:
        return False
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def compiled(text: str, fn: Any, values: list, plan: Geometry, device: Any) -> Any:
    """The compiled kernel; None where it outgrows the chip. Known before its first launch, so that a plan stays.

    Keyed by all that may change the machine code: text, plan, dtypes, constants, and the integers' divisibility.
    """
    kinds: list[Any] = []
    for value, parameter in zip(values, fn.params):
        if hasattr(value, "data_ptr"):
            any_place = parameter.do_not_specialize_on_alignment
            kinds.append((value.dtype, any_place or value.data_ptr() % 16 == 0))
        elif parameter.is_constexpr or isinstance(value, str):
            kinds.append(value)
        elif isinstance(value, int) and not parameter.do_not_specialize:
            kinds.append((value == 1, value % 16 == 0, abs(value) >> 31 != 0))
        else:
            kinds.append(isinstance(value, int) and abs(value) >> 31 != 0)
    key = (text, plan, tuple(kinds), device)
    if key not in _made:
        made = _made[key] = _compile(text, fn, values, plan, device)
        LOG.debug("%s, %s: %s", name_of(text), plan, "does not fit" if made is None else f"{made.n_spills} spilled")
    return _made[key]


def _compile(text: str, fn: Any, values: list, plan: Geometry, device: Any) -> Any:
    from triton.runtime.errors import OutOfResources

    try:
        with torch.cuda.device(device):
            made = fn.warmup(*values, grid=(1,), num_warps=plan.warps, num_stages=plan.stages)
            made._init_handles()  # loads it: only then are spills and shared memory known
    except OutOfResources:
        return None
    return made


def keep(text: str, kernel: Any) -> None:
    """Lets the levels of a kernel that is launched be read."""
    _compiled[text] = kernel
