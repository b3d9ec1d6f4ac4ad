"""Graph attention: a small network scores each edge, the online softmax weighs the neighbours.

score[e] = MLP(position[j] - position[i], x[j], x[i]) for each edge e = (j -> i) within the cutoff; out[i] = sum_j
softmax_j(score) x[j]. Gradients reach the features, the positions and the network. Runs on CUDA where there is a GPU,
else on the CPU.
"""

import torch
from torch import nn

import tiga as tg

device = "cuda" if torch.cuda.is_available() else "cpu"
nodes, f_in, hidden, cutoff = 512, 8, 16, 0.15


class GAT(tg.MessagePassing):
    reducer = tg.online_softmax()

    def __init__(self, attn):
        super().__init__()
        self.attn = tg.nn.trace(attn)

    def edge(self, src, dst, edge):
        return self.reducer(self.attn(edge.displacement, src.x, dst.x), src.x)


def plain_gat(attn: nn.Module, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The same over all pairs: features of every (i, j) side by side, a mask, a softmax."""
    displacement = positions - positions[:, None]  # [i, j] = position[j] - position[i]
    near = (displacement.square().sum(-1) <= cutoff**2) & ~torch.eye(nodes, dtype=torch.bool, device=device)
    pairs = torch.cat([displacement, x.expand(nodes, -1, -1), x[:, None].expand(-1, nodes, -1)], dim=-1)
    weight = near * attn(pairs).squeeze(-1).exp()
    # A position without neighbours has weights of zero only: it receives 0.
    return weight @ x / weight.sum(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def main() -> None:
    torch.manual_seed(0)
    positions = torch.rand((nodes, 3), device=device)  # (N, 3)
    x = torch.randn((nodes, f_in), device=device)  # (N, F_in)

    graph = tg.Graph.radius(positions, cutoff=cutoff)
    attn = nn.Sequential(
        nn.Linear(3 + 2 * f_in, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, 1),
    ).to(device)
    kernel = GAT(attn)

    with torch.no_grad():
        output = kernel(graph=graph, src={"x": x}, dst={"x": x})  # (N, F_in)

    positions_g = positions.clone().requires_grad_(True)
    xg = x.clone().requires_grad_(True)
    graph_g = tg.Graph.radius(positions_g, cutoff=cutoff)
    out_g = kernel(graph=graph_g, src={"x": xg}, dst={"x": xg})

    wanted = (positions_g, xg, *attn.parameters())
    plain = plain_gat(attn, positions_g, xg)
    # Quadratic, so that the gradient reaching the kernel differs from row to row.
    ours = (output, *torch.autograd.grad(out_g.square().sum(), wanted))
    theirs = (plain.detach(), *torch.autograd.grad(plain.square().sum(), wanted))
    error = max(((a - b).abs().max() / b.abs().max().clamp_min(1)).item() for a, b in zip(ours, theirs))
    print(f"{graph.num_edges} edges among {nodes} positions on {device}: largest difference to plain torch {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
