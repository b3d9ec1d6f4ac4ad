"""Programs as C++ on the CPU: CASES against the oracle, gradients and twice; what stays with torch."""

import pytest
import torch
from cases import CASES, tensors
from test_cases import assert_same, moved

from tiga import passes
from tiga.codegen import launch_cpp
from tiga.codegen.rows import Refused

REFUSED = {"what a user's reducer leaves at every edge, for its gradient", "a user's reducer"}


def run(case, dtype=torch.float64):
    """Outputs, gradients and, of small cases, gradients of those."""
    module, arguments = moved(case, dtype)
    inputs = tensors(arguments, module)
    return everything(case.run(module, arguments), inputs, case.small)


def everything(outputs, inputs, again):
    known = [torch.where(x.isfinite(), x, 0.0) for x in outputs]
    return [*outputs, *gradients(known, inputs, again)]


def gradients(outputs, inputs, again=False):
    weights = [torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape).cos() for x in outputs]
    first = torch.autograd.grad(outputs, inputs, weights, create_graph=again, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, first)]
    if not again:
        return found
    return [*found, *gradients([g.sin() for g in found if g.requires_grad], inputs)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """One library of the kernels of all cases: each runs once on torch, to say which texts it would load."""
    texts: dict[str, None] = {}

    def noted(new):
        texts.update(dict.fromkeys(new))
        raise Refused("only noted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGA_CPP", "always")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        patch.setattr(launch_cpp, "BASIC", ("-O1", *launch_cpp.BASIC[1:]))
        with pytest.MonkeyPatch.context() as first:
            first.setattr(launch_cpp, "load", noted)
            for case in CASES:
                run(case)
        launch_cpp.load(tuple(texts))
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, library, monkeypatch):
    reasons = []
    monkeypatch.setattr(passes, "kept", reasons.append)
    before = passes.COUNTS["launch-cpp"]
    got = run(case)
    module, arguments = moved(case, torch.float64)
    want = everything(case.oracle(module, arguments), tensors(arguments, module), case.small)
    assert_same(got, want)
    assert set(reasons) <= REFUSED
    assert passes.COUNTS["launch-cpp"] > before or reasons
