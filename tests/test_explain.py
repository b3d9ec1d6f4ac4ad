"""What explain, ir and last_variant say of a call, held against counters of what really ran."""

import copy
import gc
import io
import pickle
import re
import sys
import threading
import weakref

import expecttest
import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tiga as tg
from tiga import adjoint, explain, layouts, parser, passes, tangent
from tiga.builder import Path
from tiga.ops import autocast, batch, propagate

CACHED = (
    parser.parse,
    adjoint.augment,
    adjoint.adjoint,
    adjoint.keeps_sums,
    tangent.tangent,
    autocast.autocast,
    batch._text,
    propagate._gradient,
)


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(dim=-1) * scale, src.value)


class FullAttention(Attention):
    pass


class CausalWeightedValue(Attention):
    pass


class VarlenCausalAttention(Attention):
    pass


class TilePrunedAttention(Attention):
    reducer = tg.online_softmax(block_prune_threshold=0.01)


class GAT(tg.MessagePassing):
    reducer = tg.online_softmax()

    def __init__(self, attn):
        super().__init__()
        self.attn = tg.nn.trace(attn)

    def edge(self, src, dst, edge):
        return self.reducer(self.attn(edge.displacement, src.x, dst.x), src.x)


class Additive(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer(torch.relu(src.a + dst.a), src.v)


class Normalised(tg.MessagePassing):
    largest, total = tg.max(), tg.sum()

    def edge(self, src, dst, edge):
        weight = (src.x - self.largest(src.x)).exp()
        return weight / self.total(weight)


class JoinedNetwork(tg.MessagePassing):
    reducer = tg.sum()

    def __init__(self):
        super().__init__()
        self.net = tg.nn.trace(torch.nn.Linear(4, 3))

    def edge(self, src, dst, edge):
        return self.reducer(self.net(src.x, dst.x))


class Own(tg.Reducer):
    identity = 0.0

    def combine(self, a, b):
        return a + b


class Folded(tg.MessagePassing):
    reducer = Own()

    def edge(self, src, dst, edge):
        return self.reducer(src.x)


def fields(nodes, requires_grad=False, heads=2, width=8):
    made = torch.randn(3, nodes, heads, width, generator=torch.Generator().manual_seed(nodes)).unbind()
    return [t.requires_grad_(requires_grad) for t in made]


def attend(module, graph, tensors):
    query, key, value = tensors
    return module(graph=graph, src={"key": key, "value": value}, dst={"query": query}, scale=0.25)


def normalised(module):
    text = str(module.explain())
    text = text.replace(torch.__version__, "TORCH").replace(tg.__version__, "TIGA")
    return re.sub(r"[0-9a-f]{16}\n", "HASH\n", text)


LISTED = tg.Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]]))


class Goldens(expecttest.TestCase):
    """The five published programs, and one that needs several passes over the edges."""

    def setUp(self):
        fusion = sys.modules.get("tiga.inductor.fusion")
        if fusion is not None:  # what other tests compiled is no part of these calls
            fusion._notes.clear()

    def test_full_attention(self):
        module = FullAttention()
        attend(module, tg.Graph.dense(32), fields(32))
        self.assertExpectedInline(
            normalised(module),
            """\
### FullAttention
backend: cpu
provider: torch@TORCH
lowering: composite-blocked
passes: trace, verify, check, interpret-blocked, inner-products-as-matmul, weighted-sums-as-matmul
provider cache key: torch@TORCH | cpu | tiga@TIGA | HASH
accepted: [schedule] sums of source times destination ran as matrix products
accepted: [schedule] folds of weight times field ran as matrix products
remark: [planning] dense relation remained implicit: no edge is listed
remark: [planning] 1024 pairs in 1 range, at most 1024 at once, planned for 6 elements each
remark: [planning] edge values take at most 24.0 KiB at once (limit 64.0 MiB, however many edges)
remark: [provider] torch operations, no C++: 2048 numbers at edges, fewer than 4194304
variant cache: hits=0, misses=1""",
        )

    def test_causal_dense_relation(self):
        module = CausalWeightedValue()
        for _ in range(2):
            attend(module, tg.Graph.triangular(32), fields(32))
        self.assertExpectedInline(
            normalised(module),
            """\
### CausalWeightedValue
backend: cpu
provider: torch@TORCH
lowering: composite-blocked
passes: trace, verify, check, interpret-blocked, inner-products-as-matmul, weighted-sums-as-matmul
provider cache key: torch@TORCH | cpu | tiga@TIGA | HASH
accepted: [schedule] sums of source times destination ran as matrix products
accepted: [schedule] folds of weight times field ran as matrix products
remark: [planning] triangular relation remained implicit: no edge is listed
remark: [planning] 1024 pairs in 1 range, at most 1024 at once, planned for 6 elements each
remark: [planning] edge values take at most 24.0 KiB at once (limit 64.0 MiB, however many edges)
remark: [provider] torch operations, no C++: 1056 numbers at edges, fewer than 4194304
variant cache: hits=1, misses=1""",
        )

    def test_varlen_causal_attention(self):
        module = VarlenCausalAttention()
        attend(module, tg.Graph.cat([tg.Graph.triangular(n) for n in (5, 1, 3)]), fields(9))
        self.assertExpectedInline(
            normalised(module),
            """\
### VarlenCausalAttention
backend: cpu
provider: torch@TORCH
lowering: composite-blocked
passes: trace, verify, check, interpret-blocked, weighted-sums-as-matmul
provider cache key: torch@TORCH | cpu | tiga@TIGA | HASH
accepted: [schedule] folds of weight times field ran as matrix products
remark: [planning] blocks relation remained implicit: no edge is listed
remark: [planning] 81 pairs in 1 range, at most 81 at once, planned for 6 elements each
remark: [planning] edge values take at most 1.9 KiB at once (limit 64.0 MiB, however many edges)
remark: [planning] inner products ran pair by pair: the ranges are small, or the two fields differ in rank or width
remark: [provider] torch operations, no C++: 44 numbers at edges, fewer than 4194304
variant cache: hits=0, misses=1""",
        )

    def test_tile_pruned_attention(self):
        module = TilePrunedAttention()
        with pytest.raises(tg.TigaError, match="pruning exists only"):
            attend(module, tg.Graph.dense(32), fields(32))
        self.assertExpectedInline(
            normalised(module),
            """\
### TilePrunedAttention
no call has been recorded. Call the module once, outside torch.compile and torch.export:
  inside, nothing remains of it but the operator and the program that lower(...) gives.""",
        )

    def test_gat_edge_attention(self):
        positions = (torch.arange(6.0)[:, None] * torch.tensor([0.1, 0.0, 0.0])).requires_grad_()
        module = GAT(nn.Sequential(nn.Linear(3 + 2 * 8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
        x = torch.ones(6, 8)
        graph = tg.Graph.radius(positions, cutoff=0.15)
        with torch.no_grad():
            module(graph=graph, src={"x": x}, dst={"x": x})
        module(graph=graph, src={"x": x}, dst={"x": x}).sum().backward()
        self.assertExpectedInline(
            normalised(module),
            """\
### GAT
backend: cpu
provider: torch@TORCH
lowering: composite-listed
passes: trace, hoist, augment, verify, check, interpret-listed, adjoint
provider cache key: torch@TORCH | cpu | tiga@TIGA | HASH
remark: [planning] csr relation is listed: col and rowptr by destination
remark: [planning] a product with joined features was split: that of src.x, dst.x is made once a node
remark: [planning] 10 pairs in 1 range, at most 10 at once, planned for 64 elements each
remark: [planning] edge values take at most 2.5 KiB at once (limit 64.0 MiB, however many edges)
remark: [provider] torch operations, no C++: 160 numbers at edges, fewer than 4194304
remark: [autograd] the gradient is programs too: operands and results of folds are kept, edge values are computed again
variant cache: hits=0, misses=2""",
        )

    def test_several_programs(self):
        module = Normalised()
        module(graph=LISTED, src={"x": torch.ones(3, 2)})
        self.assertExpectedInline(
            normalised(module),
            """\
### Normalised
backend: cpu
provider: torch@TORCH
lowering: composite-listed
passes: trace, split, verify, check, interpret-listed
provider cache key: torch@TORCH | cpu | tiga@TIGA | HASH
remark: [planning] csr relation is listed: col and rowptr by destination
remark: [planning] 3 programs, each a pass over the edges: an edge value reads a finished fold
remark: [planning] program 1: 4 pairs in 1 range, at most 4 at once, planned for 4 elements each
remark: [planning] program 1: edge values take at most 64 bytes at once (limit 64.0 MiB, however many edges)
remark: [provider] program 1: torch operations, no C++: 4 numbers at edges, fewer than 4194304
remark: [planning] program 2: 4 pairs in 1 range, at most 4 at once, planned for 6 elements each
remark: [planning] program 2: edge values take at most 96 bytes at once (limit 64.0 MiB, however many edges)
remark: [provider] program 2: torch operations, no C++: 8 numbers at edges, fewer than 4194304
remark: [planning] program 3: 4 pairs in 1 range, at most 4 at once, planned for 4 elements each
remark: [planning] program 3: edge values take at most 64 bytes at once (limit 64.0 MiB, however many edges)
remark: [provider] program 3: torch operations, no C++: 8 numbers at edges, fewer than 4194304
variant cache: hits=0, misses=1
program 1 of 3:
    tiga/1 relation csr 3
    operand 0 src x f32 [*]
    %0, %1 = reduce dst max src.x
    return %0
program 2 of 3:
    tiga/1 relation csr 3
    operand 0 src x f32 [*]
    operand 1 dst pass1 f32 [*]
    %0 = sub src.x dst.pass1
    %1 = exp %0
    %2 = reduce dst sum %1
    return %2
program 3 of 3:
    tiga/1 relation csr 3
    operand 0 src x f32 [*]
    operand 1 dst pass1 f32 [*]
    operand 2 dst pass2 f32 [*]
    %0 = sub src.x dst.pass1
    %1 = exp %0
    %2 = div %1 dst.pass2
    return %2""",
        )

    def test_before_a_call(self):
        module = FullAttention()
        self.assertExpectedInline(
            repr(module.explain()),
            """\
### FullAttention
no call has been recorded. Call the module once, outside torch.compile and torch.export:
  inside, nothing remains of it but the operator and the program that lower(...) gives.""",
        )
        self.assertExpectedRaisesInline(
            tg.TigaError,
            lambda: module.last_variant,
            """\
FullAttention: no call has been recorded. Call the module once, outside torch.compile and torch.export:
  inside, nothing remains of it but the operator and the program that lower(...) gives.""",
        )

    def test_levels_of_kernels(self):
        module = FullAttention()
        attend(module, tg.Graph.dense(2), fields(2))
        self.assertExpectedRaisesInline(
            tg.TigaError,
            lambda: module.ir("gf.kernel.ttir"),
            """\
level 'gf.kernel.ttir': the composite path makes none, it runs torch operations and generates no kernel.
  Read 'domain', the program itself.""",
        )
        with pytest.raises(tg.TigaError, match="level 'dom' is unknown. Levels: 'domain', and of kernels 'iter'"):
            module.ir("dom")


def plain():
    module = Attention()
    attend(module, tg.Graph.triangular(40), fields(40))
    return module


def small():
    module = Attention()
    attend(module, tg.Graph.triangular(3), fields(3))
    return module


def forward_and_backward():
    module = Attention()
    attend(module, tg.Graph.triangular(41), fields(41, requires_grad=True)).sum().backward()
    return module


def under_autocast():
    module = Attention()
    with torch.autocast("cpu", torch.bfloat16):
        attend(module, tg.Graph.window(42, 30), fields(42))
    return module


def under_vmap():
    module = Attention()
    query, key, value = fields(12)
    torch.func.vmap(lambda q: attend(module, LARGE, (q, key, value)))(torch.stack([query, query + 1]))
    return module


def forward_mode():
    module = Attention()
    query, key, value = fields(12)
    torch.func.jvp(lambda q: attend(module, LARGE, (q, key, value)), (query,), (torch.ones_like(query),))
    return module


def two_passes():
    module = Normalised()
    module(graph=LISTED, src={"x": torch.ones(3, 2)})
    return module


def own_reducer():
    module = Folded()
    module(graph=LISTED, src={"x": torch.ones(3, 2)})
    return module


def network():
    module = JoinedNetwork()
    module(graph=LISTED, src={"x": torch.ones(3, 2)}, dst={"x": torch.ones(3, 2)})
    return module


def additive():
    module = Additive()
    a, v = torch.ones(3, 1, requires_grad=True), torch.ones(3, 1, 2, requires_grad=True)
    module(graph=LISTED, src={"a": a, "v": v}, dst={"a": a}).sum().backward()
    return module


LARGE = tg.Graph.dense(12)
PRODUCTS = ("inner-products-as-matmul", "weighted-sums-as-matmul")
CALLS = {
    plain: {"trace", "verify", "check", "interpret-blocked", *PRODUCTS},
    small: {"trace", "verify", "check", "interpret-blocked", "weighted-sums-as-matmul"},
    forward_and_backward: {"trace", "augment", "adjoint", "verify", "check", "interpret-blocked", *PRODUCTS},
    under_autocast: {"trace", "autocast", "verify", "check", "interpret-blocked", *PRODUCTS},
    under_vmap: {"trace", "batch", "verify", "check", "interpret-blocked"},
    forward_mode: {"trace", "augment", "tangent", "verify", "check", "interpret-blocked"},
    additive: {"trace", "augment", "keep-sums", "adjoint", "verify", "check", "interpret-listed"},
    two_passes: {"trace", "split", "verify", "check", "interpret-listed"},
    network: {"trace", "hoist", "verify", "check", "interpret-listed"},
    own_reducer: {"trace", "verify", "check", "interpret-listed", "segment-scan"},
}


def counted(call):
    """The module of a call, and how often each pass did its work meanwhile."""
    before = dict(passes.COUNTS)
    module = call()
    return module, {name: count - before[name] for name, count in passes.COUNTS.items()}


def forget():
    for function in CACHED:
        function.cache_clear()
    Path.root = None
    passes._derived.clear()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_each_listed_pass_did_its_work_and_no_other_did(call):
    forget()
    module, counts = counted(call)
    listed = set(module.last_variant.passes)
    assert listed == {name for name, count in counts.items() if count}
    assert CALLS[call] <= listed
    line = next(line for line in module.explain().splitlines() if line.startswith("passes: "))
    assert line == "passes: " + ", ".join(module.last_variant.passes)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_result_from_a_cache_counts_nothing_but_is_listed(call):
    first = call().last_variant.passes
    module, counts = counted(call)
    assert module.last_variant.passes == first
    assert not any(counts[name] for name in ("split", "verify", "autocast", "batch", "augment", "tangent", "adjoint"))
    assert counts["trace"] == 1


def test_every_pass_is_met():
    kernels = {"emit-tiles", "launch-tiles", "launch-hopper", "emit-rows", "launch-rows"}  # these need a GPU
    compiled = {"emit-cpp", "compile-cpp", "launch-cpp"}  # and these a large graph
    assert set().union(*CALLS.values()) == set(passes.PASSES) - kernels - compiled


def test_hits_and_misses():
    module, seen = Attention(), []
    steps = [(5, False), (7, False), (7, True), (7, True), (9, False)]
    for nodes, requires_grad in steps:
        attend(module, tg.Graph.triangular(nodes), fields(nodes, requires_grad))
        seen.append((module.last_variant.hits, module.last_variant.misses))
    assert seen == [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2)]
    attend(module, tg.Graph.dense(5), fields(5))
    assert (module.last_variant.hits, module.last_variant.misses) == (3, 3)
    assert Attention().explain() == "### Attention\n" + explain._NOT_CALLED


def test_the_key_is_that_of_the_texts():
    keys = []
    for nodes, kind in ((5, tg.Graph.dense), (6, tg.Graph.dense), (6, tg.Graph.triangular)):
        module = Attention()
        attend(module, kind(nodes), fields(nodes))
        keys.append(module.last_variant.key)
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].startswith(f"torch@{torch.__version__} | cpu | tiga@{tg.__version__} | ")


def test_variants_remembered_are_bounded():
    variants = explain.Variants()
    for k in range(3 * explain.MOST_VARIANTS):
        variants.add("Many", [str(k)], torch.device("cpu"), passes.Record())
    assert len(variants.met) == explain.MOST_VARIANTS and variants.misses == 3 * explain.MOST_VARIANTS


def test_on_cuda_the_composite_path_is_said():
    module, record = Attention(), passes.Record()
    with record:
        passes.running(plain().ir())
        passes.visited("interpret-blocked", 4, 3)
    explain.remember(module, [plain().ir()], torch.device("cuda", 0), record)
    text = module.explain()
    assert "backend: cuda\n" in text and "| cuda |" in text
    assert "remark: [provider] composite path on CUDA: no kernel fits; correct, not fused" in text


def test_artifacts():
    module = two_passes()
    artifacts = module.last_variant.artifacts
    assert list(artifacts) == ["domain"] and len(artifacts) == 1 and "ttir" not in artifacts
    assert artifacts["domain"] == module.ir() == module.ir("domain")
    for text in artifacts["domain"].split("\n\n"):
        parser.parse(text)
    assert len(artifacts["domain"].split("\n\n")) == 3
    for level in (*explain.KERNEL_LEVELS, *explain.SPELLINGS):
        with pytest.raises(tg.TigaError, match="composite path makes none"):
            artifacts[level]
    with pytest.raises(AttributeError):
        module.last_variant.hits = 3


def test_domain_is_the_program_that_lower_gives():
    module = plain()
    query, key, value = fields(40)
    call = module.lower(tg.Graph.triangular(40), src={"key": key, "value": value}, dst={"query": query}, scale=0.25)
    assert module.ir() == call.program


def test_ranges_are_what_was_held(monkeypatch):
    module = Attention()
    whole = attend(module, tg.Graph.dense(64), fields(64))
    assert "4096 pairs in 1 range, at most 4096 at once" in module.explain()
    monkeypatch.setattr(layouts, "BUDGET", 1 << 13)
    parts = attend(module, tg.Graph.dense(64), fields(64))
    torch.testing.assert_close(parts, whole)
    run = module.last_variant.runs[0]
    assert run.ranges > 1 and run.visited == 4096 and run.most * run.width <= 1 << 13
    assert f"4096 pairs in {run.ranges} ranges, at most {run.most} at once" in module.explain()
    assert "limit 32.0 KiB, however many edges" in module.explain()


def test_why_inner_products_were_not_matrix_products():
    large, small = tg.Graph.dense(40), tg.Graph.dense(3)
    for relation, reason in ((large, None), (large.to_csr(), "the edges are a list"), (small, "the ranges are small")):
        module = Attention()
        attend(module, relation, fields(relation.num_dst))
        assert ("inner products ran pair by pair" in module.explain()) == (reason is not None)
        assert reason is None or f"inner products ran pair by pair: {reason}" in module.explain()


def test_shapes_alone_run_nothing():
    module = Attention()
    with FakeTensorMode() as mode:
        attend(module, tg.Graph.dense(4), [mode.from_tensor(t) for t in fields(4)])
    assert "lowering: none (traced with shapes only" in module.explain()
    assert not any(name.startswith("interpret") for name in module.last_variant.passes)


def test_threads_keep_their_own_records():
    module, other = Attention(), Attention()
    with passes.Record() as record:
        thread = threading.Thread(target=lambda: attend(other, tg.Graph.dense(4), fields(4)))
        thread.start()
        thread.join()
    assert not record.names and not record.runs
    assert "interpret-blocked" in other.explain() and "no call" in module.explain()


def test_a_row_beyond_the_budget_is_said(monkeypatch):
    monkeypatch.setattr(layouts, "BUDGET", 16)
    module = Folded()
    edges = torch.stack([torch.arange(50), torch.zeros(50, dtype=torch.long)])
    graph = tg.Graph.from_edge_index(edges, num_src=50, num_dst=2)
    module(graph=graph, src={"x": torch.ones(50, 2)})
    assert "above 64 bytes: one destination's sources are not divided" in module.explain()


def test_nothing_outlives_the_call():
    module = Attention()
    tensors, graph = fields(6), tg.Graph.cat([tg.Graph.triangular(3), tg.Graph.dense(3)])
    alive = [weakref.ref(t) for t in (*tensors, *graph.tensors, graph)]
    attend(module, graph, tensors)
    module.explain()
    del tensors, graph
    gc.collect()
    assert not any(r() is not None for r in alive)


def test_a_module_stays_a_module():
    module = GAT(nn.Linear(3 + 4, 1))
    before = list(module.state_dict())
    x = torch.ones(3, 2)
    graph = tg.Graph.radius(torch.zeros(3, 3), cutoff=1.0)
    module(graph=graph, src={"x": x}, dst={"x": x})
    assert list(module.state_dict()) == before
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)):
        assert other.explain() == module.explain()
        other(graph=graph, src={"x": x}, dst={"x": x})
        assert (other.last_variant.hits, module.last_variant.hits) == (1, 0)


def test_compiled_calls_leave_no_record_and_eager_ones_no_guard():
    torch._dynamo.reset()
    module, counter = Attention(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    graph = tg.Graph.triangular(6)
    compiled = torch.compile(lambda tensors: attend(module, graph, tensors), backend=counter, fullgraph=True)
    with torch.no_grad():
        first = compiled(fields(6))
        assert "no call has been recorded" in module.explain()
        torch.testing.assert_close(attend(module, graph, fields(6)), first)
        known = str(module.explain())
        torch.testing.assert_close(compiled(fields(6)), first)
    assert counter.frame_count == 1
    assert module.explain() == known


def test_a_refused_call_closes_its_record():
    module = plain()
    known = str(module.explain())
    with pytest.raises(tg.TigaError):
        module(graph=tg.Graph.triangular(40), src={}, dst={"query": fields(40)[0]}, scale=1.0)
    assert passes._here.record is None
    assert module.explain() == known
