"""The strategy that is built in: a population whose best breed, by crossover and mutation, and whose best stay.

    strategy = Evolution(genome, num_objectives=1, settings=EvolutionSettings(), seed=7)
    for generation in range(100):
        designs = strategy.ask(100, generation)
        strategy.tell(designs, costs_of(designs))

Mutation adapts gene by gene: half of its steps go by how far apart the population is in the gene, so that they become
finer where it agrees; the other half stay wide, so that it can still leave what it has agreed on too early. All that
this needs is the population itself: designs from elsewhere fit in, and there is nothing more to save.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config.arguments import require_count, require_positive, require_share, require_whole
from lockstep.errors import UserError
from lockstep.search.genome import Genome
from lockstep.search.operators import crossover, mutate, stratified_sample, tournament
from lockstep.search.selection import survivors
from lockstep.world.randomness import stream

_REDRAWS = 4  # how often designs that there are already are drawn again, before they are let be
_NARROW_STEP = 2.0  # of the population's standard deviation: with less it agrees too early


@dataclass(frozen=True)
class EvolutionSettings:
    population_size: int = 100  # designs that breed
    elites: int | None = None  # of them, how many may stay if no better ones come; None: all
    tournament_size: int = 2  # the best of so many becomes a parent: the more, the greedier
    crossover_rate: float = 0.9  # share of children that have two parents
    blend_rate: float = 0.3  # share of groups that are not quite a parent's but between or beyond the two
    mutation_rate: float | None = None  # share of genes that mutate; None: one of them on average
    mutation_strength: float = 0.1  # deviation of wide steps, as a share of a gene's range; of narrow ones the most
    strength_floor: float = 1e-6  # of narrow ones the least

    def __post_init__(self) -> None:
        require_count("population_size", self.population_size)
        require_count("tournament_size", self.tournament_size)
        if self.elites is not None:
            require_whole("elites", self.elites, otherwise=", or None for all")
        for name in ("crossover_rate", "blend_rate", "mutation_rate", "mutation_strength", "strength_floor"):
            value = getattr(self, name)
            if not (name == "mutation_rate" and value is None):
                require_share(name, value)
        require_positive("mutation_strength", self.mutation_strength)
        if not 0 < self.strength_floor <= self.mutation_strength:
            raise UserError(
                f"strength_floor={self.strength_floor!r}: expected more than 0 and no more than "
                f"mutation_strength={self.mutation_strength!r}"
            )


class Evolution:
    """Its first generation is sampled everywhere; whoever has a design to begin with puts it among these."""

    def __init__(self, genome: Genome, num_objectives: int, settings: EvolutionSettings, seed: int) -> None:
        self.genome = genome
        self.settings = settings
        self.seed = seed
        self._population = torch.empty(0, len(genome), dtype=torch.float64)  # best first
        self._costs = torch.empty(0, num_objectives, dtype=torch.float64)

    @property
    def population(self) -> Tensor:
        return self._population

    @property
    def costs(self) -> Tensor:
        return self._costs

    def ask(self, count: int, generation: int) -> Tensor:
        """None twice and none that is in the population, as far as the genome has so many."""
        generator = stream(self.seed, "evolution", generation)
        designs = self._draw(count, generator)
        known = set(self.genome.keys(self._population))
        for _ in range(_REDRAWS):
            repeated = _repeated(self.genome.keys(designs), known)
            if not repeated:
                break
            designs[repeated] = self._draw(len(repeated), generator)
        return designs

    def tell(self, designs: Tensor, costs: Tensor) -> None:
        designs = self.genome.repair(designs)
        costs = torch.where(costs.isfinite().all(1, keepdim=True), costs, torch.inf)  # it failed as a whole
        size, elites = self.settings.population_size, self.settings.elites
        # Beside the elites, parents stay only in the place of children that are missing or failed.
        num_staying = size if elites is None else max(elites, size - int(costs.isfinite().all(1).sum()))
        designs = torch.cat([self._population[:num_staying], designs])
        costs = torch.cat([self._costs[:num_staying], costs])
        rows = torch.ones(len(designs), dtype=torch.bool)
        rows[_repeated(self.genome.keys(designs), set())] = False
        designs, costs = designs[rows], costs[rows]
        best = survivors(costs, size)
        self._population, self._costs = designs[best], costs[best]

    def state_dict(self) -> dict[str, Any]:
        return {"population": self._population, "costs": self._costs}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
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
        """By gene, as shares of their ranges. One parent alone says nothing about how far to go."""
        settings = self.settings
        if len(parents) == 1:
            return torch.full((len(self.genome),), settings.mutation_strength, dtype=torch.float64)
        deviation = self.genome.to_unit(parents).std(0, correction=0)
        return (_NARROW_STEP * deviation).clamp(settings.strength_floor, settings.mutation_strength)


def _repeated(keys: list[bytes], known: set[bytes]) -> list[int]:
    """The rows whose key is known or was there before."""
    seen = set(known)
    rows = []
    for row, key in enumerate(keys):
        if key in seen:
            rows.append(row)
        seen.add(key)
    return rows
