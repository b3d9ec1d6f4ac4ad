"""A function's graphs as Inductor's passes over both directions leave them, tiga's among them; no code is generated."""

from __future__ import annotations

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

import tiga

propagate = torch.ops.tiga.propagate.default
FREE = ("view", "expand", "permute", "squeeze", "unsqueeze", "slice", "detach", "full", "_unsafe_view", "sym_size")
CHECKS = ("_assert_tensor_metadata",)
assert compile_fx and tiga  # Inductor is there, so that tiga installs its pass


def passed(gm):
    joint_graph_passes(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def left(graph):
    """The names of what remains beside the operator and computes or copies anything."""
    targets = [n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target != propagate]
    named = [target._schema.name.split("::")[-1] for target in targets]
    return sorted([name for name in named if name not in FREE + CHECKS])


def programs(graph):
    return [n.args[0] for n in graph.nodes if n.target is propagate]


def inference(fn, args):
    """The function's graph, without gradients."""
    return passed(aot_export_joint_simple(fn, args, trace_joint=False, decompositions=select_decomp_table()))


def training(fn, args):
    """Forward and backward of a function that gives a tuple, cut in two as for training."""
    joint = aot_export_joint_simple(fn, args, trace_joint=True, decompositions=select_decomp_table())
    outputs = fn(*args)
    primals = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    return min_cut_rematerialization_partition(passed(joint), primals, num_fwd_outputs=len(outputs))


def run(forward, backward, args, weights):
    """Results, and the gradients of their sum weighted so."""
    count = len(weights)
    made = forward(*args)
    return list(made[:count]), list(backward(*made[count:], *weights))


def compiling(graphs, **options):
    """torch.compile with these passes; the graphs that it makes are appended, forward before backward."""

    def keep(gm, inputs):
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def whole(gm, inputs):
        return keep(passed(gm), inputs)

    def cut(gm, inputs, **kwargs):
        return min_cut_rematerialization_partition(passed(gm), inputs, **kwargs)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        inference_compiler=whole,
        partition_fn=cut,
        decompositions=select_decomp_table,
    )
    return lambda fn: torch.compile(fn, backend=backend, fullgraph=True, **options)
