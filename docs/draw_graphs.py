"""Draws the kinds of docs/graphs.md, and docs/pictures/plot-*.png of docs/pictures.md. Run from anywhere."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402

import tiga as tg  # noqa: E402
from tiga.pictures import svg  # noqa: E402

PICTURES = Path(__file__).with_name("pictures")
N = 12
KINDS = {
    "dense": tg.Graph.dense(N),
    "triangular": tg.Graph.triangular(N),
    "window": tg.Graph.window(N, 3, 1),
    "blocks": tg.Graph.cu_seqlens([0, 5, 7, N]),
    "intervals": tg.Graph.intervals([0] * 5 + [5] * 4 + [2, 0, 11], [3] * 5 + [11] * 4 + [4, 0, 12], N),
    "csr": tg.Graph.from_edge_index([[0, 3, 7, 1, 4, 9, 2, 5, 11, 6], [0, 0, 1, 2, 2, 3, 4, 5, 5, 11]], N, N),
}


def main() -> None:
    for name, graph in KINDS.items():
        PICTURES.joinpath(f"graph-{name}.svg").write_text(svg(graph) + "\n", encoding="utf-8")
    torch.manual_seed(0)
    positions = torch.rand(60, 2)
    axes = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")[1]
    tg.Graph.cu_seqlens([0, 5, 7, 12]).plot(ax=axes[0])
    tg.Graph.cu_seqlens([0, 5000, 7000, 12000]).plot(ax=axes[1])
    tg.Graph.radius(positions, 0.2).plot(ax=axes[2])
    pyplot.savefig(PICTURES / "plot.png", dpi=70)
    pyplot.close("all")
    ax = pyplot.subplots(figsize=(4, 4), layout="constrained")[1]
    tg.Graph.knn(positions, 3).plot(ax=ax)
    pyplot.savefig(PICTURES / "graph-points.png", dpi=70)


if __name__ == "__main__":
    main()
