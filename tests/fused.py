"""torch.compile with Inductor's decompositions, tiga's pass over both directions, and no code generated: the graphs left."""

from __future__ import annotations

import operator

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

import tiga

propagate = torch.ops.tiga.propagate.default
FREE = ("view", "expand", "permute", "squeeze", "unsqueeze", "slice", "detach", "full", "_unsafe_view", "sym_size")


class Graphs:
    """The graphs of a compiled function: forward, then backward where there is one."""

    def __init__(self, apply=joint_graph_passes):
        self.graphs, self.apply = [], apply

    def compile(self, fn, **options):
        assert compile_fx and tiga  # Inductor is there, so that tiga's hooks are

        def keep(gm, inputs):
            gm.graph.eliminate_dead_code()
            self.graphs.append(gm.graph)
            return gm.forward

        def inference(gm, inputs):
            self.apply(gm)
            gm.recompile()
            return keep(gm, inputs)

        def cut(gm, inputs, **kwargs):
            self.apply(gm)
            gm.recompile()
            return min_cut_rematerialization_partition(gm, inputs, **kwargs)

        backend = aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            inference_compiler=inference,
            partition_fn=cut,
            decompositions=select_decomp_table,
        )
        return torch.compile(fn, backend=backend, fullgraph=True, **options)

    def calls(self, which=0):
        return [n for n in self.graphs[which].nodes if n.target is propagate]

    def programs(self, which=0):
        return [n.args[0] for n in self.calls(which)]

    def left(self, which=0):
        """The names of what remains beside the operator and computes or copies anything."""
        nodes = [n for n in self.graphs[which].nodes if n.op == "call_function"]
        named = [n.target._schema.name.split("::")[-1] for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
        assert all(isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem or "sym" in n.name or "mul" in n.name for n in nodes)
        return sorted([name for name in named if name not in FREE and name != "propagate"])
