"""Lines of the rows skeleton that move features or multiply matrices: networks an edge, tables, slices.

A `cat` is not written where it is read by a linear or its gradient: these take its parts one by one, so that the part
of the owner is multiplied once a row.
"""

from __future__ import annotations

from dataclasses import replace

from tiga.codegen.lines_rows import TRITON, WHERE, Lines, Value, is_literal
from tiga.codegen.rows import Analysis, Refused
from tiga.infer import body_types
from tiga.program import Function, Line
from tiga.types import Type, compute_dtype


class Matrices(Lines):
    # Features that move.

    def lazy(self, line: Line) -> bool:
        """Whether a line is written by those that read it, where they do not read it whole."""
        readers = self.a.readers.get(line.outs[0], ())
        if line.op == "cat":
            return line.attrs == ("-1",) and all(
                (r.op == "linear" and r.args[0] == line.outs[0]) or r.attrs == ("shared", "dot") for r in readers
            )
        return line.op == "linear" and bool(readers) and all(r.op == "part" and r.attrs[0] == "-1" for r in readers)

    def parts(self, ref: str) -> list[tuple[str, str]]:
        """What a cat on the last dimension is made of, and where each begins."""
        line = self.a.defined.get(ref)
        if line is None or line.op != "cat" or not self.lazy(line):
            return [(ref, "0")]
        found, start = [], "0"
        for a in line.args:
            found += [(r, s if start == "0" else start if s == "0" else f"{start} + {s}") for r, s in self.parts(a)]
            start = self.after(start, self.a.axes(a)[-1])
        return found

    def after(self, start: str, axis: object) -> str:
        return self.size(axis) if start == "0" else f"{start} + {self.size(axis)}"

    def moved(self, line: Line, v: Value, where: str, axes: tuple, back: int) -> Value:
        """y[i] = v[where(i)] along the dimension `back` from the right, 0 where there is none."""
        shape = self.shape(v.lead, axes)
        text = f"moved({v.text}, {where}, {back}, {shape})"
        return self.new(line, v.lead, axes, v.dtype, text)

    def write_slice(self, line: Line) -> Value:
        v, (dim, start, _, step) = self.value(line.args[0]), line.attrs
        return self.moved(line, v, f"{start}, {step}, 1", self.a.axes(line.outs[0]), -int(dim))

    def write_unslice(self, line: Line) -> Value:
        v, (dim, start, length, step) = self.value(line.args[0]), line.attrs
        k = len(v.axes) + int(dim)
        v = v._replace(text=f"only({v.text}, {-int(dim)}, {length}, 0)") if v.axes[k] != 1 else v
        return self.moved(line, v, f"-({start}), 1, {step}", self.a.axes(line.outs[0]), -int(dim))

    def write_part(self, line: Line) -> Value:
        dim, k = int(line.attrs[0]), int(line.attrs[1])
        start = "0"
        for a in line.args[1 : 1 + k]:
            start = self.after(start, self.a.axes(a)[dim])
        source = self.a.defined.get(line.args[0])
        if source is not None and source.op == "linear" and self.lazy(source):
            return self.linear(line, source, start, self.a.axes(line.outs[0])[-1])
        return self.moved(line, self.value(line.args[0]), f"{start}, 1, 1", self.a.axes(line.outs[0]), -dim)

    def write_cat(self, line: Line) -> Value:
        axes, back = self.a.axes(line.outs[0]), -int(line.attrs[0])
        values = [self.value(a) for a in line.args]
        lead, dtype = max([v.lead for v in values]), compute_dtype(self.p.types[line.outs[0]].dtype)
        out, start = f"tl.zeros({self.shape(lead, axes)}, {TRITON[dtype]})", "0"
        k = len(axes) - back
        for v in values:
            own = (*axes[:k], v.axes[len(v.axes) - back], *axes[k + 1 :])
            full = f"{self.full(v, lead, own)}.to({TRITON[dtype]})"
            full = full if own[k] == 1 else f"only({full}, {back}, {self.size(own[k])}, 0)"
            out += f" + moved({full}, -({start}), 1, 1, {back}, {self.shape(lead, axes)})"
            start = self.after(start, own[k])
        return self.new(line, lead, axes, dtype, out)

    def write_reshape(self, line: Line) -> Value:
        """Features in the order they have, which padded blocks do not lie in."""
        v, axes = self.value(line.args[0]), self.a.axes(line.outs[0])
        real, into = ([a for a in sizes if a != 1] for sizes in (v.axes, axes))
        shape = self.shape(v.lead, axes)
        if not real or not into:
            return self.new(line, v.lead, axes, v.dtype, f"tl.reshape({v.text}, {shape})")
        flat, wide = (
            self.shape(v.lead, ()).rstrip("]") + ", " * bool(v.lead) + self.area(x) + "]" for x in (real, into)
        )
        padded = " or ".join([f"{self.block(a)} != {self.size(a)}" for a in dict.fromkeys([*real, *into])])
        text = f"reshaped({v.text}, {self.rearranged(real, into)}, {flat}, {wide}, {shape}, {padded})"
        return self.new(line, v.lead, axes, v.dtype, text)

    def area(self, axes: list) -> str:
        return " * ".join([self.block(a) for a in axes])

    def rearranged(self, axes: list, into: list) -> str:
        """Where each feature of the blocks `into` lies in the blocks `axes`: a name."""
        after = lambda name, all_, k: "".join([f" * {name(a)}" for a in all_[k + 1 :]])
        n, inside, _ = self.features(tuple(into))
        number = " + ".join([f"{n}_{k}" + after(self.size, into, k) for k in range(len(into))])
        name, terms = self.name("at"), []
        for k, a in enumerate(axes):
            below = after(self.size, axes, k)[3:]
            place = f"{name}_n // ({below})" if below else f"{name}_n"
            terms.append(f"{place} % {self.size(a)}" + after(self.block, axes, k))
        self.body.once.append(f"{name}_n = tl.where({inside}, {number}, 0)")
        self.body.once.append(f"{name} = {' + '.join(terms)}")
        return name

    write_reshape_like = write_reshape

    # Matrices.

    def weight(self, ref: str, rows: tuple[str, object], cols: tuple[str, object], lead: int) -> str:
        """A block [columns, rows] of a matrix (out, in), as the right factor of a product."""
        key = (ref, rows, cols, lead)
        if key not in self.weights:
            base, name = self.base(ref), self.name("w")
            s0, s1 = (self.argument(f"{base}_s{k}", "stride", ref, k) for k in (0, 1))
            (o, out), (i, into) = rows, cols
            self.factors += [out, into]
            put = getattr(self.body, WHERE[lead]).append
            put(f"{name}_o = tl.arange(0, {self.block(out)})[None, :]")
            put(f"{name}_i = tl.arange(0, {self.block(into)})[:, None]")
            at = f"({name}_i + ({i})).to(tl.int64) * {s1} + ({name}_o + ({o})).to(tl.int64) * {s0}"
            inside = f"({name}_i < {self.size(into)}) & ({name}_o < {self.size(out)})"
            wide = TRITON[compute_dtype(self.p.types[ref].dtype)]
            put(f"{name} = tl.load({base} + {at}, mask={inside}, other=0).to({wide})   # {ref}")
            self.weights[key] = name
        return self.weights[key]

    def precision(self, line: Line) -> str:
        """Of products: what rounds to 16 bits in the end needs no more than 11 of each factor."""
        return "'tf32'" if self.p.types[line.outs[0]].dtype in ("f16", "bf16") else "PRECISION"

    def write_linear(self, line: Line) -> Value:
        return self.linear(line, line, "0", self.a.axes(line.outs[0])[-1])

    def linear(self, line: Line, source: Line, start: str, out: object) -> Value:
        """The rows from `start`, as many as `out`, of a matrix, times x: the sum over x's parts."""
        x, w = source.args
        dtype = compute_dtype(self.p.types[source.outs[0]].dtype)
        terms, precision = [], self.precision(source)
        for ref, at in self.parts(x):
            v = self.value(ref)
            axis = v.axes[-1]
            text = v.text if v.dtype == dtype else f"{v.text}.to({TRITON[dtype]})"
            text = text if axis == 1 else f"only({text}, 1, {self.size(axis)}, 0)"
            axes = (*v.axes[:-1], out)
            weight = self.weight(w, (start, out), (at, axis), v.lead)
            text = f"product({text}, {weight}, {self.shape(v.lead, axes)}, {precision})"
            terms.append(self.new(line, v.lead, axes, dtype, text))
        if len(terms) == 1:
            return terms[0]
        lead, rank = max([t.lead for t in terms]), max([len(t.axes) for t in terms])
        axes = max([t.axes for t in terms], key=lambda a: sum(s != 1 for s in a))
        return self.new(line, lead, axes, dtype, " + ".join([self.at(t, lead, rank) for t in terms]))

    def write_gather(self, line: Line) -> Value:
        table, i = line.args
        v, features = self.value(i), self.a.axes(table)[1:]
        base, dtype = self.base(table), compute_dtype(self.p.types[table].dtype)
        rows = self.argument(base + "_rows", "rows", table)
        stride = self.argument(base + "_row", "row", table)
        valid = f"({v.text} >= 0) & ({v.text} < {rows})"
        if v.lead == 2:
            valid += f" & {self.live(len(v.axes))}"
        where = f"({v.text}).to(tl.int64) * {stride}"
        if [a for a in features if a != 1]:
            at, (_, inside, padded) = self.offset(table, features, 1), self.features(features)
            text = f"load_features({base}, {where}, {valid}, {at}, {inside}, {padded})"
        else:
            text = f"tl.load({base} + {where}, mask={valid}, other=0)"
        axes = (*v.axes, *features)
        wide = f"{text}.to({TRITON[dtype]})"
        return self.new(line, v.lead, axes, dtype, self.unflat(wide, v.lead, features, v.axes))

    def write_rand(self, line: Line) -> Value:
        axes = self.a.axes(line.outs[0])
        self.numbers = True
        seed, terms = self.value(line.args[0]), ["0"]
        for k, a in enumerate(axes):
            if a != 1:
                i = f"tl.arange(0, {self.block(a)}).to(tl.int64)" + "[:" + ", None" * (len(axes) - 1 - k) + "]"
                terms.append(" * ".join([i, *[self.size(b) for b in axes[k + 1 :] if b != 1]]))
        number = self.at(Value("number", 2, (), "i64"), 2, len(axes))
        text = f"hash_uniform({seed.text}, {number}, {' + '.join(terms[1:] or terms)})"
        return self.new(line, 2, axes, "f32", text)

    # Functions of the program.

    def inside(self, function: Function, known: list[Type]) -> Matrices:
        """The lines of a function, whose parameters are rows' values."""
        types = body_types(function, tuple(known), lambda a, b: None)[0]
        lines = {x.outs[0]: x for x in function.lines}
        p = replace(self.p, lines=function.lines, returns=function.returns, types=types, definitions=lines)
        inner = Matrices(Analysis(p), self.work)
        inner.a.parent, inner.axes, inner.counter = self.a.parent, self.axes, self.counter
        inner.body.once, inner.flat, inner.arguments = self.body.once, self.flat, self.arguments
        return inner

    # Sums of matrices over all edges.

    def outer_sums(self, k: int, f: Line) -> list[tuple]:
        """(accumulator, sizes of its block, where its columns begin) of each block of a sum of outer products."""
        g, x = f.args[:2]
        dtype = compute_dtype(self.p.types[f.outs[0]].dtype)
        note = " ".join([*f.attrs, *f.args])
        if f.attrs[1] == "scatter":
            return [self.scattered(k, f, dtype)]
        blocks = []
        for j, (ref, at) in enumerate(self.parts(x)):
            u, v, name = self.value(g), self.value(ref), f"all{k}_{j}"
            if v.lead == 1 and u.lead == 2 and len(u.axes) == len(v.axes) == 1:
                # of the owner's part the row is one factor: the other is summed over its edges first
                axes = u.axes
                self.row_sums.append((f"each{name}", axes, dtype))
                each = f"tl.where({self.live(1)}, {self.at(u, 2, 1, dtype)}, 0)"
                self.put(2, f"each{name} += tl.sum({each}, 1)")
                self.body.finish.append(f"{name} += outer(each{name}, {v.text}, {self.precision(f)})   # {note}")
            else:
                rank = max(len(u.axes), len(v.axes)) - 1
                mids = [(1,) * (rank + 1 - len(z.axes)) + z.axes[:-1] for z in (u, v)]
                mid = max(mids, key=lambda a: sum(s != 1 for s in a))
                rows, cols = (self.flat_rows(n, (*mid, z.axes[-1]), dtype) for n, z in ((g, u), (ref, v)))
                self.put(2, f"{name} += outer({rows}, {cols}, {self.precision(f)})   # {note}")
            self.factors += [u.axes[-1], v.axes[-1]]
            blocks.append((name, u.axes[-1], v.axes[-1], at))
        return blocks

    def flat_rows(self, ref: str, axes: tuple, dtype: str) -> str:
        """[rows x edges x heads, features] of an edge value, 0 where there is no edge, or no such head."""
        v = self.value(ref)
        text = self.full(v, 2, axes)
        if v.dtype != dtype:
            text = f"{text}.to({TRITON[dtype]})"
        for back, a in enumerate(reversed(axes[:-1]), 2):
            if a != 1:
                text = f"only({text}, {back}, {self.size(a)}, 0)"
        if not v.loaded:
            text = f"tl.where({self.live(len(axes))}, {text}, 0)"
        count = " * ".join(["R", "BLOCK_E", *[self.block(a) for a in axes[:-1] if a != 1]])
        return f"tl.reshape({text}, [{count}, {self.block(axes[-1])}])"

    def scattered(self, k: int, f: Line, dtype: str) -> tuple:
        """A table's gradient: of each edge the row it read, as one row of a matrix of 0 and 1."""
        g, i, _ = f.args
        u, v = self.value(g), self.value(i)
        out = self.a.axes(f.outs[0])
        heads = len(v.axes)
        if len(out) != 2 or len(u.axes) != heads + 1 or is_literal(v.text):
            raise Refused("the gradient of a table whose rows are not vectors")
        axes = (*v.axes, out[1])
        rows = self.flat_rows(g, axes, dtype)
        count = " * ".join(["R", "BLOCK_E", *[self.block(a) for a in v.axes if a != 1]])
        number = f"tl.reshape({self.full(v, 2, v.axes)}, [{count}, 1])"
        hit = f"({number} == tl.arange(0, {self.block(out[0])})[None, :]).to({TRITON[dtype]})"
        self.put(2, f"all{k}_0 += outer({hit}, {rows}, {self.precision(f)})   # {' '.join([*f.attrs, *f.args])}")
        self.factors += list(out)
        return (f"all{k}_0", out[0], out[1], "0")
