"""Tests of the tiles skeleton under Triton's interpreter: test_tiles.py starts them with `-p interpreted`.

Those of the GPU at small sizes, on the CPU: their oracles are plain torch.
"""

import pytest
import sample
import test_fusion
import test_gpu
import test_gpu_programs
import test_gpu_sample
import torch

import tiga as tg
from tiga import passes
from tiga.codegen import launch, steps

test_gpu.DEVICE = test_gpu_programs.DEVICE = test_gpu_sample.DEVICE = "cpu"

# The interpreter has no bfloat16 products.
POINTS = [p for p in sample.kept() if int(p[0]) <= 17 and p[3] != "bfloat16"]
POINTS += [("129", "8", "offset", "float16", "gap")]


@pytest.mark.parametrize("point", POINTS, ids=" ".join)
def test_point(point):
    rows, width, kind, dtype, layout = point
    test_gpu_sample.check_point(int(rows), int(width), kind, getattr(torch, dtype), layout, lambda run: run())


@pytest.mark.parametrize("name", ["relative bias", "a bias an edge"])
def test_program_runs_in_kernels(name):
    few = lambda n: test_gpu_programs.offset(n // 10)
    test_gpu_programs.test_program_runs_in_kernels(name, few, torch.float32)


@pytest.fixture
def parts(monkeypatch):
    """Into how many parts the sources of each launch are split."""
    found, how = [], launch.Launch.parts

    def counted(self):
        found.append(how(self))
        return found[-1]

    monkeypatch.setattr(launch.Launch, "parts", counted)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 16)
    steps._records.clear()
    return found


def test_few_rows_are_split_and_heads_share_tiles(parts):
    """Three rows of 8 heads on one of keys: the heads lie beside the rows, and the parts' states are merged."""
    call, wanted = test_gpu.decode(3, 1100)
    error = (call().double() - wanted).abs().max()
    assert error <= 4 * torch.finfo(torch.float16).eps * wanted.abs().max()
    assert max(parts) > 1


def test_gradients_of_few_rows_are_merged_with_a_scale_that_is_a_tensor(parts):
    """What the finished sum is multiplied by is read where the parts meet."""
    query, key, value = torch.randn(3, 2, 16, requires_grad=True), torch.randn(1100, 2, 16), torch.randn(1100, 2, 16)
    fields = {"src": {"key": key, "value": value}, "dst": {"query": query}}
    out = test_gpu_sample.Attention()(graph=tg.Graph.dense(3, 1100), **fields, scale=torch.tensor(0.25))
    (got,) = torch.autograd.grad(out.sum(), query)
    weight = (torch.einsum("ihd,jhd->ijh", query, key) * 0.25).softmax(1)
    (wanted,) = torch.autograd.grad(torch.einsum("ijh,jhd->ihd", weight, value).sum(), query)
    assert max(parts) > 1
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


class Folds(tg.MessagePassing):
    most, least, mean, count = tg.max(), tg.min(), tg.mean(), tg.sum()

    def edge(self, src, dst, edge):
        score = (src.key * dst.query).sum(-1)
        return self.most(score), self.least(score), self.mean(score[..., None] * src.value), self.count(score.exp())


def test_every_fold_is_merged(parts):
    query, key, value = torch.randn(3, 2, 16), torch.randn(1200, 2, 16) / 4, torch.randn(1200, 2, 16)
    graph = tg.Graph.dense(3, 1200)
    module = Folds()
    most, least, mean, total = module(graph=graph, src={"key": key, "value": value}, dst={"query": query})
    texts = module.ir("kernel")  # what ran: parts, then their merge
    assert texts.count("in tl.range(0, splits") == texts.count("def propagate(") - texts.count("num_stages=MASKED") > 0
    score = torch.einsum("jhd,ihd->ijh", key, query)
    assert max(parts) > 1
    torch.testing.assert_close(most, score.amax(1))
    torch.testing.assert_close(least, score.amin(1))
    torch.testing.assert_close(mean, torch.einsum("ijh,jhd->ihd", score, value) / 1200, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total, score.exp().sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_infinities_and_nan_are_those_of_numbers_one_by_one(dtype):
    test_gpu.test_infinities_and_nan_are_those_of_numbers_one_by_one(dtype)


@pytest.mark.parametrize("name", ["layer_norm", "gate, a view", "norm of the result"])
def test_neighbours_are_computed_in_the_kernels(name):
    """Forward and backward of what a compiler moved into the programs."""
    torch.manual_seed(0)
    before = passes.COUNTS["launch-tiles"]
    test_fusion.test_neighbours_move_into_the_program(next(c for c in test_fusion.CASES if c.name == name))
    assert passes.COUNTS["launch-tiles"] - before >= 2
