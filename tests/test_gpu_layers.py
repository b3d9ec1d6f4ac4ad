"""Layers on a GPU beside PyG's in float64: their kernels run, and err as PyG's float32 does."""

import copy

import pytest
import torch

from benchmarks.kinks import OtherSide
from tiga import passes

pytest.importorskip("torch_geometric")

from test_layers import gradients, graph, pair_of  # noqa: E402

pytestmark = pytest.mark.gpu
CALLS = [
    ("GATConv", {}),
    ("GATConv", {"edge_dim": 16, "residual": True}),
    ("GATv2Conv", {"add_self_loops": False}),
    ("GATv2Conv", {"edge_dim": 16, "fill_value": "max"}),
    ("GATv2Conv", {"edge_dim": 3, "heads": 3, "channels": 20}),
    ("TransformerConv", {"edge_dim": 16, "beta": True}),
    ("TransformerConv", {"concat": False}),
]


ORDERS = 4


def distances(found, exact):
    return [(a.double() - b).norm().item() for a, b in zip(found, exact)]


def usual_distances(layer, x, rest, exact, generator):
    """The most of the peer's errors over some orders of its input's features, each as good as another: where two scores
    of a row are nearly the same, one rounding decides the largest gradient, and orders differ by a factor of ten."""
    found = []
    for k in range(ORDERS):
        order = torch.arange(x.shape[1]) if k == 0 else torch.randperm(x.shape[1], generator=generator)
        of_input = [x.shape[1:] == p.shape[1:] for p in layer.parameters()]  # maps of x
        turned = copy.deepcopy(layer)
        for p, reads in zip(turned.parameters(), of_input):
            p.data = p.data[:, order].contiguous() if reads else p.data
        given = [x.detach()[:, order].contiguous().requires_grad_(), *rest[1:]]
        out = turned(given[0], rest[0], *rest[1:])
        slopes = gradients([out], [*given, *turned.parameters()])
        back = order.argsort()
        reads = [True, *[False for _ in rest[1:]], *of_input]
        found.append(distances([out, *[g[:, back] if r else g for g, r in zip(slopes, reads)]], exact))
    return [max(errors) for errors in zip(*found)]


@pytest.mark.parametrize("name, options", CALLS, ids=str)
def test_errors_are_those_of_the_peer(name, options):
    options = {"heads": 4, "channels": 32, **options}
    theirs, ours = pair_of(name, 64, options.pop("channels"), **options)
    n, edges, generator = 2000, 16000, torch.Generator().manual_seed(0)
    list_ = torch.cat([graph(n, n, edges, generator), graph(n, 2, 3000, generator)], dim=1).cuda()
    x = torch.randn(n, 64, generator=generator)
    attr = torch.randn(list_.shape[1], options["edge_dim"], generator=generator) if "edge_dim" in options else None
    found = []
    for layer, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        layer.to("cuda", dtype)
        given = [t.to("cuda", dtype).requires_grad_() for t in (x, attr) if t is not None]
        before = passes.COUNTS["launch-rows"]
        out = layer(given[0], list_, *given[1:])
        found.append([out, *gradients([out], [*given, *layer.parameters()])])
        assert layer is theirs or passes.COUNTS["launch-rows"] == before + 2
    with OtherSide():
        out = theirs(given[0], list_, *given[1:])
        other = [out, *gradients([out], [*given, *theirs.parameters()])]
    got, exact = found
    given = [t.detach().float().requires_grad_() for t in given]
    usual = usual_distances(theirs.float(), given[0], [list_, *given[1:]], exact, generator)
    norms = [b.norm().item() for b in exact]
    # A sum that nearly cancels, such as that of all scores' slopes over a destination, keeps the rounding of its terms,
    # in whatever order they are added; one that is zero, such as a key's bias, that of a walk over all edges.
    ulp = 2**-23 * max(norms)
    walk = list_.shape[1] ** 0.5
    for ours_, theirs_, sides, norm in zip(distances(got, exact), usual, distances(other, exact), norms):
        noise = ulp * (walk if norm < 1e-2 * max(norms) else 32)
        assert ours_ <= 2 * theirs_ + 1e-6 * norm + 2 * sides + noise


def test_kernels_drop_the_same_in_forward_and_backward():
    """Results are linear in values: their gradient for values that are ones gives the result's sum back."""
    layer = pair_of("TransformerConv", 8, 16, heads=2, dropout=0.5, root_weight=False, bias=False)[1].float().cuda()
    list_ = graph(500, 500, 6000, torch.Generator().manual_seed(1)).cuda()
    x = torch.randn(500, 8, device="cuda")
    out = layer(x, list_)
    (slope,) = torch.autograd.grad(out.sum(), [layer.lin_value.weight])
    torch.testing.assert_close((slope * layer.lin_value.weight).sum(), out.sum(), rtol=1e-4, atol=1e-2)
