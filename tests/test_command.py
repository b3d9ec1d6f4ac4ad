"""python -m tiga: what it says is held against what torch and the files say."""

import os
import subprocess
import sys

import pytest
import torch
import triton
from triton import language as tl

import tiga as tg
from tiga import __main__ as command
from tiga.codegen import cache, kernels

from compiled import compile_for  # isort: skip


def test_report(tmp_path):
    folders = {"TRITON_CACHE_DIR": "triton", "TIGA_CACHE_DIR": "own", "TORCH_EXTENSIONS_DIR": "torch"}
    env = {**os.environ, **{name: str(tmp_path / folder) for name, folder in folders.items()}}
    done = subprocess.run([sys.executable, "-m", "tiga"], env=env, capture_output=True, text=True)
    assert f"  {tmp_path / 'triton'}: 0 Triton kernels, 0.0 MiB" in done.stdout
    assert f"  {tmp_path / 'torch' / 'tiga'}: 0 C++ files, 0.0 MiB" in done.stdout
    assert f"  {tmp_path / 'own'}: 0 files of tuned plans, 0.0 MiB" in done.stdout
    assert done.returncode == 0 and done.stderr == ""
    sections = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert sections == ["versions", "devices", "kernels", "operators", "cache"]
    assert f"  tiga {tg.__version__}, Python {sys.version.split()[0]}" in done.stdout
    assert f"  torch {torch.__version__.split('+')[0]}" in done.stdout
    assert "torch operations (any graph, any program): available everywhere" in done.stdout


def test_operators_are_those_of_the_namespace():
    found = command.operators()
    assert {"propagate", "attention", "radius", "segment_sum"} <= set(found)
    for name in found:
        assert str(getattr(torch.ops.tiga, name).default._schema).startswith(f"tiga::{name}(")


def test_says_why_kernels_are_not_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    tiles, rows, *_ = command.kernels()
    assert tiles == f"tiles (implicit graphs): not available: torch {torch.__version__} was built without CUDA"
    assert command.devices()[1].startswith("cuda: torch ")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "rows (listed graphs): not available: no device was found" in command.kernels()[1]
    monkeypatch.setattr(command, "has_triton", lambda: False)
    assert "not available: triton is not installed" in command.kernels()[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "has_triton", lambda: True)
    assert command.kernels()[0] == "tiles (implicit graphs): available on CUDA"
    monkeypatch.setattr(command.launch_cpp, "compiler", lambda: "")
    for line in command.kernels()[2::2]:
        assert line.endswith("not available: no C++ compiler was found (set CXX)")


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge):
        return self.reducer((src.key * dst.query).sum(-1), src.value)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, edges):
        causal = tg.Graph.triangular(x.shape[0])
        for _ in range(2):
            x = self.attention(causal, src={"key": x, "value": x}, dst={"query": x})
        return torch.ops.tiga.segment_sum(x, edges)


def test_explains_a_saved_model(tmp_path, capsys):
    path = str(tmp_path / "model.pt2")
    x = torch.randn(6, 2, 4)
    model = torch.export.export(Model(), (x, torch.tensor([0, 2, 6])))
    torch.export.save(model, path)
    assert command.main(["explain", path]) == 0
    text = capsys.readouterr().out
    texts, others = command.programs(path)
    ((first, calls),) = texts.items()
    assert calls == 2 and others == {"segment_sum": 1}
    assert first == Attention().lower(tg.Graph.triangular(6), src={"key": x, "value": x}, dst={"query": x}).program
    assert f"program 1, 2 calls, on CUDA: kernels (tiles)\n{first}\n" in text
    assert text.startswith(f"{path}: 1 program of tiga\ntorch.ops.tiga.segment_sum: 1 call\n")


def test_says_what_has_no_kernel():
    def edge(n, **dtype):
        x = torch.zeros(n, 2, 4, **dtype)
        return Attention().lower(tg.Graph.triangular(n), src={"key": x, "value": x}, dst={"query": x}).program

    assert command.way(edge(3)) == "kernels (tiles)"
    assert command.way(edge(3, dtype=torch.float64)).startswith("torch operations, no kernel fits (")


@pytest.mark.parametrize("name, words", [("none.pt2", "there is no such file"), ("text.pt2", "it is no archive")])
def test_refuses_what_is_no_model(name, words, tmp_path, capsys):
    (tmp_path / "text.pt2").write_text("no archive")
    assert command.main(["explain", str(tmp_path / name)]) == 1
    assert words in capsys.readouterr().err


OURS = """
import triton
from triton import language as tl

@triton.jit
def propagate(x):
    tl.store(x, 1.0)
"""


@triton.jit
def foreign(x):
    tl.store(x, 2.0)


def test_clears_what_is_tigas_and_nothing_else(tmp_path, monkeypatch, capsys):
    folders = [tmp_path / name for name in ("triton", "torch", "own")]
    for name, folder in zip(("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TIGA_CACHE_DIR"), folders):
        monkeypatch.setenv(name, str(folder))
    in_triton, in_torch, own = folders
    for path in (in_torch / "tiga" / "ours.so", in_torch / "theirs" / "theirs.so"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"library")
    cache.write("plans.json", [1, 2])
    compile_for(kernels.load(OURS), [torch.zeros(1)], {}, 90)
    compile_for(foreign, [torch.zeros(1)], {}, 90)
    assert command.cache_folder() == in_triton
    (ours,) = command.cached(in_triton)
    others = set(in_triton.iterdir()) - {ours}
    assert any(list(entry.glob("foreign.cubin")) for entry in others) and list(ours.glob("propagate.cubin"))
    assert command.main(["--clear-cache"]) == 0
    said = capsys.readouterr().out
    for words in (
        "triton: removed 1 Triton kernel,",
        "tiga: removed 1 C++ file,",
        "own: removed 1 file of tuned plans,",
    ):
        assert words in said
    assert set(in_triton.iterdir()) == others
    assert [path.name for path in in_torch.rglob("*.so")] == ["theirs.so"]
    assert list(own.iterdir()) == [] and cache.read("plans.json") is None
