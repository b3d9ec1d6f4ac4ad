"""tiga's sources as a part of Inductor's cache keys: what another version compiled is never taken for this one's."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.custom_graph_pass import CustomGraphModulePass


@functools.cache
def sources() -> bytes:
    """A hash of every module's text: passes, derivations and emitters all decide what a program compiles to."""
    from tiga import __version__

    found = hashlib.sha256(__version__.encode())
    folder = Path(__file__).parent.parent
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.digest()


class Sources(CustomGraphModulePass):
    """A pass of a device that no graph has, so it never runs; its identity is in the key of all that is cached."""

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        return None

    def uuid(self) -> Any:
        return "tiga", sources()


def install() -> None:
    custom_backend_passes["tiga"] = Sources()
