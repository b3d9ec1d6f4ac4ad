"""MessagePassing: the user's edge function and a graph become one operator call."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tiga import constant_traces, passes, prune, traces
from tiga.errors import TigaError, TraceError
from tiga.field_checks import check_fields, check_graph, named
from tiga.fields import NUMBERED, PLACED, places, positions_of
from tiga.graph import Graph
from tiga.ops.propagate import call as propagate
from tiga.stages import Programs, Stage, programs
from tiga.symbols import Sym
from tiga.trace import Tracer, flattened


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

    _made_while_compiling = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            self._made_while_compiling = True  # there is no object yet that could be called outside

    # *args and **kwargs of Any together let a type checker take any signature of a subclass
    def edge(self, src: Any, dst: Any, edge: Any, *args: Any, **kwargs: Any) -> Any:
        raise TigaError(f"{type(self).__name__} has no edge function. Define edge(self, src, dst, edge, ...).")

    def forward(
        self, graph: Graph, src: dict | None = None, dst: dict | None = None, edge: dict | None = None, **uniform: Any
    ) -> Any:
        if torch.compiler.is_compiling():
            traced = self._trace(graph, src, dst, edge, uniform)
            result = traced.run()
            if traced.reports:
                self._reports = tuple(traced.reports)
            return result
        with passes.Record() as record:
            traced = self._trace(graph, src, dst, edge, uniform)
            result = traced.run()
        if traced.reports:
            self._reports = tuple(traced.reports)
        _explain().remember(self, traced.programs.texts, traced.tracer.home, record)
        return result

    def lower(
        self, graph: Graph, src: dict | None = None, dst: dict | None = None, edge: dict | None = None, **uniform: Any
    ) -> Call:
        """The arguments of torch.ops.tiga.propagate for this call: (program, tensors, ints, scalars)."""
        traced = self._trace(graph, src, dst, edge, uniform)
        stages = traced.programs.stages
        if len(stages) > 1:
            raise TigaError(
                f"{type(self).__name__}.edge reads a finished fold on its edges, so it is {len(stages)} "
                "programs, one after another; "
                "lower() gives the call of one. Call the module, and see them with ir('domain')."
            )
        return Call(*traced.arguments(stages[0], []))

    def _trace(self, graph: Graph, src: Any, dst: Any, edge: Any, uniform: dict) -> Traced:
        src, dst, edge = {} if src is None else src, {} if dst is None else dst, {} if edge is None else edge
        check_graph(type(self).__name__, graph)
        graph = prepared(graph)
        given: dict[str, dict] = {"src": src, "dst": dst, "edge": edge, "uniform": uniform, "position": {}}
        provided, positions = NUMBERED, graph.positions
        if positions is not None:
            at = {"dst": positions[0], "src": positions[1], "edge": graph.shift}
            given["position"] = {place: x for place, x in at.items() if x is not None}
        held = None if torch.compiler.is_compiling() else traces.of(self)
        like = None if held is None else held.short(self, graph, given)
        if like is not None:
            passes.applied("trace")
            return Traced.again(like.known, like.home, graph, *like.given)
        home, forms = check_fields(type(self).__name__, graph, src, dst, edge)
        if torch.compiler.is_dynamo_compiling() and not exporting():
            constant = constant_traces.constant_trace(self, graph, forms, home, given)
            if constant is not None:
                return Traced.again(constant[0], home, graph, constant[1], ())
        key = None if held is None else held.key(self, graph, forms, given)
        known = None if key is None or held is None else held.known.get(key)
        if known is not None and held is not None:
            passes.applied("trace")
            held.shorten(self, known, home, graph, given)
            return Traced.again(known, home, graph, *known.of(given))
        tracer = Tracer()
        tracer.home = home
        if positions is not None:
            tracer.positions = positions_of(positions[0], positions[1], graph.shift, given)
            provided = PLACED
        fields = places(tracer, src, dst, edge, provided, forms)
        arguments = {name: uniform_argument(tracer, name, value) for name, value in uniform.items()}
        if tracer.compiling:
            return Traced.anew(self, tracer, graph, self.edge(*fields, **arguments))
        watch = None if key is None else traces.Watch()
        try:
            with contextlib.nullcontext() if watch is None else watch:
                result = self.edge(*fields, **arguments)
        except TigaError as e:
            raise located(self, e).with_traceback(e.__traceback__) from None
        passes.ran("trace")
        traced = Traced.anew(self, tracer, graph, result)
        if held is not None and watch is not None and not watch.computed:
            held.learn(self, graph, forms, traced, given)
        for ref in traced.programs.unread:
            warn_unread(type(self), ref)
        return traced

    @constant_traces.constant
    def _edge_reads_of(self, fields: tuple[str, ...]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None  # a Dynamo that follows this, for it knows the mark no more, is to follow the edge function too
        found = constant_traces.reads_of(self, fields)
        if found is None:
            passes.LOG.debug("%s.edge does more than Dynamo could guard: it is followed", type(self).__name__)
        return found

    @constant_traces.constant
    def _constant_trace(self, *words: Any) -> Any:
        return constant_traces.trace(self, *words)

    def explain(self) -> str:
        """What ran at the last call outside torch.compile: backend, provider, lowering, passes, cache key, remarks."""
        from tiga.explain import explain

        return explain(self)

    def ir(self, level: str = "domain") -> str:
        """The text of a level of what was compiled at the last call: "domain" is the program."""
        from tiga.explain import ir

        return ir(self, level)

    def plot(self) -> str:
        """Graphviz text of the last call's program: `dot -Tsvg`, or graphviz.Source(program.plot()), draws it.

        A box is an operand, an ellipse an operation, an octagon a fold over edges; the colour says where a value lives.
        """
        from tiga.explain import Explanation
        from tiga.program_pictures import dot

        return Explanation(dot(type(self).__name__, self.last_variant.programs))

    def _repr_html_(self) -> str:
        from tiga.program_pictures import module

        return module(self)

    @property
    def last_report(self) -> prune.Report | tuple[prune.Report, ...]:
        """What the last call's pruned fold skipped, or those of several, compiled or not: see tiga.prune.Report."""
        found = self.__dict__.get("_reports")
        if found is None:
            raise TigaError(
                f"{type(self).__name__}: no call was pruned. Give the reducer block_prune_threshold or prune_mass, and "
                "call the module."
            )
        reports = tuple([prune.Report(*held) for held in found])
        return reports[0] if len(reports) == 1 else reports

    @property
    def last_variant(self) -> Any:
        """What the last call compiled to: key, artifacts by level, cache hits and misses."""
        from tiga.explain import last_variant

        return last_variant(self)


def prepared(graph: Graph) -> Graph:
    """The graph with what kernels will read of it; where it has none, that is made in this call, and said."""
    ready = graph.ready(False)
    if ready is not graph and not torch.compiler.is_compiling() and "unprepared" not in _said:
        _said.add("unprepared")
        warnings.warn(
            f"{graph!r} lacks lists that kernels read of it: they are made at every call. Write graph = "
            "graph.prepare() once: constructors make those by source only where gradients are recorded.",
            stacklevel=5,
        )
    return ready


_said: set[str] = set()


@functools.cache
def _explain() -> Any:
    return importlib.import_module("tiga.explain")


class Traced:
    """A traced call: programs, tensors, and how the results go back to the user's structure."""

    def __init__(self, tracer: Any, graph: Graph, structure: Any, first: int, made: Programs, relation: tuple) -> None:
        """first: the number of the first result of what folds that skip tiles say of themselves."""
        self.tracer, self.graph, self.structure, self.first = tracer, graph, structure, first
        self.programs, self.relation = made, relation
        self.reports: list = []

    @classmethod
    def again(cls, known: traces.Known, home: Any, graph: Graph, operands: Any, scalars: Any) -> Traced:
        """A call whose trace is known."""
        tracer = traces.Again(home, operands, scalars)
        return cls(tracer, graph, known.structure, known.results, known.programs, cls.read(graph))

    @classmethod
    def anew(cls, module: MessagePassing, tracer: Tracer, graph: Graph, result: Any) -> Traced:
        """A call whose edge function gave `result`."""
        roots: list[Sym] = []
        structure = flattened(type(module).__name__, result, roots)
        for root in roots:
            tracer.lift(root)  # refused where it is of another call
        first, relation = len(roots), cls.read(graph)
        for note in tracer.notes:
            roots.extend([tracer.value(*word) for word in prune.wanted(note)])
        made = programs(tracer, graph.kind, len(relation), graph.reversed, roots)
        return cls(tracer, graph, structure, first, made, relation)

    @staticmethod
    def read(graph: Graph) -> tuple:
        """The relation's tensors: lists by source are for gradients."""
        return graph.tensors + (graph.prepared if torch.is_grad_enabled() else graph.prepared[:2])

    def arguments(self, stage: Stage, results: list) -> tuple:
        """What the operator is called with, given the results of earlier stages."""
        tensors = []
        for what, k in stage.reads:
            tensors.append(self.tracer.operands[k][0] if what == "operand" else results[k[0]][k[1]])
        tensors.extend(self.relation)
        return stage.text, tensors, list(self.graph.ints), [self.tracer.scalars[k][1] for k in stage.scalars]

    def run(self) -> Any:
        if self.tracer.notes:
            name, value = self.tracer.notes[0].asked
            prune.refuse(name, value, self.tracer.home.type, self.graph.kind)
        results: list[list[Tensor]] = []
        for stage in self.programs.stages:
            results.append(propagate(*self.arguments(stage, results)))
        self.reports = self.reported(results)
        return self.rebuilt(self.structure, results)

    def reported(self, results: list) -> list:
        """The arguments of a report for each fold that skips tiles."""
        found, at = [], self.first
        for note in self.tracer.notes:
            words = prune.wanted(note)
            said = [self.rebuilt(at + k, results).detach() for k in range(len(words))]
            at += len(words)
            if said and not torch._C._are_functorch_transforms_active():
                found.append((note.asked[0], note.tile, *said[:3], prune.rows(self.graph), *said[3:]))
        return found

    def rebuilt(self, structure: Any, results: list) -> Any:
        """The results in the place of their numbers."""
        if isinstance(structure, int):
            k, n = self.programs.at[structure]
            return results[k][n]
        if isinstance(structure, tuple):
            return tuple([self.rebuilt(s, results) for s in structure])
        return {name: self.rebuilt(s, results) for name, s in structure.items()}


def located(module: MessagePassing, e: TigaError) -> TraceError:
    """The error with the user's line that it comes from."""
    return TraceError(f"while tracing {type(module).__name__}.edge{_user_line(module, e)}\n  {e}")


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
        if tracer.compiling and not exporting():
            return tracer.number(value, name)
        return tracer.scalar(name, value)
    if isinstance(value, Tensor):
        tracer.names.append((value, name))
    return value


def exporting() -> bool:
    """torch.compiler.is_exporting(), which Dynamo takes for True in every compilation before torch 2.12."""
    return torch.compiler._is_exporting_flag


said_unread: set[tuple[type, str]] = set()


def warn_unread(cls: type, ref: str) -> None:
    """A field that was given and never used is most likely a misspelling; said once."""
    if (cls, ref) not in said_unread:
        said_unread.add((cls, ref))
        warnings.warn(f"{cls.__name__}: {named(ref)} was given and the edge function never uses it.", stacklevel=4)
