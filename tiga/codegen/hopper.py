"""Which works the hopper skeleton runs, and why not."""

from __future__ import annotations

from typing import Any

from tiga.codegen.tiles import SAME, Axes, Input, Work

SPANS = ("band", "rows1", "blocks")
WIDTHS = (64, 128, 256)  # of tiles; a vector fills more than half of one
MOST_HEADS = 3  # of a vector: a descriptor has five dimensions at most
_NOT_THERE = ("gather", "rand", "number", "kept")


def products_of(axes: Axes, work: Work) -> tuple[str, ...]:
    """The inner products, first those that most lines wait for: those run while the others are multiplied."""
    found = dict.fromkeys([r for f in work.folds for r in f.lines if r in work.inners])
    behind = {ref: {ref} for ref in found}
    for f in work.folds:
        for ref in f.lines:
            for users in behind.values():
                if users.intersection(axes.p.definitions[ref].args):
                    users.add(ref)
    return tuple(sorted(found, key=lambda ref: -len(behind[ref])))


def vectors(work: Work, side: str) -> tuple[Input, ...]:
    return tuple([x for x in work.inputs if x.mode == "vector" and x.side == side])


def far_numbers(work: Work) -> tuple[Input, ...]:
    return tuple([x for x in work.inputs if x.mode == "number" and x.side == "far"])


def near_vectors(work: Work) -> tuple[Input, ...]:
    """The owners' vectors that products read."""
    return tuple([x for x in vectors(work, "own") if any(x.ref in pair for pair in work.inners.values())])


def late_vectors(work: Work) -> tuple[Input, ...]:
    """The owners' vectors that only lines after the edges read."""
    near = near_vectors(work)
    return tuple([x for x in vectors(work, "own") if x not in near])


def refusal(axes: Axes, work: Work, span: str) -> str:
    """Why no kernel of this skeleton runs the work; "" where one does."""
    p = axes.p
    if span not in SPANS or not work.folds:
        return f"a work of span {span}" if work.folds else "no fold"
    if work.tables or work.edge_outputs or work.within:
        return "tables, maps of tiles, or results of edges"
    if work.reads_numbers or work.loops:
        return "numbers of edges" if work.reads_numbers else "a sum over features that is no inner product"
    if any(x.side == "edge" or x.mode not in ("number", "vector") for x in work.inputs):
        return "fields of edges, columns or tables"
    refs = [r for f in work.folds for r in f.lines]
    there = [line.op for line in map(p.definitions.__getitem__, refs) if line.op in _NOT_THERE]
    if there:
        return there[0]
    return _of_vectors(axes, work) or _of_nodes(axes, work) or (_of_tiles(axes, work, span) if work.tile else "")


def _of_vectors(axes: Axes, work: Work) -> str:
    products = products_of(axes, work)
    far = "src" if work.owner == "dst" else "dst"
    both = {r for ref in products for r in work.inners[ref]}
    own = {r for r in both if axes.place(r) == work.owner}
    fields = [f.field.ref for f in work.folds if f.field is not None]
    found = [x for x in work.inputs if x.mode == "vector"]
    if not products or not fields or any(f.reducer not in ("softmax", "sum") or f.field is None for f in work.folds):
        return "folds other than softmax or weighted sums of vectors by an inner product"
    if any(f.weight is None and f.reducer == "sum" for f in work.folds):
        return "a sum without weights"
    late = late_vectors(work)
    there = [x for x in found if x not in late]
    if any(x.ref not in (own if x.side == "own" else {*both, *fields}) or x.side == "shared" for x in there):
        return "a vector that is in no product"
    early = [*work.before, *[axes.p.definitions[r] for f in work.folds for r in f.lines]]
    read = {axes.same(a) for line in early for a in line.args}
    if any(x.ref in read for x in late):
        return "a vector that is in no product, but read before the edges"
    if len({x.dtype for x in found}) != 1 or found[0].dtype not in ("f16", "bf16"):
        return "vectors of other than one 16-bit dtype"
    if any(len([a for a in x.heads if a in work.axes]) > MOST_HEADS for x in found):
        return f"more than {MOST_HEADS} heads"
    if any(axes.place(f.field.ref) != far for f in work.folds if f.field is not None):
        return "a sum of the owners' vectors"
    return ""


def _of_tiles(axes: Axes, work: Work, span: str) -> str:
    """Of a work that skips tiles."""
    if span != "band":
        return f"tiles to skip of a {span}"
    if len(work.folds) > 1 or len(products_of(axes, work)) > 1:
        return "tiles to skip of several folds or products"
    if far_numbers(work):
        return "tiles to skip by numbers of the other end"
    fields = {f.field.ref for f in work.folds if f.field is not None}
    if fields.intersection(*[work.inners[ref] for ref in products_of(axes, work)]):
        return "tiles to skip of values that scores are made of"
    return ""


def _of_nodes(axes: Axes, work: Work) -> str:
    wide = lambda ref: [a for a in axes.of(ref) if a not in work.axes]
    if any(wide(line.outs[0]) or wide(a) for line in work.before for a in line.args if line.op not in SAME):
        return "vectors that are computed before the edges"
    if any(line.op == "sum" for line in work.after):
        return "a sum over features after the edges"
    if any(x.dtype in ("bool", "f64") for x in far_numbers(work)):
        return "numbers of bool or float64"
    return ""


def padded(width: int) -> int:
    """The width of tiles of vectors; 0 where they would be mostly empty, or are wider than any."""
    return next((wide for wide in WIDTHS if wide // 2 < width <= wide), 0)


def stride_of(t: Any, dims: tuple, axis: Any) -> tuple[int, int]:
    """(size, stride) of a feature dimension of a tensor."""
    return next((n, s) for a, n, s in zip(dims, t.shape[1:], t.stride()[1:]) if a == axis)
