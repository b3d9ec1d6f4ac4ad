"""tiga: attention is message passing. Name a graph, write one edge: one differentiable, compilable PyTorch operator."""

from __future__ import annotations

from typing import Any

from tiga import functions_linear as functions_linear
from tiga import functions_nn as functions_nn
from tiga import functions_shape as functions_shape
from tiga import ops as ops
from tiga.calibrate import calibrate_prune
from tiga.errors import TigaError, TraceError
from tiga.graph import Graph
from tiga.message_passing import MessagePassing
from tiga.reducer import OnlineSoftmaxReducer, Reducer, max, mean, min, online_softmax, sum

__version__ = "0.1.0"
__all__ = [
    "Graph",
    "MessagePassing",
    "OnlineSoftmaxReducer",
    "Reducer",
    "TigaError",
    "TraceError",
    "calibrate_prune",
    "flex_attention",
    "integrations",
    "jit",
    "max",
    "mean",
    "min",
    "nn",
    "online_softmax",
    "ops",
    "program",
    "sum",
    "tune",
]


def jit(fn: Any) -> Any:
    """torch.compile(fn, fullgraph=True): inside it several applications and their neighbours compile as one graph."""
    import torch

    return torch.compile(fn, fullgraph=True)


program = jit  # type: ignore[assignment]  # the submodule of this name is imported by its full name
_LATER = {  # imported when first asked for
    "flex_attention": "tiga.flex",
    "integrations": "tiga.integrations",
    "nn": "tiga.nn",
    "tune": "tiga.codegen.tuning",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        import importlib

        module = importlib.import_module(_LATER[name])
        return module if name == _LATER[name].rpartition(".")[2] else getattr(module, name)
    raise AttributeError(f"module 'tiga' has no attribute {name!r}")
