"""A benchmark's command: its options, its tables line by line, and the dated table and plot that it leaves."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from benchmarks import plot
from benchmarks.measure import Line, Setting, Table, attempt, environment


def run(table: Table, names: list[str], setting: Setting) -> tuple[list[str], dict[str, Line]]:
    """The table as markdown, printed line by line, and its lines."""
    text, lines = ["", f"## {table.title}", "", table.says, ""], {}
    text += [f"| work | {' | '.join(table.columns)} |", "|---" * (1 + len(table.columns)) + "|"]
    print("\n".join(text), flush=True)
    for name in names:
        start = time.perf_counter()
        line, why = attempt(table.rows[name], setting)
        if line is None:
            line = Line((f"failed: {why}", *[""] * (len(table.columns) - 1)))
        lines[name] = line
        text.append(f"| {name} | {' | '.join(cell.replace('|', ' ') for cell in line.cells)} |")
        print(f"{text[-1]}  <!-- {time.perf_counter() - start:.0f} s -->", flush=True)
    return text, lines


def arguments(says: str, quick: str = "") -> argparse.ArgumentParser:
    """What every benchmark may be asked; quick: what --quick leaves out, where there is such an option."""
    parser = argparse.ArgumentParser(description=says, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=[""], nargs="+", help="lines whose name contains one of these")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", help="folder of the dated table and plot; a whole run takes benchmarks/results")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the command out")
    parser.add_argument("--rows", type=int, help="the most rows of a work, to try the command out")
    return parser


def head(subject: str, where: str) -> list[str]:
    """The first lines of a table: what it is of, the machine and versions, the command."""
    command = shlex.join(["python", "-m", f"benchmarks.{subject}", *sys.argv[1:]])
    found = [f"# {subject.capitalize()}, {datetime.date.today()}", "", where, "", f"`{command}`"]
    print("\n".join(found), flush=True)
    return found


def leave(
    subject: str,
    out: str | None,
    text: list[str],
    lines: dict[str, Line],
    where: str,
    labels: tuple[str, str],
    scale: str = "linear",
) -> None:
    """The dated table and plot, in `out`; of a run that was asked nothing, in benchmarks/results."""
    out = out or ("benchmarks/results" if len(sys.argv) == 1 else None)
    if out is None:
        return
    path = os.path.join(out, f"{subject}-{datetime.date.today()}")
    os.makedirs(out, exist_ok=True)
    with open(f"{path}.md", "w", encoding="utf-8") as f:
        f.write("\n".join(text) + "\n")
    drawing = plot.draw(lines, f"{path}.png", where, labels, scale)
    print(f"table: {path}.md\n{drawing}")


def main(
    subject: str,
    says: str,
    tables: Sequence[Callable[[Setting], Table]],
    quick: Sequence[str],
    labels: tuple[str, str] = plot.PANELS,
    scale: str = "linear",
) -> None:
    """subject: the module's name in `benchmarks`; labels: of the plot's two panels, and the scale of their bars."""
    options = arguments(says, "a few lines of each table, shorter timings").parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    setting = Setting(options.device, options.rows, 40 if options.quick else 100)
    text, drawn, start = head(subject, environment(setting)), {}, time.perf_counter()
    for make in tables:
        table = make(setting)
        names = [n for n in table.rows if any(w in n for w in options.only) and (n in quick or not options.quick)]
        if names:
            rows, lines = run(table, names, setting)
            text, drawn = text + rows, drawn | lines
    print(f"\n{time.perf_counter() - start:.0f} s", flush=True)
    leave(subject, options.out, text, drawn, environment(setting), labels, scale)
