"""pytest under Triton's interpreter: each run is a process, forked from one that has imported what all of them need."""

import functools
import gc
import multiprocessing
import os
import re
import sys
import tempfile
from multiprocessing import forkserver

import pytest

# of a package that is not there nothing is imported
SHARED = ["interpreted", "torch._inductor.compile_fx", "torch_geometric.nn"]
HERE = os.path.dirname(os.path.abspath(__file__))


@functools.cache
def server():
    """Where processes are forked from. Its environment is theirs."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(SHARED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([HERE, *sys.path]))
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("OMP_NUM_THREADS", "1")  # of small matrices: threads would wait for one another
        forkserver.ensure_running()
    return found


def main(path, arguments):
    gc.freeze()
    with open(path, "w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    os.chdir(HERE)
    sys.exit(int(pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "--rootdir", HERE, "-c", os.devnull])))


def said(plugin, *arguments):
    """What tests print that run with this plugin, and pass."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "said")
        process = server().Process(target=main, args=(path, ["-p", plugin, *arguments]), daemon=True)
        process.start()
        process.join(800)
        with open(path) as file:
            text = file.read()
    assert process.exitcode == 0, text[-3000:]
    return text


def interpreted(*arguments):
    """Kernels launched and written by tests whose CPU tensors take the kernels' path."""
    found = re.search(r"kernels launched: (\d+), written: (\d+)", said("interpreted", *arguments))
    return tuple(map(int, found.groups()))
