"""What ran: how often each pass did, and what one call of a module was made of.

A pass counts itself where its work is done (`ran`), so that a result taken from a cache counts nothing; the operator
notes what a call consists of (`applied`, `running`, `visited`), cached or not. `explain` prints the notes; tests hold
them against the counts. Neither keeps a tensor alive.
"""

from __future__ import annotations

import logging
import threading

LOG = logging.getLogger("tiga")
"""At debug level: which plan a kernel was compiled with, and how each program's edges were visited."""

PASSES = {
    "trace": "the edge function ran once on traced values and left a program",
    "hoist": "of a product with joined features, those of one node's features were made once a node",
    "split": "an edge value reads a finished fold: one more program, a pass over the edges, each time",
    "batch": "vmap: one more leading feature dimension",
    "autocast": "casts to the autocast dtype were written into the program",
    "augment": "the program also returns what its derivatives read",
    "keep-sums": "forward keeps means by which no gradient visits a row's edges again",
    "tangent": "forward mode: the program of the outputs' tangents was derived",
    "verify": "the text was read and its types inferred",
    "check": "shapes, dtypes and devices were compared with the program's head",
    "interpret-blocked": "edges visited as blocks of pairs",
    "interpret-listed": "edges visited as a list",
    "emit-tiles": "kernel source was written: tiles of destinations by sources",
    "launch-tiles": "edges ran in kernels of the tiles skeleton, one for each direction of folding",
    "launch-hopper": "of these kernels some were warp-specialised ones for sm_90",
    "emit-rows": "kernel source was written: rows of a list of edges",
    "launch-rows": "edges ran in kernels of the rows skeleton, one for each direction of folding",
    "emit-cpp": "C++ source was written: rows in parallel, a loop over the edges of each",
    "compile-cpp": "the C++ compiler made a library of it",
    "launch-cpp": "edges ran in C++, one loop for each direction of folding",
    "inner-products-as-matmul": "sums of source times destination ran as matrix products",
    "weighted-sums-as-matmul": "folds of weight times field ran as matrix products",
    "segment-scan": "a reducer's own combine swept each segment edge by edge",
    "adjoint": "backward: the program of the operands' gradients was derived",
}
"""Every pass by name, in the order in which they work."""

COUNTS = dict.fromkeys(PASSES, 0)
_MOST_TEXTS = 8192
_derived: dict[str, set[str]] = {}


class Run:
    """One program as it was executed: the passes noted until the next one began, and how its edges were visited.

    most, visited: pairs held at once and in all; width: elements of edge values a pair.
    """

    __slots__ = ("most", "names", "program", "ranges", "reason", "sources", "visit", "visited", "width")

    def __init__(self, program: str) -> None:
        self.program, self.visit = program, ""
        self.reason = ""  # why no kernel ran
        self.names: set[str] = set()
        self.sources: tuple[str, ...] = ()  # of the kernels that were launched
        self.ranges = self.most = self.visited = self.width = 0


class Record:
    """What one call ran: names of passes, of them `now` those since the last program began, and the programs."""

    __slots__ = ("names", "now", "outer", "runs")

    def __init__(self) -> None:
        self.outer: Record | None = None
        self.names: set[str] = set()
        self.now = self.names
        self.runs: list[Run] = []

    def __enter__(self) -> Record:
        self.outer, _here.record = _here.record, self
        return self

    def __exit__(self, *exception: object) -> None:
        _here.record, self.outer = self.outer, None


class _Here(threading.local):
    record: Record | None = None


_here = _Here()


def ran(name: str) -> None:
    """A pass did its work."""
    COUNTS[name] += 1
    record = _here.record
    if record is not None:
        record.now.add(name)


def applied(name: str) -> None:
    """The call being recorded, if one is, consists of this pass too; its result may have come from a cache."""
    record = _here.record
    if record is not None:
        record.now.add(name)


def running(program: str) -> None:
    """A program is about to be executed."""
    record = _here.record
    if record is not None:
        run = Run(program)
        run.names.add("verify")
        record.now = run.names
        record.runs.append(run)


def kept(reason: str) -> None:
    """The program stays with torch operations, for this reason."""
    record = _here.record
    if record is not None and record.runs:
        record.runs[-1].reason = reason


def visited(name: str, pairs: int, width: int) -> None:
    """A range of destinations was visited by the pass `name`, with `pairs` pairs of `width` elements at once."""
    COUNTS[name] += 1
    LOG.debug("%s: %d pairs at once, %d elements each", name, pairs, width)
    record = _here.record
    if record is not None and record.runs:
        run = record.runs[-1]
        run.names.add(name)
        run.visit, run.width = name, width
        run.ranges += 1
        run.visited += pairs
        run.most = max(run.most, pairs)


def launched(name: str, sources: tuple[str, ...]) -> None:
    """The edges of a program ran in kernels of these sources."""
    COUNTS[name] += 1
    LOG.debug("%s: kernels launched: %d", name, len(sources))
    record = _here.record
    if record is not None and record.runs:
        run = record.runs[-1]
        run.names.add(name)
        run.visit, run.sources = name, sources


def repeated(run: Run) -> None:
    """A program was executed as it was before, in kernels: the note of then is that of now."""
    for name in run.names:
        if name != "verify":
            COUNTS[name] += 1
    if LOG.isEnabledFor(logging.DEBUG):
        LOG.debug("%s: kernels launched: %d", run.visit, len(run.sources))
    record = _here.record
    if record is not None:
        record.now = record.names  # the note is shared: nothing more is added to it
        record.runs.append(run)


def derived(name: str, program: str) -> None:
    """A program was derived from this one outside the module's own call, as backward does."""
    ran(name)
    if len(_derived) >= _MOST_TEXTS:
        _derived.clear()
    _derived.setdefault(program, set()).add(name)


def derived_from(program: str) -> frozenset[str]:
    """Passes that derived programs from this text in this process, whichever module's it is."""
    return frozenset(_derived.get(program, ()))
