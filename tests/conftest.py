"""What every test starts from: seeds, two threads, and caches of compilers that one run has for itself."""

import gc
import os
import tempfile

import pytest

# Before torch reads it. Caches do not key on what an operator's rules are; the processes of one run share them.
_CACHE = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="tiga_inductor_")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE.name
    os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(_CACHE.name, "extensions")
# a pool of processes that compile costs each process of tests one more that imports torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# threads that have nothing to do sleep: others run beside them, of another process, on the same cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

SHARED = {"saved", "library", "together", "found"}  # fixtures of a module that take long
LONG = ("under_the_interpreter", "by_threads", "mypy", "test_example", "extra_memory", "can_be_deleted")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items):
    # first what is made once for many tests, which no other process should take over, and make again; then what takes
    # long, so that no process is left with it at the end
    items.sort(key=lambda item: (not SHARED & set(item.fixturenames), not any(word in item.name for word in LONG)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    gc.freeze()  # what is imported by now stays: collections need not look at it


def pytest_unconfigure(config):
    if _CACHE is not None:
        _CACHE.cleanup()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
