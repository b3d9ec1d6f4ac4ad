"""What kernels read of listed edges beside the lists themselves: work lists of both directions, and CSR by source.

They are leaves of a Graph and operands of the operator: what is eager, compiled, exported or captured reads the same
tensors, and nothing is kept aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga import relations
from tiga.relations import Ints, Tensors

KERNEL_DEVICES = {"cuda"}
"""Devices whose kernels read these lists: constructors make them there."""
SPLIT = 256
"""Edges of an item, at least, before a row is cut: below it a piece does not pay for its state's way through memory."""
PIECES = 8192
"""Items that all edges are worth: of larger graphs longer ones, so that states of pieces stay small beside fields."""

ONE, BOTH = 2, 7
"""Tensors that are prepared: by destination, and of both directions."""


class Direction(NamedTuple):
    """One direction of a listed relation: CSR by owner, and the work list of its rows where there is one."""

    rowptr: Tensor
    col: Tensor
    number: Tensor | None
    items: Tensor | None
    merges: Tensor | None


def directions(relation: Tensors) -> tuple[Direction, Direction | None]:
    """(by destination, by source) of a csr relation's tensors: rowptr, col, number, and what is prepared of it."""
    base = 3 if len(relation) in (3, 5, 10) else 2
    number = relation[2] if base == 3 else None
    items, merges = relation[base : base + 2] if len(relation) > base else (None, None)
    by_dst = Direction(relation[0], relation[1], number, items, merges)
    return by_dst, Direction(*relation[base + 2 :]) if len(relation) > base + 2 else None


def split_of(num_edges: Any) -> Any:
    """Edges of one item at most: arithmetic without a branch, so that no number of edges is specialised."""
    return relations.largest(SPLIT, relations.least(16 * SPLIT, num_edges // PIECES))


def lists(
    ints: Ints, tensors: Tensors, prepared: Tensors, by_source: bool, undirected: bool | None, read: bool
) -> Tensors:
    """(items, merges), which may be there, and with `by_source` (rowptr, col, number, items, merges) of the transpose.

    read: whether the longest rows and, for undirected None, symmetry may be looked at, which waits for the device.
    """
    rowptr, col = tensors[:2]
    back: Tensors = ()
    if by_source:
        number = tensors[2] if len(tensors) == 3 else None
        back = tuple(torch.ops.tiga.csr_transpose(rowptr, col, number, ints[1]))
    longest, longest_back, same = _seen(ints, rowptr, col, back, undirected) if read else (None, None, undirected)
    forward = prepared or work_list(rowptr, col.shape[0], longest)
    if not by_source:
        return forward
    if same:
        return (*forward, rowptr, col, back[2], *forward)
    return (*forward, *back, *work_list(back[0], col.shape[0], longest_back))


def fitted(tensors: Tensors, prepared: Tensors) -> Tensors:
    """Lists of both directions that were made without a read, without padding where no row is cut: kernels that join
    pieces are not launched then. One read; the lists as they are where it changes none."""
    items, merges, *back, back_items, back_merges = prepared
    rowptr, edges = tensors[0], tensors[1].shape[0]
    if not merges.shape[0] and not back_merges.shape[0]:
        return prepared
    longest, longest_back = torch.stack([_longest(rowptr), _longest(back[0])]).tolist()
    one = two = (items, merges)
    if merges.shape[0] and longest <= split_of(edges):
        one = two = work_list(rowptr, edges, longest)
    if back_items is not items:
        fits = back_merges.shape[0] and longest_back <= split_of(edges)
        two = work_list(back[0], edges, longest_back) if fits else (back_items, back_merges)
    return prepared if one[1] is merges and two[1] is back_merges else (*one, *back, *two)


def outside_inference(make: Callable[..., Tensors], *arguments: Any) -> Tensors:
    """Lists that are kept for gradients too, wherever they are made."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make(*arguments)
    with torch.inference_mode(False):
        return make(*arguments)


def turned(tensors: Tensors, prepared: Tensors) -> tuple[Tensors, Tensors] | None:
    """(tensors, prepared) of the graph whose sources and destinations change places, if both directions are there."""
    if len(prepared) < BOTH:
        return None
    items, merges, *back, back_items, back_merges = prepared
    rowptr, col = tensors[:2]
    number = tensors[2] if len(tensors) == 3 else torch.arange(col.shape[0], dtype=back[2].dtype, device=col.device)
    return tuple(back), (back_items, back_merges, rowptr, col, number, items, merges)


def moved(tensors: Tensors, prepared: Tensors, there: Tensors) -> Tensors:
    """The prepared tensors on the device of `there`, where `tensors` are already; what is shared stays shared."""
    known, found = list(zip(tensors, there)), []
    for t in prepared:
        same = [y for x, y in known if x is t]
        found.append(same[0] if same else t.to(there[0].device))
        known.append((t, found[-1]))
    return tuple(found)


def work_list(rowptr: Tensor, edges: Any, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """(items, merges) of rows of so many edges; where the longest is known to stay whole, nothing is padded."""
    split = split_of(edges)
    if not torch.compiler.is_compiling() and max(edges, rowptr.shape[0]) < 2**31:
        rowptr = rowptr.to(torch.int32)  # and so is the list, of half the size
    whole = longest is not None and longest <= split
    items, merges = torch.ops.tiga.work_list(rowptr, edges, edges + 1 if whole else split)
    return items, merges


def _seen(ints: Ints, rowptr: Tensor, col: Tensor, back: Tensors, undirected: bool | None) -> tuple[int, int, bool]:
    """Edges of the longest row and of the longest of the transpose, and whether both are the same: one read."""
    parts = [_longest(rowptr), _longest(back[0]) if back else rowptr.new_zeros((), dtype=torch.int64)]
    ask = undirected is None and len(back) == 3 and ints[0] == ints[1]
    if ask:
        parts.append(((rowptr == back[0]).all() & (col == back[1]).all()).to(torch.int64))
    by_dst, by_source, *same = torch.stack(parts).tolist()
    return by_dst, by_source, bool(same[0]) if ask else bool(undirected)


def _longest(rowptr: Tensor) -> Tensor:
    if rowptr.shape[0] < 2:
        return rowptr.new_zeros((), dtype=torch.int64)
    return rowptr.diff().max().to(torch.int64)
