"""Whether calls in a compiler's graph leave warp-specialised kernels for plain ones, by examples of their sizes.

Those kernels read vectors as they lie: a scale or a norm of vectors, which plain kernels compute on the way, costs more
than it saves where it sends a large work to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tiga.codegen import calls, launch_hopper
from tiga.inductor.draft import Draft, Written, shown
from tiga.ops import tiles
from tiga.parser import parse

Node = Any
UNKNOWN = 4096  # the example of a size that has none


def plainer(before: Sequence[Node], after: Sequence[tuple[Draft, Written]]) -> str:
    """Why programs are no better than those of the calls that they replace, or ""."""
    old = sum([plain(c.args[0], [*map(shown, c.args[1])], [*map(shown, c.args[2])], c.args[3]) for c in before])
    new = 0
    for draft, written in after:
        tensors = [*[s.val for s in written.sources], *map(shown, draft.relation)]
        new += plain(written.text, tensors, [*map(shown, draft.ints)], written.scalars)
    return f"{new} works in plain kernels instead of {old}: warp-specialised ones do not hold it" if new > old else ""


def plain(text: str, tensors: list, ints: list, scalars: Sequence[Any]) -> int:
    """How many works of matrix products plain kernels run; 0 where there are no others."""
    p = parse(text)
    if p.kind == "csr" or launch_hopper.unavailable(tensors[0].device):
        return 0
    _, kernels, refused = tiles.planned(p)
    if refused:
        return 0
    with _disable_current_modes(), FakeTensorMode():
        like = calls.Call(p, [*map(example, tensors)], tuple([*map(number, ints)]), scalars, [])
        return sum([not takes(ready, like) for ready in kernels if ready.work.folds and ready.work.inners])


def takes(ready: calls.Prepared, like: calls.Call) -> bool:
    there = all([x.ref in like.tensors for x in ready.work.inputs if x.mode == "vector"])
    return there and launch_hopper.takes(ready, like, tiles.spans)


def number(n: Any) -> Any:
    if not isinstance(n, torch.SymInt):
        return n
    return n.node.hint if n.node.has_hint() else UNKNOWN


def example(t: Tensor) -> Tensor:
    sizes, strides = [*map(number, t.shape)], [*map(number, t.stride())]
    return torch.empty_strided(sizes, strides, dtype=t.dtype, device=t.device)
