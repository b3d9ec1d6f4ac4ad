"""Tuning: which plans are timed, which is taken, and what is kept on disk. Launches are counted, not made."""

import dataclasses

import pytest
import torch

import tiga as tg
from tiga.adjoint import augment
from tiga.codegen import cache, launch, steps, tuning
from tiga.codegen.kernels import Runner
from tiga.codegen.plan import Plan, candidates, plans
from tiga.ops import tiles
from tiga.ops.propagate import allocate
from tiga.parser import parse


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Capped(Attention):
    def edge(self, src, dst, edge, scale):
        return self.reducer(((src.key * dst.query).sum(-1) * scale).tanh(), src.value)


@pytest.fixture
def chip(monkeypatch, tmp_path):
    """A device that takes as long as `cost` says, with kernels that spill where `spills` says; what it ran."""
    monkeypatch.setenv("TIGA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_kept", {})
    monkeypatch.setattr(steps, "_records", type(steps._records)())

    class Chip:
        ran, timed, cost, spills = [], [], staticmethod(lambda plan: plan.block_n), staticmethod(lambda plan: 0)

    def runner(text, values, plan, grid, device):
        return Runner(lambda *arguments: Chip.ran.append(plan), Chip.spills(plan))

    def timer(run, device):
        run()
        Chip.timed.append(Chip.ran[-1])
        return Chip.cost(Chip.ran[-1])

    Chip.ran, Chip.timed = [], []
    monkeypatch.setattr(launch, "runner", runner)
    monkeypatch.setattr(tuning, "timer", timer)
    return Chip


def call(module=Attention, n=300, width=16, dtype=torch.float16):
    """The plan that a call's kernel ran with."""
    q, k, v = (torch.randn(n, 2, width, dtype=dtype) for _ in range(3))
    c = module().lower(tg.Graph.triangular(n), src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
    p = parse(augment(c.program))
    return lambda: tiles.run(p, c.tensors, c.ints, c.scalars, allocate(p, c.tensors, c.ints))


def test_the_fastest_is_taken_and_kept(chip):
    run, default = call(), plans(16, 2, 1, 600)[0]
    run()
    assert chip.timed == [] and chip.ran == [default]
    with tg.tune():
        run()
    assert set(chip.timed) == set(candidates(plans(16, 2, 1, 600))) and len(chip.timed) > 8
    fastest = min(chip.timed, key=chip.cost)
    assert fastest != default and chip.ran[-1] == fastest
    (kept,) = (cache.folder() / "plans").iterdir()
    assert Plan(*cache.read(f"plans/{kept.name}")) == fastest


def test_later_processes_take_it_without_timing(chip, monkeypatch):
    with tg.tune():
        call()()
    fastest = chip.ran[-1]
    monkeypatch.setattr(tuning, "_kept", {})
    monkeypatch.setattr(steps, "_records", type(steps._records)())
    chip.timed.clear()
    call()()
    assert chip.ran[-1] == fastest
    with tg.tune():
        call()()
    assert chip.timed == [] and chip.ran[-1] == fastest


def test_a_kernel_is_timed_once_and_its_like_of_one_power_of_two_not_again(chip):
    run = call(n=300)
    with tg.tune():
        run()
        count = len(chip.timed)
        run()
        call(n=290)()
        assert len(chip.timed) == count
        call(n=100)()
        assert len(chip.timed) > count
        count = len(chip.timed)
        call(Capped, n=300)()
        assert len(chip.timed) > count, "another edge function is another kernel"


def test_plans_that_spill_are_not_taken(chip):
    chip.cost = staticmethod(lambda plan: -plan.block_m * plan.block_n)
    chip.spills = staticmethod(lambda plan: int(plan.block_m > 32))
    with tg.tune():
        call()()
    assert chip.timed and all(plan.block_m <= 32 for plan in chip.timed) and chip.ran[-1].block_m == 32


def test_nothing_is_timed_while_a_graph_is_captured(chip, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with tg.tune():
        assert not tuning.tuning(torch.device("cuda")) and tuning.tuning(torch.device("cpu"))
    assert not tuning.tuning(torch.device("cpu"))


@pytest.mark.parametrize("text", ["", "[1, 2", "[64, 32, 8, 2, 1]", '["a"]', "[1, 2, 3, 4, 5, 6, 7]"])
def test_what_cannot_be_read_is_no_plan(chip, text):
    """Of a write that was cut off, of other versions, of a plan that no kernel may have."""
    with tg.tune():
        call()()
    (kept,) = (cache.folder() / "plans").iterdir()
    kept.write_text(text)
    tuning._kept.clear()
    assert tuning.kept(kept.stem) is None


def test_candidates_are_plans_near_the_first():
    some = plans(128, 2, 1, 5000)
    found = candidates(some)
    assert found[: len(some)] == list(dict.fromkeys(some)) and len(found) == len(set(found)) < 40
    assert (
        dataclasses.replace(some[0], stages=some[0].stages - 1, masked=min(some[0].masked, some[0].stages - 1)) in found
    )


def test_the_timer_takes_the_middle_of_some_runs(monkeypatch):
    clock = iter(x / 1000 for pair in [(k, k + 1 + (k % 3)) for k in range(0, 90, 9)] for x in pair)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: next(clock))
    runs = []
    assert tuning.timer(lambda: runs.append(1), torch.device("cpu")) == pytest.approx(1.0)
    assert len(runs) == tuning.REPEATS + 1
