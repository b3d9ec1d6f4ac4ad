"""Every error beside the mistake that makes it: docs/errors.md, written by `python tests/test_mistakes.py`."""

from pathlib import Path

import pytest
import torch

from mistakes import MISTAKES, error, page  # isort: skip

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"


@pytest.mark.parametrize("code", [code for codes in MISTAKES.values() for code in codes])
def test_an_error_tells_what_to_do(code):
    kind, text = error(code)
    assert kind in ("TigaError", "TraceError", "TypeError") and len(text) > 20
    assert torch.ones(2).sum() == 2  # nothing was left on


def test_the_page_holds_these_texts():
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
