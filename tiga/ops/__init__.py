"""What PyTorch knows of tiga: torch.ops.tiga.*"""

from tiga.ops import attention as attention
from tiga.ops import neighbours as neighbours
from tiga.ops import propagate as propagate
from tiga.ops import segments as segments
from tiga.ops import sparse as sparse
