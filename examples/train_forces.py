"""Trains an attention potential on forces of copper-nickel clusters: second derivatives through the positions.

The energy of an atom is read from softmax attention over its neighbours within a cutoff and from the log of the
softmax's total (a log density); forces, to learn from ASE's EMT, are minus its gradient, and their loss differentiates
that again. A run of 600 steps or more fails unless the error on held-out clusters is below a third of predicting
zero's, a shorter one unless it is below that; each fails unless a force agrees with a difference of energies.
"""

import argparse

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase.build import bulk
from ase.calculators.emt import EMT
from torch import nn
from tqdm import trange

import tiga as tg

STEPS, TAUGHT, HELD_OUT, BATCH, CUTOFF, KINDS, RADIAL, HEADS, RATE = 600, 120, 30, 6, 4.5, 8, 12, 16, 1e-2
device = "cuda" if torch.cuda.is_available() else "cpu"


class Neighbours(tg.MessagePassing):
    """A network of distance and both kinds scores each atom nearby; weights fade out at the cutoff."""

    reducer = tg.online_softmax(return_lse=True)

    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.linspace(1.5, CUTOFF, RADIAL))
        width = RADIAL + 2 * KINDS
        self.score = tg.nn.trace(nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, HEADS)))

    def edge(self, src, dst, edge):
        distance = edge.distance.unsqueeze(-1)
        radial = torch.exp(-8 * (distance - self.centres) ** 2)
        fade = (1 - (distance / CUTOFF) ** 2).clamp(min=1e-6)
        return self.reducer(self.score(radial, src.kind, dst.kind) + 2 * torch.log(fade), src.value)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.value, self.neighbours = nn.Embedding(2, KINDS), nn.Embedding(2, HEADS), Neighbours()
        self.energy = nn.Sequential(nn.Linear(2 * HEADS + KINDS, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, positions, nickel, batch):
        """The sum of all energies, in eV: clusters do not see one another."""
        graph = tg.Graph.radius(positions, CUTOFF, batch=batch)
        kind = self.kind(nickel)
        src = {"kind": kind, "value": self.value(nickel)}
        out, lse = self.neighbours(graph=graph, src=src, dst={"kind": kind})
        return self.energy(torch.cat([out, lse, kind], dim=-1)).sum()

    def forces(self, positions, nickel, batch):
        positions = positions.detach().requires_grad_()
        return -torch.autograd.grad(self(positions, nickel, batch), positions, create_graph=True)[0]


def cluster(random):
    """A rattled block of fcc copper and nickel: positions (Angstrom), which atoms are nickel, EMT's forces (eV/A)."""
    atoms = bulk("Cu", cubic=True, a=random.uniform(3.5, 3.7)) * random.integers(1, 4, size=3)
    atoms.pbc, atoms.calc = False, EMT()
    atoms.symbols[random.random(len(atoms)) < 0.5] = "Ni"
    atoms.positions += random.normal(scale=random.uniform(0.05, 0.2), size=(len(atoms), 3))
    fields = atoms.positions, atoms.numbers == 28, atoms.get_forces()
    return [torch.tensor(x, dtype=y, device=device) for x, y in zip(fields, (torch.float32, torch.long, torch.float32))]


def pack(clusters):
    batch = torch.cat([torch.full((len(nickel),), i, device=device) for i, (_, nickel, _) in enumerate(clusters)])
    positions, nickel, forces = (torch.cat(field) for field in zip(*clusters))
    return (positions, nickel, batch), forces


def train(steps, taught, random):
    """A potential, and its error on forces (eV/A) at every step."""
    model, errors = Potential().to(device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in (bar := trange(steps)):
        inputs, wanted = pack([taught[i] for i in random.integers(len(taught), size=BATCH)])
        loss = (model.forces(*inputs) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        errors.append(loss.item() ** 0.5)
        bar.set_postfix(error=errors[-1])
    return model, errors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    args, random = parser.parse_args(), np.random.default_rng(0)
    torch.manual_seed(0)
    taught, held_out = ([cluster(random) for _ in range(count)] for count in (TAUGHT, HELD_OUT))
    model, errors = train(args.steps, taught, random)
    inputs, wanted = pack(held_out)
    error, zero = (x.square().mean().sqrt().item() for x in (model.forces(*inputs) - wanted, wanted))
    positions, nickel, batch = pack(held_out[:1])[0]
    positions, step = positions.double(), torch.zeros_like(positions, dtype=torch.float64)
    step[0, 0] = 1e-3
    force = model.double().forces(positions, nickel, batch)[0, 0].item()
    difference = (model(positions - step, nickel, batch) - model(positions + step, nickel, batch)).item() / 2e-3
    print(f"held out: {error:.3f} eV/A, zero's {zero:.3f}; a force {force:.5f}, by differences {difference:.5f}")
    plt.semilogy(errors)
    plt.hlines([zero / 3, error], 0, args.steps, colors=["gray", "black"])
    plt.gca().set(xlabel="step", ylabel="force error, eV/A", title=f"held out {error:.3f} (black)")
    plt.savefig("train_forces.png")
    assert abs(force - difference) < 1e-3
    assert error < (zero / 3 if args.steps >= STEPS else zero)


if __name__ == "__main__":
    main()
