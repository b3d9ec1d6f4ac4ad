"""What graphs and programs look like: cells, axes, SVG, HTML and graphviz text, held against explicit pairs."""

import re
import sys
import xml.etree.ElementTree as tree
from html.parser import HTMLParser

import matplotlib
import pytest
import torch

import tiga as tg
from tiga import pictures
from tiga.density import density

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

POINTS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [4.0, 4.0]])
GRAPHS = {
    "dense": tg.Graph.dense(5, 9),
    "triangular": tg.Graph.triangular(7, 11, offset=3),
    "window": tg.Graph.window(12, 3, 1),
    "blocks": tg.Graph.cu_seqlens([0, 4, 4, 11]),
    "intervals": tg.Graph.intervals([0, 2, 5], [1, 2, 9], 10, [3, 4, 9], [6, 4, 10]),
    "reversed": tg.Graph.triangular(7, 11, offset=3).reverse(),
    "reversed blocks": tg.Graph.cu_seqlens([0, 4, 11], True, [0, 3, 5], "top-left").reverse(),
    "listed": tg.Graph.from_edge_index([[0, 3, 3, 8], [1, 6, 6, 0]], 9, 7),  # one pair twice
    "no edges": tg.Graph.intervals([1, 1], [1, 0], 3),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cells", [1, 3, 5, 1000])
def test_density_counts_every_pair_once(name, cells, monkeypatch):
    monkeypatch.setattr("tiga.density.OVERLAPS", 4)  # several chunks of rows
    graph = GRAPHS[name]
    n, m = graph.num_dst, graph.num_src
    rows, columns = min(cells, n), min(cells, m)
    mask, counts, pairs = graph.to_mask().tolist(), torch.zeros(rows, columns), torch.zeros(rows, columns)
    for i in range(n):
        for j in range(m):
            at = i * rows // n, j * columns // m
            pairs[at] += 1
            counts[at] += mask[i][j]
    torch.testing.assert_close(density(graph, rows, columns), (counts / pairs).double())


def test_large_graphs_are_drawn_without_a_mask():
    share = density(tg.Graph.triangular(10**6), 4, 4)
    assert share.triu(1).sum() == 0 and torch.equal(share.tril(-1), torch.ones(4, 4, dtype=share.dtype).tril(-1))
    assert torch.allclose(share.diagonal(), torch.tensor(0.5, dtype=share.dtype), atol=1e-5)


@pytest.fixture
def closed():
    yield
    pyplot.close("all")


def test_a_small_matrix_is_plotted_pair_by_pair(closed):
    graph = GRAPHS["triangular"]
    ax = graph.plot()
    (image,) = ax.images
    assert torch.equal(torch.tensor(image.get_array()), graph.to_mask().double())
    assert tuple(image.get_extent()) == (-0.5, 10.5, 6.5, -0.5)  # row 0 on top
    assert ax.get_title() == f"Graph.triangular(7, 11, offset=3)\n{graph.num_edges} edges"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("source j", "destination i")
    assert len(ax.figure.axes) == 1


def test_a_large_matrix_is_plotted_as_shares(closed):
    graph = tg.Graph.window(1280, 9)
    ax = graph.plot(ax=pyplot.figure().add_subplot())
    (image,) = ax.images
    assert torch.equal(torch.tensor(image.get_array()), density(graph, 128, 128))
    assert "share" in ax.figure.axes[1].get_ylabel() and image.get_clim()[1] == pytest.approx(0.55)


def test_points_are_plotted_where_there_are_positions(closed):
    graph = tg.Graph.radius(POINTS.clone().requires_grad_(), 1.0)
    ax = graph.plot()
    lines, nodes = ax.collections
    drawn = {tuple(map(tuple, line.tolist())) for line in lines.get_segments()}
    assert drawn == {
        (tuple(POINTS[j].tolist()), tuple(POINTS[i].tolist())) for i, j in graph.to_mask().nonzero().tolist()
    }
    assert torch.equal(torch.tensor(nodes.get_offsets()), POINTS.double())
    assert graph.plot("matrix").images and tg.Graph.dense(4).plot(positions=POINTS).collections


def test_edges_from_images_leave_the_box(closed):
    positions = torch.tensor([[0.1, 0.5], [0.9, 0.5]])
    made = tg.Graph.radius(positions, 0.3, cell=torch.eye(2))
    for graph in (made, made.reverse().reverse()):
        lines, _ = graph.plot().collections
        drawn = sorted(tuple(round(x, 4) for point in line.tolist() for x in point) for line in lines.get_segments())
        assert drawn == [(-0.1, 0.5, 0.1, 0.5), (1.1, 0.5, 0.9, 0.5)]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: tg.Graph.dense(3).plot("circle"), "'circle'.*matrix.*points"),
        (lambda: tg.Graph.dense(0).plot(), r"Graph.dense\(0\) has no pair"),
        (lambda: tg.Graph.dense(3).plot("points"), 'form="points" needs a position.*positions='),
        (lambda: tg.Graph.dense(3).plot(positions=POINTS), "positions has 4 rows.*3 destinations"),
        (lambda: tg.Graph.dense(3).plot(positions=[1, 2, 3]), r"\(num_nodes, coordinates\)"),
    ],
)
def test_refuses_to_plot(call, words):
    with pytest.raises(tg.TigaError, match=words):
        call()


def test_says_that_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(tg.TigaError, match=r"matplotlib is not installed.*pip install matplotlib.*print\(graph\)"):
        tg.Graph.dense(3).plot()


@pytest.mark.parametrize("name", GRAPHS)
def test_svg_has_one_box_an_edge(name):
    graph = GRAPHS[name]
    root = tree.fromstring(pictures.svg(graph))
    space = "{http://www.w3.org/2000/svg}"
    side = 240 // max(graph.num_dst, graph.num_src)
    found = {
        (int(box.get("y")) // side, int(box.get("x")) // side) for box in root.iter(space + "rect") if box.get("x")
    }
    assert found == set(map(tuple, graph.to_mask().nonzero().tolist()))


def test_svg_of_a_large_graph_has_one_box_a_run():
    root = tree.fromstring(pictures.svg(tg.Graph.cu_seqlens([0, 480, 960], causal=False)))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if box.get("x")]
    assert [(box.get("x"), box.get("width")) for box in boxes] == [("0", "120")] * 24 + [("120", "120")] * 24


class Tags(HTMLParser):
    """Fails unless every tag is closed in turn; keeps the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.seen = [], [], set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, words):
        self.words.append(words)


def text_of(x):
    return "".join(Tags(x._repr_html_()).words)


def test_graphs_in_a_notebook():
    shown = text_of(tg.Graph.triangular(3))
    assert "Graph.triangular(3)" in shown and "j <= i + offset" in shown and "N(N+1)/2 = 3*4/2 = 6" in shown
    assert "svg" in Tags(tg.Graph.triangular(3)._repr_html_()).seen
    assert "a cell is up to 3 x 3 pairs" in text_of(tg.Graph.dense(100))
    assert text_of(tg.Graph.dense(0)) == "Graph.dense(0)"


class Normalised(tg.MessagePassing):
    largest, total = tg.max(), tg.sum()

    def edge(self, src, dst, edge, half):
        weight = (half * 0.5 * (src.x - self.largest(src.x))).exp()
        return {"weight": weight / self.total(weight), "count": self.total(edge.w)}


def called():
    program, graph = Normalised(), tg.Graph.triangular(3)
    program(graph=graph, src={"x": torch.randn(3)}, edge={"w": torch.ones(6)}, half=0.5)
    return program


def test_programs_in_a_notebook():
    assert text_of(Normalised()) == "Normalised()"
    program = called()
    shown = text_of(program)
    for text in program.last_variant.programs:
        assert text in shown
    assert "backend" in shown and "3 programs, each a pass over the edges" in shown
    explained = Tags(program.explain()._repr_html_())
    assert "table" in explained.seen and "passes" in explained.words and "cpu" in explained.words
    assert program.last_variant.programs[1] in "".join(explained.words).replace("\n    ", "\n")
    assert text_of(program.ir()) == program.ir()


def test_program_as_graphviz_text():
    program = called()
    text = program.plot()
    assert text.startswith('digraph "Normalised" {') and text.count("{") == text.count("}") == 4
    nodes = dict(re.findall(r'^ +(p\w+) \[label="(.*?)", shape', text, re.MULTILINE))
    arrows = re.findall(r"^ +(p\w+) -> (p\w+);$", text, re.MULTILINE)
    assert {end for arrow in arrows for end in arrow} == set(nodes)
    labels = list(nodes.values())
    assert labels.count("reduce dst max") == 1 and labels.count("reduce dst sum") == 2
    assert "mul 0.5" in labels and r"src.x\nf32 []" in labels and labels.count("half") == 2
    into = {key: [nodes[a] for a, b in arrows if b == key] for key in nodes}
    assert sorted(into[next(k for k, label in nodes.items() if label == "sub")]) == [
        r"dst.pass1\nf32 []",
        r"src.x\nf32 []",
    ]
    assert repr(text) == text


def test_nothing_to_plot_before_a_call():
    with pytest.raises(tg.TigaError, match="Call the module once"):
        Normalised().plot()
