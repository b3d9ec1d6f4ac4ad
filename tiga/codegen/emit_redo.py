"""Source of a kernel of the tiles skeleton that does again what another skeleton noted as no number, with care."""

from __future__ import annotations

from tiga.codegen.emit_tiles import Emitter


class RedoEmitter(Emitter):
    """A whole work, of those tiles of owners in which a row is noted in `spoiled`, [heads, owners]."""

    def read_parameters(self) -> None:
        self.parameter("spoiled", "spoiled")
        super().read_parameters()

    def where(self) -> None:
        super().where()
        rows = "spoiled + tl.cast(head, tl.int64) * num_own + own"
        self.put(1, f"if tl.max(tl.load({rows}, mask=live_own, other=0).to(tl.int32)) == 0:")
        self.put(2, "return")
