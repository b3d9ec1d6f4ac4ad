"""Functions of numbers on an edge that Triton's language does not have, for kernels of the rows skeleton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# In its terms.


@triton.jit
def sign(x):
    one = (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
    if x.dtype.is_floating():
        one = tl.where(x != x, x, one)
    return one


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    low = tl.floor(x)
    rest = x - low
    odd = low - 2 * tl.floor(low * 0.5)
    return tl.where(rest < 0.5, low, tl.where(rest > 0.5, low + 1, low + odd))


@triton.jit
def remainder(x, y):
    """Of division towards -infinity: it has y's sign."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def expm1(x):
    """Kahan's: the rounding of exp(x) is undone by that of its logarithm."""
    u = tl.exp(x)
    safe = tl.where((u == 1) | (u <= 0) | (u == float("inf")), 2.0, u)
    y = (safe - 1) * x / tl.log(safe)
    y = tl.where(u == 1, x, y)
    return tl.where((u - 1 == -1) | (u == float("inf")), u - 1, y)


@triton.jit
def log1p(x):
    u = 1 + x
    y = tl.log(u) * x / tl.where(u == 1, 1, u - 1)
    return tl.where(u == 1, x, tl.where(u == float("inf"), u, y))


@triton.jit
def sinh(x):
    u = expm1(tl.abs(x))
    half = tl.exp(tl.abs(x) * 0.5)
    y = tl.where(u < 1e6, 0.5 * (u + u / (u + 1)), 0.5 * half * half)
    return tl.where(x < 0, -y, y)


@triton.jit
def cosh(x):
    half = tl.exp(tl.abs(x) * 0.5)
    return 0.5 * half * half + 0.5 / (half * half)


@triton.jit
def tanh(x):
    """A quotient of polynomials near 0 (Cephes), else of exponentials."""
    z = x * x
    if x.dtype == tl.float64:
        above = ((-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3) * z
        below = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
        near = x + x * (above / below)
    else:
        near = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
        near = x + x * ((near - 3.33332819422e-1) * z)
    far = 1 - 2 / (tl.exp(2 * tl.minimum(tl.abs(x), 30)) + 1)
    y = tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))
    return tl.where(x != x, x, y)


@triton.jit
def hash_uniform(seed, number, feature):
    """Uniform in [0, 1), of (seed, edge number, feature) alone: two rounds of splitmix64."""
    x = seed + number * -7046029254386353131 + feature * -4417276706812531889
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 40) & 0xFFFFFF).to(tl.float32) * (2.0**-24)


# Of CUDA's library, which Triton's interpreter does not know.


@triton.jit
def pow(x, y):
    return libdevice.pow(x, y)


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def atan2(y, x):
    return libdevice.atan2(y, x)


@triton.jit
def asin(x):
    return libdevice.asin(x)


@triton.jit
def acos(x):
    return libdevice.acos(x)
