"""Pictures of programs: graphviz text, and HTML of programs and of what explain() says."""

from __future__ import annotations

from html import escape
from typing import Any

from tiga.parser import parse
from tiga.program import Line, Program, read_number

COLOURS = {"src": "#d6e4ff", "dst": "#ffe0cc", "edge": "#d9f2d9", "shared": "#ececec"}
"""A value's colour says where it lives."""


def dot(name: str, texts: tuple[str, ...]) -> str:
    """The programs as one graphviz digraph: a box an operand, an ellipse a line, coloured by the place of its value."""
    rows = [
        f"digraph {_quoted(name)} {{",
        '  graph [fontname="Helvetica", fontsize=12];',
        '  node [style=filled, fontname="Helvetica", fontsize=11];',
        '  edge [color="#666666", arrowsize=0.7];',
    ]
    for number, text in enumerate(texts):
        program = parse(text)
        title = program.kind + (" reversed" if program.reverse else "")
        if len(texts) > 1:
            title = f"program {number + 1} of {len(texts)}: {title}"
        rows += [f"  subgraph cluster_{number} {{", f"    label={_quoted(title)};"]
        rows += ["    " + row for row in _nodes(program, f"p{number}_")]
        rows.append("  }")
    return "\n".join([*rows, "}"])


def _nodes(p: Program, prefix: str) -> list[str]:
    rows: list[str] = []
    names: dict[str, str] = {}

    def node(label: str, place: str, shape: str, refs: tuple[str, ...]) -> str:
        key = f"{prefix}{len(rows)}"
        names.update({ref: key for ref in refs})
        rows.append(f"{key} [label={_quoted(label)}, shape={shape}, fillcolor={_quoted(COLOURS[place])}];")
        return key

    for operand in p.operands:
        features = f"{operand.dtype} [{', '.join(map(str, operand.sizes))}]"
        node(f"{operand.ref}\n{features}", operand.place, "box", (operand.ref,))
    for scalar in p.scalars:
        node(scalar, "shared", "box", (scalar,))
    arrows = []
    for line in p.lines:
        folded = line.op in ("reduce", "scan")
        key = node(_label(p, line), p.types[line.outs[0]].place, "doubleoctagon" if folded else "ellipse", line.outs)
        arrows += [f"{names[a]} -> {key};" for a in line.args if a in names and names[a] != key]
    for position, ref in enumerate(p.returns):
        key = node("return" if len(p.returns) == 1 else f"return {position}", p.types[ref].place, "house", ())
        arrows.append(f"{names[ref]} -> {key};")
    return rows + arrows


def _label(p: Program, line: Line) -> str:
    """The operation, with the arguments that are no values of the program."""
    words = [line.op, *line.attrs]
    for word in line.args:
        if word not in p.types:
            number = read_number(word)
            words.append(word if number is None else f"{number:g}" if isinstance(number, float) else str(number))
    return " ".join(words)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def listing(text: str) -> str:
    """A program as HTML: its lines, each in the colour of the place of what it gives."""
    program = parse(text)
    place = {f"{', '.join(line.outs)} = ": program.types[line.outs[0]].place for line in program.lines}
    place |= {f"operand {number} ": operand.place for number, operand in enumerate(program.operands)}
    rows = []
    for row in text.split("\n"):
        (colour,) = [COLOURS[p] for start, p in place.items() if row.startswith(start)] or ["transparent"]
        rows.append(f'<span style="background:{colour};color:#111">{escape(row)}</span>')
    key = " ".join(f'<span style="background:{c};color:#111">&nbsp;{p}&nbsp;</span>' for p, c in COLOURS.items())
    return f'<div><small>{key}</small><pre style="line-height:1.4">{chr(10).join(rows)}</pre></div>'


def explanation(text: str) -> str:
    """What explain() says as a table; other text as it is."""
    title, *rows = text.split("\n")
    if not title.startswith("### "):
        return f"<pre>{escape(text)}</pre>"
    cells: list[str] = []
    rest: list[str] = []
    for row in rows:
        name, colon, words = row.partition(": ")
        if colon and not rest and not row.startswith((" ", "program ")):
            cells.append(f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>")
        else:
            rest.append(row)
    more = f"<pre>{escape(chr(10).join(rest))}</pre>" if rest else ""
    return f"<div><b>{escape(title[4:])}</b><table>{''.join(cells)}</table>{more}</div>"


def module(instance: Any) -> str:
    """A module's last call: what explain() says, and its programs."""
    from tiga.explain import explain, last_variant

    if "_variants" not in instance.__dict__:
        return f"<pre>{escape(repr(instance))}</pre>"
    programs = "".join(map(listing, last_variant(instance).programs))
    table = explanation(explain(instance).split("\nprogram 1 of ")[0])
    return f"{table}<details><summary>program</summary>{programs}</details>"
