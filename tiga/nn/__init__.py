"""Layers and networks on edges."""

from tiga.nn.gat_conv import GATConv as GATConv
from tiga.nn.gatv2_conv import GATv2Conv as GATv2Conv
from tiga.nn.network import EdgeNetwork as EdgeNetwork
from tiga.nn.network import trace as trace
from tiga.nn.transformer_conv import TransformerConv as TransformerConv

__all__ = ["EdgeNetwork", "GATConv", "GATv2Conv", "TransformerConv", "trace"]
