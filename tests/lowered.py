"""What Inductor writes for a CUDA device that is not there: test_lowering.py starts this, and reads its JSON.

Nothing is run: torch is told of a device, and of no more than its code generator asks.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
import torch.cuda.random
import triton
from cases import Own
from fused import training
from programs import Attention, Rearranged, attend
from torch._dynamo import device_interface
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_function
from torch._inductor import compile_fx, config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

import tiga as tg
from tiga import inductor
from tiga.codegen import kernels
from tiga.inductor import fusion, launches
from tiga.nn import linear

op = torch.ops.tiga.propagate.default
assert compile_fx  # Inductor is there, so that tiga is asked
PROPERTIES = mock.Mock(major=9, minor=0, multi_processor_count=132, gcnArchName="", warp_size=32)
PROPERTIES.name = "a device"


class Driver(DriverBase):
    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_benchmarker(self):
        return lambda *a, **k: 0.0


class Compiled:
    """A kernel that no device runs: without spills, as ptxas says of those that are compiled here."""

    n_spills, n_regs, asm, run = 0, 64, {}, None

    def __getitem__(self, grid):
        return lambda *arguments: None


def pretend():
    triton.runtime.driver.set_active(Driver())
    there = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )
    DeviceProperties.create = lambda device: there
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0),
        "get_device_name": "a device",
        "current_stream": mock.Mock(stream_id=0, device_index=0),
        "is_current_stream_capturing": False,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *a, answer=answer: answer)
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *a: torch.zeros(16, dtype=torch.uint8)
        module.set_rng_state = lambda *a: None
    interface = device_interface.CudaInterface
    interface.is_available = staticmethod(lambda: True)
    interface.get_compute_capability = staticmethod(lambda d=None: 90)
    interface.Worker.get_device_properties = staticmethod(lambda d=None: PROPERTIES)
    torch.version.cuda = "13.0"
    fake_tensor.init_gpu_context = lambda device: None
    post_grad.lazy_init = lambda *a, **k: None
    kernels.compiled = launches.compiled = lambda *a: Compiled()
    torch.Tensor.copy_ = lambda self, x: torch.ops.aten.copy_.default(self, x)  # the method asks for the device


def written(fn, inputs, symbols, packaged=False):
    """Inductor's code of a function without gradients; inputs: (shape, order in memory, dtype); packaged: as in a
    package."""
    env, found = ShapeEnv(), {}
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    known = {n: env.create_symintnode(env.create_symbol(n, source=ConstantSource(f"n{n}")), hint=n) for n in symbols}
    sizes = lambda numbers: [known.get(n, n) for n in numbers]

    def lowered(gm, examples):
        post_grad.post_grad_passes(gm, True)
        graph, before = GraphLowering(gm, examples, shape_env=env, is_inference=True), len(env.guards)
        with V.set_graph_handler(graph), V.set_debug_handler(mock.MagicMock()), V.set_extern_kernel_nodes([]):
            graph.aot_mode = packaged
            graph.run(*examples)
            graph.aot_mode = False
            code = graph.codegen()[0].value
        found.update(code=code, guards=[str(g.expr) for g in env.guards[before:]])
        found["mutated"] = sorted(set(graph.graph_input_names) & set(graph.mutated_buffers))
        return gm

    def example(shape, order, dtype):
        made = torch.empty(sizes([shape[k] for k in order]), device="cuda", dtype=dtype)
        return made.permute([order.index(k) for k in range(len(shape))])

    inside = mock.patch.object(torch.compiler, "is_compiling", lambda: True)
    with inside, mode, config.patch(compile_threads=1), V.set_fake_mode(mode), torch.no_grad():
        args = [example(*x) for x in inputs]
        compilers = dict.fromkeys(["fw_compiler", "inference_compiler"], lowered)
        aot_function(fn, decompositions=select_decomp_table(), **compilers)(*args)
    return found


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is op:
            self.found.append(args)
        return func(*args, **(kwargs or {}))


def call(text, tensors, ints, scalars):
    """A call that was made on the CPU, as a function and its inputs."""
    inputs = [(tuple(t.shape), tuple(range(t.dim())), t.dtype) for t in tensors]
    return lambda *args: tuple(op(text, list(args), ints, scalars)), inputs, ()


def rows(n=300, edges=2000):
    """Attention over a list, forward and backward, of a graph that is prepared."""
    graph = tg.Graph.from_edge_index(torch.randint(n, (2, edges)), num_src=n, num_dst=n).prepare()
    q, k, v = (torch.randn(n, 2, 64, requires_grad=True) for _ in range(3))
    with Calls() as seen:
        attend(Attention(), graph, q, k, v).sum().backward()
    return [call(*x) for x in seen.found]


def rearranged(n=300, edges=2000):
    """Features that torch puts together at the nodes, beside a kernel."""
    graph = tg.Graph.from_edge_index(torch.randint(n, (2, edges)), num_src=n, num_dst=n).prepare()
    x, y, z = torch.randn(n, 120), torch.randn(n, 40), torch.randn(edges, 6, 3)
    with Calls() as seen:
        Rearranged()(graph=graph, src={"x": x}, dst={"x": x[:, :80], "y": y}, edge={"z": z})
    return call(*seen.found[0])


def layer(name, n=300, edges=2000):
    """Forward and backward of a layer of tg.nn over a list: its graphs, as for a GPU, and their inputs."""
    loops = {} if name == "TransformerConv" else {"add_self_loops": False}
    made, x = getattr(tg.nn, name)(128, 32, heads=4, **loops), torch.randn(n, 128, requires_grad=True)
    graph = tg.Graph.from_edge_index(torch.randint(n, (2, edges)), num_src=n, num_dst=n).prepare()
    leaves, spec = pytree.tree_flatten(graph)
    names, weights = zip(*made.named_parameters())
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]

    def fn(x, *rest):
        given = iter(rest[len(names) :])
        graph = pytree.tree_unflatten([next(given) if isinstance(t, torch.Tensor) else t for t in leaves], spec)
        return (torch.func.functional_call(made, dict(zip(names, rest)), (x, graph)),)

    compiling = mock.patch.object(torch.compiler, "is_compiling", lambda: True)
    with mock.patch.object(linear, "KERNEL_DEVICES", {"cpu"}), compiling:
        graphs = training(fn, [x, *weights, *tensors])
    for gm in graphs:
        for node in gm.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device("cuda"))
        gm.recompile()
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        yield gm.forward, [(tuple(t.shape), tuple(range(t.dim())), t.dtype) for t in values], ()


class Added(tg.MessagePassing):
    total = tg.sum()

    def edge(self, src, dst, edge):
        return self.total(src.x + src.y)


def equal_gradients(n=300, edges=2000):
    """One sum, of which two results of a call are copies."""
    graph = tg.Graph.from_edge_index(torch.randint(n, (2, edges)), num_src=n, num_dst=n).prepare()
    x, y = (torch.randn(n, 2, 64, requires_grad=True) for _ in range(2))
    with Calls() as seen:
        Added()(graph=graph, src={"x": x, "y": y}).square().sum().backward()
    return call(*seen.found[-1])


def side_by_side(call, whole):
    """A call, and what `whole` makes of it and its inputs."""
    fn, inputs, symbols = call
    return lambda *args: whole(fn, args), inputs, symbols


def flat(tensors, *others, dim=1):
    return torch.cat([*[t.flatten(1) for t in tensors], *others], dim)


def triangular(q, k, v):
    return attend(Attention(), tg.Graph.triangular(q.shape[0]), q, k, v)


def listed(x, rowptr, col):
    graph = tg.Graph.from_csr(rowptr, col, num_src=x.shape[0], num_dst=x.shape[0])
    return attend(Attention(), graph, x, x, x)


def own(x, y, w):
    return Own()(graph=tg.Graph.dense(x.shape[0]), src={"x": x}, dst={"y": y}, edge={"w": w})


def works():
    f32, i64 = torch.float32, torch.int64
    heads_first = [((3000, 2, 64), (1, 0, 2), torch.float16)] * 3
    yield "permuted", (triangular, heads_first, (3000,))
    yield "packed", (packed, [((300, 2, 64), (0, 1, 2), f32)] * 3 + [((9,), (0,), i64)], (300, 9))
    yield "listed", (listed, [((300, 2, 64), (0, 1, 2), f32), ((301,), (0,), i64), ((2000,), (0,), i64)], (2000,))
    forward, backward = rows()
    yield "rows", forward
    yield "rows, backward", backward

    for kind in ("GATConv", "GATv2Conv", "TransformerConv"):
        yield from zip((kind, f"{kind}, backward"), layer(kind))

    def beside(fn, args, *others):
        *others, last = [x.flatten(1) for x in others]
        made = fn(*args)
        return flat([made[2], made[0]], *others, last, made[1].flatten(1))

    for name, whole in {
        "gradients": lambda fn, args: flat(fn(*args)),
        "gradients and another": lambda fn, args: beside(fn, args, args[0]),
        "gradients and what is computed": lambda fn, args: beside(fn, args, args[0].exp()),
        "gradients of two dimensions of rows": lambda fn, args: torch.cat([t.view(3, 100, 128) for t in fn(*args)], -1),
        "a gradient that is read twice": lambda fn, args: (flat(made := fn(*args)), made[0] * 2),
        "a gradient that is there twice": lambda fn, args: flat([*(made := fn(*args)), made[0]]),
        "gradients and two others": lambda fn, args: beside(fn, args, args[0], args[1]),
        "gradients above each other": lambda fn, args: flat(fn(*args), dim=0),
        "gradients and what is changed": lambda fn, args: flat(
            fn(*args), args[0].flatten(1).exp().index_fill_(0, args[7], 1)
        ),
        "gradients in more bits": lambda fn, args: beside(fn, args, args[0].double()),
        "gradients and what follows from one": lambda fn, args: flat((made := fn(*args))[1:], made[0].flatten(1).exp()),
    }.items():
        yield name, side_by_side(backward, whole)
    yield "gradients, packaged", (*side_by_side(backward, lambda fn, args: flat(fn(*args))), True)
    yield "equal gradients", side_by_side(equal_gradients(), lambda fn, args: flat(fn(*args)))
    joined = lambda q, k, v, x: flat([triangular(q, k, v)], x)
    yield "a result beside another", (joined, [*heads_first, ((3000, 7), (0, 1), torch.float16)], (3000,))
    yield "rearranged", rearranged()
    wide = [((4096, 8, 128), (0, 1, 2), torch.bfloat16)] * 3
    yield "wide", (triangular, wide, ())
    yield "wide, packaged", (triangular, wide, (), True)
    yield "a user's reducer", (own, [((8, 2), (0, 1), f32)] * 2 + [((64, 2), (0, 1), f32)], ())


def packed(q, k, v, boundaries):
    return attend(Attention(), tg.Graph.cu_seqlens(boundaries, num_dst=q.shape[0], num_src=q.shape[0]), q, k, v)


if __name__ == "__main__":
    torch.set_num_threads(1)
    inductor.install()
    prepared = list(works())
    pretend()
    found = {}
    for name, work in prepared:
        said = []
        fusion.say = lambda origin, text, said=said: said.append(text)
        found[name] = {**written(*work), "said": said}
    json.dump(found, sys.stdout)
