"""Layers through their kernels under Triton's interpreter: test_layers.py starts this with `-p interpreted_rows`."""

import pytest
import torch
from interpreted_rows import REASONS
from test_layers import assert_same, gradients, pair_of

from tiga import passes

CALLS = [
    ("GATConv", {"edge_dim": 3, "fill_value": "max", "concat": False}),
    ("GATv2Conv", {"edge_dim": 2, "residual": True, "heads": 3, "channels": 5}),  # no powers of two
    ("TransformerConv", {"edge_dim": 3, "beta": True}),
]
LIST = torch.tensor([[0, 1, 2, 2, 3, 0, 4, 4, 1], [1, 1, 0, 1, 1, 1, 3, 3, 3]])


@pytest.mark.parametrize("name, options", CALLS, ids=str)
def test_kernels_give_what_the_peer_gives(name, options):
    options = {"heads": 2, "channels": 4, **options}
    theirs, ours = pair_of(name, 4, options.pop("channels"), **options)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(9, options.get("edge_dim", 1), dtype=torch.float64, requires_grad=True)
    given = [x, LIST, *([attr] if "edge_dim" in options else [])]
    before, found = passes.COUNTS["launch-rows"], []
    for layer in (ours, theirs):
        out = layer(*given)
        found.append([out, *gradients([out], [x, attr, *layer.parameters()])])
    assert passes.COUNTS["launch-rows"] == before + 2 and not REASONS
    assert_same(*found)


def test_kernels_drop_what_torch_drops():
    """The weights that are dropped follow from the seed and the edge's number, whatever computes them."""
    from tiga.ops import propagate

    layer = pair_of("TransformerConv", 4, 4, heads=2, dropout=0.5)[1]
    x, found = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), []
    for devices in ({"cpu"}, set()):
        propagate.KERNEL_DEVICES.discard("cpu")
        propagate.KERNEL_DEVICES |= devices
        torch.manual_seed(1)
        out = layer(x, LIST)
        found.append([out, *gradients([out], [x, *layer.parameters()])])
    propagate.KERNEL_DEVICES.add("cpu")
    assert_same(*found)
    assert not REASONS
