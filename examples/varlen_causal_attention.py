"""Causal attention over packed sequences: one graph a sequence, put side by side with `Graph.cat`.

Position i receives from every j <= i of its own sequence; an edge between two sequences does not exist, so nothing
masks it. `Graph.cu_seqlens` builds the same relation from the cumulative lengths. Runs on CUDA in float16 where there
is a GPU, else on the CPU in float32.
"""

import torch
import torch.nn.functional as F

import tiga as tg

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
heads, width = 4, 64
lengths = [384, 1, 96, 640, 57]


class VarlenCausalAttention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(dim=-1) * scale
        return self.reducer(score, src.value)


def main() -> None:
    generator = torch.Generator(device=device).manual_seed(20260821)
    shape = (sum(lengths), heads, width)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))

    graph = tg.Graph.cat([tg.Graph.triangular(length, device=device) for length in lengths])
    program = VarlenCausalAttention()
    output = program(  # (N, H, D)
        graph=graph,
        src={"key": key, "value": value},
        dst={"query": query},
        scale=width**-0.5,
    )

    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    packed = program(
        graph=tg.Graph.cu_seqlens(cu_seqlens, causal=True),
        src={"key": key, "value": value},
        dst={"query": query},
        scale=width**-0.5,
    )

    parts = zip(*(x.float().permute(1, 0, 2).split(lengths, dim=1) for x in (query, key, value)))
    plain = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], dim=1).permute(1, 0, 2)
    error = (output.float() - plain).abs().max().item()
    print(f"{graph.num_edges} edges in {len(lengths)} sequences on {device}: largest difference to torch {error:.1e}")
    assert graph.num_edges == sum(n * (n + 1) // 2 for n in lengths)
    assert error < (2e-3 if dtype == torch.float16 else 1e-5)
    assert torch.equal(output, packed), "cat and cu_seqlens make one relation"


if __name__ == "__main__":
    main()
