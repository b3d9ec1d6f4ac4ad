"""What must hold of the operator's arguments, and what comes out: the same eager, compiled and on shapes alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiga import passes, relations
from tiga.errors import TigaError
from tiga.program import Operand, Program, evaluate_size
from tiga.types import DTYPES, Total

WIDTHS = {"items": 4, "back_items": 4, "merges": 3, "back_merges": 3}
"""Columns of the relation's tensors that are tables."""
# the numbers each kind's ints hold
_NUM_INTS = {kind: len(row.int_names) for kind, row in relations.RELATIONS.items()}


def check(p: Program, tensors: Sequence[Tensor], ints: Sequence[Any], scalars: Sequence[float]) -> tuple:
    """Shapes, dtypes and devices, as the program's head declares them: the same eager and compiled.

    Gives the outputs' feature sizes.
    """
    count = len(p.operands)
    if len(tensors) != count + p.relation_tensors:
        raise TigaError(
            f"tiga::propagate: the program reads {count} operands and its relation {p.relation_tensors} "
            f"tensors; {len(tensors)} were given."
        )
    if len(ints) != _NUM_INTS[p.kind]:
        raise TigaError(
            f"tiga::propagate: a {p.kind} relation has {_NUM_INTS[p.kind]} ints "
            f"{relations.RELATIONS[p.kind].int_names}; {len(ints)} were given."
        )
    if len(scalars) != len(p.scalars):
        raise TigaError(f"tiga::propagate: the program reads {len(p.scalars)} scalars; {len(scalars)} were given.")
    sizes = feature_sizes(p, tensors)
    rows: dict[str, Any] = {"dst": ints[1] if p.reverse else ints[0], "src": ints[0] if p.reverse else ints[1]}
    if p.kind in ("dense", "csr"):
        rows["edge"] = relations.num_edges(p.kind, tuple(ints), tuple(tensors[count:]))
    for o, t in zip(p.operands, tensors):
        if o.place in rows and t.shape[0] != rows[o.place]:
            raise TigaError(
                f"{o.place} field {o.name!r} has {t.shape[0]} rows, but the graph has {rows[o.place]} {_ROWS[o.place]}."
            )
    passes.ran("check")
    return sizes


def feature_sizes(p: Program, tensors: Sequence[Tensor]) -> tuple:
    """Feature sizes of the outputs. They, and all that is checked but rows, follow from the forms of the tensors."""
    forms = tuple(
        [
            (t.dtype, t.device, t.dim(), t.shape if o.place == "shared" else t.shape[1:])
            for o, t in zip(p.operands, tensors)
        ]
        + [(t.dtype, t.device, t.dim(), ()) for t in tensors[len(p.operands) :]]
    )
    try:
        return _feature_sizes(p, forms)
    except TypeError:  # symbolic sizes have no hash
        return _feature_sizes.__wrapped__(p, forms)


@functools.lru_cache(8192)
def _feature_sizes(p: Program, forms: tuple) -> tuple:
    device = forms[0][1]
    for o, form in zip(p.operands, forms):
        _check_operand(o, form, device)
    for name, (dtype, where, rank, _) in zip(_names(p.kind, p.relation_tensors), forms[len(p.operands) :]):
        if where != device:
            raise TigaError(
                f"the graph's tensors are on {where}, {p.operands[0].place} field {p.operands[0].name!r} on "
                f"{device}. Move the graph with graph.to(...)."
            )
        if rank != 1 + (name in WIDTHS) or dtype not in (torch.int32, torch.int64):
            raise TigaError(
                f"tiga::propagate: a {p.kind} relation's tensors are lists of int32 or int64; "
                f"{name} is {dtype} with {rank} dimensions."
            )
    shapes = tuple([form[3] if o.place == "shared" else (None, *form[3]) for o, form in zip(p.operands, forms)])
    _check_sizes(p, shapes)
    return tuple([[evaluate_size(s, shapes, p.operands) for s in p.types[ref].sizes] for ref in p.returns])


def _names(kind: str, count: int) -> tuple[str, ...]:
    """Of a relation's tensors."""
    return next((x for x in relations.RELATIONS[kind].tensor_names if len(x) == count), ())


def check_relation(p: Program, relation: Sequence[Tensor], ints: Sequence[int]) -> None:
    """The lengths of the relation's tensors; asked where they run, so that no compiler equates sizes."""
    if relation:
        _check_lengths(p.kind, tuple([t.shape for t in relation]), *ints[:2])


@functools.lru_cache(8192)
def _check_lengths(kind: str, shapes: tuple, num_dst: int, num_src: int) -> None:
    lengths = tuple([shape[0] for shape in shapes])
    if kind == "csr" and len(shapes) > 3:
        lengths = lengths[: 3 if len(shapes) in (5, 10) else 2]
        _check_prepared(shapes, num_dst, num_src)
    wanted = {
        "csr": (num_dst + 1, *[lengths[1]] * (len(lengths) - 1)),
        "intervals": (num_dst,) * len(lengths),
        "blocks": (lengths[-1] + 1,) * 2 + (lengths[-1],) * 2,
    }[kind]
    if lengths != wanted:
        raise TigaError(
            f"tiga::propagate: a {kind} relation of {num_dst} by {num_src} has tensors of lengths {wanted}; "
            f"{lengths} were given."
        )


def _check_prepared(shapes: tuple, num_dst: int, num_src: int) -> None:
    """What is prepared of a list: kernels bound what it holds, here are its lengths."""
    edges = shapes[1][0]
    exact = {"back_rowptr": num_src + 1, "back_col": edges, "back_number": edges}
    least = {"items": num_dst, "back_items": num_src}
    for name, shape in zip(_names("csr", len(shapes)), shapes):
        if name in WIDTHS:
            wrong = shape[0] < least.get(name, 0) or shape[1] != WIDTHS[name]
        else:
            wrong = shape[0] != exact.get(name, shape[0])
        if wrong:
            raise TigaError(
                f"tiga::propagate: {name} of a csr relation of {num_dst} by {num_src} with {edges} edges has the shape "
                f"{tuple(shape)}. Pass what graph.prepare() made of this relation."
            )


_ROWS = {"dst": "destinations", "src": "sources", "edge": "edges"}


def _check_operand(o: Operand, form: tuple, device: torch.device) -> None:
    dtype, where, rank, features = form
    if where != device:
        raise TigaError(f"{o.place} field {o.name!r} is on {where}, others on {device}. Put all fields on one device.")
    if dtype != DTYPES[o.dtype]:
        raise TigaError(f"{o.place} field {o.name!r} is {dtype}, but the program was traced for {DTYPES[o.dtype]}.")
    if o.flag == "number":
        features = features[:0]
    if len(features) != len(o.sizes) or (o.place != "shared" and rank == 0):
        raise TigaError(
            f"{o.place} field {o.name!r} has {len(features)} feature dimensions, but the program was traced for "
            f"{len(o.sizes)}."
        )
    for k, (size, mark) in enumerate(zip(features, o.sizes)):
        if (mark == 1) != bool(size == 1):
            raise TigaError(
                f"{o.place} field {o.name!r} has size {size} in feature dimension {k}, but the program was traced for "
                f"{'1' if mark == 1 else 'another size than 1'}."
            )


def _check_sizes(p: Program, shapes: tuple) -> None:
    for a, b in p.conditions:
        have = evaluate_size(a, shapes, p.operands)
        if isinstance(b, Total) and b.rule == "at least":
            if have < b.parts[0]:
                raise TigaError(f"a slice needs a feature size of at least {b.parts[0]}; {_where(a, p)} is {have}.")
            continue
        want = evaluate_size(b, shapes, p.operands)
        if have != want:
            raise TigaError(f"feature sizes differ: {_where(a, p)} is {have}, {_where(b, p)} is {want}.")


def _where(size: Any, p: Program) -> str:
    if isinstance(size, tuple) and not isinstance(size, Total):
        o = p.operands[size[0]]
        return f"feature dimension {size[1]} of {o.place} field {o.name!r}"
    return "the other" if isinstance(size, Total) else "the size written in the program"


def allocate(p: Program, tensors: Sequence[Tensor], ints: Sequence[Any], sizes: tuple = ()) -> list[Tensor]:
    """Empty outputs: rows of the value's place, then its feature sizes, which `check` gave; contiguous."""
    outputs = []
    for ref, features in zip(p.returns, sizes or feature_sizes(p, tensors)):
        t = p.types[ref]
        if features and isinstance(features[-1], Total):
            outputs.append(_map_of_tiles(p, ref, features[:-2], tensors, ints))
            continue
        rows = [] if t.place == "shared" else [_rows(p, t.place, tensors, ints)]
        outputs.append(tensors[0].new_empty(rows + features, dtype=DTYPES[t.dtype]))
    return outputs


def _map_of_tiles(p: Program, ref: str, heads: list, tensors: Sequence[Tensor], ints: Sequence[Any]) -> Tensor:
    """[*heads, tiles of destinations, tiles of sources]: tiles without edges keep 0, or nan."""
    of_dst, of_src = (int(word) for word in p.definitions[ref].args[3:5])
    rows = (_rows(p, "dst", tensors, ints) + of_dst - 1) // of_dst
    if p.kind == "blocks":  # each is tiled within itself, and so are rows before the first and after the last
        rows = rows + tensors[len(p.operands) + 2].shape[0] + 2
    sizes = [*heads, rows, (_rows(p, "src", tensors, ints) + of_src - 1) // of_src]
    t = p.types[ref]
    return tensors[0].new_full(sizes, float("nan") if t.floating else 0, dtype=DTYPES[t.dtype])


def _rows(p: Program, place: str, tensors: Sequence[Tensor], ints: Sequence[Any]) -> Any:
    """A tensor's own row count where there is one, so that no condition between sizes is asked of a compiler."""
    for o, t in zip(p.operands, tensors):
        if o.place == place:
            return t.shape[0]
    if place == "edge":
        relation = tuple(tensors[len(p.operands) :])
        if (
            p.kind in ("blocks", "intervals")
            and isinstance(ints[2], int)
            and ints[2] < 0
            and torch._subclasses.fake_tensor.is_fake(tensors[0])
        ):
            return torch.library.get_ctx().new_dynamic_size()
        return relations.num_edges(p.kind, tuple(ints), relation)
    return ints[(0 if place == "dst" else 1) ^ int(p.reverse)]


def check_edges(p: Program, tensors: Sequence[Tensor], ints: Sequence[int]) -> None:
    """Rows of edge fields, also where the number of edges must be counted."""
    if any([x < 0 for x in ints[:2]]):
        raise TigaError(f"a graph of {ints[0]} destinations and {ints[1]} sources; sizes are not negative.")
    fields = [(o, t) for o, t in zip(p.operands, tensors) if o.place == "edge"]
    if fields:
        wanted = relations.num_edges(p.kind, tuple(ints), tuple(tensors[len(p.operands) :]))
        for o, t in fields:
            if t.shape[0] != wanted:
                raise TigaError(f"edge field {o.name!r} has {t.shape[0]} rows, but the graph has {wanted} edges.")
