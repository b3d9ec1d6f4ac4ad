"""A pytest plugin, `python -m pytest -p interpreted`: CPU tensors take the kernels' path, interpreted."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import interpreter_quick  # noqa: E402
import torch  # noqa: E402

from tiga import passes  # noqa: E402
from tiga.ops import propagate  # noqa: E402

interpreter_quick.install()


def pytest_configure(config):
    torch.set_num_threads(1)
    propagate.KERNEL_DEVICES.add("cpu")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"kernels launched: {passes.COUNTS['launch-tiles']}, written: {passes.COUNTS['emit-tiles']}"
    )
