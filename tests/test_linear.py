"""Products with a matrix of parameters: of joined features what is multiplied once a node, and what on the edge."""

import pytest
import torch
from torch import nn

import tiga as tg
from tiga import passes
from tiga.adjoint import adjoint, augment
from tiga.ops import rows, tiles
from tiga.parser import parse

NODES, EDGES = 7, 25


class Network(tg.MessagePassing):
    """Softmax of a network's score over joined features; the parts in an order of their own."""

    reducer = tg.online_softmax()

    def __init__(self, sizes, hidden, order, outputs=1):
        super().__init__()
        width = sum(sizes[name] for name in order)
        self.order, self.net = (
            order,
            tg.nn.trace(nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, outputs))),
        )

    def edge(self, src, dst, edge):
        parts = {"src": lambda: src.x, "dst": lambda: dst.y, "edge": lambda: edge.a}
        return self.reducer(self.net(*[parts[name]() for name in self.order]), src.x)


SIZES = {"src": 4, "dst": 3, "edge": 2}


def made(order, hidden=6, dtype=torch.float64, outputs=1):
    torch.manual_seed(2)
    module = Network(SIZES, hidden, order, outputs).to(dtype)
    ends = torch.randint(0, NODES, (2, EDGES))
    draw = lambda *s: torch.randn(*s, dtype=dtype, requires_grad=True)
    fields = {"src": {"x": draw(NODES, SIZES["src"])}, "dst": {}, "edge": {}}
    if "dst" in order:
        fields["dst"]["y"] = draw(NODES, SIZES["dst"])
    if "edge" in order:
        fields["edge"]["a"] = draw(EDGES, SIZES["edge"])
    return module, tg.Graph.from_edge_index(ends, num_src=NODES, num_dst=NODES), fields, ends


def plain(module, fields, ends):
    j, i = ends
    parts = {
        "src": lambda: fields["src"]["x"][j],
        "dst": lambda: fields["dst"]["y"][i],
        "edge": lambda: fields["edge"]["a"],
    }
    score = module.net.module(torch.cat([parts[name]() for name in module.order], -1))[:, 0]
    rows = []
    for row in range(NODES):
        of = i == row
        rows.append(score[of].softmax(0) @ fields["src"]["x"][j[of]])
    return torch.stack(rows)


def call(module, graph, fields):
    return module(graph=graph, **{place: given for place, given in fields.items() if given})


def leaves(module, fields):
    return [x for given in fields.values() for x in given.values()] + list(module.parameters())


@pytest.mark.parametrize("hidden", [6, 40])
@pytest.mark.parametrize(
    "order",
    [("src", "dst"), ("src", "edge", "dst"), ("edge", "src"), ("dst", "edge", "edge", "src"), ("src", "dst", "src")],
)
def test_values_and_gradients_of_parts_apart(order, hidden):
    """And second derivatives: the matrix is cut and joined, each part at its columns."""
    module, graph, fields, ends = made(order, hidden)
    read, direction = leaves(module, fields), torch.randn(NODES, SIZES["src"], dtype=torch.float64)
    found = []
    for out in (call(module, graph, fields), plain(module, fields, ends)):
        first = torch.autograd.grad(out.square(), read, direction, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), read)
        found.append((out, *first, *second))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def products(text):
    return [line.split(" = ")[1] for line in text.splitlines() if " = linear " in line]


def lowered(order, hidden=6, **more):
    module, graph, fields, _ = made(order, hidden, **more)
    return module.lower(graph, **{place: given for place, given in fields.items() if given})


def test_what_reads_one_node_is_multiplied_there():
    text = lowered(("src", "edge", "dst")).program
    types = parse(text).types
    at = [types[p.split()[1]].place for p in products(text)]
    assert sorted(at) == ["dst", "edge", "src"]
    bias = next(line for line in text.splitlines() if " = add " in line and "shared.tensor" in line)
    assert types[bias.split(" = ")[0]].place in ("src", "dst")


def test_a_much_wider_product_is_not_read_in_place_of_its_part():
    """A source of 4 features: 16 outputs are hoisted, 17 are not."""
    places = lambda hidden: [
        parse(t).types[p.split()[1]].place for t in [lowered(("src", "edge"), hidden).program] for p in products(t)
    ]
    assert sorted(places(16)) == ["edge", "src"]
    assert places(17) == ["edge"]


def test_it_is_told():
    from tiga.builder import Path

    Path.root = None
    module, graph, fields, _ = made(("src", "edge", "dst"))
    before = passes.COUNTS["hoist"]
    for _ in range(2):
        call(module, graph, fields)
        assert passes.COUNTS["hoist"] == before + 1 and "hoist" in module.last_variant.passes
    assert "that of src.x, dst.y is made once a node" in module.explain()
    plain, graph, fields, _ = made(("src", "edge"), 17)
    call(plain, graph, fields)
    assert "hoist" not in plain.last_variant.passes and "once a node" not in plain.explain()


def test_a_trace_met_before_in_part_is_split_as_well():
    """The join is looked up, the product is new."""
    other, graph, fields, _ = made(("src", "dst"))

    class Joined(Network):
        def edge(self, src, dst, edge):
            return self.reducer(torch.cat([src.x, dst.y], -1).sum(-1), src.x)

    call(Joined(SIZES, 6, ("src", "dst")).double(), graph, fields)
    call(other, graph, fields)
    assert "hoist" in other.last_variant.passes


def test_displacements_stay_on_the_edge():
    """Differences of products of positions have fewer digits: far from the origin the result is that near it."""

    class Between(tg.MessagePassing):
        reducer = tg.sum()

        def __init__(self):
            super().__init__()
            self.net = tg.nn.trace(nn.Linear(3 + 4, 5))

        def edge(self, src, dst, edge):
            return self.reducer(self.net(edge.displacement, src.x))

    torch.manual_seed(0)
    module, x, places = Between(), torch.randn(12, 4), torch.rand(12, 3).mul(64).round() / 64
    out = [module(graph=tg.Graph.radius(places + far, 0.7), src={"x": x}) for far in (0.0, 4096.0)]
    torch.testing.assert_close(*out, rtol=0, atol=0)
    types = parse(module.ir()).types
    assert [types[p.split()[1]].place for p in products(module.ir())] == ["src", "edge"]


@pytest.mark.parametrize("kind", ["csr", "triangular"])
def test_a_network_of_one_score_has_kernels(kind):
    """Without a matrix product on the edge, on implicit graphs too: forward and backward."""
    module, graph, fields, _ = made(("src", "dst"), dtype=torch.float32)
    graph = graph if kind == "csr" else tg.Graph.triangular(NODES)
    call = module.lower(graph, **{place: given for place, given in fields.items() if given})
    full = augment(call.program)
    p = parse(full)
    wanted = tuple(k for k, o in enumerate(p.operands) if p.types[o.ref].floating)
    for text in (full, adjoint(full, wanted, (0,)).text):
        why = rows.planned(parse(text)).reason if kind == "csr" else tiles.planned(parse(text))[2]
        assert why == ""
        assert not [p for p in products(text) if parse(text).types[p.split()[1]].place == "edge"]
