"""The package as a stranger meets it: its two commands, its import, its tools, and the arrows between its modules."""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import tiga

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    'pip install torch==2.13.0 triton==3.6.0 "numpy<2.4" -e ".[examples]" && python examples/train_char_lm.py',
    'pip install torch==2.13.0 triton==3.6.0 "numpy<2.4" -e ".[test]" && python -m pytest -n 2 --dist worksteal',
]
# When loaded, a module imports from its own row and the rows above it; the package's __init__ stands below them all.
ROWS = [
    {"errors", "passes", "dispatch", "alike"},
    {"types", "relations", "preparation", "prune", "graph_checks", "graph_inputs"},
    {"rules", "primitives", "reducers", "layouts", "ranges", "neighbours", "periodic", "graph_algebra", "graph_tree"},
    {"program", "infer", "parser", "graph_build", "density"},
    {"builder", "graph", "graph_text"},
    {
        "field_checks",
        "derivation",
        "kept_sums",
        "adjoint",
        "tangent",
        "symbols",
        "trace",
        "fields",
        "stages",
        "functions",
        "functions_nn",
        "functions_shape",
        "functions_linear",
    },
    {"schedule", "reference_ops", "reference", "codegen"},
    {"reducer", "networks", "shortcuts", "traces", "constant_traces"},
    {"ops"},
    {"message_passing"},
    {
        "nn",
        "explain",
        "inductor",
        "testing",
        "pictures",
        "program_pictures",
        "integrations",
        "flex",
        "calibrate",
        "__main__",
    },
]
RANK = {module: rank for rank, row in enumerate(ROWS) for module in row}
LEAVES = {"nn", "explain", "inductor", "testing", "pictures", "program_pictures", "integrations", "flex", "__main__"}


def run(*command, **kwargs):
    """The finished process: fails with what it printed unless it exits 0."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_holds_each_command_once(command):
    assert README.splitlines().count(command) == 1
    assert README.count(command.rpartition("&& ")[2]) == 1


def test_readme_example_is_causal_attention():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    rows = [names[name].permute(1, 0, 2) for name in ("query", "key", "value")]
    plain = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True).permute(1, 0, 2)
    torch.testing.assert_close(names["out"], plain, rtol=1e-4, atol=1e-5)


def checkout(folder, readme):
    """A folder that holds the CI script and this README."""
    (folder / ".ci").mkdir()
    (folder / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (folder / "README.md").write_text(readme)
    (folder / "temporary").mkdir()
    return ["bash", str(folder / ".ci" / "run")], {**os.environ, "TMPDIR": str(folder / "temporary")}


@pytest.mark.parametrize("count", [0, 2])
def test_ci_refuses_a_readme_without_one_test_line(count, tmp_path):
    command, env = checkout(tmp_path, "words\n" + "python -m pytest\n" * count)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and f"it has {count} such lines" in done.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_ci_runs_the_line_in_an_environment_that_it_removes(code, tmp_path):
    line = f"python -c 'import sys; print(sys.prefix, sys.base_prefix); sys.exit({code})' && : python -m pytest"
    command, env = checkout(tmp_path, f"words\n{line}\nwords\n")
    # Standard input is closed, not empty: some runners start a job that way.
    closed = ["bash", "-c", '"$@" <&-', "bash", *command]
    done = subprocess.run(closed, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    prefix, base = done.stdout.splitlines()[-1].split()
    assert prefix != base and prefix.startswith(str(tmp_path / "temporary"))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_import_is_light():
    """After torch, in a fresh process, in less than a quarter of torch's own time, whatever the machine does beside."""
    child = """
import sys, time
first = time.process_time()
import torch
heavy = {"triton", "torch._dynamo", "torch._inductor"}
assert not heavy & set(sys.modules), "torch alone"
start = time.process_time()
import tiga
print((time.process_time() - start) / (start - first))
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    assert any(float(run(sys.executable, "-c", child)) < 0.25 for _ in range(3))


def test_ruff_is_clean():
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".")


def test_mypy_is_clean():
    with tempfile.TemporaryDirectory() as cache:
        run(sys.executable, "-m", "mypy", "--cache-dir", cache)


def test_version_is_one():
    assert f'version="{tiga.__version__}"' in (ROOT / "setup.py").read_text()
    assert f"## [{tiga.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "tiga" / "py.typed").exists()


def imports(tree, lazy=False):
    """(dotted module, whether the import waits for a call) of every import of tiga below this node."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((name.name, lazy) for name in node.names if name.name.split(".")[0] == "tiga")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "tiga":
                yield from ((f"tiga.{name.name}", lazy) for name in node.names)
            elif node.module.startswith("tiga."):
                yield node.module, lazy
        else:
            yield from imports(node, lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def arrows():
    """(importing module, imported module, lazy): the first word after `tiga.`, for every file of the package."""
    for path in sorted((ROOT / "tiga").rglob("*.py")):
        first = path.relative_to(ROOT / "tiga").with_suffix("").parts[0]
        for name, lazy in imports(ast.parse(path.read_text(encoding="utf-8"))):
            yield first, name.split(".")[1] if "." in name else "__init__", lazy


def test_every_module_has_a_row():
    paths = (ROOT / "tiga").iterdir()
    modules = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} <= set(RANK)


def test_imports_point_one_way():
    eager = {(a, b) for a, b, lazy in arrows() if not lazy and a != b and a != "__init__"}
    assert len(eager) > 10
    assert {(a, b) for a, b in eager if b not in RANK or RANK[b] > RANK[a]} == set()
    assert {(a, b) for a, b, lazy in arrows() if not lazy and b in LEAVES - {a}} == set()


def test_reference_and_codegen_never_meet():
    reference = {"schedule", "reference_ops", "reference"}
    assert {
        (a, b) for a, b, _ in arrows() if (a == "codegen" and b in reference) or (b == "codegen" and a in reference)
    } == set()


def test_only_the_gpu_marker_leaves_a_test_out():
    """No file skips a test but conftest, once, by that marker, and those that need what the test extras bring."""
    words = {"skip", "skipif", "importorskip", "xfail", "skipTest", "SkipTest", "skipIf", "skipUnless"}
    found = [
        f"{path.name}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in [getattr(node, "attr", None) or getattr(node, "name", None) or getattr(node, "id", None)]
        if name in words
    ]
    needed = [f"{name}.py: importorskip" for name in ("test_gpu_layers", "test_graph_inputs", "test_layers")]
    assert found == ["conftest.py: skip", *needed]
    assert '"torch-geometric"' in (ROOT / "setup.py").read_text()
    assert 'get_closest_marker("gpu")' in (ROOT / "tests" / "conftest.py").read_text()
    settings = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"^markers = \[\"(\w+):[^\n]*\]$", settings, re.MULTILINE) == ["gpu"]
    (options,) = re.findall(r'^addopts = "(.*)"$', settings, re.MULTILINE)
    assert options.split() == ["--strict-markers", "--strict-config", "-ra"]
