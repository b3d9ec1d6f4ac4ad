"""Draws docs/pictures/masks.svg: the patterns of tests/masks.py as matrices. Run from anywhere."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from masks import MASKS, graph_of  # noqa: E402

from tiga.pictures import svg  # noqa: E402

COLUMNS, SIDE, WIDTH, HEIGHT, ROWS = 7, 112, 142, 152, 14
INKS = {"csr": "#b5543b", "intervals": "#2a7f62", "intervals, reversed": "#2a7f62"}


def lines_of(name: str, most: int = 24) -> list[str]:
    """At most two lines of about equal length."""
    if len(name) <= most:
        return [name]
    words = name.split()
    cut = min(range(1, len(words)), key=lambda k: abs(len(" ".join(words[:k])) - len(name) / 2))
    return [" ".join(words[:cut]), " ".join(words[cut:])]


def main() -> None:
    parts = []
    for k, mask in enumerate(MASKS):
        graph = graph_of(mask, ROWS, ROWS)
        left, top = 12 + WIDTH * (k % COLUMNS), 34 + HEIGHT * (k // COLUMNS)
        picture = svg(graph).replace("#3b4cc0", INKS.get(mask.kind, "#3b4cc0"))
        tag, _, rest = picture.partition(">")
        box = tag[tag.index("viewBox") :]
        parts.append(f'<svg x="{left}" y="{top}" width="{SIDE}" height="{SIDE}" {box}>{rest}')
        words = lines_of(mask.name)
        for line, text in enumerate(words):
            parts.append(f'<text x="{left + SIDE / 2}" y="{top - 5 - 12 * (len(words) - 1 - line)}">{text}</text>')
    height = 34 + HEIGHT * -(-len(MASKS) // COLUMNS) - 22
    width = 12 + WIDTH * COLUMNS
    key = [("#3b4cc0", "a formula"), ("#2a7f62", "one or two intervals a row"), ("#b5543b", "a list of edges")]
    legend = "".join(
        f'<rect x="{12 + 190 * k}" y="{height}" width="11" height="11" fill="{ink}"/>'
        f'<text x="{28 + 190 * k}" y="{height + 10}" text-anchor="start">{text}</text>'
        for k, (ink, text) in enumerate(key)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 22}"'
    paper = f'<rect width="{width}" height="{height + 22}" fill="#fff"/>'
    body = "\n".join(parts)
    font = 'font-family="sans-serif" font-size="10.5" text-anchor="middle"'
    text = f"{head} {font}>\n{paper}\n{body}\n{legend}\n</svg>\n"
    Path(__file__).with_name("pictures").joinpath("masks.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
