"""The interpreter made quick is the interpreter: the same types, numbers and errors as its own functions give."""

import itertools

import interpreter_quick
import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

DTYPES = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64]
# Elements meet in few shapes, and shapes with few elements.
MEET = [(tl.int32, tl.int32), (tl.float16, tl.float16), (tl.float32, tl.int32), (tl.pointer_type(tl.float32), tl.int64)]
SHAPES = [(), (1,), (4,), (8,), (1, 4), (8, 1), (8, 4), (2, 8, 4)]


@pytest.fixture
def semantic():
    """Of the interpreter, whose types are those of numpy."""
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(tl, scope)
    yield TritonSemantic(interpreter.InterpreterBuilder())
    scope.restore()


def made(element, shape):
    data = np.arange(max(1, np.prod(shape))).reshape(shape or (1,)).astype(interpreter._get_np_dtype(element))
    return tl.tensor(interpreter.TensorHandle(data, element), tl.block_type(element, list(shape)) if shape else element)


def told(fn, *arguments, **options):
    """All there is to know of the tensors that a function gives, or its error."""
    try:
        found = fn(*arguments, **options)
    except Exception as e:
        return type(e), str(e)
    return [
        (str(x.type), x.type, str(x.dtype), x.numel.value, [n.value for n in x.shape], str(x.shape.type))
        + (x.handle.data.dtype, str(x.handle.data.tolist()), str(x.handle.dtype))
        for x in found
    ]


def told_of_all(semantic):
    elements = [*DTYPES, tl.pointer_type(tl.float32), tl.pointer_type(tl.int1, const=True)]
    found = {}
    for (a, s), (b, t) in itertools.product(itertools.product(elements, SHAPES), repeat=2):
        if not {s, t} <= {(), (4,)} and (a, b) not in MEET:
            continue
        key = str(a), s, str(b), t
        found[("broadcast", *key)] = told(semantic.broadcast_impl_value, made(a, s), made(b, t))
        for name, options in {
            "sums": {"allow_lhs_ptr": True, "allow_rhs_ptr": True},
            "products": {},
            "quotients": {"div_or_mod": True},
            "bare": {"arithmetic_check": False},
        }.items():
            found[(name, *key)] = told(semantic.binary_op_type_checking_impl, made(a, s), made(b, t), **options)
    numbers = [2, -1, 0.5, 0, 1, 1.0, True, np.inf, np.nan, 2**31, -(2**31), 2**40]
    for d, number, shape in itertools.product(DTYPES, numbers, ((), (4,))):
        for way in ((made(d, shape), number), (number, made(d, shape))):
            key = str(d), repr(number), shape, way[1] is number
            found[("number", *key)] = told(semantic.binary_op_type_checking_impl, *way)
            found[("divided", *key)] = told(semantic.binary_op_type_checking_impl, *way, div_or_mod=True)
    for a, s in itertools.product(elements, SHAPES[1:]):
        of = tl.block_type(a, [tl.constexpr(n) for n in s])
        found["block", str(a), s] = str(of), of.numel, list(of.shape), str(of.shape.type), interpreter._get_np_dtype(of)
        other = of.with_element_ty(tl.int8), of.to_ir(semantic.builder)
        found["other", str(a), s] = [(str(x), list(x.shape), x.scalar) for x in other]
    for sizes in ([], [3], [2.0], [1 << 20, 2]):
        found["refused", str(sizes)] = told(tl.block_type, tl.int32, sizes)
    return found


def test_types_numbers_and_errors_are_those_of_the_interpreter(semantic, monkeypatch):
    wanted = told_of_all(semantic)
    interpreter_quick.install(lambda *place: monkeypatch.setattr(*place, raising=False))
    got = told_of_all(semantic)
    assert len(wanted) > 1000 and got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key] == value, key
