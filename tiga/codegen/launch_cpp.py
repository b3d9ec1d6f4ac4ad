"""C++ kernels by content: compiled once a text, compiler and processor, kept on disk, called with bare pointers."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from tiga import passes
from tiga.codegen.emit_cpp import NAME
from tiga.codegen.rows import Refused

DEVICE = Path(__file__).with_name("device.h")
BASIC = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-w")
WIDE = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
FLAGS = (("-march=native", *WIDE, "-fopenmp"), ("-march=native", "-fopenmp"), ("-fopenmp",), ())
"""The first that the compiler takes: processors and threads, else fewer of them."""


@functools.cache
def compiler() -> str:
    """The C++ compiler that torch's extensions would use, or "": CXX, else c++."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++") or ""


@functools.cache
def identity() -> tuple[str, tuple[str, ...]]:
    """What a library depends on beside its text: compiler and processor; and the flags that serve here.

    "" where there is no compiler, or none that runs.
    """
    for flags in FLAGS if compiler() else ():
        command = [compiler(), *flags, "-x", "c++", "-E", "-v", "-"]
        # in the root: clang names the folder it was started in
        done = subprocess.run(command, input="", capture_output=True, text=True, cwd="/")
        if done.returncode == 0:
            # what -march=native stands for is printed with the command that the driver would run
            return "\n".join([x for x in done.stderr.splitlines() if "cc1" in x or "version" in x]), flags
    return "", ()


def folder() -> Path:
    """Where libraries are kept: beside torch's own extensions."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "tiga"


def function_name(text: str) -> str:
    return "tiga_" + hashlib.sha256(text.encode()).hexdigest()[:16]


_functions: dict[str, Any] = {}
_failed: dict[str, str] = {}


def load(texts: tuple[str, ...]) -> None:
    """Makes the functions of texts callable: those of them that are not yet, in one library."""
    new = tuple([t for t in dict.fromkeys(texts) if t not in _functions])
    if not new:
        return
    if not identity()[0]:
        raise Refused("no C++ compiler: neither CXX nor c++, g++ and clang++ on the path run")
    header = DEVICE.read_text(encoding="utf-8")
    whole = "\n\n".join([header, "using tiga::i64;", *[t.replace(NAME, function_name(t)) for t in new]]) + "\n"
    if whole in _failed:
        raise Refused(_failed[whole])
    try:
        library = ctypes.CDLL(str(built(whole)))
    except (Refused, OSError) as e:  # tried once: a second time would cost as long
        _failed[whole] = f"the C++ compiler failed: {e}"
        warnings.warn(f"tiga: {_failed[whole]}. This program runs on torch operations.", stacklevel=2)
        raise Refused(_failed[whole]) from None
    for t in new:
        function = getattr(library, function_name(t))
        function.argtypes, function.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64], None
        _functions[t] = function


def built(whole: str) -> Path:
    """The library of a text, from disk or the compiler. Processes may race: each moves a finished file into place."""
    known, flags = identity()
    key = hashlib.sha256("\0".join([known, *BASIC, *flags, whole]).encode()).hexdigest()[:32]
    where = folder()
    library = where / f"{key}.so"
    if library.exists():
        return library
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=where) as here:
        source, made = Path(here) / "kernel.cpp", Path(here) / "kernel.so"
        source.write_text(whole, encoding="utf-8")
        command = [compiler(), *BASIC, *flags, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Refused(done.stderr.strip()[-500:])
        passes.ran("compile-cpp")
        os.replace(source, where / f"{key}.cpp")
        os.replace(made, library)
    return library


def call(text: str, tensors: list[Tensor], ints: list[int], numbers: list[float], threads: int) -> None:
    pointers = (ctypes.c_void_p * max(1, len(tensors)))(*[t.data_ptr() for t in tensors])
    given = (ctypes.c_int64 * max(1, len(ints)))(*ints)
    doubles = (ctypes.c_double * max(1, len(numbers)))(*numbers)
    _functions[text](pointers, given, doubles, threads)
