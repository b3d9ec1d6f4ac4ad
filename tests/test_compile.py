"""torch.compile: one graph, few frames, nothing stale; checkpoints, inference mode, the user's own Inductor passes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from programs import (
    INSIDE,
    KINDS,
    Attention,
    attend,
    edge_list,
    fields,
    graph_of,
    graph_tensors,
    made_inside,
    mask_inside,
    plain_attention,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import grad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tiga as tg

SCALES = (0.5, 0.25, 2.0)
SIZES = (5, 7, 17, 2, 1, 0)
EDGES = (17, 30, 2, 1, 0, 41)
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(fn, **options):
    """The function compiled as one graph, and the counter of its frames."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, backend=counter, fullgraph=True, **options), counter


# ---- frames ----


def frames(sizes, scales, mark=False, **options):
    """Frames compiled so far after each call, a row a size; every result is compared with plain torch."""
    program = Attention()
    fn, counter = compiled(
        lambda q, k, v, s: attend(program, tg.Graph.triangular(q.shape[0]), q, k, v, scale=s), **options
    )
    rows = {}
    for n in sizes:
        rows[n] = []
        for scale in scales:
            q, k, v = fields(n)
            for t in (q, k, v) if mark and n > 1 else ():
                torch._dynamo.mark_dynamic(t, 0)
            close(fn(q, k, v, scale), plain_attention(torch.ones(n, n).tril().bool(), q, k, v, scale))
            rows[n].append(counter.frame_count)
    return rows


@pytest.mark.parametrize(
    ("options", "first", "number"),
    [({}, 2, 1), ({"mark": True}, 1, 1), ({"dynamic": True}, 1, 0)],
    ids=["default", "mark_dynamic", "dynamic=True"],
)
def test_frames(options, first, number, capsys):
    """`first` frames serve all sizes from 2 on; exactly 1 and 0 cost one each; a changing scale `number` in all."""
    rows = frames(SIZES, SCALES, **options)
    with capsys.disabled():
        print(f"\nframes after each call, {options or 'default'}: scales {SCALES}")
        for n, row in rows.items():
            print(f"  N {n:>2}  {row}")
    assert rows[5][-1] <= 1 + number
    assert rows[2][-1] <= first + number
    assert rows[1][-1] <= first + number + 1
    assert rows[0][-1] <= first + number + 2


def test_frames_of_sizes_alone():
    assert frames((5, 7, 17, 2), SCALES[:1])[2][-1] == 2
    torch._dynamo.reset()
    assert frames((5, 7, 17, 2), SCALES[:1], mark=True)[2][-1] == 1


def test_frames_of_numbers_alone():
    assert frames((5,), (0.5, 0.25, 2.0, 3.0, 0.125))[5] == [1, 2, 2, 2, 2]
    torch._dynamo.reset()
    assert frames((5,), (0.5, 0.25, 2.0, 3.0, 0.125), dynamic=True)[5][-1] == 1


class Weighted(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(edge.weight * src.x)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("listed", ["from_edge_index", "from_csr"])
def test_frames_of_edge_counts(listed, dynamic, capsys):
    program, n = Weighted(), 6
    fn, counter = compiled(lambda g, w, x: program(graph=g, src={"x": x}, edge={"weight": w}), dynamic=dynamic)
    rows = {}
    for count in EDGES:
        src, dst = edge_list(count)
        graph = tg.Graph.from_edge_index(torch.stack([src, dst]), num_src=n, num_dst=n)
        if listed == "from_csr":
            order = dst.argsort(stable=True)
            src, dst = src[order], dst[order]
            graph = tg.Graph.from_csr(graph.tensors[0], src, num_src=n, num_dst=n)
        w, x = torch.randn(count, 3), torch.randn(n, 3)
        close(fn(graph, w, x), torch.zeros(n, 3).index_add(0, dst, w * x[src]))
        rows[count] = counter.frame_count
    with capsys.disabled():
        print(f"\nframes after each number of edges, {listed}, dynamic={dynamic}: {rows}")
    first = 1 if dynamic else 2
    # destinations that ascend already need no numbers: a graph of two tensors, which is a frame of its own
    assert rows[2] <= first and rows[1] <= first + 1 and rows[0] <= first + 2 and rows[41] == rows[0]


# ---- what the user changes is seen ----

SIGN = 1.0


class Switched(tg.MessagePassing):
    reducer = tg.online_softmax()

    def __init__(self):
        super().__init__()
        self.flag = False
        self.temperature = 1.0
        self.layer = torch.nn.Linear(4, 4)

    def edge(self, src, dst, edge):
        score = (src.key * dst.query).sum(-1) * (SIGN * self.temperature)
        if self.flag:
            score = torch.relu(score)
        return self.reducer(score, self.layer(src.value))


def test_changes_of_attributes_globals_layers_and_parameters_are_seen(monkeypatch):
    program, (q, k, v) = Switched(), fields()
    mask = graph_of("triangular").to_mask()
    fn, _ = compiled(lambda q, k, v: attend(program, tg.Graph.triangular(q.shape[0]), q, k, v))

    def check():
        score = torch.einsum("ihd,jhd->hij", q, k) * (SIGN * program.temperature)
        weight = (score.relu() if program.flag else score).masked_fill(~mask, -torch.inf).softmax(-1)
        want = torch.einsum("hij,jhd->ihd", weight, program.layer(v))
        close(fn(q, k, v), want)
        return want

    seen = [check()]
    program.flag = True
    seen.append(check())
    program.temperature = 3.0
    seen.append(check())
    monkeypatch.setitem(globals(), "SIGN", -1.0)
    seen.append(check())
    program.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    seen.append(check())
    with torch.no_grad():
        program.layer[0].weight.mul_(2)
    seen.append(check())
    program.flag = False
    seen.append(check())
    assert all(not torch.allclose(a, b) for a, b in zip(seen, seen[1:]))


class Joined(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        both = torch.cat([src.x, dst.x], -1)
        return self.reducer(
            both.relu()
            + torch.stack([src.x, dst.x], dim=-1).flatten(-2) * torch.maximum(src.x, dst.x).amax(-1, keepdim=True)
        )


def test_values_in_lists_are_seen():
    program, x = Joined(), torch.randn(5, 3)

    def call(x):
        return program(graph=tg.Graph.dense(5), src={"x": x}, dst={"x": x})

    src, dst = x[None].expand(5, 5, 3), x[:, None].expand(5, 5, 3)
    largest = torch.maximum(src, dst).amax(-1, keepdim=True)
    want = (torch.cat([src, dst], -1).relu() + torch.stack([src, dst], -1).flatten(-2) * largest).sum(1)
    close(call(x), want)
    close(compiled(call)[0](x), want)


def test_every_scale_forward_and_backward():
    program = Attention()
    fn, _ = compiled(lambda q, k, v, s: attend(program, tg.Graph.triangular(q.shape[0]), q, k, v, scale=s))
    q, k, v = fields(grad=True)
    mask = graph_of("triangular").to_mask()
    for scale in (0.5, 1.0, 2.0, 4.0, 0.25, 1.0, 3.0):
        got, want = fn(q, k, v, scale), plain_attention(mask, q, k, v, scale)
        close(got, want)
        close(grad(got.square().sum(), (q, k, v)), grad(want.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-5)


# ---- graphs ----


class Stored(torch.nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.attention = graph, Attention()

    def forward(self, q, k, v):
        return attend(self.attention, self.graph, q, k, v)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_passed_in_and_stored(kind):
    graph, program = graph_of(kind), Attention()
    q, k, v = fields(grad=True)
    want = plain_attention(graph.to_mask(), q, k, v)
    wanted = grad(want.square().sum(), (q, k, v))
    for fn, args in ((lambda g, q, k, v: attend(program, g, q, k, v), (graph, q, k, v)), (Stored(graph), (q, k, v))):
        got = compiled(fn)[0](*args)
        close(got, want)
        close(grad(got.square().sum(), (q, k, v)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", INSIDE)
def test_graphs_made_inside(kind):
    program, tensors = Attention(), graph_tensors(6, 11)
    q, k, v = fields(grad=True)
    fn, _ = compiled(lambda q, k, v, *tensors: attend(program, made_inside(kind, q.shape[0], *tensors), q, k, v))
    got, want = fn(q, k, v, *tensors), plain_attention(mask_inside(kind, 6, tensors), q, k, v)
    close(got, want)
    close(grad(got.square().sum(), (q, k, v)), grad(want.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-5)


class Distances(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(torch.exp(-edge.distance) * src.charge)


def test_radius_graph_made_inside():
    program, moved = Distances(), torch.randn(9, 3)

    def energy(x, charge):
        return (program(graph=tg.Graph.radius(x, 1.5), src={"charge": charge}) * charge).sum()

    def plain(x, charge):
        distance = (x[:, None] - x[None] + torch.eye(len(x))[..., None] * 100).norm(dim=-1)
        return torch.where(distance <= 1.5, torch.exp(-distance) * charge[:, None] * charge[None], 0).sum()

    fn, counter = compiled(energy)
    for n in (9, 7, 8):
        x, charge = moved[:n].clone().requires_grad_(), torch.randn(n)
        close(fn(x, charge), plain(x, charge))
        close(grad(fn(x, charge), x), grad(plain(x, charge), x))
    assert counter.frame_count <= 2


def test_a_graph_of_another_size_raises_the_same_text():
    program, graph = Attention(), tg.Graph.triangular(8)
    fn = torch.compile(lambda q, k, v: attend(program, graph, q, k, v), backend="aot_eager")
    with pytest.raises(tg.TigaError, match="'key' has 6 rows, but the graph has 8 sources") as eager:
        attend(program, graph, *fields())
    with pytest.raises(Exception, match="'key' has 6 rows, but the graph has 8 sources"):
        fn(*fields())
    assert "Attention" in str(eager.value)


# ---- derivatives, numbers and dtypes ----


def test_gradients_at_sizes_around_tiles():
    program = Attention()
    fn, _ = compiled(lambda q, k, v: attend(program, tg.Graph.triangular(q.shape[0]), q, k, v))
    for n in (17, 31, 33, 129, 3, 2, 1):
        q, k, v = fields(n, grad=True)
        want = plain_attention(torch.ones(n, n).tril().bool(), q, k, v)
        close(grad(fn(q, k, v).square().sum(), (q, k, v)), grad(want.square().sum(), (q, k, v)), rtol=2e-5, atol=2e-5)


def test_sliced_transposed_fields_after_whole_ones():
    """The gradients of what the slice cut off are 0, those of the rest the same as on copies."""
    program = Attention()
    fn, _ = compiled(lambda q, k, v: attend(program, tg.Graph.dense(q.shape[0], k.shape[0]), q, k, v))
    (q,) = [torch.randn(12, 2, 4, requires_grad=True)]
    keys, values = (torch.randn(2, 12, 4, requires_grad=True) for _ in range(2))
    fn(q, keys.transpose(0, 1), values.transpose(0, 1))
    k, v = keys[:, :-5].transpose(0, 1), values[:, :-5].transpose(0, 1)
    got = grad(fn(q, k, v).square().sum(), (q, keys, values))
    want = grad(plain_attention(torch.ones(12, 7).bool(), q, k, v).square().sum(), (q, keys, values))
    close(got, want, rtol=1e-4, atol=1e-5)
    assert not got[1][:, -5:].any() and not got[2][:, -5:].any()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float64, 1e-12)]
)
def test_a_third_is_the_same_number_eager_and_compiled(dtype, tolerance):
    program, graph = Attention(), tg.Graph.triangular(6)
    q, k, v = fields(dtype=dtype)
    eager = attend(program, graph, q, k, v, scale=1 / 3)
    got = compiled(lambda q, k, v: attend(program, graph, q, k, v, scale=1 / 3))[0](q, k, v)
    assert got.dtype == eager.dtype == dtype
    close(got, eager, rtol=tolerance, atol=tolerance)


class Slopes(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge, slope):
        return self.reducer((src.position - dst.position) * slope)


@pytest.mark.parametrize(
    ("slope", "dtype"), [(0.5, torch.float32), (2, torch.int64), (torch.tensor([0.5, 0.25]), torch.float32)]
)
def test_integers_times_numbers_keep_torch_dtypes(slope, dtype):
    program, position = Slopes(), torch.arange(5) * 3

    def fn(position, slope):
        return program(
            graph=tg.Graph.triangular(5), src={"position": position}, dst={"position": position}, slope=slope
        )

    difference = (position[None] - position[:, None]).tril()
    want = (difference[..., None] * slope).sum(1)
    want = want if isinstance(slope, torch.Tensor) else want[:, 0]
    for got in (fn(position, slope), compiled(fn)[0](position, slope)):
        assert got.dtype == dtype
        close(got, want.to(dtype))


class Squares(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        d = src.x - dst.x
        return self.reducer((d * d).sum(-1))


def second(energy, x):
    (first,) = grad(energy(x), x, create_graph=True)
    return grad(first.square().sum(), x)[0]


def test_a_second_derivative_through_compiled_code_raises_and_inside_it_is_right():
    program, x = Squares(), torch.randn(5, 3, requires_grad=True)
    mask = tg.Graph.window(5, 1, 1).to_mask()

    def energy(x):
        return program(graph=tg.Graph.window(5, 1, 1), src={"x": x}, dst={"x": x}).square().sum()

    def plain(x):
        return ((x[None] - x[:, None]).square().sum(-1) * mask).sum(1).square().sum()

    want = second(plain, x)
    close(second(energy, x), want)
    with pytest.raises(RuntimeError, match="(?i)double backward|does not require grad"):
        second(compiled(energy)[0], x)
    inside, _ = compiled(lambda x: torch.func.grad(energy)(x).square().sum())
    close(grad(inside(x), x)[0], want)


# ---- checkpointing, compiled autograd, inference ----


def layered(program, weight, q, k, v):
    out = attend(program, tg.Graph.triangular(q.shape[0]), q @ weight, k @ weight, v)
    return attend(program, tg.Graph.triangular(q.shape[0]), out.relu(), k, v)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant, compile_it):
    program, weight = Attention(), torch.randn(4, 4, requires_grad=True)
    inputs = (weight, *fields(grad=True))
    body = functools.partial(layered, program)
    wanted = grad(body(*inputs).square().sum(), inputs)
    fn = functools.partial(checkpoint, body, use_reentrant=reentrant)
    if compile_it:
        fn = torch.compile(fn, backend="aot_eager", fullgraph=not reentrant)
    fn(*inputs).square().sum().backward()
    close([t.grad for t in inputs], list(wanted))


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_selective_checkpoint_keeps_the_operator(compile_it):
    """The operator's results are kept, what surrounds it is computed again: gradients are the same."""
    program, weight = Attention(), torch.randn(4, 4, requires_grad=True)
    inputs = (weight, *fields(grad=True))
    body = functools.partial(layered, program)
    wanted = grad(body(*inputs).square().sum(), inputs)

    def policy(ctx, op, *args, **kwargs):
        kept = op == torch.ops.tiga.propagate.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    fn = functools.partial(checkpoint, body, use_reentrant=False, context_fn=contexts)
    if compile_it:
        fn = torch.compile(fn, backend="aot_eager", fullgraph=True)
    close(grad(fn(*inputs).square().sum(), inputs), wanted)


def test_compiled_autograd():
    program, inputs = Attention(), fields(grad=True)
    want = grad(plain_attention(graph_of("triangular").to_mask(), *inputs).square().sum(), inputs)
    fn, _ = compiled(lambda q, k, v: attend(program, tg.Graph.triangular(q.shape[0]), q, k, v).square().sum())
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        fn(*inputs).backward()
    close([t.grad for t in inputs], list(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(mode):
    program, (q, k, v) = Attention(), fields()
    weight = torch.nn.Linear(4, 4)
    want = plain_attention(graph_of("triangular").to_mask(), weight(q), k, v)

    def call(q, k, v):
        return attend(program, tg.Graph.triangular(q.shape[0]), weight(q), k, v)

    fn, _ = compiled(call)
    with mode():
        for got in (call(q, k, v), fn(q, k, v)):
            assert not got.requires_grad
            close(got, want)


# ---- Inductor ----


def test_the_users_inductor_passes_stay_and_run():
    """Every pass slot that the user fills still holds the user's pass after tiga has compiled, and each has run."""
    config, ran = torch._inductor.config, []
    slots = (
        "pre_grad_custom_pass",
        "joint_custom_pre_pass",
        "joint_custom_post_pass",
        "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass",
    )

    class Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __init__(self, slot):
            self.slot = slot

        def __call__(self, graph):
            ran.append(self.slot)

        def uuid(self):
            return None

    passes = {slot: Pass(slot) for slot in slots}
    program, (q, k, v) = Attention(), fields(grad=True)
    before = {slot: getattr(config, slot) for slot in slots}
    with config.patch(passes), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn = torch.compile(
            lambda q, k, v: attend(program, tg.Graph.triangular(q.shape[0]), q * 2, k, v).relu(), fullgraph=True
        )
        got = fn(q, k, v)
        close(got, plain_attention(graph_of("triangular").to_mask(), q * 2, k, v).relu())
        got.sum().backward()
        assert all(getattr(config, slot) is p for slot, p in passes.items())
    assert set(ran) == set(slots)
    assert {slot: getattr(config, slot) for slot in slots} == before


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_forward_and_backward(dynamic):
    """What surrounds the operator is compiled by Inductor; the numbers are those of plain torch, for every scale."""
    program = Attention()

    def call(q, k, v, scale):
        return attend(program, tg.Graph.triangular(q.shape[0]), q * 2, k, v, scale=scale).relu()

    fn = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for n, scale in ((6, 1 / 3), (9, 0.5)) if dynamic else ((6, 1 / 3),):
        q, k, v = fields(n, grad=True)
        want = plain_attention(torch.ones(n, n).tril().bool(), q * 2, k, v, scale).relu()
        got = fn(q, k, v, scale)
        close(got, want)
        close(grad(got.square().sum(), (q, k, v)), grad(want.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-5)
