"""Nested function transforms, eager and compiled, against the same energies in plain torch, in float64."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from programs import Attention, attend, fields, plain_attention
from torch.autograd import grad
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tiga as tg

N, HEADS, WIDTH = 3, 2, 2
MASK = torch.ones(N, N).tril().bool()
ATTENTION = Attention()
LISTED = torch.tensor([[0, 1, 2, 2, 2], [1, 0, 0, 0, 1]])
MODES = pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])


class Quartic(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer((src.x - dst.x).square().sum(-1).square())


class Extreme(tg.MessagePassing):
    """A value whose score reads a network, and an extreme of it: two reducers on one edge function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = tg.nn.trace(
            torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
        )
        self.attention, self.largest = tg.online_softmax(), tg.max()

    def edge(self, src, dst, edge):
        h = self.net(src.x, dst.x)
        return self.attention(h, src.x) + self.largest(h.sin())


QUARTIC, EXTREME = Quartic(), Extreme()


def extreme_plain(x):
    net, out = EXTREME.net.module, []
    for i in range(N):
        h = net(torch.cat([x[:, 0], x[i : i + 1, 0].expand(N, -1)], -1))
        out.append((h.softmax(0) * x[:, 0]).sum(0) + h.sin().amax(0))
    return torch.stack(out)


def energies():
    """name: (energy through tiga, the same in plain torch), of one (N, HEADS, WIDTH) argument."""
    rest = [
        torch.randn(N, HEADS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(3)
    ]
    src, dst = LISTED

    def of(place):
        def put(x):
            return [x if k == place else t for k, t in enumerate(rest)]

        return (
            lambda x: attend(ATTENTION, tg.Graph.triangular(N), *put(x)).pow(3).sum(),
            lambda x: plain_attention(MASK, *put(x)).pow(3).sum(),
        )

    listed = tg.Graph.from_edge_index(LISTED, num_src=N, num_dst=N)
    return {
        "query": of(0),
        "key": of(1),
        "value": of(2),
        "distances": (
            lambda x: QUARTIC(graph=listed, src={"x": x}, dst={"x": x}).sum(),
            lambda x: (x[src] - x[dst]).square().sum(-1).square().sum(),
        ),
        "network": (
            lambda x: EXTREME(graph=tg.Graph.dense(N), src={"x": x[:, 0]}, dst={"x": x[:, 0]}).pow(2).sum(),
            lambda x: extreme_plain(x).pow(2).sum(),
        ),
    }


ENERGIES = energies()
WEIGHT, POINT = (
    torch.randn(N, HEADS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in (7, 8)
)


def autograd_over_func_grad(f):
    def twice(x):
        x = x.detach().clone().requires_grad_()
        return grad((torch.func.grad(f)(x) * WEIGHT).sum(), x)[0]

    return twice


TRANSFORMS = {
    "grad of grad": lambda f: torch.func.grad(lambda x: (torch.func.grad(f)(x) * WEIGHT).sum()),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
    "hessian": hessian,
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jvp of grad": lambda f: lambda x: jvp(torch.func.grad(f), (x,), (WEIGHT,))[1],
    "vjp of grad": lambda f: lambda x: vjp(torch.func.grad(f), x)[1](WEIGHT)[0],
    # a batch as large as the heads: no size can tell the two apart
    "vmap of grad": lambda f: lambda x: vmap(torch.func.grad(f))(torch.stack([x, x.sin() + WEIGHT])),
    "vmap of grad of grad": lambda f: lambda x: vmap(TRANSFORMS["grad of grad"](f))(torch.stack([x, x.sin() + WEIGHT])),
    "vmap of hessian": lambda f: lambda x: vmap(hessian(f), in_dims=1)(torch.stack([x, x.sin() + WEIGHT], 1)),
    "autograd over func.grad": autograd_over_func_grad,
}
# torch 2.13 compiles neither for plain functions: the first makes a leaf, the second fails in its own fake tensors
OUTSIDE = ("autograd over func.grad", "vmap of hessian")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert want.abs().max() > 1e-3


@pytest.mark.parametrize("energy", ENERGIES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_nested(transform, energy):
    ours, plain = ENERGIES[energy]
    assert_same(TRANSFORMS[transform](ours)(POINT), TRANSFORMS[transform](plain)(POINT))


@pytest.mark.parametrize("energy", ["key", "distances"])
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name not in OUTSIDE])
def test_nested_inside_compile(transform, energy):
    ours, plain = ENERGIES[energy]
    fn = torch.compile(TRANSFORMS[transform](ours), backend="aot_eager", fullgraph=True)
    assert_same(fn(POINT), TRANSFORMS[transform](plain)(POINT))


def test_autograd_over_func_grad_of_a_compiled_region():
    """Force training: func.grad inside the compiled region, the outer backward outside."""
    for ours, plain in ENERGIES.values():
        fn = torch.compile(torch.func.grad(ours), backend="aot_eager", fullgraph=True)
        x, y = (WEIGHT.clone().requires_grad_() for _ in range(2))
        assert_same(grad((fn(x) * WEIGHT).sum(), x)[0], grad((torch.func.grad(plain)(y) * WEIGHT).sum(), y)[0])
        torch._dynamo.reset()


@MODES
def test_a_batch_as_large_as_the_heads(compile_it):
    """vmap over HEADS samples, each dimension in turn, of gradients by every argument."""
    batch = [torch.stack(fields(N, HEADS, WIDTH, torch.float64)) for _ in range(HEADS)]
    samples = torch.stack(batch)

    def energy(q, k, v):
        return attend(ATTENTION, tg.Graph.triangular(N), q, k, v).sin().sum()

    def plain(q, k, v):
        return plain_attention(MASK, q, k, v).sin().sum()

    for dims in ((0, 0, 0), (None, 0, 0), (0, None, None), (1, 0, 2)):
        args = [samples[0, j] if d is None else samples[:, j].movedim(0, d) for j, d in enumerate(dims)]
        fn = vmap(torch.func.grad(energy, argnums=(0, 1, 2)), in_dims=dims)
        fn = torch.compile(fn, backend="aot_eager", fullgraph=True) if compile_it else fn
        for got, want in zip(fn(*args), vmap(torch.func.grad(plain, argnums=(0, 1, 2)), in_dims=dims)(*args)):
            assert_same(got, want)


class Projected(tg.MessagePassing):
    reducer = tg.online_softmax()

    def __init__(self):
        super().__init__()
        self.score, self.project = torch.nn.Linear(4, 1).double(), torch.nn.Linear(2, 3).double()

    def edge(self, src, dst, edge):
        return self.reducer(self.score(torch.cat([src.x, dst.x], -1)), self.project(src.x))


@MODES
@pytest.mark.parametrize("count", [2, 1])
def test_vmap_over_weights(count, compile_it):
    """An ensemble: one graph, one set of fields, `count` sets of parameters; values and gradients of all parameters."""
    program, x = Projected(), torch.randn(N, 2, dtype=torch.float64)
    stacked = {name: torch.randn(count, *p.shape, dtype=torch.float64) for name, p in program.named_parameters()}

    def ours(parameters):
        args = {"graph": tg.Graph.triangular(N), "src": {"x": x}, "dst": {"x": x}}
        return functional_call(program, parameters, (), args).pow(2).sum()

    def plain(parameters):
        both = torch.cat([x[None].expand(N, N, 2), x[:, None].expand(N, N, 2)], -1)
        score = both @ parameters["score.weight"][0] + parameters["score.bias"]
        weight = score.masked_fill(~MASK, -torch.inf).softmax(-1)
        return (weight @ (x @ parameters["project.weight"].T + parameters["project.bias"])).pow(2).sum()

    for f in (vmap, lambda g: vmap(torch.func.grad(g))):
        fn = torch.compile(f(ours), backend="aot_eager", fullgraph=True) if compile_it else f(ours)
        got, want = fn(stacked), f(plain)(stacked)
        if isinstance(want, dict):
            for name in want:
                torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-9)
        else:
            assert_same(got, want)


def test_vmap_over_a_graph_is_refused():
    tensors = torch.stack([LISTED, LISTED.flip(1)])
    x = torch.randn(N, 2, dtype=torch.float64)

    def one(edges):
        graph = tg.Graph("csr", (N, N), (torch.tensor([0, 2, 4, 5]), edges[0]))
        return QUARTIC(graph=graph, src={"x": x}, dst={"x": x})

    with pytest.raises(tg.TigaError, match="vmap over a graph"):
        vmap(one)(tensors)


@MODES
def test_per_sample_gradients_with_chunks(compile_it):
    """vmap(chunk_size) cuts the batch to samples of batch 1 as well."""
    samples = torch.randn(5, N, HEADS, WIDTH, dtype=torch.float64)
    ours, plain = ENERGIES["value"]
    fn = vmap(torch.func.grad(ours), chunk_size=2)
    fn = torch.compile(fn, backend="aot_eager") if compile_it else fn
    assert_same(fn(samples), torch.stack([torch.func.grad(plain)(x) for x in samples]))
