"""torch.export and AOTInductor: every relation, any size, loaded by ONE fresh process that imports nothing but tiga."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
import torch._inductor
from programs import INSIDE, Attention, attend, fields, graph_tensors, made_inside, mask_inside, plain_attention

import tiga as tg

DYNAMIC = torch.export.Dim.DYNAMIC
SIZES = ((6, 11), (9, 20), (2, 3))  # nodes and edges; the first is what is exported
close = torch.testing.assert_close


class Inside(torch.nn.Module):
    """A layer that makes its graph from the tensors it is given."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.attention, self.project = kind, Attention(), torch.nn.Linear(4, 4)

    def forward(self, q, k, v, *tensors):
        return attend(self.attention, made_inside(self.kind, q.shape[0], *tensors), q, k, self.project(v))


class Given(torch.nn.Module):
    """A layer that is given its graph, and an edge field."""

    def __init__(self):
        super().__init__()
        self.weighted = Weighted()

    def forward(self, graph, weight, x):
        return self.weighted(graph=graph, src={"x": x}, edge={"weight": weight}, scale=0.25)


class Weighted(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge, scale):
        return self.reducer(edge.weight * src.x * scale)


class Both(torch.nn.Module):
    """Two programs: one without numbers of the call, whose float[] is empty, and one with."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, q, k, v, edges):
        n = q.shape[0]
        first = attend(self.attention, tg.Graph.triangular(n), q * 2, k, v).relu()  # moved into the program
        return first, attend(
            self.attention, tg.Graph.from_edge_index(edges, num_src=n, num_dst=n), first, k, v, scale=0.25
        )


def export_inside(kind, strict):
    n, num_edges = SIZES[0]
    tensors = graph_tensors(n, num_edges)
    shapes = {
        **{name: {0: DYNAMIC} for name in "qkv"},
        "tensors": tuple({t.dim() - 1: DYNAMIC} if t.shape[-1] > 3 else None for t in tensors),
    }
    module = Inside(kind)
    return module, torch.export.export(module, (*fields(n), *tensors), dynamic_shapes=shapes, strict=strict)


def export_given(strict):
    n, num_edges = SIZES[0]
    graph = tg.Graph.from_edge_index(graph_tensors(n, num_edges)[3], num_src=n, num_dst=n)
    leaves = [DYNAMIC for _ in graph.ints] + [{0: DYNAMIC} for _ in graph.tensors]
    args = (graph, torch.randn(num_edges, 3), torch.randn(n, 3))
    return torch.export.export(Given(), args, dynamic_shapes=(leaves, {0: DYNAMIC}, {0: DYNAMIC}), strict=strict)


def given_call(n, num_edges):
    edges = graph_tensors(n, num_edges)[3]
    weight, x = torch.randn(num_edges, 3), torch.randn(n, 3)
    want = torch.zeros(n, 3).index_add(0, edges[1], weight * x[edges[0]] * 0.25)
    return (tg.Graph.from_edge_index(edges, num_src=n, num_dst=n), weight, x), want


def both_call(n):
    q, k, v = fields(n)
    edges = graph_tensors(n, 2 * n)[3]
    first = plain_attention(torch.ones(n, n).tril().bool(), q * 2, k, v).relu()
    mask = mask_inside("edge_index", n, (torch.tensor([0, n]), None, None, edges))
    return (q, k, v, edges), [first, plain_attention(mask, first, k, v, 0.25)]


def programs_of(exported):
    nodes = [node for node in exported.graph.nodes if node.op == "call_function" and "tiga" in str(node.target)]
    return [node for node in nodes if node.target is torch.ops.tiga.propagate.default]


CHILD = textwrap.dedent("""
    import json, sys, time
    import torch
    import tiga
    torch.set_num_threads(1)
    folder, results = sys.argv[1], {}
    for name in sys.argv[2:]:
        try:
            if name.endswith(".aoti.pt2"):
                run = torch._inductor.aoti_load_package(folder + "/" + name)
            else:
                run = torch.export.load(folder + "/" + name).module()
            for args, want in torch.load(folder + "/" + name + ".calls"):
                with torch.no_grad():
                    torch.testing.assert_close(run(*args), want, check_device=False)
            results[name] = "ok"
        except Exception as e:
            results[name] = type(e).__name__ + ": " + str(e)[-600:]
    print(json.dumps(results))
""")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every exported program, saved with calls at several sizes; what one process made of each: "ok" or the error."""
    torch.manual_seed(0)
    folder, names = tmp_path_factory.mktemp("exported"), []

    def save(name, exported, calls):
        if name.endswith(".aoti.pt2"):
            torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / name))
        else:
            torch.export.save(exported, folder / name)
        torch.save(calls, folder / (name + ".calls"))
        names.append(name)

    with torch.no_grad():
        for kind in INSIDE:
            for strict in (False, True):
                module, exported = export_inside(kind, strict)
                calls = []
                for n, num_edges in SIZES:
                    (q, k, v), tensors = fields(n), graph_tensors(n, num_edges)
                    want = plain_attention(mask_inside(kind, n, tensors), q, k, module.project(v))
                    calls.append(((q, k, v, *tensors), want))
                save(f"{kind}-{strict}.pt2", exported, calls if kind != "cat" else calls[:2])
        for strict in (False, True):
            save(f"given-{strict}.pt2", export_given(strict), [given_call(*size) for size in SIZES])
        n = 6
        shapes = ({0: DYNAMIC}, {0: DYNAMIC}, {0: DYNAMIC}, {1: DYNAMIC})
        exported = torch.export.export(Both(), both_call(n)[0], dynamic_shapes=shapes)
        assert [len(node.args[3]) for node in programs_of(exported)] == [0, 1]
        save("both.aoti.pt2", exported, [both_call(m) for m in (6, 9, 4)])
    packaged = [name for name in names if name.endswith(".aoti.pt2")]
    return {**loaded(folder, [name for name in names if name not in packaged]), **loaded(folder, packaged)}


def loaded(folder, names):
    """What a fresh process made of saved programs. Packages get a process of their own: a faulty runtime kills it."""
    command = [sys.executable, "-c", CHILD, str(folder), *names]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if child.returncode:
        return dict.fromkeys(names, f"the process ended with {child.returncode}: {child.stderr[-2000:]}")
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("kind", [*INSIDE, "given"])
def test_saved_programs_run_at_other_sizes_in_a_fresh_process(saved, kind, strict):
    assert saved[f"{kind}-{strict}.pt2"] == "ok"


def test_aot_inductor_package_runs_in_a_fresh_process(saved):
    assert saved["both.aoti.pt2"] == "ok"


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_decompositions_keep_the_operator(strict):
    _, exported = export_inside("triangular", strict)
    before, after = programs_of(exported), programs_of(exported.run_decompositions())
    assert len(before) == len(after) == 1
    assert before[0].args[0] == after[0].args[0]
    q, k, v = fields(8)
    args = (q, k, v, *graph_tensors(8, 11))
    with torch.no_grad():
        close(exported.run_decompositions().module()(*args), exported.module()(*args))


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_no_nodes_and_no_edges(strict):
    """Exported sizes may be 0: results are empty or 0, or torch.export refuses by its own range."""
    _, exported = export_inside("triangular", strict)
    tensors = graph_tensors(6, 11)
    empty = (torch.empty(0, 2, 4), torch.empty(0, 2, 4), torch.empty(0, 2, 4))
    try:
        out = exported.module()(*empty, tensors[0], tensors[1][:0], tensors[2][:0], *tensors[3:])
    except (RuntimeError, AssertionError) as e:
        assert any(word in str(e).lower() for word in ("guard", "range", "expected"))
    else:
        assert out.shape == (0, 2, 4)
    args, want = given_call(4, 0)
    try:
        out = export_given(strict).module()(*args)
    except (RuntimeError, AssertionError, ValueError) as e:
        assert any(word in str(e).lower() for word in ("guard", "range", "expected", "structure", "spec"))
    else:
        close(out, want)


def test_an_exported_program_is_trained():
    """module() of an exported program has the gradients of the module."""
    module, exported = export_inside("triangular", False)
    loaded = exported.module()
    q, k, v = fields(7, grad=True)
    args = graph_tensors(7, 11)
    want = plain_attention(torch.ones(7, 7).tril().bool(), q, k, module.project(v))
    got = loaded(q, k, v, *args)
    close(got, want)
    inputs = (q, k, v)
    close(
        torch.autograd.grad(got.square().sum(), (*inputs, loaded.project.weight)),
        torch.autograd.grad(want.square().sum(), (*inputs, module.project.weight)),
        rtol=1e-4,
        atol=1e-5,
    )
