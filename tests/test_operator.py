"""What PyTorch sees of the operator: the backward graph, layouts, autocast, lazy Inductor hooks, memory."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch._dynamo
from programs import Attention, attend, edge_list, fields, graph_of, plain_attention
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import grad

import tiga as tg
import tiga.inductor

close = torch.testing.assert_close
propagate = torch.ops.tiga.propagate.default
ROOT = pathlib.Path(tg.__file__).parent


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


# ---- the backward is the same operator ----


def captured(fn, *args):
    """The forward and backward graphs that AOTAutograd makes of fn."""
    graphs = {}

    def keep(name):
        def compiler(module, example_inputs):
            graphs[name] = module.graph
            return module.forward

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    torch.compile(fn, backend=backend, fullgraph=True)(*args).square().sum().backward()
    return graphs


def float_sizes(graph):
    """Elements of every floating tensor that a graph holds, by node."""
    found = {}
    for node in graph.nodes:
        values = node.meta.get("val")
        for v in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(v, torch.Tensor) and v.is_floating_point():
                found[node.name] = max(found.get(node.name, 0), v.numel())
    return found


@pytest.mark.parametrize("kind", ["dense", "csr"])
def test_the_backward_graph_holds_only_the_operator_and_node_sized_work(kind):
    n, heads, width = 64, 2, 4
    graph = tg.Graph.dense(n) if kind == "dense" else tg.Graph.from_edge_index(edge_list(3000, n), num_src=n, num_dst=n)
    program = Attention()
    graphs = captured(lambda g, q, k, v: attend(program, g, q, k, v), graph, *fields(n, heads, width, grad=True))
    for name, traced in graphs.items():
        calls = [node for node in traced.nodes if node.op == "call_function"]
        assert [node.target for node in calls].count(propagate) == 1, name
        largest = max(float_sizes(traced).values())
        assert n * heads * width <= largest <= 2 * n * heads * width < graph.num_edges, (name, float_sizes(traced))
    program_text = next(node.args[0] for node in graphs["backward"].nodes if node.target is propagate)
    assert program_text.count("reduce src sum") == 2 and program_text.count("reduce dst sum") == 1


# ---- layouts ----


def laid_out(how):
    """Query, key and value of one content in a layout of its own."""
    q, k, v = fields(6, 2, 4)
    makers = {
        "contiguous": lambda t: t.clone(),
        "permuted": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": lambda t: torch.stack([t, t + 1], -1)[..., 0],
        "repeated": lambda t: t[:, :1, :1].expand(6, 2, 4),
    }
    return [makers[how](t) for t in (q, k, v)]


LAYOUTS = ("contiguous", "permuted", "transposed", "sliced", "repeated")


@pytest.mark.parametrize("how", LAYOUTS)
def test_opcheck_whatever_the_strides(how):
    q, k, v = laid_out(how)
    call = Attention().lower(graph_of("csr"), src={"key": k, "value": v}, dst={"query": q})
    moving = [t.requires_grad_() if t.is_floating_point() else t for t in call.tensors]
    torch.library.opcheck(propagate, (call.program, moving, call.ints, call.scalars))


def test_outputs_are_contiguous_eager_and_compiled():
    """Five layouts in one compiled region: outputs of the same strides and values, eager, aot_eager and Inductor."""
    program, graph = Attention(), graph_of("triangular")
    groups = [laid_out(how) for how in LAYOUTS]
    leaves = [t.detach().requires_grad_() for group in groups for t in group]
    assert len({t.stride() for t in leaves}) == len(LAYOUTS)

    def call(*leaves):
        return [attend(program, graph, *leaves[3 * i : 3 * i + 3]) for i in range(len(LAYOUTS))]

    def outputs_and_gradients(fn):
        outputs = fn(*leaves)
        return [*outputs, *grad(sum((o * o.detach()).sum() for o in outputs), leaves)]

    eager = outputs_and_gradients(call)
    assert all(o.is_contiguous() for o in eager[: len(LAYOUTS)])
    for i in range(len(LAYOUTS)):
        close(eager[i], plain_attention(graph.to_mask(), *leaves[3 * i : 3 * i + 3]))
    for backend in ("aot_eager", "inductor"):
        got = outputs_and_gradients(torch.compile(call, backend=backend, fullgraph=True))
        assert [t.stride() for t in got[: len(LAYOUTS)]] == [t.stride() for t in eager[: len(LAYOUTS)]], backend
        close(got, eager)


# ---- autocast ----


class Total(tg.MessagePassing):
    reducer = tg.sum()

    def __init__(self, name):
        super().__init__()
        self.name = name

    def edge(self, src, dst, edge):
        return self.reducer(getattr(edge, self.name) if self.name != "x" else src.x)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_autocast(compile_it):
    """Operands of inner products and reduced values are cast; positions, what they give, and float64 are not."""
    q, k, v = fields(16, grad=True)
    program, triangle = Attention(), tg.Graph.triangular(16)
    x, one, wide = torch.randn(12, 3), torch.ones(12, 1), torch.randn(16, 4, dtype=torch.float64)
    ball, totals = tg.Graph.radius(x, 1.5), {name: Total(name) for name in ("displacement", "distance", "x")}

    def attention(q, k, v):
        return attend(program, triangle, q.to(torch.bfloat16), k, v)

    def exact(x, wide):
        return [totals[name](graph=ball, src={"one": one}) for name in ("displacement", "distance")] + [
            totals["x"](graph=triangle, src={"x": wide})
        ]

    def narrow(x):
        return totals["x"](graph=triangle, src={"x": x})

    warnings.simplefilter("ignore")
    before = exact(x, wide)
    run = (lambda fn: torch.compile(fn, backend="aot_eager")) if compile_it else (lambda fn: fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, after, summed = run(attention)(q, k, v), run(exact)(x, wide), run(narrow)(wide.float())
    assert out.dtype == summed.dtype == torch.bfloat16
    close(out.float(), plain_attention(triangle.to_mask(), q, k, v), rtol=3e-2, atol=3e-2)
    assert all(g.dtype == torch.float32 for g in grad(out.float().sum(), (q, k, v)))
    assert [t.dtype for t in after] == [torch.float32, torch.float32, torch.float64]
    close(after, before, rtol=0, atol=0)


# ---- Inductor's hooks ----


def test_hooks_run_once_and_only_for_inductor(monkeypatch):
    ran = []
    monkeypatch.setattr(tiga.inductor, "HOOKS", (lambda: ran.append(1),))
    monkeypatch.setattr(tiga.inductor, "_installed", False)
    program = Attention()
    import torch._inductor.compile_fx

    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch._inductor.compile_fx")
        torch.compile(lambda q, k, v: attend(program, graph_of("dense"), q, k, v), backend="aot_eager")(*fields())
        assert ran == []
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(lambda q, k, v: attend(program, graph_of("dense"), q, k, v), backend="aot_eager")(*fields())
    assert ran == [1]


def test_a_missing_hook_warns_once_and_results_stay_right(monkeypatch):
    def missing():
        return torch._inductor.no_such_hook

    monkeypatch.setattr(tiga.inductor, "HOOKS", (missing,))
    monkeypatch.setattr(tiga.inductor, "_installed", False)
    program, (q, k, v) = Attention(), fields()
    want = plain_attention(torch.ones(6, 6).bool(), q, k, v)
    fn = torch.compile(lambda q, k, v: attend(program, tg.Graph.dense(q.shape[0]), q, k, v), fullgraph=True)
    with pytest.warns(UserWarning, match="lacks a hook .*no_such_hook"):
        close(fn(q, k, v), want)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="tiga")
        close(fn(q, k, v), want)


WITHOUT_INDUCTOR = textwrap.dedent("""
    import importlib.util, sys
    import torch
    import tiga as tg
    assert tg.__file__.startswith(sys.argv[1]) and importlib.util.find_spec("tiga.inductor") is None

    class Attention(tg.MessagePassing):
        reducer = tg.online_softmax()
        def edge(self, src, dst, edge, scale):
            return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)

    program = Attention()
    q, k, v = (torch.randn(5, 2, 4, requires_grad=True) for _ in range(3))
    graph, grad = tg.Graph.triangular(5), torch.autograd.grad
    call = lambda q, k, v: program(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=0.5)
    heads = [t.transpose(0, 1) for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.5).transpose(0, 1)
    wanted = grad(want.square().sum(), (q, k, v), retain_graph=True)
    for fn in (call, torch.compile(call, fullgraph=True)):
        torch.testing.assert_close(fn(q, k, v), want)
        torch.testing.assert_close(grad(fn(q, k, v).square().sum(), (q, k, v)), wanted, rtol=1e-4, atol=1e-5)
    print("right without tiga.inductor")
""")


def child(script, *args, path=ROOT.parent):
    """Standard output of a fresh process that finds tiga in `path`."""
    # an editable install has a finder of its own, which would find what was deleted
    editable = "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]"
    prelude = f"import sys; sys.path.insert(0, {str(path)!r}); {editable}\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + script, *args], capture_output=True, text=True, timeout=600, cwd=path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_inductor_folder_can_be_deleted(tmp_path):
    shutil.copytree(ROOT, tmp_path / "tiga", ignore=shutil.ignore_patterns("inductor", "__pycache__"))
    assert "right without tiga.inductor" in child(WITHOUT_INDUCTOR, str(tmp_path), path=tmp_path)


# ---- memory ----

NODES, BOUND = 8192, 256  # scores of one head alone would be 256 MiB, with their gradients 512 MiB

MEMORY = textwrap.dedent("""
    import os
    os.environ["TIGA_CPP"] = WAY
    import torch
    import tiga as tg

    class Attention(tg.MessagePassing):
        reducer = tg.online_softmax()
        def edge(self, src, dst, edge, scale):
            score = (src.key * dst.query).sum(-1) * scale
            return self.reducer(torch.tanh(score / CAP) * CAP if CAP else score, src.value)

    def peak():
        # not getrusage, which starts from what the parent process held
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

    def step(n):
        q, k, v = (torch.randn(n, HEADS, 64, requires_grad=True) for _ in range(3))
        weight, before = torch.randn(n, HEADS, 64), peak()
        out = Attention()(graph=tg.Graph.dense(n), src={"key": k, "value": v}, dst={"query": q}, scale=0.125)
        forward = peak()
        torch.autograd.grad(out, (q, k, v), weight)
        return forward - before, peak() - before

    step(64)
    print("forward %.0f MiB, forward and backward %.0f MiB" % step(NODES))
""")


@pytest.mark.parametrize(
    "heads, cap, way",
    [(2, None, "never"), (1, 30.0, "never"), (1, 30.0, "always")],
    ids=["plain", "softcap", "softcap in C++"],
)
def test_extra_memory(heads, cap, way, capsys):
    """Beyond the operands, everything counted: results, gradients and what is alive while edges are visited."""
    out = child(f"HEADS, CAP, WAY, NODES = {heads}, {cap}, {way!r}, {NODES}\n{MEMORY}")
    with capsys.disabled():
        print(f"\n{NODES} x {NODES}, {heads} heads x 64, float32, cap={cap}, C++ {way}: {out.strip()} more")
    assert 0 < float(out.split()[-2]) <= BOUND
