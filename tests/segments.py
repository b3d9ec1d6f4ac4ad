"""Small pieces of the operators' oracles: segments as slices, masks of packed sequences."""

import torch


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def doubles(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def segments(rowptr):
    return [slice(a, b) for a, b in zip(rowptr, rowptr[1:])]


def block_mask(dst, src, causal, offset):
    mask = torch.zeros(dst[-1], src[-1], dtype=torch.bool)
    for a, b, c, d in zip(dst, dst[1:], src, src[1:]):
        block = torch.ones(b - a, d - c, dtype=torch.bool)
        mask[a:b, c:d] = block.tril(offset(b - a, d - c)) if causal else block
    return mask
