"""How new designs come from old ones: sampling, tournament, crossover by groups, mutation.

Each is a function of tables of designs, as `genome.py` has them, and of a stream that it draws from.
"""

import torch
from torch import Tensor

from lockstep.search.genome import Genome

_NEARNESS = 5  # of a blend to its parent: the larger, the nearer; the distribution's index


def stratified_sample(genome: Genome, count: int, generator: torch.Generator) -> Tensor:
    """So many designs over the whole space, one in each of so many slices of every gene (a latin hypercube)."""
    slices = _rand((count, len(genome)), generator).argsort(dim=0, stable=True)
    within = _rand((count, len(genome)), generator)
    return genome.spread((slices + within) / max(count, 1))


def tournament(num_parents: int, count: int, size: int, generator: torch.Generator) -> Tensor:
    """The rows of `count` winners. Parents stand best first, so the best of some drawn at random is the lowest row."""
    return torch.randint(num_parents, (count, size), generator=generator).amin(1)


def crossover(genome: Genome, first: Tensor, second: Tensor, blend_rate: float, generator: torch.Generator) -> Tensor:
    """A child of each pair: every group is one or the other parent's or, with a probability of `blend_rate`, near it.

    A group's genes travel together, from the same parent and equally far from it; a gene without a group travels alone.
    How far goes by how far the parents are apart: the distribution is that of simulated binary crossover (Deb and
    Agrawal). Choices are always one or the other parent's.
    """
    shape = (len(first), genome.num_travellers)
    share = torch.randint(2, shape, generator=generator).double()  # the second parent's
    is_blend = _rand(shape, generator) < blend_rate
    drawn = _rand((int(is_blend.sum()),), generator)
    factor = torch.where(drawn < 0.5, 2 * drawn, 0.5 / (1 - drawn)) ** (1 / (_NEARNESS + 1))
    share[is_blend] = 0.5 + (share[is_blend] - 0.5) * factor
    share = share[:, genome.traveller_of_gene]
    share = torch.where(genome.is_choice, (share > 0.5).double(), share)
    return genome.repair(torch.lerp(first, second, share))


def mutate(
    genome: Genome,
    designs: Tensor,
    must: Tensor,
    rate: float,
    wide: float,
    narrow: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Genes change with a probability of `rate`; where a design `must`, at least one of its genes does.

    Numbers move by a Gaussian step: half of them by `wide`, its deviation as a share of the gene's range, half by the
    gene's own `narrow`; whole numbers move by one at least. A choice becomes any of its other options.
    """
    chance = torch.where(genome.high > genome.low, _rand(designs.shape, generator), torch.inf)
    chosen = chance < rate
    chosen[must] |= chance[must] == chance[must].amin(1, keepdim=True)
    rows, genes = chosen.nonzero(as_tuple=True)
    low, high, old = genome.low[genes], genome.high[genes], designs[rows, genes]
    strength = torch.where(_rand(rows.shape, generator) < 0.5, wide, narrow[genes])
    step = torch.randn(len(rows), generator=generator, dtype=torch.float64) * strength * (high - low)
    whole_step = torch.where(step < 0, step.round().clamp(max=-1), step.round().clamp(min=1))
    step = torch.where(genome.is_whole[genes], whole_step, step)
    # Who is at a bound already and would cross it goes the other way: it would stand still otherwise.
    leaves = (old == high) & (step > 0) | (old == low) & (step < 0)
    moved = torch.where(leaves, old - step, old + step)
    other = (_rand(rows.shape, generator) * (high - low)).floor()  # one option less than there are
    mutated = designs.clone()
    mutated[rows, genes] = torch.where(genome.is_choice[genes], other + (other >= old), moved)
    return genome.repair(mutated)


def _rand(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)
