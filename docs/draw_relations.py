"""Draws docs/pictures/relations.svg: five relations as matrices, row i receiving from column j. Run from anywhere."""

from pathlib import Path

import torch

import tiga as tg

SIZE, CELL, GAP, TOP, LEFT = 12, 12, 46, 44, 30
SOURCES = [0, 3, 7, 1, 4, 9, 2, 5, 11, 6, 0, 8, 10, 3, 7, 1]
DESTINATIONS = [0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 11]
RELATIONS = {
    "dense": tg.Graph.dense(SIZE),
    "triangular": tg.Graph.triangular(SIZE),
    "window (left=3)": tg.Graph.window(SIZE, left=3),
    "cu_seqlens [0, 5, 7, 12]": tg.Graph.cu_seqlens(torch.tensor([0, 5, 7, SIZE])),
    "from_edge_index": tg.Graph.from_edge_index(torch.tensor([SOURCES, DESTINATIONS]), num_src=SIZE, num_dst=SIZE),
}


def matrix(name: str, graph: tg.Graph, left: int) -> str:
    side = SIZE * CELL
    cells = "".join(
        f'<rect x="{left + CELL * j + 1}" y="{TOP + CELL * i + 1}" width="{CELL - 2}" height="{CELL - 2}"/>\n'
        for i, j in graph.to_mask().nonzero().tolist()
    )
    return (
        f'<rect x="{left}" y="{TOP}" width="{side}" height="{side}" fill="#eef0f6"/>\n<g fill="#3b4cc0">\n{cells}</g>\n'
        f'<text x="{left + side / 2}" y="18">{name}</text>\n'
        f'<text x="{left + side / 2}" y="34" fill="#667">{graph.num_edges} edges</text>\n'
    )


def main() -> None:
    step = SIZE * CELL + GAP
    width, height = LEFT + step * len(RELATIONS) - GAP + 14, TOP + SIZE * CELL + 26
    matrices = "".join(matrix(name, graph, LEFT + step * k) for k, (name, graph) in enumerate(RELATIONS.items()))
    middle = TOP + SIZE * CELL / 2
    axes = (
        f'<text x="{LEFT + SIZE * CELL / 2}" y="{height - 8}" fill="#667">source j</text>\n'
        f'<text transform="translate(18 {middle}) rotate(-90)" fill="#667">destination i</text>\n'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    font = 'font-family="sans-serif" font-size="12" text-anchor="middle"'
    paper = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    picture = f"{head} {font}>\n{paper}\n{matrices}{axes}</svg>\n"
    Path(__file__).with_name("pictures").joinpath("relations.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
