"""Causal attention: the look-ahead ban is the graph, so the edge function has no mask.

Position i receives from every j <= i: a triangular relation of N (N + 1) / 2 edges that is never written down. Runs on
CUDA in float16 where there is a GPU, else on the CPU in float32.
"""

import torch
import torch.nn.functional as F

import tiga as tg

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
nodes, heads, width = 256, 2, 64


class CausalWeightedValue(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(dim=-1) * scale
        return self.reducer(score, src.value)


def main() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    query, key, value = torch.randn(3, heads, nodes, width, device=device, dtype=dtype).permute(0, 2, 1, 3)

    kernel = CausalWeightedValue()
    graph = tg.Graph.triangular(nodes, device=device)
    output = kernel(  # (N, H, D)
        graph=graph,
        src={"key": key, "value": value},
        dst={"query": query},
        scale=width**-0.5,
    )

    rows = (x.float().permute(1, 0, 2) for x in (query, key, value))
    plain = F.scaled_dot_product_attention(*rows, is_causal=True).permute(1, 0, 2)
    error = (output.float() - plain).abs().max().item()
    print(f"{graph.num_edges} edges among {nodes} positions on {device}: largest difference to plain torch {error:.1e}")
    assert graph.num_edges == nodes * (nodes + 1) // 2
    assert error < (2e-3 if dtype == torch.float16 else 1e-5)
    return output, query, key, value


if __name__ == "__main__":
    main()
