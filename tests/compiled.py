"""Compiling the kernels of a program for a GPU that is not there."""

import contextlib
import os
import re
import subprocess
import tempfile

import torch

from tiga.codegen import kernels, launch, steps
from tiga.ops import tiles
from tiga.ops.propagate import allocate
from tiga.parser import parse

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}


@contextlib.contextmanager
def float32_products(asked):
    """torch's setting of them, for a while."""
    setting = torch.backends.cuda.matmul
    kept, setting.fp32_precision = setting.fp32_precision, asked
    try:
        yield
    finally:
        setting.fp32_precision = kept


def compile_for(fn, args, options, capability, number="fp32"):
    """The compiled kernel, specialised as a launch with these arguments would be; number: the type of floats."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, hints = {}, {}, {}
    for k, (name, parameter, value) in enumerate(zip(fn.arg_names, fn.params, args)):
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        ):
            constants[name], signature[name] = value, "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                hints[(k,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = number
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                hints[(k,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def asked(tool, code, *options):
    """What one of the tools in Triton's wheel says of a kernel's code."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", tool)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel")
        with open(path, "wb") as f:
            f.write(code)
        done = subprocess.run([tool, *options, path], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def used(kernel):
    """(registers, bytes of stack that ptxas spilled to) of the machine code."""
    text = asked("cuobjdump", kernel.asm["cubin"], "-res-usage")
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def usage(text, arguments, capability):
    """(plan, spilled bytes) of each kernel of a program, with the plan that a launch would choose."""
    found: dict = {}

    def runner(source, values, plan, grid, device):
        kernel = compile_for(
            kernels.load(source), values, {"num_warps": plan.warps, "num_stages": plan.stages}, capability
        )
        _, spilled = used(kernel)
        found.setdefault(source, []).append((plan, spilled))
        return kernels.Runner(lambda *arguments: None, spilled, kernel)

    p = parse(text)
    kept, launch.runner = launch.runner, runner
    steps._records.clear()
    try:
        outputs = allocate(p, arguments.tensors, arguments.ints)
        tiles.run(p, arguments.tensors, arguments.ints, arguments.scalars, outputs)
    finally:
        launch.runner = kept
        steps._records.clear()
    return [min(tried, key=lambda x: x[1]) for tried in found.values()]
