"""Writes what each example made and ran, here, into docs/artifacts/NAME-DEVICE.md, and its graph into docs/pictures.

python docs/artifacts.py [--to FOLDER] [NAME ...]: on the device that the examples choose, a GPU where there is one.
"""

import argparse
import contextlib
import datetime
import importlib.util
import io
import sys
import tempfile
import time
from pathlib import Path

import torch

import tiga as tg
from tiga.pictures import svg

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # one example may be made of another
STEPS = {"train_char_lm": "10", "train_forces": "30"}  # explain() says the same of 10 and of 400


def run(name: str) -> tuple[tg.MessagePassing, tg.Graph, str, float]:
    """The last program that an example called over edges, its graph, what it printed, and seconds in all."""
    called: list = []
    forward = tg.MessagePassing.forward

    def noted(self, graph, *args, **kwargs):
        if graph.num_edges:
            called[:] = [self, graph]
        return forward(self, graph, *args, **kwargs)

    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    example = importlib.util.module_from_spec(spec)
    small = ["--small"] if '"--small"' in path.read_text(encoding="utf-8") else []
    sys.argv = [name, *(["--steps", STEPS[name]] if name in STEPS else small)]
    printed = io.StringIO()
    tg.MessagePassing.forward = noted
    try:
        spec.loader.exec_module(example)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                example.main()
        seconds = time.perf_counter() - start
    finally:
        tg.MessagePassing.forward = forward
    return *called, printed.getvalue().strip(), seconds


def page(name: str) -> tuple[str, str, str]:
    """(device, markdown, SVG of the graph)"""
    program, graph, printed, seconds = run(name)
    device = program.last_variant.device
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    head = (
        f"{datetime.date.today()}, {where}, torch {torch.__version__}, tiga {tg.__version__}. {seconds:.1f} s in all."
    )
    blocks = {
        "It printed": printed.splitlines()[-1],
        "`graph.explain()`": graph.explain(),
        "`program.explain()`": program.explain(),
        '`program.ir("domain")`': program.ir("domain"),
    }
    if "kernel" in program.last_variant.artifacts:
        blocks['`program.ir("kernel")`'] = program.ir("kernel")
    parts = [head, *[f"{title}:\n\n```text\n{text}\n```" for title, text in blocks.items()]]
    return device, "\n\n".join(parts) + "\n", svg(graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "docs")
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in (ROOT / "examples").glob("*.py")))
    given = parser.parse_args()
    for folder in ("artifacts", "pictures"):
        (given.to / folder).mkdir(parents=True, exist_ok=True)
    for name in given.names:
        device, text, picture = page(name)
        (given.to / "artifacts" / f"{name}-{device}.md").write_text(text, encoding="utf-8")
        (given.to / "pictures" / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(name, device)


if __name__ == "__main__":
    main()
