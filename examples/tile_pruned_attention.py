"""Approximate attention that skips tiles of keys whose best score is far below the running maximum.

`block_prune_threshold` is a property of the reducer: a tile is skipped when its largest score lies below the running
maximum of the query block by more than ln(1 / threshold). Where pruning cannot run, the program refuses instead of
computing something else; this example then shows the refusal and ends with the exact reducer.
"""

import torch
import torch.nn.functional as F

import tiga as tg

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
nodes, heads, width = 1024, 4, 64


class TilePrunedAttention(tg.MessagePassing):
    def __init__(self, threshold):
        super().__init__()
        self.reducer = tg.online_softmax(
            block_prune_threshold=threshold,
        )

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(dim=-1) * scale
        return self.reducer(score, src.value)


def main() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, heads, nodes, width, device=device, dtype=dtype).permute(0, 2, 1, 3)

    def attend(threshold: float | None) -> torch.Tensor:
        program = TilePrunedAttention(threshold)
        return program(  # (N, H, D)
            graph=tg.Graph.dense(nodes, device=device),
            src={"key": key, "value": value},
            dst={"query": query},
            scale=width**-0.5,
        )

    plain = F.scaled_dot_product_attention(*(x.float().permute(1, 0, 2) for x in (query, key, value))).permute(1, 0, 2)
    try:
        output = attend(width / nodes)
    except tg.TigaError as refusal:
        assert "block_prune_threshold" in str(refusal), refusal
        print(f"refused on {device}, as documented:\n{refusal}\nWithout a threshold:")
        output = attend(None)
    # Scores of random keys differ little from tile to tile: a threshold this low skips none, and the result is exact.
    error = (output.float() - plain).abs().max().item()
    print(f"{nodes} x {nodes} pairs, {heads} heads on {device}: largest difference to plain torch {error:.1e}")
    assert error < (2e-3 if dtype == torch.float16 else 1e-5)


if __name__ == "__main__":
    main()
