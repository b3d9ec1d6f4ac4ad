"""Rows that are done again, under Triton's interpreter: those of tiles with a note, and no others."""

import pytest
import torch

import tiga as tg
from tiga.codegen import calls
from tiga.codegen.launch_hopper import HopperLaunch
from tiga.codegen.plan import Plan
from tiga.ops import tiles
from tiga.parser import parse

ROWS, HEADS, TILE, UNWRITTEN = 70, 2, 16, -7.0


class Attention(tg.MessagePassing):
    reducer = tg.online_softmax()

    def edge(self, src, dst, edge, scale):
        return self.reducer((src.key * dst.query).sum(-1) * scale, src.value)


def packed():
    boundaries = torch.tensor([0, 20, 20, ROWS])
    of = torch.bucketize(torch.arange(ROWS), boundaries[1:], right=True)
    graph = tg.Graph.cu_seqlens(boundaries, num_dst=ROWS, num_src=ROWS)
    # tiles do not reach over the ends of segments
    return graph, of[:, None] == of, [(0, 16), (16, 20), (20, 36), (36, 52), (52, 68), (68, 70)]


def whole():
    tiles_of = [(at, min(at + TILE, ROWS)) for at in range(0, ROWS, TILE)]
    return tg.Graph.triangular(ROWS), torch.ones(ROWS, ROWS, dtype=torch.bool), tiles_of


@pytest.mark.parametrize("kind", [whole, packed])
@pytest.mark.parametrize("noted", [(), ((0, 3),), ((1, 19), (1, 69))])
def test_tiles_with_a_note_are_done_again(kind, noted):
    graph, mask, tiles_of = kind()
    query, key, value = torch.randn(3, ROWS, HEADS, 16)
    call = Attention().lower(graph, {"key": key, "value": value}, {"query": query}, {}, scale=0.3)
    p, out = parse(call.program), torch.full((ROWS, HEADS, 16), UNWRITTEN)
    made = calls.Call(p, call.tensors, tuple(call.ints), call.scalars, [out])
    (ready,) = tiles.planned(p)[1]
    work = HopperLaunch(ready, made, tiles.spans)
    work.plan, work.splits, work.precision, work.padded = Plan(TILE, 16, 4, 1), 1, "ieee", {}
    work.padded = {x: 16 for x in ready.source().vectors}
    stages = ("count", "redo") if ready.span == "blocks" else ("redo",)
    records = [work.record(stage) for stage in stages]
    for name, (shape, dtype) in work.states.items():
        made.tensors[name] = torch.zeros(shape, dtype=dtype)
    notes = made.tensors["spoiled"].view(HEADS, ROWS)
    wanted = out.clone()
    score = torch.einsum("ihd,jhd->hij", query, key) * 0.3
    exact = score.masked_fill(~(mask & torch.ones(ROWS, ROWS).tril().bool()), -torch.inf).softmax(-1)
    exact = torch.einsum("hij,jhd->ihd", exact, value)
    for head, row in noted:
        notes[head, row] = 1
        first, end = next(t for t in tiles_of if t[0] <= row < t[1])
        wanted[first:end, head] = exact[first:end, head]
    for record in records:
        calls.run(record, ready, made, tiles.spans, {})
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
