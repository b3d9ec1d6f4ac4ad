"""Work on nodes that no kernel does: lines of a program before the edges are visited, and after them, by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiga.codegen.tape import Tape
from tiga.program import Line
from tiga.reference import Run
from tiga.reference_ops import fold_rows


class Whole:
    """All destinations at once: node values need no ranges."""

    lead = 1

    def __init__(self, rows: int) -> None:
        self.rows = (0, rows)


class Nodes(Run):
    """Values of a program's nodes by name; who visits the edges adds what their folds give."""

    numbers: dict[str, float]
    whole: Whole
    tape: Tape | None = None

    def value(self, ref: str, layout: Any) -> Tensor:
        if ref in self.numbers and ref not in self.fields:
            self.fields[ref] = torch.full((), self.numbers[ref], dtype=torch.float64, device=self.device)
            if self.tape is not None:
                self.tape.filled(self.fields[ref], ref)
        return super().value(ref, layout)

    def node(self, line: Line) -> None:
        out = line.outs[0]
        if line.op == "reduce":
            rows = [self.value(a, self.whole) for a in line.args]
            self.fields[out] = fold_rows(line, rows, self.p, self.zeros(out))
        else:
            x = self.compute(line, self.whole)
            (self.here if self.p.types[out].place == "dst" else self.fields)[out] = x

    def held(self, ref: str) -> Tensor:
        t = self.here.get(ref)
        return self.fields[ref] if t is None else t
