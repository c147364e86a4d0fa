"""The built-in strategy: evolution by selection, group-wise crossover and adaptive mutation.

    strategy = Evolution(genome, num_objectives=1, settings=EvolutionSettings(), seed=7)
    for generation in range(100):
        designs = strategy.ask(100, generation)
        strategy.tell(designs, costs_of(designs))

Mutation adapts gene by gene. Half of its steps scale with the population's spread in the gene, so they become finer as
the population converges; the other half stay wide, so it can still escape a premature optimum. All of this is
derived from the population: designs from elsewhere can be added to it, and there is no other state to save.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config.argument_checks import require_count, require_fraction, require_positive, require_whole
from lockstep.errors import UserError
from lockstep.search.genome import Genome
from lockstep.search.pareto import select_survivors
from lockstep.world.keyed_random import keyed_generator

_MAX_REDRAWS = 4  # how often duplicate designs are drawn again before they are accepted
_NARROW_STEP = 2.0  # in standard deviations of the population; with less it converges too early
_CROSSOVER_INDEX = 5  # distribution index of simulated binary crossover: the larger, the nearer to a parent


@dataclass(frozen=True)
class EvolutionSettings:
    """How `Evolution` selects, crosses and mutates designs.

    Args:
        population_size: designs that survive to become parents.
        elites: how many parents may survive if no child is better. None: all.
        tournament_size: a parent is the best of this many drawn at random; more is greedier.
        crossover_rate: share of children that have two parents.
        blend_rate: share of groups that lie between or beyond the parents instead of copying one.
        mutation_rate: share of genes that mutate. None: one gene on average.
        mutation_strength: standard deviation of wide steps, as a share of a gene's range; maximum of narrow steps.
        strength_floor: minimum of narrow steps.
    """

    population_size: int = 100
    elites: int | None = None
    tournament_size: int = 2
    crossover_rate: float = 0.9
    blend_rate: float = 0.3
    mutation_rate: float | None = None
    mutation_strength: float = 0.1
    strength_floor: float = 1e-6

    def __post_init__(self) -> None:
        require_count("population_size", self.population_size)
        require_count("tournament_size", self.tournament_size)
        if self.elites is not None:
            require_whole("elites", self.elites, otherwise=", or None for all")
        for name in ("crossover_rate", "blend_rate", "mutation_rate", "mutation_strength", "strength_floor"):
            value = getattr(self, name)
            if not (name == "mutation_rate" and value is None):
                require_fraction(name, value)
        require_positive("mutation_strength", self.mutation_strength)
        if not 0 < self.strength_floor <= self.mutation_strength:
            raise UserError(
                f"strength_floor={self.strength_floor!r}: expected more than 0 and no more than "
                f"mutation_strength={self.mutation_strength!r}"
            )


class Evolution:
    """The built-in `SearchStrategy`. Its first generation is a Latin hypercube sample of the whole space.

    Args:
        genome: the genes of the designs.
        num_objectives: the number of costs per design.
        settings: how designs are selected, crossed and mutated.
        seed: decides all random draws, together with the generation.
    """

    def __init__(self, genome: Genome, num_objectives: int, settings: EvolutionSettings, seed: int) -> None:
        self.genome = genome
        self.settings = settings
        self.seed = seed
        self._population = torch.empty(0, len(genome), dtype=torch.float64)  # best first
        self._costs = torch.empty(0, num_objectives, dtype=torch.float64)

    @property
    def population(self) -> Tensor:
        """The surviving designs, best first; empty before the first `tell`."""
        return self._population

    @property
    def costs(self) -> Tensor:
        """The costs of `population`."""
        return self._costs

    def ask(self, count: int, generation: int) -> Tensor:
        """Return `count` designs without duplicates and without survivors, unless the genome has too few designs.

        The random draws depend on the seed and the `generation` alone.
        """
        generator = keyed_generator(self.seed, "evolution", generation)
        designs = self._draw(count, generator)
        known = set(self.genome.keys(self._population))
        for _ in range(_MAX_REDRAWS):
            duplicates = _duplicate_rows(self.genome.keys(designs), known)
            if not duplicates:
                break
            designs[duplicates] = self._draw(len(duplicates), generator)
        return designs

    def tell(self, designs: Tensor, costs: Tensor) -> None:
        """Add evaluated designs with their costs, and keep the best `population_size`."""
        designs = self.genome.repair(designs)
        costs = torch.where(costs.isfinite().all(1, keepdim=True), costs, torch.inf)  # one failed cost fails the design
        size, elites = self.settings.population_size, self.settings.elites
        # Beyond the elites, parents stay only to replace children that are missing or failed.
        num_staying = size if elites is None else max(elites, size - int(costs.isfinite().all(1).sum()))
        designs = torch.cat([self._population[:num_staying], designs])
        costs = torch.cat([self._costs[:num_staying], costs])
        is_first = torch.ones(len(designs), dtype=torch.bool)
        is_first[_duplicate_rows(self.genome.keys(designs), set())] = False
        designs, costs = designs[is_first], costs[is_first]
        best = select_survivors(costs, size)
        self._population, self._costs = designs[best], costs[best]

    def state_dict(self) -> dict[str, Any]:
        """Return the survivors and their costs, for checkpoints."""
        return {"population": self._population, "costs": self._costs}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore what `state_dict` returned."""
        self._population, self._costs = state["population"], state["costs"]

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        settings, genome = self.settings, self.genome
        parents = self._population[self._costs.isfinite().all(1)]
        if not len(parents):
            return stratified_sample(genome, count, generator)
        rows = [tournament(len(parents), count, settings.tournament_size, generator) for _ in range(2)]
        first, second = (parents[each] for each in rows)
        children = crossover(genome, first, second, settings.blend_rate, generator)
        has_two = torch.rand(count, generator=generator, dtype=torch.float64) < settings.crossover_rate
        children = torch.where(has_two[:, None], children, first)
        is_copy = (children == first).all(1) | (children == second).all(1)
        rate = 1 / len(genome) if settings.mutation_rate is None else settings.mutation_rate
        narrow = self._narrow_steps(parents)
        return mutate(genome, children, is_copy, rate, settings.mutation_strength, narrow, generator)

    def _narrow_steps(self, parents: Tensor) -> Tensor:
        """The narrow step of each gene, as a share of its range. A single parent has no spread to go by."""
        settings = self.settings
        if len(parents) == 1:
            return torch.full((len(self.genome),), settings.mutation_strength, dtype=torch.float64)
        deviation = self.genome.to_unit(parents).std(0, correction=0)
        return (_NARROW_STEP * deviation).clamp(settings.strength_floor, settings.mutation_strength)


def _duplicate_rows(keys: list[bytes], known: set[bytes]) -> list[int]:
    """The rows whose key is in `known` or occurs in an earlier row."""
    seen = set(known)
    rows = []
    for row, key in enumerate(keys):
        if key in seen:
            rows.append(row)
        seen.add(key)
    return rows


def stratified_sample(genome: Genome, count: int, generator: torch.Generator) -> Tensor:
    """Draw a latin hypercube: `count` designs, one in each of `count` slices of every gene."""
    slices = _rand((count, len(genome)), generator).argsort(dim=0, stable=True)
    within = _rand((count, len(genome)), generator)
    return genome.spread((slices + within) / max(count, 1))


def tournament(num_parents: int, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return the rows of `count` winners. Parents are sorted best first, so the lowest row of a draw wins."""
    return torch.randint(num_parents, (count, size), generator=generator).amin(1)


def crossover(genome: Genome, first: Tensor, second: Tensor, blend_rate: float, generator: torch.Generator) -> Tensor:
    """Return a child of each pair: each group copies one parent or, with probability `blend_rate`, lies near it.

    A group's genes come from the same parent, equally far from it; a gene without a group is inherited alone. The
    distance scales with that between the parents, distributed as in simulated binary crossover (Deb and Agrawal).
    Choices always copy one parent.
    """
    shape = (len(first), genome.num_linkage_groups)
    share = torch.randint(2, shape, generator=generator).double()  # of the second parent
    is_blend = _rand(shape, generator) < blend_rate
    drawn = _rand((int(is_blend.sum()),), generator)
    factor = torch.where(drawn < 0.5, 2 * drawn, 0.5 / (1 - drawn)) ** (1 / (_CROSSOVER_INDEX + 1))
    share[is_blend] = 0.5 + (share[is_blend] - 0.5) * factor
    share = share[:, genome.linkage_group_of_gene]
    share = torch.where(genome.is_choice, (share > 0.5).double(), share)
    return genome.repair(torch.lerp(first, second, share))


def mutate(
    genome: Genome,
    designs: Tensor,
    must_mutate: Tensor,
    rate: float,
    wide: float,
    narrow: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Change genes with probability `rate`; in the designs of the mask `must_mutate`, change at least one.

    Numbers move by a Gaussian step. Half of the steps have the deviation `wide`, as a share of the gene's range, half
    the gene's own `narrow`; whole numbers move by at least one. A choice becomes any of its other options.
    """
    chance = torch.where(genome.high > genome.low, _rand(designs.shape, generator), torch.inf)
    chosen = chance < rate
    chosen[must_mutate] |= chance[must_mutate] == chance[must_mutate].amin(1, keepdim=True)
    rows, genes = chosen.nonzero(as_tuple=True)
    low, high, old = genome.low[genes], genome.high[genes], designs[rows, genes]
    strength = torch.where(_rand(rows.shape, generator) < 0.5, wide, narrow[genes])
    step = torch.randn(len(rows), generator=generator, dtype=torch.float64) * strength * (high - low)
    whole_step = torch.where(step < 0, step.round().clamp(max=-1), step.round().clamp(min=1))
    step = torch.where(genome.is_whole[genes], whole_step, step)
    # A gene at a bound that it would cross moves the other way; if it were clipped, it would not move at all.
    leaves = (old == high) & (step > 0) | (old == low) & (step < 0)
    moved = torch.where(leaves, old - step, old + step)
    other = (_rand(rows.shape, generator) * (high - low)).floor()  # an index among the other options
    mutated = designs.clone()
    mutated[rows, genes] = torch.where(genome.is_choice[genes], other + (other >= old), moved)
    return genome.repair(mutated)


def _rand(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)
