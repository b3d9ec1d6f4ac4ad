"""The schedule of packed sequences under Triton's interpreter, beside one written down on the host."""

import pytest
import torch

from tiga.codegen import device, device_schedule

LENGTHS = ([300, 0, 17, 700, 1, 129], [5], [128, 128, 256], [1] * 600 + [200])


def wanted(lengths, block_m, reverse):
    """[(owners first, end, others low, high)], heaviest first, of causal segments with 3 rows before and 2 after."""
    found, at = [], 3
    for n in lengths:
        for first in range(at, at + n, block_m):
            last = min(first + block_m, at + n) - 1
            found.append((-(at + n - first if reverse else last + 1 - at), first, at + n, at, at + n))
        at += n
    return [x[1:] for x in sorted(found, key=lambda x: x[0])]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_heavy_tiles_first(lengths, reverse):
    block_m = 64
    bounds = 3 + torch.tensor([0, *lengths]).cumsum(0)
    rows, blocks = int(bounds[-1]) + 2, len(lengths)
    low, high = torch.full((blocks,), -rows), torch.zeros(blocks, dtype=torch.int64)
    slots = -(-rows // block_m) + blocks + 2
    places, prefix, whole = (torch.zeros(blocks + 3, dtype=torch.int32) for _ in range(3))
    ordered = torch.full((slots, 8), -7, dtype=torch.int32)
    taken = torch.full((1,), -7, dtype=torch.int32)
    told = (places, prefix, bounds, bounds, low, high, ordered, taken, blocks, rows, rows, slots)
    constants = {"BLOCK_M": block_m, "REDO_M": 32, "REVERSED": reverse, "BLOCK": 256, "ORDERED": 64}
    device_schedule.schedule_tiles[(-(-slots // 64),)](*told, **constants)
    device.count_tiles[(1,)](bounds, whole, blocks, rows, 1, BLOCK_M=32, BLOCK=1024)
    assert prefix.equal(whole) and taken.item() == 0
    expected = wanted(lengths, block_m, reverse)
    assert [tuple(x[:4]) for x in ordered.tolist()][: len(expected)] == expected
    assert all(x[0] >= x[1] or x[2] >= x[3] for x in ordered.tolist()[len(expected) :])  # no edges there
    assert (ordered[:, :6] != -7).any(1).all()
