"""tiga inside other libraries. Each is imported when it is asked for, and asks for its library only when it is used."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["nested", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module("tiga.integrations." + name)
    raise AttributeError(f"module 'tiga.integrations' has no attribute {name!r}")
