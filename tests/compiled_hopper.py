"""Compiling the Gluon kernels of a program for a GPU that is not there."""

import os
import re
import subprocess
import tempfile

import torch
from compiled import _POINTERS, compile_for

from tiga.codegen import kernels, launch, launch_hopper, steps
from tiga.ops import tiles
from tiga.ops.propagate import allocate
from tiga.parser import parse


def compile_gluon(fn, args):
    """The compiled kernel, specialised as a launch with these arguments would be."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, hints = {}, {}
    for k, (name, parameter, value) in enumerate(zip(fn.arg_names, fn.params, args)):
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32"
        else:
            short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[value.base.dtype]
            signature[name] = f"tensordesc<{short}{list(value.block_shape)},{value.layout!r}>"
        known = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if known and not parameter.do_not_specialize:
            hints[(k,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn, signature, {}, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def logged(kernel):
    """What ptxas says of the kernel."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel")
        with open(path, "w") as f:
            f.write(kernel.asm["ptx"])
        asked = [tool, "-v", "--gpu-name=sm_90a", path, "-o", path + ".cubin"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stderr


def waits(sass):
    """(products that may still fly, exponentials and the like since the wait before), of each wait for products."""
    found, count = [], 0
    for row in sass.splitlines():
        count += "MUFU.EX2" in row
        wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", row)
        if wait:
            found.append((int(wait[1], 16), count))
            count = 0
    return found


class Made:
    """A kernel as launches look at it."""

    def __init__(self, kernel):
        self.log, self.asm, self.n_spills = logged(kernel), kernel.asm, 0
        self.sass = launch_hopper.machine_code(kernel.asm["cubin"])


def kernels_of(text, arguments, multiprocessors=1):
    """[(source, plan, Made or None)] of the kernels that a launch on sm_90 would take or try."""
    found = []

    def runner(source, values, plan, grid, device):
        fn = kernels.load(source)
        if "gluon" in source:
            made = Made(compile_gluon(fn, values))
        else:
            compile_for(fn, values, {"num_warps": plan.warps, "num_stages": plan.stages}, 90)
            made = None
        found.append((source, plan, made))
        return kernels.Runner(lambda *arguments: None, 0, made)

    kept = launch.runner, launch_hopper.unavailable, launch_hopper.multiprocessors
    launch.runner = runner
    launch_hopper.unavailable, launch_hopper.multiprocessors = lambda device: "", lambda device: multiprocessors
    steps._records.clear()
    p = parse(text)
    try:
        outputs = allocate(p, arguments.tensors, arguments.ints)
        reason = tiles.run(p, arguments.tensors, arguments.ints, arguments.scalars, outputs)
        assert not reason, reason
    finally:
        launch.runner, launch_hopper.unavailable, launch_hopper.multiprocessors = kept
        steps._records.clear()
    return found
