"""Full attention: a dense graph and the online softmax.

out[i] = sum_j softmax_j(<key[j], query[i]> * scale) value[j] over every pair (j -> i). Runs on CUDA in float16 where
there is a GPU, else on the CPU in float32.
"""

import torch
import torch.nn.functional as F

import tiga as tg

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
nodes, heads, width = 1024, 4, 64


class FullAttention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(dim=-1) * scale
        return self.reducer(score, src.value)


def main() -> None:
    torch.manual_seed(0)
    # Heads lie outermost in memory and are viewed as (N, H, D): kernels take any strides, so no copy is made.
    query, key, value = torch.randn(3, heads, nodes, width, device=device, dtype=dtype).permute(0, 2, 1, 3)

    program = FullAttention()
    output = program(  # (N, H, D)
        graph=tg.Graph.dense(nodes, device=device),
        src={"key": key, "value": value},
        dst={"query": query},
        scale=width**-0.5,
    )

    plain = F.scaled_dot_product_attention(*(x.float().permute(1, 0, 2) for x in (query, key, value))).permute(1, 0, 2)
    error = (output.float() - plain).abs().max().item()
    print(f"{nodes} x {nodes} pairs, {heads} heads on {device}: largest difference to plain torch {error:.1e}")
    assert error < (2e-3 if dtype == torch.float16 else 1e-5)


if __name__ == "__main__":
    main()
