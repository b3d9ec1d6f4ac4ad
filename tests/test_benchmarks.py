"""The graphs command at tiny sizes on the CPU, and the graphs it makes."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import bulk

from benchmarks import command, graph_lists, graph_peers, graphs, layers, neighbour_lists
from benchmarks.graph_works import WORKS
from benchmarks.kinks import OtherSide
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
    measured.measure("tiga", case.tiga)
    with pytest.raises(AssertionError, match="relative error"):
        measured.measure("tiga", lambda: case.tiga() * 1.001)


def test_either_slope_is_right_where_a_score_is_zero_but_for_rounding():
    """A score that is 0 in float64: the other slope errs far more than rounding does, and passes; a wrong one fails."""
    edges, rows = layers.edge_list(layers.SHAPES["arxiv-shaped, 169k nodes, 1.17M edges"], 300)
    work = layers.made(TINY, "GATConv", edges, rows)
    peer = work.calls["PyG"][0]
    j, i = edges[:, edges[0] != edges[1]][:, 0]
    with torch.no_grad():
        work.x[j] = work.x[i]
        peer.att_dst.copy_(-peer.att_src)
    exact, usual = layers.reference(work)
    apart = lambda: [
        error - 2 * usual_ - 1e-5 for error, usual_ in zip(layers.errors(work.outputs("PyG"), exact), usual)
    ]
    assert max(apart()) <= 0
    with OtherSide():
        assert max(layers.errors(work.outputs("PyG"), exact)) > 1e-3
        assert max(apart()) <= 0
    peer.negative_slope = 0.21
    assert max(apart()) > 1e-3


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
