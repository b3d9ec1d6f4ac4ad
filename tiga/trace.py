"""Tracing: the edge function runs once on symbolic values, in plain Python that Dynamo inlines, and leaves a program.

A `Sym` is seen by the user as a tensor (num_edges, *features); what torch functions mean on it is the table of
tiga.functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiga.builder import WEAK_FLOAT, Builder, Path, Value
from tiga.errors import TraceError
from tiga.functions import ALIASES, FUNCTIONS, call
from tiga.types import NAMES, Total, Type

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
        from tiga.types import DTYPES

        return DTYPES[self.type.dtype]

    @property
    def ndim(self) -> int:
        return len(self.type.sizes) + 1

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS["sum"](self.builder, self, *args, **kwargs)

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


def unify_numbers(a: Any, b: Any) -> None:
    """Whether two sizes, known while tracing, agree."""
    if isinstance(b, Total):
        if not a >= b.parts[0]:
            raise TraceError(f"a slice up to {b.parts[0]} of a feature dimension of size {a}.")
    elif a != b:
        raise TraceError(
            f"feature sizes {a} and {b} do not broadcast: features align from the right, the edge dimension takes no "
            "part."
        )


class Tracer(Builder):
    """A builder whose operands are tensors: fields as they are read, parameters and captures as they are met."""

    def __init__(self) -> None:
        super().__init__(unify_numbers)
        self.operands: list[tuple[Tensor, str, str, tuple, str]] = []  # tensor, place, name, type, flag
        self.syms: list[Sym] = []
        self.scalars: list[tuple[str, float]] = []
        self.names: list[tuple[Tensor, str]] = []  # uniform tensors, by the name they were given
        if not torch.compiler.is_compiling():
            self.path = Path.start()
        self.shown: list[Any] = []  # the displacement, once it was asked for
        self._seed: Any = None
        self.home: Any = None  # the device of the fields

    def value(self, ref: str, type: Type) -> Any:
        return Sym(self, ref, type)

    def lift(self, x: Any) -> Any:
        if isinstance(x, Value):
            return x
        if isinstance(x, Tensor):
            return self.capture(x, "tensor" + str(len(self.operands)))
        if isinstance(x, float) and torch.compiler.is_compiling() and not static(x):
            return self.number(x, "number" + str(len(self.operands)))
        if isinstance(x, (bool, int, float)):
            return Builder.lift(self, x)
        raise TraceError(
            f"cannot use {type(x).__name__} in an edge function; fields, tensors and Python numbers can be."
        )

    def operand(self, t: Tensor, place: str, name: str, flag: str = "") -> Sym:
        """A tensor that the program reads."""
        shape = tuple(t.shape)
        sizes = shape if place == "shared" else shape[1:]
        found = None
        if self.path is not None:
            step = (place, name, t.dtype, sizes, flag)
            try:
                found = self.path.steps.get(step)
            except TypeError:  # symbolic sizes have no hash, and are not looked up
                self.path = None
        if found is None:
            found = (self.operand_type(t, place, name, sizes, flag), place + "." + name, None)
            if self.path is not None:
                found = (found[0], found[1], Path())
                self.path.steps[step] = found
        kind, ref, self.path = found
        sym = Sym(self, ref, kind)
        self.operands.append((t, place, name, sizes, flag))
        self.syms.append(sym)
        return sym

    def operand_type(self, t: Tensor, place: str, name: str, sizes: tuple, flag: str) -> Type:
        dtype = NAMES.get(t.dtype)
        if dtype is None:
            raise TypeError(f"{place} field {name!r} is {t.dtype}; programs compute with {', '.join(NAMES.values())}.")
        return WEAK_FLOAT if flag == "number" else Type(place, dtype, sizes)

    def capture(self, t: Tensor, name: str) -> Sym:
        """A parameter, buffer or captured tensor: one operand however often it is met."""
        for (other, place, _, _, _), sym in zip(self.operands, self.syms):
            if other is t and place == "shared":
                return sym
        for other, given in self.names:
            if other is t:
                name = given
        return self.operand(t, "shared", name)

    def is_reduced(self, ref: str) -> bool:
        """Whether a value is made of what reducers gave, at destinations."""
        reduced: dict[str, bool] = {}
        for line, t in zip(self.lines, self.line_types):
            folded = line.op in ("reduce", "scan")
            if folded and ref in line.outs:
                return True
            if not folded and t.place == "dst":
                for a in line.args:
                    folded = folded or reduced.get(a, False)
            for o in line.outs:
                reduced[o] = folded
        return reduced.get(ref, False)

    def seed(self) -> Any:
        """One random seed a call, drawn from torch's generator of the fields' device."""
        if self._seed is None:
            self._seed = self.operand(torch.randint(-(2**62), 2**62, (), device=self.home), "shared", "seed")
        return self._seed

    def device(self) -> Any:
        return self.home

    def types(self) -> dict[str, Type]:
        found: dict[str, Type] = {}
        for made in self.known.values():
            for v in made if isinstance(made, tuple) else (made,):
                found[v.ref] = v.type
        return found

    def number(self, x: float, name: str) -> Sym:
        """A Python number that may change from call to call, as a tensor: so no compiler bakes its value in."""
        return self.operand(torch.ones((), dtype=torch.float64, device=self.home) * x, "shared", name, "number")

    def scalar(self, name: str, value: float) -> Sym:
        self.scalars.append((name, value))
        if self.path is not None:
            self.path = self.path.after(("scalar", name))
        return Sym(self, name, WEAK_FLOAT)


def static(x: float) -> bool:
    """Whether a compiler knows the number's value: a literal, not what it has seen change."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(x)


class Fields:
    """src, dst or edge inside an edge function: attribute access gives the field as a traced value."""

    def __init__(self, tracer: Tracer, place: str, fields: dict, provided: dict) -> None:
        self._tracer = tracer
        self._place = place
        self._fields = fields
        self._provided = provided  # what the graph itself gives, by name
        self._read: dict[str, Sym] = {}

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self.field(name)

    def __getitem__(self, name: str) -> Any:
        return self.field(name)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def field(self, name: str) -> Any:
        read = self._read
        if name in read:
            return read[name]
        if name in self._fields:
            sym = self._tracer.operand(self._fields[name], self._place, name)
        elif name in self._provided:
            sym = self._provided[name]()
        else:
            given = ", ".join(sorted(self._fields)) or "none"
            raise TraceError(
                f"the edge function reads {self._place}.{name}, but the {self._place} fields given are: {given}. "
                f"Pass it: {self._place}={{'{name}': tensor}}."
            )
        read[name] = sym
        return sym
