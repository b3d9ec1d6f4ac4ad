"""A sample of attention's sizes, kinds, dtypes and memory layouts in which every pair of values meets.

`python tests/sample.py` writes `sample.txt`, one point a line.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

DIMENSIONS = {
    "rows": ("1", "17", "127", "128", "129", "1000", "4097"),
    "width": ("8", "64", "80", "96", "128", "192", "256"),
    "kind": ("dense", "triangular", "offset", "window", "blocks", "intervals", "double", "reversed"),
    "dtype": ("float16", "bfloat16", "float32"),
    "layout": ("contiguous", "heads-outermost", "features-outermost", "gap", "broadcast-head"),
}
PATH = Path(__file__).with_name("sample.txt")
SEED = 0
MOST = 150

Point = tuple[str, ...]


def pairs(point: Point) -> set[tuple[int, str, int, str]]:
    """The pairs of values that meet in a point, each with the numbers of its dimensions."""
    return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(enumerate(point), 2)}


def generate(seed: int = SEED) -> list[Point]:
    """Points until every pair is met: the one that meets most new pairs next, the first in an order of the seed."""
    everything = list(itertools.product(*DIMENSIONS.values()))
    random.Random(seed).shuffle(everything)
    candidates = [(point, pairs(point)) for point in everything]
    missing = set().union(*[met for _, met in candidates])
    points = []
    while missing:
        point, met = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        points.append(point)
        missing -= met
    order = [list(values) for values in DIMENSIONS.values()]
    return sorted(points, key=lambda point: [values.index(x) for values, x in zip(order, point)])


def kept() -> list[Point]:
    """The list in the repository."""
    return [tuple(line.split()) for line in PATH.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    PATH.write_text("".join(" ".join(point) + "\n" for point in generate()), encoding="utf-8")
