"""What a call is given: fields are tensors with the graph's rows, on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiga.errors import TigaError
from tiga.graph import Graph
from tiga.types import NAMES


def check_graph(name: str, graph: Any) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"{name}: graph is {type(graph).__name__}; build one with tg.Graph.dense, .triangular, .cu_seqlens, "
            ".from_edge_index, ..."
        )


def check_fields(name: str, graph: Graph, src: Any, dst: Any, edge: Any) -> tuple[torch.device, tuple]:
    """Fields are tensors with the graph's rows, on one device, where the graph's tensors are too.

    Gives the device and the fields' forms.
    """
    num_src, num_dst = (graph.ints if graph.reversed else graph.ints[1::-1])[:2]
    home: Any = None
    first, forms = "", []
    # a compiler would guard on what eager calls have met, and compile again after one
    met = () if torch.compiler.is_compiling() else _names
    for place, fields in (("src", src), ("dst", dst), ("edge", edge)):
        if not isinstance(fields, dict):
            raise TypeError(
                f"{name}: {place} is {type(fields).__name__}; give a dictionary of tensors, {place}={{'name': tensor}}."
            )
        if not fields:
            continue
        rows = num_src if place == "src" else num_dst if place == "dst" else _edges(graph)
        for key, t in fields.items():
            if not isinstance(t, Tensor) or (key not in met and not is_field_name(key)):
                refuse_field(name, place, key, t)
            shape, device, dtype = t.shape, t.device, t.dtype
            if dtype not in NAMES:
                refuse_field(name, place, key, t)
            if len(shape) == 0 or (rows is not None and shape[0] != rows):
                refuse_rows(name, graph, place, key, t, rows)
            if home is None:
                home, first = device, place + "." + key
            elif device != home:
                raise TigaError(
                    f"{name}: {place} field {key!r} is on {device}, {named(first)} on {home}. "
                    "Put all fields on one device."
                )
            forms.append((place, key, dtype, shape[1:], ""))
    there = graph.device
    if home is None:
        if graph.positions is None and not graph.tensors:
            raise TigaError(f"{name}: no field was given. Give src, dst or edge: dictionaries of tensors.")
        home = there if graph.positions is None else graph.positions[0].device
    elif there is not None and there != home and there.type != home.type:
        raise TigaError(
            f"{name}: the graph is on {there}, {named(first)} on {home}. Move one of them: graph.to({str(home)!r})."
        )
    return home, tuple(forms)


def refuse_field(name: str, place: str, key: Any, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(
            f"{name}: {place} field {key!r} is {type(t).__name__}, not a tensor. "
            "A number that all edges share is a keyword argument."
        )
    if not is_field_name(key):
        raise TigaError(f"{name}: {place} field name {key!r}; names are letters, digits and _, at most 64.")
    raise TypeError(f"{name}: {place} field {key!r} is {t.dtype}; programs compute with {', '.join(NAMES.values())}.")


def refuse_rows(name: str, graph: Graph, place: str, key: str, t: Tensor, rows: Any) -> None:
    noun = {"src": "sources", "dst": "destinations", "edge": "edges"}[place]
    if t.dim() == 0:
        raise TigaError(f"{name}: {place} field {key!r} has no dimensions; its first is the {noun}.")
    more = f" Build the graph for {sized(t.shape[0])} {noun}, or give a field of {sized(rows)} rows."
    if place == "edge":
        more = (
            "\n  Edge fields are numbered by destination, then source; "
            "for a graph made by from_edge_index, in the order you gave the edges."
        )
    raise TigaError(
        f"{name} on {describe(graph)}: {place} field {key!r} has {sized(t.shape[0])} rows, but the graph "
        f"has {sized(rows)} {noun}.{more}"
    )


_names: set[str] = set()  # that were looked at before


def is_field_name(key: Any) -> bool:
    good = isinstance(key, str) and key.isidentifier() and key.isascii() and len(key) <= 64 and key[:2] != "__"
    if good and not torch.compiler.is_compiling() and len(_names) < 4096:
        _names.add(key)
    return good


def _edges(graph: Graph) -> Any:
    """The number of edges where it is known without reading a device."""
    if graph.kind in ("blocks", "intervals") and isinstance(graph.ints[2], int) and graph.ints[2] < 0:
        if torch.compiler.is_compiling() or graph.tensors[0].device.type != "cpu":
            return None
    return graph.num_edges


def sized(n: Any) -> str:
    return str(n) if isinstance(n, int) and not torch.compiler.is_compiling() else str(int(n))


def describe(graph: Graph) -> str:
    return f"Graph {graph.kind} {sized(graph.num_dst)} x {sized(graph.num_src)}"


def named(ref: str) -> str:
    place, _, name = ref.partition(".")
    return f"{place} field {name!r}"
