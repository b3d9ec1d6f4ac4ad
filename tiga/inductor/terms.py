"""Nodes of a compiler's graph as values of a program: their places, and which of their dimensions are rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tiga.builder import Value
from tiga.errors import TigaError
from tiga.inductor.draft import Draft, Source, can_view, constant, same_sizes, shown
from tiga.inductor.meanings import ELEMENTWISE, MEANINGS, VIEWS, Form, Unfit
from tiga.types import NAMES

Node = Any  # torch.fx.Node, whose arguments may be anything
Features = tuple[Any, ...]


class At(NamedTuple):
    """Where a node's tensor stands in a program: its place, and how many leading dimensions are its rows.

    frame: the program's features, where the tensor has them laid out in other dimensions.
    """

    place: str
    lead: int = 1
    frame: Features | None = None

    @property
    def key(self) -> tuple:
        """What can be compared, sizes that may change too."""
        return self.place, self.lead, str(self.frame)


class Terms:
    """Nodes as values of a draft: those that `own` holds are computed by the program, those that `read` holds read."""

    def __init__(self, draft: Draft, own: Callable[[Node], bool], read: Callable[[Node], bool]) -> None:
        self.draft, self.own, self.read = draft, own, read
        self.held: dict[Node, tuple[Any, At]] = {}  # nodes that are values of the program already
        self.made: dict[tuple, Any] = {}

    def get(self, node: Any, at: At, shape: Any) -> Any:
        """The value of an argument of an operation, whose result stands `at` and has this shape."""
        number = constant(node)
        if number is not None:
            return number
        if node in self.held:
            value, there = self.held[node]
            if there.key != at.key:
                raise Unfit("values of two places, or laid out in two ways, in one operation")
            return value
        val = tensor_of(node)
        if val.device != self.draft.sources[0].val.device:
            raise Unfit(f"a tensor on {val.device}")
        shared = at.place == "shared" or not (
            len(val.shape) == len(shape) and same_sizes(val.shape[: at.lead], shape[: at.lead])
        )
        here = At("shared", 0, at.frame) if shared else at
        key = (node, here.key)
        if key not in self.made:
            if self.own(node):
                self.made[key] = self.translate(node, here)
            elif not self.read(node):
                raise Unfit(f"{node.target} would be written to memory for it")
            else:
                self.made[key] = self.draft.operand(here.place, self.source(node, here, at, shape))
        return self.made[key]

    def source(self, node: Node, here: At, at: At, shape: Any) -> Source:
        """A tensor from outside the program, with the program's rows and features."""
        val, lead = shown(node), here.lead
        if here.place != at.place and len(val.shape) > len(shape) - at.lead:  # broadcast along the rows
            lead = len(val.shape) - len(shape) + at.lead
            if not all(statically_known_true(s == 1) for s in val.shape[:lead]):
                raise Unfit("rows of another number, or broadcast in part")
        features = tuple(val.shape[lead:])
        if at.frame is not None:
            ones = all(statically_known_true(s == 1) for s in features)
            if not ones and not same_sizes(features, shape[at.lead :]):
                raise Unfit("a tensor that is broadcast to features laid out anew")
            features = () if ones and here.place == "shared" else (1,) * len(at.frame) if ones else at.frame
        wanted = features if here.place == "shared" else (self.draft.rows[here.place], *features)
        base = node
        while not same_sizes(shown(base).shape, wanted) and base.target in VIEWS:
            base = base.args[0]
        if same_sizes(shown(base).shape, wanted):
            return Source(base, shown(base))
        made = _viewed(val, wanted)
        if not can_view(made, [node, *self.draft.known]):
            raise Unfit("sizes that are not known of the tensor alone")
        return Source(node, made)

    def translate(self, node: Node, at: At) -> Any:
        """The value that a node's operation gives, as lines of the program."""
        shape = tensor_of(node).shape
        if node.target in VIEWS:
            inner, behind = self.behind(node, at)
            value = self.get(inner, behind, shown(inner).shape)
        elif at.frame is not None and node.target not in ELEMENTWISE:
            raise Unfit("features laid out anew")
        else:
            value = self.operation(node, at, shape)
        if isinstance(shown(node), torch.Tensor):
            self.check(node, value, at)
        return value

    def behind(self, node: Node, at: At) -> tuple[Node, At]:
        """The tensor under a view, and where it stands."""
        inner = node.args[0]
        if at.place == "shared":
            raise Unfit("a view of what all rows share")
        features = tuple(shown(node).shape[at.lead :]) if at.frame is None else at.frame
        return inner, laid_out(at.place, shown(inner).shape, features)

    def operation(self, node: Node, at: At, shape: Any) -> Any:
        def value(x: Any) -> Any:
            if isinstance(x, (list, tuple)) and any(isinstance(y, torch.fx.Node) for y in x):
                return [value(y) for y in x]
            if not isinstance(x, torch.fx.Node):
                return x
            whole = shape if node.target in ELEMENTWISE else [*shape[: at.lead], *tensor_of(x).shape[at.lead :]]
            return self.get(x, at, whole)

        first = next((tensor_of(x) for x in node.all_input_nodes if isinstance(shown(x), torch.Tensor)), None)
        form = Form(0, 0, ()) if first is None else Form(len(first.shape), at.lead, tuple(first.shape[at.lead :]))
        args = [value(x) for x in node.args]
        kwargs = {k: value(x) for k, x in node.kwargs.items()}
        try:
            return MEANINGS[node.target](self.draft.builder, form, *args, **kwargs)
        except (TigaError, TypeError, AttributeError, KeyError, IndexError) as e:
            raise Unfit(str(e)) from None

    def check(self, node: Node, value: Any, at: At) -> None:
        """The value has the node's dtype and place, and features that can be broadcast to the node's."""
        val = shown(node)
        if not isinstance(value, Value) or NAMES.get(val.dtype) != value.type.dtype or value.type.weak:
            raise Unfit("another dtype")
        if value.type.place not in (at.place, "shared"):
            raise Unfit("values of two places in one operation")
        wanted = at.frame if at.frame is not None else val.shape[at.lead :]
        have = self.draft.sizes(value)
        if len(have) > len(wanted) or not all(
            statically_known_true(a == b) or statically_known_true(a == 1) for a, b in zip(have[::-1], wanted[::-1])
        ):
            raise Unfit("other sizes")

    def is_whole(self, node: Node, value: Any, at: At) -> bool:
        """Whether a value has every feature of its node, so that it can be returned in its place."""
        wanted = at.frame if at.frame is not None else shown(node).shape[at.lead :]
        return value.type.place == at.place and same_sizes(self.draft.sizes(value), wanted)


def laid_out(place: str, shape: Any, features: Features) -> At:
    """Where a tensor of this shape stands that holds the same rows of these features: its last dimensions are they."""
    for lead in range(1, len(shape) + 1):
        if same_sizes(shape[lead:], features):
            return At(place, lead)
    for lead in range(1, len(shape)):
        if statically_known_true(math.prod(shape[lead:]) == math.prod(features)):
            return At(place, lead, features)
    raise Unfit("a view that rearranges rows")


def tensor_of(node: Any) -> Any:
    """The tensor that stands for a node; of an operation with several results, its argument's."""
    val = shown(node) if isinstance(node, torch.fx.Node) else None
    if isinstance(val, (tuple, list)) and isinstance(node.args[0], torch.fx.Node) and node.target in MEANINGS:
        val = shown(node.args[0])
    if not isinstance(val, torch.Tensor):
        raise Unfit("a number that may change")
    return val


def _viewed(val: Any, shape: Any) -> Any:
    try:
        return val.view(list(shape))
    except RuntimeError:
        raise Unfit("a tensor that is not contiguous under a view") from None
