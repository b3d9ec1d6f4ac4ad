"""Products with a matrix of parameters: what reads one node is multiplied once a node, not once an edge."""

from __future__ import annotations

from typing import Any

import torch

from tiga import passes
from tiga.errors import TraceError
from tiga.functions import meaning
from tiga.functions_nn import fold_features
from tiga.types import is_one

WIDER = 4  # times as wide may be what an edge reads in place of a node's own features


def hoisted(part: Any, out_features: int) -> bool:
    """Whether a part of a joined edge value is multiplied by its columns of the matrix before edges read it.

    Each edge then reads `out_features` numbers of the product in place of the part, and is spared `out_features` times
    as many multiplications as the part has features: not worth it where that is much wider. What is made of both ends,
    displacements among them, stays on the edge: differences of products of positions have fewer digits.
    """
    return part.type.place in ("src", "dst") and out_features <= WIDER * part.type.sizes[-1]


def product(t: Any, x: Any, weight: Any, bias: Any) -> Any:
    """x W^T + b: of a joined edge value a sum of such products, those of one node's features apart."""
    once: list[tuple] = []
    rest: list[tuple] = []
    matrix, at = t.lift(weight), 0
    for part in t.joined(x) if x.type.place == "edge" else ():
        columns = part, at, part.type.sizes[-1]
        (once if hoisted(part, weight.shape[0]) else rest).append(columns)
        at += part.type.sizes[-1]
    if once and not torch.compiler.is_compiling():
        passes.ran("hoist")
    cut = lambda start, size: matrix.emit("slice", "-1", str(start), str(size), "1")
    terms = [multiply(t, part, cut(start, size)) for part, start, size in once]
    if not once:
        terms = [multiply(t, x, matrix)]
    elif rest:
        terms.append(multiply(t, join(t, [x for x, _, _ in rest]), join(t, [cut(*c) for _, *c in rest])))
    out = terms[0] if bias is None else terms[0] + bias
    for term in terms[1:]:
        out = out + term
    return out


def join(t: Any, values: list) -> Any:
    return values[0] if len(values) == 1 else t.emit("cat", tuple(values), ("-1",))


def multiply(t: Any, x: Any, matrix: Any) -> Any:
    """x W^T; on the edge with a single row or column number by number, which is no matrix product."""
    if x.type.place == "edge" and is_one(matrix.type.sizes[0]):
        return (x * matrix.emit("squeeze", "-2")).emit("sum", "-1").emit("unsqueeze", "-1")
    if x.type.place == "edge" and is_one(matrix.type.sizes[1]):
        return x * matrix.emit("squeeze", "-1")
    return t.emit("linear", (x, matrix))


@meaning("linear")
def _linear(t: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if not hasattr(x, "builder") or hasattr(weight, "builder"):
        raise TraceError("linear with a traced weight. Multiply and sum instead: (x.unsqueeze(-2) * weight).sum(-1).")
    if not x.type.sizes or x.type.sizes[-1] != weight.shape[-1]:
        raise TraceError(
            f"linear of features {tuple(x.type.sizes)} with a weight {tuple(weight.shape)}: "
            f"the last feature size must be {weight.shape[-1]}."
        )
    if weight.dim() == 2:
        return product(t, x, weight, bias)
    out = product(t, x, weight.unsqueeze(0), None).emit("squeeze", "-1")
    return out if bias is None else out + bias


@meaning("matmul")
def _matmul(t: Any, x: Any, other: Any) -> Any:
    if not hasattr(x, "builder"):
        raise TraceError(
            "matmul(tensor, traced value) is ambiguous under a compiler. "
            "Write torch.nn.functional.linear(x, weight), or torch.matmul(x, weight)."
        )
    if hasattr(other, "builder"):
        raise TraceError("matmul of two traced values. Multiply and sum instead: (a * b).sum(-1).")
    if other.dim() <= 2:
        return _linear(t, x, other.mT if other.dim() == 2 else other)
    return fold_features(t, "sum", x.emit("unsqueeze", "-1") * other, -2, False)
