"""The graphs command at tiny sizes on the CPU, and the graphs it makes."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import bulk

from benchmarks import command, graph_lists, graph_peers, graphs, neighbour_lists
from benchmarks.graph_works import WORKS
from benchmarks.measure import Setting

TINY = Setting("cpu", 12, 1)
NAMES = (
    "mesh, 16 x 32, float16",
    "published GAT, 512 nodes, 8 features, hidden 16",
)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    # what is looked at is not torch.compile
    monkeypatch.setattr(graph_peers, "compiled", lambda fn: fn)
    monkeypatch.setattr(graph_peers, "ANEMOI", Path("nowhere"))


@pytest.mark.parametrize("name", NAMES)
def test_line_is_checked_and_measured(name, capsys):
    cells = graphs.line(TINY, WORKS[name], 1.0).cells
    assert len(cells) == len(graphs.COLUMNS) + len(graphs.MORE)
    found = dict(zip((*graphs.COLUMNS, *graphs.MORE), cells))
    assert all(" / " in found[name] for name in ("tiga", "PyG eager", "PyG compiled", "GB/s"))
    absent = "anemoi failed: FileNotFoundError: nowhere is not there."
    assert found["how it ran"].endswith(absent if WORKS[name].anemoi else "listed")


def test_a_wrong_result_is_no_figure(monkeypatch):
    case = WORKS["hub, dot, float32"].make(TINY)
    measured = graphs.Measured(TINY, case)
    measured.measure(case.tiga)
    with pytest.raises(AssertionError, match="relative error"):
        measured.measure(lambda: case.tiga() * 1.001)


@pytest.mark.parametrize("name", [*neighbour_lists.SEARCHES][1::2])
def test_search_is_checked_and_measured(name):
    setting = Setting("cpu", 120, 1)
    assert neighbour_lists.line(setting, neighbour_lists.SEARCHES[name]).cells[-1] == ""
    search = neighbour_lists.SEARCHES[name](setting)
    rowptr, col = search.find()[:2]
    with pytest.raises(AssertionError, match="not the neighbours"):
        search.check((rowptr, col.roll(1)))


def test_command_leaves_a_table_and_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["graphs", "--device=cpu", "--rows=12", "--only", "crystal", f"--out={tmp_path}"])
    command.main("graphs", "", (graphs.table,), (), ("a", "b"), "log")
    table, plot = sorted(tmp_path.iterdir())
    assert (table.suffix, plot.suffix) == (".md", ".png") and plot.stat().st_size > 10_000
    assert "| crystal, 50k atoms, pair forces |" in table.read_text() and "failed" not in table.read_text()


def test_graphs_are_what_they_are_called():
    listed, attributes = graph_lists.icosphere(Setting("cpu"), 3)
    # the published mesh of level 6 has 40,962 nodes and 327,660 edges by the same formulas
    assert listed.num_nodes == 10 * 4**3 + 2 and len(listed.src) == 60 * (4**4 - 1) // 3
    assert listed.dst.diff().min() >= 0 and attributes[:, 3].max() < 1.1
    both = set(zip(listed.src.tolist(), listed.dst.tolist()))
    assert both == {(j, i) for i, j in both}
    hub = graph_lists.hub(Setting("cpu", 6000), 63436, 299186, 21810)
    counts = torch.bincount(hub.dst, minlength=hub.num_nodes)
    assert counts.max() >= 21810 * 6000 // 63436 and abs((counts == 0).double().mean() - 1 / 3) < 0.01


def test_the_crystal_is_that_of_ase():
    listed = graph_lists.crystal(Setting("cpu", 32), 50000, 4.0)
    atoms = bulk("Cu", cubic=True) * (2, 2, 2)
    apart = listed.positions.detach().numpy()[:, None] - atoms.positions
    apart = np.linalg.norm(apart - np.round(apart / 7.22) * 7.22, axis=-1)
    assert sorted(apart.argmin(1)) == list(range(32)) and apart.min(1).max() < 0.4
    assert len(listed.src) == 32 * 18  # twelve neighbours and the next six


@pytest.mark.parametrize("path", sorted(Path(command.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_started(path):
    """As far as its imports go: what it needs of the others is there."""
    assert importlib.import_module(f"benchmarks.{path.stem}").__doc__ or path.stem == "__init__"
