"""Everything that touches torch._inductor. Deletable: without it the operator is opaque to Inductor, no more."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch


def _version() -> None:
    from tiga.inductor import version

    version.install()


def _neighbours() -> None:
    from tiga.inductor import fusion

    fusion.install()


def _kernels() -> None:
    from tiga.inductor import lowering

    lowering.install()


HOOKS: tuple[Callable[[], None], ...] = (_version, _neighbours, _kernels)
"""What tiga registers with Inductor, each once."""

_installed = False


def install() -> None:
    """Run the hooks, once, as soon as Inductor is there.

    Called whenever the operator meets a fake tensor, so that eager users never import Inductor. The user's
    configuration is neither read nor written. Inductor's hooks are private: where one is missing, this warns once, and
    the operator stays opaque - correct, not fused.
    """
    global _installed
    if _installed or not _is_there():
        return
    _installed = True
    lacking = []
    for hook in HOOKS:
        try:
            hook()
        except (ImportError, AttributeError, TypeError) as e:
            lacking.append(str(e))
    if lacking:
        warnings.warn(
            f"tiga: this version of Inductor lacks a hook ({'; '.join(lacking)}); compiled programs are right, but not "
            "fused with their neighbours, or not a part of the compiler's code.",
            stacklevel=2,
        )


def _is_there() -> bool:
    """Whether Inductor is loaded, or about to be: the first key of its cache is made before it traces the operator."""
    if "torch._inductor.compile_fx" in sys.modules:
        return True
    try:
        tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
        backend = torch._dynamo.eval_frame.innermost_backend(tracer.output.compiler_fn)
        return isinstance(backend, torch._TorchCompileInductorWrapper)
    except (KeyError, AttributeError):
        return False  # nothing is being traced
