"""Dense and packed attention beside its peers, in one run on one GPU.

`python -m benchmarks.attention [--only NAME] [--out FOLDER]`

TFLOP/s of bfloat16 forward and backward passes, medians; work is counted by pairs that are edges. Every row is checked
against its peer on the same random data before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tiga as tg


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


class Softcap(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(-1) * scale
        return self.reducer(torch.tanh(score / 30) * 30, src.value)


class Alibi(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale, slope):
        score = (src.key * dst.query).sum(-1) * scale
        return self.reducer(score + (src.pos - dst.pos)[..., None] * slope, src.value)


def documents(total: int, count: int) -> list[int]:
    """Boundaries of log-normal lengths that fill `total`."""
    weight = torch.randn(count, generator=torch.Generator().manual_seed(0)).exp()
    ends = (weight.cumsum(0) / weight.sum() * total).round().long().tolist()
    return [0, *ends[:-1], total]


ROWS = {
    # name: rows, width, batch, heads, graph, edge function
    "D128 causal 8k": (8192, 128, 2, 16, "causal", Attention),
    "D128 full 8k": (8192, 128, 2, 16, "full", Attention),
    "D64 causal 8k": (8192, 64, 2, 32, "causal", Attention),
    "D64 full 8k": (8192, 64, 2, 32, "full", Attention),
    "softcap 30, causal 8k D128": (8192, 128, 2, 16, "causal", Softcap),
    "ALiBi, causal 8k D128": (8192, 128, 2, 16, "causal", Alibi),
    "54 documents, causal 32k D128": (32768, 128, 1, 16, "documents", Attention),
    "window 1024 of 32k D128": (32768, 128, 1, 16, "window", Attention),
}


class Row:
    """One line of the table: the same numbers for tiga and its peers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.n, self.width, self.batch, self.heads, self.kind, self.cls = ROWS[name]
        shape = (self.batch, self.heads, self.n, self.width)
        draw = lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.inputs = [draw() for _ in range(3)]
        self.slope = torch.exp2(-torch.arange(1, self.heads + 1, device="cuda") / 2)
        self.pos = torch.arange(self.n, device="cuda")
        n = self.n
        if self.kind == "documents":
            ends = torch.tensor(documents(n, 54), device="cuda", dtype=torch.int32)
            self.graph = tg.Graph.cu_seqlens(ends)
            of = torch.bucketize(self.pos, ends[1:].long(), right=True)
            self.mask = lambda b, h, i, j: (i >= j) & (of[i] == of[j])
        elif self.kind == "window":
            self.graph, self.mask = tg.Graph.window(n, 1024), lambda b, h, i, j: (i >= j) & (i - j <= 1024)
        elif self.kind == "causal":
            self.graph, self.mask = tg.Graph.triangular(n), lambda b, h, i, j: i >= j
        else:
            self.graph, self.mask = tg.Graph.dense(n), None
        self.module, self.scale = self.cls(), self.width**-0.5
        self.block_mask = None if self.mask is None else create_block_mask(self.mask, None, None, n, n, device="cuda")

    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.width * self.graph.num_edges

    def tiga(self) -> torch.Tensor:
        q, k, v = (x.permute(2, 0, 1, 3) for x in self.inputs)
        src, dst, more = {"key": k, "value": v}, {"query": q}, {}
        if self.cls is Alibi:
            src, dst, more = src | {"pos": self.pos}, dst | {"pos": self.pos}, {"slope": self.slope}
        return self.module(graph=self.graph, src=src, dst=dst, scale=self.scale, **more).permute(1, 2, 0, 3)

    def flex(self) -> torch.Tensor:
        slope = self.slope
        mods = {
            Attention: None,
            Softcap: lambda s, b, h, i, j: torch.tanh(s / 30) * 30,
            Alibi: lambda s, b, h, i, j: s + (j - i) * slope[h],
        }
        return compiled_flex()(*self.inputs, score_mod=mods[self.cls], block_mask=self.block_mask, scale=self.scale)

    def cudnn(self) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(*self.inputs, is_causal=self.kind == "causal", scale=self.scale)

    def peers(self) -> dict:
        found = {"tiga": self.tiga, "FlexAttention": self.flex}
        if self.cls is Attention and self.kind in ("causal", "full"):
            found["cuDNN"] = self.cudnn
        return found

    def measure(self) -> dict:
        """name -> (forward, backward) in TFLOP/s."""
        from triton.testing import do_bench

        want = self.flex().float()
        error = (self.tiga().float() - want).abs().max().item()
        assert error < 0.05 * want.abs().max().item(), f"{self.name}: differs from FlexAttention by {error}"
        assert "lowering: tiles" in self.module.explain()
        found = {}
        for name, run in self.peers().items():
            with torch.no_grad():
                forward = do_bench(run, warmup=50, rep=200, return_mode="median")
            out = run()
            grad = torch.randn_like(out)
            back = do_bench(
                lambda out=out, grad=grad: torch.autograd.grad(out, self.inputs, grad, retain_graph=True),
                warmup=50,
                rep=200,
                return_mode="median",
            )
            found[name] = (self.flops() / forward / 1e9, 2.5 * self.flops() / back / 1e9)
        return found


_flex = []


def compiled_flex():
    if not _flex:
        _flex.append(torch.compile(flex_attention))
    return _flex[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of rows that contain this")
    parser.add_argument("--out", default="benchmarks/results", help="folder of the dated table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import triton

    torch.manual_seed(0)
    names = [name for name in ROWS if options.only is None or options.only in name]
    device = torch.cuda.get_device_name()
    lines = [
        f"# Attention, {datetime.date.today()}",
        "",
        f"{device}, torch {torch.__version__}, triton {triton.__version__}, bfloat16; TFLOP/s forward / backward.",
        "`python -m benchmarks.attention`",
        "",
        "| work | tiga | FlexAttention, compiled | cuDNN SDPA | tiga / Flex |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        try:
            found = Row(name).measure()
        except (AssertionError, RuntimeError) as e:
            lines.append(f"| {name} | failed: {str(e).splitlines()[0][:80]} | | | |")
            print(lines[-1], flush=True)
            continue
        cell = {k: f"{a:.0f} / {b:.0f}" for k, (a, b) in found.items()}
        (a, b), (c, d) = found["tiga"], found["FlexAttention"]
        ratio = f"{a / c:.2f}x / {b / d:.2f}x"
        lines.append(f"| {name} | {cell['tiga']} | {cell['FlexAttention']} | {cell.get('cuDNN', '')} | {ratio} |")
        print(lines[-1], flush=True)
        torch._dynamo.reset()
        _flex.clear()
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, f"attention-{datetime.date.today()}.md")
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    print(path)


if __name__ == "__main__":
    main()
