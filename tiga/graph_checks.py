"""What a graph is checked for when it is built: Python types and shapes always, values only where reading them is free
of surprise. Messages begin with the constructor that was asked, name the argument and the number, and say what to
write.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tiga.errors import TigaError

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)


def number(value: Any) -> str:
    """Text of an int or SymInt; an f-string of a symbolic one is not a str while Dynamo traces."""
    return str(operator.index(value))


def size(value: Any, name: str, asked: str) -> Any:
    """`value` as a size: an int or SymInt >= 0."""
    value = integer(value, name, asked)
    if value < 0:
        raise TigaError(f"{asked}: {name} is {number(value)}, but a size is 0 or more.")
    return value


def integer(value: Any, name: str, asked: str) -> Any:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        kind = type(value).__name__
        raise TypeError(f"{asked}: {name} must be an integer, got {kind}. Write a Python int, such as x.shape[0].")
    return operator.index(value)


def can_read(*tensors: Tensor) -> bool:
    """Whether values may be read now: not while compiling, exporting, faking or capturing a CUDA graph."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
    return True


def should_read(complete: bool, *tensors: Tensor) -> bool:
    """Whether values are checked: on the host always; on a device only to find what was not given."""
    return can_read(*tensors) and not (complete and any(t.device.type != "cpu" for t in tensors))


def integers(value: Any, name: str, asked: str, rank: int = 1) -> Tensor:
    """`value` as an integer tensor of `rank`: int32 and int64 stay, other integers become int64, a list is accepted."""
    tensor = value if isinstance(value, Tensor) else _from_list(value, name, asked)
    if tensor.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{asked}: {name} must hold integers, got {tensor.dtype}. Write {name}.to(torch.int64).")
    if tensor.dim() != rank:
        shape = "shape (2, num_edges)" if rank == 2 else "one dimension"
        raise TigaError(f"{asked}: {name} must have {shape}, got shape {tuple(tensor.shape)}.")
    return tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.to(torch.int64)


def _from_list(value: Any, name: str, asked: str) -> Tensor:
    if not isinstance(value, Sequence) and not hasattr(value, "__array__"):
        kind = type(value).__name__
        raise TypeError(f"{asked}: {name} must be a tensor of integers or a list of ints, got {kind}.")
    tensor = torch.as_tensor(value)
    # torch makes an empty list float32
    return tensor.to(torch.int64) if tensor.numel() == 0 and isinstance(value, Sequence) else tensor


def one_device(asked: str, **tensors: Tensor | None) -> None:
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given))
    for name, device in given.items():
        if device != given[first]:
            raise TigaError(
                f"{asked}: {first} is on {given[first]}, but {name} is on {device}. Move them to one device with .to()."
            )


def boundary_values(given: Any, tensor: Tensor, complete: bool) -> list[int] | None:
    """The boundaries as Python ints where they are known without an unwanted read, else None."""
    if isinstance(given, (list, tuple)):
        return [operator.index(value) for value in given]
    return tensor.tolist() if should_read(complete, tensor) else None


def check_boundaries(values: list[int], name: str, asked: str, limit: Any, limit_name: str) -> None:
    if values[0] != 0:
        raise TigaError(
            f"{asked}: {name} starts at {values[0]}, but must start at 0: segment b is {name}[b] to {name}[b + 1]."
        )
    for b in range(len(values) - 1):
        if values[b + 1] < values[b]:
            raise TigaError(
                f"{asked}: {name} decreases from {values[b]} to {values[b + 1]} at entry {b + 1}. "
                "Write running totals of the lengths, such as [0, 3, 5]."
            )
    if limit is not None and values[-1] > limit:
        raise TigaError(
            f"{asked}: {name} ends at {values[-1]}, but {limit_name} is {number(limit)}. Leave {limit_name} out."
        )


def needs_size(name: str, asked: str) -> TigaError:
    return TigaError(
        f"{asked}: {name} is not given, and no value is read while compiling, exporting or capturing. "
        f"Give {name}=..., such as x.shape[0]."
    )


def check_entries(asked: str, name: str, what: str, smallest: int, largest: int, most: Any, size_name: str) -> None:
    """Entries of `name` are rows of a table of `most` rows: 0 <= entry < most."""
    bad = smallest if smallest < 0 else largest if largest >= most else None
    if bad is None:
        return
    instead = f"Give {size_name}={bad + 1} or more, or remove it." if bad >= 0 else "Negative rows do not exist."
    raise TigaError(f"{asked}: {name} names {what} {bad}, but there are {number(most)} ({size_name}). {instead}")


def check_intervals(asked: str, num_src: Any, start: Tensor, stop: Tensor, start2: Tensor, stop2: Tensor) -> int:
    """Raises for a bound outside 0..num_src or intervals that overlap; returns the number of edges. One read."""
    named = {"start": start, "stop": stop, "start2": start2, "stop2": stop2}
    if start.shape[0] == 0:
        return 0
    overlap = (torch.maximum(start, start2) < torch.minimum(stop, stop2)).to(torch.int64)
    edges = (stop - start).clamp_min(0).sum() + (stop2 - start2).clamp_min(0).sum()
    ends = [bound.to(torch.int64) for t in named.values() for bound in t.aminmax()]
    *bounds, row, overlaps, total = torch.stack([*ends, overlap.argmax(), overlap.max(), edges]).tolist()
    for i, name in enumerate(named):
        low, high = bounds[2 * i : 2 * i + 2]
        if low < 0 or high > num_src:
            bad = low if low < 0 else high
            raise TigaError(
                f"{asked}: {name} holds {bad}, outside 0 to num_src = {number(num_src)}. "
                f"Write {name}.clamp(0, num_src)."
            )
    if overlaps:
        first, second = (f"[{int(a[row])}, {int(b[row])})" for a, b in ((start, stop), (start2, stop2)))
        raise TigaError(
            f"{asked}: the intervals of row {row} overlap: {first} and {second}. "
            "Each source may stand in one of them: begin the second where the first stops."
        )
    return total
