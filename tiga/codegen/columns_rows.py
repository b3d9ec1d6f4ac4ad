"""Lines of the rows skeleton for maps that were taken apart (apart_rows): columns of a matrix, softmaxes of several."""

from __future__ import annotations

from tiga.codegen.lines_rows import TRITON, Value
from tiga.codegen.products_rows import Products
from tiga.codegen.rows import Analysis, Pass
from tiga.program import Line
from tiga.types import compute_dtype


class Columns(Products):
    def __init__(self, analysis: Analysis, work: Pass) -> None:
        super().__init__(analysis, work)
        self.vectors: dict[tuple, list[Value]] = {}  # by matrix and axes of a column
        self.summed: dict[str, str] = {}  # sums over a row's edges, by what is added

    def write_column(self, line: Line) -> Value:
        """Of a field of vectors the number at t."""
        ref, t = line.args[0], int(line.attrs[0])
        base, stored = self.base(ref), self.p.types[ref].dtype
        row, step = self.argument(base + "_row", "row", ref), self.argument(base + "_s0", "stride", ref, 1)
        name, lead, live = self.rows_read(ref)
        dtype = compute_dtype(stored)
        at = f"{name} * {row} + {t} * {step}" if t else f"{name} * {row}"
        text = f"tl.load({base} + {at}, mask={live}, other=0)"
        text += "" if dtype == stored else f".to({TRITON[dtype]})"
        return self.new(line, lead, (), dtype, text)._replace(loaded=lead == 2, quiet=lead == 2)

    def write_vector(self, line: Line) -> Value:
        """A column of a matrix, whose block is read once, by rows, and is divided among the threads then."""
        ref, axes = line.args[0], self.a.axes(line.outs[0])
        if (ref, axes) not in self.vectors:
            self.vectors[ref, axes] = self.matrix_columns(ref, axes, int(line.attrs[1]))
        return self.vectors[ref, axes][int(line.attrs[0])]

    def matrix_columns(self, ref: str, axes: tuple, count: int) -> list[Value]:
        base, stored, put = self.base(ref), self.p.types[ref].dtype, self.body.once.append
        s0, s1 = (self.argument(f"{base}_s{k}", "stride", ref, k) for k in (0, 1))
        inside, wide = self.features(axes)[1], power_of_two(count)
        rows, name, dtype = self.area([a for a in axes if a != 1]), self.name("w"), compute_dtype(stored)
        put(f"{name}_t = tl.arange(0, {wide})[None, :]")
        at = f"({self.packed(axes)}).to(tl.int64)[:, None] * {s0} + {name}_t * {s1}"
        put(f"{name} = tl.load({base} + {at}, mask={inside}[:, None] & ({name}_t < {count}), other=0)   # {ref}")
        found: dict[int, Value] = {}

        def halves(block: str, width: int, first: int, step: int) -> None:
            """Of a block the columns first, first + step, ..."""
            if width == 1:
                text = f"tl.reshape({block}, [{rows}])" + ("" if dtype == stored else f".to({TRITON[dtype]})")
                put(f"{name}_{first} = {self.unflat(text, 0, axes)}")
                found[first] = Value(f"{name}_{first}", 0, axes, dtype)
                return
            even, odd = (f"{name}_{at}_{step * 2}" for at in (first, first + step))
            put(f"{even}, {odd} = tl.split(tl.reshape({block}, [{rows}, {width // 2}, 2]))")
            halves(even, width // 2, first, step * 2)
            if first + step < count:
                halves(odd, width // 2, first + step, step * 2)

        halves(name, wide, 0, 1)
        return [found[t] for t in range(count)]

    def write_stack(self, line: Line) -> Value:
        """Values of an edge as columns of one."""
        axes, dtype = self.a.axes(line.outs[0]), compute_dtype(self.p.types[line.outs[0]].dtype)
        texts = [self.full(self.value(a), 2, axes[:-1]) + f".to({TRITON[dtype]})" for a in line.args]
        return self.new(line, 2, axes, dtype, stacked(texts, self.shape(2, axes[:-1])[1:-1]))

    def write_some(self, line: Line) -> Value:
        """A row's value, 0 where it has no edges, whatever that is."""
        v = self.value(line.args[0])
        return self.new(line, 1, v.axes, v.dtype, f"rows_only({v.text}, entries)" if self.ending == "whole" else v.text)

    # Softmaxes of several values.

    def weighed(self, f: Line) -> list[tuple]:
        """The axes of what is kept of each value beside the first."""
        score = self.a.axes(f.args[0])
        found = []
        for ref, out in zip(f.args[2:], f.outs[2:]):
            own = self.joined(self.split(f, ref)[0], len(self.a.axes(out)))
            score = score + (1,) * (len(own) - len(score))
            found.append(tuple([a if b == 1 else b for a, b in zip(own, score)]))
        return found

    def softmax_of_several(self, k: int, f: Line, states: tuple) -> None:
        put, dtype, rank = self.body.edge.append, states[0].dtype, len(states[2].axes)
        score, note = self.value(f.args[0]), " ".join([*f.attrs, *f.args])
        put(f"score{k} = tl.where({self.live(rank)}, {self.at(score, 2, rank, dtype)}, float('-inf'))")
        peak, total = states[0].name, states[1].name
        put(f"{peak}, {total}, keep{k}, weight{k} = softmax_weights(score{k}, {peak}, {total})   # reduce {note}")
        for i, s in enumerate(states[2:]):
            ref = f.args[1 + i]
            x = self.product_of(self.split(f, ref)[0], dtype, rank) if i else self.masked(ref, dtype, rank)
            put(f"{s.name} = {s.name} * keep{k} + tl.sum(weight{k} * {x}, 1)")

    def merge_of_several(self, k: int, states: tuple) -> list[str]:
        peak, total = states[0].name, states[1].name
        theirs = f"{peak}_of, {total}_of, {peak}, {total}"
        rows = [f"{peak}, {total}, keep{k}, weight{k} = weights_merge({theirs})"]
        return rows + [f"{s.name} = {s.name} * keep{k} + tl.sum(weight{k} * {s.name}_of, 1)" for s in states[2:]]

    # The gradient of a matrix.

    def columns(self, k: int, f: Line) -> tuple[list[str], list[str]]:
        """Sums over all edges, column by column: of what a row's edges share, once a row."""
        dtype, count = compute_dtype(self.p.types[f.outs[0]].dtype), int(f.attrs[2])
        terms, begin, names = len(f.args) // count, [], []
        axes = self.a.axes(f.args[0])
        note = " ".join([*f.attrs[:2], f.outs[0]])
        added: list[str] = []
        for t in range(count):
            name = f"all{k}_{t}"
            names.append(name)
            begin.append(f"{name} = tl.zeros({self.shape(1, axes)}, {TRITON[dtype]})")
            for ref in f.args[t * terms : (t + 1) * terms]:
                edge, common = self.split(f, ref)
                own = self.joined(edge, len(axes))
                x = self.product_of(edge, dtype, len(axes))
                if not common:
                    self.body.edge.append(f"{name} = plus({name}, {x})   # {note}")
                    continue
                if x not in self.summed:
                    self.summed[x] = self.name("each")
                    self.row_sums.append((self.summed[x], own, dtype))
                    self.body.edge.append(f"{self.summed[x]} = plus({self.summed[x]}, {x})   # {note}")
                texts = [self.at(self.value(r), 1, len(axes), dtype) for r in common]
                each = self.at(Value(self.summed[x], 1, own, dtype), 1, len(axes))
                added.append(f"    {name} = added({name}, {each}, {' * '.join(texts)}, entries)   # {note}")
        if added:
            self.body.finish += ["if tl.max(entries, 0) > 0:", *added]
        real = [a for a in axes if a != 1]
        rows, wide = self.area(real), power_of_two(count)
        base = self.argument(f"all{k}_parts", "parts", f.outs[0])
        flat = [f"tl.reshape(tl.sum({name}, 0), [{rows}])" for name in names]
        out = f"tl.program_id(0).to(tl.int64) * {self.width(axes, 'D')} + ({self.packed(axes)})"
        column = f"tl.arange(0, {wide})[None, :]"
        inside = f"{self.features(axes)[1]}[:, None] & ({column} < {count})"
        text = stacked(flat, rows)
        return begin, [f"tl.store({base} + ({out})[:, None] * {count} + {column}, {text}, mask={inside})"]

    def width(self, axes: tuple, letter: str = "B") -> str:
        real = [self.block(a, letter) for a in axes if a != 1]
        return "(" + " * ".join(real) + ")" if real else "1"


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def stacked(texts: list[str], shape: str) -> str:
    """Blocks of a shape as one with another dimension, of a power of two: the last block stands for what pads it."""
    wide = power_of_two(len(texts))
    texts = [*texts, *texts[-1:] * (wide - len(texts))]
    if wide == 1:
        return f"tl.reshape({texts[0]}, [{shape}, 1])"
    return f"tl.reshape(tl.join({stacked(texts[::2], shape)}, {stacked(texts[1::2], shape)}), [{shape}, {wide}])"
