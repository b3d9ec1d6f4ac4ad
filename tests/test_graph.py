"""Graphs against boolean masks written from their formulas, edge numbers against the order of those masks."""

import copy
import doctest
import importlib
import io
import itertools
import pickle

import pytest
import torch
import torch._dynamo.testing
import torch.utils._pytree as pytree

import tiga as tg
from tiga import relations

Graph = tg.Graph


def rows(text):
    """A mask as one reads it: `#` an edge, `.` none, rows separated by blanks."""
    return torch.tensor([[cell == "#" for cell in row] for row in text.split()])


def ints(*values):
    return torch.tensor(values)


def edges(mask):
    """(dst, src) of a mask, by destination, then source."""
    return mask.nonzero().unbind(1)


DRAWN = {
    "dense": (lambda: Graph.dense(2, 3), "### ###"),
    "triangular": (lambda: Graph.triangular(4), "#... ##.. ###. ####"),
    "triangular offset": (lambda: Graph.triangular(2, 4, offset=2), "###. ####"),
    "triangular negative offset": (lambda: Graph.triangular(3, offset=-1), "... #.. ##."),
    "window": (lambda: Graph.window(5, 1), "#.... ##... .##.. ..##. ...##"),
    "window both": (lambda: Graph.window(4, 1, 1), "##.. ###. .### ..##"),
    "window offset": (lambda: Graph.window(2, 1, num_src=5, offset=3), "..##. ...##"),
    "cu_seqlens": (lambda: Graph.cu_seqlens([0, 2, 2, 5]), "#.... ##... ..#.. ..##. ..###"),
    "cu_seqlens full": (lambda: Graph.cu_seqlens([0, 2, 3], causal=False), "##. ##. ..#"),
    "cu_seqlens sources": (lambda: Graph.cu_seqlens([0, 1, 3], False, [0, 2, 3]), "##. ..# ..#"),
    "bottom-right": (lambda: Graph.cu_seqlens([0, 2], src_boundaries=[0, 4], align="bottom-right"), "###. ####"),
    "bottom-right, more rows": (
        lambda: Graph.cu_seqlens([0, 3], src_boundaries=[0, 2], align="bottom-right"),
        ".. #. ##",
    ),
    "top-left": (lambda: Graph.cu_seqlens([0, 2], src_boundaries=[0, 4], align="top-left"), "#... ##.."),
    "rows after the last": (lambda: Graph.cu_seqlens([0, 2], num_dst=3, num_src=3), "#.. ##. ..."),
    "intervals": (lambda: Graph.intervals([1, 0, 3], [3, 4, 3], 4), ".##. #### ...."),
    "two intervals": (lambda: Graph.intervals([0, 0], [1, 0], 5, [2, 1], [4, 3]), "#.##. .##.."),
    "second interval first": (lambda: Graph.intervals([3, 2], [5, 2], 5, [0, 3], [1, 5]), "#..## ...##"),
    "stop before start": (lambda: Graph.intervals([3, 0], [1, 2], 4), ".... ##.."),
    "edge_index": (lambda: Graph.from_edge_index([[3, 0, 2], [1, 0, 1]], 4, 3), "#... ..## ...."),
    "csr": (lambda: Graph.from_csr([0, 0, 2], [2, 0], num_src=3), "... #.#"),
    "cat": (lambda: Graph.cat([Graph.triangular(2), Graph.dense(1, 2)]), "#... ##.. ..##"),
    "cat window blocks": (lambda: Graph.cat([Graph.window(2, 0), Graph.cu_seqlens([0, 1, 2])]), "#... .#.. ..#. ...#"),
    "cat intervals": (lambda: Graph.cat([Graph.intervals([1], [2], 2), Graph.triangular(2)]), ".#.. ..#. ..##"),
    "cat two intervals": (
        lambda: Graph.cat([Graph.dense(1), Graph.intervals([0], [1], 3, [2], [3])]),
        "#... .#.#",
    ),
    "cat csr": (lambda: Graph.cat([Graph.from_csr([0, 1], [1], 2), Graph.dense(1)]), ".#. ..#"),
    "cat reversed": (
        lambda: Graph.cat([Graph.triangular(2).reverse(), Graph.dense(1, 2).reverse()]),
        "##. .#. ..# ..#",
    ),
    "cat mixed": (lambda: Graph.cat([Graph.triangular(2).reverse(), Graph.dense(1, 2)]), "##.. .#.. ..##"),
    "and": (lambda: Graph.triangular(3) & Graph.window(3, 1, 1), "#.. ##. .##"),
    "or": (lambda: Graph.window(4, 0) | Graph.intervals([0] * 4, [1] * 4, 4), "#... ##.. #.#. #..#"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_is_what_is_drawn(name):
    build, text = DRAWN[name]
    graph, mask = build(), rows(text)
    assert torch.equal(graph.to_mask(), mask)
    assert (graph.num_dst, graph.num_src, graph.num_edges) == (*mask.shape, mask.sum())
    assert torch.equal(graph.to_csr().to_mask(), mask) and graph.to_csr().kind == "csr"
    assert torch.equal(graph.reverse().to_mask(), mask.T)
    assert torch.equal(graph.reverse().to_csr().to_mask(), mask.T)
    assert torch.equal(graph.reverse().reverse().to_mask(), mask)
    assert (graph.reverse().num_dst, graph.reverse().num_edges) == (mask.shape[1], mask.sum())


def numbered(graph):
    """{number: (dst, src)} of a csr graph."""
    rowptr, col, *number = graph.tensors
    dst = torch.repeat_interleave(torch.arange(graph.num_dst), rowptr.diff())
    number = number[0] if number else torch.arange(len(col))
    return {int(e): (int(i), int(j)) for e, i, j in zip(number, dst, col)}


@pytest.mark.parametrize(
    "name", [n for n in DRAWN if n not in ("edge_index", "csr", "cat csr", "cat reversed", "cat mixed")]
)
def test_implicit_edges_are_numbered_by_destination_then_source(name):
    build, text = DRAWN[name]
    want = {e: (int(i), int(j)) for e, (i, j) in enumerate(zip(*edges(rows(text))))}
    graph = build()
    assert numbered(graph.to_csr()) == want
    turned = {e: (j, i) for e, (i, j) in want.items()}
    assert numbered(graph.reverse().to_csr()) == numbered(graph.to_csr().reverse()) == turned


def test_listed_edges_keep_the_numbers_they_were_given():
    src, dst = [3, 0, 2, 0, 3, 1, 0], [1, 4, 1, 0, 1, 4, 0]  # 3 -> 1 and 0 -> 0 twice
    graph = Graph.from_edge_index([src, dst], num_src=4, num_dst=5)
    want = dict(enumerate(zip(dst, src)))
    assert numbered(graph) == want
    assert numbered(graph.reverse()) == {e: (j, i) for e, (i, j) in want.items()}
    assert numbered(graph.reverse().reverse()) == want
    both = Graph.cat([Graph.dense(1, 2), graph, Graph.triangular(2).reverse()])
    last = {9: (6, 6), 10: (6, 7), 11: (7, 7)}
    shifted = {e + 2: (i + 1, j + 2) for e, (i, j) in want.items()}
    assert numbered(both) == {0: (0, 0), 1: (0, 1)} | shifted | last
    assert numbered(Graph.from_csr([0, 2, 2, 3], [1, 0, 1])) == {0: (0, 1), 1: (0, 0), 2: (2, 1)}


SIZES = [(0, 0), (0, 3), (3, 0), (1, 1), (2, 5), (5, 2), (4, 4)]


@pytest.mark.parametrize("n, m", SIZES)
def test_bands_follow_their_formula_at_every_offset(n, m):
    i, j = torch.arange(n)[:, None], torch.arange(m)[None]
    for offset in range(-6, 7):
        graphs = {Graph.triangular(n, m, offset): j <= i + offset}
        for left, right in itertools.product((0, 1, 3), repeat=2):
            mask = (j >= i + offset - left) & (j <= i + offset + right)
            graphs[Graph.window(n, left, right, m, offset)] = mask
        for graph, mask in graphs.items():
            assert torch.equal(graph.to_mask(), mask) and graph.num_edges == mask.sum(), graph
            offsets = relations.edge_offsets(graph.kind, graph.ints, graph.tensors, "cpu")
            assert offsets.tolist() == [0, *mask.sum(1).cumsum(0).tolist()], graph
            assert Graph.cat([graph, graph]).num_edges == 2 * mask.sum()


def test_numbers_beyond_32_bits():
    graph = Graph.triangular(70000)
    assert graph.num_edges == 2_450_035_000
    assert relations.edge_offsets("triangular", graph.ints, (), "cpu")[-1] == 2_450_035_000
    assert Graph.cu_seqlens(ints(0, 70000).int()).num_edges == 2_450_035_000
    assert Graph.dense(70000).num_edges == 4_900_000_000
    assert Graph.window(70000, 1).num_edges == 139_999


@pytest.mark.parametrize("kind, count", [("blocks", 4), ("intervals", 4), ("intervals", 2)])
def test_row_intervals_stay_inside_whatever_the_tensors_hold(kind, count):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = (4, 4, 3, 3) if kind == "blocks" else (6,) * count
        tensors = tuple(torch.randint(-9, 20, (size,), generator=generator) for size in sizes)
        found = relations.row_intervals(kind, (6, 5, -1), tensors, 0, 6, "cpu")
        end = torch.zeros(6, dtype=torch.int64)
        for start, stop in found:
            assert (end <= start).all() and (start <= stop).all() and (stop <= 5).all()
            end = stop


SETS = {
    "dense": Graph.dense(6),
    "triangular": Graph.triangular(6),
    "anticausal": Graph.triangular(6).reverse(),
    "window": Graph.window(6, 1, 1),
    "blocks": Graph.cu_seqlens([0, 2, 6]),
    "blocks reversed": Graph.cu_seqlens([0, 2, 6]).reverse(),
    "sinks": Graph.intervals([0] * 6, [1] * 6, 6, [1, 1, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]),
    "holes": Graph.intervals([0, 1, 2, 0, 0, 5], [2, 2, 3, 0, 6, 6], 6, [4, 3, 5, 1, 6, 0], [5, 5, 6, 2, 6, 2]),
    "holes reversed": Graph.intervals([0, 1, 2, 0, 0, 5], [2, 2, 3, 0, 6, 6], 6).reverse(),
    "csr": Graph.from_edge_index([[0, 5, 5, 2, 2], [1, 0, 0, 4, 3]], 6, 6),
    "none": Graph.from_edge_index([[], []], 6, 6),
}


@pytest.mark.parametrize("a, b", list(itertools.product(SETS, repeat=2)))
def test_and_or_are_sets_of_pairs(a, b):
    for symbol in ("__and__", "__or__"):
        graph = getattr(SETS[a], symbol)(SETS[b])
        mask = getattr(SETS[a].to_mask(), symbol)(SETS[b].to_mask())
        assert torch.equal(graph.to_mask(), mask)
        assert graph.num_edges == mask.sum()
        want = {e: (int(i), int(j)) for e, (i, j) in enumerate(zip(*edges(mask)))}
        assert numbered(graph.to_csr()) == want
        runs = (mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).sum(1).max()
        bounded = {"csr", "none", "holes reversed"}.isdisjoint((a, b))
        assert graph.kind == ("intervals" if bounded and runs <= 2 else "csr")


def test_and_with_a_list_does_not_list_the_other():
    many = 1_000_000
    few = Graph.from_edge_index([[0, many - 1], [many - 1, 0]], many, many)
    assert numbered(few & Graph.triangular(many)) == {0: (many - 1, 0)}


X = torch.arange(18.0).reshape(6, 3)

SAVED = {
    "dense": lambda: Graph.dense(3, 4, device="cpu"),
    "reversed": lambda: Graph.triangular(5).reverse(),
    "window": lambda: Graph.window(6, 2, 1),
    "blocks": lambda: Graph.cu_seqlens(ints(0, 2, 5).int()),
    "intervals": lambda: Graph.intervals([0, 1], [2, 1], 3),
    "csr": lambda: Graph.from_edge_index([[3, 0, 2, 0], [1, 4, 1, 0]], num_src=4, num_dst=5),
    "radius": lambda: Graph.radius(X, 6.0),
    "cat": lambda: Graph.cat([Graph.radius(X, 6.0), Graph.radius(X[:3], 6.0)]),
}


@pytest.mark.parametrize("name", SAVED)
def test_survives_every_way_of_taking_it_apart(name):
    graph = SAVED[name]()
    leaves, spec = pytree.tree_flatten(graph)
    saved = io.BytesIO()
    torch.save({"graph": graph}, saved)
    saved.seek(0)
    copies = (
        pickle.loads(pickle.dumps(graph)),
        copy.deepcopy(graph),
        pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec))),
        torch.load(saved, weights_only=True)["graph"],
        graph.to("cpu"),
    )
    for other in copies:
        assert other == graph and hash(other) == hash(graph)
        assert torch.equal(other.to_mask(), graph.to_mask())
    assert {graph: 1}[SAVED[name]()] == 1
    assert all(graph != SAVED[other]() for other in SAVED if other != name)


def test_equal_means_equal_content():
    assert Graph.cu_seqlens([0, 2, 5]) == Graph.cu_seqlens([0, 2, 5]) != Graph.cu_seqlens([0, 3, 5])
    assert Graph.triangular(3) != Graph.triangular(3).reverse()
    assert Graph.from_edge_index([[0, 1], [1, 0]]) != Graph.from_edge_index([[1, 0], [0, 1]])
    assert Graph.dense(2) != "dense"


def test_is_immutable():
    graph = Graph.dense(2)
    with pytest.raises(AttributeError, match="immutable"):
        graph.ints = (3, 3)
    with pytest.raises(AttributeError, match="immutable"):
        del graph.kind
    with pytest.raises(AttributeError):
        graph.cache = 1


def test_implicit_kinds_store_no_edges():
    assert Graph.dense(10**6).tensors == Graph.triangular(10**6).tensors == Graph.window(10**6, 9).tensors == ()
    packed = Graph.cat([Graph.triangular(10**6), Graph.cu_seqlens([0, 5, 10**6]), Graph.window(10**6, 3)])
    assert packed.kind == "blocks" and [len(t) for t in packed.tensors] == [5, 5, 4, 4]
    assert packed.num_edges == 500000500000 + 15 + 999995 * 999996 // 2 + 4 * 10**6 - 6


def test_keeps_index_dtypes_and_tensors():
    boundaries = ints(0, 2, 5).int()
    assert Graph.cu_seqlens(boundaries).tensors[0] is boundaries
    assert Graph.from_edge_index(ints(0, 1).int().repeat(2, 1)).tensors[1].dtype == torch.int32
    assert Graph.intervals(ints(0).to(torch.uint8), ints(1), 2).tensors[0].dtype == torch.int64
    rowptr, col = ints(0, 1), ints(0).int()
    assert Graph.from_csr(rowptr, col).tensors[1] is col


def test_device_is_that_of_the_tensors_or_the_one_asked_for():
    assert Graph.dense(2).device is None and Graph.dense(2, device="meta").device == torch.device("meta")
    assert Graph.cu_seqlens([0, 2]).device == torch.device("cpu")
    moved = Graph.cat([Graph.triangular(2), Graph.dense(1)]).to("meta")
    assert moved.device == torch.device("meta") and moved.num_dst == 3
    unread = Graph.cu_seqlens(torch.zeros(3, dtype=torch.int64, device="meta"), num_dst=9)
    assert Graph.cat([unread, unread, Graph.dense(2)]).ints == (20, 20, -1)
    with pytest.raises(tg.TigaError, match="cpu and meta"):
        Graph.cat([Graph.dense(2, device="meta"), Graph.cu_seqlens([0, 2])])


def test_positions_follow_the_graph():
    graph = Graph.radius(X, 6.0)
    assert graph.positions[0] is graph.positions[1] is X
    assert Graph.cat([graph, graph]).positions[1].shape == (12, 3)
    assert Graph.cat([graph, Graph.dense(2)]).positions is None
    assert (graph & Graph.triangular(6)).positions[0] is X
    two = Graph("csr", graph.ints, graph.tensors, (X, -X))
    assert two.reverse().positions[0] is two.positions[1]


def test_prints_itself():
    assert repr(Graph.triangular(5)) == "Graph.triangular(5)"
    assert repr(Graph.triangular(2, 4, offset=2).reverse()) == "Graph.triangular(2, 4, offset=2).reverse()"
    assert repr(Graph.window(6, 2, num_src=7)) == "Graph.window(6, 2, 0, num_src=7)"
    assert repr(Graph.cu_seqlens([0, 2, 5])) == "Graph.blocks(num_dst=5, num_src=5, blocks=2)"
    assert str(Graph.triangular(3)) == "Graph.triangular(3)\n█··\n██·\n███"
    coarse = str(Graph.triangular(32)).splitlines()
    assert coarse[1] == "▒" + 15 * "·" and coarse[16] == 15 * "█" + "▒" and "2 x 2 pairs" in coarse[17]
    assert str(Graph.dense(10**6)) == "Graph.dense(1000000)"
    assert str(Graph.dense(0)) == "Graph.dense(0)"


def test_explains_itself():
    lines = dict(line.split(maxsplit=1) for line in Graph.triangular(5).explain().splitlines())
    assert lines["edges"] == "N(N+1)/2 = 5*6/2 = 15" and lines["storage"] == "0 bytes"
    assert "32 bytes" in Graph.intervals([0, 1], [2, 1], 3).explain()
    assert "positions of 72 bytes" in Graph.radius(X, 6.0).explain()
    assert "csr" in (SETS["csr"] | SETS["window"]).explain()
    assert "5 destinations, 4 sources" in Graph.dense(4, 5).reverse().explain()


nan = float("nan")

REFUSED = [
    (lambda: Graph.dense(-1), "num_dst is -1"),
    (lambda: Graph.dense(True), "num_dst.*bool"),
    (lambda: Graph.dense(2.0), "num_dst.*float"),
    (lambda: Graph.dense(2, "3"), "num_src.*str"),
    (lambda: Graph.triangular(ints(3)), "num_dst.*Tensor"),
    (lambda: Graph.triangular(2, 6), "2 destinations and 6 sources.*offset=num_src - num_dst"),
    (lambda: Graph.triangular(2, offset=0.5), "offset.*float"),
    (lambda: Graph.window(3, -1), "left is -1"),
    (lambda: Graph.cu_seqlens(ints(0, 12, 8, 16)), "boundaries decreases from 12 to 8"),
    (lambda: Graph.cu_seqlens([1, 4]), "boundaries starts at 1"),
    (lambda: Graph.cu_seqlens([0.0, 4.0]), "boundaries.*float32"),
    (lambda: Graph.cu_seqlens(ints(0, 1).bool()), "boundaries.*bool"),
    (lambda: Graph.cu_seqlens([[0, 1]]), r"boundaries.*one dimension.*\(1, 2\)"),
    (lambda: Graph.cu_seqlens([]), r"boundaries is empty.*\[0\]"),
    (lambda: Graph.cu_seqlens(3), "boundaries.*int"),
    (lambda: Graph.cu_seqlens([0, 5], num_dst=4), "boundaries ends at 5.*num_dst is 4"),
    (lambda: Graph.cu_seqlens([0, 2, 4], src_boundaries=[0, 2, 5]), "segment 1 has 2 destinations.*3 sources.*align"),
    (lambda: Graph.cu_seqlens([0, 2], False, [0, 1, 2]), "1 segments.*2"),
    (lambda: Graph.cu_seqlens([0, 2], False, [0, 3, 1]), "src_boundaries decreases from 3 to 1"),
    (lambda: Graph.cu_seqlens([0, 2], align="left"), "'left'.*bottom-right"),
    (lambda: Graph.cu_seqlens([0, 2], False, align="top-left"), "causal=False"),
    (lambda: Graph.intervals([0, 0], [2, 9], 5), "stop holds 9.*num_src = 5"),
    (lambda: Graph.intervals([0, -3], [2, 3], 5), "start holds -3"),
    (lambda: Graph.intervals([0, 0], [2, 3], 5, [1, 4]), "start2 without stop2"),
    (lambda: Graph.intervals([0], [2], 5, stop2=[4]), "stop2 without start2"),
    (lambda: Graph.intervals([0, 0], [2, 3], 5, [2, 2], [3, 4]), r"row 1 overlap: \[0, 3\) and \[2, 4\)"),
    (lambda: Graph.intervals([0, 0], [2, 3, 1], 5), "stop has 3 rows.*start has 2"),
    (lambda: Graph.intervals([0.5], [2], 5), "start.*float32"),
    (lambda: Graph.from_edge_index([[0, 5], [1, 2]], 5), "edge_index names source 5.*num_src=6"),
    (lambda: Graph.from_edge_index([[0, 5], [1, 2]], 5, 5), "edge_index names source 5"),
    (lambda: Graph.from_edge_index([[0, 1], [1, 7]], num_dst=7), "edge_index names destination 7"),
    (lambda: Graph.from_edge_index([[0, -1], [1, 2]], 5), "edge_index names source -1"),
    (lambda: Graph.from_edge_index([[0, 1], [1, 2], [3, 4]]), r"edge_index.*\(3, 2\).*edge_index\.T"),
    (lambda: Graph.from_edge_index([0, 1]), r"edge_index.*\(2, num_edges\)"),
    (lambda: Graph.from_edge_index(torch.rand(2, 3)), "edge_index.*float32"),
    (lambda: Graph.from_csr([0, 1, 2], [0, 5], 5), "col names source 5"),
    (lambda: Graph.from_csr([0, 1, 2], [0, -2]), "col names source -2"),
    (lambda: Graph.from_csr([0, 3, 2], [0, 5]), "rowptr decreases after row 1"),
    (lambda: Graph.from_csr([0, 1], [0, 5]), "rowptr runs from 0 to 1.*2 entries"),
    (lambda: Graph.from_csr([], []), "rowptr is empty"),
    (lambda: Graph.from_csr([0, 1], [2], num_dst=5), "num_dst is 5"),
    (lambda: Graph.from_csr(ints(0, 1), ints(2).to("meta"), 5), "rowptr is on cpu, but col is on meta"),
    (lambda: Graph.cat([Graph.dense(2), 3]), "Graph.cat.*int"),
    (lambda: Graph.dense(2) & Graph.dense(2, 3), "2 destinations and 3 sources"),
    (lambda: Graph.dense(2) | 3, "unsupported operand"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_refuses_with_name_number_and_remedy(call, words):
    with pytest.raises((tg.TigaError, TypeError), match=words):
        call()


D = torch.export.Dim.DYNAMIC


def csr(q, t):
    return Graph.from_csr(t, torch.arange(q.shape[0]), num_src=q.shape[0])


def packed(q, t):
    return Graph.cu_seqlens(t, num_dst=q.shape[0])


def prefix(q):
    return Graph.intervals(torch.zeros(q.shape[0], dtype=torch.int64), torch.arange(q.shape[0]) + 1, q.shape[0])


def listed_edges(q, t):
    return Graph.from_edge_index(torch.stack([t, t.flip(0)]), num_src=q.shape[0] + 1, num_dst=q.shape[0] + 1)


# q has as many rows as the last boundary in t says
INSIDE = {
    "dense": lambda q, t: Graph.dense(q.shape[0], q.shape[0] + 1),
    "triangular": lambda q, t: Graph.triangular(q.shape[0], device=q.device),
    "offset": lambda q, t: Graph.triangular(q.shape[0], q.shape[0] + 2, offset=2),
    "window": lambda q, t: Graph.window(q.shape[0], 2, 1),
    "cu_seqlens": packed,
    "aligned": lambda q, t: Graph.cu_seqlens(t, True, 2 * t, "bottom-right", q.shape[0], 2 * q.shape[0]),
    "from ints": lambda q, t: Graph.cu_seqlens([0, 2, 5]),
    "intervals": lambda q, t: prefix(q),
    "from_edge_index": listed_edges,
    "from_csr": csr,
    "cat": lambda q, t: Graph.cat([Graph.triangular(q.shape[0]), Graph.dense(2, 3)]),
    "cat blocks": lambda q, t: Graph.cat([packed(q, t), Graph.dense(2, 3), packed(q, t)]),
    "cat intervals": lambda q, t: Graph.cat([prefix(q), Graph.dense(2, 3)]),
    "cat csr": lambda q, t: Graph.cat([csr(q, t), Graph.dense(2, 3)]),
    "reverse": lambda q, t: Graph.triangular(q.shape[0]).reverse(),
    "reverse csr": lambda q, t: listed_edges(q, t).reverse(),
    "to_csr": lambda q, t: Graph.triangular(q.shape[0]).to_csr(),
    "and": lambda q, t: Graph.triangular(q.shape[0]) & Graph.window(q.shape[0], 1),
    "or": lambda q, t: Graph.triangular(q.shape[0]) | Graph.window(q.shape[0], 1),
}
ARGUMENTS = [(torch.ones(n), ints(*t)) for n, t in ((5, (0, 2, 5)), (7, (0, 3, 7)), (9, (0, 8, 9)))]


class Inside(torch.nn.Module):
    def __init__(self, build):
        super().__init__()
        self.build = build

    def forward(self, q, t):
        graph = self.build(q, t)
        return q.sum() + graph.num_dst * graph.num_src, graph.to_mask()


def agree(got, want):
    assert got[0] == want[0] and torch.equal(got[1], want[1])


@pytest.mark.parametrize("name", INSIDE)
def test_is_built_inside_a_compiled_function(name):
    module = Inside(INSIDE[name])
    whole = name in ("triangular", "cu_seqlens")
    backend = "aot_eager" if whole else "eager"
    for dynamic, frames in ((None, 2), (True, 1)) if whole else ((True, 1),):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=dynamic)
        for arguments in ARGUMENTS:
            agree(compiled(*arguments), module(*arguments))
        assert counter.frame_count <= frames


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["triangular", "cu_seqlens", "intervals", "cat csr"])
def test_is_exported_with_sizes_that_vary(name, strict):
    module = Inside(INSIDE[name])
    program = torch.export.export(module, ARGUMENTS[0], dynamic_shapes={"q": {0: D}, "t": {0: D}}, strict=strict)
    for arguments in (*ARGUMENTS, (torch.ones(6), ints(0, 1, 1, 6))):
        agree(program.module()(*arguments), module(*arguments))


MAKERS = {
    "triangular": Graph.triangular,
    "reversed": lambda n: Graph.triangular(n).reverse(),
    "blocks": lambda n: Graph.cu_seqlens([0, 2, n]),
    "csr": lambda n: Graph.from_edge_index([[0, n - 1], [1, 0]]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_is_passed_into_a_compiled_function(name):
    def apply(graph, x):
        return x.sum() + graph.num_edges, graph.to_mask()

    for dynamic, frames in ((None, 2), (True, 1)):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
        compiled = torch.compile(apply, fullgraph=True, backend=counter, dynamic=dynamic)
        for n in (5, 7, 17):
            agree(compiled(MAKERS[name](n), torch.ones(2)), apply(MAKERS[name](n), torch.ones(2)))
        assert counter.frame_count <= frames


class Given(torch.nn.Module):
    def forward(self, graph, x):
        return x.sum() + graph.num_dst, graph.to_mask()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_is_an_argument_of_an_exported_module(name, strict):
    graph, x, saved = MAKERS[name](5), torch.ones(2), io.BytesIO()
    torch.export.save(torch.export.export(Given(), (graph, x), strict=strict), saved)
    saved.seek(0)
    agree(torch.export.load(saved).module()(graph, x), Given()(graph, x))


UNREAD = [
    (lambda t: Graph.cu_seqlens(t), "num_dst is not given"),
    (lambda t: Graph.cu_seqlens(t, src_boundaries=t + 0, num_dst=9, num_src=9), "align"),
    (lambda t: Graph.from_edge_index(t.repeat(2, 1), num_dst=9), "num_src is not given"),
    (lambda t: Graph.from_csr(t, t), "num_src is not given"),
]


@pytest.mark.parametrize("build, words", UNREAD)
def test_compiling_asks_for_what_it_would_have_to_read(build, words):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=words):
        torch.compile(lambda t: t + build(t).num_dst, fullgraph=True, backend="eager")(ints(0, 9))
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(tg.TigaError, match=words):
        build(mode.from_tensor(torch.zeros(2, dtype=torch.int64)))


def test_rows_that_do_not_exist_are_no_edges_where_nothing_was_read():
    def build(pairs):
        graph = Graph.from_edge_index(pairs, num_src=3, num_dst=2)
        both = Graph.cat([graph, Graph.dense(1, 3)])
        return graph.to_mask(), graph.reverse().to_mask(), both.to_mask()

    pairs = ints(0, 7, -1, 2, 2, 1, 0, 1, 0, 5, 1, -4).reshape(2, 6)
    found = torch.compile(build, fullgraph=True, backend="eager")(pairs)
    want = rows("#.. ..#")
    assert torch.equal(found[0], want) and torch.equal(found[1], want.T)
    assert torch.equal(found[2], torch.block_diag(want, torch.ones(1, 3, dtype=torch.bool)))


def test_doctests():
    failed, tried = doctest.testmod(importlib.import_module("tiga.graph"))
    assert tried and not failed
