"""What a mask of transformers says, as the sources of each row: a band, and one interval of sources where it is more.

transformers describes a mask by composing small functions of (batch, head, query, key). Those that it composes itself
are read from their closures, one row of a table each; of any other function nothing is known, and the caller gets None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiga.graph import Graph
from tiga.relations import UNBOUNDED


@dataclass(frozen=True)
class Pairs:
    """low <= key - query <= high, and start <= key < stop of every (batch, query), where there are such tensors."""

    low: int = -UNBOUNDED
    high: int = UNBOUNDED
    start: tuple[Tensor, ...] = ()
    stop: tuple[Tensor, ...] = ()

    def __and__(self, other: Pairs) -> Pairs:
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Pairs(low, high, self.start + other.start, self.stop + other.stop)


@dataclass(frozen=True)
class Shape:
    """Rows of a mask: queries from `offset` on, counted as keys are, which begin at key_offset."""

    batch: int
    queries: int
    keys: int
    offset: int
    key_offset: int
    device: torch.device

    def positions(self) -> Tensor:
        return torch.arange(self.queries, device=self.device) + self.offset


def pairs_of(function: Callable, shape: Shape) -> Pairs | None:
    """The pairs of a mask function, or None where it is not made of functions in the table."""
    found = Pairs()
    parts = conjunction(function)
    names = [name_of(part) for part in parts]
    for part, name in zip(parts, names):
        row = FUNCTIONS.get(name)
        # positions begin anew in every packed sequence: inside one, and only there, differences stay what they were
        if row is None or (name == REMAPPED and PACKED not in names):
            return None
        pairs = row(closure(part), shape)
        if pairs is None:
            return None
        found = found & pairs
    return found


def conjunction(function: Callable) -> list[Callable]:
    """The functions of which all must hold."""
    if name_of(function) == "and_masks.<locals>.and_mask":
        return [part for inner in closure(function)["mask_functions"] for part in conjunction(inner)]
    return [function]


def name_of(function: Any) -> str:
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return ""
    return function.__qualname__


def closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)}


def _remapped(given: dict, shape: Shape) -> Pairs | None:
    inner = pairs_of(given["mask_function"], shape)
    return None if inner is None or inner.start else inner


def _packed(given: dict, shape: Shape) -> Pairs | None:
    number = given["packed_sequence_mask"]
    if shape.offset or shape.key_offset or number.shape[1] != shape.keys or shape.queries != shape.keys:
        return None
    number = number.expand(shape.batch, -1).contiguous()  # ascends along a row
    return Pairs(start=(torch.searchsorted(number, number),), stop=(torch.searchsorted(number, number, right=True),))


def _chunked(given: dict, shape: Shape) -> Pairs:
    size, padding = given["chunk_size"], given["left_padding"]
    padding = torch.as_tensor(padding, device=shape.device).reshape(-1, 1)
    start = (shape.positions() - padding) // size * size + padding - shape.key_offset
    return Pairs(start=(start,), stop=(start + size,))


def _window(given: dict, shape: Shape) -> Pairs:
    return Pairs(low=1 - given["sliding_window"])


def _window_of_both_sides(given: dict, shape: Shape) -> Pairs:
    return Pairs(-given["sliding_window"], given["sliding_window"])


PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
FUNCTIONS: dict[str, Callable[[dict, Shape], Pairs | None]] = {
    "causal_mask_function": lambda given, shape: Pairs(high=0),
    "bidirectional_mask_function": lambda given, shape: Pairs(),
    "sliding_window_overlay.<locals>.inner_mask": _window,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _window_of_both_sides,
    "chunked_overlay.<locals>.inner_mask": _chunked,
    PACKED: _packed,
    REMAPPED: _remapped,
}
"""What each mask function of transformers means, by its name."""


def padded(padding: Tensor, shape: Shape) -> Pairs | None:
    """The pairs whose key is no padding, (batch, >= key_offset + keys) booleans; None where real keys have gaps."""
    real = padding[:, shape.key_offset : shape.key_offset + shape.keys]
    if real.shape[1] < shape.keys:
        real = torch.nn.functional.pad(real, (0, shape.keys - real.shape[1]))
    count = real.sum(1)
    first = real.to(torch.uint8).argmax(1)
    last = shape.keys - real.flip(1).to(torch.uint8).argmax(1)
    last = torch.where(count > 0, last, first)
    whole, gaps = torch.stack([(count == shape.keys).all(), (count != last - first).any()]).tolist()
    if gaps:
        return None
    return Pairs() if whole else Pairs(start=(first[:, None],), stop=(last[:, None],))


def graph_of(pairs: Pairs, shape: Shape) -> Graph:
    """One graph for the whole batch where all its members have the same pairs, else one of batch x queries rows."""
    n, m = shape.queries, shape.keys
    offset = shape.offset - shape.key_offset
    if not pairs.start:
        return _band(pairs.low, pairs.high, n, m, offset, shape.device)
    position = torch.arange(n, device=shape.device) + offset
    start, stop = torch.zeros_like(position), torch.full_like(position, m)
    if pairs.low > -UNBOUNDED:
        start = torch.maximum(start, position + pairs.low)
    if pairs.high < UNBOUNDED:
        stop = torch.minimum(stop, position + pairs.high + 1)
    start, stop = start.expand(shape.batch, n), stop.expand(shape.batch, n)
    for bound in pairs.start:
        start = torch.maximum(start, bound)
    for bound in pairs.stop:
        stop = torch.minimum(stop, bound)
    first = torch.arange(shape.batch, device=shape.device)[:, None] * m
    start = start.clamp(max=m)
    stop = torch.maximum(start, stop)
    # inside its bounds by construction: nothing is read from the device to check it
    return Graph(
        "intervals", (shape.batch * n, shape.batch * m, -1), ((start + first).flatten(), (stop + first).flatten())
    )


def _band(low: int, high: int, n: int, m: int, offset: int, device: Any) -> Graph:
    if low == -UNBOUNDED:
        if high == UNBOUNDED:
            return Graph.dense(n, m, device=device)
        return Graph.triangular(n, m, offset=offset + high, device=device)
    return Graph.window(n, -low, min(high, n + m + abs(offset)), num_src=m, offset=offset)
