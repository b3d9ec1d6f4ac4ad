"""Kernels of the hopper skeleton, compiled for sm_90 without a GPU; which works they take, and why not the others."""

import dataclasses
from types import SimpleNamespace

import compiled_hopper
import pytest
import torch
from interpreting import said
from torch._subclasses.fake_tensor import FakeTensorMode

import tiga as tg
from tiga.adjoint import adjoint, augment
from tiga.codegen import hopper, launch_hopper, plan_hopper
from tiga.ops import tiles
from tiga.parser import parse

ROWS, HEADS = 300, 2


@pytest.fixture(autouse=True)
def every_form(monkeypatch):
    every = [(span, width) for span in ("band", "rows1", "blocks") for width in (64, 128, 256)]
    monkeypatch.setattr(plan_hopper, "FEWEST", dict.fromkeys(every, (0, 0)))


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Positions(tg.MessagePassing):
    """A cap, slopes, and numbers of both ends."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = 30 * torch.tanh((src.key * dst.query).sum(-1) * scale / 30)
        return self.reducer(score + (src.pos - dst.pos) * dst.slope, src.value)


class Gated(Attention):
    """A gate of the owners that only the result reads; the result before it as well, as its gradient does."""

    def edge(self, src, dst, edge, scale):
        out = super().edge(src, dst, edge, scale)
        return out, out * torch.sigmoid(dst.gate)


def segments():
    return tg.Graph.cu_seqlens(torch.tensor([0, 40, 40, ROWS]), num_dst=ROWS, num_src=ROWS)


def fields(width, dtype=torch.bfloat16):
    short = torch.zeros(ROWS, HEADS, width, dtype=dtype)
    src, dst = {"key": short, "value": short}, {"query": short}
    pos = torch.zeros(ROWS, 1)
    return {**src, "pos": pos}, {**dst, "pos": pos, "slope": torch.zeros(ROWS, HEADS), "gate": short}


def lowered(program, graph, width, dtype=torch.bfloat16):
    src, dst = fields(width, dtype)
    read = {Attention: ("query",), Gated: ("query", "gate")}.get(type(program))
    if read is not None:
        src, dst = {k: src[k] for k in ("key", "value")}, {k: dst[k] for k in read}
    else:
        del dst["gate"]
    return program.lower(graph, src, dst, {}, scale=0.1)


def forward(program, graph, width):
    call = lowered(program, graph, width)
    return str(augment(call.program)), call


def backward(program, graph, width):
    call = lowered(program, graph, width)
    p = parse(call.program)
    wanted = [k for k, o in enumerate(p.operands) if o.name in ("key", "query", "value")]
    text = adjoint(call.program, tuple(wanted), (0,)).text
    given = dict(zip([o.ref for o in p.operands], call.tensors))
    saved = {"saved0": torch.zeros(ROWS, HEADS, width, dtype=torch.bfloat16), "saved1": torch.zeros(ROWS, HEADS, 1)}
    saved["grad0"] = torch.zeros(ROWS, HEADS, width, dtype=torch.bfloat16)
    tensors = [given[o.ref] if o.ref in given else saved[o.name] for o in parse(text).operands]
    relation = list(call.tensors[len(p.operands) :])
    return text, SimpleNamespace(tensors=tensors + relation, ints=call.ints, scalars=call.scalars)


CASES = {
    "forward 128": (forward, Positions, lambda: tg.Graph.triangular(ROWS), 128, 1),
    "forward 64, packed": (forward, Attention, segments, 64, 1),
    "forward 256": (forward, Attention, lambda: tg.Graph.dense(ROWS), 256, 1),
    "gated 128": (forward, Gated, segments, 128, 1),
    "backward 128": (backward, Attention, lambda: tg.Graph.triangular(ROWS), 128, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_keeps_its_promises(name):
    """Of the plan that is taken: no register in memory in a loop over tiles, no product that waits for the one before,
    and the exponentials of a tile between two waits for products, while some still run."""
    how, program, graph, width, count = CASES[name]
    made = [(plan, m) for _, plan, m in compiled_hopper.kernels_of(*how(program(), graph(), width)) if m is not None]
    taken = [(plan, kernel) for plan, kernel in made if launch_hopper.faults(kernel) == ""]
    assert len(taken) == count
    for plan, kernel in taken:
        assert "C75" not in kernel.log
        assert len(launch_hopper.loops(kernel.sass)) >= plan.consumers
        waits = compiled_hopper.waits(kernel.sass)
        beside = [n for (left, _), (_, n) in zip(waits, waits[1:]) if left]
        assert max(beside) >= plan.block_n // 4  # a thread has half as many pairs of a tile as that has columns


def test_packed_sequences_are_three_launches():
    """What is told of tiles, the kernel, and the one that does rows again: of the first plan, which fits."""
    found = compiled_hopper.kernels_of(*forward(Attention(), segments(), 128))
    words = ("schedule_tiles", "gluon.jit", "def redo")
    assert [[k for k, word in enumerate(words) if word in source] for source, _, _ in found] == [[0], [1], [2]]


def reason(program, graph, width, dtype=torch.bfloat16):
    """Why the skeleton refuses the last work of a program."""
    _, kernels, why = tiles.planned(parse(lowered(program, graph, width, dtype).program))
    assert not why
    ready = kernels[-1]
    return hopper.refusal(ready.axes, dataclasses.replace(ready.work, packed=None), ready.span)


def test_what_it_takes():
    assert reason(Attention(), tg.Graph.triangular(ROWS), 128) == ""
    assert reason(Positions(), segments(), 64) == ""
    assert reason(Gated(), segments(), 128) == ""
    assert "16-bit" in reason(Attention(), tg.Graph.triangular(ROWS), 64, torch.float32)
    i = torch.arange(ROWS)
    two = tg.Graph.intervals(i * 0, i * 0 + 4, ROWS, i.clamp(min=4), i.clamp(min=4) + 1)
    assert "rows2" in reason(Attention(), two, 64)


class OnHopper(launch_hopper.HopperLaunch):
    """Stops where the first kernel would be compiled."""

    def record(self, stage):
        raise launch_hopper.Refused("taken")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (torch.zeros(ROWS, HEADS, 64, dtype=torch.bfloat16), "taken"),
        (torch.zeros(HEADS, ROWS, 64, dtype=torch.bfloat16).transpose(0, 1), "taken"),
        (torch.zeros(ROWS, 1, 64, dtype=torch.bfloat16).expand(-1, HEADS, -1), "strides (64, 0, 1)"),
        (torch.zeros(ROWS, HEADS, 68, dtype=torch.bfloat16)[..., :64], "strides (136, 68, 1)"),
        (torch.zeros(ROWS * HEADS * 64 + 1, dtype=torch.bfloat16)[1:].view(ROWS, HEADS, 64), "strides"),
        (torch.zeros(ROWS, HEADS, 80, dtype=torch.bfloat16), "taken"),
        (torch.zeros(ROWS, HEADS, 24, dtype=torch.bfloat16), "vectors of 24"),
    ],
    ids=["contiguous", "heads outermost", "one for all heads", "a gap", "an odd address", "a width", "a narrow one"],
)
def test_what_the_copy_engine_reads(monkeypatch, key, why):
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 1)
    short = key.contiguous()
    call = Attention().lower(tg.Graph.triangular(ROWS), {"key": key, "value": short}, {"query": short}, {}, scale=0.1)
    p = parse(call.program)
    (ready,) = tiles.planned(p)[1]
    made = launch_hopper.Call(p, call.tensors, tuple(call.ints), call.scalars, [])
    with pytest.raises(launch_hopper.Refused) as refused:
        OnHopper(ready, made, tiles.spans).steps()
    assert why in str(refused.value)


def test_few_tiles_are_left_to_the_tiles_skeleton(monkeypatch):
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 132)
    call = lowered(Attention(), tg.Graph.triangular(ROWS), 64)
    p = parse(call.program)
    (ready,) = tiles.planned(p)[1]
    made = launch_hopper.Call(p, call.tensors, tuple(call.ints), call.scalars, [])
    with pytest.raises(launch_hopper.Refused, match="leave multiprocessors idle"):
        OnHopper(ready, made, tiles.spans).steps()


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (lambda: tg.Graph.triangular(1200), "taken"),
        (lambda: tg.Graph.window(1200, 1100), "taken"),
        (lambda: tg.Graph.window(1200, 100, 3), "reach 104 others"),
        (lambda: tg.Graph.cu_seqlens(torch.tensor([0, 100, 1200]), num_dst=1200, num_src=1200), "taken"),
        (lambda: tg.Graph.cu_seqlens(torch.arange(0, 1201, 400), num_dst=1200, num_src=1200), "reach 400 others"),
    ],
    ids=["causal", "a wide window", "a narrow one", "packed", "packed short ones"],
)
def test_what_was_faster_is_taken(monkeypatch, graph, why):
    monkeypatch.undo()
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 1)
    short = torch.zeros(1200, HEADS, 128, dtype=torch.bfloat16)
    call = Attention().lower(graph(), {"key": short, "value": short}, {"query": short}, {}, scale=0.1)
    p = parse(call.program)
    (ready,) = tiles.planned(p)[1]
    made = launch_hopper.Call(p, call.tensors, tuple(call.ints), call.scalars, [])
    with pytest.raises(launch_hopper.Refused, match=why):
        OnHopper(ready, made, tiles.spans).steps()


def test_compiled_models_leave_such_works_in_the_operator(monkeypatch):
    """Decided by examples of sizes alone: they have no memory."""
    monkeypatch.undo()
    monkeypatch.setattr(launch_hopper, "unavailable", lambda device: "")
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 1)
    short = torch.zeros(1200, HEADS, 128, dtype=torch.bfloat16)
    call = Attention().lower(tg.Graph.triangular(1200), {"key": short, "value": short}, {"query": short}, {}, scale=0.1)
    p = parse(call.program)
    (ready,) = tiles.planned(p)[1]
    with FakeTensorMode() as mode:
        like = [mode.from_tensor(t) for t in call.tensors]
        few = [t[:900] for t in like]
        for tensors, n, taken in ((like, 1200, True), (few, 900, False)):
            made = launch_hopper.Call(p, tensors, (n, n, 0), call.scalars, [])
            assert launch_hopper.takes(ready, made, tiles.spans) is taken


def test_another_triton_is_refused(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "3.5.1" in launch_hopper._gluon.__wrapped__()
    assert launch_hopper.unavailable(torch.device("cpu")) == "not sm_90"


def test_faults_are_seen(monkeypatch):
    monkeypatch.setattr(launch_hopper, "machine_code", lambda cubin: cubin)
    faults = lambda text: launch_hopper.faults(SimpleNamespace(asm={"cubin": text}))
    wait, product = "WARPGROUP.DEPBAR.LE gsb0, 0x0\n", "HGMMA.64x128x16.F32.BF16 R24\n"
    assert faults(8 * product + wait) == ""
    assert "8 waits for 8" in faults(8 * (product + wait))
    loop = ".L_x_1:\n" + 8 * product + wait + "{}@P1 BRA `(.L_x_1) ;\n"
    once = 9 * "STL [R1], R2\n" + ".L_x_0:\n" + loop.format("") + "@!P0 BRA `(.L_x_0) ;\n"
    assert faults(once) == ""
    loads = lambda n: loop.format(n * "LDL R2, [R1]\n")
    assert faults(loads(launch_hopper.MOST_LOCAL)) == ""
    assert f"{launch_hopper.MOST_LOCAL + 1} times a tile" in faults(loads(launch_hopper.MOST_LOCAL + 1))


def test_schedules_and_rows_done_again_under_the_interpreter():
    assert "14 passed" in said("interpreted", "schedule_interpreted.py", "redo_interpreted.py")


def test_warps_and_what_they_tell_one_another_under_the_interpreter():
    assert "22 passed" in said("interpreted", "hopper_emulated.py")
