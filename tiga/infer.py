"""The types of a line's results from those of its arguments: the rows' rules, batch dimensions, functions in scans."""

from __future__ import annotations

from typing import Any

from tiga.errors import TigaError
from tiga.primitives import PRIMITIVES
from tiga.program import Function, Line, read_number
from tiga.reducers import REDUCERS
from tiga.types import Type, broadcast_sizes


def infer(line: Line, types: tuple, unify: Any, batch: int = 0, functions: tuple = ()) -> tuple[Type, ...]:
    """The types of a line's results from those of its arguments."""
    if line.op == "scan":
        return scan_types(line, types, unify, batch, functions)
    if line.op == "reduce":
        place, name = line.attrs
        for t in types:
            if place != "shared" and t.place not in ("edge", "shared", "src", "dst"):
                raise TigaError(f"reduce {place} of a value at {t.place}")
        if batch and place == "shared" and name != "sum":
            return (
                _beside_batch("join", lambda inner: REDUCERS[name].rule(place, inner, unify)[0], types, unify, batch),
            )
        return REDUCERS[name].rule(place, types, unify)
    row = PRIMITIVES[line.op]
    if batch and row.elementwise:
        types = _align_batch(types, batch)
    if batch and row.batch:
        return (_beside_batch(row.batch, lambda inner: row.rule(inner, line.attrs, unify), types, unify, batch),)
    return (row.rule(types, line.attrs, unify),)


def _beside_batch(how: str, rule: Any, types: tuple, unify: Any, batch: int) -> Type:
    """The type by a rule that is shown the features alone, with its batch dimensions put back."""
    leads = tuple([t.sizes[:batch] for t in types])
    t = rule(tuple([t._replace(sizes=t.sizes[batch:]) for t in types]))
    lead = {"first": leads[0], "join": broadcast_sizes(leads, unify), "ones": (1,) * batch, "none": ()}[how]
    return t._replace(sizes=lead + t.sizes)


def scan_types(line: Line, types: tuple, unify: Any, batch: int, functions: tuple) -> tuple[Type, ...]:
    """States at destinations, other results on edges. A state keeps the type that the function makes of it."""
    f, states = functions[int(line.attrs[1])], int(line.attrs[2])
    for t in types[:states]:
        if t.place not in ("dst", "shared"):
            raise TigaError(f"scan starts from a value at {t.place}")
    known = [Type("edge", "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes) for t in types[states:]]
    begin = [Type("edge", t.dtype, t.sizes, t.weak) for t in types[:states]]
    for _ in range(3):
        out = body_types(f, (*begin, *known), unify, batch)[1]
        begin, before = (
            [Type("edge", "f32" if t.weak and t.dtype == "f64" else t.dtype, t.sizes) for t in out[:states]],
            begin,
        )
    if [(t.dtype, t.sizes) for t in begin] != [(t.dtype, t.sizes) for t in before]:
        raise TigaError("a scan's states change their type from edge to edge")
    return (
        *[Type("dst", t.dtype, t.sizes) for t in out[:states]],
        *[Type("edge", t.dtype, t.sizes) for t in out[states:]],
    )


def body_types(f: Function, types: tuple, unify: Any, batch: int = 0) -> tuple[dict[str, Type], tuple[Type, ...]]:
    """The types of a function's values where its parameters have `types`."""
    found: dict[str, Type] = {"a" + str(k): t for k, t in enumerate(types)}

    def of(word: str) -> Type:
        return (
            found[word]
            if word in found
            else Type("shared", "i64" if isinstance(read_number(word), int) else "f64", (), True)
        )

    for line in f.lines:
        found[line.outs[0]] = infer(line, tuple([of(a) for a in line.args]), unify, batch)[0]
    return found, tuple([of(r) for r in f.returns])


def _align_batch(types: tuple, batch: int) -> tuple:
    """Batch dimensions stay leftmost: ones are put between them and the features of values of lower rank."""
    rank = max(len(t.sizes) for t in types)
    return tuple(
        [
            t
            if t.weak or len(t.sizes) == rank
            else Type(t.place, t.dtype, t.sizes[:batch] + (1,) * (rank - len(t.sizes)) + t.sizes[batch:], t.weak)
            for t in types
        ]
    )
