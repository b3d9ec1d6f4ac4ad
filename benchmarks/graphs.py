"""Message passing over listed graphs beside its peers, in one run on one GPU.

`python -m benchmarks.graphs [--only WORDS ...] [--quick] [--out FOLDER]`

Every line is checked in float64 on some rows, the largest among them, before it is timed; a line that fails says why
and the others go on. `--device cpu --rows 64` tries the command out without a GPU. The published kernel of the mesh is
measured where its file was put: benchmarks/graph_peers.py says where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import command, neighbour_lists
from benchmarks.graph_peers import has_pyg
from benchmarks.graph_works import WORKS, Case, Work
from benchmarks.kinks import OtherSide
from benchmarks.measure import (
    Line,
    Setting,
    Table,
    attempt,
    check,
    copy_bandwidth,
    device_microseconds,
    figure,
    milliseconds,
    of_each,
    pair,
    peak_mib,
    relative,
    replayed,
)

ROWS = 2048  # that are checked
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # relative errors
PEERS_MAY = 2  # times that: some add hundreds of terms in 16 bits
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}  # beside twice the eager peer's
PEERS = ("tiga", "eager", "compiled", "anemoi")
COLUMNS = ("tiga", "PyG eager", "PyG compiled", "anemoi", "compiled / tiga", "anemoi / tiga", "peak MiB")
MORE = ("replayed ms", "compiled / tiga, replayed", "GB/s", "kernels ms", "of the gather bound", "error", "how it ran")
REPLAYED = ("tiga", "compiled")
QUICK = (
    *neighbour_lists.SEARCHES,
    "arxiv-shaped, gatv2, float32",
    "hub, gatv2, float32",
    "mesh, 16 x 32, float16",
    "crystal, 50k atoms, pair forces",
)


@dataclass(frozen=True)
class Figures:
    """Milliseconds without and with the backward, MiB of the latter, the largest relative error against float64.

    replayed: the times of CUDA graphs of the same calls.
    """

    forward: float
    both: float
    peak: float
    error: float
    replayed: tuple[float, float] | None = None

    @property
    def times(self) -> tuple[float, float]:
        return self.forward, self.both


class Measured:
    """A case, the rows it is checked on, and what they should be."""

    def __init__(self, setting: Setting, case: Case) -> None:
        self.setting, self.case = setting, case
        counts = torch.bincount(case.listed.dst, minlength=case.listed.num_nodes)
        some = torch.randperm(case.listed.num_nodes, device=counts.device)[: ROWS - 1]
        self.rows = torch.cat([counts.argmax()[None], some]).unique()
        out = case.tiga()
        self.grad = torch.randn_like(out)
        self.exact = case.exact(self.rows, self.grad[self.rows])
        with OtherSide():
            self.sides = max(self.errors(case.exact(self.rows, self.grad[self.rows])))
        self.traffic = case.traffic(out)

    def gradients(self, out: Tensor, grad: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.case.leaves, grad, retain_graph=keep)

    def errors(self, found: list[Tensor]) -> list[float]:
        # of a gradient that is next to nothing, as of a bias that a softmax ignores, the size of the others counts
        largest = max(x.norm() for x in self.exact[1:])
        errors = [relative(found[0], self.exact[0])]
        for x, z in zip(found[1:], self.exact[1:]):
            errors.append(((x.double() - z).norm() / torch.maximum(z.norm(), 1e-2 * largest)).item())
        return errors

    def checked(self, run: Callable[[], Tensor]) -> float:
        """The largest error. Nothing of the call lives on: leaves would remember its stream, and captured calls need
        their own."""
        out = run()
        only = torch.zeros_like(self.grad)
        only[self.rows] = self.grad[self.rows]
        return max(self.errors([out[self.rows], *self.gradients(out, only)]))

    def measure(self, name: str, run: Callable[[], Tensor]) -> Figures:
        """Errors first, then times."""
        error = self.checked(run)
        allowed = ALLOWED[self.grad.dtype] * (1 if name == "tiga" else PEERS_MAY) + self.sides
        check(f"{name} against float64", error, 0.0, allowed)
        with torch.no_grad():
            forward = milliseconds(run, self.setting)
        both = lambda: self.gradients(run(), self.grad)
        times = forward, milliseconds(both, self.setting)
        peak = peak_mib(both, self.setting)
        graphs = attempt(lambda: self.replays(run, both), self.setting)[0] if name in REPLAYED else None
        return Figures(*times, peak, error, graphs)

    def replays(self, run: Callable, both: Callable) -> tuple[float, float]:
        with torch.no_grad():
            forward = milliseconds(replayed(run, self.setting), self.setting)
        return forward, milliseconds(replayed(both, self.setting), self.setting)

    def kernels(self) -> tuple[float, float]:
        """Milliseconds of the kernels that visit edges, forward and backward."""
        if not self.setting.on_gpu:
            return float("nan"), float("nan")
        ours = lambda fn: sum(
            us for name, us in device_microseconds(fn, self.setting).items() if name[:9] == "propagate"
        )
        with torch.no_grad():
            forward = ours(self.case.tiga) / 1000
        out = self.case.tiga()
        return forward, ours(lambda: self.gradients(out, self.grad, keep=True)) / 1000


def speed(theirs: tuple | None, ours: tuple | None) -> str:
    return "" if theirs is None or ours is None else " / ".join(f"{a / b:.2f}x" for a, b in zip(theirs, ours))


def line(setting: Setting, work: Work, bandwidth: float) -> Line:
    case = work.make(setting)
    measured = Measured(setting, case)
    makers = {"tiga": lambda: case.tiga, "eager": case.peer, "compiled": case.peer_compiled}
    why = ""
    if work.anemoi is not None:
        make = work.anemoi
        makers["anemoi"] = lambda: make(case)
    found, failed = of_each(makers, lambda name: measured.measure(name, makers[name]()), setting)
    lowering = next(x.split(": ")[1] for x in case.module.explain().splitlines() if x.startswith("lowering: "))
    if setting.on_gpu and "composite" in lowering:
        raise RuntimeError(f"no kernel ran: lowering {lowering}")
    if "eager" in found:
        allowed = ROUNDING[measured.grad.dtype] + measured.sides
        check("tiga beside its eager peer", found["tiga"].error, found["eager"].error, allowed)
    kernels, said = attempt(measured.kernels, setting)
    why = f"{failed} {said}".strip()
    ours, (forward, backward) = found["tiga"], measured.traffic
    bound = forward / bandwidth / 1e6, backward / bandwidth / 1e6
    replays = {name: found[name].replayed if name in found else None for name in REPLAYED}
    ratios = tuple(ms / least for ms, least in zip(kernels, bound)) if kernels else None
    cells = [
        *[pair(found[name].times) if name in found else "" for name in PEERS],
        *[speed(found[name].times if name in found else None, ours.times) for name in ("compiled", "anemoi")],
        " / ".join(figure(found[name].peak) for name in PEERS if name in found),
        ", ".join(f"{name} {pair(replays[name])}" for name in REPLAYED if replays[name]),
        speed(replays["compiled"], replays["tiga"]),
        pair((forward / ours.forward / 1e6, (forward + backward) / ours.both / 1e6)),
        pair(kernels),
        pair(ratios),
        " / ".join(f"{found[name].error:.0e}" for name in PEERS if name in found),
        f"{len(case.listed.src)} edges, {lowering} {why}".strip(),
    ]
    return Line(tuple(cells), {name: figures.times for name, figures in found.items()})


def table(setting: Setting) -> Table:
    bandwidth = copy_bandwidth(setting)
    peers = "PyG's softmax and scatter" if has_pyg() else "torch's own operations, since PyG was not there,"
    says = (
        f"Milliseconds of the device, forward without grad / forward and backward; beside tiga {peers} on gathered "
        "rows, eager and compiled, and the published kernel of the mesh (its time includes projecting the attributes). "
        "Replayed: of CUDA graphs of the same calls, which leave out what the host does in each. "
        "Peak of forward and backward, above the inputs, of tiga / eager / compiled / anemoi. GB/s: what forward / "
        "forward and backward move if every edge reads its far end once and every node its own row, over the time. "
        f"Kernels: those that visit edges alone, forward / backward, and their time over that of the same bytes at the "
        f"{bandwidth:.0f} GB/s of a copy; rows that the cache holds make it less than 1. Error: the largest of "
        "||x - exact|| / ||exact|| over result and gradients, by rows checked in float64."
    )
    lines = {name: lambda work=work: line(setting, work, bandwidth) for name, work in WORKS.items()}
    return Table("Listed graphs", says, (*COLUMNS, *MORE), lines)


if __name__ == "__main__":
    labels = ("ms, forward", "ms, forward and backward")
    command.main("graphs", __doc__, (table, neighbour_lists.table), QUICK, labels, "log")
