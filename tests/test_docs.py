"""The site: every python block of a page runs, in order, in one namespace; what follows as text is what it printed.

Blocks marked `.not-run` are other libraries'. The site builds offline, warnings are errors, and fetches nothing.
"""

import contextlib
import io
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from mistakes import MISTAKES  # isort: skip

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
NOT_RUN = {"coming_from.md": 2, "adding.md": 6, "masks.md": 1, "one_call.md": 1}
NOT_RUN["errors.md"] = 1 + sum(map(len, MISTAKES.values()))  # by tests/test_mistakes.py


def blocks(page):
    """(language or marks, text, whether only blank lines stand between it and the block before)."""
    text, end = page.read_text(encoding="utf-8"), 0
    for found in FENCE.finditer(text):
        yield found[2].strip(), textwrap.dedent(found[3]), text[end : found.start()].strip() == ""
        end = found.end()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    module = types.ModuleType("page_" + page.stem)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # for Dynamo, which asks for a function's globals
    printed, not_run = None, 0
    for marks, text, follows in blocks(page):
        if marks == "python":
            # an edge function's line is quoted from its source
            path = tmp_path / f"block{len(list(tmp_path.iterdir()))}.py"
            path.write_text(text)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, str(path), "exec"), module.__dict__)
            printed = out.getvalue()
        elif marks == "text" and follows and printed is not None:
            assert text == printed
            printed = None
        else:
            not_run += ".not-run" in marks
            assert ".not-run" in marks or marks in ("sh", "text", ""), f"a block of {marks!r}"
    assert not printed, f"what {page.name} prints at last is not shown"
    assert not_run == NOT_RUN.get(page.name, 0)


def test_quoted_rows_are_in_their_files():
    quoted = [(re.search(r"file=(\S+)", marks), text) for marks, text, _ in blocks(ROOT / "docs" / "adding.md")]
    assert len(quoted) == NOT_RUN["adding.md"]
    for file, text in quoted:
        source = (ROOT / file[1]).read_text(encoding="utf-8")
        assert " ".join(text.split()) in " ".join(source.split()), file[1]


def test_site_builds_and_fetches_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    names = {path.relative_to(tmp_path).as_posix() for path in pages}
    assert {"index.html", "masks.html", "programs/train_forces.html", "results/index.html"} <= names
    fetched = re.compile(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    assert {path.name: fetched.findall(path.read_text(encoding="utf-8")) for path in pages} == {
        path.name: [] for path in pages
    }
