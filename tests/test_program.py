"""Programs as text: written and read back, short goldens, and text from anyone, which is refused cleanly or runs."""

import functools
import random
import time

import pytest
import torch
from cases import CASES
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiga as tg
from tiga.adjoint import adjoint, augment
from tiga.parser import KINDS, parse
from tiga.primitives import PRIMITIVES
from tiga.program import to_text
from tiga.reducers import REDUCERS
from tiga.tangent import tangent
from tiga.types import DTYPES, PLACES

propagate = torch.ops.tiga.propagate.default
ONE_PROGRAM = [case for case in CASES if not case.name.startswith("second pass")]


def text_of(case, dtype=torch.float32):
    return case.lower(case.build(dtype), case.arguments(dtype)).program


@functools.cache
def derived(text):
    """The program with what its derivatives read, its adjoint, the adjoint's adjoint, its tangent."""
    found = [text, augment(text)]
    for _ in range(2):
        p = parse(found[-1])
        wanted = tuple(i for i, o in enumerate(p.operands) if p.types[o.ref].floating and not p.types[o.ref].weak)
        outputs = tuple(k for k, r in enumerate(p.returns) if p.types[r].floating)
        found += [augment(adjoint(found[-1], wanted, outputs).text)]
    p = parse(found[1])
    if any(line.op == "scan" for line in p.lines):  # forward mode through a user's reducer is refused
        return found
    moving = tuple(i for i, o in enumerate(p.operands) if p.types[o.ref].floating)
    return [*found, tangent(found[1], moving).text]


@pytest.mark.parametrize("case", ONE_PROGRAM, ids=str)
def test_written_and_read_back(case):
    for text in derived(text_of(case)):
        again = to_text(parse(text))
        assert again == text
        assert parse(again).types == parse(text).types


def test_programs_read_well():
    named = {str(case): case for case in CASES}
    assert_expected_inline(
        text_of(named["attention, triangular"], torch.bfloat16),
        """\
tiga/1 relation triangular
operand 0 src key bf16 [*, *]
operand 1 dst query bf16 [*, *]
operand 2 src value bf16 [*, *]
scalar 0 scale
%0 = mul dst.query src.key
%1 = sum %0 -1
%2 = mul %1 scale
%3 = unsqueeze %2 -1
%4, %5 = reduce dst softmax %3 src.value
return %4""",
    )
    assert_expected_inline(
        text_of(named["epilogue, mixed"]),
        """\
tiga/1 relation csr 3
operand 0 src x f32 [*]
operand 1 shared tensor0 f32 [*, *]
operand 2 dst y f32 [*]
operand 3 shared gain f32 [*]
%0 = linear src.x shared.tensor0
%1 = sigmoid dst.y
%2 = mul %0 %1
%3 = reduce dst sum %2
%4 = mul %3 dst.y
%5 = sum %4 -1
%6 = unsqueeze %5 -1
%7 = size %4 -1
%8 = div %6 %7
%9 = sub %4 %8
%10 = mul %9 %9
%11 = sum %10 -1
%12 = unsqueeze %11 -1
%13 = size %10 -1
%14 = div %12 %13
%15 = add %14 0x1.4f8b588e368f1p-17
%16 = rsqrt %15
%17 = mul %16 %9
%18 = mul %17 shared.gain
%19 = add %18 dst.y
return %19""",
    )
    assert_expected_inline(
        text_of(named["bias and table, triangular"]),
        """\
tiga/1 relation triangular
operand 0 src key f32 [*, *]
operand 1 dst query f32 [*, *]
operand 2 edge bias f32 [*]
operand 3 edge kind i64 []
operand 4 shared tensor0 f32 [*, *]
operand 5 src value f32 [*, *]
scalar 0 cap
%0 = mul dst.query src.key
%1 = sum %0 -1
%2 = div %1 cap
%3 = tanh %2
%4 = mul %3 cap
%5 = add %4 edge.bias
%6 = gather shared.tensor0 edge.kind
%7 = add %5 %6
%8 = unsqueeze %7 -1
%9, %10 = reduce dst softmax %8 src.value
return %9""",
    )
    weighted = augment(text_of(named["weighted sum, dense"]))
    assert_expected_inline(
        adjoint(weighted, (0, 1, 2), (0,)).text,
        """\
tiga/1 relation dense
operand 0 edge weight f32 [*]
operand 1 src x f32 [*, *]
operand 2 dst y f32 [*, *]
operand 3 dst grad0 f32 [*, *]
%0 = unsqueeze edge.weight -1
%1 = mul %0 src.x
%2 = mul dst.grad0 dst.y
%3 = mul %1 dst.grad0
%4 = mul %2 src.x
%5 = sum %4 -1
%6 = unsqueeze %5 -1
%7 = mul %0 %2
%8 = squeeze %6 -1
%9 = reduce src sum %7
%10 = reduce dst sum %3
return %8 %9 %10""",
    )
    attention = augment(text_of(named["attention, triangular"]))
    assert_expected_inline(
        adjoint(attention, (1,), (0,)).text,
        """\
tiga/1 relation triangular
operand 0 src key f32 [*, *]
operand 1 dst query f32 [*, *]
operand 2 src value f32 [*, *]
operand 3 dst saved0 f32 [*, *]
operand 4 dst saved1 f32 [*, 1]
operand 5 dst grad0 f32 [*, *]
scalar 0 scale
%0 = mul dst.query src.key
%1 = sum %0 -1
%2 = mul %1 scale
%3 = unsqueeze %2 -1
%4 = eq -inf dst.saved1
%5 = where %4 +inf dst.saved1
%6 = sub %3 %5
%7 = exp %6
%8 = mul dst.grad0 src.value
%9 = sum %8 -1
%10 = unsqueeze %9 -1
%11 = mul dst.grad0 dst.saved0
%12 = sum %11 -1
%13 = unsqueeze %12 -1
%14 = sub %10 %13
%15 = mul %14 %7
%16 = squeeze %15 -1
%17 = mul %16 scale
%18 = unsqueeze %17 -1
%19 = mul %18 src.key
%20 = reduce dst sum %19
return %20""",
    )


def test_the_same_function_gives_the_same_text():
    case = next(case for case in CASES if case.name == "attention, triangular")
    assert text_of(case) == text_of(case)

    class Other(tg.MessagePassing):
        reducer = tg.online_softmax()

        def edge(self, src, dst, edge, scale):
            return self.reducer(torch.mul(scale, torch.sum(dst.query * src.key, -1)), src.value)

    a = case.arguments()
    other = Other().lower(case.graph, src=a["src"], dst=a["dst"], **a["uniform"])
    assert [line for line in other.program.split("\n") if line[0] == "%"] == [
        line for line in text_of(case).split("\n") if line[0] == "%"
    ]


# Text from anyone.


@functools.cache
def valid():
    return sorted({text for case in ONE_PROGRAM for text in derived(text_of(case))[:3] if len(text) < 6000}, key=len)


WORDS = [
    *PRIMITIVES,
    *REDUCERS,
    *KINDS,
    *PLACES,
    *DTYPES,
    "reduce",
    "scan",
    "operand",
    "scalar",
    "return",
    "relation",
    "batch",
    "reverse",
    "function",
    "=",
    "[*]",
    "[1, *]",
    "[]",
    "%0",
    "%1",
    "%2",
    "%99999",
    "%-1",
    "src.x",
    "dst.x",
    "edge.x",
    "shared.x",
    "0",
    "1",
    "-1",
    "-2",
    "9" * 25,
    "-" + "9" * 18,
    "0x1.8p+1",
    "+inf",
    "-inf",
    "+nan",
    "1e5",
    "__import__('os')",
    "src.__class__",
    "tiga/1",
    "tiga/2",
    "\n",
    "\t",
    "\x00",
    "é",
    "٣",
    "²",
    ",",
    "position",
    "number",
]
FUZZ = settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def read(text):
    """None, or the verified program; nothing but TigaError comes out, and soon."""
    begin = time.perf_counter()
    try:
        return parse(text)
    except tg.TigaError as e:
        assert len(str(e)) < 2000
        return None
    finally:
        assert time.perf_counter() - begin < 5


@FUZZ
@given(st.text(max_size=400))
def test_any_text(text):
    read(text)


@FUZZ
@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), max_size=12).map("\n".join),
    st.sampled_from(KINDS),
)
def test_any_words(body, kind):
    read("tiga/1 relation " + kind + "\noperand 0 src x f32 [*]\n" + body)


def mutated(text, seed):
    """A few words, lines or characters of a valid program changed, moved, doubled or dropped."""
    draw = random.Random(seed)
    lines = text.split("\n")
    for _ in range(draw.randint(1, 3)):
        k = draw.randrange(len(lines))
        words = lines[k].split(" ")
        w = draw.randrange(len(words))
        how = draw.randrange(9)
        if how == 0:
            words[w] = draw.choice(WORDS)
        elif how == 1:
            words.insert(w, draw.choice(WORDS))
        elif how == 2:
            del words[w]
        elif how == 3:
            other = draw.choice(lines).split(" ")
            words[w] = draw.choice(other)
        elif how == 4:
            lines[k:k] = [draw.choice(lines)]
            continue
        elif how == 5 and len(lines) > 1:
            del lines[k]
            continue
        elif how == 6:
            j = draw.randrange(len(lines))
            lines[k], lines[j] = lines[j], lines[k]
            continue
        elif how == 7:
            at = draw.randrange(len(lines[k]) + 1)
            lines[k] = lines[k][:at] + chr(draw.choice([32, 37, 45, 48, 57, 0x2028, 0x664])) + lines[k][at:]
            continue
        else:
            words = [draw.choice(["f64", "i64", "bool", "bf16"]) if x in DTYPES else x for x in words]
        lines[k] = " ".join(words)
    return "\n".join(lines)


@FUZZ
@given(st.deferred(lambda: st.sampled_from(valid())), st.integers(0, 2**32))
def test_mutations_of_programs(text, seed):
    p = read(mutated(text, seed))
    if p is not None:
        assert read(to_text(p)) is not None


@settings(FUZZ, max_examples=400)
@given(st.deferred(lambda: st.sampled_from(valid()[:60])), st.integers(0, 2**32))
def test_what_parses_runs_or_is_refused(text, seed):
    """A program from anyone, with tensors that may or may not fit it."""
    p = read(mutated(text, seed))
    if p is None:
        return
    draw = random.Random(seed + 1)
    tensors = [tensor_for(o, draw) for o in p.operands] + [
        torch.tensor([draw.randint(-1, 4) for _ in range(draw.randint(1, 5))]) for _ in range(p.relation_tensors)
    ]
    ints = [
        draw.choice([0, 2, 3, 3, 3])
        for _ in range({"dense": 2, "csr": 2, "blocks": 3, "intervals": 3}.get(p.kind, 5 if p.kind == "window" else 3))
    ]
    if draw.random() < 0.7:
        ints[:2] = [3, 3]
    try:
        outputs = propagate(to_text(p), tensors, ints, [0.5] * len(p.scalars))
    except (tg.TigaError, TypeError, RuntimeError, NotImplementedError):
        return
    assert len(outputs) == len(p.returns) and all(x.is_contiguous() for x in outputs)


def tensor_for(o, draw):
    rows = [] if o.place == "shared" else [9 if o.place == "edge" else 3]
    if draw.random() < 0.05:
        rows = [2]
    sizes = [1 if mark == 1 else draw.choice([2, 2, 2, 2, 2, 3]) for mark in o.sizes]
    return torch.full([*rows, *sizes], draw.choice([0, 1, 2, 100, -5])).to(DTYPES[o.dtype])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "tiga/1",
        "tiga/1 relation",
        "tiga/1 relation dense",
        "tiga/2 relation dense\nreturn %0",
        "tiga/1 relation dense 5\nreturn %0",
        "tiga/1 relation dense\nreturn 1",
        "tiga/1 relation dense\noperand 0 src x f32 [*]",
        "tiga/1 relation dense batch",
        "tiga/1 relation dense batch ²",
        "tiga/1 relation csr ²",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\nscalar ² s",
        "tiga/1 relation dense\noperand ٠ src x f32 [*]\nreturn src.x",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = sum src.x ٣\nreturn %0",
        "tiga/1 relation dense\noperand 0 src " + "x" * 65 + " f32 []\nreturn src.x",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = reshape src.x -1 0\nreturn %0",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = part src.x -1 0\nreturn %0",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = cat -1\nreturn %0",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%1 = exp src.x\nreturn %1",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = exp src.x\n%0 = exp src.x\nreturn %0",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = exp %0\nreturn %0",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = reduce dst sum src.x\n%1 = add %0 src.x\nreturn %1",
        "tiga/1 relation dense\noperand 0 src x f32 [" + "*, " * 20 + "*]\nreturn src.x",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\n%0 = slice src.x -1 -1 2 1\nreturn %0",
        "tiga/1 relation dense\noperand 0 src x f32 [*]\nreturn src.x\nreturn src.x",
    ],
    ids=range(26),
)
def test_refused(text):
    with pytest.raises(tg.TigaError):
        parse(text)


def test_long_text_is_refused_soon():
    head = "tiga/1 relation dense\noperand 0 src x f32 [*]\n"
    begin = time.perf_counter()
    with pytest.raises(tg.TigaError):
        parse(head + "x" * 5_000_000)
    with pytest.raises(tg.TigaError):
        parse(head + "\n" * 30_000)
    # sizes that double at every line are expressions over expressions
    grown = (
        head
        + "\n".join(
            f"%{k} = cat {'src.x' if k == 0 else f'%{k - 1}'} {'src.x' if k == 0 else f'%{k - 1}'} -1"
            for k in range(200)
        )
        + "\nreturn %199"
    )
    p = read(grown)
    if p is not None:
        with pytest.raises((tg.TigaError, RuntimeError, MemoryError)):
            propagate(grown, [torch.zeros(2, 2)], [2, 2], [])
    assert time.perf_counter() - begin < 20
