"""Lists of the tiles that a map kept, a list for each head and tile of owners: loops over them skip nothing."""

from __future__ import annotations

from typing import Any

import torch

from tiga.codegen.emit_nodes import Parameter, Source
from tiga.codegen.tiles import Input, Work

_WORDS = ("kept", "tiles", "before", "own", "other", "own_stride", "other_stride")
LIST = Source(
    "from tiga.codegen.device_pruned import list_tiles as propagate\n",
    (*[Parameter(word, "kept " + word) for word in _WORDS], Parameter("BLOCK", "BLOCK")),
    (),
)


def the_map(work: Work) -> Input | None:
    """The one map that all a kernel makes of a pair depends on, if there is one."""
    maps = [x for x in work.inputs if x.mode == "map"]
    return maps[0] if work.skips and len(maps) == 1 else None


def list_name(work: Work, kind: str) -> str:
    """The name of a tensor: the map, the lists, or how many entries come before a tile."""
    x = the_map(work)
    assert x is not None
    return x.ref if kind == "kept kept" else kind


def list_rows(work: Work, tensors: dict) -> int:
    """How many lists there are."""
    kept = tensors[list_name(work, "kept kept")]
    return kept.numel() // max(1, kept.shape[-1 if work.owner == "dst" else -2])


def list_value(launch: Any, kind: str) -> Any:
    """An argument of the kernel that lists tiles, or of one that reads the lists."""
    work = launch.work
    kept = launch.call.tensors[list_name(work, "kept kept")]
    at = (-2, -1) if work.owner == "dst" else (-1, -2)
    own, other = (kept.shape[k] for k in at)
    if kind == "kept tiles":
        return launch.made_state(kind, list_rows(work, launch.call.tensors) * other, torch.int32)
    if kind == "kept before":
        return launch.made_state(kind, list_rows(work, launch.call.tensors) * (other + 1), torch.int32)
    strides = (kept.shape[-1], 1) if work.owner == "dst" else (1, kept.shape[-1])
    numbers = {"own": own, "other": other, "own_stride": strides[0], "other_stride": strides[1]}
    return kept if kind == "kept kept" else numbers[kind[5:]]
