"""Sym: a value under construction as the user sees it, a tensor (num_edges, *features)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tiga.builder import Value
from tiga.errors import TraceError
from tiga.functions import ALIASES, FUNCTIONS, call
from tiga.types import DTYPES, Type

if TYPE_CHECKING:
    from tiga.trace import Tracer

EDGES = -1  # what shape[0] says of a traced value: the number of edges is not known while tracing


class Sym(Value):
    """A traced value: one number a feature for every edge, or every node."""

    def __init__(self, builder: Tracer, ref: str, type: Type) -> None:
        self.builder = builder
        self.ref = ref
        self.type = type

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return call(self.builder, name, args, kwargs)

    def __pow__(self, other: Any) -> Any:
        return self._call("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._call("pow", other, self)

    def __mod__(self, other: Any) -> Any:
        return self._call("remainder", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._call("remainder", other, self)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._call("floor_divide", other, self)

    def where(self, condition: Any, other: Any) -> Any:
        return self._call("where", condition, self, other)

    def __floordiv__(self, other: Any) -> Any:
        return self._call("floor_divide", self, other)

    def __abs__(self) -> Any:
        return self._call("abs", self)

    def __lt__(self, other: Any) -> Any:
        return self._call("lt", self, other)

    def __le__(self, other: Any) -> Any:
        return self._call("le", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._call("gt", self, other)

    def __ge__(self, other: Any) -> Any:
        return self._call("ge", self, other)

    def __eq__(self, other: Any) -> Any:
        return self._call("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return self._call("ne", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> Any:
        return self._call("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Any:
        return self._call("bitwise_and", other, self)

    def __or__(self, other: Any) -> Any:
        return self._call("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Any:
        return self._call("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Any:
        return self._call("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Any:
        return self._call("bitwise_xor", other, self)

    def __invert__(self) -> Any:
        return self._call("bitwise_not", self)

    def __matmul__(self, other: Any) -> Any:
        raise TraceError(
            "`@` on a traced value. Write torch.nn.functional.linear(x, weight), or torch.matmul(x, weight)."
        )

    def __rmatmul__(self, other: Any) -> Any:
        raise TraceError(
            "`@` on a traced value. Write torch.nn.functional.linear(x, weight), or torch.matmul(x, weight)."
        )

    def __getitem__(self, at: Any) -> Any:
        return self._call("getitem", self, at)

    def __bool__(self) -> bool:
        raise TraceError(
            "`if`, `and`, `or` or `not` on a traced value: an edge function runs for all edges at once. "
            "Write torch.where(condition, a, b)."
        )

    def __float__(self) -> float:
        raise TraceError("a traced value as a Python number: it has no single value. Use torch functions on it.")

    def __int__(self) -> int:
        raise TraceError("a traced value as a Python number: it has no single value. Use torch functions on it.")

    def __index__(self) -> int:
        raise TraceError(
            "a traced value as a position. To read a table at it, write torch.nn.functional.embedding(x, table)."
        )

    def __len__(self) -> int:
        raise TraceError("len() of a traced value: the number of edges is not known while tracing.")

    def __iter__(self) -> Any:
        raise TraceError("a loop over a traced value. Loop over x.unbind(dim) for a feature dimension.")

    def __setitem__(self, at: Any, value: Any) -> None:
        raise TraceError("assignment into a traced value. Write torch.where(condition, a, b) or torch.cat([...], dim).")

    @property
    def shape(self) -> tuple:
        return (EDGES, *self.type.sizes)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.type.dtype]

    @property
    def ndim(self) -> int:
        return len(self.type.sizes) + 1

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return call(self.builder, "sum", (self, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS or name in ALIASES or (name[-1:] == "_" and name[:1] != "_"):
            return _Method(self, name)
        if name[:2] == "__":
            raise AttributeError(name)
        raise TraceError(f"no `.{name}` on a traced value.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call(tracer_of(args), func.__name__, args, kwargs or {})


class _Method:
    def __init__(self, sym: Sym, name: str) -> None:
        self.sym = sym
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self.sym.builder, self.name, (self.sym, *args), kwargs)


MISPLACED = "a torch function got a traced value where none can be: give it as a positional argument."


def tracer_of(args: Any) -> Tracer:
    """The tracer behind any traced value among the arguments."""
    for a in args:
        if isinstance(a, Sym):
            return a.builder  # type: ignore[return-value]
    for a in args:
        if isinstance(a, (list, tuple)):
            for x in a:
                if isinstance(x, Sym):
                    return x.builder  # type: ignore[return-value]
    raise TraceError(MISPLACED)
