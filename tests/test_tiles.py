"""The tiles skeleton: CASES through its kernels under Triton's interpreter, refusals, kernels compiled with no GPU."""

import itertools

import pytest
import torch
from cases import CASES, Attention, Capped
from compiled import float32_products
from interpreting import interpreted

import tiga as tg
from tiga.adjoint import adjoint, augment
from tiga.codegen import kernels, launch, steps
from tiga.codegen.calls import Call
from tiga.codegen.plan import Plan, plans
from tiga.ops import propagate, tiles
from tiga.parser import parse


def call(module, graph, dtype=torch.float32, width=16, rows=None, heads=2):
    n = graph.num_dst if rows is None else rows
    q, k, v = (torch.randn(heads, n, width, dtype=dtype).transpose(0, 1) for _ in range(3))
    return module.lower(graph, src={"key": k, "value": v}, dst={"query": q}, scale=width**-0.5)


@pytest.mark.parametrize(
    ("rows", "heads", "owners", "parts"),
    [(1024, 4, 32, 1), (1024, 8, 64, 1), (1024, 64, 128, 1), (4096, 1, 128, 8), (40, 4, 32, 1), (9, 1, 16, 1)],
)
def test_few_tiles_have_fewer_owners_unless_they_are_long(monkeypatch, rows, heads, owners, parts):
    """On 132 multiprocessors. Where a tile has many others to visit, they are shared out instead."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    made = call(Attention(), tg.Graph.dense(rows), torch.bfloat16, 64, heads=heads)
    p = parse(made.program)
    (ready,) = tiles.planned(p)[1]
    found = launch.Launch(ready, Call(p, made.tensors, tuple(made.ints), made.scalars, []), tiles.spans)
    some = plans(64, found.widths(), 1, found.items)
    found.plan = next(iter(found.smaller(some[0])), some[0])
    assert (found.plan.block_m, found.parts()) == (owners, parts)


def sources(text):
    _, kernels, why = tiles.planned(parse(text))
    return [k.source().text for k in kernels if k.span != "nodes"], why


def test_cases_run_as_kernels_under_the_interpreter():
    tests = "(test_error_is_that_of_plain_torch and float32 or test_nan_reaches or nobodys_source)"
    lists = " and not hub and not mixed and not csr"  # rows_interpreted.py has these
    launched, written = interpreted("test_cases.py", "-k", tests + lists)
    assert launched > 150 and written > 60


def test_orders_layouts_parts_and_tables_under_the_interpreter():
    launched, written = interpreted("tiles_interpreted.py", "lowering_interpreted.py", "products_interpreted.py")
    assert launched > 80 and written > 15


def test_forward_backward_and_twice_are_kernels():
    graph = tg.Graph.triangular(8)
    full = augment(call(Attention(), graph, torch.bfloat16).program)
    first = adjoint(full, (0, 1, 2), (0,)).text
    twice = adjoint(augment(first), (0, 1, 2), (0, 1, 2)).text
    assert [len(sources(text)[0]) for text in (full, first, twice)] == [1, 2, 3]


def test_another_edge_function_is_another_kernel():
    graph = tg.Graph.triangular(8)
    (plain,), (capped,) = (sources(call(cls(), graph).program)[0] for cls in (Attention, Capped))
    assert "tanh(" in capped.split("def propagate")[1] and "tanh(" not in plain.split("def propagate")[1]


def test_sizes_and_scales_make_no_other_kernel():
    texts = {tuple(sources(call(Attention(), tg.Graph.triangular(n)).program)[0]) for n in (1, 7, 300)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "dtype, graph, reason",
    [
        (torch.float64, tg.Graph.triangular(4), "float64"),
        (torch.float32, tg.Graph.triangular(4).to_csr(), "a csr relation"),
    ],
)
def test_what_does_not_fit_says_why(dtype, graph, reason):
    assert sources(call(Attention(), graph, dtype).program) == ([], reason)


@pytest.mark.parametrize(
    "asked, wanted, of_tiles", [("none", "tf32x3", "bf16x6"), ("tf32", "tf32", "tf32"), ("ieee", "ieee", "ieee")]
)
def test_float32_products_are_made_as_torch_is_asked(asked, wanted, of_tiles):
    """By the newer name of the setting, after which the older one can no longer be read."""
    cpu, tensors = torch.device("cpu"), [torch.randn(4, 1, 8)] * 3
    p = parse(call(Attention(), tg.Graph.dense(4)).program)
    with float32_products(asked):
        assert (kernels.precision(4, cpu), kernels.precision(2, cpu)) == (wanted, "ieee")
        made = Call(p, tensors, (4, 4), (1.0,), [])
        work = launch.Launch(tiles.planned(p)[1][0], made, tiles.spans)
        assert (made.key[-1], work.widths(), work.precision) == (asked, 4, of_tiles)
        wide = Call(p, [torch.randn(4, 1, 128)] * 3, (4, 4), (1.0,), [])
        work = launch.Launch(tiles.planned(p)[1][0], wide, tiles.spans)
        assert (work.widths(), work.precision) == (4, wanted)


def test_refusals_of_the_cases():
    """Of the CASES over implicit relations, those without a kernel and the reasons: a new reason is a lost kernel."""
    reasons = {}
    for case in CASES:
        if case.name.startswith("second pass") or case.graph.kind == "csr":
            continue
        why = sources(case.lower(case.build(), case.arguments()).program)[1]
        if why:
            reasons.setdefault(why, []).append(case.name)
    assert set(reasons) <= {"a user's reducer", "linear on the edge"}, reasons


def test_plans_give_every_warp_owners_that_exist():
    """By Triton's products of 64 owners and more: 16 a warp."""
    for width, itemsize, sums, rows in itertools.product((16, 64, 128, 256, 512), (2, 4), (1, 2, 3), (1, 64, 5000)):
        assert all(p.block_m < 64 or p.warps * 16 <= p.block_m for p in plans(width, itemsize, sums, rows))
    with pytest.raises(ValueError, match="8 warps for 64 owners: at most 4"):
        Plan(64, 32, 8, 2)


COMPILED = [
    (torch.bfloat16, 64, tg.Graph.triangular(64)),
    (torch.float16, 64, tg.Graph.cu_seqlens([0, 5, 5, 20, 64])),
    (torch.bfloat16, 32, tg.Graph.window(64, 3)),
    (torch.float32, 64, tg.Graph.triangular(64)),
]


@pytest.mark.parametrize("dtype, width, graph", COMPILED, ids=lambda x: getattr(x, "kind", str(x)))
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_spills(dtype, width, graph, capability, monkeypatch):
    """Every plan that would be taken, by ptxas, without a GPU."""
    from compiled import usage

    full = augment(call(Attention(), graph, dtype, width).program)
    arguments = call(Attention(), graph, dtype, width)
    found = usage(full, arguments, capability)
    assert found and all(spilled == 0 for _, spilled in found), found


def test_second_derivatives_of_float32_fit_tiles_that_a_warpgroup_multiplies(monkeypatch):
    """All kernels of forward, backward and twice, on sm_90: 64 owners or more, and few registers in memory."""
    from compiled import compile_for, used

    taken = {}

    def runner(text, values, plan, grid, device):
        if "inner(" not in text:
            return kernels.Runner(lambda *arguments: None, 0)
        options = {"num_warps": plan.warps, "num_stages": plan.stages}
        kernel = compile_for(kernels.load(text), values, options, 90)
        spilled = used(kernel)[1] // 4
        if kernel.metadata.shared > 227 << 10:
            return None
        taken.setdefault(text, {})[spilled] = plan
        return kernels.Runner(lambda *arguments: None, spilled, kernel)

    monkeypatch.setattr(launch, "runner", runner)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(propagate, "KERNEL_DEVICES", propagate.KERNEL_DEVICES | {"cpu"})
    steps._records.clear()
    leaves = [torch.randn(4096, 16, 64, requires_grad=True) for _ in range(3)]
    q, k, v = leaves
    out = Attention()(graph=tg.Graph.dense(4096), src={"key": k, "value": v}, dst={"query": q}, scale=0.125)
    first = torch.autograd.grad(out, leaves, out.detach(), create_graph=True)
    torch.autograd.grad(first, leaves, [x.detach() for x in first])
    steps._records.clear()
    assert len(taken) >= 8
    for tried in taken.values():
        assert min(tried) <= launch.HARDLY_SPILLED and tried[min(tried)].block_m >= 64, tried
