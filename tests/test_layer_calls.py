"""How few products and copies a call of tiga.nn's layers makes."""

import pytest
import torch
from test_layers import NAMES, assert_same, compare, graph, pair_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tiga as tg
from tiga import passes
from tiga.nn import linear


def test_maps_of_one_input_are_one_product_unless_a_module_is_more_than_its_weights(monkeypatch):
    """A hook, and what an adapter put in the place of a map or of its forward, are called as PyG calls them."""
    monkeypatch.setattr(linear, "KERNEL_DEVICES", {"cpu"})
    x, list_ = torch.randn(6, 4, dtype=torch.float64), graph(6, 6, 20, torch.Generator().manual_seed(3))
    theirs, ours = pair_of("TransformerConv", 4, 8, heads=2)
    counted = lambda call: sum("linear" in str(f) or "addmm" in str(f) for f in Called.during(call))
    assert_same([ours(x, list_)], [theirs(x, list_)])
    assert counted(lambda: ours(x, list_)) == 1 < counted(lambda: theirs(x, list_)) == 4
    unaligned = tg.nn.TransformerConv(4, 5, heads=2).double()
    assert counted(lambda: unaligned(x, list_)) == 4
    seen = []
    for layer in (theirs, ours):
        layer.lin_value = Twice(4, 16).double()
        layer.lin_query.forward = lambda x, layer=layer: 3 * nn.functional.linear(x, layer.lin_query.weight)
        layer.lin_key.register_forward_hook(lambda module, given, out: seen.append(module) or out + 1)
    ours.load_state_dict(theirs.state_dict())
    assert_same([ours(x, list_)], [theirs(x, list_)])
    assert seen == [ours.lin_key, theirs.lin_key]


def test_maps_that_learn_their_sizes_are_one_product_from_then_on(monkeypatch):
    monkeypatch.setattr(linear, "KERNEL_DEVICES", {"cpu"})
    x, list_ = torch.randn(6, 4), graph(6, 6, 20, torch.Generator().manual_seed(3))
    layer, found = tg.nn.GATv2Conv(-1, 8, heads=2), []
    products = [
        sum("addmm" in str(f) for f, _ in Called.during(lambda: found.append(layer(x, list_)))) for _ in range(2)
    ]
    assert products == [2, 1]
    assert_same(found[1:], found[:1], 1e-5)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Called(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args))
        return func(*args, **(kwargs or {}))

    @classmethod
    def during(cls, call):
        with cls() as mode:
            mode.found = []
            call()
        return mode.found


@pytest.mark.parametrize("name, number", [(name, number) for name in NAMES for number in (1, 4, 9, 11)])
def test_one_product_gives_what_the_peer_gives(name, number, monkeypatch):
    monkeypatch.setattr(linear, "KERNEL_DEVICES", {"cpu"})
    compare(name, number, 8)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_repeats_is_written_before_edges_read_it(name):
    x, list_ = torch.randn(6, 4, requires_grad=True), graph(6, 6, 20, torch.Generator().manual_seed(3))
    layer = getattr(tg.nn, name)(4, 5, heads=2)
    calls = [args for func, args in Called.during(lambda: layer(x, list_).sum().backward()) if "propagate" in str(func)]
    assert len(calls) == 2 and "grad" in calls[1][0]
    assert all(t.stride(-1) == 1 for t in calls[1][1] if t.dim() > 1 and t.shape[-1] > 1)


# An edge function whose trace is kept.


@pytest.mark.parametrize("name", NAMES)
def test_an_edge_function_is_run_once_and_again_where_what_it_reads_has_changed(name):
    x, list_ = torch.randn(6, 4, dtype=torch.float64), graph(6, 6, 20, torch.Generator().manual_seed(3))
    theirs, ours = pair_of(name, 4, 5, heads=2)
    before = passes.COUNTS["trace"]
    assert_same([ours(x, list_) for _ in range(3)], [theirs(x, list_)] * 3)
    assert passes.COUNTS["trace"] == before + 1
    if name != "TransformerConv":
        theirs.negative_slope = ours.negative_slope = 0.5
        assert_same([ours(x, list_)], [theirs(x, list_)])
    ours.dropout = 0.5
    dropped = [ours(x, list_) for _ in range(2)]
    assert not torch.equal(*dropped)
    assert_same([ours.eval()(x, list_)], [theirs(x, list_)])


def test_an_edge_function_that_is_not_the_layers_own_is_not_kept(monkeypatch):
    x, list_ = torch.randn(6, 4), graph(6, 6, 20, torch.Generator().manual_seed(3))
    layer = tg.nn.GATv2Conv(4, 5, heads=2)
    zero = lambda self, j, i, attr, shared: (0 * (j.x + i.x).sum(-1), j.x)
    whole = layer(x, list_)
    monkeypatch.setattr(tg.nn.GATv2Conv, "message", zero)
    mean = layer(x, list_)
    monkeypatch.undo()
    assert_same([layer(x, list_)], [whole])
    layer.message = zero.__get__(layer)
    assert_same([layer(x, list_)], [mean])

    class Scaled(tg.nn.GATv2Conv):
        scale = 0.0

        def message(self, j, i, attr, shared):
            score, value = super().message(j, i, attr, shared)
            return score * self.scale, value

    scaled = Scaled(4, 5, heads=2)
    scaled.load_state_dict(layer.state_dict())
    assert_same([scaled(x, list_)], [mean], 1e-5)
    scaled.scale = 1.0
    assert_same([scaled(x, list_)], [whole], 1e-5)
