"""A pytest plugin, `python -m pytest -p interpreted`: CPU tensors take the kernels' path, interpreted."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import interpreter_quick  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

from tiga import passes  # noqa: E402
from tiga.ops import propagate  # noqa: E402


def widened(x):
    """The float32 numbers of bfloat16, which the interpreter holds as 16-bit integers."""
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if x.dtype == tl.bfloat16 else x


def correct():
    """As GPUs have them, and the interpreter of Triton 3.6 has not: products of bfloat16, and the larger of a number
    and nan, which is the number."""
    dot = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


interpreter_quick.install()
correct()


def pytest_configure(config):
    torch.set_num_threads(1)
    propagate.KERNEL_DEVICES.add("cpu")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"kernels launched: {passes.COUNTS['launch-tiles']}, written: {passes.COUNTS['emit-tiles']}"
    )
