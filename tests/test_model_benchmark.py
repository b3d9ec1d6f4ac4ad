"""python -m benchmarks.model at a tiny size: a line is checked against its peer and printed."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import model  # noqa: E402


def test_a_line_is_checked_and_printed(monkeypatch, capsys):
    command = ["model", "--device", "cpu", "--rows", "24", "--backend", "eager", "--only", "edge network"]
    monkeypatch.setattr(sys, "argv", command)
    model.main()
    (row,) = re.findall(r"^\| edge network \|.*$", capsys.readouterr().out, re.MULTILINE)
    assert "failed" not in row and "| tiga<br>plain |" in row
