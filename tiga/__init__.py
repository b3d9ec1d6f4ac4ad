"""tiga: attention is message passing. Name a graph, write one edge: one differentiable, compilable PyTorch operator."""

from __future__ import annotations

from typing import Any

from tiga import functions_nn as functions_nn
from tiga import functions_shape as functions_shape
from tiga import ops as ops
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
    "jit",
    "max",
    "mean",
    "min",
    "nn",
    "online_softmax",
    "ops",
    "program",
    "sum",
]


def jit(fn: Any) -> Any:
    """torch.compile(fn, fullgraph=True): inside it several applications and their neighbours compile as one graph."""
    import torch

    return torch.compile(fn, fullgraph=True)


program = jit  # type: ignore[assignment]  # the submodule of this name is imported by its full name


def __getattr__(name: str) -> Any:
    if name == "nn":
        import importlib

        return importlib.import_module("tiga.nn")
    raise AttributeError(f"module 'tiga' has no attribute {name!r}")
