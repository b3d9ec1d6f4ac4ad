"""Programs as C++ on the CPU: CASES against the oracle, gradients and twice; what stays with torch, and why."""

import oracle
import pytest
import test_primitives
import torch
from cases import CASES, Capped, Sum, tensors
from programs import Attention
from test_cases import assert_accurate, assert_same, gradients, moved
from torch.nn.functional import leaky_relu

import tiga as tg
from tiga import passes
from tiga.codegen import launch_cpp
from tiga.codegen.lines_cpp import TEXTS
from tiga.codegen.rows import Refused
from tiga.ops import cpp
from tiga.primitives import PRIMITIVES, _hash_uniform

propagate = torch.ops.tiga.propagate.default
REFUSED = {"what a user's reducer leaves at every edge, for its gradient", "a user's reducer"}


@pytest.fixture(autouse=True, scope="module")
def always(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGA_CPP", "always")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


@pytest.fixture
def reasons(monkeypatch):
    found = []
    monkeypatch.setattr(passes, "kept", found.append)
    return found


# Every case and every primitive, at no optimisation: hundreds of kernels in one library.


def everything(outputs, inputs, again):
    """Outputs, gradients and, where asked, gradients of those."""
    known = [torch.where(x.isfinite(), x, 0.0) for x in outputs]
    return [*outputs, *both_orders(known, inputs, again)]


def both_orders(outputs, inputs, again=False):
    weights = [torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape).cos() for x in outputs]
    first = torch.autograd.grad(outputs, inputs, weights, create_graph=again, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, first)]
    return [*found, *both_orders([g.sin() for g in found if g.requires_grad], inputs)] if again else found


ONCE = {(case.module, case.graph.kind == "csr"): case for case in reversed(CASES) if case.small}
TWICE = list(ONCE.values())  # cases whose gradients have gradients here


def run(case):
    module, arguments = moved(case, torch.float64)
    return everything(case.run(module, arguments), tensors(arguments, module), case in TWICE)


LISTED = [torch.tensor([0, 3, 6]), torch.tensor([0, 1, 2, 0, 1, 2])]  # the pairs of a dense relation, as a list


def primitive(name, kind):
    text, relation = test_primitives.program(name), []
    if kind == "csr":
        text, relation = text.replace("relation dense", "relation csr 2"), LISTED
    with torch.no_grad():
        return propagate(text, [*test_primitives.arguments(name), *relation], [2, 3], [])[0]


@pytest.fixture(scope="module")
def library():
    """Each runs once on torch, to say which texts it would load."""
    texts: dict[str, None] = {}

    def noted(new):
        texts.update(dict.fromkeys(new))
        raise Refused("only noted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_cpp, "BASIC", ("-O0", *launch_cpp.BASIC[1:]))
        with pytest.MonkeyPatch.context() as first:
            first.setattr(launch_cpp, "load", noted)
            for case in CASES:
                run(case)
            for name in test_primitives.ROWS:
                primitive(name, "dense"), primitive(name, "csr")
        launch_cpp.load(tuple(texts))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, library, reasons):
    before = passes.COUNTS["launch-cpp"]
    got = run(case)
    module, arguments = moved(case, torch.float64)
    assert_same(got, everything(case.oracle(module, arguments), tensors(arguments, module), case in TWICE))
    assert set(reasons) <= REFUSED and ("user's" in case.name or not reasons)
    assert passes.COUNTS["launch-cpp"] > before or reasons


@pytest.mark.parametrize("kind", ["dense", "csr"])
@pytest.mark.parametrize("name", test_primitives.ROWS)
def test_primitive(name, kind, library, reasons):
    got = primitive(name, kind)
    want = test_primitives.meaning(name)(*[x.detach() for x in test_primitives.arguments(name)])
    test_primitives.same(got, want)
    assert not reasons


def test_every_primitive_has_a_text():
    assert set(TEXTS) == {name for name, row in PRIMITIVES.items() if row.elementwise}


# Kernels as they are compiled for use.


class Gat(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, att):
        return self.reducer((leaky_relu(src.x + dst.x, 0.2) * att).sum(-1), src.x)


def hub(n=300):
    """Row 5 has many edges, every third row none."""
    draw = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, n, (2, 8 * n), generator=draw)
    dst = torch.where(torch.rand(8 * n, generator=draw) < 0.3, 5, dst // 3 * 3 + 1)
    return tg.Graph.from_edge_index(torch.stack([src, dst]), n, n), src, dst


def listed_gat(dtype):
    graph, src, dst = hub()
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(300, 4, 32, generator=draw).to(dtype).requires_grad_() for _ in range(2))
    att = torch.randn(4, 32, generator=draw).to(dtype).requires_grad_()
    call = dict(src={"x": x}, dst={"x": y}, att=att)
    return Gat(), graph, oracle.Edges(src, dst, 300, 300), call, [x, y, att]


def windowed(dtype):
    """Two intervals a row, more rows than a tile, features that are no multiple of a vector."""
    n, row = 150, torch.arange(150)
    start = (row - 90).clamp_min(3)
    graph = tg.Graph.intervals(row * 0, row * 0 + 3, n, start, row + 1)
    mask = (row[None] < 3) | ((row[None] >= start[:, None]) & (row[None] <= row[:, None]))
    dst, src = mask.nonzero().unbind(1)
    draw = torch.Generator().manual_seed(1)
    made = [torch.randn(n, 2, size, generator=draw).to(dtype).requires_grad_() for size in (36, 36, 40)]
    call = dict(src={"key": made[0], "value": made[2]}, dst={"query": made[1]}, scale=0.2)
    return Capped(), graph, oracle.Edges(src, dst, n, n), call, made


@pytest.mark.parametrize("make", [listed_gat, windowed])
def test_error_is_that_of_plain_torch(make, reasons):
    found = []
    for dtype in (torch.float32, torch.float32, torch.float64):
        module, graph, edges, call, inputs = make(dtype)
        uniform = {k: v for k, v in call.items() if k not in ("src", "dst")}
        if not found:
            outputs = [module(graph=graph, **call)]
        else:
            outputs = oracle.message_passing(module, edges, ("dst",), call["src"], call["dst"], {}, uniform)
        grads = gradients(outputs, inputs)
        found.append([*outputs, torch.cat([g.flatten() for g in grads])[None]])
    assert not reasons
    for x, y, z in zip(*found):
        assert_accurate(x.detach(), y.detach(), z.detach())


@pytest.mark.parametrize("make", [listed_gat, windowed])
def test_results_repeat_whatever_the_threads(make):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            module, graph, _, call, inputs = make(torch.float32)
            out = module(graph=graph, **call)
            found.append([out, *gradients([out], inputs)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_pairs_that_are_no_edges_let_nothing_through(bad):
    """Row 140 receives from 0, 1, 2 and 50 .. 140: nobody else meets what is wrong with it."""
    found = []
    for value in (1.0, bad):
        module, graph, _, call, inputs = windowed(torch.float32)
        with torch.no_grad():
            call["dst"]["query"][140] = value
        out = module(graph=graph, **call)
        found.append([out, *torch.autograd.grad(out.sum(), inputs)])
    (want, *grads), (out, *bad_grads) = found
    others = torch.arange(150) != 140
    assert torch.equal(out[others], want[others]) and out[140].isnan().all()
    assert torch.equal(bad_grads[1][others], grads[1][others])  # of the queries
    unreached = [*range(3, 50), *range(141, 150)]
    for x, y in ((bad_grads[0], grads[0]), (bad_grads[2], grads[2])):
        assert torch.equal(x[unreached], y[unreached]) and x[50:141].isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_sources_that_are_not_reached_may_hold_anything(bad):
    found = []
    for value in (1.0, bad):
        module, graph, _, call, _ = windowed(torch.float32)
        with torch.no_grad():
            call["src"]["key"][140], call["src"]["value"][140] = value, value
        found.append(module(graph=graph, **call))
    assert torch.equal(found[1][:140], found[0][:140]) and found[1][140:].isnan().all()


def test_functions_are_within_two_ulp():
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30, -1e-30, 88.72, -103.9, 709.78, -745.0])
        x = torch.cat([torch.randn(4000, generator=draw, dtype=torch.float64) * s for s in (0.1, 1, 20, 300)])
        x = torch.cat([x, ends.double()]).to(dtype)
        lines = ["%0 = exp edge.x", "%1 = tanh edge.x", "%2 = sigmoid edge.x", "return %0 %1 %2"]
        kind = {torch.float32: "f32", torch.float64: "f64"}[dtype]
        text = "\n".join(["tiga/1 relation dense", f"operand 0 edge x {kind} []", *lines])
        found = propagate(text, [x], [1, len(x)], [])
        for got, meaning in zip(found, (torch.exp, torch.tanh, torch.sigmoid)):
            want = meaning(x.double())
            assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.to(dtype).isinf())
            some, tiny = want.to(dtype).isfinite(), 2 * torch.finfo(dtype).smallest_normal
            error = (got.double() - want)[some].abs()
            assert (error <= 2 * torch.finfo(dtype).eps * want[some].abs() + tiny).all(), (meaning, dtype)


def test_random_numbers_are_those_of_torch():
    text = "\n".join(
        [
            "tiga/1 relation dense",
            "operand 0 shared seed i64 []",
            "operand 1 edge x f32 [*]",
            "%0 = rand shared.seed edge.x",
            "return %0",
        ]
    )
    seed, x = torch.tensor(1 << 40), torch.zeros(15, 4)
    (out,) = propagate(text, [seed, x], [3, 5], [])
    assert torch.equal(out, _hash_uniform(seed, torch.arange(15)[:, None], torch.arange(4)))


def test_entries_outside_the_graph_are_no_edges():
    x, rowptr, col = torch.randn(4, 3), torch.tensor([0, 3, 3, 5]), torch.tensor([0, 9, 1, -1, 2])
    call = Sum().lower(tg.Graph.from_csr(rowptr, col.clamp(0, 3), 4), src={"x": x})
    (out,) = propagate(call.program, [*call.tensors[:-1], col], call.ints, call.scalars)
    torch.testing.assert_close(out, torch.stack([x[0] + x[1], torch.zeros(3), x[2]]))


def test_compiled_and_transposed_fields():
    """Under torch.compile the operator is opaque; rows of fields may lie anywhere."""
    module, graph, _, call, inputs = listed_gat(torch.float32)
    want = module(graph=graph, **call)
    x = inputs[0].detach().movedim(0, -1).contiguous().movedim(-1, 0)
    wide = torch.cat([inputs[1].detach(), inputs[1].detach()], -1)[..., :32]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    got = compiled(graph=graph, src={"x": x}, dst={"x": wide}, att=call["att"])
    assert torch.equal(got, want)


# What is compiled, and what is not.


def gat(dtype=torch.float32):
    module, graph, _, call, _ = listed_gat(dtype)
    module(graph=graph, **call)
    return module


def reason(module):
    (run,) = module.last_variant.runs
    return run.reason


def test_explain_says_what_ran():
    module = gat()
    text = module.explain()
    assert "lowering: cpp" in text and "1 C++ loop; no score and no weight" in text and reason(module) == ""
    assert "#pragma omp parallel for" in module.ir("kernel")


def test_small_work_starts_no_compiler(monkeypatch):
    monkeypatch.setenv("TIGA_CPP", "")
    monkeypatch.setattr(launch_cpp, "load", lambda texts: pytest.fail("a compiler was started"))
    module = gat()
    assert reason(module) == f"{8 * 300 * 128} numbers at edges, fewer than {cpp.LEAST}"
    assert f"[provider] torch operations, no C++: {reason(module)}" in module.explain()
    monkeypatch.setenv("TIGA_CPP", "never")
    assert "fewer than inf" in reason(gat())


def test_products_of_a_list_count_and_those_of_tiles_do_not(monkeypatch):
    """torch gathers both vectors of each pair that is listed; of a dense relation it multiplies matrices."""
    monkeypatch.setenv("TIGA_CPP", "never")
    rows = [torch.randn(20, 2, 16) for _ in range(3)]
    fields = {"src": {"key": rows[0], "value": rows[1]}, "dst": {"query": rows[2]}, "scale": 0.25}
    for graph, numbers in ((tg.Graph.dense(20), 400 * 2), (tg.Graph.dense(20).to_csr(), 400 * 2 * 16)):
        module = Attention()
        module(graph=graph, **fields)
        assert reason(module).startswith(f"{numbers} numbers at edges")


def test_what_does_not_fit_says_why():
    assert reason(gat(torch.bfloat16)) == "bf16, which C++ computes no faster than torch"
    _, graph, _, call, _ = listed_gat(torch.float32)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "kept", found.append)
        torch.func.vmap(lambda att: Gat()(graph=graph, **{**call, "att": att}))(torch.randn(2, 4, 32))
    assert found == ["a batch dimension (vmap)"]


def other():
    """A program that no other test compiled: 5 features."""
    module, graph, _, call, _ = listed_gat(torch.float32)
    call = {"src": {"x": call["src"]["x"][..., :5]}, "dst": {"x": call["dst"]["x"][..., :5]}, "att": call["att"][:, :5]}
    return module, module(graph=graph, **call)


def test_without_a_compiler_torch_operations_run(monkeypatch):
    monkeypatch.setattr(launch_cpp, "identity", lambda: ("", ()))
    module, out = other()
    assert "no C++ compiler" in reason(module) and out.isfinite().all()


def test_a_compiler_that_fails_is_asked_once(monkeypatch):
    monkeypatch.setattr(launch_cpp, "BASIC", ("--no-such-option",))
    with pytest.warns(UserWarning, match="tiga: the C\\+\\+ compiler failed: .*no-such-option"):
        module, _ = other()
    monkeypatch.setattr(launch_cpp, "built", lambda whole: pytest.fail("asked twice"))
    module, out = other()
    assert reason(module).startswith("the C++ compiler failed") and out.isfinite().all()
    monkeypatch.setattr(launch_cpp, "_failed", {})


def test_libraries_are_kept_on_disk(monkeypatch):
    gat()
    before = passes.COUNTS["compile-cpp"]
    monkeypatch.setattr(launch_cpp, "_functions", {})
    gat()
    assert passes.COUNTS["compile-cpp"] == before
    made = {path.suffix for path in launch_cpp.folder().iterdir()}
    assert made == {".so", ".cpp"}  # nothing is left of the folders that compilers worked in
