"""Launches before a work over intervals: its rows' bounds, and for tiles of sources the rows that reach them."""

from __future__ import annotations

from typing import Any

import torch

from tiga.codegen.emit_nodes import Parameter, Source
from tiga.relations import largest

BLOCK = 1024  # rows a program, and blocks of rows that are looked at together
_GIVEN = ("given", "given_end", "given2", "given2_end")
_ROWS = ("start", "stop", "start2", "stop2")
_BLOCKS = ("block_least", "block_most")
_REACH = ("reach_low", "reach_high")
TENSORS = frozenset([*_GIVEN, *_ROWS, *_BLOCKS, *_REACH])
KINDS = TENSORS | {"interval rows", "interval sources", "TWO", "BOUNDS_BLOCK"}
"""Parameters that are known here; of them tensors."""


def _source(name: str, tensors: tuple[str, ...], constants: tuple[str, ...]) -> Source:
    words = (*tensors, "interval rows", "interval sources", *constants, "TWO", "BOUNDS_BLOCK")
    text = f"from tiga.codegen.device_bounds import {name} as propagate\n"
    return Source(text, tuple([Parameter(word, word) for word in words]), ())


STAGES = {
    "bounds": _source("row_bounds", (*_GIVEN, *_ROWS, *_BLOCKS), ()),
    "reach": _source("column_reach", (*_ROWS, *_BLOCKS, *_REACH), ("BLOCK_M",)),
}


def stages(span: str) -> tuple[str, ...]:
    """What is launched before a work of this span."""
    return {"rows": ("bounds",), "cols": ("bounds", "reach")}.get(span[:4], ())


def programs(stage: str, ints: tuple, block_m: int) -> int:
    return _length("block_least" if stage == "bounds" else "reach_low", ints, block_m)


def tensor(kind: str, span: str) -> str | None:
    """The name of the tensor that a parameter is; the second interval of a relation of one is the first."""
    two = span[4:] == "2"
    if kind in _GIVEN:
        return f"relation{_GIVEN.index(kind) % (4 if two else 2)}"
    return kind if two or kind not in ("start2", "stop2") else kind[:-1]


def value(launch: Any, kind: str) -> Any:
    """An argument of these kernels, or of one that reads what they made."""
    ints, span = launch.call.ints, launch.ready.span
    numbers = {"interval rows": ints[0], "interval sources": ints[1], "TWO": span[4:] == "2", "BOUNDS_BLOCK": BLOCK}
    if kind in numbers:
        return numbers[kind]
    name = tensor(kind, span)
    known = launch.call.tensors.get(name)
    length = _length(name, ints, launch.plan.block_m)
    return known if kind in _GIVEN else launch.made_state(name, length, torch.int32)


def _length(name: Any, ints: tuple, block_m: int) -> int:
    """Of a tensor that is made."""
    if name in _REACH:
        return largest(1, -(-ints[1] // block_m))
    return largest(1, -(-ints[0] // BLOCK) if name in _BLOCKS else ints[0])
