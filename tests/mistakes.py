"""Mistakes, and beside each the error that it makes: docs/errors.md is written from these by tests/test_mistakes.py."""

import linecache

import torch

import tiga as tg

SETUP = """\
import torch
import tiga as tg

class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale=1.0):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)

class Biased(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(src.x * edge.bias)

x = torch.ones(5, 4)
points = torch.zeros(5, 3)
"""

MISTAKES = {
    "Fields": [
        'Attention()(tg.Graph.triangular(7), src={"key": x, "value": x}, dst={"query": x})',
        'Biased()(tg.Graph.triangular(5), src={"x": x[:, 0]}, edge={"bias": torch.ones(12)})',
        'Attention()(tg.Graph.dense(5), src={"key": x, "value": 2.0}, dst={"query": x})',
        'Attention()(tg.Graph.dense(5), src=x, dst={"query": x})',
        'Attention()(tg.Graph.dense(5), src={"key": x}, dst={"query": x})',
        'Attention()(tg.Graph.dense(5), src={"key": x, "value": x}, dst={"query": x.to("meta")})',
        'Attention()(torch.ones(5, 5), src={"key": x, "value": x}, dst={"query": x})',
        'Attention()(tg.Graph.dense(5), src={"key": x, "value": x.to(torch.complex64)}, dst={"query": x})',
        'Attention()(tg.Graph.dense(5), src={"key": torch.ones(5, 3), "value": x}, dst={"query": x})',
    ],
    "Edge functions": [
        'program("return self.reducer(src.x if dst.x else 0)")',
        'program("return self.reducer(src.x @ weight)")',
        'program("return self.reducer(src.x.sum(0))")',
        'program("return self.reducer(src.x.add_(1))")',
        'program("return self.reducer(src.x.detach())")',
        'program("return self.reducer(torch.fft.fft(src.x))")',
        'program("return self.reducer(float(src.x))")',
        'program("return self.reducer([y for y in src.x])")',
        'program("return self.reducer(edge.distance)")',
        'program("return None")',
    ],
    "Graphs": [
        "tg.Graph.triangular(2, 6)",
        "tg.Graph.cu_seqlens([1, 4])",
        "tg.Graph.cu_seqlens([0, 12, 8])",
        "tg.Graph.cu_seqlens([0, 2], src_boundaries=[0, 4])",
        "tg.Graph.intervals([0], [9], 4)",
        "tg.Graph.intervals([0], [3], 4, [2], [4])",
        "tg.Graph.from_edge_index([[0, 5], [1, 2]], num_src=5)",
        "tg.Graph.from_edge_index([[0, 1], [1, 2], [3, 4]])",
        "tg.Graph.from_csr([0, 2, 1], [0])",
        'tg.Graph.radius(points, float("nan"))',
        "tg.Graph.radius(points, 1.0, max_neighbors=2)",
        "tg.Graph.dense(2, 3) & tg.Graph.dense(3, 2)",
        'tg.Graph.dense(3).plot("points")',
    ],
    "Attention": [
        "torch.ops.tiga.attention(x, x[:3], x[:3], causal=True)",
        "tg.flex_attention(x, x, x)",
        "tg.integrations.nested.attention(x, x, x)",
    ],
}


def run(text: str, name: str, names: dict) -> None:
    """Executed as a file of this name, whose lines errors quote."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), names)


def program(line: str):
    """A program whose edge function is this line, over a dense graph of five nodes."""

    class Program(tg.MessagePassing):
        reducer = tg.sum()

    names = {"torch": torch, "weight": torch.ones(4, 4)}
    run(f"def edge(self, src, dst, edge):\n    {line}", "edge.py", names)
    Program.edge = names["edge"]
    x = torch.ones(5, 4)
    return Program()(tg.Graph.dense(5), src={"x": x}, dst={"x": x})


def error(code: str) -> tuple[str, str]:
    """(type, text) of what a mistake raises."""
    names: dict = {"program": program}
    run(SETUP, "model.py", names)
    try:
        exec(code, names)
    except Exception as e:
        return type(e).__name__, str(e)
    raise AssertionError(f"{code} raises nothing")


def page() -> str:
    parts = [
        "# Errors",
        "An error says what was asked, what was wrong with it, with names and numbers, and what to write instead. It "
        "is raised before any work starts, and compiled calls say the same (Dynamo may wrap the type). `TigaError` is "
        "a `ValueError`; `TraceError`, a `TigaError`, comes from an edge function and quotes its line.",
        "Each mistake below is made by a test, which holds the text beside it.",
        f"Before each:\n\n```{{ .python .not-run }}\n{SETUP}```",
        "`program(line)` is a program whose edge function is that line, over five nodes, each with a field `x`.",
    ]
    for title, mistakes in MISTAKES.items():
        parts.append(f"## {title}")
        for code in mistakes:
            kind, text = error(code)
            parts.append(f"```{{ .python .not-run }}\n{code}\n```\n\n```text\n{kind}: {text}\n```")
    return "\n\n".join(parts) + "\n"
