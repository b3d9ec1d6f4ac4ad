"""A pytest plugin, `python -m pytest -p interpreted_rows`: programs over lists run as interpreted kernels, counted."""

import collections
import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import interpreted  # noqa: E402, F401

from tiga import passes  # noqa: E402
from tiga.ops import propagate, rows  # noqa: E402

REASONS: collections.Counter = collections.Counter()
_run = rows.run


def counted(*arguments):
    reason = _run(*arguments)
    REASONS.update([reason] if reason else [])
    return reason


def pytest_configure(config):
    rows.run = counted
    propagate.KERNEL_DEVICES.add("cpu")


def pytest_terminal_summary(terminalreporter):
    counts = passes.COUNTS["launch-rows"], passes.COUNTS["emit-rows"]
    terminalreporter.write_line(f"rows launched: {counts[0]}, written: {counts[1]}, refused: {sorted(REASONS)}")
