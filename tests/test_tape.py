"""What a call did, noted and written as straight-line code: on other tensors it gives what the call itself would."""

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear

import tiga as tg
from benchmarks.host import mocked_launches
from tiga.codegen import kernels, replay
from tiga.codegen.tape import Tape

aten = torch.ops.aten


def recipe_of(work, draw, shapes, scalars=()):
    """The recipe of work(tensors, outputs, scalars, tape), and the tape."""
    outputs = [torch.empty(shape) for shape in shapes]
    tape = Tape(draw(), outputs, [f"s{k}" for k in range(len(scalars))])
    with tape:
        work(tape.tensors, outputs, scalars, tape)
    return replay.Recipe("program", tape) if tape.whole else None, tape


def same(work, draw, shapes, scalars=(), others=()):
    """Repeats a work, and does it anew, on other tensors and other scalars; the recipe."""
    recipe, _ = recipe_of(work, draw, shapes, scalars)
    for _ in range(3):
        tensors, outputs = draw(), [torch.empty(shape) for shape in shapes]
        tape = Tape(tensors, outputs, [f"s{k}" for k in range(len(scalars))])
        work(tensors, outputs, others or scalars, tape)
        found = recipe(tensors, others or scalars)
        assert [x.stride() for x in found] == [x.stride() for x in outputs]
        for a, b in zip(found, outputs):
            assert torch.equal(a, b)
    return recipe


def test_views_are_no_operations():
    def work(t, o, *_):
        x, weight = t
        (first, second), flat = weight[:, 1:7].split(3, 1), x.reshape(2, 2, 3)
        o[0].copy_(linear(flat, first).reshape(4, 5) + linear(x, second)[:, :1].expand(4, 5))

    draw = lambda: [torch.randn(6, 3)[1:5], torch.randn(5, 9)[:, 1:]]
    recipe = same(work, draw, [(4, 5)])
    assert recipe.text.count("view(") == 3 and recipe.text.count(" = c") == 3, recipe.text
    same(work, lambda: [torch.randn(4, 3), torch.randn(8, 5).T], [(4, 5)])


def test_an_output_that_would_be_a_copy_is_what_was_made():
    made = same(lambda t, o, *_: o[0].copy_((t[0] @ t[1]).unsqueeze(0)), lambda: [torch.randn(3, 3)] * 2, [(1, 3, 3)])
    assert " = empty(" not in made.text


COPIED = {
    "a tensor of the call": lambda t, o, *_: o[0].copy_(t[0]),
    "a view of one": lambda t, o, *_: o[0].copy_(t[0].T),
    "a part of what was made": lambda t, o, *_: o[0].copy_(torch.cat([t[0], t[0]])[3:]),
    "repeated": lambda t, o, *_: o[0].copy_(t[0].sum(0)),
    "turned": lambda t, o, *_: o[0].copy_((t[0] + 1).T),
    "in other bits": lambda t, o, *_: o[0].copy_(t[0].double().exp()),
}


@pytest.mark.parametrize("name", COPIED)
def test_other_copies_are_copies(name):
    recipe = same(COPIED[name], lambda: [torch.randn(3, 3)], [(3, 3)])
    assert "o0 = empty" in recipe.text
    x = torch.randn(3, 3)
    (out,) = recipe([x], [])
    assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_two_outputs_are_not_one_memory():
    def work(t, o, *_):
        x = t[0].exp()
        o[0].copy_(x)
        o[1].copy_(x)

    recipe = same(work, lambda: [torch.randn(3)], [(3,), (3,)])
    x = torch.randn(3)
    first, second = recipe([x], [])
    first.zero_()
    assert torch.equal(second, x.exp())


def test_what_changes_after_a_copy_is_copied():
    def work(t, o, *_):
        x = t[0].exp()
        o[0].copy_(x)
        x.add_(1)
        o[1].copy_(x * 2)
        o[2].copy_(t[0] + 1).mul_(3)

    same(work, lambda: [torch.randn(3)], [(3,), (3,), (3,)])


def whole(x, start, stop, step=1, dim=-1, sizes=(4, 9)):
    return aten.slice_backward(x, list(sizes), dim, start, stop, step)


JOINED = {
    "side by side": (
        True,
        lambda t, o, *_: whole(t[0].exp(), 6, 9) + (whole(t[1].exp(), 0, 2) + whole(t[2].exp(), 2, 6)),
    ),
    "to the end": (True, lambda t, o, *_: whole(t[0].exp(), 0, 3) + whole(t[3].exp(), 3, 9223372036854775807)),
    "rows": (True, lambda t, o, *_: whole(t[1].exp(), 0, 4, 1, 0, (8, 2)) + whole(t[1].sin(), 4, 8, 1, 0, (8, 2))),
    "not all": (False, lambda t, o, *_: whole(t[0].exp(), 6, 9) + whole(t[2].exp(), 2, 6)),
    "one twice": (False, lambda t, o, *_: whole(t[2].exp(), 0, 4) + whole(t[3].exp(), 3, 9)),
    "steps": (
        False,
        lambda t, o, *_: whole(t[3].exp(), 0, 12, 2, 1, (4, 12)) + whole(t[3].sin(), 1, 12, 2, 1, (4, 12)),
    ),
    "and more": (True, lambda t, o, *_: whole(t[0].exp(), 0, 3) + whole(t[3].exp(), 3, 9) + t[4]),
    "weighted": (False, lambda t, o, *_: torch.add(whole(t[0].exp(), 0, 3), whole(t[3].exp(), 3, 9), alpha=2)),
    "another way round": (False, lambda t, o, *_: whole(t[0].exp(), 0, 3) + whole(t[5].exp(), 3, 9).T.contiguous().T),
}


@pytest.mark.parametrize("name", JOINED)
def test_gradients_of_slices_side_by_side_are_joined(name):
    joined, made = JOINED[name]
    draw = lambda: [torch.randn(4, n) for n in (3, 2, 4, 6, 9, 6)]
    shape = tuple(made(draw(), None).shape)
    recipe = same(lambda t, o, *_: o[0].copy_(made(t, o)), draw, [shape])
    assert (torch.cat in recipe.constants.values()) == joined, recipe.text


def test_gradients_of_slices_that_others_read_stay():
    def work(t, o, *_):
        part = whole(t[0].exp(), 0, 3)
        o[0].copy_(part + whole(t[1].exp(), 3, 9))
        o[1].copy_(part * 2)

    recipe = same(work, lambda: [torch.randn(4, 3), torch.randn(4, 6)], [(4, 9), (4, 9)])
    assert torch.cat not in recipe.constants.values()


def test_scalars_are_those_of_the_call():
    def work(t, o, scalars, tape):
        made = [torch.full((), x, dtype=torch.float64) for x in scalars]
        if torch.utils._python_dispatch._get_current_dispatch_mode() is tape:
            for k, x in enumerate(made):
                tape.filled(x, f"s{k}")
        o[0].copy_(t[0] * made[1] + torch.full((), 0.5))

    same(work, lambda: [torch.randn(3)], [(3,)], [0.5, 0.25], [3.0, -7.0])


def test_one_tensor_in_two_places_is_two():
    x, y = torch.randn(3), torch.randn(3)
    recipe, _ = recipe_of(lambda t, o, *_: o[0].copy_(t[0] - 2 * t[1]), lambda: [x, x], [(3,)])
    assert torch.equal(recipe([x, y], [])[0], x - 2 * y)


OUTSIDE = torch.ones(3)
VALUES = {
    "item": lambda t, o, *_: o[0].copy_(t[0] * t[0].sum().item()),
    "mask": lambda t, o, *_: o[0].copy_(t[0][t[0] > -torch.inf]),
    "nonzero": lambda t, o, *_: o[0].copy_(t[0].nonzero().sum()),
    "another's operator": lambda t, o, *_: o[0].copy_(torch.ops.tiga.segment_sum(t[0], torch.tensor([0, 1, 2, 3]))),
    "a tensor from outside": lambda t, o, *_: o[0].copy_(t[0] + OUTSIDE),
    "bits read as another type": lambda t, o, *_: o[0].copy_(t[0].view(torch.int32)),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_follows_from_values_or_is_not_known_is_not_repeated(name):
    assert recipe_of(VALUES[name], lambda: [torch.randn(3)], [(3,)])[0] is None


def test_operations_that_nobody_reads_are_dropped_and_memory_is_let_go():
    def work(t, o, *_):
        t[0].exp().sum(0)
        x = t[0].sin()
        for _ in range(3):
            x = x.cos()
        o[0].copy_(x)

    recipe = same(work, lambda: [torch.randn(3)], [(3,)])
    assert recipe.text.count(" = c") == 4 and recipe.text.count("; del ") == 3
    alive = []

    def watched(x):
        alive.append(weakref.ref(x))
        return x.cos()

    cos = next(name for name, x in recipe.constants.items() if x is aten.cos.default._op)
    recipe.repeat.__globals__[cos] = watched
    x = torch.randn(3)
    gc.disable()
    try:
        recipe([x], [])
    finally:
        gc.enable()
    assert all(ref() is None for ref in alive)


@pytest.mark.parametrize("bare", [False, True])
def test_memory_that_torch_reads_is_a_tensor(bare):
    """A kernel writes the sum of two tensors, and another reads a view of it."""
    where = {}

    def kernel(x, y, out):
        torch.add(x, y, out=out)

    def by_address(programs, stream, *addresses):
        torch.add(*[where[a] for a in addresses[:2]], out=where[addresses[2]])

    runner = kernels.Runner(kernel, 0, None, kernels.Bare(by_address, (1,), ()) if bare else None)

    def work(t, o, scalars, tape):
        between = torch.empty(3, 3)
        if torch.utils._python_dispatch._get_current_dispatch_mode() is tape:
            tape.launch(runner, [t[0], t[1], between], {})
        else:
            kernel(*t, between)
        o[0].copy_(between[1:].T @ t[0][1:])

    draw = lambda: [torch.randn(3, 3) for _ in range(2)]
    if not bare:
        assert not same(work, draw, [(3, 3)]).bare
        return
    recipe, _ = recipe_of(work, draw, [(3, 3)])
    tensors, empty = draw(), replay._QUICK["cpu"]

    def noted(*form):
        t = empty(*form)
        where[t.data_ptr()] = t
        return t

    where.update({t.data_ptr(): t for t in tensors})
    (out,) = recipe.repeat(tensors, [], 0, noted)
    torch.testing.assert_close(out, (tensors[0] + tensors[1])[1:].T @ tensors[0][1:])
    assert recipe.bare and not recipe.bytes


def test_what_a_kernel_is_told_has_an_origin():
    """An object that may hold a tensor is made again for every call, or the call is not repeated."""
    told = []
    outputs, x, y = [torch.empty(3)], torch.randn(3), torch.randn(3)
    for again in (None, lambda t: (t[0],)):
        tape = Tape([x], outputs, [])
        with tape:
            held = (x,) if again is not None else {"x": x}
            if again is not None:
                tape.compute(held, again)
            tape.launch(kernels.Runner(lambda x, held: told.append(held), 0), [tape.tensors[0], held], {})
        assert tape.whole == (again is not None)
    replay.Recipe("program", tape)([y], [])
    assert told[-1][0] is y


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_a_noted_call_leaves_nothing_to_the_garbage_collector(layer):
    """What autograd kept of a call is gone with it: it would hold memory, and leaves would remember its stream."""
    n = 30
    module = getattr(tg.nn, layer)(8, 6, heads=2)
    edges = torch.randint(0, n, (2, 200))
    graph, x = tg.Graph.from_edge_index(edges, n, n).prepare(), torch.randn(n, 8, requires_grad=True)
    leaves = [x, *module.parameters()]

    def kept():
        """Whether anything still leads to a leaf."""
        found = []
        for leaf in leaves:
            get_gradient_edge(leaf).node.metadata["seen"] = True
            found.append("seen" in get_gradient_edge(leaf).node.metadata)
        return any(found)

    recipes = lambda: sum([met.recipe is not None for met in replay.KEPT.calls()])
    before = recipes()
    with mocked_launches():
        for _ in range(5):
            gc.collect()
            gc.disable()
            try:
                out = module(x, graph)
                assert kept()
                torch.autograd.grad(out, leaves, torch.ones_like(out))
                del out
                assert not kept()
            finally:
                gc.enable()
    assert recipes() == before + 2, "forward and backward were noted"
