"""Tracing: the edge function runs once on symbolic values, in plain Python that Dynamo inlines, and leaves a program.

What torch functions mean on symbolic values is the table of tiga.functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiga.builder import WEAK_FLOAT, Builder, Path, Value, ordered
from tiga.errors import TraceError
from tiga.program import Line
from tiga.symbols import Sym
from tiga.types import NAMES, Total, Type


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


class Input(NamedTuple):
    """A tensor that a program reads, without the tensor. ref: its word; type: what it is as a value."""

    place: str
    name: str
    dtype: str
    sizes: tuple
    flag: str
    ref: str
    type: Type


class Tracer(Builder):
    """A builder whose operands are tensors: fields as they are read, parameters and captures as they are met.

    Outside a compiler each step is looked up among the traces met before: `path` is this one, and everything that a
    step depends on is in it or in the steps before. Where a step was taken before, nothing is inferred and nothing
    appended: lines between `written` and `path` are in no list yet. The edge function itself runs, but where `traces`
    knows better. No traced value is held here: they hold the tracer, and tensors would outlive the call.
    """

    def __init__(self, compiling: bool | None = None) -> None:
        super().__init__(unify_numbers)
        self.operands: list[tuple[Tensor, Input]] = []
        self.scalars: list[tuple[str, float]] = []
        self.names: list[tuple[Tensor, str]] = []  # uniform tensors, by the name they were given
        self.compiling = torch.compiler.is_compiling() if compiling is None else compiling
        # a part of a reducer is a function of values whose types no step names
        self.path: Path | None = None if self.compiling or type(self) is not Tracer else Path.start()
        self.written = self.path
        self.positions: Any = None  # tensor and name, of destinations, sources and shifts, where the graph has them
        self.home: Any = None  # the device of the fields
        self.notes: list = []  # of folds that skip tiles: what they say of themselves
        self._seed: Any = None
        self.launch = (0, 0)

    def value(self, ref: str, type: Type) -> Any:
        return Sym(self, ref, type)

    def lift(self, x: Any) -> Any:
        if isinstance(x, Value):
            if x.builder is not self:
                raise TraceError(
                    "a traced value of another call, or from outside a reducer's own function: it lives in its own "
                    "call only. Compute it again, or bring it in as an argument."
                )
            return x
        if isinstance(x, Tensor):
            return self.capture(x)
        if isinstance(x, float) and self.compiling and not static(x):
            return self.number(x, "number" + self.next_number())
        if isinstance(x, (bool, int, float)):
            return Builder.lift(self, x)
        raise TraceError(
            f"cannot use {type(x).__name__} in an edge function; fields, tensors and Python numbers can be."
        )

    def emit(self, op: str, args: tuple, attrs: tuple = ()) -> Any:
        if self.path is None:
            return self.line(op, ordered(op, [self.lift(a) for a in args]), attrs)[0]
        step = (op, attrs, *[a.ref if isinstance(a, Sym) and a.builder is self else self.lift(a).ref for a in args])
        before = self.path
        found = None if before is None else before.steps.get(step)
        if found is None:
            self.catch_up()
            return self.learn(before, step, self.line(op, ordered(op, [self.lift(a) for a in args]), attrs)[0])
        self.path, ref, kind = found
        return Sym(self, ref, kind)

    def reduce(self, place: str, reducer: str, args: tuple) -> tuple:
        values = [self.lift(a) for a in args]
        before = self.path
        step = ("reduce", (place, reducer), *[v.ref for v in values])
        found = None if before is None else before.steps.get(step)
        if found is None:
            self.catch_up()
            return self.learn(before, step, self.line("reduce", values, (place, reducer)))
        return self.again(*found)

    def scan(self, direction: str, f: Any, states: int, args: tuple, gradient: Any = None) -> tuple:
        self.look_up_no_more()  # a function is not part of a step
        return Builder.scan(self, direction, f, states, args, gradient)

    def once(self, name: str, row: Callable, args: tuple, kwargs: dict) -> Any:
        """row(self, *args, **kwargs), which may be many lines: one step, unless an argument has no word."""
        step = self.step_of(name, args, kwargs)
        before = self.path
        found = None if before is None or step is None else before.steps.get(step)
        if found is not None:
            return self.again(*found)
        count = len(self.operands)
        out = row(self, *args, **kwargs)
        # a row that makes tensors of its own, new at each call, is run each time
        return out if step is None or len(self.operands) > count else self.learn(before, step, out)

    def step_of(self, name: str, args: tuple, kwargs: dict) -> tuple | None:
        """A call of a torch function as a step; None where an argument is a list, or a size of a compiler."""
        if self.path is None:
            for x in (*args, *kwargs.values()):  # operands in the order, and by the names, that they get below
                if isinstance(x, Tensor):
                    self.capture(x)
            return None
        try:
            step = (None, name, *[x.ref if isinstance(x, Sym) and x.builder is self else self.word(x) for x in args])
            return (*step, *[(key, self.word(x)) for key, x in kwargs.items()]) if kwargs else step
        except KeyError:
            return None

    def word(self, x: Any) -> Any:
        """What stands in a step for an argument: unequal where it means something else, as 1 and True and 1.0 may."""
        if isinstance(x, Tensor):
            return self.capture(x).ref
        return x.ref if isinstance(x, Sym) and x.builder is self else _WORDS[type(x)](x)

    def learn(self, before: Path | None, step: tuple, out: Any) -> Any:
        """Remember where a step led and what it gave: a value, or a tuple of them."""
        if before is None or self.path is None:
            return out
        if isinstance(out, Sym):
            before.steps[step] = (self.path, out.ref, out.type)
        elif isinstance(out, tuple) and all([isinstance(x, Sym) for x in out]):
            before.steps[step] = (self.path, tuple([x.ref for x in out]), tuple([x.type for x in out]))
        return out

    def again(self, path: Path, ref: Any, kind: Any) -> Any:
        """What a step gave that was taken before."""
        self.path = path
        return tuple([Sym(self, r, k) for r, k in zip(ref, kind)]) if isinstance(ref, tuple) else Sym(self, ref, kind)

    def append(self, line: Line, types: tuple) -> tuple[tuple, tuple]:
        if self.path is not None:
            self.path = self.written = Path(self.path, line, types)
        return Builder.append(self, line, types)

    def catch_up(self) -> None:
        """Append the lines of the steps that were only looked up."""
        if self.path is not None and self.written is not None:
            behind, self.written = self.path.since(self.written), self.path
            for path in behind:
                if path.line is not None:
                    Builder.append(self, path.line, path.types)

    def look_up_no_more(self) -> None:
        """From here on lines are typed and appended."""
        self.catch_up()
        self.path = None

    def read(self, tensors: list[Tensor], forms: tuple) -> list[Input]:
        """Tensors that the program reads; of each the form: place, name, dtype, feature sizes, flag."""
        found, before = None, self.path
        if before is not None:
            try:
                found = before.steps.get(forms)
            except TypeError:  # symbolic sizes have no hash
                self.look_up_no_more()
                before = None
        if found is None:
            found = (None, [input_of(*form) for form in forms])
            if before is not None:
                found = before.steps[forms] = (Path(before), found[1])
        self.path, rows = found
        self.operands.extend(zip(tensors, rows))
        return rows

    def operand(self, t: Tensor, place: str, name: str, flag: str = "") -> Sym:
        sizes = t.shape if place == "shared" else t.shape[1:]
        (row,) = self.read([t], ((place, name, t.dtype, sizes, flag),))
        return Sym(self, row.ref, row.type)

    def next_number(self) -> str:
        """How many operands so far are not fields: in the names of those that have none."""
        return str(len([None for _, row in self.operands if row.place == "shared"]))

    def capture(self, t: Tensor, name: str = "", place: str = "shared", flag: str = "") -> Sym:
        """A parameter, buffer or captured tensor: one operand however often it is met."""
        for other, row in self.operands:
            if other is t and row.place == place and row.flag == flag:
                return Sym(self, row.ref, row.type)
        for other, given in self.names:
            if other is t:
                name = given
        return self.operand(t, place, name or "tensor" + self.next_number(), flag)

    def joined(self, x: Sym) -> list[Sym]:
        """The values that x was made of by joining them along the last feature dimension; none if it was not."""
        self.catch_up()
        line = next((line for line in self.lines if line.outs[0] == x.ref), None)
        if line is None or line.op != "cat" or line.attrs != ("-1",):
            return []
        types = self.types() | {row.ref: row.type for _, row in self.operands}
        return [Sym(self, a, types[a]) for a in line.args]

    def returned(self, x: Sym) -> Sym:
        """A node's field returned as it is is a value of each edge; a reducer's result stays one of destinations."""
        if x.type.place == "edge" or self.is_reduced(x.ref):
            return x
        return self.emit("spread", (x,), ("edge",))

    def is_reduced(self, ref: str) -> bool:
        """Whether a value is made of what reducers gave, at destinations."""
        self.catch_up()
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
            self._seed = torch.randint(-(2**62), 2**62, (), device=self.home)
        return self.capture(self._seed, "seed")

    def ask(self, block_e: int, num_warps: int) -> None:
        """Launch geometry that kernels are asked for; 0 leaves it to them. The last to ask is heard."""
        self.launch = (block_e, num_warps)
        before = self.path
        if before is not None:
            step = ("launch", block_e, num_warps)
            if step not in before.steps:
                before.steps[step] = (Path(before), "", WEAK_FLOAT)
            self.path = before.steps[step][0]

    def device(self) -> Any:
        return self.home

    def types(self) -> dict[str, Type]:
        return {ref: t for refs, types in self.known.values() for ref, t in zip(refs, types)}

    def number(self, x: float, name: str) -> Sym:
        """A Python number that may change from call to call, as a tensor: so no compiler bakes its value in."""
        return self.numbered(torch.ones((), dtype=torch.float64, device=self.home) * x, name)

    def numbered(self, t: Tensor, name: str) -> Sym:
        """The same of the tensor, a float64 scalar."""
        return self.operand(t, "shared", name, "number")

    def scalar(self, name: str, value: float) -> Sym:
        self.scalars.append((name, value))
        before = self.path
        if before is not None:
            step = ("scalar", name)
            found = before.steps.get(step)
            if found is None:
                found = before.steps[step] = (Path(before), name, WEAK_FLOAT)
            self.path = found[0]
        return Sym(self, name, WEAK_FLOAT)


def input_of(place: str, name: str, dtype: torch.dtype, sizes: tuple, flag: str) -> Input:
    """What a program declares of a tensor."""
    if dtype not in NAMES:
        raise TypeError(f"{place} field {name!r} is {dtype}; programs compute with {', '.join(NAMES.values())}.")
    kind = WEAK_FLOAT if flag == "number" else Type(place, NAMES[dtype], tuple(sizes))
    return Input(place, name, NAMES[dtype], tuple(sizes), flag, place + "." + name, kind)


_WORDS: dict[type, Callable[[Any], Any]] = {
    int: lambda x: x,
    type(None): lambda x: x,
    torch.dtype: lambda x: x,
    bool: lambda x: (bool, x),
    float: lambda x: (float, x.hex()),
    str: lambda x: (str, x),
    tuple: lambda x: (tuple, *[_WORDS[type(y)](y) for y in x]),
}


def static(x: float) -> bool:
    """Whether a compiler knows the number's value: a literal, not what it has seen change."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(x)


def flattened(name: str, result: Any, roots: list) -> Any:
    """What an edge function returned, with each traced value, collected in `roots`, replaced by its number."""
    if isinstance(result, Sym):
        roots.append(result)
        return len(roots) - 1
    if isinstance(result, (tuple, list)):
        return tuple([flattened(name, r, roots) for r in result])
    if isinstance(result, dict):
        return {key: flattened(name, r, roots) for key, r in result.items()}
    raise TraceError(
        f"{name}.edge returned {type(result).__name__}. "
        "Return what a reducer gives, or a traced value, or a tuple or dict of them."
    )
