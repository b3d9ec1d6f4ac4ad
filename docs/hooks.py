"""Pages that mkdocs makes from files elsewhere: one for each example program, and the tables of benchmarks/results."""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*"), reverse=True)


def on_files(files, config):
    made = {f"programs/{path.stem}.md": program(path) for path in EXAMPLES}
    made["programs/index.md"] = programs()
    made["results/index.md"] = results()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for path in RESULTS:
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri == "performance.md":
        return markdown.replace("<!-- newest results -->", newest())
    return markdown


def newest() -> str:
    """The newest table of each family NAME-YYYY-MM-DD.md, as sections of one page."""
    families: dict[str, Path] = {}
    for path in RESULTS:
        if path.suffix == ".md":
            families.setdefault(path.stem[:-11], path)
    parts = []
    for _, path in sorted(families.items()):
        text = re.sub(r"^#", "##", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        parts.append(re.sub(r"\]\((?!http)", "](results/", text))
    return "\n".join(parts)


def title_of(path: Path) -> tuple[str, str]:
    """Of an example: the first line of what it says of itself, and the rest."""
    first, _, rest = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")
    return first.rstrip("."), rest.strip()


def core(path: Path) -> str:
    """The source of its program, or of its model where that is made of layers; "" where it has none."""
    text = path.read_text(encoding="utf-8")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    for base in ("tg.MessagePassing", "nn.Module"):
        for node in classes:
            if base in map(ast.unparse, node.bases):
                return ast.get_source_segment(text, node) or ""
    return ""


def program(path: Path) -> str:
    """A page of what an example is, its relation, its program, what it made and ran, and its source."""
    title, words = title_of(path)
    parts = [f"# {title}", words]
    if (ROOT / "docs" / "pictures" / f"{path.stem}.svg").exists():
        parts.append(f"![The relation: row i receives from column j](../pictures/{path.stem}.svg)")
    if core(path):
        parts.append(f"## The program\n\n```python\n{core(path)}\n```")
    artifacts = sorted((ROOT / "docs" / "artifacts").glob(f"{path.stem}-*.md"))
    if artifacts:
        parts.append("## What it made and ran\n\nWritten by `python docs/artifacts.py` where and when it says.")
    parts += [f"### On {file.stem.rpartition('-')[2]}\n\n{file.read_text(encoding='utf-8')}" for file in artifacts]
    source = path.read_text(encoding="utf-8")
    parts.append(f"## All of `examples/{path.name}`\n\n```python\n{source}```")
    return "\n\n".join(parts) + "\n"


def programs() -> str:
    rows = [f"* [{title_of(path)[0]}]({path.stem}.md): `examples/{path.name}`" for path in EXAMPLES]
    head = "# Programs\n\nEach checks itself against plain torch, on a GPU where there is one, else on the CPU."
    return "\n".join([head, "", *rows, ""])


def results() -> str:
    rows = [f"* [{path.stem}]({path.name})" for path in RESULTS if path.suffix == ".md"]
    return "\n".join(
        ["# Results", "", "Each with its versions and the command that wrote it, newest first.", "", *rows, ""]
    )
