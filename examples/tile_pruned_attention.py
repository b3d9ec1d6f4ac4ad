"""Approximate attention that skips tiles of keys whose best score is far below the running maximum.

`block_prune_threshold` is a property of the reducer: a tile is skipped when its largest score lies below the running
maximum of the query block by more than ln(1 / threshold). `prune_mass` skips tiles only while no row loses more than
that share of its probability. The program's `last_report` says what was skipped, with a certificate for each row. Where
pruning cannot run, the program refuses instead of computing something else; this example then shows it and ends
with the exact reducer.
"""

import torch
import torch.nn.functional as F

import tiga as tg

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
nodes, heads, width = 1024, 4, 64


class TilePrunedAttention(tg.MessagePassing):
    def __init__(self, threshold=None, mass=None):
        super().__init__()
        self.reducer = tg.online_softmax(
            block_prune_threshold=threshold,
            prune_mass=mass,
        )

    def edge(self, src, dst, edge, scale):
        score = (src.key * dst.query).sum(dim=-1) * scale
        return self.reducer(score, src.value)


def attend(program: TilePrunedAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return program(  # (N, H, D)
        graph=tg.Graph.dense(nodes, device=device),
        src={"key": key, "value": value},
        dst={"query": query},
        scale=width**-0.5,
    )


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    rows = [x.float().permute(1, 0, 2) for x in (query, key, value)]
    return F.scaled_dot_product_attention(*rows).permute(1, 0, 2)


def main() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, heads, nodes, width, device=device, dtype=dtype).permute(0, 2, 1, 3)
    try:
        # The first quarter of the keys is what every query looks for: the other tiles are skipped.
        wanted = torch.randn(heads, width, device=device, dtype=dtype)
        alike, keys = query / 2 + wanted, key / 4
        keys[: nodes // 4] += 2 * wanted
        program = TilePrunedAttention(mass=0.01)
        output = attend(program, alike, keys, value)
        report = program.last_report
        print(report)
        lost = report.certificate[..., None]  # of each row's probability at most
        assert report.share > 0.5 and lost.max() <= 0.01
        assert ((output - plain(alike, keys, value)).abs() <= 2 * lost * value.abs().max() + 4e-3).all()

        # Scores of random keys differ little from tile to tile: a threshold this low skips none of them.
        program = TilePrunedAttention(threshold=width / nodes)
        output = attend(program, query, key, value)
        print(program.last_report)
    except tg.TigaError as refusal:
        assert "pruning exists only" in str(refusal), refusal
        print(f"refused on {device}, as documented:\n{refusal}\nWithout pruning:")
        output = attend(TilePrunedAttention(), query, key, value)
    error = (output.float() - plain(query, key, value)).abs().max().item()
    print(f"{nodes} x {nodes} pairs, {heads} heads on {device}: largest difference to plain torch {error:.1e}")
    assert error < (2e-3 if dtype == torch.float16 else 1e-5)


if __name__ == "__main__":
    main()
