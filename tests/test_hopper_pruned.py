"""Works that skip tiles on the hopper skeleton: kernels compiled for sm_90, and run on a CPU by threads."""

from itertools import pairwise

import compiled_hopper
import pytest
import torch
from interpreting import interpreted

import tiga as tg
from tiga.adjoint import augment
from tiga.codegen import launch_hopper, plan_hopper
from tiga.codegen.calls import Call
from tiga.ops import tiles
from tiga.parser import parse

ROWS, HEADS = 300, 2


class Attention(tg.MessagePassing):
    def __init__(self, **options):
        super().__init__()
        self.reducer = tg.online_softmax(**options)

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Shared(Attention):
    """Values that are keys as well."""

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.key)


class Shifted(Attention):
    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale + src.shift, src.value)


@pytest.fixture
def taken(monkeypatch):
    """Works of any size are taken."""
    monkeypatch.setattr(plan_hopper, "FEWEST", {("band", 64): (0, 0), ("band", 128): (0, 0)})
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 1)


def lowered(module, graph, width):
    field = lambda *shape: torch.zeros(ROWS, *shape, dtype=torch.bfloat16)
    src = {"key": field(HEADS, width)} | ({} if type(module) is Shared else {"value": field(HEADS, width)})
    if type(module) is Shifted:
        src["shift"] = field(1)
    return module.lower(graph, src, {"query": field(HEADS, width)}, {}, scale=0.1)


def refusal(call):
    """Why the skeleton does not take a program's only work."""
    p = parse(call.program)
    (ready,) = [k for k in tiles.planned(p)[1] if k.span != "nodes"]
    found = launch_hopper._refusal(ready)
    if found:
        return found
    made = Call(p, call.tensors, tuple(call.ints), call.scalars, [])
    try:
        launch_hopper.HopperLaunch(launch_hopper._alone(ready), made, tiles.spans).plans()
    except launch_hopper.Refused as e:
        return str(e)
    return ""


CAUSAL = tg.Graph.triangular(ROWS)
PEAK, MASS = {"block_prune_threshold": 0.01}, {"prune_mass": 0.01}


@pytest.mark.parametrize(
    ("options", "width", "maps"),
    [(MASS, 128, 0), (PEAK | {"prune_backward": True}, 128, 1), (PEAK, 64, 0)],
    ids=["mass", "peak, a map", "peak, 64"],
)
def test_kernel_keeps_its_promises(taken, options, width, maps):
    """No register in memory in a loop over tiles, no product that waits for the one before, and the weights of a tile
    after kept ones, the exponentials of its scores, between the products of the one before and the wait for them."""
    call = lowered(Attention(**options), CAUSAL, width)
    text = str(augment(call.program)) if maps else call.program
    made = [(plan, m) for _, plan, m in compiled_hopper.kernels_of(text, call) if m is not None]
    ((plan, kernel),) = made
    assert launch_hopper.faults(kernel) == "" and "C75" not in kernel.log
    beside = [n for (before, _), (after, n) in pairwise(compiled_hopper.waits(kernel.sass)) if before and not after]
    assert sum(n >= plan.block_n // 2 for n in beside) >= plan.consumers


@pytest.mark.parametrize(
    ("module", "graph", "why"),
    [
        (Attention(**PEAK), CAUSAL, ""),
        (Attention(prune_tile=(128, 64), **PEAK), CAUSAL, "tiles of (128, 64) to skip"),
        (Shared(**PEAK), CAUSAL, "values that scores are made of"),
        (Shifted(**MASS), CAUSAL, "numbers of the other end"),
        (Attention(**MASS), tg.Graph.cu_seqlens([0, ROWS]), "tiles to skip of a blocks"),
    ],
    ids=["taken", "a tile", "one field", "numbers", "packed"],
)
def test_what_is_taken(taken, module, graph, why):
    found = refusal(lowered(module, graph, 128))
    assert found == why if not why else why in found


def test_kernels_by_threads():
    """What warps say to one another and find in shared memory, at random times: the rule, results, certificates, maps,
    gradients, and rows that are done again."""
    launched, written = interpreted("hopper_pruned_emulated.py", "-W", "ignore")
    assert launched > 20 and written > 10
