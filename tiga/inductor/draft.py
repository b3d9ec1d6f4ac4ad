"""A call of the operator in a compiler's graph, taken apart so that lines can be put before and after its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tiga.builder import Builder, Value
from tiga.derivation import fresh
from tiga.errors import TigaError
from tiga.inductor.meanings import Unfit
from tiga.parser import parse
from tiga.program import Operand, Program, evaluate_size, prune, read_number, to_text
from tiga.types import NAMES, Dim, Type

aten = torch.ops.aten
Node = Any  # torch.fx.Node, whose arguments may be anything


def shown(x: Any) -> Any:
    """The fake tensor, or the symbolic number, that stands for a node."""
    return x.meta.get("val") if isinstance(x, torch.fx.Node) else x


def written_sizes(val: Any) -> str:
    """A tensor's shape as a key: symbolic sizes have no hash."""
    return str(tuple(val.shape))


def same_sizes(a: Any, b: Any) -> bool:
    """Whether two lists of sizes are one, whatever the symbols in them are."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b))


class Source(NamedTuple):
    """An operand's tensor: a node, viewed in another shape where `val`, which stands for the tensor, has one."""

    node: Node
    val: Any

    def insert(self, graph: torch.fx.Graph, known: list[Node]) -> Node:
        """The tensor as a node of the graph, at the place of insertion."""
        return self.node if self.val is shown(self.node) else viewed(graph, self.node, self.val, known)


def viewed(graph: torch.fx.Graph, node: Node, val: Any, known: list[Node]) -> Node:
    """A view of a node with the shape of `val`; sizes that may change are those of `known` nodes."""
    sizes: list[Any] = []
    for size in val.shape:
        where = None if isinstance(size, int) else size_of(size, [node, *known])
        if where is not None:
            size = graph.call_function(aten.sym_size.int, where)
            size.meta = {**kept_meta(node), "val": shown(where[0]).shape[where[1]]}
        sizes.append(size if isinstance(size, (int, torch.fx.Node)) else -1)
    made = graph.call_function(aten.view.default, (node, sizes))
    made.meta = {**kept_meta(node), "val": val}
    return made


def size_of(size: Any, known: list[Node]) -> tuple[Node, int] | None:
    """A node among those known, and its dimension, of this size."""
    for node in known:
        for d, s in enumerate(shown(node).shape):
            if statically_known_true(s == size):
                return node, d
    return None


def can_view(val: Any, known: list[Node]) -> bool:
    """Whether `viewed` can write the shape: at most one size is of no known node, and follows from the others."""
    sizes = [s if isinstance(s, int) else size_of(s, known) for s in val.shape]
    return sizes.count(None) <= (0 not in sizes)


def kept_meta(node: Node) -> dict[str, Any]:
    """What a node made in place of another has of it."""
    return {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}


class Written(NamedTuple):
    """A program that was put together, and what it reads."""

    text: str
    sources: tuple[Source, ...]
    scalars: list


class Draft:
    """One call's program in a builder: operands, relation and lines of the call, and room for more."""

    def __init__(self, call: Node) -> None:
        text, tensors, ints, scalars = call.args
        self.call, self.p = call, parse(text)
        self.ints, self.scalars = ints, scalars
        count = len(self.p.operands)
        self.operands = list(self.p.operands)
        self.sources = [Source(t, shown(t)) for t in tensors[:count]]
        self.relation = list(tensors[count:])
        self.known = [s.node for s in self.sources]  # whose sizes the call may use
        self.builder = Builder(lambda a, b: None, self.p.batch)
        self.taken = {o.name for o in self.p.operands} | set(self.p.scalars)
        self.values = {ref: self.builder.value(ref, t) for ref, t in self.p.types.items() if ref[0] != "%"}
        for o, s in zip(self.operands, self.sources):
            number = constant(s.node) if o.flag == "number" else None
            if number is not None:
                self.values[o.ref] = self.builder.lift(float(number))
        self.met = {
            (o.place, s.node, written_sizes(s.val), o.flag): self.values[o.ref]
            for o, s in zip(self.operands, self.sources)
        }
        self.rows: dict[str, Any] = {}  # of each place that a field or a result has
        results = call.meta["val"]
        for place, val in [
            *[(o.place, s.val) for o, s in zip(self.operands, self.sources)],
            *[(self.p.types[r].place, val) for r, val in zip(self.p.returns, results)],
        ]:
            if place != "shared":
                self.rows.setdefault(place, val.shape[0])

    def replay(self) -> list[Value]:
        """The call's own lines; what it returns."""
        return self.include(self.p, self.values)

    def also(self, other: Draft) -> list[Value]:
        """Another call's lines over the same relation; what it returns."""
        values = {name: self.builder.lift(float(x)) for name, x in zip(other.p.scalars, other.scalars)}
        for o, s in zip(other.p.operands, other.sources):
            literal = other.values[o.ref].ref
            number = read_number(literal) if literal != o.ref else None
            values[o.ref] = self.operand(o.place, s, o.flag) if number is None else self.builder.lift(number)
        return self.include(other.p, values)

    def include(self, p: Program, values: dict[str, Value]) -> list[Value]:
        """A program's lines on these values of its operands; what it returns."""
        for line in p.lines:
            args = tuple([values[a] if a in values else read_number(a) for a in line.args])
            if line.op == "reduce":
                made = self.builder.reduce(line.attrs[0], line.attrs[1], args)
            elif line.op == "scan":
                direction, number, states, back = line.attrs
                gradient = None if back == "-1" else p.functions[int(back)]
                made = self.builder.scan(direction, p.functions[int(number)], int(states), args, gradient)
            else:
                made = (self.builder.emit(line.op, args, line.attrs),)
            values.update(zip(line.outs, made))
        return [values[r] for r in p.returns]

    def operand(self, place: str, source: Source, flag: str = "") -> Value:
        """The source as a field of this place; the one that is there already, where there is one."""
        key = (place, source.node, written_sizes(source.val), flag)
        if key in self.met:
            return self.met[key]
        sizes = source.val.shape[place != "shared" :]
        marks = tuple([1 if statically_known_true(s == 1) else "*" for s in sizes])
        if source.val.dtype not in NAMES:
            raise Unfit(f"{source.val.dtype}")
        o = Operand(place, fresh("near", self.taken), NAMES[source.val.dtype], () if flag == "number" else marks, flag)
        self.operands.append(o)
        self.sources.append(source)
        number = len(self.operands) - 1
        typed = [1 if m == 1 else Dim(number, k) for k, m in enumerate(marks)]
        self.met[key] = self.builder.value(o.ref, Type(place, o.dtype, tuple(typed), flag == "number"))
        return self.met[key]

    def sizes(self, value: Value) -> list:
        """The feature sizes of a value as numbers, symbolic ones too."""
        shapes = tuple([s.val.shape for s in self.sources])
        return [evaluate_size(s, shapes, tuple(self.operands)) for s in value.type.sizes]

    def write(self, returns: list[Value]) -> Written:
        """The program that gives these values; refused where it is none."""
        whole = self.p.untyped(
            operands=tuple(self.operands),
            lines=tuple(self.builder.lines),
            returns=tuple([v.ref for v in returns]),
            functions=tuple(self.builder.functions),
        )
        small = prune(whole, whole.returns)
        text = to_text(small)
        try:
            parse(text)
        except TigaError as e:
            raise Unfit(str(e).rsplit(": ", 1)[-1]) from None
        by_ref = {o.ref: s for o, s in zip(self.operands, self.sources)}
        numbers = [self.scalars[self.p.scalars.index(s)] for s in small.scalars]
        return Written(text, tuple([by_ref[o.ref] for o in small.operands]), numbers)


def constant(node: Any) -> Any:
    """The number that a node is everywhere, or None."""
    if isinstance(node, (int, float)):
        return node
    if isinstance(node, torch.fx.Node) and node.target in (aten.full.default, aten.scalar_tensor.default):
        value = node.args[-1] if node.target is aten.full.default else node.args[0]
        return value if isinstance(value, (int, float)) else None
    return None
