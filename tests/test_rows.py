"""The rows skeleton: CASES through its kernels under Triton's interpreter, refusals, kernels compiled with no GPU."""

import re

import pytest
import torch
from cases import Attention, Capped, Own
from compiled import compile_for, used
from interpreting import said
from programs import Rearranged
from torch import nn
from torch.nn.functional import leaky_relu

import tiga as tg
from tiga import preparation
from tiga.adjoint import adjoint, augment
from tiga.codegen import launch_rows
from tiga.codegen.plan_rows import Bucket, Plan, bucket, plans, programs
from tiga.ops import rows
from tiga.ops.propagate import allocate
from tiga.parser import parse


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


class Scored(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer(leaky_relu(src.a + dst.a, 0.2), src.v)


class Network(tg.MessagePassing):
    reducer = tg.online_softmax()

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.net = tg.nn.trace(nn.Sequential(nn.Linear(2 * width, hidden), nn.Tanh(), nn.Linear(hidden, 1)))

    def edge(self, src, dst, edge):
        return self.reducer(leaky_relu(self.net(src.x, dst.x), 0.2), src.x)


def graph(n=4096, degree=8):
    edge = torch.arange(n * degree)
    return tg.Graph.from_edge_index(torch.stack([edge * 7 % n, edge * 5 % n]), n, n).prepare()


def gat(dtype=torch.float32, heads=4, width=32, n=4096):
    x = torch.randn(n, heads, width, dtype=dtype)
    return Gat().lower(graph(n), src={"x": x}, dst={"x": x}, att=torch.randn(heads, width, dtype=dtype))


def scored(dtype=torch.float32, heads=4, width=32, n=4096):
    draw = lambda *shape: torch.randn(n, *shape, dtype=dtype)
    return Scored().lower(graph(n), src={"a": draw(heads), "v": draw(heads, width)}, dst={"a": draw(heads)})


def dot(dtype=torch.float32, heads=4, width=32, n=4096):
    x = torch.randn(n, heads, width, dtype=dtype)
    return Attention().lower(graph(n), src={"key": x, "value": x}, dst={"query": x}, scale=0.2)


def network(dtype=torch.float32, width=64, hidden=64, n=4096):
    x = torch.randn(n, width, dtype=dtype)
    return Network(width, hidden).to(dtype).lower(graph(n), src={"x": x}, dst={"x": x})


class Projected(tg.MessagePassing):
    """Keys and values with what a map makes of an edge's few attributes."""

    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, weight):
        added = nn.functional.linear(edge.a, weight).unflatten(-1, src.key.shape[1:])
        return self.reducer(((src.key + added) * dst.query).sum(-1), src.value + added)


def projected(dtype=torch.float16, heads=16, width=32, count=4, n=4096):
    x, g = torch.randn(n, heads, width, dtype=dtype), graph(n)
    a, w = torch.randn(g.num_edges, count, dtype=dtype), torch.randn(heads * width, count, dtype=dtype)
    return Projected().lower(g, src={"key": x, "value": x}, dst={"query": x}, edge={"a": a}, weight=w)


def backward(call):
    """The call of all gradients."""
    text = augment(call.program)
    p = parse(text)
    outputs = allocate(p, call.tensors, call.ints)
    derived = adjoint(text, tuple(i for i, o in enumerate(p.operands) if p.types[o.ref].floating), (0,))
    read = {"operand": call.tensors, "extra": outputs, "saved": outputs}
    tensors = [read[what][k] for what, k in derived.reads] + list(call.tensors[len(p.operands) :])
    return derived.text, tensors, call.ints, [call.scalars[k] for k in derived.scalars]


def sources(text):
    plan = rows.planned(parse(text))
    return [k.main.text for k in plan.passes], plan.reason


def test_kernels_under_the_interpreter():
    out = said("interpreted_rows", "rows_interpreted.py")
    launched, written, refused = re.search(r"rows launched: (\d+), written: (\d+), refused: (.*)", out).groups()
    assert int(launched) > 150 and int(written) > 150, out[-300:]
    assert refused == '["what a user\'s reducer leaves at every edge, for its gradient"]'


def test_forward_backward_and_twice_are_kernels():
    call = dot(n=16)
    first = backward(call)[0]
    twice = adjoint(augment(first), (0, 1, 2), (0, 1, 2)).text
    assert [len(sources(text)[0]) for text in (call.program, first, twice)] == [1, 2, 2]


def test_another_edge_function_is_another_kernel():
    x = torch.randn(8, 2, 16)
    fields = {"src": {"key": x, "value": x}, "dst": {"query": x}}
    (plain,), (capped,) = (
        sources(cls().lower(graph(8), **fields, scale=0.2).program)[0] for cls in (Attention, Capped)
    )
    assert "= tanh(" in capped and "= tanh(" not in plain


def test_sizes_make_no_other_kernel():
    assert len({*sources(gat(n=5).program)[0], *sources(gat(n=9, heads=2, width=7).program)[0]}) == 1


def test_what_does_not_fit_says_why():
    call = Attention().lower(tg.Graph.dense(4), **_fields(), scale=1.0)
    assert sources(call.program) == ([], "a dense relation")


def test_a_users_reducer_is_a_kernel_and_its_gradient_says_why_not():
    x, y, w = torch.randn(4, 2, 1), torch.randn(4, 1, 3), torch.randn(32, 2, 3)
    call = Own().lower(graph(4), src={"x": x}, dst={"y": y}, edge={"w": w})
    (text,), _ = sources(call.program)
    assert "for turn in tl.static_range(BLOCK_E)" in text
    assert sources(backward(call)[0]) == ([], "what a user's reducer leaves at every edge, for its gradient")


def test_numbers_are_float64_arguments():
    """Triton takes a Python float for float32 unless it is told otherwise."""
    (text,), _ = sources(dot(n=4).program)
    parameters = launch_rows.load(text).params
    assert [p.annotation_type for p in parameters if p.name[:1] == "c" and p.name[1:].isdigit()] == ["fp64"]


def _fields():
    x = torch.randn(4, 2, 3)
    return {"src": {"key": x, "value": x}, "dst": {"query": x}}


def test_a_row_too_wide_says_why():
    x = torch.randn(4, 5000)
    call = Attention().lower(graph(4), src={"key": x, "value": x}, dst={"query": x}, scale=1.0)
    outputs = allocate(parse(call.program), call.tensors, call.ints)
    assert rows.run(parse(call.program), call.tensors, call.ints, call.scalars, outputs) == (
        "a value of 8192 features an edge, more than 2048"
    )


# Plans.


def test_plans_fill_a_warp_with_what_an_edge_reads():
    best = lambda bytes, features, matrix, rows, degree: plans(bytes, features, matrix, bucket(rows, rows * degree))[0]
    assert best(512, 128, 0, 170_000, 7) == Plan(1, 4, 1)  # float32, 4 heads of 32: one edge's vector is a warp's
    assert best(512, 128, 0, 400_000, 50) == Plan(1, 4, 1)  # of long rows no more edges at once
    assert best(256, 128, 0, 170_000, 7) == best(256, 128, 0, 400_000, 50) == Plan(1, 4, 1)  # bfloat16
    assert best(128, 64, 0, 170_000, 7) == Plan(2, 4, 1)  # two rows' vectors
    assert best(256, 128, 0, 300, 50) == Plan(1, 4, 1)  # few rows are not packed
    assert best(16, 4, 0, 170_000, 7) == Plan(8, 8, 1)  # four numbers: many rows
    assert best(16, 4, 0, 300, 64) == Plan(1, 64, 1)
    assert best(4096, 1024, 0, 40_000, 8).warps == 4
    assert best(256, 64, 64, 20_000, 7) == Plan(4, 8, 8)
    assert best(1024, 512, 0, 40_000, 8) == Plan(1, 4, 2)
    assert plans(512, 128, 0, bucket(400_000, 20_000_000), rescaled=False)[0] == Plan(1, 2, 1)
    assert plans(256, 128, 0, bucket(400_000, 20_000_000), rescaled=False)[0] == Plan(1, 4, 1)
    assert plans(1024, 512, 0, bucket(40_000, 320_000), held=True)[0] == Plan(1, 2, 2)  # of what edges compute, less


def test_programs_take_several_items_where_there_are_many():
    assert [programs(groups, 132) for groups in (0, 100, 10_000, 80_000, 800_000)] == [0, 100, 8448, 10_000, 100_000]


def test_plans_do_not_follow_edge_counts():
    assert {bucket(n, e) for n, e in ((170_000, 1_200_000), (170_001, 1_234_567))} == {Bucket(32, 8)}
    split = [preparation.split_of(e) for e in (0, 100_000, 2_000_000, 20_000_000, 10**9)]
    assert split == [256, 256, 256, 2441, 4096]


# Machine code, without a GPU.


def chosen(text, tensors, ints, scalars, capability, monkeypatch):
    """(plan, registers, spilled bytes, barriers) of each kernel that would be launched, merges included."""
    found = {}

    def made(source, plan, named, constants, sizes, device, compiling):
        values = launch_rows.arguments(source, plan, named, constants, sizes, device)[0]
        kernel = compile_for(launch_rows.load(source.text), values, {"num_warps": plan.warps}, capability, "fp64")
        registers, spilled = used(kernel)
        found[source] = (plan, registers, spilled, kernel.asm["ptx"].count("bar.sync"))
        return launch_rows.Call(lambda grid, values: None, [], (), spilled)

    monkeypatch.setattr(launch_rows, "made", made)
    monkeypatch.setattr(launch_rows, "_records", {})
    p = parse(text)
    assert rows.run(p, tensors, ints, scalars, allocate(p, tensors, ints)) == ""
    return list(found.values())


STANDARD = [
    # program, dtype, registers at most: forward, by destination, by source
    (gat, torch.float32, (72, 104, 80)),
    (gat, torch.bfloat16, (72, 96, 96)),
    (dot, torch.float32, (72, 88, 88)),
    (dot, torch.bfloat16, (72, 80, 96)),
]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("lower, dtype, most", STANDARD, ids=lambda x: getattr(x, "__name__", str(x)))
def test_registers_spills_and_barriers(lower, dtype, most, capability, monkeypatch):
    """4 heads of 32, by ptxas: one plan, no spill, and no barrier but those of an edge's few narrow values."""
    call = lower(dtype)
    found = [
        chosen(*arguments, capability, monkeypatch)
        for arguments in ((augment(call.program), call.tensors, call.ints, call.scalars), backward(call))
    ]
    (forward,), (by_dst, by_src) = found
    for (_, registers, spilled, barriers), bound, allowed in zip((forward, by_dst, by_src), most, (0, 0, 2)):
        assert registers <= bound and spilled == 0 and barriers <= allowed, found


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_forward_keeps_compile(dtype, capability, monkeypatch):
    """Forward, node work that visits no edges, and a pass by source."""
    call = scored(dtype)
    (forward,) = chosen(augment(call.program), call.tensors, call.ints, call.scalars, capability, monkeypatch)
    found = [forward, *chosen(*backward(call), capability, monkeypatch)]
    assert len(found) == 3 and all(spilled == 0 for _, _, spilled, _ in found), found
    assert [registers <= most for (_, registers, _, _), most in zip(found, (80, 56, 64))] == [True] * 3, found


@pytest.mark.parametrize("width, dtype", [(32, torch.float16), (64, torch.bfloat16), (32, torch.float32)])
def test_maps_of_few_inputs_are_no_matrix_products(width, dtype, monkeypatch):
    """A kernel a direction, none of which spills."""
    call, texts = projected(dtype, 16, width), []
    kept = launch_rows.load
    monkeypatch.setattr(launch_rows, "load", lambda text: texts.append(text) or kept(text))
    found = [
        *chosen(augment(call.program), call.tensors, call.ints, call.scalars, 90, monkeypatch),
        *chosen(*backward(call), 90, monkeypatch),
    ]
    assert len(found) == 3 and all(spilled == 0 for _, _, spilled, _ in found), found
    assert not any(word in text for text in texts for word in ("tl.dot", "product(", "outer(", "reshaped("))
    # what a row's edges share is multiplied once a row: in passes by destination no edge reads the matrix
    edges = [text.split("for at in")[1].split("if CUT")[0] for text in dict.fromkeys(texts)]
    assert [bool(re.search(r"\bw\d+_\d", each)) for each in edges] == [False, False, True]


def test_more_inputs_are_matrix_products(monkeypatch):
    call = projected(count=16, heads=2, n=64)
    assert len(chosen(*backward(call), 90, monkeypatch)) == 3


@pytest.mark.parametrize("lower, dtype", [(network, torch.float32), (gat, torch.float64)])
def test_others_compile_without_spills(lower, dtype, monkeypatch):
    # lists that the operator makes have room for rows that are cut: merges are launched too
    monkeypatch.setattr(tg.Graph, "prepare", lambda graph: graph)
    call = lower(dtype)
    found = [
        *chosen(augment(call.program), call.tensors, call.ints, call.scalars, 90, monkeypatch),
        *chosen(*backward(call), 90, monkeypatch),
    ]
    assert len(found) > 3 and all(spilled == 0 for _, _, spilled, _ in found), found


@pytest.mark.parametrize("plan", [Plan(1, 1, 4), Plan(1, 1, 8), Plan(2, 1, 2)], ids=str)
def test_rearranged_features_compile_with_any_plan(plan, monkeypatch):
    """Triton 3.6 fails at a gather from more or fewer elements than there are indices, if warps share a row."""
    n = 4096
    x, z = torch.randn(n, 120), torch.randn(n * 8, 6, 3)
    call = Rearranged().lower(graph(n), {"x": x}, {"x": x[:, :80], "y": x[:, 80:]}, {"z": z})
    monkeypatch.setattr(launch_rows, "plans", lambda *needs: [plan])
    assert len(chosen(augment(call.program), call.tensors, call.ints, call.scalars, 90, monkeypatch)) == 1
    assert len(chosen(*backward(call), 90, monkeypatch)) == 2


def test_another_edge_count_is_no_other_kernel(monkeypatch):
    """Graphs of one bucket: nothing is emitted, planned or compiled anew, and every number is that of the call."""
    made: list = []
    ran: list = []

    def spy(source, plan, named, constants, sizes, device, compiling):
        made.append(source)
        values, changing = launch_rows.arguments(source, plan, named, constants, sizes, device)
        return launch_rows.Call(lambda grid, values: ran.append(values), values, changing)

    monkeypatch.setattr(launch_rows, "made", spy)
    monkeypatch.setattr(launch_rows, "_records", {})
    counts = set()
    for n, degree in ((100, 5), (90, 8), (120, 6)):
        x = torch.randn(n, 2, 8)
        call = Gat().lower(graph(n, degree), src={"x": x}, dst={"x": x}, att=torch.ones(2, 8))
        for text, tensors, ints, scalars in ((call.program, call.tensors, call.ints, call.scalars), backward(call)):
            p = parse(text)
            assert rows.run(p, tensors, ints, scalars, allocate(p, tensors, ints)) == ""
        counts.add(tuple([v for v in ran[-1] if type(v) is int and v in (n, n * degree)]))
    assert len(made) == 3 and len(ran) == 9 and len(counts) == 3


# Launch geometry that was asked for.


def asked(block_e, num_warps):
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    module = Network(3, 4)
    module.net = tg.nn.trace(net, block_e, num_warps)
    x = torch.randn(64, 3)
    return module.lower(graph(64), src={"x": x}, dst={"x": x})


def test_what_a_network_asks_for_is_tried_first(monkeypatch):
    """In the program's text, so in the gradient's too; without it the text is as before."""
    usual = asked(None, None)
    assert " launch" not in usual.program
    texts, found = {}, []
    made = lambda source, plan, *a: found.append(plan) or launch_rows.Call(print, [], (), 0)
    monkeypatch.setattr(launch_rows, "made", made)
    monkeypatch.setattr(launch_rows.Call, "__call__", lambda *a: None)
    monkeypatch.setattr(launch_rows, "_records", {})
    for block_e, num_warps in ((32, 2), (64, None), (None, 8)):
        call = asked(block_e, num_warps)
        texts[block_e] = call.program
        want = (block_e or 0, num_warps or 0)
        assert call.program.split("\n")[0].endswith(f" launch {want[0]} {want[1]}")
        for arguments in ((call.program, call.tensors, call.ints, call.scalars), backward(call)):
            assert parse(arguments[0]).launch == want
            found.clear()
            p = parse(arguments[0])
            assert rows.run(p, *arguments[1:], allocate(p, arguments[1], arguments[2])) == ""
            for plan in found:
                assert plan.rows * plan.block_e == (block_e or plan.rows * plan.block_e)
                assert plan.warps == (num_warps or plan.warps)
    assert len(set(texts.values())) == 3


def test_geometry_that_no_program_has_is_refused():
    for block_e, num_warps, words in (
        (3, None, "block_e=3"),
        (1 << 17, None, "at most 65536"),
        (None, 64, "at most 32"),
    ):
        with pytest.raises(tg.TigaError, match=words):
            tg.nn.trace(nn.Linear(2, 2), block_e, num_warps)
    for words in ("launch 3 1", "launch 8", "launch 8 64", "launch 8 x"):
        with pytest.raises(tg.TigaError):
            parse(asked(None, None).program.replace("csr 10", "csr 10 " + words, 1))
