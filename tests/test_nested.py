"""Derivatives of derivatives, by nestings of torch.func and autograd, against gather and scatter in plain torch."""

import pytest
import torch
from cases import Max, Mean, Min, Quartic, Sum
from test_semantics import Graph, attend, near, summed
from torch.autograd import grad


def test_second_derivative_of_a_sum():
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    energy = summed(Graph.from_edge_index(torch.tensor([[0, 0, 1], [1, 2, 0]]), 3, 3), x).square().sum() / 2
    (first,) = grad(energy, x, create_graph=True)
    assert first.tolist() == [2.0, -2.0, 0.0] and grad(first.sum(), x)[0].tolist() == [2.0, 1.0, 0.0]


S, D = torch.tensor([0, 1, 2, 2, 2]), torch.tensor([1, 0, 0, 0, 1])


def explicit(q, k, v):
    e = ((k[S] * q[D]).sum(-1, keepdim=True) * 0.5).exp()
    total = torch.zeros(3, 1, 1, dtype=e.dtype).index_add(0, D, e) + torch.tensor([0.0, 0.0, 1.0], dtype=e.dtype).view(
        3, 1, 1
    )
    return torch.zeros_like(v).index_add(0, D, e * v[S]) / total


def nested():
    """Pairs of the same function of one tensor, by tiga and by gather and scatter."""
    graph, xs = (
        Graph.from_edge_index(torch.stack([S, D]), 3, 3),
        [torch.randn(3, 1, 2, dtype=torch.float64) for _ in range(3)],
    )
    for i in range(3):

        def put(x, i=i):
            return [x if j == i else y for j, y in enumerate(xs)]

        yield (
            lambda x, put=put: attend(graph, *put(x), 0.5).pow(3).sum(),
            lambda x, put=put: explicit(*put(x)).pow(3).sum(),
        )
    yield (
        lambda p: Quartic()(graph=graph, src={"p": p}, dst={"p": p}).sum(),
        lambda p: (p[S] - p[D]).square().sum(-1).square().sum(),
    )


def over_autograd(f, x, w):
    x = x.clone().requires_grad_()
    return grad((torch.func.grad(f)(x) * w).sum(), x)[0]


NESTED = {
    "grad of grad": lambda f, x, w: torch.func.grad(lambda x: (torch.func.grad(f)(x) * w).sum())(x),
    "jacrev of jacrev": lambda f, x, w: torch.func.jacrev(torch.func.jacrev(f))(x),
    "autograd over func.grad": over_autograd,
    "hessian": lambda f, x, w: torch.func.hessian(f)(x),
    "jacfwd of jacfwd": lambda f, x, w: torch.func.jacfwd(torch.func.jacfwd(f))(x),
    "jacrev of jacfwd": lambda f, x, w: torch.func.jacrev(torch.func.jacfwd(f))(x),
    "vmap of grad": lambda f, x, w: torch.func.vmap(torch.func.grad(f))(torch.stack([x, w])),
    "grad of vmap": lambda f, x, w: torch.func.grad(lambda xs: (torch.func.vmap(f)(xs) ** 2).sum())(
        torch.stack([x, w, x - w])
    ),
    "grad of grad of grad": lambda f, x, w: torch.func.grad(
        lambda x: (torch.func.grad(lambda x: (torch.func.grad(f)(x) * w).sum())(x) * w).sum()
    )(x),
}


@pytest.mark.parametrize("how", NESTED)
def test_nested_transforms(how):
    x, w = torch.randn(2, 3, 1, 2, dtype=torch.float64)
    for mine, plain in nested():
        got, want = NESTED[how](mine, x, w), NESTED[how](plain, x, w)
        assert want.abs().max() > 1e-3
        near(got, want, rtol=1e-9, atol=1e-9)


def test_jacobian_of_two_equal_scores():
    zero = torch.zeros(2, 1, 1)
    jacobian = torch.func.jacrev(lambda v: attend(Graph.dense(1, 2), zero[:1], zero, v).flatten())(
        torch.tensor([1.0, 5.0]).view(2, 1, 1)
    )
    near(jacobian.flatten(), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("module", [Sum, Mean, Max, Min], ids=lambda m: m.__name__)
def test_float64_stays_float64(module):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2], [1, 0, 0, 0]]), 3, 3)
    x, y, w = (
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
        torch.rand(3, 4, dtype=torch.float64),
        torch.randn(4, 4, dtype=torch.float64),
    )

    def run(x):
        return module()(
            graph=graph,
            src={"x": x},
            dst={"y": y} if module in (Mean, Max) else {},
            edge={"w": w} if module is Min else {},
        )

    assert run(x).dtype == torch.float64 and torch.autograd.gradcheck(run, x)
