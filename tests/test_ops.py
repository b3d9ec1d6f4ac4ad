"""The operators of torch.ops.tiga that users call directly: what PyTorch asks of an operator, and bad input."""

import doctest
import importlib

import pytest
import torch
from segments import doubles, ints
from torch.library import opcheck

import tiga as tg

ops = torch.ops.tiga
INTEGERS = [torch.int32, torch.int64]


def samples():
    """(operator, arguments) for opcheck."""
    value, rowptr = doubles(5, 3).requires_grad_(), ints(0, 2, 2, 5)
    for name in ("sum", "mean", "max", "min", "logsumexp", "softmax"):
        yield f"segment_{name}", (value, rowptr)
    yield "segment_sum", (doubles(0, 3).requires_grad_(), ints(0, 0))
    yield "segment_sum", (torch.arange(10).view(5, 2).T.contiguous().T, rowptr.int())
    yield "segment_softmax", (doubles(3, 5).requires_grad_().T, rowptr)
    yield "edge_softmax", (value, rowptr, ints(3, 0, 2, 1, 4))
    query, key = doubles(4, 2, 3).requires_grad_(), doubles(5, 1, 3, seed=1).requires_grad_()
    yield "attention", (query, query, query)
    yield "attention", (query.float(), query.float(), query.float(), None, True)
    yield "attention", (query, key, key, 0.5, True, "bottom-right")
    yield "attention", (query, key, key, None, True, "top-left", ints(0, 1, 4), ints(0, 3, 5))
    yield (
        "attention",
        (
            query.permute(1, 0, 2).contiguous().permute(1, 0, 2),
            query,
            query[:, :1].expand(4, 2, 3),
            None,
            False,
            None,
            ints(0, 1, 3),
        ),
    )
    nodes = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    yield "radius", (nodes, 0.6)
    yield "radius", (nodes.clone().requires_grad_(), 0.6, ints(0, 0, 1, 1, 0, 1), True, 5)
    yield "radius_periodic", (nodes, 0.6, torch.eye(3))
    yield "radius_periodic", (nodes, 0.6, torch.eye(3).expand(2, 3, 3), ints(0, 0, 1, 1, 0, 1), True, 99)
    yield "knn", (nodes, 2)
    yield "knn", (nodes, 2, ints(0, 0, 1, 1, 0, 1).int())
    for dtype in INTEGERS:
        pairs = torch.tensor([[0, 3, 0, 1, 3], [2, 0, 2, 0, 1]], dtype=dtype)
        yield "coo_to_csr", (pairs, 3)
        yield "coo_to_csr", (pairs[:, :0], 3)
        rowptr, col = ints(0, 2, 2, 5, dtype=dtype), ints(1, 0, 3, 3, 0, dtype=dtype)
        yield "csr_transpose", (rowptr, col, None, 4)
        yield "csr_transpose", (rowptr, col, ints(4, 2, 0, 1, 3, dtype=dtype), 4)
        yield "work_list", (rowptr, 5, 2)
        yield "work_list", (rowptr[:1], 0, 2)
        yield "cu_seqlens_to_csr", (ints(0, 2, 2, 5, dtype=dtype),)
        yield "cu_seqlens_to_csr", (ints(0, 2, 5, dtype=dtype), False, 6)
        yield "intersect", (rowptr, col, rowptr, col.flip(0), 4)
        yield "union", (rowptr, col, rowptr, col.flip(0), 4)


SAMPLES = list(samples())
DEFINED = (
    "attention",
    "segment_sum",
    "segment_mean",
    "segment_max",
    "segment_min",
    "segment_logsumexp",
    "segment_softmax",
    "edge_softmax",
    "radius",
    "radius_periodic",
    "knn",
    "coo_to_csr",
    "csr_transpose",
    "work_list",
    "cu_seqlens_to_csr",
    "intersect",
    "union",
)


def test_every_operator_has_a_sample_and_its_docstring():
    assert {name for name, _ in SAMPLES} == set(DEFINED)
    for name in DEFINED:
        assert ">>> " in getattr(ops, name).__doc__
        assert torch.Tag.pt2_compliant_tag in getattr(ops, name).default.tags


@pytest.mark.parametrize("module", ["attention", "segments", "neighbours", "sparse"])
def test_docstrings_run(module):
    result = doctest.testmod(importlib.import_module("tiga.ops." + module))
    assert result.attempted and not result.failed


@pytest.mark.parametrize(("name", "args"), SAMPLES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(SAMPLES)])
def test_opcheck(name, args):
    opcheck(getattr(ops, name).default, args)


# ---- bad input

REFUSED = [
    ("attention", (torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 3)), r"query has width 3, key 4"),
    ("attention", (torch.ones(2, 3), torch.ones(4, 3), torch.ones(5, 3)), r"key has 4 rows, value 5"),
    (
        "attention",
        (torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3), None, True),
        r"causal=True with 2 destinations and 4 sources.*align=",
    ),
    (
        "attention",
        (torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), None, False, "top-left"),
        r"align='top-left' with causal=False",
    ),
    (
        "attention",
        (torch.ones(2, 4, 3), torch.ones(2, 3, 3), torch.ones(2, 1, 3)),
        r"head dimension 1 has sizes \[4, 3, 1\]",
    ),
    ("attention", (torch.ones(3), torch.ones(3), torch.ones(3)), r"query has shape \(3,\)"),
    (
        "attention",
        (torch.ones(2, 3),) * 3 + (None, False, None, None, ints(0, 2)),
        r"src_boundaries without boundaries",
    ),
    (
        "attention",
        (torch.ones(2, 3),) * 3 + (None, True, None, ints(0, 2), ints(0, 2)),
        r"src_boundaries, whose values are not read",
    ),
    (
        "attention",
        (torch.ones(2, 3),) * 3 + (None, False, None, ints(0, 2), ints(0, 1, 2)),
        r"boundaries has 2 entries, src_boundaries 3",
    ),
    ("segment_sum", (torch.tensor(1.0), ints(0, 1)), r"value has shape \(\)"),
    ("segment_sum", (torch.ones(2), ints()), r"rowptr \(0,\)"),
    ("edge_softmax", (torch.ones(2), ints(0, 2), ints(0)), r"number has 1 entries, but there are 2 edges"),
    ("coo_to_csr", (torch.zeros(3, 2, dtype=torch.int64), 2), r"edge_index has 3 rows, but must have 2"),
    ("csr_transpose", (ints(), ints(0), None, 2), r"rowptr is empty"),
    ("csr_transpose", (ints(0, 1), ints(0), ints(0, 1), 2), r"number has 2 entries, col 1"),
    ("work_list", (ints(0, 1), 1, 0), r"split is 0"),
    ("cu_seqlens_to_csr", (ints(1, 2),), r"boundaries starts at 1"),
    ("union", (ints(0, 0), ints(), ints(0, 0, 0), ints(), 2), r"rowptr has 1 rows, rowptr2 2"),
]


@pytest.mark.parametrize(("name", "args", "message"), REFUSED, ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED)])
def test_bad_input_is_refused(name, args, message):
    with pytest.raises(tg.TigaError, match=message):
        getattr(ops, name)(*args)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("attention", (torch.ones(2, 3, dtype=torch.int64),) * 3),
        ("attention", (torch.ones(2, 3),) * 3 + (None, False, None, torch.ones(2))),
        ("segment_sum", (torch.ones(2), torch.ones(2))),
        ("coo_to_csr", (torch.ones(2, 2), 2)),
        ("work_list", (torch.zeros(2, dtype=torch.int16), 0, 1)),
        ("radius", (torch.ones(2, 2, dtype=torch.int64), 1.0)),
    ],
)
def test_wrong_dtypes_are_refused(name, args):
    with pytest.raises(TypeError, match=r"Write "):
        getattr(ops, name)(*args)
