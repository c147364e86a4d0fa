"""A small search for the tests of the surrogate: three kinds of genes, and a cost that depends on each of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.search.design_archive import DesignArchive
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.world.keyed_random import keyed_generator

GENOME = Genome(
    [
        FloatGene("length", -2.0, 6.0),
        ChoiceGene("material", ("wood", "steel", "glass")),
        FloatGene("angle", 0.0, 90.0),
        IntegerGene("plies", 1, 9),
    ]
)


def costs_of(designs: Tensor) -> Tensor:
    """Return the costs, which are least at length 3, of steel, angle 30, 4 plies."""
    best = torch.tensor([3.0, 1.0, 30.0, 4.0], dtype=torch.float64)
    off = (designs - best) / (GENOME.high - GENOME.low)
    return torch.cat([off[:, :1], off[:, 2:], 0.3 * (designs[:, 1:2] != 1.0)], 1).square().sum(1, keepdim=True)


def filled(*sizes: int, seed: int = 0, failed: Sequence[int] = ()) -> DesignArchive:
    """Return an archive of generations of these sizes, with random designs; the rows `failed` have no cost."""
    archive = DesignArchive(GENOME, 1)
    for generation, size in enumerate(sizes):
        designs = GENOME.sample(size, keyed_generator(seed, "filled", generation))
        costs = costs_of(designs)
        rows = [row - len(archive) for row in failed if 0 <= row - len(archive) < size]
        costs[rows] = torch.inf
        archive.add(designs, costs, generation, dict.fromkeys(rows, "by the test"))
    return archive
