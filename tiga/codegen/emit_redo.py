"""Source of a kernel of the tiles skeleton that does again what another skeleton noted as no number, with care."""

from __future__ import annotations

from tiga.codegen.emit_tiles import Emitter

_RELATION = "prefix, own_bounds, other_bounds, block_low, block_high, num_blocks, num_own, num_other, False"
FLAGS = 2048  # rows that are looked at at a time


class RedoEmitter(Emitter):
    """A whole work, of those tiles of owners in which a row is noted in `spoiled`, [heads, owners].

    A program has some tiles of neighbouring rows. It looks at all of their notes before it looks at any tile.
    """

    inside = 0
    programs = "num_tiles"

    def put(self, depth: int, text: str) -> None:
        super().put(depth + self.inside, text)

    def read_parameters(self) -> None:
        self.parameter("spoiled", "spoiled")
        self.parameter("num_tiles", "num_tiles")
        super().read_parameters()

    def signature(self) -> None:
        self.put(0, "@triton.jit")
        self.put(0, f"def redo(program, {self.names_of_arguments()}):")

    def placed(self, tiles: str, heads: str) -> str:
        return "slot, head, split = program % (num_tiles // num_heads), program // (num_tiles // num_heads), 0"

    def where(self) -> None:
        super().where()
        rows = "spoiled + tl.cast(head, tl.int64) * num_own + own"
        self.put(1, f"if tl.max(tl.load({rows}, mask=live_own, other=0).to(tl.int32)) > 0:")
        self.inside = 1

    def finish(self) -> None:
        super().finish()
        self.inside = 0
        self.rows += ["", ""]
        super().signature()
        put = self.put
        put(1, "each = tl.cdiv(num_tiles, tl.num_programs(0))")
        put(1, "first = tl.program_id(0) * each")
        put(1, "end = tl.minimum(first + each, num_tiles)")
        put(1, "tiles = num_tiles // num_heads")
        put(1, "begin_row = tl.cast(first // tiles, tl.int64) * num_own")
        put(1, "end_row = tl.cast((end - 1) // tiles, tl.int64) * num_own")
        if self.span == "blocks":
            for name, at, tile in (("begin", "first", "tile"), ("end", "(end - 1)", "(tile + 1)")):
                put(1, f"tile, of_block, past_block, {', '.join('____')} = find_block({at} % tiles, {_RELATION})")
                put(1, f"{name}_row += tl.minimum(of_block + {tile} * BLOCK_M, past_block)")
        else:
            put(1, "begin_row += first % tiles * BLOCK_M")
            put(1, "end_row += tl.minimum(((end - 1) % tiles + 1) * BLOCK_M, num_own)")
        put(1, "found = tl.full((), 0, tl.int32)")
        put(1, f"for at in tl.range(begin_row, tl.where(first < end, end_row, begin_row), {FLAGS}):")
        put(2, f"row = at + tl.arange(0, {FLAGS})")
        put(2, "found |= tl.max(tl.load(spoiled + row, mask=row < end_row, other=0).to(tl.int32))")
        put(1, "if found > 0:")
        put(2, "for program in tl.range(first, end, num_stages=1):")
        put(3, f"redo(program, {', '.join([q.name for q in self.parameters])})")
