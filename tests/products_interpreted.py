"""Float32 products of bfloat16 pieces, under Triton's interpreter: test_tiles.py starts this with `-p interpreted`."""

import pytest
import torch
import triton
import triton.language as tl

from tiga.codegen.device_products import inner, pieces, summed

SIZE = 32
# bits; the digit of the last is in no high piece
NO_NUMBERS = {"inf": 0x7F800000, "-inf": 0x7F800000 - 2**31, "nan": 0x7FC00000, "snan": 0x7F800001}


@triton.jit
def both(a, b, c, scores, sums, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    left = tl.load(a + at)
    tl.store(scores + at, inner(pieces(left, "bf16x6"), tl.load(b + at), "bf16x6"))
    tl.store(sums + at, summed(tl.load(c + at), left, tl.load(b + at), "bf16x6"))


def products(a, b, c=None):
    """a @ b.T and c + a @ b."""
    out = torch.full((2, SIZE, SIZE), torch.nan)
    both[(1,)](a, b, torch.zeros_like(a) if c is None else c, *out, N=SIZE)
    return out


def draw(size=1.0, positive=False):
    x = torch.randn(SIZE, SIZE)
    return (x.abs() if positive else x) * size


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (1e20, 1e-20), (1e-20, 1e20), (1e18, 1e18), (1e-15, 1e-15)], ids=str)
def test_no_digit_of_float32_is_lost(sizes, positive):
    """Without the smallest of the six products the error is 30 times the bound."""
    a, b, c = draw(sizes[0], positive), draw(sizes[1], positive), draw(sizes[0] * sizes[1])
    x, y, z = a.double(), b.double(), c.double()
    for got, exact, size in zip(products(a, b, c), (x @ y.T, z + x @ y), (abs(x) @ abs(y.T), abs(z) + abs(x) @ abs(y))):
        assert ((got - exact).abs() <= 2**-22 * size).all()


def test_product_with_one_is_the_number():
    """To the last digit, from the smallest normal numbers' neighbours up to the largest."""
    a = draw() * 10 ** torch.empty(SIZE, SIZE).uniform_(-30, 37)
    a[0, :4] = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1 + 2**-23, -1 + 2**-24])
    for got in products(a, torch.eye(SIZE)):
        assert torch.equal(got, a)


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_is_no_number_is_that_of_float32(value):
    """With factors whose lower pieces are 0, with 0, and with another of its kind."""
    for other in (1.0, 0.0, torch.inf, draw()[0, 0].item()):
        x, y = draw(), draw()
        x.view(torch.int32)[3, 5] = value
        y[:4, 5], y[5, :4] = other, other
        for a, b in ((x, y), (y, x)):
            for got, wanted in zip(products(a, b), (a @ b.T, a @ b)):
                assert torch.equal(got.isnan(), wanted.isnan())
                assert torch.equal(got[got.isinf()], wanted[wanted.isinf()])
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
