"""Lists of periodic neighbours by looking at every image near enough, in plain torch."""

import itertools

import torch


def lengths(positions, cell, batch=None, reach=3):
    """(dst, src, image, displacement) of every pair and of every image up to `reach` boxes away."""
    count, dim = positions.shape
    cells = cell.expand(count, dim, dim) if cell.dim() == 2 else cell[batch]
    images = torch.tensor(list(itertools.product(range(-reach, reach + 1), repeat=dim)))
    i, j, k = (t.flatten() for t in torch.meshgrid(*map(torch.arange, (count, count, len(images))), indexing="ij"))
    n = images[k]
    here = (n == 0) | (cells[i] != 0).any(-1)
    here = here.all(-1) & (torch.ones_like(i, dtype=torch.bool) if batch is None else batch[i] == batch[j])
    i, j, n = i[here], j[here], n[here]
    shift = torch.zeros(len(i), dim, dtype=positions.dtype)
    for d in range(dim):
        shift = shift + n[:, d, None].to(positions.dtype) * cells[i][:, d]
    return i, j, n, positions[j] - positions[i] + shift


def listed(positions, cutoff, cell, batch=None, loop=False, reach=3):
    """What the search should give, as (dst, src, image)."""
    i, j, n, apart = lengths(positions, cell, batch, reach)
    near = apart.double().square().sum(-1) <= cutoff**2
    if not loop:
        near &= (i != j) | (n != 0).any(-1)
    return i[near], j[near], n[near]


def assert_lists(found, wanted):
    """(rowptr, col, image) lists exactly (dst, src, image), in its order."""
    rowptr, col, image = found
    assert rowptr.dtype == col.dtype == torch.int64 and image.dtype == torch.int32
    dst = torch.repeat_interleave(torch.arange(len(rowptr) - 1), rowptr.diff())
    for got, want in zip((dst, col, image), wanted):
        assert got.tolist() == want.tolist()
