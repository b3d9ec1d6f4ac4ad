"""Calls of a module that are known at once: straight-line code that compares one with a call that was made before.

It is written for a call whose trace is known, the second in turn on one graph. It says no to whatever differs: the
graph, names of fields, types and forms of tensors, objects that the edge function reads of its file and its module, the
state of reducers, arguments that are no tensors. Numbers that are floats, and what tensors hold, are those of the call.
"""

from __future__ import annotations

import builtins
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tiga import alike, dispatch
from tiga.networks import HOOKS, NETWORKS
from tiga.reducer import Max, Mean, Min, OnlineSoftmaxReducer, Sum

REDUCERS = (Sum, Mean, Max, Min, OnlineSoftmaxReducer)
_FIXED = (bool, int, float, str, type(None), torch.dtype)  # by type: a subclass may do anything
_THINGS = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_GIVEN = ("src", "dst", "edge", "uniform")


class Shortcut(NamedTuple):
    """same(module, graph, **given) is None or, of a call that is like the one that this was made for, the tensors and
    numbers that its trace `known` is of. home: the device."""

    same: Callable[..., Any]
    known: Any
    home: torch.device


class Writer:
    """Writes the comparison with one call, whatever it reads: names of a file, `scope`, and attributes of a module."""

    def __init__(self, graph: Any, given: dict[str, dict]) -> None:
        self.good = True
        self.lines: list[str] = []
        self.constants: list[Any] = []
        self.tensors: list[tuple[str, Tensor]] = []  # each with what it is in the code
        self.refuse(f"graph is not {self.constant(weakref.ref(graph))}()")
        self.refuse(f"recorded() is not {torch.is_grad_enabled()}")
        for place in _GIVEN:
            fields = given[place]
            self.refuse(f"[*{place}] != {self.constant([*fields])}" if fields else place)
            for name, x in fields.items():
                self.argument(f"{place}[{name!r}]", x)
        self.fields = len(self.tensors)

    def named(self, name: str, scope: dict[str, Any]) -> None:
        """A name of the file that the edge function reads."""
        if name in scope:
            self.thing(f"scope[{name!r}]", scope[name])
        else:
            self.refuse(f"{name!r} in scope")
            self.thing(f"builtins.{name}", getattr(builtins, name))

    def attribute(self, name: str, module: Any) -> None:
        self.thing(f"module.{name}", getattr(module, name))

    def network(self, text: str, network: nn.Module) -> None:
        """A module of torch's: all that it computes from what it is given, and what is in it."""
        name, own, kind = f"x{len(self.lines)}", network.__dict__, type(network)
        self.lines.append(f"{name} = {text}")
        self.refuse(f"{name} is not {self.constant(weakref.ref(network))}()")
        self.refuse(
            f"type({name}) is not {self.constant(kind)} or type({name}).forward is not {self.constant(kind.forward)}"
        )
        self.lines.append(f"own = {name}.__dict__")
        self.refuse("'forward' in own or own.get('_compiled_call_impl') is not None")
        self.refuse(" or ".join([f"own[{hooks!r}]" for hooks in HOOKS]))
        for attribute in NETWORKS[kind]:
            self.refuse(f"own[{attribute!r}] is not {self.constant(own[attribute])}")
        for part in ("_parameters", "_modules"):
            self.refuse(f"[*own[{part!r}]] != {self.constant([*own[part]])}" if own[part] else f"own[{part!r}]")
        for parameter, x in own["_parameters"].items():
            self.thing(f"{name}._parameters[{parameter!r}]", x)
        for part, x in own["_modules"].items():
            self.network(f"{name}._modules[{part!r}]", x)

    def constant(self, x: Any) -> str:
        self.constants.append(x)
        return f"c{len(self.constants) - 1}"

    def refuse(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def argument(self, text: str, x: Any) -> None:
        if isinstance(x, Tensor):
            self.tensors.append((text, x))
        elif type(x) is float:
            self.refuse(f"type({text}) is not float")
        elif type(x) in _FIXED:
            c = self.constant(x)
            self.refuse(f"type({text}) is not type({c}) or {text} != {c}")
        else:
            self.good = False

    def thing(self, text: str, x: Any) -> None:
        """An object that the edge function reads by name. Tensors are told by their forms, as arguments are."""
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        if isinstance(x, Tensor):
            self.tensors.append((name, x))
            return
        if isinstance(x, nn.Module):
            self.refuse("any_hook()")
            self.network(name, x)
            return
        self.refuse(f"{name} is not {self.constant(x)}")
        if type(x) in REDUCERS:
            self.refuse(f"{name}.__dict__ != {self.constant(dict(vars(x)))}")
        elif type(x) not in _FIXED and not isinstance(x, _THINGS):
            self.good = False

    def shortcut(self, known: Any, home: torch.device, scope: dict[str, Any]) -> Shortcut | None:
        """None where not all that matters can be told."""
        tensors, of_module = [x for _, x in self.tensors], [text for text, _ in self.tensors[self.fields :]]
        if not self.good or not tensors or not dispatch.is_plain(tensors):
            return None
        self.refuse(f"not {self.constant(alike.like(tensors))}({', '.join([text for text, _ in self.tensors])})")
        text = lambda place, name: of_module[name] if place == "module" else f"{place}[{name!r}]"
        operands = "".join([f"({text(*word)},), " for word in known.operands])
        scalars = "".join([f"({name!r}, {text('uniform', name)}), " for name in known.scalars])
        self.lines.append(f"return ({operands}), ({scalars})")
        make = _maker("\n".join([f"            {line}" for line in self.lines]), len(self.constants))
        return Shortcut(make(torch.is_grad_enabled, _has_any_global_hook, scope, *self.constants), known, home)


@functools.lru_cache(1024)
def _maker(lines: str, constants: int) -> Callable[..., Callable]:
    """What makes the function of these lines of its constants. What is missing, or no tensor where one was, differs."""
    names = ", ".join(["recorded", "any_hook", "scope", *[f"c{k}" for k in range(constants)]])
    text = f"""
def make({names}):
    def same(module, graph, {", ".join(_GIVEN)}, position):
        try:
{lines}
        except (AttributeError, KeyError, TypeError):
            return None
    return same
"""
    made: dict[str, Any] = {"builtins": builtins}
    exec(compile(text, "<tiga call of a module>", "exec"), made)  # written here
    return made["make"]
