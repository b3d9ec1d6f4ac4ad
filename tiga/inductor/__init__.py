"""Everything that imports torch._inductor. Deletable: without this folder the operator is opaque to Inductor and all else is the same."""
from __future__ import annotations


def install() -> None:
    """Called whenever the operator meets a fake tensor; installs hooks once Inductor is there."""
