"""What PyTorch knows of tiga: torch.ops.tiga.*"""
from tiga.ops import propagate as propagate
