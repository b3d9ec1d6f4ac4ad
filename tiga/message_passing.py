"""MessagePassing: the user's edge function and a graph become one operator call."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tiga import passes
from tiga.errors import TigaError, TraceError
from tiga.graph import Graph
from tiga.ops.propagate import _op as propagate
from tiga.stages import Stage, stages
from tiga.trace import Fields, Sym, Tracer
from tiga.types import NAMES


class Call(NamedTuple):
    """The operator's arguments: torch.ops.tiga.propagate(*call)."""

    program: str
    tensors: list
    ints: list
    scalars: list


class MessagePassing(nn.Module):
    """result[i] = reduce over the edges j -> i of edge(src[j], dst[i], edge[j -> i]).

    Subclass it, set a reducer, and write `edge(self, src, dst, edge, **uniform)`: it is run once on symbolic values
    and describes the life of ONE edge. Calling the module: graph, then src / dst / edge: dictionaries of tensors
    (num_src, *features), (num_dst, *features), (num_edges, *features) - edge fields in the order of the graph's
    edge numbers - and uniform arguments, tensors or numbers, by name. The result is what `edge` returns: (num_dst,
    *features) for a reducer's result, (num_edges, *features) for a bare edge value, tuples and dictionaries of
    these.

    16-bit values are computed in float32 and rounded at the outputs, which have the dtype of their expression. Rows
    without edges give 0. Differentiable to any order. Raises TigaError for fields that do not fit the graph, and
    TraceError, quoting the line, for what cannot be traced.
    """

    def edge(self, src: Any, dst: Any, edge: Any, **uniform: Any) -> Any:
        raise TigaError(f"{type(self).__name__} has no edge function. Define edge(self, src, dst, edge, ...).")

    def forward(
        self, graph: Graph, src: dict | None = None, dst: dict | None = None, edge: dict | None = None, **uniform: Any
    ) -> Any:
        if torch.compiler.is_compiling():
            return self._trace(graph, given(src), given(dst), given(edge), uniform).run()
        with passes.Record() as record:
            traced = self._trace(graph, given(src), given(dst), given(edge), uniform)
            result = traced.run()
        self._remember(traced, record)
        return result

    def lower(
        self, graph: Graph, src: dict | None = None, dst: dict | None = None, edge: dict | None = None, **uniform: Any
    ) -> Call:
        """The arguments of torch.ops.tiga.propagate for this call: (program, tensors, ints, scalars)."""
        traced = self._trace(graph, given(src), given(dst), given(edge), uniform)
        if len(traced.stages) > 1:
            raise TigaError(
                f"{type(self).__name__}.edge reads a finished fold on its edges, so it is {len(traced.stages)} "
                "programs, one after another; "
                "lower() gives the call of one. Call the module, and see them with ir('domain')."
            )
        return traced.call(traced.stages[0], [])

    def _trace(self, graph: Graph, src: dict, dst: dict, edge: dict, uniform: dict) -> Traced:
        check_fields(type(self).__name__, graph, src, dst, edge)
        device = device_of(type(self).__name__, graph, src, dst, edge, uniform)
        tracer = Tracer()
        tracer.home = device
        places = (
            Fields(tracer, "src", src, {}),
            Fields(tracer, "dst", dst, {}),
            Fields(tracer, "edge", edge, provided(tracer, graph, src, dst)),
        )
        arguments = {}
        for name, value in uniform.items():
            arguments[name] = uniform_argument(tracer, name, value)
        if torch.compiler.is_compiling():
            result = self.edge(*places, **arguments)
        else:
            result = located(self, places, arguments)
            warn_unread(type(self), places)
            passes.ran("trace")
        return Traced(self, tracer, graph, result, places)

    def _remember(self, traced: Traced, record: passes.Record) -> None:
        _explain().remember(self, [stage.text for stage in traced.stages], traced.tracer.home, record)

    def explain(self) -> str:
        """What ran at the last call outside torch.compile: backend, provider, lowering, passes, cache key, remarks."""
        from tiga.explain import explain

        return explain(self)

    def ir(self, level: str = "domain") -> str:
        """The text of a level of what was compiled at the last call: "domain" is the program."""
        from tiga.explain import ir

        return ir(self, level)

    @property
    def last_variant(self) -> Any:
        """What the last call compiled to: key, artifacts by level, cache hits and misses."""
        from tiga.explain import last_variant

        return last_variant(self)


@functools.cache
def _explain() -> Any:
    return importlib.import_module("tiga.explain")


def given(fields: Any) -> Any:
    """No fields where none were given; anything else is looked at by check_fields."""
    return {} if fields is None else fields


class Traced:
    """A traced call: programs, tensors, and how the results go back to the user's structure."""

    def __init__(self, module: MessagePassing, tracer: Tracer, graph: Graph, result: Any, places: tuple) -> None:
        self.module_name = type(module).__name__
        self.tracer = tracer
        self.graph = graph
        self.places = places
        self.leaves: list[Sym] = []
        self.structure = self._flatten(result)
        self.stages = stages(tracer, graph.kind, len(graph.tensors), graph.reversed, self.leaves)

    def _flatten(self, result: Any) -> Any:
        if isinstance(result, Sym):
            self.leaves.append(returned(self.tracer, result))
            return len(self.leaves) - 1
        if isinstance(result, (tuple, list)):
            return tuple([self._flatten(r) for r in result])
        if isinstance(result, dict):
            return {name: self._flatten(r) for name, r in result.items()}
        raise TraceError(
            f"{self.module_name}.edge returned {type(result).__name__}. "
            "Return what a reducer gives, or a traced value, or a tuple or dict of them."
        )

    def call(self, stage: Stage, results: list) -> Call:
        tensors = []
        for what, k in stage.reads:
            tensors.append(self.tracer.operands[k][0] if what == "operand" else results[k[0]][k[1]])
        tensors.extend(self.graph.tensors)
        return Call(stage.text, tensors, list(self.graph.ints), [self.tracer.scalars[k][1] for k in stage.scalars])

    def run(self) -> Any:
        results: list[list[Tensor]] = []
        for stage in self.stages:
            call = self.call(stage, results)
            results.append(propagate(call.program, call.tensors, call.ints, call.scalars))
        return self.assemble(results)

    def assemble(self, results: list) -> Any:
        by_ref: dict[str, Tensor] = {}
        for stage, outputs in zip(self.stages, results):
            for ref, t in zip(stage.outputs, outputs):
                by_ref[ref] = t
        return self._rebuild(self.structure, by_ref)

    def _rebuild(self, structure: Any, by_ref: dict) -> Any:
        if isinstance(structure, tuple):
            return tuple([self._rebuild(s, by_ref) for s in structure])
        if isinstance(structure, dict):
            return {name: self._rebuild(s, by_ref) for name, s in structure.items()}
        return by_ref[self.leaves[structure].ref]


def returned(tracer: Tracer, x: Sym) -> Sym:
    """A node's field returned as it is is a value of each edge; a reducer's result stays one of each destination."""
    if x.type.place == "edge" or tracer.is_reduced(x.ref):
        return x
    return x.emit("spread", "edge")  # type: ignore[return-value]


def located(module: MessagePassing, places: tuple, arguments: dict) -> Any:
    """Run the edge function; an error says which of the user's lines it comes from."""
    try:
        return module.edge(*places, **arguments)
    except TigaError as e:
        where = _user_line(module, e)
        raise TraceError(f"while tracing {type(module).__name__}.edge{where}\n  {e}").with_traceback(
            e.__traceback__
        ) from None


def _user_line(module: MessagePassing, e: BaseException) -> str:
    own, frame, found = inspect.getmodule(MessagePassing).__file__.rsplit("/", 1)[0], e.__traceback__, None  # type: ignore[union-attr]
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith(own) and "/torch/" not in name:
            found = (name, frame.tb_lineno)
        frame = frame.tb_next
    if found is None:
        return ""
    import linecache

    return f" ({found[0].rsplit('/', 1)[-1]}:{found[1]}):\n      {linecache.getline(*found).strip()}"


def uniform_argument(tracer: Tracer, name: str, value: Any) -> Any:
    """Tensors, int, bool, str, None are handed on; a float is a traced number: no value specialises a program."""
    if isinstance(value, float):
        if torch.compiler.is_compiling() and not exporting():
            return tracer.number(value, name)
        return tracer.scalar(name, value)
    if isinstance(value, Tensor):
        tracer.names.append((value, name))
    return value


def exporting() -> bool:
    """torch.compiler.is_exporting(), which Dynamo takes for True in every compilation before torch 2.12."""
    return torch.compiler._is_exporting_flag


def provided(tracer: Tracer, graph: Graph, src: dict, dst: dict) -> dict:
    """Edge fields the graph gives: number; with positions displacement = pos_src - pos_dst and distance."""
    fields: dict[str, Any] = {"number": lambda: tracer.emit("number", ())}
    positions = graph.positions
    if positions is None:
        return fields

    def displacement() -> Any:
        if not tracer.shown:
            i = tracer.operand(positions[0], "dst", free_name("positions", dst), "position")
            j = tracer.operand(positions[1], "src", free_name("positions", src), "position")
            tracer.shown.append(j - i)
        return tracer.shown[0]

    def distance() -> Any:
        d = displacement()
        return tracer.emit("norm", ((d * d).emit("sum", "-1"),))

    fields["displacement"], fields["distance"] = displacement, distance
    return fields


_unread: set = set()


def warn_unread(cls: type, places: tuple) -> None:
    """A field that was given and never read is most likely a misspelling; said once."""
    for fields in places:
        for name in fields._fields.keys() - fields._read.keys():
            key = (cls, fields._place, name)
            if key not in _unread:
                _unread.add(key)
                warnings.warn(
                    f"{cls.__name__}: {fields._place} field {name!r} was given and the edge function never reads it.",
                    stacklevel=4,
                )


def free_name(name: str, taken: dict) -> str:
    while name in taken:
        name = name + "_"
    return name


def check_fields(name: str, graph: Any, src: Any, dst: Any, edge: Any) -> None:
    """Fields are tensors with the graph's rows."""
    if not isinstance(graph, Graph):
        raise TypeError(
            f"{name}: graph is {type(graph).__name__}; build one with tg.Graph.dense, .triangular, .cu_seqlens, "
            ".from_edge_index, ..."
        )
    for place, fields in (("src", src), ("dst", dst), ("edge", edge)):
        if not isinstance(fields, dict):
            raise TypeError(
                f"{name}: {place} is {type(fields).__name__}; give a dictionary of tensors, {place}={{'name': tensor}}."
            )
        if not fields:
            continue
        rows, noun = _rows(graph, place)
        for key, t in fields.items():
            if not isinstance(t, Tensor):
                raise TypeError(
                    f"{name}: {place} field {key!r} is {type(t).__name__}, not a tensor. "
                    "A number that all edges share is a keyword argument."
                )
            if key not in _names and not is_field_name(key):
                raise TigaError(f"{name}: {place} field name {key!r}; names are letters, digits and _, at most 64.")
            if t.dim() == 0:
                raise TigaError(f"{name}: {place} field {key!r} has no dimensions; its first is the {noun}.")
            if t.dtype not in NAMES:
                raise TypeError(
                    f"{name}: {place} field {key!r} is {t.dtype}; programs compute with {', '.join(NAMES.values())}."
                )
            if rows is not None and t.shape[0] != rows:
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


def _rows(graph: Graph, place: str) -> tuple[Any, str]:
    """How many rows a place's fields have, None where that is not known, and what they are."""
    if place == "src":
        return graph.num_src, "sources"
    return (graph.num_dst, "destinations") if place == "dst" else (_edges(graph), "edges")


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


def device_of(name: str, graph: Graph, src: dict, dst: dict, edge: dict, uniform: dict) -> torch.device:
    """The one device of all fields, captured by the first; graph tensors must be there too."""
    home: Any = None
    first = ""
    for place, fields in (("src", src), ("dst", dst), ("edge", edge)):
        for key, t in fields.items():
            if home is None:
                home, first = t.device, f"{place} field {key!r}"
            elif t.device != home:
                raise TigaError(
                    f"{name}: {place} field {key!r} is on {t.device}, {first} on {home}. Put all fields on one device."
                )
    if home is None:
        if graph.positions is None and not graph.tensors:
            raise TigaError(f"{name}: no field was given. Give src, dst or edge: dictionaries of tensors.")
        return graph.positions[0].device if graph.positions is not None else graph.tensors[0].device
    if graph.device is not None and graph.device.type != home.type:
        raise TigaError(
            f"{name}: the graph is on {graph.device}, {first} on {home}. Move one of them: graph.to({str(home)!r})."
        )
    return home
