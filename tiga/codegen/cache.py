"""What is kept on disk from process to process: in TIGA_CACHE_DIR, else in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def folder() -> Path:
    """Where it is kept. Anything there may be deleted at any time."""
    given = os.environ.get("TIGA_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiga"


def read(name: str) -> Any:
    """What was kept under a name; None if nothing was, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder() / name).read_text(encoding="utf-8"))
    return None


def write(name: str, value: Any) -> None:
    """Keep a value of numbers and strings: whole or not at all, whoever writes at the same time."""
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as f:
        json.dump(value, f)
    os.replace(f.name, path)
