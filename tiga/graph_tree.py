"""A graph as a node of pytrees: its leaves are sizes and tensors, its context is what kind they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.utils._pytree as pytree


def register(cls: Any) -> None:
    """Graphs of this class are taken apart and put together by every torch function that takes pytrees."""

    def unflatten(children: Iterable[Any], context: Sequence[Any]) -> Any:
        kind, ints, tensors, positions, turned, device = context[:6]
        leaves = tuple(children)
        a, b = ints + tensors, ints + tensors + positions
        return cls(kind, leaves[:ints], leaves[ints:a], leaves[a:b], turned, device, leaves[b:])

    pytree.register_pytree_node(
        cls,
        _flatten,
        unflatten,
        serialized_type_name="tiga.Graph",
        flatten_with_keys_fn=_flatten_with_keys,
        to_dumpable_context=list,
        from_dumpable_context=tuple,
    )


def _context(graph: Any) -> tuple[Any, ...]:
    counts = len(graph.ints), len(graph.tensors), len(graph._positions)
    return (graph.kind, *counts, graph.reversed, graph._device, len(graph.prepared))


def _flatten(graph: Any) -> tuple[list[Any], tuple[Any, ...]]:
    return [*graph.ints, *graph.tensors, *graph._positions, *graph.prepared], _context(graph)


def _flatten_with_keys(graph: Any) -> tuple[list[Any], tuple[Any, ...]]:
    groups: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("ints", graph.ints),
        ("tensors", graph.tensors),
        ("positions", graph._positions),
        ("prepared", graph.prepared),
    )
    keyed: list[Any] = [
        (pytree.MappingKey(f"{name}{i}"), leaf) for name, leaves in groups for i, leaf in enumerate(leaves)
    ]
    return keyed, _context(graph)
