"""Types of program values: where a value lives, its dtype, its feature sizes - and how they follow from arguments.

Sizes are integers while tracing, and expressions over the operands' sizes (`Dim`) when a program is parsed; the rules
ask `unify` whether two of them are the same, so that tracing answers at once and parsing notes a condition that is
checked at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tiga.errors import TigaError

PLACES = ("src", "dst", "edge", "shared")

# fmt: off
DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}
# fmt: on
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("u8", "i8", "i16", "i32", "i64")


class Type(NamedTuple):
    """What is known of a value before any tensor is seen. `weak`: a Python number, of its partner's dtype."""

    place: str
    dtype: str
    sizes: tuple
    weak: bool = False

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS


class Dim(NamedTuple):
    """Feature size number `dim` of operand `operand`, counted from 0 after the rows (shared: from 0)."""

    operand: int
    dim: int


class Total(NamedTuple):
    """A size computed from others: the sum, product or quotient of `parts`, or "at least" a slice's length.

    "tiles": how many tiles the rows of a place make, in programs that skip tiles.
    """

    rule: str
    parts: tuple


Unify = Callable[[Any, Any], None]


def compute_dtype(dtype: str) -> str:
    """16-bit values are computed in float32 inside a program; all others in their own dtype."""
    return "f32" if dtype in ("f16", "bf16") else dtype


def join_places(types: tuple[Type, ...]) -> str:
    """src with dst is edge; shared joins anything."""
    place = "shared"
    for t in types:
        if t.place != "shared" and t.place != place:
            place = t.place if place == "shared" else "edge"
    return place


def broadcast_sizes(all_sizes: tuple[tuple, ...], unify: Unify) -> tuple:
    """Right-aligned broadcasting of feature sizes."""
    rank = 0
    for sizes in all_sizes:
        if len(sizes) > rank:
            rank = len(sizes)
    out = []
    for back in range(rank, 0, -1):
        size: Any = 1
        for sizes in all_sizes:
            if len(sizes) >= back:
                other = sizes[len(sizes) - back]
                if is_one(other):
                    continue
                if is_one(size):
                    size = other
                else:
                    unify(size, other)
        out.append(size)
    return tuple(out)


def is_one(size: Any) -> bool:
    return not isinstance(size, tuple) and size == 1


def _category(dtype: str) -> int:
    return 0 if dtype == "bool" else 1 if dtype in INTEGERS else 2


def promote(types: tuple[Type, ...]) -> tuple[str, bool]:
    """The dtype of an arithmetic result, and whether it is still a Python number: torch's promotion."""
    kinds: list[str | None] = [None, None, None]  # with dimensions, without, Python numbers
    for t in types:
        rank = 2 if t.weak else 1 if t.place == "shared" and len(t.sizes) == 0 else 0
        held = kinds[rank]
        kinds[rank] = t.dtype if held is None else _PROMOTED[held, t.dtype]
    result = kinds[0]
    for other, number in ((kinds[1], False), (kinds[2], True)):
        if other is None:
            continue
        if result is None:
            result = other
        elif _category(other) > _category(result):
            result = "f32" if number and other == "f64" else other
    weak = kinds[0] is None and kinds[1] is None
    assert result is not None
    return result, weak


_PROMOTED = {(a, b): NAMES[torch.promote_types(DTYPES[a], DTYPES[b])] for a in DTYPES for b in DTYPES}


def as_float(dtype: str, weak: bool) -> str:
    return dtype if dtype in FLOATS else "f64" if weak else "f32"


def feature_dim(sizes: tuple, text: str) -> int:
    """A feature dimension is written from the right: -1 is the last."""
    dim = _integer(text)
    if not -len(sizes) <= dim < 0:
        raise TigaError(f"feature dimension {dim} of a value with {len(sizes)} feature dimensions")
    return dim


def _integer(text: str) -> int:
    digits = text[1:] if text[:1] == "-" else text
    if not (digits.isdigit() and digits.isascii() and len(digits) <= 18):
        raise TigaError(f"expected an integer, found {text!r}")
    return int(text)


def integers(words: tuple[str, ...]) -> tuple[int, ...]:
    return tuple([_integer(word) for word in words])
