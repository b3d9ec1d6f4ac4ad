"""Words of the C++ that a program's lines become: arrays, bodies of loops, literals, powers."""

from __future__ import annotations

import math
from typing import NamedTuple

from tiga.program import read_number


class Array(NamedTuple):
    """name[...] of a value with `lead` leading dimensions; steps: of each feature dimension, width: of all."""

    name: str
    dtype: str
    lead: int
    steps: tuple[int, ...]
    width: int


class Scope:
    """The innermost body of a loop: statements, and what is known there."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.known: dict[tuple, str] = {}


def plain(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def literal(word: str) -> str:
    number = read_number(word)
    if isinstance(number, int):
        return f"i64({number})"
    assert number is not None
    if number != number:
        return "std::numeric_limits<double>::quiet_NaN()"
    if math.isinf(number):
        return ("-" if number < 0 else "") + "std::numeric_limits<double>::infinity()"
    return float.hex(number)


def power(args: list[str], exponent: str) -> str:
    """Powers that are products, or roots."""
    number = read_number(exponent)
    x = plain(args[0])
    if number is not None and number == int(number) and 1 <= number <= 4:
        return " * ".join([x] * int(number))
    return {0.5: f"std::sqrt({x})", -1.0: f"1 / {x}", -2.0: f"1 / ({x} * {x})"}.get(number, "") if number else ""
