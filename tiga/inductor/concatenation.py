"""Results that only a concatenation of features reads: kernels write them where it has them, and nothing is copied.

So come the gradients of maps that are one product: as the gradient of the columns of its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch._prims_common import make_contiguous_strides_for
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tiga.inductor.draft import Node, same_sizes, shown
from tiga.inductor.neighbourhood import following, results, stays
from tiga.program import Program

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim)


class Concatenation(NamedTuple):
    """A node, and the dimension in which its parts lie side by side. first: where in that a call's results begin, by
    their numbers; others: the same of parts that are no results of the call, by their nodes."""

    node: Node
    dim: int
    first: dict[int, int]
    others: dict[Node, int]

    def place(self, outputs: list[Tensor]) -> Tensor:
        """Memory of the whole, of which outputs become views: rows as far apart as the whole's."""
        shape, (some, *_) = shown(self.node).shape, self.first
        whole = outputs[some].new_empty(shape)
        row, width = math.prod(shape[self.dim :]), math.prod(shape[self.dim + 1 :])
        for k, first in self.first.items():
            out = outputs[k]
            outputs[k] = whole.as_strided(out.shape, (row, *out.stride()[1:]), first * width)
        return whole

    def finish(self, whole: Any) -> None:
        """The other parts are copied, and the node has its value: the compiler goes past nodes that have one."""
        for part, first in self.others.items():
            columns = lowerings[aten.slice.Tensor](whole, self.dim, first, first + shown(part).shape[self.dim])
            lowerings[aten.copy_.default](columns, value(part))
        V.graph.env[self.node] = whole


def concatenations(call: Node, p: Program) -> list[Concatenation]:
    """Those whose parts are results of a call that nothing else reads, and at most one other, known without the call.

    Of more such parts the copies would be more launches than one of the whole. What it reads it would read at the call:
    nothing in between changes memory or has a turn to keep.
    """
    found: dict[Node, dict[Node, int]] = {}
    for k, (ref, nodes) in enumerate(zip(p.returns, results(call))):
        part = nodes[0] if len(nodes) == 1 and p.types[ref].place in ("dst", "src") else None
        while part is not None and len(part.users) == 1:
            (reader,) = part.users
            if reader.target is aten.cat.default:
                found.setdefault(reader, {})[part] = k
            part = reader if reader.target in RESHAPES else None
    every = [concatenation(call, node, ours) for node, ours in found.items()]
    return [x for x in every if x is not None]


def concatenation(call: Node, node: Node, ours: dict[Node, int]) -> Concatenation | None:
    """ours: the parts that are results of the call, and their numbers."""
    whole, first, others, at = shown(node), {}, {}, 0
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % whole.dim()
    for part in node.args[0]:
        val = shown(part)
        if val.dim() != whole.dim() or val.dtype != whole.dtype or not isinstance(val.shape[dim], int):
            return None
        if part not in ours:
            others[part] = at
        elif statically_known_true(math.prod(val.shape[:dim]) == shown(call)[ours[part]].shape[0]):
            first[ours[part]] = at
        else:
            return None
        at += val.shape[dim]
    once = len(first) + len(others) == len(node.args[0]) and len(others) <= 1
    plain = same_sizes(whole.stride(), make_contiguous_strides_for(whole.shape))
    free = not any(map(stays, between(call, node))) and not following(call) & others.keys()
    return Concatenation(node, dim, first, others) if once and plain and free else None


def between(first: Node, last: Node) -> Iterator[Node]:
    while (first := first.next) is not last:
        yield first


def value(node: Node) -> Any:
    """What stands for a node in the compiler's terms; now, where its turn has not come."""
    if node not in V.graph.env:
        for n in node.all_input_nodes:
            value(n)
        V.graph.env[node] = V.graph.run_node(node)
    return V.graph.env[node]
