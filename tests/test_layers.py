"""tiga.nn's layers beside PyG's: parameters, results, gradients, from lists, graphs and matrices, and in its models.

Random configurations are drawn by number, so that a failure is found again.
"""

import copy
import doctest
import importlib
import random

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from interpreting import said
from torch import nn

import tiga as tg

geometric = pytest.importorskip("torch_geometric")

from torch_geometric import nn as peers  # noqa: E402
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor  # noqa: E402

NAMES = ("GATConv", "GATv2Conv", "TransformerConv")
NUMBERS = 18
FILLS = ("mean", "add", "min", "max", "mul", 0.5, "tensor")


def graph(num_src, num_dst, edges, generator):
    """Random pairs: repeated, with self loops, and some rows without any."""
    src = torch.randint(0, num_src, (edges,), generator=generator)
    dst = torch.randint(0, max(1, num_dst - 1), (edges,), generator=generator)
    return torch.stack([src, dst])


def options_of(name, draw, number):
    """Constructor options, at random; the first numbers fill self loops' attributes in every way."""
    bits = lambda *names: {n: draw.random() < 0.5 for n in names}
    options = {"heads": draw.choice((1, 2, 3)), **bits("concat", "bias")}
    if draw.random() < 0.6:
        options["edge_dim"] = draw.choice((1, 3))
    if name == "TransformerConv":
        return {**options, **bits("beta", "root_weight")}
    every = number < len(FILLS)
    fill = FILLS[number] if every else draw.choice(FILLS)
    options |= {"edge_dim": 3} if every else {}
    fill = torch.linspace(-1, 1, options.get("edge_dim", 1)) if fill == "tensor" else fill
    own = bits("residual", "add_self_loops") | {"negative_slope": draw.choice((0.2, 0.01)), "fill_value": fill}
    own |= {"add_self_loops": True} if every else {}
    return {**options, **own, **(bits("share_weights") if name == "GATv2Conv" else {})}


def called(name, number):
    """(channels, options, arguments, keywords) of a call: one set of nodes, or two of different sizes and features."""
    draw, generator = random.Random(f"{name} {number}"), torch.Generator().manual_seed(number)
    options = options_of(name, draw, number)
    shape = draw.choice(("one", "one", "two", "two", "one map", "sources"))
    num_src, num_dst = (
        (7, 7) if shape == "one" else draw.choice(((9, 5), (5, 9), (6, 6)) if number >= len(FILLS) else ((9, 5),))
    )
    if shape == "sources" and (name != "GATConv" or not isinstance(options.get("fill_value"), (str, float))):
        shape = "two"
    if shape == "sources":
        num_dst = num_src
    if num_dst > num_src and isinstance(options.get("fill_value"), str):
        options["fill_value"] = 2.0  # of rows that are no source PyG folds none
    edges = draw.choice((0, 1, 25, 25)) if number >= len(FILLS) else 25
    values = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64).requires_grad_()
    if shape in ("two", "one map") and options.get("share_weights"):
        shape = "one map"
    channels = {"one": 4, "two": (4, 3), "one map": 4, "sources": 4}[shape]
    x = values(num_src, 4)
    if shape != "one":
        x = (x, None if shape == "sources" else values(num_dst, 3 if shape == "two" else 4))
    list_ = graph(num_src, num_dst, edges, generator)
    arguments = [x, list_, *([values(edges, options["edge_dim"])] if "edge_dim" in options else [])]
    return channels, options, arguments


def pair_of(name, channels, out, **options):
    """PyG's layer and ours with its parameters, in float64."""
    theirs = getattr(peers, name)(channels, out, **options).double()
    for p in theirs.parameters():  # biases begin at zero
        nn.init.normal_(p)
    ours = getattr(tg.nn, name)(channels, out, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs_of(x, *rest):
    found = [*(x if isinstance(x, tuple) else (x,)), *rest]
    return [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]


def gradients(outputs, inputs):
    weights = [torch.arange(t.numel(), dtype=t.dtype, device=t.device).view_as(t).cos() for t in outputs]
    total = sum((t.sin() * w).sum() for t, w in zip(outputs, weights))
    if not total.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found)]


def assert_same(got, wanted, tolerance=1e-10):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def compare(name, number, width):
    """Results and all gradients of a random configuration beside the peer's."""
    channels, options, arguments = called(name, number)
    theirs, ours = pair_of(name, channels, width, **options)
    found = []
    for layer in (ours, theirs):
        out = layer(*arguments)
        found.append([out, *gradients([out], [*inputs_of(*arguments), *layer.parameters()])])
    assert_same(*found)


@pytest.mark.parametrize("number", range(NUMBERS))
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_the_peer(name, number):
    compare(name, number, 5)


@pytest.mark.parametrize("number", range(100, 104))
@pytest.mark.parametrize("name", NAMES)
def test_attention_weights_are_those_of_the_peer(name, number):
    channels, options, arguments = called(name, number)
    theirs, ours = pair_of(name, channels, 5, **options)
    found, lists = [], []
    for layer in (ours, theirs):
        out, (list_, weights) = layer(*arguments, return_attention_weights=True)
        lists.append(list_)
        found.append([out, weights, *gradients([out, weights], [*inputs_of(*arguments), *layer.parameters()])])
    assert torch.equal(*lists)
    assert_same(*found)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_those_of_the_peer(name):
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(15, 2, dtype=torch.float64, requires_grad=True)
    list_ = graph(6, 6, 15, torch.Generator().manual_seed(8))
    theirs, ours = pair_of(name, 4, 3, heads=2, edge_dim=2)
    found = []
    for layer in (ours, theirs):
        inputs = [x, attr, *layer.parameters()]
        first = torch.autograd.grad(layer(x, list_, attr).sin().sum(), inputs, create_graph=True)
        found.append(gradients([g for g in first if g.requires_grad], inputs))
    assert_same(*found)


def test_configurations_meet_every_option():
    """The numbers above draw each value of each option, with edges."""
    seen = set()
    for name in NAMES:
        for number in range(NUMBERS):
            channels, options, arguments = called(name, number)
            shape = type(channels).__name__, isinstance(arguments[0], tuple), arguments[0][-1] is None
            for key, value in options.items():
                if arguments[1].shape[1] > 1 and (key != "fill_value" or "edge_dim" in options):
                    seen.add((name, key, "tensor" if isinstance(value, torch.Tensor) else value))
            seen.add((name, *shape))
    fills = {("GATv2Conv", "fill_value", fill) for fill in FILLS} | {("GATConv", "fill_value", f) for f in FILLS}
    flags = {("GATConv", key) for key in ("concat", "bias", "residual", "add_self_loops")}
    flags |= {("GATv2Conv", key) for key in ("concat", "bias", "residual", "add_self_loops", "share_weights")}
    flags |= {("TransformerConv", key) for key in ("concat", "bias", "beta", "root_weight")}
    shapes = {("int", False, False), ("tuple", True, False), ("int", True, False)}
    wanted = fills | {(*f, v) for f in flags for v in (True, False)} | {(n, *s) for n in NAMES for s in shapes}
    assert (wanted | {("GATConv", "int", True, True)}) - seen == set()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [4, (4, 3)])
def test_parameters_are_named_drawn_and_loaded_as_the_peers(name, channels):
    options = {"heads": 2, "edge_dim": 3}
    options |= {"beta": True} if name == "TransformerConv" else {"residual": True}
    layers = []
    for library in (peers, tg.nn):
        torch.manual_seed(5)
        layers.append(getattr(library, name)(channels, 6, **options))
    theirs, ours = layers
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert_same(ours.state_dict().values(), theirs.state_dict().values(), 1e-6)
    assert repr(ours) == repr(theirs)
    for p in ours.parameters():
        nn.init.normal_(p)
    theirs.load_state_dict(ours.state_dict())
    assert_same(ours.state_dict().values(), theirs.state_dict().values(), 0)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_learned_from_the_first_input(name):
    x, list_, attr = torch.randn(5, 4), torch.tensor([[0, 1, 2], [1, 1, 4]]), torch.randn(3, 2)
    lazy = getattr(tg.nn, name)(-1, 3, heads=2, edge_dim=-1)
    lazy(x, list_, attr)
    theirs = getattr(peers, name)(4, 3, heads=2, edge_dim=2)
    theirs.load_state_dict(lazy.state_dict())
    assert_same([lazy(x, list_, attr)], [theirs(x, list_, attr)], 1e-5)
    lazy.reset_parameters()
    assert lazy(x, list_, attr).isfinite().all()


def attached(list_, generator):
    return torch.randn(list_.shape[1], 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_edges_come_as_lists_graphs_and_matrices(name):
    """A matrix has a row for each destination, and values of several features are edge attributes."""
    generator = torch.Generator().manual_seed(1)
    # pairs of a matrix are distinct, and its entries stand in order
    mask = torch.rand(6, 6, generator=generator) < 0.4
    dst, src = mask.nonzero(as_tuple=True)
    list_ = torch.stack([src, dst])
    attr, x = attached(list_, generator), torch.randn(6, 4, generator=generator, dtype=torch.float64)
    loops = {} if name == "TransformerConv" else {"add_self_loops": False}
    theirs, ours = pair_of(name, 4, 5, heads=2, edge_dim=3, **loops)
    wanted = theirs(x, list_, attr)
    by_column = torch.argsort(src, stable=True)
    matrices = {
        "csr": (to_torch_csr_tensor(list_.flip(0), attr, (6, 6)), attr, torch.arange(len(src))),
        "coo": (to_torch_coo_tensor(list_.flip(0), attr, (6, 6)), attr, torch.arange(len(src))),
        "csc": (to_torch_csc_tensor(list_.flip(0), attr, (6, 6)), attr[by_column], by_column),
    }
    for matrix, field, order in matrices.values():
        assert_same([ours(x, matrix)], [wanted])
        if matrix.layout != torch.sparse_csc:  # which PyG's generated code does not take
            assert_same([theirs(x, matrix)], [wanted])
        plain = torch.sparse_coo_tensor(list_.flip(0), torch.ones(len(src)), (6, 6)).to_sparse(layout=matrix.layout)
        assert_same([ours(x, plain, field)], [wanted])
        assert_same([ours(x, tg.Graph.from_sparse(matrix), field)], [wanted])
        out, (held, weight) = ours(x, matrix, return_attention_weights=True)
        _, (_, expected) = theirs(x, list_, attr, return_attention_weights=True)
        assert_same([out, weight], [wanted, expected[order]])
        assert held.layout == matrix.layout and torch.equal(held.values(), weight)
    graph_ = tg.Graph.from_edge_index(list_[:, by_column], 6, 6)
    out, (pairs, weight) = ours(x, graph_, attr[by_column], return_attention_weights=True)
    assert torch.equal(pairs, list_[:, by_column])
    assert_same([out, weight], [wanted, expected[by_column]])
    assert_same([ours(x, geometric.EdgeIndex(list_, sparse_size=(6, 6)), attr)], [wanted])
    assert_same([ours(x, list_.int(), attr)], [wanted])


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_self_loops_of_a_matrix(name):
    list_ = torch.tensor([[0, 1, 1, 2, 4, 3], [0, 0, 1, 3, 3, 4]])
    x = torch.randn(5, 4, dtype=torch.float64)
    theirs, ours = pair_of(name, 4, 3)
    matrix = to_torch_csr_tensor(list_.flip(0), size=(5, 5)).double()
    assert_same([ours(x, matrix)] * 2, [theirs(x, list_), theirs(x, matrix)])
    with pytest.raises(tg.TigaError, match="return_attention_weights with add_self_loops of a sparse matrix"):
        ours(x, matrix, return_attention_weights=True)


def test_size_says_how_many_nodes_there_are():
    list_ = torch.tensor([[0, 3, 2, 1], [1, 1, 2, 0]])
    x = torch.randn(4, 3, dtype=torch.float64)
    for options in ({}, {"add_self_loops": False}):
        theirs, ours = pair_of("GATConv", 3, 2, **options)
        assert_same([ours((x, None), list_, size=(4, 3))], [theirs((x, None), list_, size=(4, 3))])


# Dropout.


@pytest.mark.parametrize("name", NAMES)
def test_dropout_drops_weights_and_its_backward_drops_the_same(name):
    """Results and gradients are those of the peer's formula with the weights that were drawn."""
    generator = torch.Generator().manual_seed(3)
    list_ = graph(8, 8, 60, generator)
    list_ = list_[:, list_[0] != list_[1]]
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    theirs, ours = pair_of(name, 4, 5, heads=2, concat=False, bias=False, dropout=0.4)
    whole = copy.deepcopy(theirs).eval()
    if name == "TransformerConv":
        ours.dropped_weights = True  # to see what was drawn
    torch.manual_seed(7)
    _, (every, weight) = ours(x, list_, return_attention_weights=True)
    kept = (weight != 0).double() / 0.6
    torch.manual_seed(7)
    out = ours(x, list_)
    _, (_, full) = whole(x, list_, return_attention_weights=True)
    assert_same([weight], [full * kept])
    lin = {"GATConv": "lin", "GATv2Conv": "lin_l", "TransformerConv": "lin_value"}[name]
    value = getattr(whole, lin)(x).view(8, 2, 5)
    wanted = torch.zeros_like(value).index_add(0, every[1], (full * kept)[..., None] * value[every[0]]).mean(1)
    if name == "TransformerConv":
        wanted = wanted + whole.lin_skip(x)
    given = [[x, *layer.parameters()] for layer in (ours, whole)]
    assert_same([out, *gradients([out], given[0])], [wanted, *gradients([wanted], given[1])])
    assert_same([ours.eval()(x, list_)], [whole(x, list_)])


def test_dropout_keeps_as_many_as_it_says_and_another_seed_keeps_others():
    n = 40
    list_ = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    layer = tg.nn.TransformerConv(2, 2, heads=4, dropout=0.3)
    layer.dropped_weights = True
    masks = [layer(torch.randn(n, 2), list_, return_attention_weights=True)[1][1] != 0 for _ in range(2)]
    for mask in masks:  # 6,400 draws: five standard deviations are 0.029
        assert abs(mask.double().mean() - 0.7) < 0.029
        assert (mask.double().mean(0) - 0.7).abs().max() < 0.058
    assert abs((masks[0] == masks[1]).double().mean() - 0.58) < 0.031  # 0.7^2 + 0.3^2


# In models, loaders and compilers.


class Model(nn.Module):
    """A PyG model in which either library's layers stand."""

    def __init__(self, layers):
        super().__init__()
        self.one = layers.GATv2Conv(4, 8, heads=2, edge_dim=2)
        self.two = layers.TransformerConv(16, 8, heads=2, edge_dim=2, beta=True)
        self.norm = peers.GraphNorm(16)
        self.three = layers.GATConv(16, 6, heads=2, concat=False)
        self.head = nn.Linear(6, 3)

    def forward(self, data):
        x = self.one(data.x, data.edge_index, data.edge_attr).relu()
        x = self.norm(self.two(x, data.edge_index, data.edge_attr), data.batch)
        return self.head(peers.global_mean_pool(self.three(x, data.edge_index), data.batch))


def test_a_model_trains_as_with_the_peers_layers():
    generator = torch.Generator().manual_seed(2)
    samples = []
    for n in (5, 9, 3, 7, 6, 4):
        list_ = graph(n, n, 3 * n, generator)
        fields = {"x": torch.randn(n, 4, generator=generator), "edge_attr": torch.randn(3 * n, 2, generator=generator)}
        samples.append(Data(edge_index=list_, y=torch.tensor([n % 3]), **fields))
    theirs, ours = Model(peers), Model(tg.nn)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for model in (theirs.double(), ours.double()):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            for batch in DataLoader(samples, batch_size=4):
                batch.x, batch.edge_attr = batch.x.double(), batch.edge_attr.double()
                loss = F.cross_entropy(model(batch), batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        found.append([*losses, *model.state_dict().values()])
    assert found[0][2] < found[0][0]
    assert_same(found[1], found[0], 1e-7)  # Adam divides by roots of small squares


def test_a_sequential_model_of_the_peer_takes_a_layer():
    x, list_ = torch.randn(5, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    layers = [(tg.nn.GATConv(4, 3, heads=2), "x, edge_index -> x"), nn.ReLU(inplace=True), nn.Linear(6, 2)]
    assert peers.Sequential("x, edge_index", layers)(x, list_).shape == (5, 2)


def test_several_kinds_of_nodes():
    """PyG's HeteroConv calls a layer with a pair of inputs for each kind of edges."""
    x = {"author": torch.randn(4, 3, dtype=torch.float64), "paper": torch.randn(6, 5, dtype=torch.float64)}
    generator = torch.Generator().manual_seed(9)
    lists = {
        ("author", "writes", "paper"): graph(4, 6, 10, generator),
        ("paper", "cites", "paper"): graph(6, 6, 12, generator),
        ("paper", "of", "author"): graph(6, 4, 10, generator),
    }
    found = []
    for library in (peers, tg.nn):
        kinds = (library.GATConv((3, 5), 4, add_self_loops=False), library.GATv2Conv(5, 4))
        layers = dict(zip(lists, (*kinds, library.TransformerConv((5, 3), 4))))
        torch.manual_seed(0)
        model = peers.HeteroConv(layers, aggr="sum").double()
        for p in model.parameters():
            nn.init.normal_(p)
        found.append(model(x, lists))
    assert_same(*[[each[kind] for kind in x] for each in found])


WHOLE = [*[(name, (4,)) for name in NAMES], ("GATConv", (4, 3)), ("GATConv", (4, None))]


@pytest.mark.parametrize("name, sizes", WHOLE)
def test_compiled_whole(name, sizes):
    """Of one input, of a pair, and of sources alone."""
    list_ = graph(12, 12, 40, torch.Generator().manual_seed(4))
    ends = [None if n is None else torch.randn(12, n, dtype=torch.float64, requires_grad=True) for n in sizes]
    x = ends[0] if len(sizes) == 1 else tuple(ends)
    attr = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    loops = {} if name == "TransformerConv" or None not in sizes else {"add_self_loops": False}
    theirs, ours = pair_of(name, sizes[0] if len(sizes) == 1 else (4, 3), 5, heads=2, edge_dim=3, **loops)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = []
    for layer, parameters in ((compiled, ours.parameters()), (theirs, theirs.parameters())):
        out = layer(x, list_, attr)
        found.append([out, *gradients([out], [*inputs_of(x, attr), *parameters])])
    assert_same(*found)


def test_compiled_once_for_all_sizes_and_seeds():
    """Dropout draws anew at each call, and a self loop's as an edge's: the mean of many calls is the call without."""
    torch._dynamo.reset()
    layer = tg.nn.GATConv(3, 4, heads=2, dropout=0.5)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for n in (5, 8):
        x, list_ = torch.randn(n, 3), graph(n, n, 4 * n, torch.Generator().manual_seed(n))
        every = torch.stack([compiled(x, list_).detach() for _ in range(200)])
        error, spread = every.mean(0) - copy.deepcopy(layer).eval()(x, list_), every.std(0) / 200**0.5
        assert (error.abs() <= 5 * spread + 1e-6).all()
    assert counter.frame_count == 1


def test_autocast_gives_what_the_peer_gives():
    x, list_ = torch.randn(6, 4), graph(6, 6, 20, torch.Generator().manual_seed(6))
    for name in NAMES:
        theirs = getattr(peers, name)(4, 8, heads=2)
        ours = getattr(tg.nn, name)(4, 8, heads=2)
        ours.load_state_dict(theirs.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            got, wanted = ours(x, list_), theirs(x, list_)
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.05, atol=0.05)


# What is stored, and what is refused.


def test_no_edge_array_of_features_is_saved():
    """Of edges, backward keeps the list and the given attributes alone."""
    n, edges, width = 50, 4000, 64
    list_ = graph(n, n, edges, torch.Generator().manual_seed(0))
    attr = torch.randn(edges, 2, requires_grad=True)
    for name in NAMES:
        layer = getattr(tg.nn, name)(4, width, edge_dim=2)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            layer(torch.randn(n, 4, requires_grad=True), list_, attr)
        large = {t.data_ptr(): t.numel() for t in kept if t.numel() >= edges}
        assert sum(large.values()) <= 8 * edges and max(large.values()) <= 2 * edges, name


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: tg.nn.GATConv(4, 3, aggr="max"), "GATConv: aggr='max' is not supported"),
        (lambda: tg.nn.GATv2Conv(4, 3, flow="target_to_source"), "give edge_index.flip"),
        (lambda: tg.nn.GATConv(4, 3, fill_value="median"), "fill_value='median'"),
        (lambda: tg.nn.GATConv(4, 3)(torch.randn(2, 3, 4), LIST), r"x has shape \(2, 3, 4\)"),
        (lambda: tg.nn.GATv2Conv(4, 3)((torch.randn(3, 4), None), LIST), "GATv2Conv: no x of destinations"),
        (lambda: tg.nn.GATv2Conv(4, 3)(torch.randn(3, 4), LIST, torch.randn(2, 1)), "has no edge_dim"),
        (lambda: tg.nn.GATv2Conv(4, 3, edge_dim=2)(torch.randn(3, 4), LIST, torch.randn(2, 1)), "edge_dim is 2"),
        (lambda: tg.nn.TransformerConv(4, 3, edge_dim=2)(torch.randn(3, 4), LIST), "no edge_attr is given"),
        (lambda: tg.nn.GATConv(4, 3)(torch.randn(3, 4), Data(edge_index=LIST)), "edge_index=batch.edge_index"),
        (lambda: tg.nn.GATConv(4, 3)(torch.randn(2, 4), LIST), "names destination 2"),
        (lambda: tg.nn.GATConv(4, 3)(torch.randn(2, 4), tg.Graph.dense(3)), "has 2 rows, but the graph has 3"),
    ],
)
def test_refusals_say_what_to_write(call, words):
    with pytest.raises(tg.TigaError, match=words):
        call()


LIST = torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize("module", ["gat_conv", "gatv2_conv", "transformer_conv"])
def test_doctests(module):
    failed, tried = doctest.testmod(importlib.import_module(f"tiga.nn.{module}"))
    assert tried > 1 and failed == 0


# Kernels, without a GPU.


def test_kernels_under_the_interpreter():
    assert "4 passed" in said("interpreted_rows", "layers_interpreted.py")
