"""The logger `tiga`: what it says at debug level, and that it says nothing otherwise."""

import logging

import pytest
import torch

import tiga as tg
from tiga import passes
from tiga.codegen import kernels
from tiga.codegen.plan import Plan


class Total(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * dst.x)


@pytest.mark.parametrize("graph, way", [(tg.Graph.dense(3), "blocked"), (tg.Graph.dense(3).to_csr(), "listed")])
def test_says_how_edges_were_visited(graph, way, caplog):
    fields = {"x": torch.ones(3, 2)}
    Total()(graph, src=fields, dst=fields)
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "tiga"):
        Total()(graph, src=fields, dst=fields)
        passes.launched("launch-tiles", ("source",))
    visit, launch = (record.getMessage() for record in caplog.records)
    assert visit.startswith(f"interpret-{way}: 9 pairs at once, ") and visit.endswith("elements each")
    assert launch == "launch-tiles: kernels launched: 1"


class Made:
    n_spills, n_regs = 12, 64


@pytest.mark.parametrize("made, words", [(Made, "12 spilled"), (None, "does not fit")])
def test_says_which_plans_were_tried(made, words, caplog, monkeypatch):
    class Function:
        params: list = []

    monkeypatch.setattr(kernels, "_compile", lambda *arguments: made)
    monkeypatch.setattr(kernels, "_made", {})
    plan = Plan(64, 32, 4, 2)
    with caplog.at_level(logging.DEBUG, "tiga"):
        for _ in range(2):
            assert kernels.compiled("text", Function, [], plan, torch.device("cpu")) is made
    (record,) = caplog.records
    assert record.getMessage() == f"{kernels.name_of('text')}, {plan}: {words}" and "block_m=64" in record.getMessage()
