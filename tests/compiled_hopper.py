"""Compiling the Gluon kernels of a program for a GPU that is not there."""

import re

import torch
from compiled import _POINTERS, asked, compile_for

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
    return asked("ptxas", kernel.asm["ptx"].encode(), "-v", "--gpu-name=sm_90a", "-o", "kernel.cubin")


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
