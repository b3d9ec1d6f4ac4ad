"""Writes docs/one_call.md: causal attention from the edge function to machine code. Needs Triton, and no GPU."""

import collections
import datetime
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton

import tiga as tg
from tiga.adjoint import adjoint, augment
from tiga.codegen import kernels, launch
from tiga.ops import tiles
from tiga.ops.propagate import allocate
from tiga.parser import parse

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from compiled import compile_for, used  # noqa: E402

EDGE = """\
class CausalAttention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(dim=-1) * scale
        return self.reducer(score, src.value)
"""
ROWS, HEADS, WIDTH, CAPABILITY = 2048, 8, 64, 90
PAGE = """\
# One call, from edge to SASS

What one call of causal attention becomes, level after level: bfloat16, {rows} rows, {heads} heads of {width}, compiled
for sm_{capability} without a GPU on {date} by `python docs/write_one_call.py` (triton {triton}). Each level can be
asked of a program that ran: `program.ir("domain")`, `"kernel"`, `"ttir"`, `"ttgir"`, `"ptx"`.

## The edge function

```{{ .python .not-run }}
{edge}```

## The program

`edge` runs once on traced values. The text that it leaves is the operator's first argument, the guard, the key of every
cache and what is saved.

```text
{program}
```

## The program of the gradients

With the results of the fold and the lse kept (`augment`), the gradient of `key`, `query` and `value` is another
program: it computes scores again, and has one fold for each operand. Its own gradient is derived in the same way.

```text
{gradient}
```

## The kernel

Written from the program and a plan: {plan}. The loops, the masked tiles first, are the skeleton's; the
lines in them are the program's, with the line that each comes from. If a sum is not a number, tiles are visited again,
so that a weight of zero lets nothing through.

```text
{kernel}
```

## Machine code

{registers} registers a thread, {spilled} bytes spilled. Instructions by kind, of {total} in all:

{counts}

The matrix products of the first tile, queries by keys, and the start of its softmax:

```text
{sass}
```
"""
KINDS = {
    "HGMMA": "matrix products of a warpgroup",
    "MUFU.EX2": "exponentials",
    "LDGSTS": "copies from global to shared memory, asynchronous",
    "LDG": "loads from global memory",
    "STG": "stores",
    "BAR.SYNC": "barriers",
}


def compiled(call):
    """(source, plan, kernel) of the call's forward."""
    found = []

    def runner(source, values, plan, grid, device):
        options = {"num_warps": plan.warps, "num_stages": plan.stages}
        kernel = compile_for(kernels.load(source), values, options, CAPABILITY)
        found.append((source, plan, kernel))
        return kernels.Runner(lambda *arguments: None, used(kernel)[1], kernel)

    p = parse(call.program)
    kept, launch.runner = launch.runner, runner
    try:
        tiles.run(p, call.tensors, call.ints, call.scalars, allocate(p, call.tensors, call.ints))
    finally:
        launch.runner = kept
    return found[-1]


def disassembled(kernel) -> list[str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?;)", text)]


def excerpt(code: list[str]) -> str:
    first = next(k for k, line in enumerate(code) if "HGMMA" in line)
    wanted = [line for line in code[first:] if re.search(r"HGMMA|WARPGROUP|FMNMX|MUFU|SHFL|FMUL", line)]
    start = [line for line in wanted if "FMNMX" in line or "SHFL" in line][:4]
    products = [line for line in wanted if "HGMMA" in line][:4]
    softmax = [line for line in wanted if "MUFU.EX2" in line][:2]
    return "\n".join([*products, "...", *start, "...", *softmax])


def main() -> None:
    names = {"tg": tg}
    exec(EDGE, names)
    query, key, value = torch.randn(3, ROWS, HEADS, WIDTH, dtype=torch.bfloat16)
    call = names["CausalAttention"]().lower(
        tg.Graph.triangular(ROWS), src={"key": key, "value": value}, dst={"query": query}, scale=WIDTH**-0.5
    )
    source, plan, kernel = compiled(call)
    code = disassembled(kernel)
    kinds = collections.Counter(kind for line in code for kind in KINDS if re.search(rf"\b{re.escape(kind)}\b", line))
    registers, spilled = used(kernel)
    text = PAGE.format(
        rows=ROWS,
        heads=HEADS,
        width=WIDTH,
        capability=CAPABILITY,
        date=datetime.date.today(),
        triton=triton.__version__,
        edge=EDGE,
        program=call.program,
        gradient=adjoint(augment(call.program), (0, 1, 2), (0,)).text,
        plan=f"{plan.block_m} rows by {plan.block_n} sources a tile, {plan.warps} warps",
        kernel=source.strip(),
        registers=registers,
        spilled=spilled,
        total=len(code),
        counts="\n".join(
            ["| instruction | what | times |", "|---|---|---|", *[f"| {k} | {KINDS[k]} | {kinds[k]} |" for k in KINDS]]
        ),
        sass=excerpt(code),
    )
    (ROOT / "docs" / "one_call.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
