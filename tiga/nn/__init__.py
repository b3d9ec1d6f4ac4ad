"""Layers and networks on edges."""

from tiga.nn.network import EdgeNetwork as EdgeNetwork
from tiga.nn.network import trace as trace

__all__ = ["EdgeNetwork", "trace"]
