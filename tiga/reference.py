"""A program computed with torch operations: the path of CPUs and of every device without kernels.

Destinations are visited range by range, so that memory stays O(nodes) + a fixed budget: node values and parameters
first, then edges and what a range of destinations completes, last what sums over all edges complete.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiga import passes
from tiga.infer import body_types
from tiga.layouts import Far, Product
from tiga.primitives import PRIMITIVES, _hash_uniform
from tiga.program import Function, Line, Program, evaluate_size, literal_type, read_number
from tiga.ranges import layouts
from tiga.reducers import REDUCERS
from tiga.reference_ops import SHAPED, align, cast, fold_rows, gather
from tiga.schedule import LIKE, schedule
from tiga.types import DTYPES, Type, compute_dtype, promote

_LEADS = {"shared": 0, "src": 1, "dst": 1}


def interpret(
    p: Program, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float], outputs: list[Tensor]
) -> None:
    """Fill `outputs`, allocated by the caller, with what the program returns."""
    Run(p, tensors, ints, scalars, outputs).run()


class Run:
    def __init__(
        self,
        p: Program,
        tensors: Sequence[Tensor],
        ints: Sequence[int],
        scalars: Sequence[float],
        outputs: list[Tensor],
    ) -> None:
        self.p, self.ints, self.outputs = p, tuple(ints), outputs
        self.relation = tuple(tensors[len(p.operands) :])
        self.shapes = tuple([tuple(t.shape) for t in tensors])
        self.device = tensors[0].device
        self.lazy, self.last, self.shape_only = schedule(p)
        self.num_dst, self.num_src = (ints[1], ints[0]) if p.reverse else (ints[0], ints[1])
        self.fields: dict[str, Tensor] = {}  # operands and what is known before any edge
        for o, t in zip(p.operands, tensors):
            self.fields[o.ref] = t.reshape(()) if o.flag == "number" else t
        for name, value in zip(p.scalars, scalars):
            self.fields[name] = torch.full((), value, dtype=torch.float64, device=self.device)
        self.here: dict[str, Any] = {}  # values of the range being visited
        self.sums: dict[str, Tensor] = {}  # folds over all edges, still growing

    def run(self) -> None:
        phases = self.p.phases
        lines = [line for line in self.p.lines if line.outs[0] not in self.shape_only]
        for line in lines:
            if phases[line.outs[0]] == 0:
                self.fields[line.outs[0]] = self.compute(line, None)
        growing = [line for line in lines if line.op == "reduce" and line.attrs[0] != "dst"]
        for line in growing:
            if self.visits_edges(line):
                self.sums[line.outs[0]] = self.zeros(line.outs[0])
        during = [(k, line) for k, line in enumerate(lines) if phases[line.outs[0]] == 1 or line.outs[0] in self.sums]
        if self.p.kind == "csr":
            for out, ref in zip(self.outputs, self.p.returns):
                if self.p.types[ref].place == "edge":
                    out.zero_()  # an edge that no row holds is visited by nobody
        if during or any(self.p.types[r].place in ("edge", "dst") for r in self.p.returns):
            width = self.width(during)
            for layout in layouts(self.p.kind, self.ints, self.relation, self.p.reverse, self.device, width):
                layout = layout.listed() if self.p.functions else layout
                self.visit(layout, during)
                passes.visited(layout.visit, layout.pairs, width)
        self.fields.update(self.sums)
        for line in lines:
            if phases[line.outs[0]] == 2 and line.outs[0] not in self.sums:
                self.fields[line.outs[0]] = self.fold_nodes(line) if line.op == "reduce" else self.compute(line, None)
        for out, ref in zip(self.outputs, self.p.returns):
            if self.p.types[ref].place in ("src", "shared"):
                x = self.fields[ref]
                out.copy_(x.expand(out.shape) if x.dim() == out.dim() else x)

    def visits_edges(self, line: Line) -> bool:
        """Whether a fold to src or shared grows while edges are visited: all but sums over sources and parameters."""
        places = {self.p.types[a].place for a in self.folded(line)}
        return line.attrs[0] == "src" or bool(places & {"edge", "dst"})

    def folded(self, line: Line) -> tuple[str, ...]:
        return line.args[:2] if line.attrs[1] == "scatter" else line.args

    def zeros(self, ref: str) -> Tensor:
        t = self.p.types[ref]
        rows = () if t.place == "shared" else (self.num_src,)
        sizes = [evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]
        return torch.zeros((*rows, *sizes), dtype=DTYPES[compute_dtype(t.dtype)], device=self.device)

    def width(self, during: list) -> int:
        """Most elements of edge values alive at once, a pair; 8-byte values count twice."""
        alive: dict[str, int] = {}
        most = 1
        for k, line in during:
            for o in line.outs:
                t = self.p.types[o]
                if t.place == "edge" and o not in self.lazy:
                    alive[o] = self.numel(t)
            extra = max([self.numel(self.p.types[a]) for a in self.brought(line)], default=0)
            most = max(most, sum(alive.values()) + (2 * extra if line.op == "reduce" else 0))
            for a in [a for a in alive if self.last.get(a, -1) <= k and a not in self.p.returns]:
                del alive[a]
        return most

    def brought(self, line: Line) -> list[str]:
        """Arguments that a fold holds at every edge: not what stays a product, nor a source's field taken in pieces."""
        pieces = REDUCERS[line.attrs[1]].in_pieces if line.op == "reduce" else ()
        args = [a for k, a in enumerate(line.args) if k not in pieces or self.place(a) != "src"]
        return [a for a in args if self.place(a) not in ("", "shared") and a not in self.lazy]

    def place(self, ref: str) -> str:
        return self.p.types[ref].place if ref in self.p.types else ""

    def numel(self, t: Type) -> int:
        total = 2 if t.dtype in ("i64", "f64") else 1
        for s in t.sizes:
            total *= evaluate_size(s, self.shapes, self.p.operands)
        return total

    def visit(self, layout: Any, during: list) -> None:
        self.here = {}
        for k, line in during:
            if line.op == "reduce":
                self.reduce(line, layout)
            elif line.op == "scan":
                self.scan(line, layout)
            elif line.outs[0] in self.lazy:
                self.here[line.outs[0]] = Product(*[self.operand(a, layout, line) for a in line.args])
            else:
                self.here[line.outs[0]] = self.compute(line, layout)
            for a in line.args:
                if self.last[a] <= k and a not in self.p.returns:
                    self.here.pop(a, None)
        for out, ref in zip(self.outputs, self.p.returns):
            place = self.p.types[ref].place
            if place == "dst":
                out[layout.rows[0] : layout.rows[1]] = self.value(ref, layout)
            elif place == "edge":
                x = self.edge_value(ref, layout)
                layout.store(
                    out,
                    x.expand(*x.shape[: layout.lead], *out.shape[1:]) if x.dim() == layout.lead + out.dim() - 1 else x,
                )
        self.here = {}

    def value(self, ref: str, layout: Any) -> Tensor:
        """A node value as (rows, *features) - of the destinations visited - or a shared one, as computed with."""
        x = self.here.get(ref)
        if x is None:
            x = self.fields[ref]
            t = self.p.types[ref]
            if t.place == "dst" and layout is not None:
                x = x.narrow(0, layout.rows[0], layout.rows[1] - layout.rows[0])
            wide = DTYPES[compute_dtype(t.dtype)]
            if x.dtype != wide:
                x = x.to(wide)
                if t.place == "src":
                    self.fields[ref] = x  # once a call, not once a range
        return x

    def edge_value(self, ref: str, layout: Any) -> Tensor:
        """A value at the edges of the range: (*lead, *features)."""
        t = self.p.types[ref]
        x = self.here.get(ref)
        if t.place == "edge" and x is not None:
            return layout.edge(x) if isinstance(x, Product) else x
        if t.place == "edge":
            x = layout.from_edge(self.fields[ref])
            return x.to(DTYPES[compute_dtype(t.dtype)])
        x = self.value(ref, layout)
        if t.place == "shared":
            return x.reshape((1,) * layout.lead + tuple(x.shape))
        return layout.edge(Far(x, t.place))

    def operand(self, ref: str, layout: Any, line: Line) -> Any:
        """An argument of a fold: a node's field is left where it is, at the rank and dtype of the result."""
        t, out = self.p.types.get(ref), self.p.types[line.outs[0]]
        if t is not None and t.place in ("src", "dst"):
            x = self.value(ref, layout)
            x = align(x, 1 + self.p.batch, len(out.sizes) - self.p.batch) if line.op == "mul" else x
            return Far(x.to(DTYPES[compute_dtype(out.dtype)]) if line.op == "mul" else x, t.place)
        if t is None:
            number = read_number(ref)
            assert number is not None
            x = torch.full((1,) * (layout.lead + len(out.sizes)), number, device=self.device)
        else:
            x = self.edge_value(ref, layout)
            x = align(x, layout.lead + self.p.batch, len(out.sizes) - self.p.batch) if line.op == "mul" else x
        return x.to(DTYPES[compute_dtype(out.dtype)]) if line.op == "mul" else x

    def compute(self, line: Line, layout: Any) -> Any:
        out = self.p.types[line.outs[0]]
        row = PRIMITIVES[line.op]
        lead = _LEADS[out.place] if out.place != "edge" else layout.lead
        if line.op == "sum" and isinstance(self.here.get(line.args[0]), Product):
            return self.inner(line, layout)
        if row.elementwise:
            return self.elementwise(line, out, lead, layout)
        if line.op == "number":
            return layout.number
        if line.op in LIKE:
            return self.like(line, layout, out, lead)
        args = [self.at(a, out.place, lead, layout) for a in line.args]
        if line.op == "spread":
            return self.spread(args[0], line, layout)
        if line.op == "gather":
            return gather(args[0], args[1], lead, self.p.batch)
        meaning = SHAPED.get(line.op) or row.torch
        assert meaning is not None
        return meaning(*args, lead + self.p.batch, *line.attrs)

    def features(self, ref: str) -> tuple:
        """The feature sizes of a value, without the batch."""
        return tuple([evaluate_size(s, self.shapes, self.p.operands) for s in self.p.types[ref].sizes[self.p.batch :]])

    def like(self, line: Line, layout: Any, out: Type, lead: int) -> Tensor:
        """Operations that read the shape of an argument, never its values."""
        if line.op == "size":
            size = self.features(line.args[0])[int(line.attrs[0])]
            return torch.full((), size, dtype=torch.int64, device=self.device)
        if line.op == "arange":
            dim = int(line.attrs[0])
            count = torch.arange(self.features(line.args[0])[dim], device=self.device)
            count = count.reshape((1,) * (lead + self.p.batch) + (-1,) + (1,) * (-dim - 1))
            return self.rows_of(count, out.place, layout)
        if line.op == "zeros_like":
            zeros = torch.zeros(
                (1,) * (lead + self.p.batch) + self.features(line.args[0]),
                dtype=DTYPES[compute_dtype(out.dtype)],
                device=self.device,
            )
            return self.rows_of(zeros, out.place, layout)
        if line.op == "rand":
            return self.rand(line, layout)
        x = self.at(line.args[0], out.place, lead, layout)
        if out.place == "edge" and self.p.types[line.args[0]].place == "shared":
            x = x.reshape((1,) * lead + tuple(x.shape))
        return SHAPED[line.op](x, *[self.features(a) for a in line.args[1:]], lead + self.p.batch, *line.attrs)

    def rows_of(self, x: Tensor, place: str, layout: Any) -> Tensor:
        """One row repeated for every node of a place; at the edges one row stands for all."""
        if place not in ("src", "dst"):
            return x
        return x.expand(self.num_src if place == "src" else layout.rows[1] - layout.rows[0], *x.shape[1:])

    def inner(self, line: Line, layout: Any) -> Tensor:
        product = self.here[line.args[0]]
        x = layout.inner(product.a, product.b)
        dtype = DTYPES[compute_dtype(self.p.types[line.outs[0]].dtype)]
        return x if x.dtype == dtype else x.to(dtype)

    def at(self, ref: str, place: str, lead: int, layout: Any) -> Tensor:
        """A value as one of `place`, with its leading dimensions."""
        t = self.p.types.get(ref)
        if t is None:
            number = read_number(ref)
            assert number is not None
            dtype = torch.int64 if isinstance(number, int) else torch.float64
            return torch.full((), number, device=self.device, dtype=dtype)
        if place == "edge" and t.place != "shared":
            return self.edge_value(ref, layout)
        return self.value(ref, layout)

    def elementwise(self, line: Line, out: Type, lead: int, layout: Any) -> Tensor:
        types = [self.p.types.get(a) for a in line.args]
        dtype = out.dtype
        if dtype == "bool" and line.op not in ("and", "or", "xor", "not"):
            dtype, _ = promote(tuple([t or literal_type(a) for a, t in zip(line.args, types)]))
        wide = DTYPES[compute_dtype(dtype)]
        args: list[Any] = []
        for k, (ref, t) in enumerate(zip(line.args, types)):
            x = self.at(ref, out.place, lead, layout)
            if t is not None and not t.weak and (x.dim() or t.place != "shared"):
                if t.place == "shared":
                    x = x.reshape((1,) * lead + tuple(x.shape))
                x = align(x, lead + self.p.batch, len(out.sizes) - self.p.batch)
            keep = line.op == "where" and k == 0
            args.append(x if keep or x.dtype == wide else x.to(wide))
        meaning = PRIMITIVES[line.op].torch
        assert meaning is not None
        return meaning(*args)

    def spread(self, x: Tensor, line: Line, layout: Any) -> Tensor:
        t, place = self.p.types.get(line.args[0]), line.attrs[0]
        out = self.p.types[line.outs[0]]
        x = x.to(DTYPES[compute_dtype(out.dtype)])
        if place == "edge":
            return x.reshape((1,) * layout.lead + tuple(x.shape)) if t is None or t.place == "shared" else x
        rows = self.num_src if place == "src" else layout.rows[1] - layout.rows[0]
        return x.expand(rows, *x.shape) if t is None or t.place == "shared" else x

    def rand(self, line: Line, layout: Any) -> Tensor:
        sizes = self.features(line.args[1])
        feature = torch.arange(math.prod(sizes), device=self.device).reshape(sizes)
        number = layout.number.reshape(*layout.number.shape, *[1] * (self.p.batch + len(sizes)))
        seed = self.value(line.args[0], layout)
        return _hash_uniform(seed.reshape(*seed.shape, *[1] * len(sizes)), number, feature)

    def reduce(self, line: Line, layout: Any) -> None:
        place, name = line.attrs
        if place == "shared":
            self.sums[line.outs[0]] += self.fold_shared(line, layout)
            return
        dtype = DTYPES[compute_dtype(self.p.types[line.outs[REDUCERS[name].accumulator]].dtype)]
        args = [
            self.here[a] if isinstance(self.here.get(a), Product) else cast(self.operand(a, layout, line), dtype)
            for a in line.args
        ]
        if place == "src":
            layout.sum_to_src(args[0], self.sums[line.outs[0]])
            return
        meaning = REDUCERS[name].reference
        assert meaning is not None
        for o, x in zip(line.outs, meaning(layout, *args)):
            self.here[o] = x.to(DTYPES[compute_dtype(self.p.types[o].dtype)])

    def scan(self, line: Line, layout: Any) -> None:
        direction, number, states, _ = line.attrs
        count = int(states)
        types = [self.p.types[o] for o in line.outs]
        begin, values = [], []
        for a, t in zip(line.args, types[:count]):
            x = self.at(a, "dst", 1, layout).to(DTYPES[compute_dtype(t.dtype)])
            if x.dim() < 1 + len(t.sizes):
                x = align(
                    x.reshape((1,) * (1 + self.p.batch) + tuple(x.shape)), 1 + self.p.batch, len(t.sizes) - self.p.batch
                )
            sizes = [evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]
            begin.append(x.expand(layout.rows[1] - layout.rows[0], *sizes).clone())
        for a in line.args[count:]:
            x = self.at(a, "edge", 1, layout)
            values.append(
                layout.full(x if x.dim() else x.reshape(1).to(torch.float32 if x.is_floating_point() else x.dtype))
            )
        body = _Body(self, self.p.functions[int(number)], line, layout)
        last, results = layout.scan(direction == "reverse", begin, values, body.step)
        if not results:
            results = [
                torch.zeros(
                    (0, *[evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]),
                    dtype=DTYPES[compute_dtype(t.dtype)],
                    device=self.device,
                )
                for t in types[count:]
            ]
        self.here.update(zip(line.outs, [*last, *results]))

    def fold_shared(self, line: Line, layout: Any) -> Tensor:
        """A sum over the rows visited: edges, or destinations where all that is folded lives there."""
        places = {self.p.types[a].place for a in self.folded(line) if a in self.p.types}
        edges = "edge" in places or "src" in places
        rows = []
        for a in line.args:
            x = self.edge_value(a, layout) if edges else self.value(a, layout)
            rows.append(layout.flat(x) if edges and self.p.types[a].place != "shared" else x)
        return fold_rows(line, rows, self.p, self.sums[line.outs[0]])

    def fold_nodes(self, line: Line) -> Tensor:
        return fold_rows(line, [self.value(a, None) for a in line.args], self.p, self.zeros(line.outs[0]))


class _Body(Run):
    """A function of the program on rows of edges."""

    def __init__(self, run: Run, f: Function, line: Line, layout: Any) -> None:
        self.shapes, self.device, self.outer, self.f = run.shapes, run.device, run.p, f
        self.lazy = self.shape_only = frozenset()
        self.fields, self.layout = {}, layout
        self.states = int(line.attrs[2])
        given = [run.p.types.get(a) or literal_type(a) for a in line.args]
        begin = [Type("edge", run.p.types[o].dtype, run.p.types[o].sizes) for o in line.outs[: self.states]]
        strong = [
            Type("edge", "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes) for t in given[self.states :]
        ]
        types, self.results = body_types(f, (*begin, *strong), lambda a, b: None, run.p.batch)
        self.p = dataclasses.replace(run.p, lines=f.lines, returns=f.returns, types=types)

    def step(self, states: list, values: list) -> tuple[list, list]:
        rows = (states or values)[0].shape[0]
        self.here = {"a" + str(k): x for k, x in enumerate([*states, *values])}
        for line in self.f.lines:
            self.here[line.outs[0]] = self.compute(line, self.layout)
        out = []
        for r, t in zip(self.f.returns, self.results):
            x = self.at(r, "edge", 1, self.layout)
            sizes = [evaluate_size(s, self.shapes, self.outer.operands) for s in t.sizes]
            out.append(
                (x if x.dim() else x.reshape((1,) * (1 + len(sizes))))
                .to(DTYPES[compute_dtype(t.dtype)])
                .expand(rows, *sizes)
            )
        return out[: self.states], out[self.states :]
