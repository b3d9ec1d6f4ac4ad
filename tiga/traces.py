"""Traces that are known without running the edge function again: where all that it can read is seen to be as it was.

An edge function runs at every call, as it may read anything. Where its code reads only its arguments, constants,
torch's functions on traced values, and plain attributes, reducers, tensors and networks of torch's own that its module
has, the program follows from these, and is kept with the module. Of tensors dtype and shape are seen: where their
numbers were read while tracing, nothing is kept. A function that does more - closures, functions and objects of the
user's, assignments, printing - runs as ever.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tiga import networks, prune, shortcuts
from tiga.functions import ALIASES, FUNCTIONS
from tiga.reducer import Max, Mean, Min, OnlineSoftmaxReducer, Sum
from tiga.types import NAMES

MOST = 256  # of one module; then all are forgotten
_SHORT = 8  # calls of one module that are known at once

# what changes or makes something, or reads what no name here says
_REFUSED = (
    *("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "DELETE_SUBSCR"),
    *("STORE_DEREF", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_NAME", "LOAD_SUPER_ATTR", "LOAD_BUILD_CLASS"),
    *("IMPORT_NAME", "IMPORT_FROM", "IMPORT_STAR", "MAKE_FUNCTION", "YIELD_VALUE", "RETURN_GENERATOR"),
    *("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL", "SETUP_FINALLY", "PUSH_EXC_INFO", "LOAD_LOCALS"),
)
_MODULES = ("torch", "torch.nn", "torch.nn.functional", "torch.special", "torch.linalg", "math")
_BUILTINS = (
    "abs",
    "bool",
    "enumerate",
    "float",
    "int",
    "len",
    "max",
    "min",
    "range",
    "reversed",
    "sum",
    "tuple",
    "zip",
)
_TORCH = {str(dtype).partition(".")[2] for dtype in NAMES} | {"nn", "functional", "special", "linalg", "pi", "inf", "e"}
_OF_VALUES = frozenset([*FUNCTIONS, *ALIASES, *_TORCH, "shape", "dtype", "ndim", "number", "displacement", "distance"])
_BUILTIN = vars(builtins)
_TENSORS = (Tensor, nn.Parameter)


class Unseen(Exception):
    """What a function reads cannot be compared with what it read before."""


class Reads(NamedTuple):
    """The names that a function's code reads of its module's file, and as attributes of whatever it has."""

    scope: tuple[str, ...]
    attributes: tuple[str, ...]


@functools.lru_cache(4096)
def reads(code: types.CodeType) -> Reads | None:
    """What code can read; None where names do not tell, or more is done than to read."""
    instructions = list(dis.get_instructions(code))
    nested = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    if nested or code.co_freevars or any([i.opname in _REFUSED for i in instructions]):
        return None
    scope = dict.fromkeys([i.argval for i in instructions if i.opname == "LOAD_GLOBAL"])
    attributes = dict.fromkeys([i.argval for i in instructions if i.opname in ("LOAD_ATTR", "LOAD_METHOD")])
    return None if set(scope) | set(attributes) != set(code.co_names) else Reads(tuple(scope), tuple(attributes))


def word(x: Any) -> Any:
    """A value as part of a key: equal where it means the same to a trace."""
    row = _WORDS.get(type(x))
    if row is None:
        raise Unseen
    return row(x)


def _reducer(x: Any) -> Any:
    if vars(x):
        raise Unseen
    return type(x)


def _softmax(x: Any) -> Any:
    own = vars(x)
    if len(own) != 1 or x.block_prune_threshold is not None or x.prune_mass is not None:
        raise Unseen
    return OnlineSoftmaxReducer, bool(own["return_lse"])


_WORDS: dict[type, Any] = {
    **dict.fromkeys([bool, int, str, type(None), torch.dtype], lambda x: (type(x), x)),
    **dict.fromkeys([Sum, Mean, Max, Min], _reducer),
    float: lambda x: (float, x.hex()),
    tuple: lambda x: (tuple, *map(word, x)),
    OnlineSoftmaxReducer: _softmax,
}


def global_word(name: str, x: Any) -> Any:
    """The same of what stands in the function's file."""
    if isinstance(x, types.ModuleType) and x.__name__ in _MODULES:
        return x
    of_torch = str(getattr(x, "__module__", None)).startswith("torch") or x is getattr(torch, name, None)
    if callable(x) and not isinstance(x, type) and of_torch and getattr(x, "__name__", "") in FUNCTIONS:
        return x
    if name in _BUILTINS and x is _BUILTIN[name]:
        return x
    return word(x)


def see(x: Any, words: list, tensors: list[Tensor]) -> None:
    """The words of an attribute of a module, and the tensors that it is or holds."""
    if type(x) in _TENSORS:
        words.append((x.dtype, x.shape))
        tensors.append(x)
    elif isinstance(x, nn.Module):
        if _has_any_global_hook():
            raise Unseen
        see_network(x, words, tensors)
    else:
        words.append(word(x))


def see_network(network: nn.Module, words: list, tensors: list[Tensor]) -> None:
    """The same of a module of torch's: all that it computes from what it is given."""
    kind, own = type(network), network.__dict__
    named = networks.NETWORKS.get(kind)
    if named is None or "forward" in own or own.get("_compiled_call_impl") is not None:
        raise Unseen
    if any([own[name] for name in networks.HOOKS]):
        raise Unseen
    words += kind, kind.forward
    for name in named:
        words.append(word(own[name]))
    for name, x in own["_parameters"].items():
        words.append(name)
        see(x, words, tensors)
    for name, x in own["_modules"].items():
        words.append(name)
        see_network(x, words, tensors)


class Watch(TorchDispatchMode):
    """Whether torch computed anything: tracing alone does not, and numbers that are read are computed."""

    computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.computed = True
        return func(*args, **(kwargs or {}))


class Declared(NamedTuple):
    """What a class says of its own `edge`, as `edge_reads`: the methods that it calls, and all attributes that these
    and it read. Of the class itself: a subclass may do more."""

    methods: tuple[str, ...]
    attributes: tuple[str, ...]


class Known(NamedTuple):
    """A trace: its programs, what the function returned, and where operands and numbers come from: (place, name).

    Of the places "position" is the graph's, and "module" the tensors that the function's module has, by number.
    """

    programs: Any
    structure: Any
    results: int
    operands: tuple[tuple[str, Any], ...]
    scalars: tuple[str, ...]

    def of(self, given: dict[str, dict]) -> tuple[list, list]:
        """The tensors and numbers of a call."""
        operands = [(given[place][name],) for place, name in self.operands]
        return operands, [(name, given["uniform"][name]) for name in self.scalars]


class Like(NamedTuple):
    """A call whose trace and device are known, with the tensors and numbers that it was given."""

    known: Known
    home: torch.device
    given: tuple


class Traces:
    """The known traces of one module."""

    def __init__(self, functions: tuple[types.FunctionType, ...], declared: Declared | None) -> None:
        self.function, self.declared = functions[0], declared
        self.parts = [(name, f, f.__code__) for name, f in zip(_names(declared), functions)]
        self.reads = reads(self.function.__code__) if declared is None else Reads((), declared.attributes)
        self.known: dict[tuple, Known] = {}
        self.calls: list[shortcuts.Shortcut] = []
        self.own: tuple[str, ...] = ()
        self.latest: Callable[[], Any] = lambda: None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module begins anew

    def fits(self, own: dict[str, Any], kind: type) -> bool:
        """Whether these are of a module's functions as they are now."""
        for name, f, code in self.parts:
            if name in own or getattr(kind, name, None) is not f or f.__code__ is not code:
                return False
        if kind.__dict__.get("edge_reads") is not self.declared:
            return False
        # what an argument is if nobody gives it could change, in functions that do not say what they read
        return self.declared is not None or not (self.function.__defaults__ or self.function.__kwdefaults__)

    def key(self, module: nn.Module, graph: Any, forms: tuple, given: dict[str, Any]) -> tuple | None:
        """All that decides a trace; None where that is not known. The module's tensors join what is given."""
        if self.reads is None or torch._C._len_torch_function_stack() or prune.records_gaps():
            return None
        scope = self.function.__globals__
        lists = len(graph.prepared) if torch.is_grad_enabled() else len(graph.prepared[:2])
        words: list[Any] = [graph.kind, graph.reversed, len(graph.tensors) + lists, forms]
        words += [(place, x.dtype, x.shape[1:]) for place, x in given["position"].items()]
        tensors: list[Tensor] = []
        try:
            for name in self.reads.scope:
                words.append(global_word(name, scope[name] if name in scope else _BUILTIN[name]))
            for name in self.own:
                see(getattr(module, name), words, tensors)
            given["module"] = dict(enumerate(tensors))
            for name, x in given["uniform"].items():
                if isinstance(x, Tensor):
                    tensors.append(x)
                    words.append((name, x.dtype, x.shape))
                else:
                    words.append((name, float if type(x) is float else word(x)))
        except (Unseen, KeyError, AttributeError):
            return None
        # a tensor that is given twice is one operand
        return None if len({id(x) for x in tensors}) < len(tensors) else tuple(words)

    def short(self, module: nn.Module, graph: Any, given: dict[str, dict]) -> Like | None:
        """The trace of a call that is like a recent one."""
        if not self.calls or torch._C._len_torch_function_stack() or prune.records_gaps():
            return None
        for call in self.calls:
            found = call.same(module, graph, **given)
            if found is not None:
                return Like(call.known, call.home, found)
        return None

    def shorten(self, module: nn.Module, known: Known, home: torch.device, graph: Any, given: dict[str, dict]) -> None:
        """Know calls like this one at once: where it is the second in turn on its graph."""
        again, self.latest = self.latest() is graph, weakref.ref(graph)
        counted = given["edge"] and graph.kind in ("blocks", "intervals")  # edges, by what the graph holds now
        if self.reads is None or not again or counted:
            return
        writer, scope = shortcuts.Writer(graph, given), self.function.__globals__
        for name in self.reads.scope:
            writer.named(name, scope)
        for name in self.own:
            writer.attribute(name, module)
        call = writer.shortcut(known, home, scope)
        if call is not None:
            self.calls = [call, *self.calls][:_SHORT]

    def learn(self, module: nn.Module, graph: Any, forms: tuple, trace: Any, given: dict[str, dict]) -> None:
        """Keep a trace, if all that it can have read is in its key."""
        assert self.reads is not None
        own = self.attributes(module, {name for place in ("src", "dst", "edge") for name in given[place]})
        if own is None:
            return
        if own != self.own or len(self.known) >= MOST:
            self.own = own
            self.known.clear()
            self.calls = []
        key = self.key(module, graph, forms, given)
        found = None if key is None else known(trace, given)
        if key is not None and found is not None:
            self.known[key] = found
            self.latest = weakref.ref(graph)

    def attributes(self, module: nn.Module, fields: Container[str]) -> tuple[str, ...] | None:
        """The module's attributes that the function reads; None where it is not known what a name is of."""
        assert self.reads is not None
        own = tuple([name for name in self.reads.attributes if is_own(module, name)])
        for name in self.reads.attributes:
            if name not in own and name not in _OF_VALUES and (name not in fields or hasattr(torch, name)):
                return None
        return own if all([self.alone(getattr(module, name)) for name in own]) else None

    def named(self, name: str) -> Any:
        """What a name of the function's file is."""
        scope = self.function.__globals__
        return scope[name] if name in scope else _BUILTIN[name]

    def alone(self, x: Any) -> bool:
        """Whether nothing that the function reads by name can be an attribute of this attribute."""
        assert self.reads is not None
        parts = x.modules() if isinstance(x, nn.Module) else ()
        return not any([hasattr(part, name) for part in parts for name in self.reads.attributes])


class Again:
    """What the run of a known trace asks of a tracer."""

    notes = ()

    def __init__(self, home: Any, operands: Sequence[tuple], scalars: Sequence[tuple[str, Any]]) -> None:
        self.home, self.operands, self.scalars = home, operands, scalars


def of(module: nn.Module) -> Traces | None:
    """The traces of a module whose edge function its class has."""
    own, kind = module.__dict__, type(module)
    held: Traces | None = own.get("_traces")
    if held is not None and held.fits(own, kind):
        return held
    held = made_for(module)
    if held is not None:
        own["_traces"] = held
    return held


def made_for(module: nn.Module) -> Traces | None:
    """The same, without any yet."""
    own, kind = module.__dict__, type(module)
    declared: Declared | None = kind.__dict__.get("edge_reads")
    functions = tuple([getattr(kind, name, None) for name in _names(declared)])
    if not all([isinstance(f, types.FunctionType) for f in functions]):
        return None
    held = Traces(functions, declared)  # type: ignore[arg-type]
    return held if held.fits(own, kind) else None


def _names(declared: Declared | None) -> tuple[str, ...]:
    return ("edge",) if declared is None else ("edge", *declared.methods)


def is_own(module: nn.Module, name: str) -> bool:
    """Whether a name is an attribute of the module that nn.Module has not given it."""
    if name in vars(module) or not hasattr(nn.Module, name):
        return hasattr(module, name)
    return getattr(type(module), name) is not getattr(nn.Module, name)


def known(trace: Any, given: dict[str, dict]) -> Known | None:
    """What a trace is made of, where all of that was given."""
    tracer = trace.tracer
    operands: list[tuple[str, Any]] = []
    scalars = []
    for t, row in tracer.operands:
        places = ("uniform", "module") if row.place == "shared" else ("position",) if row.flag else (row.place,)
        name = row.place if row.flag else row.name
        at = [(p, k) for p in places for k, x in given[p].items() if x is t and (row.place == "shared" or k == name)]
        if row.flag not in ("", "position") or len(at) != 1:
            return None
        operands += at
    for name, value in tracer.scalars:
        if given["uniform"].get(name) is not value:
            return None
        scalars.append(name)
    if tracer.notes:
        return None
    return Known(trace.programs, trace.structure, trace.first, tuple(operands), tuple(scalars))
