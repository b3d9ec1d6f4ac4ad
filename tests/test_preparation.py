"""What kernels read beside a list of edges: made once, kept by all that hands a graph on, traced when compiled."""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
import torch.utils._pytree as pytree
from oracle import Edges, message_passing

import tiga as tg
from tiga import preparation
from tiga.parser import parse

Graph = tg.Graph
PAIRS = torch.tensor([[3, 0, 2, 0, 2, 2, 2, 1], [1, 4, 1, 0, 3, 3, 4, 1]])  # sources, destinations; (2, 3) twice
MUTUAL = torch.tensor([[1, 0, 0, 2, 1, 3, 3], [0, 1, 2, 0, 3, 3, 1]])


def listed():
    return Graph.from_edge_index(PAIRS, num_src=4, num_dst=5)


def mutual():
    return Graph.from_edge_index(MUTUAL, 4, 4)


def by_row(owner, other, rows):
    """Of each row, in the order in which the edges are given: (other end, number)."""
    return [[(int(o), e) for e, (r, o) in enumerate(zip(owner, other)) if r == row] for row in range(rows)]


def held(rowptr, col, number):
    cuts = rowptr.tolist()
    entries = list(zip(col.tolist(), number.tolist()))
    return [entries[a:b] for a, b in zip(cuts, cuts[1:])]


def check_lists(graph, src, dst):
    """Both directions hold the edges (src, dst) of these numbers, and each row's items its entries, once."""
    ready = graph.prepare()
    found = preparation.directions((*ready.tensors, *ready.prepared))
    sides = ((dst, src, graph.num_dst), (src, dst, graph.num_src))
    for (rowptr, col, number, items, merges), (owner, other, rows) in zip(found, sides):
        number = torch.arange(len(col)) if number is None else number
        assert [sorted(x, key=lambda y: y[1]) for x in held(rowptr, col, number)] == by_row(owner, other, rows)
        cover = sorted((row, first, last) for row, first, last, _ in items.tolist() if row >= 0)
        cuts = rowptr.tolist()
        assert [a for _, a, b in cover for a in range(a, b)] == list(range(cuts[-1]))
        assert all(cuts[row] <= first <= last <= cuts[row + 1] for row, first, last in cover)
        lengths = [last - first for _, first, last, _ in items.tolist()]
        assert lengths == sorted(lengths, reverse=True), "heavy items first"
        assert {row for row, _, _, slot in items.tolist() if slot >= 0} == {r for r, _, _ in merges.tolist() if r >= 0}


@pytest.mark.parametrize("split", [256, 2])
def test_lists_hold_the_edges(split, monkeypatch):
    monkeypatch.setattr(preparation, "SPLIT", split)
    check_lists(listed(), *PAIRS)
    check_lists(listed().reverse(), *PAIRS.flip(0))
    check_lists(listed().prepare().reverse(), *PAIRS.flip(0))
    check_lists(Graph.from_csr([0, 0, 3, 4], [2, 0, 2, 1], num_src=3), [2, 0, 2, 1], [1, 1, 1, 2])
    check_lists(Graph.from_csr([0, 0, 3, 4], [2, 0, 2, 1], num_src=3).prepare().reverse(), [1, 1, 1, 2], [2, 0, 2, 1])
    check_lists(Graph.from_csr([0], [], num_src=0), [], [])
    check_lists(Graph.from_csr([0, 0, 0], [], num_src=3), [], [])


def test_nothing_is_cut_or_padded_where_no_row_is_long(monkeypatch):
    assert [t.shape[0] for t in listed().prepare().prepared] == [5, 0, 5, 8, 8, 4, 0]
    monkeypatch.setattr(preparation, "SPLIT", 3)
    # by destination 3 edges at most, by source 4: its list is padded, and one row is cut
    assert [t.shape[0] for t in listed().prepare().prepared] == [5, 0, 5, 8, 8, 4 + 8 // 3, 8 // 4]
    unread = listed()._with_lists(True, None, False)
    assert [t.shape[0] for t in unread.prepared] == [5 + 8 // 3, 8 // 4, 5, 8, 8, 4 + 8 // 3, 8 // 4]


def test_preparing_again_changes_nothing():
    ready = listed().prepare()
    assert ready.prepare() is ready and ready.ready(True) is ready and ready.to_csr() is ready
    assert Graph.triangular(3).prepare().prepared == ()
    assert ready == listed() and hash(ready) == hash(listed())


def test_preparing_fits_what_a_constructor_padded(monkeypatch):
    """With the sizes given nothing is read: kernels for pieces of rows would be launched for nothing."""
    monkeypatch.setattr(preparation, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(preparation, "SPLIT", 3)
    monkeypatch.setattr(preparation, "PIECES", 1 << 30)
    g = Graph.from_edge_index(PAIRS, 4, 5)  # no row of more than 3 edges; source 2 has 4
    padded, cut = g.prepared[1], g.prepared[6]
    assert padded.shape[0] == cut.shape[0] == 2 and (padded[:, 0] == -1).all() and (cut[:, 0] >= 0).any()
    fit = g.prepare()
    assert fit.prepared[1].shape == (0, 3) and fit.prepared[0].shape == (5, 4) and fit.prepared[6] is cut
    assert all(a is b for a, b in zip(fit.prepared[2:], g.prepared[2:])) and fit.prepare() is fit
    assert fit.prepared[0].tolist() == listed().prepare().prepared[0].tolist()
    both = preparation.lists(mutual().ints, mutual().tensors, (), True, True, False)
    shared = preparation.fitted(mutual().tensors, both)
    assert both[1].shape[0] == 1 and shared[1].shape == (0, 3)
    assert shared[5] is shared[0] and shared[6] is shared[1] and shared[2] is both[2]


def test_undirected_graphs_share_both_directions():
    ready = mutual().prepare()
    items, merges, rowptr, col, number, back_items, back_merges = ready.prepared
    assert rowptr is ready.tensors[0] and col is ready.tensors[1] and back_items is items and back_merges is merges
    assert number.tolist() != ready.tensors[2].tolist()
    check_lists(mutual(), *MUTUAL)
    declared = mutual()._with_lists(True, True, False)
    assert declared.prepared[2] is declared.tensors[0]
    apart = mutual().prepare(undirected=False)
    assert apart.prepared[2] is not apart.tensors[0] and torch.equal(apart.prepared[2], apart.tensors[0])
    assert listed().prepare().prepared[2] is not listed().tensors[0]
    assert Graph.radius(torch.rand(9, 2), 0.6).prepare().prepared[5] is not None


def leaves_of(graph):
    leaves, spec = pytree.tree_flatten(graph)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))


def saved(graph):
    held = io.BytesIO()
    torch.save(graph, held)
    held.seek(0)
    return torch.load(held, weights_only=True)


WAYS = {
    "pytree": leaves_of,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "copy": copy.deepcopy,
    "save": saved,
    "to": lambda g: g.to("cpu"),
    "reverse twice": lambda g: g.reverse().reverse(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [listed, mutual])
def test_every_way_of_handing_on_keeps_the_lists(make, way):
    ready = make().prepare()
    there = WAYS[way](ready)
    assert there == ready and len(there.prepared) == 7
    assert all(torch.equal(a, b) for a, b in zip(there.prepared, ready.prepared))
    assert (there.prepared[2] is there.tensors[0]) == (ready.prepared[2] is ready.tensors[0])


def test_explain_counts_them():
    assert "lists for kernels" not in listed().explain()
    n, m, e = 5, 4, 8
    size = 4 * (4 * n + 4 * m) + 8 * (m + 1 + 2 * e)
    assert f"and lists for kernels, both directions, of {size} bytes" in listed().prepare().explain()


def test_other_edges_have_no_lists_of_these():
    ready = listed().prepare()
    for other in (Graph.cat([ready, ready]), ready & ready, ready | Graph.dense(5, 4)):
        assert other.prepared == ()
    assert ready.to("meta").prepared[3].device.type == "meta"


class Weighted(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(edge.weight * src.x * dst.y)


def fields(graph):
    draw = torch.Generator().manual_seed(0)
    x, y, w = (torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in (*graph.ints[::-1], graph.num_edges))
    return [t.requires_grad_() for t in (x, y, w)]


program = Weighted()


def apply(graph, x, y, w):
    return program(graph=graph, src={"x": x}, dst={"y": y}, edge={"weight": w})


def expected(src, dst, graph, x, y, w):
    edges = Edges(torch.as_tensor(src), torch.as_tensor(dst), graph.num_src, graph.num_dst)
    return message_passing(program, edges, ("dst",), {"x": x}, {"y": y}, {"weight": w}, {})[0]


def agree(run, graph, src, dst):
    inputs = fields(graph)
    got, want = run(graph, *inputs), expected(src, dst, graph, *inputs)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.cos().sum(), inputs), torch.autograd.grad(want.cos().sum(), inputs)):
        torch.testing.assert_close(a, b)


def test_prepared_graphs_compute_the_same():
    agree(apply, listed().prepare(), *PAIRS)
    agree(apply, listed().prepare().reverse(), *PAIRS.flip(0))
    ready = listed().prepare()
    call = program.lower(
        ready, src={"x": torch.ones(4, 3)}, dst={"y": torch.ones(5, 3)}, edge={"weight": torch.ones(8, 3)}
    )
    assert parse(call.program).relation_tensors == 10 and all(a is b for a, b in zip(call.tensors[-7:], ready.prepared))
    spoiled = [*call.tensors[:-4], call.tensors[-4][:7], *call.tensors[-3:]]
    with pytest.raises(tg.TigaError, match=r"back_col .* 8 edges has the shape \(7,\).*graph.prepare\(\)"):
        torch.ops.tiga.propagate(call.program, spoiled, call.ints, call.scalars)
    turned = [*call.tensors[:-7], call.tensors[-7].flatten(), *call.tensors[-6:]]
    with pytest.raises(tg.TigaError, match="items is torch.int32 with 1 dimensions"):
        torch.ops.tiga.propagate(call.program, turned, call.ints, call.scalars)


def test_functional_transforms_take_prepared_graphs():
    graph, bare = listed().prepare(), listed()
    x, y, w = (t.detach() for t in fields(graph))

    def forms(graph):
        one = lambda x: apply(graph, x, y, w)
        return (
            torch.func.jvp(one, (x,), (x.cos(),))[1],
            torch.vmap(one)(torch.stack([x, 2 * x])),
            torch.func.grad(lambda x: torch.func.grad(lambda x: one(x).sin().sum())(x).square().sum())(x),
        )

    for a, b in zip(forms(graph), forms(bare)):
        torch.testing.assert_close(a, b)


def watched(targets):
    def backend(module, inputs):
        names = [str(node.target).removesuffix(".default") for node in module.graph.nodes]
        targets.extend([name[5:] for name in names if name[:5] == "tiga."])
        return module.forward

    return backend


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_takes_the_lists_as_they_are(dynamic):
    torch._dynamo.reset()
    targets: list = []
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(apply, fullgraph=True, backend=counter, dynamic=dynamic)
    for count in (7, 8, 6):
        agree(compiled, Graph.from_edge_index(PAIRS[:, :count], 4, 5).prepare(), *PAIRS[:, :count])
    assert counter.frame_count <= (1 if dynamic else 2)
    agree(torch.compile(apply, fullgraph=True, backend=watched(targets)), listed().prepare(), *PAIRS)
    assert targets == ["propagate"]


@pytest.mark.parametrize("built", ["outside", "inside"])
def test_compiled_code_makes_what_is_missing_once(built, monkeypatch):
    """On a device with kernels; here the composite path runs, which reads none of it."""
    monkeypatch.setattr(preparation, "KERNEL_DEVICES", {"cpu"})
    torch._dynamo.reset()
    bare, targets = Graph("csr", (5, 4), listed().tensors), []

    def model(pairs, *inputs):
        return apply(Graph.from_edge_index(pairs, 4, 5) if built == "inside" else bare, *inputs)

    run = torch.compile(model, fullgraph=True, backend=watched(targets), dynamic=True)
    agree(lambda graph, *inputs: run(PAIRS, *inputs), listed(), *PAIRS)
    first = ["coo_to_csr"] if built == "inside" else []
    assert targets == [*first, "csr_transpose", "work_list", "work_list", "propagate"]
    targets.clear()
    with torch.no_grad():
        run(PAIRS, *fields(listed()))
    assert targets == [*first, "work_list", "propagate"]


def test_constructors_make_what_they_can_foresee(monkeypatch):
    monkeypatch.setattr(preparation, "KERNEL_DEVICES", {"cpu"})
    makers = (
        listed,
        lambda: Graph.from_csr([0, 1], [0]),
        lambda: Graph.radius(torch.rand(5, 2), 0.5),
        lambda: Graph.knn(torch.rand(5, 2), 2),
        lambda: Graph.cat([listed(), Graph.dense(2)]),
        lambda: listed() & listed(),
        lambda: Graph.triangular(3).to_csr(),
        lambda: listed().reverse(),
        lambda: Graph("csr", (5, 4), listed().tensors).to("cpu"),
    )
    for make in makers:
        assert len(make().prepared) == 7
        with torch.no_grad():
            assert len(make().prepared) == 2
        with torch.inference_mode():
            assert len(make().prepared) == 2
    assert Graph.triangular(3).prepared == ()


def test_lists_made_in_inference_mode_serve_training():
    rowptr, col = torch.tensor([0, 0, 3, 4]), torch.tensor([2, 0, 2, 1])
    with torch.inference_mode():
        graph = Graph.from_csr(rowptr, col, num_src=3).prepare()
    assert not any(t.is_inference() for t in graph.prepared)
    agree(apply, graph, [2, 0, 2, 1], [1, 1, 1, 2])


def test_a_graph_without_lists_is_said_once(monkeypatch):
    monkeypatch.setattr(preparation, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr("tiga.message_passing._said", set())
    with torch.no_grad():
        graph = listed()
    with pytest.warns(UserWarning, match=r"num_edges=8\) lacks lists .* graph.prepare\(\) once"):
        agree(apply, graph, *PAIRS)
    agree(apply, graph, *PAIRS)  # a second warning would be an error


class Given(torch.nn.Module):
    def forward(self, graph, x, y, w):
        return apply(graph, x, y, w)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [listed, mutual])
def test_is_an_argument_of_an_exported_module(make, strict):
    graph = make().prepare()
    inputs = [x.detach() for x in fields(graph)]
    held = io.BytesIO()
    torch.export.save(torch.export.export(Given(), (graph, *inputs), strict=strict), held)
    held.seek(0)
    torch.testing.assert_close(torch.export.load(held).module()(graph, *inputs), apply(graph, *inputs))
