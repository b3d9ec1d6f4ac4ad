"""python -m tiga: what is installed and what runs here; the programs inside a saved model; the cache of kernels."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tiga.codegen import cache, launch_cpp
from tiga.errors import TigaError
from tiga.parser import parse

PACKAGES = ("torch", "triton", "transformers", "matplotlib")
SKELETONS = {"tiles": "implicit graphs", "rows": "listed graphs"}
MARKS = (b"<tiga kernel ", b"tiga/codegen/")
"""What the source of a kernel of ours names, in Triton's cache, which all kernels of a user share."""
OPERATOR = re.compile(r"(?:torch\.ops\.tiga\.|tiga::)(\w+)(?:\.\w+)?")


def versions() -> list[str]:
    from tiga import __version__

    found = [f"tiga {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package}: not installed")
    return found


def devices() -> list[str]:
    found = [f"cpu: {torch.get_num_threads()} threads"]
    if not torch.cuda.is_available():
        return [*found, "cuda: " + why_no_cuda()]
    for number in range(torch.cuda.device_count()):
        held = torch.cuda.get_device_properties(number)
        found.append(f"cuda:{number}: {held.name}, sm_{held.major}{held.minor}, {held.total_memory / 2**30:.0f} GiB")
    return found


def why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "no device was found (nvidia-smi says what the driver sees)"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernels() -> list[str]:
    """Each way to run a program, and why it is not available where it is not."""
    missing = "" if has_triton() else "triton is not installed"
    if not torch.cuda.is_available():
        missing = missing or why_no_cuda()
    state = f"not available: {missing}" if missing else "available on CUDA"
    found = [f"{name} ({relations}): {state}" for name, relations in SKELETONS.items()]
    compiler = launch_cpp.compiler()
    state = f"available, compiler {compiler}" if compiler else "not available: no C++ compiler was found (set CXX)"
    return [
        *found,
        f"C++ on the CPU (large work): {state}",
        "torch operations (any graph, any program): available everywhere",
        f"torch.compile and AOTInductor: {state}",
    ]


def operators() -> list[str]:
    schemas = torch._C._jit_get_all_schemas()
    return sorted({schema.name.removeprefix("tiga::") for schema in schemas if schema.name.startswith("tiga::")})


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    if has_triton():
        import triton

        return Path(triton.knobs.cache.dir)
    return Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))


def cached(folder: Path) -> Iterator[Path]:
    """Entries of Triton's cache that are kernels of tiga."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        texts = [path for path in entry.glob("*") if path.suffix in (".source", ".ttir")] if entry.is_dir() else []
        if any(mark in path.read_bytes() for path in texts for mark in MARKS):
            yield entry


def files(folder: Path) -> Iterator[Path]:
    """All that lies in a folder of tiga's own."""
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file()) if folder.is_dir() else ()


CACHES: dict[str, tuple[Callable[[], Path], Callable[[Path], Iterator[Path]]]] = {
    "Triton kernel": (cache_folder, cached),
    "C++ file": (launch_cpp.folder, files),
    "file of tuned plans": (cache.folder, files),
}
"""What is kept on disk: where, and which entries there are tiga's."""


def held() -> Iterator[tuple[str, Path, list[Path]]]:
    for what, (folder, entries) in CACHES.items():
        yield what, folder(), list(entries(folder()))


def size_of(entries: list[Path]) -> str:
    paths = [path for entry in entries for path in (entry.rglob("*") if entry.is_dir() else (entry,))]
    total = sum(path.stat().st_size for path in paths if path.is_file())
    return f"{total / 2**20:.1f} MiB"


def report() -> str:
    sections = {
        "versions": versions(),
        "devices": devices(),
        "kernels": kernels(),
        "operators": ["torch.ops.tiga: " + ", ".join(operators())],
        "cache": [f"{folder}: {counted(len(found), what)}, {size_of(found)}" for what, folder, found in held()],
    }
    return "\n".join(line for name, lines in sections.items() for line in (name, *["  " + text for text in lines]))


def programs(path: str) -> tuple[dict[str, int], dict[str, int]]:
    """Calls of each program, and of each other operator of tiga. Read as text: nothing in the file is executed."""
    if not zipfile.is_zipfile(path):
        why = "there is no such file" if not os.path.exists(path) else "it is no archive"
        raise TigaError(f"explain {path}: {why}. Give a .pt2 file of torch.export.save or AOTInductor.")
    texts: dict[str, int] = {}
    others: dict[str, int] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                for text in strings(json.loads(archive.read(name))):
                    operator = OPERATOR.fullmatch(text)
                    if text.startswith("tiga/"):
                        texts[text] = texts.get(text, 0) + 1
                    elif operator and operator[1] != "propagate":
                        others[operator[1]] = others.get(operator[1], 0) + 1
    return texts, others


def strings(x: Any) -> Iterator[str]:
    if isinstance(x, str):
        yield x
    elif isinstance(x, (list, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from strings(part)


def explain(path: str) -> str:
    texts, others = programs(path)
    rows = [f"{path}: {counted(len(texts), 'program')} of tiga"]
    rows += [f"torch.ops.tiga.{name}: {counted(calls, 'call')}" for name, calls in others.items()]
    for number, (text, calls) in enumerate(texts.items()):
        rows += ["", f"program {number + 1}, {counted(calls, 'call')}, on CUDA: {way(text)}", text]
    return "\n".join(rows)


def counted(count: int, noun: str) -> str:
    first, of, rest = noun.partition(" of ")
    return f"{count} {first}" + "s" * (count != 1) + of + rest


def way(text: str) -> str:
    """What would run a program on CUDA."""
    p = parse(text)
    if not has_triton():
        return "torch operations (triton is not installed)"
    from tiga.ops import rows, tiles

    name, reason = ("rows", rows.planned(p).reason) if p.kind == "csr" else ("tiles", tiles.planned(p)[2])
    return f"torch operations, no kernel fits ({reason})" if reason else f"kernels ({name})"


def clear() -> str:
    lines = []
    for what, folder, entries in held():
        lines.append(f"{folder}: removed {counted(len(entries), what)}, {size_of(entries)}")
        for entry in entries:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tiga", description=__doc__)
    parser.add_argument("--clear-cache", action="store_true", help="remove what tiga compiled and tuned")
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("explain", help="print the programs inside a saved model")
    command.add_argument("file", metavar="FILE.pt2")
    given = parser.parse_args(arguments)
    try:
        if given.clear_cache:
            print(clear())
        if given.command == "explain" or not given.clear_cache:
            print(explain(given.file) if given.command == "explain" else report())
    except TigaError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
