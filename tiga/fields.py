"""src, dst and edge as an edge function sees them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiga.errors import TraceError
from tiga.symbols import Sym
from tiga.trace import Tracer


class Fields:
    """src, dst or edge inside an edge function: its attributes are the fields as traced values.

    Names of fields begin with at most one underscore, so that none is taken here.
    """

    def __init__(self, tracer: Tracer, place: str, fields: dict, provided: dict) -> None:
        self.__tracer__ = tracer
        self.__place__ = place
        self.__given__ = fields
        self.__provided__ = provided  # what the graph itself gives, by name: functions of these fields

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        if name not in self.__provided__:
            given = ", ".join(sorted(self.__given__)) or "none"
            instead = f"Pass it: {self.__place__}={{'{name}': tensor}}."
            if self.__place__ == "edge" and name in PLACED:
                instead = "Graphs with positions have it: tg.Graph.radius, tg.Graph.knn."
            raise TraceError(
                f"the edge function reads {self.__place__}.{name}, but the {self.__place__} fields given are: {given}. "
                + instead
            )
        x = self.__provided__[name](self)
        setattr(self, name, x)
        return x

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return name in self.__given__


def _number(edge: Fields) -> Any:
    return edge.__tracer__.emit("number", ())


def _displacement(edge: Fields) -> Any:
    tracer = edge.__tracer__
    (i, i_name), (j, j_name), (shift, shift_name) = tracer.positions
    i, j = tracer.capture(i, i_name, "dst", "position"), tracer.capture(j, j_name, "src", "position")
    return j - i if shift is None else j - i + tracer.capture(shift, shift_name, "edge", "position")


def _distance(edge: Fields) -> Any:
    d = _displacement(edge)
    return edge.__tracer__.emit("norm", ((d * d).emit("sum", "-1"),))


NUMBERED = {"number": _number}
PLACED = {**NUMBERED, "displacement": _displacement, "distance": _distance}  # displacement = pos_src - pos_dst + shift


def places(tracer: Tracer, src: dict, dst: dict, edge: dict, provided: dict, forms: tuple) -> tuple:
    """The first three arguments of an edge function. forms: of the fields, those of src first, of edge last."""
    made = Fields(tracer, "src", src, {}), Fields(tracer, "dst", dst, {}), Fields(tracer, "edge", edge, provided)
    at = {"src": made[0], "dst": made[1], "edge": made[2]}
    for row in tracer.read([*src.values(), *dst.values(), *edge.values()], forms):
        setattr(at[row.place], row.name, Sym(tracer, row.ref, row.type))
    return made


def positions_of(dst: Tensor, src: Tensor, shift: Tensor | None, fields: dict[str, dict]) -> tuple:
    """What a tracer keeps of a graph's positions: each tensor with a name that no field has."""
    wanted = (("positions", "dst"), ("positions", "src"), ("shift", "edge"))
    i, j, apart = [free_name(name, fields[place]) for name, place in wanted]
    return (dst, i), (src, j), (shift, apart)


def free_name(name: str, taken: dict) -> str:
    while name in taken:
        name = name + "_"
    return name


def forms_of(place: str, fields: dict[str, Tensor]) -> list[tuple]:
    return [(place, name, t.dtype, t.shape[1:], "") for name, t in fields.items()]
