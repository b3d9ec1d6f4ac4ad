"""Modules of torch's own that edge functions may have, and all that their results depend on."""

from __future__ import annotations

from torch import nn

NETWORKS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys([nn.Sequential, nn.Identity, nn.Linear], ()),
    **dict.fromkeys([nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink], ()),
    **dict.fromkeys([nn.ReLU, nn.SiLU, nn.Mish, nn.SELU, nn.Hardswish, nn.Hardsigmoid], ("inplace",)),
    **dict.fromkeys([nn.ELU, nn.CELU], ("alpha", "inplace")),
    **dict.fromkeys([nn.Hardtanh, nn.ReLU6], ("min_val", "max_val", "inplace")),
    nn.LeakyReLU: ("negative_slope", "inplace"),
    nn.GELU: ("approximate",),
    nn.Softplus: ("beta", "threshold"),
    nn.Softmax: ("dim",),
    nn.LayerNorm: ("normalized_shape", "eps"),
    nn.RMSNorm: ("normalized_shape", "eps"),
    nn.Dropout: ("p", "training", "inplace"),
}
"""Attributes that a module's own forward reads, beside its parameters and the modules in it."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
