"""tiga::radius, knn and the operators of listed relations, against all pairs, lists and sets."""

import math

import pytest
import torch
from segments import block_mask, ints, segments

import tiga as tg

ops = torch.ops.tiga
INTEGERS = [torch.int32, torch.int64]


def near(points, cutoff, batch, loop):
    mask = (points[:, None] - points).square().sum(-1) <= cutoff * cutoff
    if batch is not None:
        mask &= batch[:, None] == batch
    return mask if loop else mask & ~torch.eye(len(points), dtype=torch.bool)


def pairs(rowptr, col, num_src):
    """The relation as a mask; each row's sources ascend, each once."""
    mask = torch.zeros(rowptr.shape[0] - 1, num_src, dtype=torch.bool)
    for i, s in enumerate(segments(rowptr.tolist())):
        assert col[s].tolist() == sorted(set(col[s].tolist()))
        mask[i, col[s].long()] = True
    return mask


@pytest.mark.parametrize("nodes", [0, 1, 2, 17])
def test_radius_and_knn_find_what_all_pairs_show(nodes):
    points = torch.rand(nodes, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(nodes))
    for batch in (None, torch.arange(nodes) % 3, (torch.arange(nodes) % 2).int()):
        for loop in (False, True):
            rowptr, col = ops.radius(points, 0.4, batch, loop)
            assert pairs(rowptr, col, nodes).equal(near(points, 0.4, batch, loop))
        rowptr, col = ops.knn(points, 3, batch)
        distance = torch.cdist(points, points).masked_fill(~near(points, math.inf, batch, False), math.inf)
        rank = distance.argsort(dim=1, stable=True).argsort(dim=1)
        assert pairs(rowptr, col, nodes).equal((rank < 3) & distance.isfinite())


class Repulsion(tg.MessagePassing):
    reducer = tg.sum()

    def edge(self, src, dst, edge):
        return self.reducer(torch.exp(-edge.distance) * edge.displacement.sum(-1))


repulsion = Repulsion()


def energy(positions):
    return repulsion(graph=tg.Graph.radius(positions, 0.7)).square().sum()


def plain_energy(positions):
    displacement = positions - positions[:, None]
    mask = near(positions.detach(), 0.7, None, False)
    distance = torch.where(mask[..., None], displacement, 1).square().sum(-1).sqrt()
    return torch.where(mask, torch.exp(-distance) * displacement.sum(-1), 0).sum(1).square().sum()


def cloud(nodes):
    return torch.rand(nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(nodes))


def test_radius_inside_compile_is_differentiable():
    compiled = torch.compile(energy, fullgraph=True, backend="aot_eager", dynamic=True)
    force = torch.compile(torch.func.grad(energy), fullgraph=True, backend="aot_eager", dynamic=True)
    for nodes in (5, 12, 3):
        positions = cloud(nodes).requires_grad_()
        expected = plain_energy(positions)
        torch.testing.assert_close(compiled(positions), expected)
        (grad,) = torch.autograd.grad(expected, positions)
        torch.testing.assert_close(torch.autograd.grad(compiled(positions), positions)[0], grad)
        torch.testing.assert_close(force(positions.detach()), grad)


def test_searches_stand_inside_every_level_of_torch_func():
    def stiffness(positions):
        return torch.func.jacrev(torch.func.grad(energy))(positions)

    positions = cloud(5)
    expected = torch.autograd.functional.hessian(plain_energy, positions)
    torch.testing.assert_close(stiffness(positions), expected)
    torch.testing.assert_close(torch.compile(stiffness, fullgraph=True, backend="aot_eager")(positions), expected)
    offsets = torch.arange(3)
    assert torch.vmap(lambda y: ops.radius(positions, 0.7)[1] + y)(offsets).equal(
        ops.radius(positions, 0.7)[1] + offsets[:, None]
    )
    with pytest.raises(tg.TigaError, match=r"vmap over tiga::radius.*outside vmap"):
        torch.vmap(lambda x: ops.radius(x, 0.7))(positions[None])


def test_forces_compile_with_inductor():
    force = torch.compile(torch.func.grad(energy), fullgraph=True)
    positions = cloud(6).requires_grad_()
    torch.testing.assert_close(force(positions.detach()), torch.autograd.grad(plain_energy(positions), positions)[0])


class Energy(torch.nn.Module):
    def forward(self, positions):
        return energy(positions)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_radius_is_exported(strict):
    positions = cloud(6)
    program = torch.export.export(
        Energy(), (positions,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict
    )
    assert any("tiga.radius" in str(node.target) for node in program.graph.nodes)
    for nodes in (6, 11):
        positions = cloud(nodes)
        torch.testing.assert_close(program.module()(positions), plain_energy(positions))


def test_graphs_made_inside_compile_use_the_operators():
    found = []

    def backend(graph, example_inputs):
        found.extend(
            str(node.target) for node in graph.graph.nodes if node.op == "call_function" and "tiga." in str(node.target)
        )
        return graph.forward

    class Near(tg.MessagePassing):
        reducer = tg.sum()

        def edge(self, src, dst, edge):
            return self.reducer(src.x)

    near_sum = Near()

    def model(points, batch, edge_index):
        graphs = (
            tg.Graph.knn(points, 2),
            tg.Graph.knn(points, 2, batch),
            tg.Graph.from_edge_index(edge_index, len(points), len(points)),
        )
        return [near_sum(graph=graph, src={"x": points}) for graph in graphs]

    args = (
        torch.rand(7, 3, generator=torch.Generator().manual_seed(0)),
        ints(0, 0, 1, 1, 1, 2, 1),
        ints(0, 1, 1, 2, 6, 6, 6, 6).view(2, 4),
    )
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(*args), model(*args))
    assert [target.split(".")[1] for target in found if "propagate" not in target] == ["knn", "knn", "coo_to_csr"]


def test_searches_refuse_bad_positions():
    points = torch.rand(4, 3)
    with pytest.raises(tg.TigaError, match=r"cutoff is -1"):
        ops.radius(points, -1.0)
    with pytest.raises(tg.TigaError, match=r"max_neighbors=1"):
        ops.radius(points, 9.0, None, False, 1)
    with pytest.raises(tg.TigaError, match=r"positions of node 0"):
        ops.knn(points * torch.nan, 1)


# ---- listed relations


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_coo_to_csr_and_its_transpose_keep_every_edge(dtype):
    made = torch.Generator().manual_seed(0)
    for edges, num_src, num_dst in ((40, 5, 3), (1, 1, 1), (0, 2, 3), (0, 0, 0)):
        edge_index = torch.stack(
            [torch.randint(0, max(rows, 1), (edges,), generator=made) for rows in (num_src, num_dst)]
        ).to(dtype)
        rowptr, col, number = ops.coo_to_csr(edge_index, num_dst)
        assert (rowptr.dtype, col.dtype, number.dtype) == (torch.int64, dtype, torch.int64)
        assert rowptr.tolist() == [int((edge_index[1] < i).sum()) for i in range(num_dst + 1)]
        assert number.tolist() == [e for i in range(num_dst) for e in range(edges) if edge_index[1, e] == i]
        assert col.equal(edge_index[0, number])
        turned, dst, same = ops.csr_transpose(rowptr, col, number, num_src)
        assert turned.tolist() == [int((edge_index[0] < j).sum()) for j in range(num_src + 1)]
        assert dst.equal(edge_index[1, same])
        assert same.tolist() == [e for j in range(num_src) for e in number.tolist() if edge_index[0, e] == j]
        assert ops.csr_transpose(rowptr, col, None, num_src)[2].tolist() == col.argsort(stable=True).tolist()


def test_edges_that_name_no_row_stand_outside_all_rows():
    rowptr, col, number = ops.coo_to_csr(ints(0, 1, 2, 3, 5, 0, -1, 1).view(2, 4), 2)
    assert [sorted(number[s].tolist()) for s in segments(rowptr.tolist())] == [[1], [3]]
    assert col[[e for e in range(4) if not rowptr[0] <= e < rowptr[-1]]].tolist() == [-1, -1]
    turned, dst, number = ops.csr_transpose(ints(0, 2), ints(7, 0), None, 2)
    assert [dst[s].tolist() for s in segments(turned.tolist())] == [[0], []]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("split", [1, 2, 3, 100])
@pytest.mark.parametrize("lengths", [[0, 7, 1, 0, 3], [1], [0], [], [2, 2, 2, 9]], ids=str)
def test_work_list_covers_every_edge_once(lengths, split, dtype):
    rowptr = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype)
    edges = int(rowptr[-1])
    items, merges = ops.work_list(rowptr, edges, split)
    assert items.dtype == merges.dtype == dtype
    assert (items[:, 2] - items[:, 1]).tolist() == sorted((items[:, 2] - items[:, 1]).tolist(), reverse=True)
    real = [item for item in items.tolist() if item[0] >= 0]
    assert items[len(real) :, 0].eq(-1).all()
    covered = sorted((row, e) for row, start, end, _ in real for e in range(start, end))
    assert covered == [(row, e) for row, s in enumerate(segments(rowptr.tolist())) for e in range(s.start, s.stop)]
    pieces = {
        row: sorted((start, end, slot) for r, start, end, slot in real if r == row) for row in range(len(lengths))
    }
    slots, expected = 0, []
    for row, length in enumerate(lengths):
        count = max(1, -(-length // split))
        assert len(pieces[row]) == count and all(end - start <= split for start, end, _ in pieces[row])
        assert [slot for *_, slot in pieces[row]] == (list(range(slots, slots + count)) if count > 1 else [-1])
        if count > 1:
            expected.append([row, slots, slots + count])
            slots += count
    assert slots < 2 * edges / split or slots == 0
    assert [merge for merge in merges.tolist() if merge[0] >= 0] == expected


def test_work_list_reads_no_value():
    from torch._subclasses.fake_tensor import FakeTensorMode

    # the implementation itself, not its fake: a read would raise
    from tiga.ops import sparse

    with FakeTensorMode():
        items, merges = sparse.work_list(torch.zeros(6, dtype=torch.int32), 9, 2)
    assert items.shape == (9, 4) and merges.shape == (3, 3)


def test_work_list_of_a_wrong_rowptr_stays_inside():
    items, _ = ops.work_list(ints(0, 9, -4, 5), 5, 2)
    assert ((items[:, 1:3] >= 0) & (items[:, 1:3] <= 5)).all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("boundaries", [[0, 1, 1, 4], [0], [0, 0]], ids=str)
def test_cu_seqlens_to_csr(boundaries, causal, dtype):
    given = torch.tensor(boundaries, dtype=dtype)
    expected = block_mask(boundaries, boundaries, causal, lambda rows, cols: 0)
    assert pairs(*ops.cu_seqlens_to_csr(given, causal), boundaries[-1]).equal(expected)
    padded = pairs(*ops.cu_seqlens_to_csr(given, causal, boundaries[-1] + 2), boundaries[-1] + 2)
    assert padded.sum() == expected.sum() and padded[: boundaries[-1], : boundaries[-1]].equal(expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_intersect_and_union_are_those_of_sets(dtype):
    made = torch.Generator().manual_seed(0)
    for rows, num_src, lengths in ((4, 5, (9, 14)), (3, 4, (0, 6)), (0, 2, (0, 0)), (2, 0, (0, 0))):
        given, masks = [], []
        for edges in lengths:
            edge_index = torch.stack(
                [torch.randint(0, max(size, 1), (edges,), generator=made) for size in (num_src, rows)]
            ).to(dtype)
            rowptr, col, _ = ops.coo_to_csr(edge_index, rows)
            given += [rowptr.to(dtype), col]
            mask = torch.zeros(rows, num_src, dtype=torch.bool)
            mask[edge_index[1].long(), edge_index[0].long()] = True
            masks.append(mask)
        assert pairs(*ops.intersect(*given, num_src), num_src).equal(masks[0] & masks[1])
        assert pairs(*ops.union(*given, num_src), num_src).equal(masks[0] | masks[1])
