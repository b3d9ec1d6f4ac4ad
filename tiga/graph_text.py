"""What a graph prints: one line, a small drawing, and explain()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tiga import relations
from tiga.density import density
from tiga.graph_checks import can_read, number

if TYPE_CHECKING:
    from tiga.graph import Graph

CELLS = 16
LARGEST_DRAWN = 2**20
"""Pairs a graph may have and still be drawn where it is printed."""


def short(graph: Graph) -> str:
    """One line, spelled as the constructor where the kind is one: `Graph.triangular(5)`."""
    n, m = graph.ints[:2]
    sizes = number(n) if graph.kind in ("dense", "triangular") and _same(n, m) else f"{number(n)}, {number(m)}"
    if graph.kind == "dense":
        text = f"Graph.dense({sizes})"
    elif graph.kind == "triangular":
        offset = "" if _same(n, m) and _same(graph.ints[2], 0) else f", offset={number(graph.ints[2])}"
        text = f"Graph.triangular({sizes}{offset})"
    elif graph.kind == "window":
        left, right, offset = (number(i) for i in graph.ints[2:])
        extra = ("" if _same(n, m) else f", num_src={number(m)}") + ("" if offset == "0" else f", offset={offset}")
        text = f"Graph.window({number(n)}, {left}, {right}{extra})"
    else:
        text = f"Graph.{graph.kind}(num_dst={number(n)}, num_src={number(m)}{_count(graph)})"
    return text + (".reverse()" if graph.reversed else "")


def _count(graph: Graph) -> str:
    if graph.kind == "blocks":
        return f", blocks={number(graph.tensors[2].shape[0])}"
    if graph.kind == "csr":
        return f", num_edges={number(graph.num_edges)}"
    return ""


def _same(a: Any, b: Any) -> bool:
    return number(a) == number(b)


def drawn(graph: Graph) -> str:
    """Rows are destinations, columns sources: █ every pair of the cell, ▒ some, · none; at most 16 x 16 cells."""
    n, m = graph.num_dst, graph.num_src
    if not is_drawable(graph) or n * m > LARGEST_DRAWN:
        return ""
    rows, columns = min(n, CELLS), min(m, CELLS)
    share = density(graph, rows, columns)
    lines = ["".join("█" if s == 1 else "▒" if s > 0 else "·" for s in line) for line in share.tolist()]
    scale = f"\n(a cell is about {n / rows:.3g} x {m / columns:.3g} pairs)" if (rows, columns) != (n, m) else ""
    return "\n".join(lines) + scale


def is_drawable(graph: Graph) -> bool:
    """Whether there is a pair to draw, and its tensors may be read."""
    return can_read(*graph.tensors) and graph.num_dst > 0 and graph.num_src > 0


def explain(graph: Graph) -> str:
    """Kind, sizes, edges, storage and what runs on it."""
    relation = relations.RELATIONS[graph.kind]
    n, m = graph.num_dst, graph.num_src
    lines = {
        "relation": f"{graph.kind}, {'reversed' if graph.reversed else 'as given'}: {relation.formula}",
        "sizes": f"{number(n)} destinations, {number(m)} sources",
        "edges": _edges(graph),
        "numbers": _numbers(graph),
        "storage": f"{_bytes(graph.tensors)} bytes" + _positions(graph) + _prepared(graph),
        "device": str(graph.device) if graph.device is not None else "that of the fields",
        "runs on": relations.RUNS_ON["implicit" if relation.is_implicit else "listed"],
    }
    return "\n".join([f"### {short(graph)}", *(f"{name:<9} {text}" for name, text in lines.items())])


def _edges(graph: Graph) -> str:
    edges = number(graph.num_edges)
    n, m = (number(i) for i in graph.ints[:2])
    if graph.kind == "triangular" and relations.is_square_triangle(graph.ints):
        return f"N(N+1)/2 = {n}*{int(n) + 1}/2 = {edges}"
    return f"{n}*{m} = {edges}" if graph.kind == "dense" else edges


def _numbers(graph: Graph) -> str:
    if graph.kind == "csr":
        return "by destination, then source" if len(graph.tensors) == 2 else "the order in which the edges were given"
    return "by destination, then source" + (" of the graph that was reversed" if graph.reversed else "")


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _prepared(graph: Graph) -> str:
    if not graph.prepared:
        return ""
    both = "both directions" if len(graph.prepared) > 2 else "one direction"
    kept = {id(t) for t in graph.tensors}
    return (
        f", and lists for kernels, {both}, of {_bytes(tuple([t for t in graph.prepared if id(t) not in kept]))} bytes"
    )


def _positions(graph: Graph) -> str:
    shift = "" if graph.shift is None else f", and shifts of {_bytes((graph.shift,))} bytes"
    return "" if graph.positions is None else f", and positions of {_bytes(graph.positions)} bytes{shift}"
