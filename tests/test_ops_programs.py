"""tiga::segment_*, tiga::edge_softmax and tiga::attention against plain torch, segment by segment and with masks."""

import io

import pytest
import torch
from segments import block_mask, doubles, ints, segments
from torch.autograd import gradcheck, gradgradcheck

ops = torch.ops.tiga
INTEGERS = [torch.int32, torch.int64]
ROWPTRS = {
    "empty segments": [0, 2, 2, 5, 5],
    "one": [0, 4],
    "no edges": [0, 0, 0],
    "no segments": [0],
    "hub": [0, 1, 18, 19],
}
REDUCTIONS = ["sum", "mean", "max", "min", "logsumexp"]


def reduced(name, x):
    """What one segment gives."""
    if x.shape[0] == 0:
        return x.new_full(x.shape[1:], -torch.inf if name == "logsumexp" else 0)
    if name in ("max", "min"):
        return getattr(torch, "a" + name)(x, 0)
    return getattr(torch, name)(x, 0)


def stacked(parts, like):
    return torch.stack(parts) if parts else like.new_zeros(0, *like.shape[1:])


def masked_attention(query, key, value, mask, scale):
    """softmax over the sources that the mask allows, rows without any give 0: (N, H, D) each."""
    score = torch.einsum("ihd,jhd->ihj", query, key) * scale
    score = score.masked_fill(~mask[:, None], -torch.inf)
    weight = torch.where(mask.any(1)[:, None, None], score.softmax(-1), 0)
    return torch.einsum("ihj,jhd->ihd", weight, value)


# ---- segments


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("rowptr", ROWPTRS.values(), ids=ROWPTRS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_segment_reductions(name, rowptr, dtype):
    for features in ((), (1,), (3, 2), (0,)):
        value = doubles(rowptr[-1], *features)
        out = getattr(ops, f"segment_{name}")(value, torch.tensor(rowptr, dtype=dtype))
        torch.testing.assert_close(out, stacked([reduced(name, value[s]) for s in segments(rowptr)], value))


@pytest.mark.parametrize("rowptr", ROWPTRS.values(), ids=ROWPTRS)
def test_softmax_of_segments_and_edges(rowptr):
    value = doubles(rowptr[-1], 3)
    expected = torch.cat([value[:0], *[value[s].softmax(0) for s in segments(rowptr)]])
    torch.testing.assert_close(ops.segment_softmax(value, torch.tensor(rowptr)), expected)
    number = torch.randperm(rowptr[-1], generator=torch.Generator().manual_seed(1))
    shuffled, wanted = torch.empty_like(value), torch.empty_like(value)
    shuffled[number], wanted[number] = value, expected
    torch.testing.assert_close(ops.edge_softmax(shuffled, torch.tensor(rowptr), number), wanted)
    torch.testing.assert_close(ops.edge_softmax(value, torch.tensor(rowptr)), expected)


def test_softmax_without_a_finite_score_and_outside_segments_is_zero():
    value = torch.tensor([-torch.inf, -torch.inf, 1.0, 7.0], dtype=torch.float64, requires_grad=True)
    out = ops.segment_softmax(value, ints(0, 2, 3))
    assert out.tolist() == [0, 0, 1, 0]
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))
    assert grad.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", [*REDUCTIONS, "softmax"])
def test_segment_derivatives(name):
    operator = getattr(ops, f"segment_{name}")
    value, rowptr = doubles(4, 1).requires_grad_(), ints(0, 3, 4)
    assert gradcheck(lambda v: operator(v, rowptr), value, check_forward_ad=True)
    assert gradgradcheck(lambda v: operator(v, rowptr), value)


def test_edge_softmax_derivatives():
    value, rowptr, number = doubles(4).requires_grad_(), ints(0, 3, 4), ints(3, 0, 2, 1)
    assert gradcheck(lambda v: ops.edge_softmax(v, rowptr, number), value)
    assert gradgradcheck(lambda v: ops.edge_softmax(v, rowptr, number), value)


def test_gradients_of_empty_and_tied_segments():
    value = torch.tensor([2.0, 2.0, 1.0], requires_grad=True)
    for name, expected in (
        ("max", [1, 0, 1]),
        ("min", [1, 0, 1]),
        ("sum", [1, 1, 1]),
        ("mean", [0.5, 0.5, 1]),
        ("logsumexp", [0.5, 0.5, 1]),
    ):
        out = getattr(ops, f"segment_{name}")(value, ints(0, 2, 2, 3))
        (grad,) = torch.autograd.grad(out[[0, 2]].sum() + 0 * out[1].nan_to_num(neginf=0), value)
        assert grad.tolist() == expected


def test_dtypes_of_segments():
    rowptr = ints(0, 2, 3)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        value = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
        for name in (*REDUCTIONS, "softmax"):
            assert getattr(ops, f"segment_{name}")(value, rowptr).dtype == dtype
    whole = torch.tensor([1, 2, 4], dtype=torch.int32)
    assert ops.segment_sum(whole, rowptr).tolist() == [3, 4]
    assert ops.segment_sum(whole, rowptr).dtype == torch.int64
    assert ops.segment_max(whole, rowptr).dtype == torch.int32
    torch.testing.assert_close(ops.segment_mean(whole, rowptr), torch.tensor([1.5, 4.0]))
    with pytest.raises(TypeError, match=r"segment_softmax: value is torch.int32.*Write value.float"):
        ops.segment_softmax(whole, rowptr)


def test_16_bit_segments_are_added_in_float32():
    value = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    torch.testing.assert_close(ops.segment_sum(value, ints(0, 4096)), value.double().sum()[None].bfloat16())


def test_vmap_and_forward_mode_of_segments():
    values, rowptr = doubles(4, 5, 2), ints(0, 2, 5)
    for name in (*REDUCTIONS, "softmax"):
        operator = getattr(ops, f"segment_{name}")
        expected = torch.stack([operator(v, rowptr) for v in values])
        torch.testing.assert_close(torch.vmap(lambda v, f=operator: f(v, rowptr))(values), expected)
        torch.testing.assert_close(
            torch.vmap(lambda v, f=operator: f(v, rowptr), in_dims=2)(values.movedim(0, 2)), expected
        )
    jacobian = torch.func.jacfwd(lambda v: ops.segment_logsumexp(v, rowptr))(values[0])
    torch.testing.assert_close(jacobian, torch.func.jacrev(lambda v: ops.segment_logsumexp(v, rowptr))(values[0]))


# ---- attention

ATTENTIONS = {
    "dense": (5, 5, {}),
    "dense cross": (3, 6, {"scale": 0.3}),
    "causal": (5, 5, {"causal": True}),
    "bottom-right": (3, 6, {"causal": True, "align": "bottom-right"}),
    "more rows": (6, 3, {"causal": True, "align": "bottom-right"}),
    "top-left": (3, 6, {"causal": True, "align": "top-left"}),
    "no rows": (0, 3, {}),
    "no sources": (3, 0, {}),
    "packed": (6, 6, {"boundaries": [0, 1, 1, 6]}),
    "packed causal": (6, 6, {"boundaries": [0, 2, 6], "causal": True}),
    "packed cross": (5, 7, {"boundaries": [0, 2, 5], "src_boundaries": [0, 3, 7]}),
    "packed bottom-right": (
        5,
        7,
        {"boundaries": [0, 3, 5], "src_boundaries": [0, 2, 7], "causal": True, "align": "bottom-right"},
    ),
}


def attention_case(name, heads=2, width=3):
    n, m, options = ATTENTIONS[name]
    align = options.get("align", "top-left")
    dst = options.get("boundaries", [0, n])
    src = options.get("src_boundaries", dst if "boundaries" in options else [0, m])
    mask = block_mask(
        dst, src, options.get("causal", False), lambda rows, cols: cols - rows if align == "bottom-right" else 0
    )
    operands = doubles(n, heads, width), doubles(m, heads, width, seed=1), doubles(m, heads, width + 1, seed=2)
    return operands, mask, options


def call(operands, options, dtype=torch.int64):
    tensors = {name: torch.tensor(x, dtype=dtype) if isinstance(x, list) else x for name, x in options.items()}
    return ops.attention(*operands, **tensors)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name, dtype):
    operands, mask, options = attention_case(name)
    expected = masked_attention(*operands, mask, options.get("scale", operands[0].shape[-1] ** -0.5))
    torch.testing.assert_close(call(operands, options, dtype), expected)
    transposed = [t.movedim(0, -1).contiguous().movedim(-1, 0) for t in operands]
    torch.testing.assert_close(call(transposed, options, dtype), expected)


@pytest.mark.parametrize("name", ["dense cross", "bottom-right", "more rows", "packed causal"])
def test_attention_derivatives(name):
    operands, _, options = attention_case(name, heads=1, width=2)
    operands = [t.requires_grad_() for t in operands]
    assert gradcheck(lambda *t: call(t, options), operands, check_forward_ad=True)
    assert gradgradcheck(lambda *t: call(t, options), operands)


def test_attention_agrees_with_torch_and_shares_heads():
    query, key, value = doubles(7, 4, 8), doubles(7, 1, 8, seed=1), doubles(7, 1, 8, seed=2)
    out = ops.attention(query, key, value, causal=True)
    q, k, v = (t.movedim(0, 1)[None] for t in (query, key.expand(-1, 4, -1), value.expand(-1, 4, -1)))
    torch.testing.assert_close(
        out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].movedim(1, 0)
    )
    grouped = ops.attention(
        query.view(7, 2, 2, 8), key.expand(7, 2, 8)[:, :, None], value.expand(7, 2, 8)[:, :, None], causal=True
    )
    torch.testing.assert_close(grouped.flatten(1, 2), out)
    flat = ops.attention(query[:, 0], key[:, 0], value[:, 0], causal=True)
    torch.testing.assert_close(flat, out[:, 0])
    assert ops.attention(query[..., :0], key[..., :0], value).isfinite().all()
    assert ops.attention(query, key, value[..., :0]).shape == (7, 4, 0)


def test_attention_in_16_bit_under_autocast_and_vmap():
    query, key, value = (doubles(6, 2, 8, seed=s) for s in range(3))
    half = [t.bfloat16() for t in (query, key, value)]
    exact = ops.attention(*[t.double() for t in half], causal=True)
    out = ops.attention(*half, causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, atol=8e-3, rtol=8e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.attention(query.float(), key.float(), value.float()).dtype == torch.bfloat16
    batch = [torch.stack([t, t + 1]) for t in (query, key, value)]
    expected = torch.stack([ops.attention(*parts) for parts in zip(*batch)])
    torch.testing.assert_close(torch.vmap(ops.attention)(*batch), expected)


def test_attention_is_one_program_in_compiled_and_exported_graphs():
    seen = []

    def backend(graph, example_inputs):
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    def layer(query, key, value):
        return ops.attention(query, key, value, causal=True)

    query, key, value = (doubles(5, 2, 3, seed=s).requires_grad_() for s in range(3))
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    out = compiled(query, key, value)
    torch.testing.assert_close(out, layer(query, key, value))
    found = torch.autograd.grad(out.square().sum(), (query, key, value))
    torch.testing.assert_close(found, torch.autograd.grad(layer(query, key, value).square().sum(), (query, key, value)))
    assert [sum("tiga.propagate" in target for target in targets) for targets in seen] == [1, 1]
    assert not any("tiga.attention" in target for targets in seen for target in targets)


class Weights(torch.nn.Module):
    def forward(self, edge_index, score, rows):
        rowptr, col, number = ops.coo_to_csr(edge_index, rows.shape[0])
        weight = ops.edge_softmax(score, rowptr, number)
        return ops.segment_sum(weight[number] * rows[col], rowptr)


def test_operators_compile_export_and_load_with_dynamic_sizes():
    def args(edges, rows):
        made = torch.Generator().manual_seed(edges)
        return torch.randint(0, rows, (2, edges), generator=made), doubles(edges, 1), doubles(rows, 3)

    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(Weights(), args(9, 4), dynamic_shapes=({1: dynamic}, {0: dynamic}, {0: dynamic}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    compiled = torch.compile(Weights(), fullgraph=True, dynamic=True, backend="aot_eager")
    for edges, rows in ((9, 4), (5, 7), (17, 2)):
        (src, dst), score, x = args(edges, rows)
        mask = dst == torch.arange(rows)[:, None]
        weight = torch.where(mask, score[:, 0], -torch.inf).softmax(1).nan_to_num(0)
        for run in (Weights(), compiled, loaded):
            torch.testing.assert_close(run(torch.stack([src, dst]), score, x), weight @ x[src])


def test_results_repeat_bit_for_bit():
    value, rowptr = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)), ints(0, 0, 300, 500)
    for name in (*REDUCTIONS, "softmax"):
        first, second = (getattr(ops, f"segment_{name}")(value, rowptr) for _ in range(2))
        assert first.equal(second)
