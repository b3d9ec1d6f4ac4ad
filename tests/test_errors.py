"""Bad input: refused before work starts, with what was asked, the numbers, and what to write instead."""

import textwrap

import pytest
import torch
from cases import Attention, Sum
from expecttest import assert_expected_inline
from torch.autograd import grad

import tiga as tg

Graph = tg.Graph


def message(call, kinds=(tg.TigaError, TypeError)):
    with pytest.raises(kinds) as caught:
        call()
    assert torch.ones(2).sum() == 2
    return str(caught.value)


def golden(call):
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in message(call).split("\n"))


def attend(graph, src=None, dst=None, **more):
    x = torch.ones(5, 2, 4)
    return Attention()(
        graph=graph,
        src={"key": x, "value": x} if src is None else src,
        dst={"query": x} if dst is None else dst,
        **{"scale": 1.0, **more},
    )


class Biased(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * edge.bias)


def test_a_graph_of_another_size():
    assert_expected_inline(
        golden(lambda: attend(Graph.triangular(7))),
        """\
Attention on Graph triangular 7 x 7: src field 'key' has 5 rows, but the graph has 7 sources. Build
    the graph for 5 sources, or give a field of 7 rows.""",
    )
    assert_expected_inline(
        golden(lambda: attend(Graph.dense(4, 5))),
        """\
Attention on Graph dense 4 x 5: dst field 'query' has 5 rows, but the graph has 4 destinations.
    Build the graph for 5 destinations, or give a field of 4 rows.""",
    )
    assert_expected_inline(
        golden(lambda: Biased()(graph=Graph.triangular(5), src={"x": torch.ones(5)}, edge={"bias": torch.ones(12)})),
        """\
Biased on Graph triangular 5 x 5: edge field 'bias' has 12 rows, but the graph has 15 edges.
  Edge fields are numbered by destination, then source; for a graph made by from_edge_index, in the
    order you gave the edges.""",
    )
    assert_expected_inline(
        golden(
            lambda: Biased()(graph=Graph.cu_seqlens([0, 2, 5]), src={"x": torch.ones(5)}, edge={"bias": torch.ones(5)})
        ),
        """\
Biased on Graph blocks 5 x 5: edge field 'bias' has 5 rows, but the graph has 9 edges.
  Edge fields are numbered by destination, then source; for a graph made by from_edge_index, in the
    order you gave the edges.""",
    )


def test_fields_that_are_no_fields():
    x = torch.ones(5, 2, 4)
    assert_expected_inline(
        golden(lambda: attend(Graph.dense(5), src={"key": x, "value": 2.0})),
        """\
Attention: src field 'value' is float, not a tensor. A number that all edges share is a keyword
    argument.""",
    )
    assert_expected_inline(
        golden(lambda: attend(Graph.dense(5), src=x)),
        """Attention: src is Tensor; give a dictionary of tensors, src={'name': tensor}.""",
    )
    assert_expected_inline(
        golden(lambda: attend(Graph.dense(5), src={"key": x, "value": torch.tensor(1.0)})),
        """Attention: src field 'value' has no dimensions; its first is the sources.""",
    )
    assert_expected_inline(
        golden(lambda: attend(Graph.dense(5), src={"key": x.to(torch.complex64), "value": x})),
        """\
Attention: src field 'key' is torch.complex64; programs compute with bool, u8, i8, i16, i32, i64,
    f16, bf16, f32, f64.""",
    )
    assert_expected_inline(
        golden(lambda: attend(Graph.dense(5), src={"key": x, "value": x.to(torch.float8_e4m3fn)})),
        """\
Attention: src field 'value' is torch.float8_e4m3fn; programs compute with bool, u8, i8, i16, i32,
    i64, f16, bf16, f32, f64.""",
    )
    assert_expected_inline(
        golden(lambda: attend(torch.ones(5, 5))),
        """\
Attention: graph is Tensor; build one with tg.Graph.dense, .triangular, .cu_seqlens,
    .from_edge_index, ...""",
    )
    assert_expected_inline(
        golden(lambda: attend(Graph.dense(5), src={"key": x, "two words": x})),
        """Attention: src field name 'two words'; names are letters, digits and _, at most 64.""",
    )


def test_a_field_that_is_missing():
    x = torch.ones(5, 2, 4)
    text = message(lambda: attend(Graph.dense(5), src={"key": x}))
    assert "src.value" in text and "key" in text and "cases.py" in text
    text = message(lambda: Attention()(graph=Graph.dense(5), src={"key": x, "value": x}, dst={"query": x}))
    assert "scale" in text


def test_a_field_that_is_never_read_warns():
    x = torch.ones(5, 3)
    with pytest.warns(UserWarning, match="spare"):
        Sum()(graph=Graph.dense(5), src={"x": x, "spare": x})


def test_features_that_do_not_fit():
    x = torch.ones(5, 2, 4)
    text = message(lambda: attend(Graph.dense(5), src={"key": torch.ones(5, 2, 3), "value": x}))
    assert "sizes 4 and 3" in text or "sizes 3 and 4" in text, text
    text = message(lambda: attend(Graph.dense(5), src={"key": x, "value": torch.ones(5, 3, 4)}))
    assert "(2,)" in text and "(3, 4)" in text, text


def test_devices_that_differ():
    text = message(lambda: attend(Graph.dense(5), dst={"query": torch.ones(5, 2, 4, device="meta")}))
    assert "query" in text and "meta" in text and "cpu" in text


def test_integer_fields_have_no_gradients():
    x = torch.arange(5)
    out = Sum()(graph=Graph.dense(5), src={"x": x})
    assert out.dtype == torch.int64 and not out.requires_grad
    weight = torch.ones(25, requires_grad=True)
    assert (
        grad(Biased()(graph=Graph.dense(5), src={"x": x}, edge={"bias": weight}).sum(), weight)[0].tolist()
        == x.tolist() * 5
    )


GRAPHS = {
    "boundaries from 1": (lambda: Graph.cu_seqlens(torch.tensor([1, 4])), ("boundaries", "1")),
    "boundaries that decrease": (lambda: Graph.cu_seqlens(torch.tensor([0, 12, 8, 16])), ("boundaries", "12", "8")),
    "boundaries of floats": (lambda: Graph.cu_seqlens(torch.tensor([0.0, 4.0])), ("boundaries", "float32")),
    "causal and unequal": (lambda: Graph.cu_seqlens([0, 2], src_boundaries=[0, 4]), ("align",)),
    "no such source": (lambda: Graph.from_edge_index(torch.tensor([[0, 5], [1, 2]]), 5), ("edge_index", "5")),
    "no such destination": (
        lambda: Graph.from_edge_index(torch.tensor([[0, 1], [1, 7]]), num_dst=7),
        ("edge_index", "7"),
    ),
    "negative": (lambda: Graph.from_edge_index(torch.tensor([[0, -1], [1, 2]]), 5), ("edge_index", "-1")),
    "three rows": (lambda: Graph.from_edge_index(torch.zeros(3, 2).long()), ("edge_index", "3")),
    "col": (lambda: Graph.from_csr([0, 1, 2], [0, 5], 5), ("col", "5")),
    "rowptr": (lambda: Graph.from_csr([0, 2, 1], [0]), ("rowptr",)),
    "overlap": (lambda: Graph.intervals([0, 0], [3, 2], 4, [2, 2], [4, 4]), ("overlap", "row 0")),
    "start2 alone": (lambda: Graph.intervals([0], [1], 4, [2]), ("stop2",)),
    "stop past the end": (lambda: Graph.intervals([0], [9], 4), ("stop", "9", "4")),
    "triangle without offset": (lambda: Graph.triangular(2, 6), ("offset",)),
    "nan cutoff": (lambda: Graph.radius(torch.zeros(3, 3), float("nan")), ("cutoff", "nan")),
    "negative cutoff": (lambda: Graph.radius(torch.zeros(3, 3), -1.0), ("cutoff", "-1")),
    "nan positions": (lambda: Graph.radius(torch.full((3, 3), torch.nan), 1.0), ("positions",)),
    "integer positions": (lambda: Graph.radius(torch.zeros(3, 3).long(), 1.0), ("positions", "int64")),
    "too many neighbours": (lambda: Graph.radius(torch.zeros(5, 3), 1.0, max_neighbors=2), ("max_neighbors", "2", "4")),
    "negative size": (lambda: Graph.dense(-1), ("num_dst", "-1")),
    "size of another kind": (lambda: Graph.dense(2.5), ("num_dst", "float")),
    "negative window": (lambda: Graph.window(5, -1), ("left", "-1")),
    "sizes that differ": (lambda: Graph.dense(2, 3) & Graph.dense(3, 2), ("2", "3")),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name):
    build, words = GRAPHS[name]
    text = message(build)
    assert all(word in text for word in words), text


def test_segments_applied_to_more_rows():
    assert_expected_inline(
        golden(lambda: attend(Graph.cu_seqlens([0, 4]))),
        """\
Attention on Graph blocks 4 x 4: src field 'key' has 5 rows, but the graph has 4 sources. Build the
    graph for 5 sources, or give a field of 4 rows.""",
    )


# The operator called directly.

TEXT = """tiga/1 relation dense
operand 0 src x f32 [*]
operand 1 dst y f32 [*]
scalar 0 s
%0 = mul dst.y src.x
%1 = mul %0 s
%2 = reduce dst sum %1
return %2"""


def run(tensors, ints=(2, 3), scalars=(1.0,), text=TEXT):
    return torch.ops.tiga.propagate(text, tensors, list(ints), list(scalars))


def test_operator_arguments():
    x, y = torch.ones(3, 4), torch.ones(2, 4)
    assert run([x, y])[0].tolist() == [[3.0] * 4] * 2
    assert_expected_inline(
        golden(lambda: run([x])),
        """tiga::propagate: the program reads 2 operands and its relation 0 tensors; 1 were given.""",
    )
    assert_expected_inline(
        golden(lambda: run([x, y], (2, 3, 0))),
        """tiga::propagate: a dense relation has 2 ints ('num_dst', 'num_src'); 3 were given.""",
    )
    assert_expected_inline(
        golden(lambda: run([x, y], scalars=())), """tiga::propagate: the program reads 1 scalars; 0 were given."""
    )
    assert_expected_inline(
        golden(lambda: run([x, y], (5, 3))), """dst field 'y' has 2 rows, but the graph has 5 destinations."""
    )
    assert_expected_inline(
        golden(lambda: run([x, torch.ones(2, 5)])),
        """\
feature sizes differ: feature dimension 0 of dst field 'y' is 5, feature dimension 0 of src field
    'x' is 4.""",
    )
    assert_expected_inline(
        golden(lambda: run([x, y.double()])),
        """dst field 'y' is torch.float64, but the program was traced for torch.float32.""",
    )
    assert_expected_inline(
        golden(lambda: run([x, y[..., None]])),
        """dst field 'y' has 2 feature dimensions, but the program was traced for 1.""",
    )
    assert_expected_inline(
        golden(lambda: run([x[:, :1], y])),
        """src field 'x' has size 1 in feature dimension 0, but the program was traced for another size than 1.""",
    )
    assert_expected_inline(
        golden(lambda: run([x, y], text=TEXT.replace("%1 = mul %0 s", "%1 = foo %0 s"))),
        """program line 6, '%1 = foo %0 s': no operation 'foo'""",
    )
    assert_expected_inline(
        golden(lambda: run([x, y], text=TEXT.replace("tiga/1", "tiga/9"))),
        """\
program line 1, 'tiga/9 relation dense': the first line must start with 'tiga/1'; this version of
    tiga reads no other format""",
    )


def test_relation_arguments():
    text = "tiga/1 relation csr 2\noperand 0 src x f32 []\n%0 = reduce dst sum src.x\nreturn %0"
    x, rowptr, col = torch.ones(3), torch.tensor([0, 1, 2]), torch.tensor([0, 2])
    assert run([x, rowptr, col], scalars=(), text=text)[0].tolist() == [1.0, 1.0]
    assert_expected_inline(
        golden(lambda: run([x, rowptr[:2], col], scalars=(), text=text)),
        """tiga::propagate: a csr relation of 2 by 3 has tensors of lengths (3, 2); (2, 2) were given.""",
    )
    assert_expected_inline(
        golden(lambda: run([x, rowptr.float(), col], scalars=(), text=text)),
        """\
tiga::propagate: a csr relation's tensors are lists of int32 or int64; rowptr is torch.float32 with
    1 dimensions.""",
    )
    # rows that were never checked: what does not exist is no edge
    assert run([x, torch.tensor([0, 9, -4]), torch.tensor([7, 2])], scalars=(), text=text)[0].tolist() == [1.0, 0.0]
    assert run([x, torch.tensor([5, 1, 2]), torch.tensor([-1, 2])], scalars=(), text=text)[0].isfinite().all()


def test_a_second_pass_has_no_single_call():
    class Twice(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(src.x / self.reducer(src.x))

    x = torch.tensor([1.0, 3.0])
    assert Twice()(graph=Graph.dense(2), src={"x": x}).tolist() == [1.0, 1.0]
    assert "2 programs" in message(lambda: Twice().lower(Graph.dense(2), src={"x": x}))
    assert "no edge function" in message(lambda: tg.MessagePassing()(graph=Graph.dense(2), src={"x": x}))


@pytest.mark.parametrize("reducer", [tg.sum(), tg.mean(), tg.max()], ids=lambda r: type(r).__name__)
def test_a_reducer_needs_a_value_of_edges_or_nodes(reducer):
    class Fold(tg.MessagePassing):
        def __init__(self, number):
            super().__init__()
            self.total, self.number = reducer, number

        def edge(self, src, dst, edge):
            return self.total(self.number if self.number else torch.full_like(src.x, 2.0))

    fields = {"x": torch.tensor([1.0, 3.0])}
    said = message(lambda: Fold(1.5)(graph=Graph.dense(2), src=fields))
    assert f"{type(reducer).__name__} of float: a reducer needs a value of edges or nodes" in said
    assert "torch.full_like" in said
    assert Fold(None)(graph=Graph.dense(2), src=fields).tolist() == [4.0 if reducer.name == "sum" else 2.0] * 2
