"""A program computed with torch operations: the path of CPUs and of every device without kernels.

Destinations are visited range by range, so that memory stays O(nodes) + a fixed budget: node values and parameters first, then edges and
what a range of destinations completes, last what sums over all edges complete.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from tiga import passes
from tiga.layouts import Far, Product, add_rows, layouts
from tiga.primitives import PRIMITIVES, _hash_uniform
from tiga.program import Function, Line, Program, body_types, evaluate_size, read_number
from tiga.reducers import REDUCERS
from tiga.types import DTYPES, Type, compute_dtype, promote

_LEADS = {"shared": 0, "src": 1, "dst": 1}


def interpret(p: Program, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float], outputs: list[Tensor]) -> None:
    """Fill `outputs`, allocated by the caller, with what the program returns."""
    _Run(p, tensors, ints, scalars, outputs).run()


_LIKE = ("expand_like", "reshape_like", "unslice", "part", "zeros_like", "size", "arange", "rand")      # read shapes of some arguments
_BY_SHAPE = {"zeros_like": 0, "size": 0, "arange": 0}                                                   # from this argument on; others: from 1


@functools.lru_cache(4096)
def _schedule(p: Program) -> tuple[frozenset, dict[str, int], frozenset]:
    """Products that only folds read, which need not be multiplied out; the last line that reads each value; values of which only the shape is read."""
    readers: dict[str, list[Line]] = {}
    last: dict[str, int] = {}
    for k, line in enumerate(p.lines):
        for a in line.args:
            readers.setdefault(a, []).append(line)
            last[a] = k
    lazy = frozenset(line.outs[0] for line in p.lines if line.op == "mul" and p.types[line.outs[0]].place == "edge"
                     and p.types[line.outs[0]].dtype in ("f16", "bf16", "f32", "f64") and line.outs[0] not in p.returns
                     and readers.get(line.outs[0])
                     and all((r.op == "sum" and r.attrs == ("-1",)) or (r.op == "reduce" and r.attrs[1] == "sum") for r in readers[line.outs[0]]))
    shape_only: set[str] = set()
    for line in reversed(p.lines):
        if line.op not in ("reduce", "scan") and line.outs[0] not in p.returns and all(
                r.outs[0] in shape_only or (r.op in _LIKE and line.outs[0] in r.args[_BY_SHAPE.get(r.op, 1):] and line.outs[0] not in r.args[:_BY_SHAPE.get(r.op, 1)])
                for r in readers.get(line.outs[0], ())):
            shape_only.add(line.outs[0])
    return lazy - shape_only, last, frozenset(shape_only)


class _Run:
    def __init__(self, p: Program, tensors: Sequence[Tensor], ints: Sequence[int], scalars: Sequence[float], outputs: list[Tensor]) -> None:
        self.p, self.ints, self.outputs = p, tuple(ints), outputs
        self.relation = tuple(tensors[len(p.operands):])
        self.shapes = tuple([tuple(t.shape) for t in tensors])
        self.device = tensors[0].device
        self.lazy, self.last, self.shape_only = _schedule(p)
        self.num_dst, self.num_src = (ints[1], ints[0]) if p.reverse else (ints[0], ints[1])
        self.fields: dict[str, Tensor] = {}                # operands and what is known before any edge
        for o, t in zip(p.operands, tensors):
            self.fields[o.ref] = t.reshape(()) if o.flag == "number" else t
        for name, value in zip(p.scalars, scalars):
            self.fields[name] = torch.full((), value, dtype=torch.float64, device=self.device)
        self.here: dict[str, Any] = {}                     # values of the range being visited
        self.sums: dict[str, Tensor] = {}                  # folds over all edges, still growing

    # ---- the three phases ----

    def run(self) -> None:
        phases = self.p.phases
        lines = [line for line in self.p.lines if line.outs[0] not in self.shape_only]
        for line in lines:
            if phases[line.outs[0]] == 0:
                self.fields[line.outs[0]] = self.compute(line, None)
        growing = [line for line in lines if line.op == "reduce" and line.attrs[0] != "dst"]
        for line in growing:
            out = line.outs[0]
            if self.visits_edges(line):
                self.sums[out] = self.zeros(out)
        during = [(k, line) for k, line in enumerate(lines) if phases[line.outs[0]] == 1 or line.outs[0] in self.sums]
        if self.p.kind == "csr":
            for out, ref in zip(self.outputs, self.p.returns):
                if self.p.types[ref].place == "edge":
                    out.zero_()                            # an edge that no row holds is visited by nobody
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
                out.copy_(self.fields[ref].expand(out.shape) if self.fields[ref].dim() == out.dim() else self.fields[ref])

    def visits_edges(self, line: Line) -> bool:
        """Whether a fold to src or shared grows while edges are visited: all but sums over source nodes and parameters."""
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
        """Arguments that a fold holds at every edge: not what stays a product, nor a source's values under softmax, which are weighted in pieces."""
        args = line.args[:1] if line.op == "reduce" and line.attrs[1] == "softmax" and self.place(line.args[1]) == "src" else line.args
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
                out[layout.rows[0]:layout.rows[1]] = self.value(ref, layout)
            elif place == "edge":
                x = self.edge_value(ref, layout)
                layout.store(out, x.expand(*x.shape[:layout.lead], *out.shape[1:]) if x.dim() == layout.lead + out.dim() - 1 else x)
        self.here = {}

    # ---- values ----

    def value(self, ref: str, layout: Any) -> Tensor:
        """A node value as (rows, *features) - of a destination, the rows being visited - or a shared one, in its computing dtype."""
        x = self.here.get(ref)
        if x is None:
            x = self.fields[ref]
            t = self.p.types[ref]
            if t.place == "dst" and layout is not None:
                x = x[layout.rows[0]:layout.rows[1]]
            wide = DTYPES[compute_dtype(t.dtype)]
            if x.dtype != wide:
                x = x.to(wide)
                if t.place == "src":
                    self.fields[ref] = x                   # once a call, not once a range
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

    # ---- lines ----

    def compute(self, line: Line, layout: Any) -> Any:
        out = self.p.types[line.outs[0]]
        row = PRIMITIVES[line.op]
        lead = _LEADS[out.place] if out.place != "edge" else layout.lead
        if line.op == "sum" and isinstance(self.here.get(line.args[0]), Product):
            return self.inner(line, layout)
        if row.elementwise:
            return self.elementwise(line, row.torch, out, lead, layout)
        if line.op == "number":
            return layout.number
        if line.op in _LIKE:
            return self.like(line, layout, out, lead)
        args = [self.at(a, out.place, lead, layout) for a in line.args]
        if line.op == "spread":
            return self.spread(args[0], line, layout)
        if line.op == "gather":
            return _gather(*args, lead, self.p.batch)
        meaning = _SHAPED.get(line.op) or row.torch
        return meaning(*args, lead + self.p.batch, *line.attrs)

    def features(self, ref: str) -> tuple:
        """The feature sizes of a value, without the batch."""
        return tuple([evaluate_size(s, self.shapes, self.p.operands) for s in self.p.types[ref].sizes[self.p.batch:]])

    def like(self, line: Line, layout: Any, out: Type, lead: int) -> Tensor:
        """Operations that read the shape of an argument, never its values."""
        if line.op == "size":
            return torch.full((), self.features(line.args[0])[int(line.attrs[0])], dtype=torch.int64, device=self.device)
        if line.op == "arange":
            dim = int(line.attrs[0])
            count = torch.arange(self.features(line.args[0])[dim], device=self.device)
            return self.rows_of(count.reshape((1,) * (lead + self.p.batch) + (-1,) + (1,) * (-dim - 1)), out.place, layout)
        if line.op == "zeros_like":
            zeros = torch.zeros((1,) * (lead + self.p.batch) + self.features(line.args[0]), dtype=DTYPES[compute_dtype(out.dtype)], device=self.device)
            return self.rows_of(zeros, out.place, layout)
        if line.op == "rand":
            return self.rand(line, layout)
        x = self.at(line.args[0], out.place, lead, layout)
        if out.place == "edge" and self.p.types[line.args[0]].place == "shared":
            x = x.reshape((1,) * lead + tuple(x.shape))
        return _SHAPED[line.op](x, *[self.features(a) for a in line.args[1:]], lead + self.p.batch, *line.attrs)

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
            return torch.full((), number, device=self.device, dtype=torch.int64 if isinstance(number, int) else torch.float64)
        if place == "edge" and t.place != "shared":
            return self.edge_value(ref, layout)
        return self.value(ref, layout)

    def elementwise(self, line: Line, meaning: Callable, out: Type, lead: int, layout: Any) -> Tensor:
        types = [self.p.types.get(a) for a in line.args]
        dtype = out.dtype
        if dtype == "bool" and line.op not in ("and", "or", "xor", "not"):
            dtype, _ = promote(tuple([t or _literal_type(a) for a, t in zip(line.args, types)]))
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
        dtype = DTYPES[compute_dtype(self.p.types[line.outs[1 if name == "softmax" else 0]].dtype)]
        args = [self.here[a] if isinstance(self.here.get(a), Product) else _cast(self.operand(a, layout, line), dtype) for a in line.args]
        if place == "src":
            layout.sum_to_src(args[0], self.sums[line.outs[0]])
            return
        for o, x in zip(line.outs, REDUCERS[name].reference(layout, *args)):
            self.here[o] = x.to(DTYPES[compute_dtype(self.p.types[o].dtype)])

    def scan(self, line: Line, layout: Any) -> None:
        direction, number, states, _ = line.attrs
        count = int(states)
        types = [self.p.types[o] for o in line.outs]
        begin, values = [], []
        for a, t in zip(line.args, types[:count]):
            x = self.at(a, "dst", 1, layout).to(DTYPES[compute_dtype(t.dtype)])
            if x.dim() < 1 + len(t.sizes):
                x = align(x.reshape((1,) * (1 + self.p.batch) + tuple(x.shape)), 1 + self.p.batch, len(t.sizes) - self.p.batch)
            sizes = [evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]
            begin.append(x.expand(layout.rows[1] - layout.rows[0], *sizes).clone())
        for a in line.args[count:]:
            x = self.at(a, "edge", 1, layout)
            values.append(layout.full(x if x.dim() else x.reshape(1).to(torch.float32 if x.is_floating_point() else x.dtype)))
        body = _Body(self, self.p.functions[int(number)], line, layout)
        last, results = layout.scan(direction == "reverse", begin, values, body.step)
        if not results:
            results = [torch.zeros((0, *[evaluate_size(s, self.shapes, self.p.operands) for s in t.sizes]), dtype=DTYPES[compute_dtype(t.dtype)],
                                   device=self.device) for t in types[count:]]
        self.here.update(zip(line.outs, [*last, *results]))

    def fold_shared(self, line: Line, layout: Any) -> Tensor:
        """A sum over the rows visited: edges, or destinations where all that is folded lives there."""
        places = {self.p.types[a].place for a in self.folded(line) if a in self.p.types}
        edges = "edge" in places or "src" in places
        rows = []
        for a in line.args:
            x = self.edge_value(a, layout) if edges else self.value(a, layout)
            rows.append(layout.flat(x) if edges and self.p.types[a].place != "shared" else x)
        return _fold_rows(line, rows, self.p, self.sums[line.outs[0]])

    def fold_nodes(self, line: Line) -> Tensor:
        return _fold_rows(line, [self.value(a, None) for a in line.args], self.p, self.zeros(line.outs[0]))


class _Body(_Run):
    """A function of the program on rows of edges."""

    def __init__(self, run: _Run, f: Function, line: Line, layout: Any) -> None:
        self.shapes, self.device, self.outer, self.f = run.shapes, run.device, run.p, f
        self.lazy = self.shape_only = frozenset()
        self.fields, self.layout = {}, layout
        self.states = int(line.attrs[2])
        given = [run.p.types.get(a) or _literal_type(a) for a in line.args]
        begin = [Type("edge", run.p.types[o].dtype, run.p.types[o].sizes) for o in line.outs[:self.states]]
        strong = [Type("edge", "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes) for t in given[self.states:]]
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
            out.append((x if x.dim() else x.reshape((1,) * (1 + len(sizes)))).to(DTYPES[compute_dtype(t.dtype)]).expand(rows, *sizes))
        return out[:self.states], out[self.states:]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        return x.to(dtype)
    if isinstance(x, Far):
        return Far(x.tensor.to(dtype), x.place)
    return x


def _fold_rows(line: Line, rows: list, p: Program, zero: Tensor) -> Tensor:
    """sum, dot and scatter over rows (n, *features)."""
    name = line.attrs[1]
    if name == "sum":
        return rows[0].to(zero.dtype).sum(0)
    if name == "dot":
        g, x = (t.to(zero.dtype) for t in rows)
        wide, batch = torch.broadcast_shapes(g.shape[:-1], x.shape[:-1]), zero.shape[:-2]
        g, x = (t.expand(*wide, t.shape[-1]).movedim(0, p.batch).reshape(*batch, -1, t.shape[-1]) for t in (g, x))
        return g.mT @ x
    g, i, _ = rows
    sizes, features = zero.shape[:p.batch + 1], zero.shape[p.batch + 1:]
    i, inside = _flat_rows(i, 1, sizes)
    rank = g.dim() - len(features)
    wide = torch.broadcast_shapes(g.shape[:rank], i.shape)
    g = torch.where(inside.reshape(*i.shape, *[1] * len(features)), g, 0).to(zero.dtype).expand(*wide, *features)
    return add_rows(zero.new_zeros(math.prod(sizes), *features), i.expand(wide).reshape(-1), g.reshape(-1, *features)).reshape(zero.shape)


def align(x: Tensor, lead: int, rank: int) -> Tensor:
    """Ones between the leading dimensions and the features, so that `rank` features align from the right."""
    missing = lead + rank - x.dim()
    return x if missing <= 0 else x.reshape(*x.shape[:lead], *[1] * missing, *x.shape[lead:])


def _literal_type(word: str) -> Type:
    return Type("shared", "i64" if isinstance(read_number(word), int) else "f64", (), True)


# ---- operations on features; `lead` counts rows and batch -----------------------------------------------------------------------------------------

def _to(x: Tensor, lead: int, dtype: str) -> Tensor:
    return x.to(DTYPES[dtype]).to(DTYPES[compute_dtype(dtype)])


def _expand(g: Tensor, sizes: tuple, lead: int) -> Tensor:
    return g.expand(*g.shape[:lead], *torch.broadcast_shapes(g.shape[lead:], sizes))


def _unslice(g: Tensor, sizes: tuple, lead: int, dim: str, start: str, length: str, step: str) -> Tensor:
    d = int(dim)
    out = g.new_zeros((*g.shape[:d], sizes[d], *(g.shape[d + 1:] if d != -1 else ())))
    if int(length):
        out.movedim(d, 0)[int(start):int(start) + (int(length) - 1) * int(step) + 1:int(step)] = g.movedim(d, 0)
    return out


def _cat(*args: Any) -> Tensor:
    *values, lead, dim = args
    rank = max(v.dim() for v in values)
    values = [v if v.dim() == rank else v.reshape((1,) * (rank - v.dim()) + tuple(v.shape)) for v in values]
    d = int(dim) + rank
    wide = torch.broadcast_shapes(*[(*v.shape[:d], 1, *v.shape[d + 1:]) for v in values])
    dtype = functools.reduce(torch.promote_types, [v.dtype for v in values])
    return torch.cat([v.to(dtype).expand(*wide[:d], v.shape[d], *wide[d + 1:]) for v in values], d)


def _part(g: Tensor, *args: Any) -> Tensor:
    *sizes, lead, dim, k = args
    start = sum(x[int(dim)] for x in sizes[:int(k)])
    return g.narrow(int(dim), start, sizes[int(k)][int(dim)])


def _linear(x: Tensor, weight: Tensor, lead: int) -> Tensor:
    """weight: (*batch, out, in)."""
    dtype, batch = torch.promote_types(x.dtype, weight.dtype), weight.shape[:-2]
    if all(size == 1 for size in batch):
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype).reshape(weight.shape[-2:]))
    weight = weight.reshape(*batch, *[1] * (x.dim() - lead - 1), *weight.shape[-2:])
    return torch.matmul(x.to(dtype).unsqueeze(-2), weight.to(dtype).mT).squeeze(-2)


def _flat_rows(i: Tensor, lead: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows i of a table of `sizes` = (*batch, rows) as rows of the flat table, and whether there are such; `lead` dimensions stand before the batch."""
    inside = (i >= 0) & (i < sizes[-1])
    first = torch.arange(0, math.prod(sizes), max(1, sizes[-1]), device=i.device) if math.prod(sizes) else torch.zeros(math.prod(sizes[:-1]), dtype=torch.int64)
    first = first.reshape((1,) * lead + tuple(sizes[:-1]) + (1,) * max(0, i.dim() - lead - len(sizes) + 1))
    i = torch.where(inside, i, 0).to(torch.int64) + first.to(i.device)
    return i, inside.expand(i.shape)


def _gather(table: Tensor, i: Tensor, lead: int, batch: int) -> Tensor:
    sizes, features = table.shape[:batch + 1], table.shape[batch + 1:]
    i, inside = _flat_rows(i, lead, sizes)
    rows = table.reshape(-1, *features)[i] if math.prod(sizes) else table.new_zeros((*i.shape, *features))
    return torch.where(inside.reshape(*i.shape, *[1] * len(features)), rows, 0)


_SHAPED: dict[str, Callable] = {
    "to": _to, "unslice": _unslice, "cat": _cat, "part": _part, "linear": _linear,
    "expand_like": lambda g, sizes, lead: _expand(align(g, lead, len(sizes)), sizes, lead),
    "reshape_like": lambda g, sizes, lead: g.reshape(*g.shape[:lead], *sizes),
    "reshape": lambda x, lead, *sizes: x.reshape(*x.shape[:lead], *[int(s) for s in sizes]),
}
