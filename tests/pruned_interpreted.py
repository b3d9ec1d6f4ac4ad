"""Tests of skipped tiles under Triton's interpreter: test_pruning.py starts them with `-p interpreted`."""

import pruning
import test_gpu_pruning
import test_gpu_sample

from tiga.codegen import emit_pruned

test_gpu_pruning.DEVICE = test_gpu_sample.DEVICE = "cpu"
test_gpu_pruning.TILE, test_gpu_pruning.ROWS, test_gpu_pruning.WIDTH = (16, 16), 70, 16

emit_pruned.PROBE = 1  # of few tiles
emit_pruned.TOGETHER = pruning.TOGETHER = 32

from test_gpu_pruning import *  # noqa: E402,F403

pytestmark = []
del test_a_captured_call_reports_each_replay  # noqa: F821
