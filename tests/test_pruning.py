"""Skipping tiles, without a GPU: options, refusals, the program's text, kernels interpreted and compiled."""

import math

import pytest
import torch
from cases import Attention
from compiled import usage
from interpreting import interpreted
from test_tiles import call, sources

import tiga as tg
from tiga import prune
from tiga.adjoint import augment
from tiga.parser import parse

RULES = ["block_prune_threshold", "prune_mass"]


class Pruned(Attention):
    def __init__(self, **options):
        super().__init__()
        self.reducer = tg.online_softmax(**options)


# Options.


@pytest.mark.parametrize("rho", [0, -0.1, 1.5, math.inf, math.nan, torch.tensor([0.5, 0.0]), torch.tensor([math.nan])])
def test_thresholds_lie_in_their_range(rho):
    with pytest.raises(ValueError, match="block_prune_threshold=.* lies in"):
        tg.online_softmax(block_prune_threshold=rho)


@pytest.mark.parametrize("eps", [0, 1, -0.1, math.nan])
def test_masses_lie_in_their_range(eps):
    with pytest.raises(ValueError, match="prune_mass=.* lies in"):
        tg.online_softmax(prune_mass=eps)


@pytest.mark.parametrize("rho", [0.5, math.nan, torch.tensor([0.5])])
def test_one_rule_at_a_time(rho):
    with pytest.raises(ValueError, match="two rules"):
        tg.online_softmax(block_prune_threshold=rho, prune_mass=0.1)


@pytest.mark.parametrize("tile", [(128,), 128, (128, 48), (8, 64), (True, 64), [128, 64]])
def test_tiles_are_two_powers_of_two(tile):
    with pytest.raises(ValueError, match="prune_tile"):
        tg.online_softmax(block_prune_threshold=0.5, prune_tile=tile)


@pytest.mark.parametrize("option", RULES)
@pytest.mark.parametrize("make", [tg.sum, tg.mean, tg.max, tg.min])
def test_other_reducers_do_not_prune(make, option):
    with pytest.raises(ValueError, match=f"{option}=0.5; only online_softmax"):
        make(**{option: 0.5})
    named = type("Mine", (type(make()),), {option: 0.5})

    class Module(tg.MessagePassing):
        reducer = named()

        def edge(self, src, dst, edge):
            return self.reducer(src.x)

    with pytest.raises(ValueError, match=f"Mine: {option}=0.5"):
        Module()(graph=tg.Graph.dense(3), src={"x": torch.ones(3)})


def test_a_threshold_set_later_is_checked_when_it_is_used():
    module = Pruned()
    module.reducer.block_prune_threshold = 2.0
    with pytest.raises(ValueError, match="block_prune_threshold=2.0"):
        call(module, tg.Graph.dense(4))


# Refusals: nothing else is computed instead.


def attend(module, graph, dtype=torch.float32):
    x = torch.randn(graph.num_dst, 2, 16, dtype=dtype)
    return module(graph=graph, src={"key": x, "value": x}, dst={"query": x}, scale=0.25)


@pytest.mark.parametrize("option", RULES)
def test_a_cpu_refuses(option):
    with pytest.raises(tg.TigaError, match=f"{option}=0.5: .* implicit relations, and the fields are on cpu"):
        attend(Pruned(**{option: 0.5}), tg.Graph.triangular(5))


def test_the_operator_refuses():
    arguments = call(Pruned(prune_mass=0.5), tg.Graph.triangular(5))
    with pytest.raises(tg.TigaError, match="the fields are on cpu"):
        torch.ops.tiga.propagate(*arguments)


class Linear(Pruned):
    def edge(self, src, dst, edge, scale):
        return self.reducer(torch.nn.functional.linear(src.key + dst.query, torch.ones(1, 16))[..., 0], src.value)


@pytest.mark.parametrize(
    "module, graph, dtype, why",
    [
        (Pruned, tg.Graph.triangular(5).to_csr(), torch.float32, "the graph is a list of edges"),
        (Pruned, tg.Graph.triangular(5), torch.float64, "no kernel fits this program .float64."),
        (Linear, tg.Graph.triangular(5), torch.float32, "no kernel fits this program .* on the edge"),
    ],
)
def test_what_has_no_kernel_refuses(module, graph, dtype, why, monkeypatch):
    monkeypatch.setattr(prune, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr("tiga.ops.propagate.KERNEL_DEVICES", {"cpu", "cuda"})
    with pytest.raises(tg.TigaError, match=why):
        attend(module(block_prune_threshold=0.5), graph, dtype)


def test_a_gradient_must_be_asked_for():
    text = call(Pruned(block_prune_threshold=0.5), tg.Graph.triangular(5)).program
    with pytest.raises(tg.TigaError, match="prune_backward=True"):
        augment(text)
    text = call(Pruned(block_prune_threshold=0.5, prune_backward=True), tg.Graph.triangular(5)).program
    assert "u8" == parse(augment(text)).types[parse(augment(text)).returns[-1]].dtype


def test_no_report_without_a_pruned_call():
    with pytest.raises(tg.TigaError, match="no call was pruned"):
        _ = Pruned().last_report
    with pytest.raises(tg.TigaError, match="nothing to calibrate"):
        tg.calibrate_prune(Pruned(), [], 0.5)


# Texts and kernels.


def test_the_program_says_what_is_skipped():
    graph = tg.Graph.triangular(5)
    text = call(Pruned(block_prune_threshold=0.5), graph).program
    assert "reduce dst softmax_by_peak %3 src.value log_threshold 64 128 0" in text
    assert "reduce dst softmax_by_mass %3 src.value log_odds 16 32 1" in (
        call(Pruned(prune_mass=0.5, prune_tile=(16, 32), prune_backward=True), graph).program
    )
    same = call(Pruned(block_prune_threshold=0.1), graph)
    assert same.program == text and same.scalars[1] == pytest.approx(math.log(0.1))


def test_an_exact_kernel_has_nothing_of_it():
    graph = tg.Graph.triangular(5)
    (exact,), (pruned,) = (sources(call(m, graph).program)[0] for m in (Attention(), Pruned(prune_mass=0.5)))
    for word in ("EARLY", "skip0", "omitted0", "device_pruned"):
        assert word in pruned and word not in exact


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_without_spills(capability):
    arguments = call(Pruned(prune_mass=0.5, prune_tile=(128, 64)), tg.Graph.triangular(256), torch.bfloat16, 64)
    found = usage(arguments.program, arguments, capability)
    assert found and all(spilled == 0 for _, spilled in found), found


def test_rules_certificates_and_gradients_under_the_interpreter():
    tests = "rule_is and (dense-peak or blocks-mass or double-peak or reversed-mass) or (kept and triangular-peak)"
    tests += " or (many_tiles and 60) or (covers and adversarial and mass and float32)"
    launched, written = interpreted("pruned_interpreted.py", "-k", tests)
    assert launched > 8 and written > 5
