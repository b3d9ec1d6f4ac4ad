"""Every example runs and checks itself: the five programs whole, the others in few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Arguments, the plot left behind, and words of the last line.
RUNS = {
    "full_attention.py": ([], None, "largest difference"),
    "causal_dense_relation.py": ([], None, "32896 edges among 256 positions"),
    "varlen_causal_attention.py": ([], None, "285350 edges in 5 sequences"),
    "tile_pruned_attention.py": ([], None, "largest difference"),
    "gat_edge_attention.py": ([], None, "largest difference"),
    "train_char_lm.py": (["--steps", "5"], "train_char_lm.png", "held out: "),
    "train_forces.py": (["--steps", "30"], "train_forces.png", "held out: "),
    "train_gat_debian.py": (["--small"], "train_gat_debian.png", "sorted rightly"),
    "molecular_dynamics.py": (["--small"], "molecular_dynamics.png", "energy drift: "),
}


def test_every_example_is_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_example(name, tmp_path):
    arguments, plot, words = RUNS[name]
    env = {**os.environ, "MPLBACKEND": "Agg"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert words in done.stdout.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ([plot] if plot else [])


@pytest.mark.parametrize("name", RUNS)
def test_example_is_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 120
