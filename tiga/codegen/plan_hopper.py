"""Plans of the hopper skeleton: warpgroups, others a tile, stages, registers. The first that fits the chip runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HopperPlan:
    """consumers: warpgroups of 64 owners each; stages: tiles of others in shared memory; owns: tiles of owners there.

    ahead: the sums of a tile run while the weights of the next are computed, instead of as soon as theirs are known.
    registers: of a thread of the consumers, and of the producer. turns: consumers begin their products one after
    another, so that the weights of one are computed while another's products run.
    """

    consumers: int
    block_n: int
    stages: int
    owns: int
    ahead: bool
    registers: tuple[int, int]
    turns: bool = field(default=False, kw_only=True)

    warps = 4
    masked = 1

    @property
    def block_m(self) -> int:
        return 64 * self.consumers


@dataclass(frozen=True)
class PrunedHopperPlan(HopperPlan):
    """Of works that skip tiles, of 64 owners by block_n others, one of each warpgroup.

    stages: tiles of keys in shared memory, three at least, as two verdicts may not be heard yet; kept: of values.
    """

    kept: int = 2


_TWO, _THREE = (240, 24), (160, 32)
_TWO_NUMBERS = (232, 40)  # a producer that also brings numbers
# By width, products and sums of vectors; best first.
_TABLE = {
    (128, 1, 1): (HopperPlan(2, 128, 2, 2, True, _TWO),),
    (128, 2, 1): (HopperPlan(2, 64, 3, 1, True, _TWO),),
    (128, 2, 2): (HopperPlan(2, 64, 3, 1, False, _TWO), HopperPlan(2, 32, 3, 1, False, _TWO)),
    (256, 1, 1): (HopperPlan(2, 64, 2, 1, True, _TWO), HopperPlan(2, 32, 2, 1, True, _TWO)),
    (256, 2, 1): (HopperPlan(2, 32, 2, 1, True, _TWO),),
    # in turns 486 TFLOP/s where it was 479 on an H200 (2026-12-01), all pairs; wider vectors were none the faster
    (64, 1, 1): (HopperPlan(3, 128, 4, 2, True, _THREE, turns=True), HopperPlan(2, 128, 4, 2, True, _TWO_NUMBERS)),
    (64, 2, 1): (HopperPlan(2, 128, 3, 1, True, _TWO), HopperPlan(2, 64, 4, 1, True, _TWO_NUMBERS)),
    (64, 2, 2): (HopperPlan(2, 64, 4, 1, True, _TWO_NUMBERS), HopperPlan(2, 32, 4, 1, False, _TWO_NUMBERS)),
}
# Of works that skip tiles, by tile and width, where an H200 timed them faster than plain Triton (2026-12-01): of 64 in
# the form before this one. The second of 128 is for less shared memory, and was not timed.
PRUNED = {
    ((64, 128), 128): (PrunedHopperPlan(2, 128, 4, 1, True, _TWO, 2), PrunedHopperPlan(2, 128, 3, 1, True, _TWO, 2)),
    ((64, 128), 64): (PrunedHopperPlan(2, 128, 4, 2, True, _TWO, 3),),
}
# The fewest others that a row reaches, by relation and width of tiles, with which these kernels were the faster ones
# on an H200 (2026-11-30): of softmax, and of sums alone, as gradients are. What is not here was not timed.
FEWEST = {
    ("band", 64): (4096, 4096),
    ("band", 128): (1024, 256),
    ("band", 256): (2048, 2048),
    ("blocks", 128): (512, 512),
    ("rows1", 128): (16384, 4096),
}


def hopper_plans(width: int, products: int, sums: int, softmax: bool) -> tuple[HopperPlan, ...]:
    """The plans to try; none for a form that this skeleton does not take."""
    return tuple([p for p in _TABLE.get((width, products, sums), ()) if p.ahead or not softmax])


def pruned_plans(tile: tuple[int, int], width: int) -> tuple[PrunedHopperPlan, ...]:
    """The plans of works that skip tiles; none for tiles that this skeleton does not judge."""
    return PRUNED.get((tile, width), ())
