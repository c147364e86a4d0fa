"""The archive of all evaluated designs; its best design, Pareto front and history."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.config.plurals import count_noun
from lockstep.errors import UserError
from lockstep.search.genome import Genome
from lockstep.search.pareto import is_nondominated
from lockstep.search.problem import Problem


class DesignArchive:
    """Every evaluated design once, with its costs, its generation and, if it failed, the reason.

    Rows are in the order in which designs were first proposed, which does not depend on which rank evaluated them.

    Args:
        genome: the genes of the designs.
        num_objectives: the number of costs per design.
    """

    def __init__(self, genome: Genome, num_objectives: int) -> None:
        self.genome = genome
        self.designs = torch.empty(0, len(genome), dtype=torch.float64)
        self.costs = torch.empty(0, num_objectives, dtype=torch.float64)  # inf where the evaluation failed
        self.generations = torch.empty(0, dtype=torch.int64)
        self.failures: dict[int, str] = {}  # row → reason
        self._rows: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.designs)

    def find(self, designs: Tensor) -> list[int | None]:
        """Return the archive row of each design, or None if it has not been evaluated."""
        return [self._rows.get(key) for key in self.genome.keys(designs)]

    def add(self, designs: Tensor, costs: Tensor, generation: int, failures: Mapping[int, str]) -> None:
        """Append designs that are new and differ from each other.

        Args:
            designs: a row for each.
            costs: their costs; inf where the evaluation failed.
            generation: the generation that they belong to.
            failures: the reasons of failed evaluations, by row of `designs`.
        """
        first = len(self)
        self.designs = torch.cat([self.designs, self.genome.repair(designs)])
        self.costs = torch.cat([self.costs, costs])
        self.generations = torch.cat([self.generations, torch.full((len(designs),), generation)])
        self.failures |= {first + row: reason for row, reason in failures.items()}
        self._index(self.genome.keys(designs), first)

    @property
    def is_good(self) -> Tensor:
        """A mask of the rows that were evaluated without a failure."""
        return self.costs.isfinite().all(1)

    def state_dict(self) -> dict[str, Any]:
        """Return all rows, for checkpoints."""
        return {
            "designs": self.designs,
            "costs": self.costs,
            "generations": self.generations,
            "failures": {str(row): reason for row, reason in self.failures.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, if it fits the genome and the objectives."""
        self._require_same_problem(state["designs"], state["costs"])
        self.designs, self.costs, self.generations = (state[name] for name in ("designs", "costs", "generations"))
        self.failures = {int(row): reason for row, reason in state["failures"].items()}
        self._rows = {}
        self._index(self.genome.keys(self.designs), 0)

    def _require_same_problem(self, designs: Tensor, costs: Tensor) -> None:
        """Check that the saved genes and objectives are the same; bounds may have become wider, but not narrower."""
        saved, expected = (designs.shape[1], costs.shape[1]), (len(self.genome), self.costs.shape[1])
        if saved != expected:
            raise UserError(
                f"the saved search has {count_noun(saved[0], 'gene')} and {count_noun(saved[1], 'objective')}, "
                f"and this one has {expected[0]} and {expected[1]}: choose another folder for another problem"
            )
        is_changed = (self.genome.repair(designs) != designs).any(0)
        if is_changed.any():
            names = ", ".join(self.genome.names[gene] for gene in is_changed.nonzero().flatten().tolist())
            raise UserError(
                f"the saved search has designs outside the current bounds of {names}: restore the old bounds, "
                "or choose another folder"
            )

    def _index(self, keys: Sequence[bytes], first: int) -> None:
        assert not self._rows.keys() & set(keys) and len(set(keys)) == len(keys)
        self._rows |= {key: row for row, key in enumerate(keys, first)}


class ScoredDesign(NamedTuple):
    """A design and the values of its objectives.

    Attributes:
        design: the value of each gene, by name.
        values: the value of each objective, by name.
        row: the design's row in the archive.
    """

    design: dict[str, Any]
    values: dict[str, float]
    row: int


def best_design(problem: Problem, archive: DesignArchive, front: Tensor | None = None) -> ScoredDesign | None:
    """Return the best design, or None if all failed.

    With several objectives it is a compromise: the design on the Pareto front that is closest to the best value of each
    objective, relative to the front's range. `front`: the rows of the front, if already known.
    """
    rows = pareto_front(archive) if front is None else front
    if not len(rows):
        return None
    costs = archive.costs[rows] / 2  # halved, so that no difference overflows
    low, high = costs.amin(0), costs.amax(0)
    distance = ((costs - low) / torch.where(high > low, high - low, 1.0)).square().sum(1)
    return scored_design(problem, archive, int(rows[distance.argmin()]))


def scored_design(problem: Problem, archive: DesignArchive, row: int) -> ScoredDesign:
    """Return the design in an archive row, with its values by objective."""
    values = (archive.costs[row] * problem.signs).tolist()
    names = (objective.name for objective in problem.objectives)
    return ScoredDesign(problem.genome.design(archive.designs[row]), dict(zip(names, values, strict=True)), row)


def pareto_front(archive: DesignArchive, before: Tensor | None = None, num_before: int = 0) -> Tensor:
    """Return the rows that no other row dominates, sorted by the first cost; failed designs are never among them.

    `before`: the front of the first `num_before` rows, if known; then only the later rows are compared with it.
    """
    good = num_before + archive.costs[num_before:].isfinite().all(1).nonzero().flatten()
    if before is not None:
        good = torch.cat([before.sort().values, good])
    rows = good[is_nondominated(archive.costs[good])]
    return rows[archive.costs[rows, 0].argsort(stable=True)]


def generation_history(
    problem: Problem, archive: DesignArchive, num_generations: int, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Summarize each generation: the best of each objective so far, the median of its new designs, and how many failed.

    `earlier`: the entries of the first generations, if already known.
    """
    entries = list(earlier)
    so_far = _best_costs_so_far(problem, entries)
    for generation, costs in enumerate(_costs_by_generation(archive, num_generations, len(entries)), len(entries)):
        good = costs[costs.isfinite().all(1)]
        if len(good):
            so_far = torch.minimum(so_far, good.amin(0))
        entries.append(
            {
                "generation": generation + 1,
                "best": _values_by_name(problem, so_far),
                "median": _values_by_name(problem, good.median(0).values) if len(good) else None,
                "evaluated": len(costs),
                "failed": len(costs) - len(good),
            }
        )
    return entries


def generations_without_improvement(archive: DesignArchive, num_generations: int, min_delta: float) -> int:
    """Count the generations since the best value of any objective improved by more than `min_delta`."""
    since, reference = 0, torch.full((1, archive.costs.shape[1]), torch.inf, dtype=torch.float64)
    for costs in _costs_by_generation(archive, num_generations):
        good = costs[costs.isfinite().all(1)]
        best = torch.cat([good, reference]).amin(0, keepdim=True)
        is_better = best < reference - min_delta
        since = 0 if bool(is_better.any()) else since + 1
        reference = torch.where(is_better, best, reference)
    return since


def _costs_by_generation(archive: DesignArchive, num_generations: int, first: int = 0) -> Sequence[Tensor]:
    """The costs of each generation's new designs, from generation `first` on."""
    edges = torch.searchsorted(archive.generations, torch.arange(first, num_generations + 1)).tolist()
    return [archive.costs[begin:end] for begin, end in pairwise(edges)]


def _best_costs_so_far(problem: Problem, entries: Sequence[dict[str, Any]]) -> Tensor:
    """The best costs so far, from the last entry of a history."""
    values = entries[-1]["best"] if entries else None
    if values is None:
        return torch.full((len(problem.objectives),), torch.inf, dtype=torch.float64)
    return torch.tensor(list(values.values()), dtype=torch.float64) * problem.signs


def _values_by_name(problem: Problem, costs: Tensor) -> dict[str, float] | None:
    if not bool(costs.isfinite().all()):
        return None
    names = (objective.name for objective in problem.objectives)
    return dict(zip(names, (costs * problem.signs).tolist(), strict=True))
