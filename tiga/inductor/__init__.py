"""Everything that touches torch._inductor. Deletable: without it the operator is opaque to Inductor, no more."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable


def _neighbours() -> None:
    from tiga.inductor import fusion

    fusion.install()


HOOKS: tuple[Callable[[], None], ...] = (_neighbours,)
"""What tiga registers with Inductor, each once."""

_installed = False


def install() -> None:
    """Run the hooks, once, as soon as Inductor is there.

    Called whenever the operator meets a fake tensor, so that eager users never import Inductor. The user's
    configuration is neither read nor written. Inductor's hooks are private: where one is missing, this warns once, and
    the operator stays opaque - correct, not fused.
    """
    global _installed
    if _installed or "torch._inductor.compile_fx" not in sys.modules:
        return
    _installed = True
    try:
        for hook in HOOKS:
            hook()
    except (ImportError, AttributeError, TypeError) as e:
        warnings.warn(
            f"tiga: this version of Inductor lacks a hook ({e}); compiled programs are right, but not fused with their "
            "neighbours.",
            stacklevel=2,
        )
