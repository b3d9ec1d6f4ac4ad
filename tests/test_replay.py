"""Calls that are met again: the same results from a look-up and launches, and when there is none to be had."""

import gc
import types
import weakref

import pytest
import torch
from interpreting import interpreted

import tiga as tg
from tiga import passes
from tiga.codegen import kernels, launch, replay, steps
from tiga.ops import propagate


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def test_repeated_calls_under_the_interpreter():
    launched, _ = interpreted("replay_interpreted.py")
    assert launched > 50


@pytest.fixture
def chip(monkeypatch):
    """A device on which kernels do nothing: what was launched with addresses, and what with tensors."""
    monkeypatch.setattr(propagate, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(replay, "KEPT", type(replay.KEPT)(most=4096, each=8))
    monkeypatch.setattr(steps, "_records", type(steps._records)())
    chip = types.SimpleNamespace(addresses=[], tensors=[])

    def runner(text, values, plan, grid, device):
        bare = kernels.Bare(lambda *words: chip.addresses.append(words), (grid[0], 1, 1), ("function", (4, 1, 0)))
        return kernels.Runner(lambda *words: chip.tensors.append(words), 0, None, bare)

    monkeypatch.setattr(launch, "runner", runner)
    return chip


def call(n=8):
    q, k, v = (torch.randn(n, 2, 4) for _ in range(3))
    return Attention().lower(tg.Graph.triangular(n), src={"key": k, "value": v}, dst={"query": q}, scale=0.5)


def recipes():
    return [met.recipe for met in replay.KEPT.calls() if met.recipe is not None]


def run(c):
    return torch.ops.tiga.propagate(*c)[0]


def test_the_third_call_is_launches_alone(chip):
    c = call()
    checks, written = passes.COUNTS["check"], passes.COUNTS["emit-tiles"]
    for _ in range(3):
        out = run(c)
    assert (len(chip.tensors), len(chip.addresses)) == (2, 1) and passes.COUNTS["emit-tiles"] <= written + 1
    assert passes.COUNTS["check"] == checks + 3
    words = chip.addresses[0]
    assert words[1:6] == (1, 1, 0, "function", (4, 1, 0))
    for t in (*c.tensors, out):
        assert t.data_ptr() in words[6:]
    slow = [t for t in chip.tensors[1] if isinstance(t, torch.Tensor)]
    assert len(words) - 6 == len(chip.tensors[1]) and len(slow) == 4
    # numbers stand where they stood
    assert all(a == b for a, b in zip(words[6:], chip.tensors[1]) if not isinstance(b, torch.Tensor))
    (recipe,) = recipes()
    assert recipe.bytes == 0, "nothing lies between the kernels of one"


def test_few_sources_are_not_split_where_the_merge_would_cost_more(chip, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    for rows, sources, kernels_of in ((256, 256, 1), (16, 448, 1), (16, 4096, 2)):
        chip.tensors.clear()
        q, k, v = (torch.randn(n, 2, 64, dtype=torch.float16) for n in (rows, sources, sources))
        graph = tg.Graph.dense(rows, sources)
        run(Attention().lower(graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5))
        assert len(chip.tensors) == kernels_of


def test_a_recipe_keeps_no_tensor(chip):
    c = call()
    for _ in range(3):
        run(c)
    tensors = [weakref.ref(t) for t in c.tensors]
    chip.tensors.clear()
    del c
    gc.collect()
    assert all(t() is None for t in tensors) and recipes()


def test_sizes_that_change_at_every_call_leave_no_recipe(chip):
    for n in range(4, 12):
        run(call(n))
    assert len(replay.KEPT.calls()) == 8 and not recipes()


def test_few_are_remembered(chip, monkeypatch):
    monkeypatch.setattr(replay.KEPT, "most", 3)
    for n in (4, 5, 6, 7, 7, 7):
        run(call(n))
    assert len(replay.KEPT.calls()) == 1 and len(chip.addresses) == 1


def test_whoever_watches_launches_sees_them(chip):
    from triton import knobs

    c, hook = call(), lambda told: None
    for _ in range(3):
        run(c)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(c)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert (len(chip.tensors), len(chip.addresses)) == (3, 1)
    run(c)
    assert (len(chip.tensors), len(chip.addresses)) == (3, 2)


def test_plans_that_are_timed_take_the_place_of_those_before(chip, monkeypatch, tmp_path):
    monkeypatch.setenv("TIGA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch.tuning, "_kept", {})
    monkeypatch.setattr(launch.tuning, "timer", lambda run, device: run() or next(times))
    times = iter(range(1000, 0, -1))  # the last candidate is the fastest
    c = call(300)
    for _ in range(3):
        run(c)
    (before,) = recipes()
    with tg.tune():
        run(c)
    (after,) = recipes()
    assert after is not before and after.constants != before.constants
    assert after.text.count("\n") == before.text.count("\n"), "what was timed is no part of the call"


def test_precision_and_deterministic_memory_are_asked_of_every_call(chip):
    c, setting = call(), torch.backends.cuda.matmul
    for _ in range(3):
        run(c)
    kept, setting.fp32_precision = setting.fp32_precision, "tf32"
    try:
        run(c)
        assert len(chip.addresses) == 1, "other products are another kernel"
    finally:
        setting.fp32_precision = kept
    torch.use_deterministic_algorithms(True)
    try:
        assert run(c).isnan().all(), "memory is filled where torch was asked to"
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(chip.addresses) == 2


def test_counted_edges_are_counted_at_every_call(chip):
    """Where the number of edges is read of a device, whether an edge field fits follows from values."""

    class Biased(Attention):
        def edge(self, src, dst, edge, scale):
            return self.reducer((src.key * dst.query).sum(-1) * scale + edge.bias, src.value)

    q, k, v = (torch.randn(8, 2, 4) for _ in range(3))
    graph = tg.Graph.cu_seqlens([0, 3, 8])
    c = Biased().lower(
        graph, src={"key": k, "value": v}, dst={"query": q}, edge={"bias": torch.randn(21, 2)}, scale=0.5
    )
    unread = [*c.ints[:2], -1]
    for _ in range(3):
        torch.ops.tiga.propagate(c.program, c.tensors, unread, c.scalars)
    moved = [torch.tensor([0, 4, 8]) if t is graph.tensors[0] else t for t in c.tensors]
    with pytest.raises(tg.TigaError, match="has 21 rows, but the graph has 20 edges"):
        torch.ops.tiga.propagate(c.program, moved, unread, c.scalars)


def test_another_triton_is_launched_as_it_says(monkeypatch):
    import triton

    class CudaLauncher(types.SimpleNamespace):
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid = launch_pdl = False

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    made = types.SimpleNamespace(run=CudaLauncher(launch=print), function=7, packed_metadata=(4, 1, 0))
    bare = kernels.bare(made, 5)
    assert bare.before == (5, 1, 1) and bare.after[:3] == (7, False, False) and len(bare.after) == 9
    made.run.global_scratch_size = 64
    assert kernels.bare(made, 5) is None
    made.run.global_scratch_size = 0
    made.run.launch = lambda *words: None  # what makes descriptors of tensors first
    assert kernels.bare(made, 5) is None
    made.run.launch = print
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert kernels.bare(made, 5) is None
