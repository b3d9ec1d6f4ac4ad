"""A pytest plugin, `python -m pytest -p interpreted`: CPU tensors take the kernels' path, interpreted."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tiga import passes  # noqa: E402
from tiga.ops import propagate  # noqa: E402

_patch = interpreter._patch_lang
_patched: set[str] = set()


def patch_once(fn):
    """Triton's interpreter puts its operations into triton.language at every call of a function, on top of those of the
    call before. Here nothing is compiled, and those of the first call stay: a quarter of the time less."""
    names = {x.__name__ for x in fn.__globals__.values() if x is tl or x is tl.core} - _patched
    if names:
        _patched.update(names)
        _patch(fn)
    return interpreter._LangPatchScope()


interpreter._patch_lang = patch_once


def pytest_configure(config):
    propagate.KERNEL_DEVICES.add("cpu")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"kernels launched: {passes.COUNTS['launch-tiles']}, written: {passes.COUNTS['emit-tiles']}"
    )
