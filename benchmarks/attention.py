"""Attention over implicit graphs beside its peers, in one run on one GPU.

`python -m benchmarks.attention [--only WORDS ...] [--quick] [--out FOLDER]`

Every line is checked on the same random data before it is timed, against float64 and against its peer; a line that
fails says why and the others go on. `--device cpu --rows 64` tries the command out without a GPU.
"""

from __future__ import annotations

from benchmarks import command, decode, pruning, small, throughput, twice

TABLES = (throughput.table, twice.table, decode.table, pruning.table, small.relation_table, small.published_table)
QUICK = (
    "D128 causal 8k",
    "softcap 30, D128 causal 8k",
    "varlen, 54 log-normal documents, D128 causal 32k",
    "double backward, bfloat16",
    "decode, 4 rows",
    "planted, causal 64k, threshold",
    "planted, causal 64k, nothing skipped",
    "relation, 54 documents of 32k",
    "published, full, N 1024 H 4 D 64",
    "published, causal, N 256 H 2 D 64",
)


if __name__ == "__main__":
    command.main("attention", __doc__, TABLES, QUICK)
