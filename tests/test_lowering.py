"""The operator in Inductor's code for CUDA, without a device: kernels, what they are told, what stays a call."""

from __future__ import annotations

import ast
import json
import linecache
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from compiled import used
from programs import Attention, attend, fields, plain_attention

import tiga as tg
from tiga import inductor

HERE = os.path.dirname(os.path.abspath(__file__))
CALL = "torch.ops.tiga.propagate.default("
KERNEL = re.compile(r"async_compile\.triton\('(propagate|count_tiles)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


@pytest.fixture(scope="module")
def found():
    """What a process wrote that takes the CPU for a GPU: code, guards, inputs that change, and what was said."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *sys.path])}
    command = [sys.executable, os.path.join(HERE, "lowered.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def launches(code):
    """(name, arguments) of each launch, in order."""
    return re.findall(r"^\s*(\w+)\.run\((.*), stream=", code, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("permuted", ["propagate"] * 2),  # few rows: parts of the sources, and their merge
        ("packed", ["count_tiles", "propagate"]),
        ("listed", ["propagate"] * 2),
        ("rows", ["propagate"]),
        ("rows, backward", ["propagate"] * 2),
        ("rearranged", ["propagate"]),
    ],
)
def test_kernels_stand_in_the_code_and_no_call_is_left(found, name, names):
    code = found[name]["code"]
    compile(code, name, "exec")
    assert CALL not in code and found[name]["mutated"] == []
    ran = [re.sub(r"_\d+$", "", kernel) for kernel, _ in launches(code)]
    kept = [kernel for kernel in ran if kernel in ("propagate", "count_tiles")]
    assert kept[: len(names)] == names
    assert found[name]["said"] == [f"kernels in the compiler's own code: {len(kept)}"]
    for _, text in KERNEL.findall(code):
        assert "import tiga" not in text and "from tiga" not in text


@pytest.mark.parametrize(
    ("name", "width", "columns", "copied"),
    [
        ("gradients", 384, [128, 0, 256], []),
        ("gradients, packaged", 384, [128, 0, 256], []),
        ("gradients and another", 512, [384, 128, 0], [256]),
        ("gradients and what is computed", 512, [384, 128, 0], [256]),
        ("gradients of two dimensions of rows", 384, [128, 0, 256], []),
        ("equal gradients", 256, [0], [128]),
        ("a result beside another", 135, [0], [128]),
    ],
)
def test_what_only_a_concatenation_reads_is_written_there(found, name, width, columns, copied):
    """Rows as far apart as the whole's; what is no result of a kernel is copied, by itself, into its columns."""
    code = found[name]["code"]
    ran = launches(code)
    where = re.compile(rf"\((?:300|s\d+), 2, 64\), \({width}, 64, 1\), (\d+)\), {width},")
    of_kernels = [x for kernel, told in ran if kernel.startswith("propagate") for x in where.findall(told)]
    assert [*map(int, of_kernels)] == columns
    assert len([kernel for kernel, _ in ran if not kernel.startswith("propagate")]) == len(copied)
    stores = re.findall(rf"tl\.store\(out_ptr0 \+ \((\d+) \+ x0 \+ {width}\*x1\)", code)
    assert [*map(int, stores)] == copied
    assert len(re.findall(rf", {width}\), \((?:\d+, )?{width}, 1\), torch", code)) == 1  # one memory
    assert any(text.startswith("results that are written where they are conc") for text in found[name]["said"])


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("a gradient that is read twice", 2),
        ("a gradient that is there twice", 1),
        ("gradients and two others", 1),
        ("gradients above each other", 1),
        ("gradients in more bits", 1),
        ("gradients and what follows from one", 1),
        ("gradients and what is changed", 5),
    ],
)
def test_other_concatenations_are_the_compilers(found, name, kernels):
    ran = launches(found[name]["code"])
    assert len([kernel for kernel, _ in ran if not kernel.startswith("propagate")]) == kernels
    assert all("reinterpret_tensor(buf" not in told for kernel, told in ran if kernel.startswith("propagate"))
    assert len(found[name]["said"]) == 1


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("GATConv", (1, 1, 1)),  # scores: features once more
        ("GATConv, backward", (2, 2, 6)),  # gradients of: features once more, both attention vectors at once, bias
        ("GATv2Conv", (1, 1, 2)),
        ("GATv2Conv, backward", (2, 2, 6)),  # sums of parts: attention vectors, biases of maps, bias
        ("TransformerConv", (1, 1, 2)),
        ("TransformerConv, backward", (2, 2, 3)),  # one part of a concatenation, biases of maps
    ],
)
def test_layers_are_products_kernels_and_few_others(found, name, counts):
    """(products, tiga's kernels, the compiler's) in the code; a sum over rows takes the compiler two."""
    code = found[name]["code"]
    ran = [re.sub(r"_\d+$", "", kernel) for kernel, _ in launches(code)]
    products = len(re.findall(r"extern_kernels\.(?:add)?mm\(", code))
    assert (products, ran.count("propagate"), len(ran) - ran.count("propagate")) == counts
    assert CALL not in code and code.count("extern_kernels.") == products


def test_strides_and_sizes_are_told_and_nothing_is_copied(found):
    """Heads come first in memory, and rows are a symbol: only int32 guards it."""
    code = found["permuted"]["code"]
    (_, first), _ = launches(code)
    (size,) = set(re.findall(r"\bs\d+\b", first))
    assert first.startswith(f"arg0_1, 64, 64*{size}, 1, arg1_1, 64, 64*{size}, 1, arg2_1, 64, 64*{size}, 1, buf")
    assert len(launches(code)) == 2  # neither a copy nor a fill
    assert all(re.fullmatch(r"[\d*]*s\d+ <= 2147483647", guard) for guard in found["permuted"]["guards"])
    assert f"empty_strided_cuda(({size}, 2, 64), (128, 64, 1), torch.float16)" in code


def test_edges_of_a_list_guard_nothing_but_int32(found):
    assert all(guard.endswith((" <= 2147483647", " <= 2147483347")) for guard in found["listed"]["guards"])
    assert len(found["listed"]["guards"]) == 2 and found["rows"]["guards"] == []


def test_plans_are_those_of_eager_calls(found):
    """Of 16-bit vectors of 64 features, one sum of them: the first of the table, as nothing spills."""
    (_, part), (_, merge) = KERNEL.findall(found["permuted"]["code"])
    assert "configs=[{'num_warps': 4, 'num_stages': 3}]" in part
    assert "'BLOCK_M': 128, 'BLOCK_N': 64, 'MASKED': 3, 'PRECISION': 'ieee'" in part
    assert "configs=[{'num_warps': 1, 'num_stages': 1}]" in merge and "'BLOCK_M': 1, 'BLOCK_N': 8" in merge


def test_warp_specialised_kernels_stay_a_call_but_in_packages(found):
    """These have no operator: plain kernels stand in them."""
    one, packaged = found["wide"], found["wide, packaged"]
    assert CALL in one["code"] and "a warp-specialised kernel" in one["said"][0]
    assert CALL not in packaged["code"] and KERNEL.findall(packaged["code"])


def test_what_no_kernel_does_stays_a_call_and_says_why(found):
    one = found["a user's reducer"]
    assert CALL in one["code"] and one["said"] == ["left a call of the operator: a user's reducer"]


def compiled(text, capability):
    """A kernel of the code, as Inductor would compile it: with what stands beside it, and no more."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = text.replace("\\\\", "\\")
    head, body = text.split("@triton_heuristics.user_autotune(")
    told, body = body.split("@triton.jit", 1)
    told = re.search(r"triton_meta=(\{.*\}),\s*filename", told, re.DOTALL)[1]
    told = ast.literal_eval(re.sub(r"DeviceProperties\([^)]*\)", "0", told))
    config = ast.literal_eval(re.search(r"configs=\[(\{.*?\})\]", text)[1])
    source, name = f"{head}\n@triton.jit{body}", f"<kernel of the code {hash(text)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict = {"__name__": "kernel"}
    exec(compile(source, name, "exec"), scope)
    fn = scope[re.search(r"^def (\w+)\(", body, re.MULTILINE)[1]]
    hints = told["configs"][0]
    source = ASTSource(fn, told["signature"], told["constants"], hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=config)


@pytest.mark.parametrize("name", ["permuted", "rows, backward"])
def test_kernels_in_the_code_compile_alone_and_spill_nothing(found, name):
    kernels = KERNEL.findall(found[name]["code"])
    assert len(kernels) == 2
    for _, text in kernels:
        assert used(compiled(text, 90))[1] == 0


def test_without_the_lowering_a_call_stays_and_one_warning_says_so(monkeypatch):
    """The hook's name is gone, as in a version that has another."""
    monkeypatch.delattr("torch._inductor.lowering.register_lowering")
    monkeypatch.delitem(sys.modules, "tiga.inductor.lowering", raising=False)
    monkeypatch.delattr(inductor, "lowering", raising=False)
    monkeypatch.setattr(inductor, "HOOKS", (inductor._kernels,))
    monkeypatch.setattr(inductor, "_installed", False)
    import torch._inductor.compile_fx

    torch._dynamo.reset()
    program, (q, k, v) = Attention(), fields()
    want = plain_attention(torch.ones(6, 6).bool(), q, k, v)
    fn = torch.compile(lambda *a: attend(program, tg.Graph.dense(6), *a), backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="lacks a hook .*register_lowering") as seen:
        torch.testing.assert_close(fn(q, k, v), want)
    assert len(seen) == 1
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="tiga")
        torch.testing.assert_close(fn(q, k, v), want)


def test_on_the_cpu_a_call_stays():
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    program, (q, k, v) = Attention(), fields()
    fn = torch.compile(lambda *a: attend(program, tg.Graph.dense(6), *a), fullgraph=True)
    with torch.no_grad():
        out, (code,) = run_and_get_code(fn, q, k, v)
    torch.testing.assert_close(out, plain_attention(torch.ones(6, 6).bool(), q, k, v))
    assert code.count(CALL) == 1
