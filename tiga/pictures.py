"""Pictures of graphs: matplotlib axes for plot(); SVG and HTML for notebooks, which need no other package."""

from __future__ import annotations

import itertools
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tiga import graph_algebra, graph_text
from tiga.density import cell_bounds, density
from tiga.errors import TigaError

if TYPE_CHECKING:
    from tiga.graph import Graph

PAPER, INK = "#eef0f6", "#3b4cc0"
PLOTTED = 128
"""Cells along a side of a plotted matrix, at most; as many are drawn one by one up to SEPARATE."""
SEPARATE = 40
SHOWN = 48
"""Cells along a side of a matrix in a notebook, at most."""
FORMS = ("matrix", "points")


def plot(graph: Graph, form: str | None, ax: Any, positions: Any) -> Any:
    """The matplotlib axes that the graph was drawn into."""
    pair = _positions(graph, positions)
    if form is None:
        form = "points" if pair is not None and pair[0].shape[1] > 1 else "matrix"
    if form not in FORMS:
        raise TigaError(f"Graph.plot: form={form!r}. Write one of {FORMS}, or leave it out.")
    if not graph_text.is_drawable(graph):
        raise TigaError(
            f"Graph.plot: {graph!r} has no pair of a destination and a source, or its tensors cannot be read while "
            "compiling, exporting or capturing. Plot a graph that has some, eagerly."
        )
    if form == "points" and (pair is None or pair[0].shape[1] < 2):
        raise TigaError(
            'Graph.plot: form="points" needs a position of two or more coordinates for every node, and the graph has '
            'none. Give positions=, of shape (num_nodes, 2), or write form="matrix".'
        )
    ax = _axes() if ax is None else ax
    if form == "points":
        assert pair is not None
        _draw_points(graph, ax, *pair)
    else:
        _draw_matrix(graph, ax)
    ax.set_title(f"{graph!r}\n{graph.num_edges} edges", fontsize="small")
    return ax


def _axes() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise TigaError(
            "Graph.plot: matplotlib is not installed. Write pip install matplotlib, or print(graph) for a text drawing."
        ) from None
    return pyplot.subplots(layout="constrained")[1]


def _positions(graph: Graph, given: Any) -> tuple[Tensor, Tensor] | None:
    """Of destinations and of sources, on the host."""
    pair = graph.positions
    if given is not None:
        if not isinstance(given, Tensor) or given.dim() != 2:
            raise TigaError("Graph.plot: positions is no tensor (num_nodes, coordinates). Give one row a node.")
        if not given.shape[0] == graph.num_dst == graph.num_src:
            raise TigaError(
                f"Graph.plot: positions has {given.shape[0]} rows, but the graph {graph.num_dst} destinations and "
                f"{graph.num_src} sources. Points can be drawn where these are the same nodes."
            )
        pair = given, given
    if pair is None:
        return None
    dst = pair[0].detach().cpu()
    return dst, dst if pair[1] is pair[0] else pair[1].detach().cpu()


def _draw_matrix(graph: Graph, ax: Any) -> None:
    n, m = graph.num_dst, graph.num_src
    share = density(graph, min(n, PLOTTED), min(m, PLOTTED))
    coarse = share.shape != (n, m)
    # few edges among many pairs would be as pale as none
    top = float(share.max()) if coarse and bool(share.any()) else 1.0
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("tiga", [PAPER, INK])
    image = ax.imshow(
        share.numpy(),
        cmap=colours,
        vmin=0,
        vmax=top,
        extent=(-0.5, m - 0.5, n - 0.5, -0.5),
        interpolation="nearest",
        aspect="equal" if 0.2 < n / m < 5 else "auto",
    )
    if coarse:
        ax.figure.colorbar(image, ax=ax, label="share of a cell's pairs that are edges", shrink=0.8)
    elif max(n, m) <= SEPARATE:
        ax.set_xticks([j - 0.5 for j in range(1, m)], minor=True)
        ax.set_yticks([i - 0.5 for i in range(1, n)], minor=True)
        ax.grid(which="minor", color="white", linewidth=1)
        ax.tick_params(which="minor", length=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("source j")
    ax.set_ylabel("destination i")


def _draw_points(graph: Graph, ax: Any, dst: Tensor, src: Tensor) -> None:
    from matplotlib.collections import LineCollection

    i, j, number = graph_algebra.listed(graph)
    valid = i >= 0
    displacement = src[j[valid].long().cpu(), :2] - dst[i[valid].long().cpu(), :2]
    if graph.shift is not None:
        # an edge from an image of a node ends outside the box
        shift = graph.shift.detach() if number is None else graph.shift.detach()[number.long()]
        displacement = displacement + shift[valid, :2].cpu()
    end = dst[i[valid].long().cpu(), :2]
    lines = torch.stack([end + displacement, end], 1).tolist()
    ax.add_collection(LineCollection(lines, colors=INK, linewidths=0.8, alpha=min(1.0, 4000 / max(len(lines), 4000))))
    size = max(2.0, 30 - 0.02 * len(dst))
    ax.scatter(dst[:, 0], dst[:, 1], s=size, color="#1b2250", zorder=2)
    if src is not dst:
        ax.scatter(src[:, 0], src[:, 1], s=size, color="#d1495b", zorder=2)
    ax.set_aspect("equal")
    ax.autoscale()
    ax.set_xlabel("position[0]")
    ax.set_ylabel("position[1]" + (", seen along the others" if dst.shape[1] > 2 else ""))


def svg(graph: Graph, cells: int = SHOWN) -> str:
    """The matrix as SVG: row i receives from column j; the darker a cell, the more of its pairs are edges."""
    n, m = min(graph.num_dst, cells), min(graph.num_src, cells)
    side = max(4, 240 // max(n, m))
    share = density(graph, n, m)
    top = 1.0 if (n, m) == (graph.num_dst, graph.num_src) else float(share.max()) or 1.0
    boxes = "".join(_boxes(row, side, side * r) for r, row in enumerate((share / top).tolist()))
    width, height = side * m, side * n
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/><g fill="{INK}">{boxes}</g></svg>'
    )


def _boxes(row: list[float], side: int, y: int) -> str:
    """A box for each cell that is not empty; for each run of equal cells where they are too small to tell apart."""
    gap = 1 if side >= 8 else 0
    shades = [f"{max(x, 0.08):.2f}" if x else "" for x in row]
    parts, c = [], 0
    for shade, run in itertools.groupby(shades):
        count = len(list(run))
        for first, cells in [(c, count)] if gap == 0 else [(c + k, 1) for k in range(count)]:
            if shade:
                size = f'width="{side * cells - gap}" height="{side - gap}"'
                opacity = "" if shade == "1.00" else f' fill-opacity="{shade}"'
                parts.append(f'<rect x="{side * first}" y="{y}" {size}{opacity}/>')
        c += count
    return "".join(parts)


def html(graph: Graph) -> str:
    """What explain() says, beside the matrix."""
    if not graph_text.is_drawable(graph):
        return f"<pre>{escape(repr(graph))}</pre>"
    n, m = graph.num_dst, graph.num_src
    cell = ""
    if max(n, m) > SHOWN:
        high, wide = (cell_bounds(size, min(size, SHOWN)).diff().max().item() for size in (n, m))
        cell = f"a cell is up to {high} x {wide} pairs; "
    title, *lines = graph.explain().splitlines()
    rows = "".join(f"<tr><th>{escape(line[:9].strip())}</th><td>{escape(line[10:])}</td></tr>" for line in lines)
    return (
        f'<div style="display:flex;gap:1.5em;align-items:flex-start"><figure style="margin:0">{svg(graph)}'
        f"<figcaption><small>{cell}row: destination, column: source</small></figcaption></figure>"
        f"<div><b>{escape(title.removeprefix('### '))}</b><table>{rows}</table></div></div>"
    )
