"""Compiled models on a GPU: neighbours land in the generated kernel, CUDA graphs hold everything."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import Attention, attend, plain_attention
from torch._dynamo.utils import counters

import tiga as tg

pytestmark = pytest.mark.gpu
program = Attention()


def model(q, k, v, w, g):
    out = attend(program, tg.Graph.triangular(len(q)), F.rms_norm(q, (q.shape[-1],), w), k, v)
    return F.silu(out.flatten(1)) * g


def plain(q, k, v, w, g):
    mask = torch.ones(len(q), len(q), device=q.device).tril().bool()
    return F.silu(plain_attention(mask, F.rms_norm(q, (q.shape[-1],), w), k, v).flatten(1)) * g


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    n = 100  # too few to split the sources, which would take a second launch
    shapes = [(n, 2, 64)] * 3 + [(64,), (n, 128)]
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def launched(fn):
    fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        fn()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len([e for e in events if not e.name.startswith(("Memcpy", "Memset"))])


def test_norm_attention_activation_and_gate_are_one_launch():
    torch._dynamo.reset()
    args = tensors()
    fn = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(fn(*args), plain(*[a.double() for a in args]).float(), rtol=1e-3, atol=1e-4)
        assert launched(lambda: fn(*args)) == 1


def test_gradients_of_what_is_fused():
    torch._dynamo.reset()
    args = [a.requires_grad_() for a in tensors()]
    wide = [a.detach().double().requires_grad_() for a in args]
    got = torch.autograd.grad(torch.compile(model, fullgraph=True)(*args).square().sum(), args)
    want = torch.autograd.grad(plain(*wide).square().sum(), wide)
    for a, b in zip(got, want):
        assert (a.double() - b).norm() <= 1e-4 * b.norm()


def test_cuda_graphs_skip_nothing():
    torch._dynamo.reset()
    counters.clear()
    args = tensors()
    fn = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            out = fn(*args).clone()
        torch.testing.assert_close(out, plain(*[a.double() for a in args]).float(), rtol=1e-3, atol=1e-4)
    assert counters["inductor"]["cudagraph_skips"] == 0
