"""Moves atoms by a potential that was trained on forces alone, and shows that their energy stays what it was.

The attention potential of `train_forces.py` becomes an ASE calculator: its forces are the exact gradient of its energy,
through the positions of the neighbour graph, so that velocity Verlet keeps the total energy but for the error of its
steps. A run fails unless the drift is below a hundredth of the mean kinetic energy, and unless half the time step
makes the total energy waver less than half as much. A run without `--small` also fails unless the forces along the way
are within a third of EMT's, which the potential was taught.
"""

import argparse

import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import units
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from tqdm import trange
from train_forces import STEPS, TAUGHT, cluster, device, train

KELVIN, FEMTOSECONDS, MOVES = 300.0, 4.0, 500


class Learned(Calculator):
    """Energies (eV) and forces (eV/A) of a potential, in float64."""

    implemented_properties = ["energy", "forces"]

    def __init__(self, potential):
        super().__init__()
        self.potential = potential.double()

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        positions = torch.tensor(self.atoms.positions, device=device, requires_grad=True)
        nickel = torch.tensor(self.atoms.numbers == 28, device=device).long()
        energy = self.potential(positions, nickel, torch.zeros_like(nickel))
        (slope,) = torch.autograd.grad(energy, positions)
        self.results = {"energy": energy.item(), "forces": -slope.cpu().numpy()}


def start(potential, random):
    """A cluster of 32 atoms, half of them nickel, at rest as a whole."""
    atoms = bulk("Cu", cubic=True, a=3.6) * (2, 2, 2)
    atoms.pbc = False
    atoms.symbols[random.permutation(len(atoms))[: len(atoms) // 2]] = "Ni"
    MaxwellBoltzmannDistribution(atoms, temperature_K=2 * KELVIN, rng=random)  # half of it becomes potential energy
    Stationary(atoms)
    atoms.calc = Learned(potential)
    return atoms


def move(atoms, femtoseconds, moves):
    """(potential, kinetic energy) of an atom, in eV, and forces' (error, size) against EMT, of every step."""
    dynamics, energies, forces = VelocityVerlet(atoms, timestep=femtoseconds * units.fs), [], []
    for _ in trange(moves, desc=f"steps of {femtoseconds} fs"):
        dynamics.run(1)
        energies.append((atoms.get_potential_energy() / len(atoms), atoms.get_kinetic_energy() / len(atoms)))
        taught = atoms.copy()
        taught.calc = EMT()
        wanted = taught.get_forces()
        forces.append((np.square(atoms.get_forces() - wanted).mean(), np.square(wanted).mean()))
    return np.array(energies), np.sqrt(np.mean(forces, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a short training, few steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    potential, _ = train(10 if args.small else STEPS, [cluster(random) for _ in range(TAUGHT)], random)
    moves = 30 if args.small else MOVES
    energies, (error, size) = move(start(potential, np.random.default_rng(1)), FEMTOSECONDS, moves)
    finer, _ = move(start(potential, np.random.default_rng(1)), FEMTOSECONDS / 2, 2 * moves)

    time, total = np.arange(1, moves + 1) * FEMTOSECONDS / 1000, energies.sum(1)
    drift = np.polyfit(time, total, 1)[0]
    wavering, kinetic = (x.sum(1).std() for x in (energies, finer)), energies[:, 1].mean()
    coarse, fine = wavering
    plt.plot(time, 1000 * (energies[:, 0] - energies[0, 0]), label="potential")
    plt.plot(time, 1000 * energies[:, 1], label="kinetic")
    plt.plot(time, 1000 * (total - energies[0, 0]), label="total", color="black")
    plt.gca().set(xlabel="ps", ylabel="meV an atom", title=f"drift {1000 * drift:.3f} meV an atom and ps")
    plt.legend()
    plt.savefig("molecular_dynamics.png")
    print(f"forces along the way: {error:.3f} eV/A from EMT's, which are {size:.3f}")
    print(
        f"energy drift: {1000 * drift:.4f} meV an atom and ps; it wavers by {1000 * coarse:.4f} meV, "
        f"at half the step by {1000 * fine:.4f}; kinetic {1000 * kinetic:.1f}"
    )
    assert abs(drift) * time[-1] < kinetic / 100
    assert fine < coarse / 2
    assert args.small or error < size / 3


if __name__ == "__main__":
    main()
