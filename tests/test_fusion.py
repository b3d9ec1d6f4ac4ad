"""Neighbours of the operator move into its programs: what is left beside it; values and gradients of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from fused import compiling, inference, left, programs, run, training
from hypothesis import Phase, given, settings
from programs import Attention, attend, plain_attention
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.autograd import grad

import tiga as tg
from tiga.codegen import launch_hopper, plan_hopper
from tiga.inductor import fusion
from tiga.inductor.cost import cost
from tiga.inductor.neighbourhood import stays

N, H, D = 6, 2, 4
program = Attention()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def tiga_attention(q, k, v):
    return attend(program, tg.Graph.triangular(q.shape[0]), q, k, v)


def torch_attention(q, k, v):
    return plain_attention(torch.ones(len(q), len(q)).tril().bool(), q, k, v)


def several_readers(t, q, k, v):
    out = t(q, k, v)
    return out.relu(), out.tanh(), out


def rows_in_two_dimensions(t, q, k, v):
    return t((q.tanh() * 2).flatten(0, 1), k, v).unflatten(0, (2, 3)).exp()


def residual_after(t, q, k, v, w):
    out = t(q, k, v)
    gate = q.flatten(1) @ w  # computed after the operator, needed by what follows it
    return out.flatten(1) * gate.sigmoid() + gate


class Case(NamedTuple):
    """fn: of an attention and tensors of these shapes. left: what is computed beside the operator, forward."""

    name: str
    fn: Callable
    shapes: tuple
    left: tuple = ()


U, FLAT = (N, H, D), (N, H * D)
QKV = (U, U, U)
CASES = [
    Case("scale", lambda t, q, k, v: t(q * 0.5, k, v), QKV),
    Case("bias of heads", lambda t, q, k, v, b: t(q + b, k, v), (*QKV, (H, 1))),
    Case("scale, relu, gate", lambda t, q, k, v, g: t(q * 2, k, v).relu() * g, (*QKV, U)),
    Case("gate, a view", lambda t, q, k, v, g: t(q, k, v).reshape(N, -1) * g.sigmoid(), (*QKV, FLAT)),
    Case("bias, leaky", lambda t, q, k, v, b: F.leaky_relu(t(q, k, v).flatten(1) + b, 0.1), (*QKV, (H * D,))),
    Case("residual, silu", lambda t, q, k, v, x: F.silu(x + t(q, k, v)), (*QKV, U)),
    Case("gelu", lambda t, q, k, v: F.gelu(t(q, k, v)), QKV),
    Case("several readers", several_readers, QKV),
    Case("operand computed later", residual_after, (*QKV, (H * D, H * D)), ("mm",)),
    Case("rms_norm", lambda t, q, k, v, w: t(F.rms_norm(q, (D,), w), k, v), (*QKV, (D,))),
    Case("layer_norm", lambda t, q, k, v, w, b: t(F.layer_norm(q, (D,), w, b), k, v), (*QKV, (D,), (D,))),
    Case("rows in two dimensions", rows_in_two_dimensions, ((2, 3, H, D), U, U)),
    Case("norm of the result", lambda t, q, k, v, w: F.rms_norm(t(q, k, v), (D,), w), (*QKV, (D,))),
]
STEPS = {
    "scale": lambda y, x, w, flat: y * 0.7,
    "weight": lambda y, x, w, flat: y * w + 0.1,
    "residual": lambda y, x, w, flat: x - y,
    "gate": lambda y, x, w, flat: y * x.sigmoid(),
    "flat": lambda y, x, w, flat: (y.flatten(1) + flat.tanh()).view(N, H, D),
    "norm": lambda y, x, w, flat: F.rms_norm(y, (D,), w),
    "centred": lambda y, x, w, flat: F.layer_norm(y, (D,)),
    "silu": lambda y, x, w, flat: F.silu(y),
    "elu": lambda y, x, w, flat: F.elu(y),
    "turned": lambda y, x, w, flat: torch.cat([-y[..., 2:], y[..., :2]], -1) + y,
    "clamped": lambda y, x, w, flat: y.clamp(-1.5, 1.5),
    "heads": lambda y, x, w, flat: y - y.mean(1, keepdim=True),
    "rows": lambda y, x, w, flat: y - y.mean(0),
}


def tensors(shapes):
    return [torch.randn(shape) for shape in shapes]


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def weights_of(outputs):
    return [torch.linspace(0.5, 2, o.numel(), dtype=o.dtype).view_as(o) for o in outputs]


def check(fn, args):
    """The graphs of what the function makes of tiga, whose values and gradients are plain torch's in float64."""
    wide = [a.double().requires_grad_() for a in args]
    want = as_tuple(fn(torch_attention, *wide))
    graphs = training(lambda *a: as_tuple(fn(tiga_attention, *a)), [a.clone().requires_grad_() for a in args])
    got, gradients = run(*graphs, args, [w.float() for w in weights_of(want)])
    torch.testing.assert_close(got, [w.float() for w in want], rtol=1e-4, atol=1e-5)
    wanted = grad(want, wide, weights_of(want), allow_unused=True)
    for a, b in zip(gradients, wanted):
        torch.testing.assert_close(a, None if b is None else b.float(), rtol=1e-3, atol=1e-4)
    return [gm.graph for gm in graphs]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_neighbours_move_into_the_program(case):
    forward, backward = check(case.fn, tensors(case.shapes))
    assert left(forward) == [*case.left] and len(programs(forward)) == len(programs(backward)) == 1


def test_neighbours_move_into_the_program_without_gradients():
    """All cases side by side."""
    args = [tensors(case.shapes) for case in CASES]
    flat, count = [t for a in args for t in a], [len(a) for a in args]

    def fn(*flat):
        outputs = []
        for case, n in zip(CASES, count):
            outputs += as_tuple(case.fn(tiga_attention, *flat[:n]))
            flat = flat[n:]
        return tuple(outputs)

    with torch.no_grad():
        gm = inference(fn, flat)
        want = [o for case, a in zip(CASES, args) for o in as_tuple(case.fn(torch_attention, *a))]
        torch.testing.assert_close(list(gm(*flat)), want, rtol=1e-4, atol=1e-5)
    assert left(gm.graph) == [name for case in CASES for name in case.left]
    assert len(programs(gm.graph)) == len(CASES)


def test_gradients_flow_through_the_gradients_program():
    """The gradient's program takes in the norm's own."""
    _, backward = check(lambda t, q, k, v: t(F.rms_norm(q, (D,)) * 3, k, v), tensors(QKV))
    assert left(backward) == []
    (text,) = programs(backward)
    assert text.count("= reduce") == 3 and "rsqrt" in text


chain = st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=4)


@given(before=chain, after=chain)
@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
def test_random_chains_of_neighbours(before, after):
    """Whatever stands before the queries and after the results, fused or not: values and gradients of plain torch."""

    def fn(t, q, k, v, x, w, flat):
        for name in before:
            q = STEPS[name](q, x, w, flat)
        out = t(q, k, v)
        for name in after:
            out = STEPS[name](out, x, w, flat)
        return out * 1.5

    torch.manual_seed(0)
    check(fn, tensors((*QKV, U, (D,), FLAT)))


# What stays outside, and why.


def left_out(fn, shapes=QKV):
    """What is left forward, and what was said of it."""
    fusion._notes.clear()
    forward, _ = check(fn, tensors(shapes))
    return left(forward), " / ".join([text for said in fusion._notes.values() for text in said])


def test_what_every_tile_would_compute_again_stays_outside():
    outside, said = left_out(lambda t, q, k, v: t(q, k.tanh() * 2, v))
    assert outside == ["mul", "tanh"] and "left before the edges (aten.mul.Tensor): 7 launches instead of 5" in said


def test_what_kernels_cannot_hold_stays_outside():
    def rotated(t, q, k, v, cos, sin):
        return t(q * cos + torch.cat([-q[..., D // 2 :], q[..., : D // 2]], -1) * sin, k, v)

    outside, said = left_out(rotated, (*QKV, (N, 1, D), (N, 1, D)))
    assert "cat" in outside and "launches instead of" in said


@pytest.mark.parametrize("large", [False, True])
def test_a_scale_of_vectors_stays_outside_of_warp_specialised_kernels(monkeypatch, large):
    """These read vectors as they lie, and run where a row reaches many others."""
    monkeypatch.setattr(launch_hopper, "unavailable", lambda device: "")
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(plan_hopper, "FEWEST", {("band", 64): (0, 0) if large else (N + 1, N + 1)})
    wide = [torch.randn(N, H, 64, dtype=torch.bfloat16) for _ in range(3)]
    fusion._notes.clear()
    graph = inference(lambda q, k, v: (tiga_attention(q * 0.3, k, v).relu(),), wide)
    said = " / ".join([text for notes in fusion._notes.values() for text in notes])
    assert left(graph.graph) == (["mul"] if large else [])
    assert ("1 works in plain kernels instead of 0" in said) is large
    assert "after the edges" in said  # the activation is work on results, which both have


def test_a_gate_goes_into_warp_specialised_kernels(monkeypatch):
    """Vectors that only the result reads are brought once the sums are done."""
    monkeypatch.setattr(launch_hopper, "unavailable", lambda device: "")
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(plan_hopper, "FEWEST", {("band", 64): (0, 0)})
    wide = [torch.randn(N, H, 64, dtype=torch.bfloat16) for _ in range(4)]
    graph = inference(lambda q, k, v, g: (tiga_attention(q, k, v) * g.sigmoid(),), wide)
    assert left(graph.graph) == []


def test_what_would_keep_more_for_backward_stays_outside():
    def fn(t, q, k, v, x, w):
        return t((q.flatten(1) @ w + x.flatten(1) @ w).view(N, H, D), k, v)

    outside, said = left_out(fn, (*QKV, U, (H * D, H * D)))
    assert outside == ["add", "mm", "mm"] and "2 tensors would be kept for backward instead of one" in said


def test_what_others_read_stays_outside_or_is_returned():
    """The scaled query is a result of its own; so is the attention before its activation."""

    def fn(t, q, k, v):
        q = q * 0.5
        out = t(q, k, v)
        return q, out, out.relu()

    outside, said = left_out(fn)
    assert outside == ["mul"] and "it is read elsewhere as well" in said


@pytest.mark.parametrize("place", ["query", "result"])
def test_random_numbers_are_not_crossed(place):
    """The same seed gives what it gives uncompiled: dropout keeps its place among the random operations."""

    def fn(q, k, v):
        q = F.dropout(q, 0.5) if place == "query" else q
        out = tiga_attention(q * 2, k, v)
        return (F.dropout(out, 0.5) if place == "result" else out).relu() + torch.rand_like(out)

    args = tensors(QKV)
    with torch.no_grad(), config.patch(fallback_random=True):
        gm = inference(lambda *a: (fn(*a),), args)
        torch.manual_seed(3)
        want = fn(*args)
        torch.manual_seed(3)
        (got,) = gm(*args)
    torch.testing.assert_close(got, want)
    assert len([n for n in gm.graph.nodes if n.op == "call_function" and stays(n)]) == 2


def test_changes_in_place_and_aliases_are_seen():
    """A field, a result and a view of it that are written to, after and before they are read."""

    def fn(t, q, k, v):
        q = q.clone()
        scaled = q.mul_(2)
        out = t(scaled, k, v)
        q.add_(1)
        first = out[:, 0]
        first.mul_(3)
        out.relu_()
        return out, first, q

    args = tensors(QKV)
    with torch.no_grad():
        gm = inference(lambda *a: fn(tiga_attention, *a), args)
        torch.testing.assert_close(list(gm(*args)), list(fn(torch_attention, *args)))
    assert len(programs(gm.graph)) == 1


def test_inputs_changed_in_place_are_changed():
    def fn(q, k, v):
        out = tiga_attention(q.mul_(2), k, v)
        k.add_(out)
        return out.relu()

    args = tensors(QKV)
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    with torch.no_grad():
        got, want = compiling([])(fn)(*mine), fn(*theirs)
    torch.testing.assert_close([got, *mine], [want, *theirs])


# Sizes, dtypes, lists of edges, several calls.


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change(dynamic):
    weight = torch.nn.Parameter(torch.rand(D))  # whose size never changes
    fn = lambda t, q, k, v, g: F.silu(t(F.rms_norm(q, (D,), weight), k, v).flatten(1)) * g
    graphs = []
    compiled = compiling(graphs, dynamic=dynamic)(lambda *a: fn(tiga_attention, *a))
    for n in (6, 9, 5):
        args = [a.requires_grad_() for a in tensors([(n, H, D)] * 3 + [(n, H * D)])]
        got, want = compiled(*args), fn(torch_attention, *args)
        weights = weights_of([want])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad(got, args, weights), grad(want, args, weights), rtol=1e-3, atol=1e-4)
    assert left(graphs[-2]) == [] and len(graphs) == (2 if dynamic else 4)


def test_16_bit_fields_and_casts():
    """Rounded where the program's results are, at least as near to float64 as the unfused model."""

    def fn(t, q, k, v, g):
        return (t(q * 0.3, k, v).float() * g).to(torch.bfloat16)

    args = [a.to(torch.bfloat16) for a in tensors((*QKV, U))]
    with torch.no_grad():
        gm = inference(lambda *a: (fn(tiga_attention, *a),), args)
        (got,), apart = gm(*args), fn(tiga_attention, *args)
        want = fn(torch_attention, *[a.double() for a in args])
    assert got.dtype == torch.bfloat16 and left(gm.graph) == []
    error = lambda x: (x.double() - want.double()).norm()
    assert error(got) <= 1.1 * error(apart)


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((F.leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


def test_a_layer_over_listed_edges():
    """GATv2's bias and activation, between two layers, over a list of edges."""
    edges = torch.stack([torch.tensor([0, 1, 2, 3, 4, 5, 0, 2]), torch.tensor([1, 2, 2, 0, 4, 1, 5, 0])])
    gat, graph = Gat(), tg.Graph.from_edge_index(edges, N, N)

    def torch_layer(x, y, att):
        src, dst = edges
        weight = ((F.leaky_relu(x[src] + y[dst], 0.2) * att).sum(-1)).exp()
        total = torch.zeros(N, H, dtype=x.dtype).index_add(0, dst, weight)[..., None]
        mixed = torch.zeros_like(x).index_add(0, dst, weight[..., None] * x[src])
        return torch.where(total > 0, mixed / torch.where(total > 0, total, 1), 0)

    def fn(layer, x, att, bias, w):
        for _ in range(2):
            h = (x @ w).view(N, H, D)
            x = F.elu(layer(h, h, att).flatten(1) + bias)
        return x

    args, graphs = [a.requires_grad_() for a in tensors(((N, H * D), (H, D), (H * D,), (H * D, H * D)))], []
    layer = lambda x, y, att: gat(graph=graph, src={"x": x}, dst={"x": y}, att=att)
    got, want = compiling(graphs)(lambda *a: fn(layer, *a))(*args), fn(torch_layer, *args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weights = weights_of([want])
    torch.testing.assert_close(grad(got, args, weights), grad(want, args, weights), rtol=1e-3, atol=1e-4)
    forward, backward = graphs
    assert left(forward) == ["mm", "mm"] and len(programs(forward)) == len(programs(backward)) == 2


def test_what_every_edge_would_compute_again_stays_outside():
    """Over listed edges a scale of the sources rides on the gather; a tanh is done once a node."""
    graph = tg.Graph.from_edge_index(torch.stack([torch.arange(N), torch.arange(N).flip(0)]), N, N)
    gat = Gat()

    def fn(x, y, att):
        return gat(graph=graph, src={"x": x}, dst={"x": y}, att=att)

    x, y, att = tensors((U, U, (H, D)))
    for before, kept in ((lambda x: x * 0.5 + 1, []), (lambda x: x.tanh(), ["tanh"])):
        torch._dynamo.reset()
        graphs = []
        with torch.no_grad():
            got = compiling(graphs)(lambda x, y, att, before=before: fn(before(x), y, att))(x, y, att)
            torch.testing.assert_close(got, fn(before(x), y, att))
        assert left(graphs[0]) == kept


class Summed(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer((src.key * dst.query).sum(-1).sigmoid()[..., None] * src.value)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 1), (torch.float32, 2)])
def test_two_applications_that_share_fields_are_one_kernel(dtype, count):
    """Over one graph, in 16 bits, where one kernel holds two sums of vectors; not where it does not."""
    summed = Summed()

    def fn(q, k, v):
        graph = tg.Graph.triangular(len(q))
        softmax = attend(program, graph, q, k, v)
        return softmax + summed(graph=graph, src={"key": k, "value": v}, dst={"query": q})

    def plain(q, k, v):
        score = torch.einsum("ihd,jhd->hij", q, k)
        return torch_attention(q, k, v) + torch.einsum("hij,jhd->ihd", score.sigmoid().tril(), v)

    args = [a.to(dtype).requires_grad_() for a in tensors(QKV)]
    forward, backward = training(lambda *a: (fn(*a),), args)
    wide = [a.detach().double().requires_grad_() for a in args]
    want = plain(*wide)
    weights = weights_of([want])
    got, gradients = run(forward, backward, [a.detach() for a in args], [w.to(dtype) for w in weights])
    within = {"rtol": 2e-2, "atol": 1e-2} if count == 1 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got[0].double(), want, **within)
    torch.testing.assert_close([g.double() for g in gradients], list(grad(want, wide, weights)), **within)
    assert len(programs(forward.graph)) == count
    if count == 1:
        assert cost(programs(forward.graph)[0]).launches == 1 and left(forward.graph) == []


def test_inductor_has_nothing_left_to_generate():
    """Real code: forward and backward of scale, attention, activation and gate are calls of the operator alone."""
    args = [a.requires_grad_() for a in tensors((*QKV, U))]

    def step():
        torch._dynamo.reset()
        out = torch.compile(lambda q, k, v, g: F.silu(tiga_attention(q * 0.5, k, v)) + g, fullgraph=True)(*args)
        return out, grad(out.sum(), args)

    with fresh_cache():
        got, (forward, backward) = run_and_get_code(step)
    want = F.silu(torch_attention(args[0] * 0.5, *args[1:3])) + args[3]
    torch.testing.assert_close(got, (want, grad(want.sum(), args)), rtol=1e-4, atol=1e-5)
    for code in (forward, backward):
        assert code.count("torch.ops.tiga.propagate.default(") == 1
    assert "cpp_fused" not in forward


def test_two_names_of_one_boundary():
    assert tg.program is tg.jit


# What is said.


def test_explain_says_what_fused_and_what_did_not():
    module = Attention()
    args = tensors(QKV)
    call = lambda q, k, v: attend(module, tg.Graph.window(len(q), 3), q * 2, k.tanh(), v, scale=0.1).relu()
    with torch.no_grad():
        inference(lambda *a: (call(*a),), args)
        attend(module, tg.Graph.window(N, 3), *args, scale=0.1)
    text = module.explain()
    said = "remark: [fusion] where such a program was compiled: "
    assert said + "before the edges: aten.mul.Tensor" in text
    assert said + "after the edges: aten.relu" in text
    assert said + "left before the edges (aten.tanh.default): 2 launches instead of 1" in text
