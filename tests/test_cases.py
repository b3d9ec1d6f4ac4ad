"""Every CASE against the oracle: values, gradients of every order, transforms, memory layouts, repeatability."""

import pytest
import torch
from cases import CASES, RELATIONS, Case, Own, replaced, tensors
from torch.autograd import grad, gradcheck, gradgradcheck

import tiga as tg
from tiga.adjoint import adjoint, augment
from tiga.derivation import saved_outputs
from tiga.parser import parse

propagate = torch.ops.tiga.propagate.default


def every(condition=lambda case: True):
    return pytest.mark.parametrize("case", [case for case in CASES if condition(case)], ids=str)


SMALL = every(lambda case: case.small)
ONE_PROGRAM = [case for case in CASES if not case.name.startswith("second pass")]
FIRST_OF_A_KIND = list(
    {(case.module, RELATIONS[case.relation].graph().kind): case for case in reversed(ONE_PROGRAM)}.values()
)
# of each edge function one, and of each kind of graph
FIRST = [
    *{case.module: case for case in FIRST_OF_A_KIND}.values(),
    *{RELATIONS[case.relation].graph().kind: case for case in reversed(FIRST_OF_A_KIND)}.values(),
]
THREE = ("test_schema", "test_autograd_registration", "test_faketensor")


def gradients(outputs, inputs, seed=1):
    """Of <outputs, random cotangents>; zeros where there is none."""
    draw = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in outputs]
    found = grad(outputs, inputs, cotangents, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]


def assert_same(got, want, tolerance=1e-9):
    assert len(got) == len(want)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_accurate(got, plain, exact):
    """At most twice the error that plain torch makes in this dtype, and 2 ulp of the row's largest magnitude."""
    assert got.dtype == plain.dtype and got.shape == plain.shape == exact.shape
    if exact.numel() == 0:
        return
    known = exact.isfinite()
    assert torch.equal(known, got.isfinite()) and torch.equal(got[~known].double(), exact[~known])
    rows = (exact.shape[0], -1)
    zero = torch.zeros((), dtype=torch.float64)
    error, usual, size = (
        torch.where(known, x, zero).abs().reshape(rows) for x in (got.double() - exact, plain.double() - exact, exact)
    )
    bound = 2 * usual.max() + 2 * torch.finfo(got.dtype).eps * size.amax(1, keepdim=True)
    assert (error <= bound).all(), f"error {error.max():.3g} where plain torch makes {usual.max():.3g}"


def moved(case, dtype):
    """The module and arguments in a dtype, of the same numbers in all dtypes."""
    return case.build(dtype), case.arguments(dtype)


@every()
def test_value_and_gradient(case):
    module, arguments = moved(case, torch.float64)
    outputs, want, inputs = case.run(module, arguments), case.oracle(module, arguments), tensors(arguments, module)
    assert [x.dtype for x in outputs] == [x.dtype for x in want]
    assert_same(outputs, want)
    assert_same(gradients(outputs, inputs), gradients(want, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@every()
def test_error_is_that_of_plain_torch(case, dtype):
    module, arguments = moved(case, dtype)
    inputs = tensors(arguments, module)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact_arguments = replaced(arguments, exact_inputs)
    exact_module = case.build(torch.float64)
    for p, x in zip(exact_module.parameters(), inputs[len(tensors(arguments)) :]):
        p.data = x.detach().double()
    exact_inputs = tensors(exact_arguments, exact_module)
    got, plain, exact = (
        case.run(module, arguments),
        case.oracle(module, arguments),
        case.oracle(exact_module, exact_arguments),
    )
    for x, y, z in zip(got, plain, exact):
        # lse is float32 at least, whatever the score's dtype
        assert_accurate(x, y if x.dtype == y.dtype else y.to(torch.float32), z)
    plain = [y.to(x.dtype) for x, y in zip(got, plain)]
    # a gradient is made of numbers of the size of the others: all are one row
    assert_accurate(
        *[
            torch.cat([x.flatten() for x in found])[None]
            for found in (gradients(got, inputs), gradients(plain, inputs), gradients(exact, exact_inputs))
        ]
    )


@SMALL
def test_gradient_is_exact_twice(case):
    module, arguments = moved(case, torch.float64)
    for p in module.parameters():
        p.requires_grad_(False)
    inputs = tensors(arguments)

    def call(*values):
        # where a row has no edges its lse is -inf, whose difference quotient is nan
        return tuple(torch.where(x.isfinite(), x, 0.0) for x in case.run(module, replaced(arguments, list(values))))

    assert gradcheck(call, inputs, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.small and case.build().state_dict()], ids=str)
def test_parameters_have_gradients_twice(case):
    module, arguments = moved(case, torch.float64)
    fixed = replaced(arguments, [x.detach() for x in tensors(arguments)])
    names, values = zip(*module.named_parameters())

    def call(*parameters):
        return tuple(
            torch.func.functional_call(
                module,
                dict(zip(names, parameters)),
                (),
                {
                    "graph": case.graph,
                    "src": fixed["src"],
                    "dst": fixed["dst"],
                    "edge": fixed["edge"],
                    **fixed["uniform"],
                },
            ).unsqueeze(0)
        )

    assert gradcheck(call, values, fast_mode=True)
    assert gradgradcheck(call, values, fast_mode=True)


@pytest.mark.parametrize("case", FIRST_OF_A_KIND, ids=str)
def test_operator_contract(case):
    """opcheck's tests of the program, of its adjoint, and of the adjoint's adjoint; the compiler's, of FIRST."""
    module, arguments = moved(case, torch.float64)
    call = case.lower(module, arguments)
    torch.library.opcheck(propagate, tuple(call), test_utils=THREE + ("test_aot_dispatch_dynamic",) * (case in FIRST))
    for _ in range(2):
        call = adjoint_call(*call)
    torch.library.opcheck(propagate, call, test_utils=THREE)


def adjoint_call(text, operands, ints, scalars):
    """The call that the operator's backward makes, for gradients of ones."""
    text = augment(text)
    p = parse(text)
    outputs = propagate(text, [x.detach() for x in operands], ints, scalars)
    wanted = tuple(
        i for i, x in enumerate(operands[: len(p.operands)]) if x.is_floating_point() and p.operands[i].flag != "number"
    )
    given = tuple(i for i, x in enumerate(outputs) if x.is_floating_point())
    derived = adjoint(text, wanted, given)
    assert all(k in saved_outputs(p).values() for what, k in derived.reads if what == "saved")
    read = {"operand": operands, "extra": [torch.ones_like(x) for x in outputs], "saved": outputs}
    made = [
        read[what][k].detach().clone().requires_grad_(read[what][k].is_floating_point()) for what, k in derived.reads
    ]
    return derived.text, [*made, *operands[len(p.operands) :]], ints, [scalars[k] for k in derived.scalars]


@SMALL
def test_vmap_of_grad(case):
    module = case.build(torch.float64)
    samples = [case.arguments(torch.float64, seed) for seed in range(3)]
    stacked = [torch.stack(xs).detach() for xs in zip(*[tensors(a) for a in samples])]

    def loss(run):
        def value(*inputs):
            return sum(
                torch.where(x.isfinite(), x, 0.0).sin().sum() for x in run(module, replaced(samples[0], list(inputs)))
            )

        return value

    got = torch.func.vmap(torch.func.grad(loss(case.run), tuple(range(len(stacked)))))(*stacked)
    for k, arguments in enumerate(samples):
        inputs = tensors(arguments)
        want = grad(loss(case.oracle)(*inputs), inputs, allow_unused=True)
        assert_same([x[k] for x in got], [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, want)])


@SMALL
def test_vmap_over_one_field(case):
    module, arguments = moved(case, torch.float64)
    inputs = [x.detach() for x in tensors(arguments)]
    for k, x in enumerate(inputs):
        batch = torch.stack([x, x.cos()], -1)  # as many as there are heads in most cases

        def call(x, k=k):
            return tuple(case.run(module, replaced(arguments, [*inputs[:k], x, *inputs[k + 1 :]])))

        got = torch.func.vmap(call, in_dims=-1)(batch)
        assert_same(got, [torch.stack(pair) for pair in zip(*[call(batch[..., n]) for n in range(2)])])


def has_forward_mode(case):
    return case.module is not Own


@every(lambda case: not has_forward_mode(case))
def test_forward_mode_is_refused_where_there_is_none(case):
    module, arguments = moved(case, torch.float64)
    inputs = tuple(x.detach() for x in tensors(arguments))
    with pytest.raises(tg.TigaError, match="forward mode"):
        torch.func.jvp(lambda *values: tuple(case.run(module, replaced(arguments, list(values)))), inputs, inputs)


@every(lambda case: case.small and has_forward_mode(case))
def test_forward_mode(case):
    module, arguments = moved(case, torch.float64)
    inputs = [x.detach() for x in tensors(arguments)]
    changes = [torch.randn_like(x) for x in inputs]

    def call(run):
        return lambda *values: tuple(
            torch.where(x.isfinite(), x, 0.0) for x in run(module, replaced(arguments, list(values)))
        )

    values, got = torch.func.jvp(call(case.run), tuple(inputs), tuple(changes))
    _, want = torch.autograd.functional.jvp(call(case.oracle), tuple(inputs), tuple(changes))
    assert_same(values, call(case.oracle)(*inputs))
    assert_same(got, want)


# Memory.


def permuted(x):
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def sliced(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def repeated(x):
    return x[:1].expand(x.shape) if x.dim() else x


@pytest.mark.parametrize("view", [permuted, sliced, repeated])
@every(lambda case: case.relation != "hub")
def test_strides_do_not_matter(case, view):
    module, arguments = moved(case, torch.float32)
    views = [view(x.detach()).requires_grad_() for x in tensors(arguments)]
    copies = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in views]
    got, want = (case.run(module, replaced(arguments, xs)) for xs in (views, copies))
    assert all(x.is_contiguous() for x in got)
    assert_same(got, want, 1e-6)
    expanded = [torch.ones((), dtype=x.dtype).expand(x.shape) for x in got]
    for x, y in zip(
        grad(got, views, expanded, allow_unused=True),
        grad(want, copies, [x.contiguous() for x in expanded], allow_unused=True),
    ):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.fixture
def filled_memory():
    """Memory that nothing was written to yet holds nan."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@every()
def test_results_repeat_bit_for_bit(case, filled_memory):
    module, arguments = moved(case, torch.float32)

    def once():
        outputs = case.run(module, arguments)
        return [*outputs, *gradients(outputs, tensors(arguments, module))]

    first = once()
    assert all(torch.equal(x, y) for x, y in zip(first, once()))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, once()))


def unread(case):
    edges = case.edges()
    return sorted(set(range(edges.num_src)) - set(edges.src.tolist()))


@every(lambda case: unread(case) and case.fields.get("src"))
def test_rows_that_are_nobodys_source_do_not_matter(case):
    module, arguments = moved(case, torch.float32)
    rows = unread(case)
    spoiled = {**arguments, "src": {}}
    for name, x in arguments["src"].items():
        spoiled["src"][name] = x
        if x.is_floating_point():
            spoiled["src"][name] = x.detach().clone()
            spoiled["src"][name][rows] = torch.inf if name == "value" else torch.nan
            spoiled["src"][name].requires_grad_()
    got, want = case.run(module, spoiled), case.run(module, arguments)
    assert_same(got, want, 1e-6)
    for x, y, operand in zip(gradients(got, tensors(spoiled)), gradients(want, tensors(arguments)), tensors(spoiled)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        if any(operand is field for field in spoiled["src"].values()):
            assert not x[rows].any()


@every(lambda case: case.edges().num_edges and case.relation != "hub")
def test_nan_reaches_only_its_neighbours(case):
    module, arguments = moved(case, torch.float32)
    edges = case.edges()
    source = int(edges.src[-1])
    spoiled = {**arguments, "src": {name: x.detach().clone() for name, x in arguments["src"].items()}}
    for x in spoiled["src"].values():
        if x.is_floating_point():
            x[source] = torch.nan
    dst = torch.zeros(edges.num_dst, dtype=torch.bool)
    dst[edges.dst[edges.src == source]] = True
    reached = {"dst": dst, "edge": dst[edges.dst]}
    for x, y, place in zip(case.run(module, spoiled), case.run(module, arguments), case.places):
        assert_same([x[~reached[place]]], [y[~reached[place]]], 1e-6)
        assert x[reached[place]].isnan().any()


def test_the_cases_cover_what_they_promise():
    kinds = {RELATIONS[case.relation].graph().kind for case in CASES}
    assert kinds == {"dense", "triangular", "window", "blocks", "intervals", "csr"}
    assert {RELATIONS[case.relation].graph().kind for case in CASES if RELATIONS[case.relation].graph().reversed} >= {
        "triangular",
        "intervals",
    }
    assert len({case.name for case in CASES}) == len(CASES) and all(isinstance(case, Case) for case in CASES)
    assert {case.relation for case in CASES} == set(RELATIONS)
    for name, relation in RELATIONS.items():
        graph, edges = relation.graph(), relation.edges()
        assert (graph.num_dst, graph.num_src, graph.num_edges) == (edges.num_dst, edges.num_src, edges.num_edges), name
