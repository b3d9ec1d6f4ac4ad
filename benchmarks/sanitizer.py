"""compute-sanitizer over small runs of the kernels: `python -m benchmarks.sanitizer`.

Out-of-bounds accesses (memcheck) and races in shared memory (racecheck): attention, forward, backward and twice, few
rows and many, packed and dense, and as on sm_90 once there are enough; and an edge list with a hub, fused by rows. A
planted fault is looked for first, so that a tool which sees nothing says nothing. Prints what the tool says, or what
refused it.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import sysconfig

PLACES = (
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "/opt/nvidia/**/compute-sanitizer",
    "{packages}/nvidia/**/compute-sanitizer",
    "{packages}/triton/backends/nvidia/bin/compute-sanitizer",
)
TOOLS = ("memcheck", "racecheck")


def find() -> str | None:
    """The tool's path: on PATH, else in the usual places, the packages of this Python among them."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        return on_path
    home = os.environ.get("CUDA_HOME")
    packages = sysconfig.get_path("purelib")
    for place in (*([f"{home}/bin/compute-sanitizer"] if home else []), *PLACES):
        for path in sorted(glob.glob(place.format(packages=packages), recursive=True)):
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
    return None


def attention() -> None:
    """What is watched: every kernel of some small calls."""
    import torch

    import tiga as tg
    from tiga import passes

    class Attention(tg.MessagePassing):
        reducer = tg.online_softmax()

        def edge(self, src, dst, edge, scale):
            return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)

    def run(graph: tg.Graph, dtype: torch.dtype, width: int, heads: int = 2, twice: bool = True) -> bool:
        rows = (graph.num_dst, graph.num_src, graph.num_src)
        q, k, v = (torch.randn(m, heads, width, device="cuda", dtype=dtype).requires_grad_() for m in rows)
        out = Attention()(graph=graph, src={"key": k, "value": v}, dst={"query": q}, scale=width**-0.5)
        first = torch.autograd.grad(out, (q, k, v), torch.randn_like(out), create_graph=twice)
        second = torch.autograd.grad(first, (q, k, v), [torch.randn_like(x) for x in first]) if twice else ()
        return all(x.isfinite().all().item() for x in (out, *first, *second))

    n = 150
    graphs = [tg.Graph.triangular(n), tg.Graph.cu_seqlens([0, 20, 20, 90, n]).to("cuda"), tg.Graph.dense(2, n)]
    for dtype, width in ((torch.float16, 64), (torch.float32, 40)):
        for graph in graphs:
            print(graph.kind, dtype, width, "finite:", run(graph, dtype, width), flush=True)
    before = passes.COUNTS["launch-hopper"]
    for graph in (tg.Graph.triangular(1100), tg.Graph.cu_seqlens([0, 500, 1100]).to("cuda")):
        print(graph.kind, "of 1100, finite:", run(graph, torch.bfloat16, 128, heads=18, twice=False), end=", ")
        print("kernels of sm_90:", passes.COUNTS["launch-hopper"] - before, flush=True)


def rows() -> None:
    """Scores as GATv2 has them, over edges of which one row has a third."""
    import torch

    import tiga as tg

    class Additive(tg.MessagePassing):
        reducer = tg.online_softmax()

        def edge(self, src, dst, edge, weight):
            score = (torch.nn.functional.leaky_relu(src.x + dst.x, 0.2) * weight).sum(-1)
            return self.reducer(score + edge.bias, src.x)

    n, edges = 300, 3000
    ends = torch.randint(n, (2, edges), device="cuda")
    ends[1, : edges // 3] = 7
    graph = tg.Graph.from_edge_index(ends, n, n)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        draw = lambda *shape, dtype=dtype: torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
        x, bias, weight = draw(n, 4, 32), draw(edges, 4), draw(4, 32)
        out = Additive()(graph=graph, src={"x": x}, dst={"x": x}, edge={"bias": bias}, weight=weight)
        first = torch.autograd.grad(out, (x, bias, weight), torch.randn_like(out), create_graph=True)
        second = torch.autograd.grad(first, (x, bias, weight), [torch.randn_like(t) for t in first])
        finite = all(t.isfinite().all().item() for t in (out, *first, *second))
        print("edge list", dtype, "finite:", finite, flush=True)


WORKS = {"attention": attention, "rows": rows}
FAULTS = {
    "memcheck": 'extern "C" __global__ void fault(float* x) { x[(1 << 28) + threadIdx.x] = 1; }',
    "racecheck": """extern "C" __global__ void fault(float* x) {
        __shared__ float held[64];
        held[threadIdx.x] = threadIdx.x;
        x[threadIdx.x] = held[(threadIdx.x + 33) % 64];
    }""",
}


def planted(tool: str) -> None:
    """A store far beyond a tensor's end, or a read of shared memory before another warp's write."""
    import torch

    kernel = torch.cuda._compile_kernel(FAULTS[tool], "fault")
    kernel((1, 1, 1), (64, 1, 1), [torch.zeros(64, device="cuda")])
    torch.cuda.synchronize()


def watch(path: str, tool: str, work: str, limit: int) -> tuple[int, str]:
    """(exit status, what was printed) of a child under the tool; 99: it found something."""
    command = [path, "--tool", tool, "--error-exitcode", "99", sys.executable, "-m", "benchmarks.sanitizer"]
    # each tensor in memory of its own: a neighbour in the allocator's pool would hide a stray access
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        run = subprocess.run([*command, "--child", work], env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as e:
        said = e.stdout or ""
        return 124, f"stopped after {limit} s\n{said.decode() if isinstance(said, bytes) else said}"
    return run.returncode, run.stdout + run.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=150, help="seconds a run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return WORKS[options.child]() if options.child in WORKS else planted(options.child)
    path = find()
    if path is None:
        sys.exit(
            "compute-sanitizer is nowhere: not on PATH, under /usr/local/cuda*, /opt/nvidia or this Python's packages"
        )
    print(path, subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1:])
    for work in WORKS.values():
        work()  # compiles the kernels, so that the watched runs only load them
    worst = 0
    for tool in TOOLS:
        for work in (tool, *WORKS):
            status, said = watch(path, tool, work, options.limit)
            wanted = 0 if work in WORKS else 99
            name = work if work in WORKS else "a planted fault"
            print(f"\n{tool}, {name}: exit {status}{'' if status == wanted else f', where {wanted} was wanted'}")
            lines = [
                x for x in said.splitlines() if x.startswith("=========") or "Error" in x or x.startswith("stopped")
            ]
            print("\n".join(lines[:12] + lines[-3:] if len(lines) > 15 else lines), flush=True)
            worst = max(worst, int(status != wanted))
    sys.exit(worst)


if __name__ == "__main__":
    main()
