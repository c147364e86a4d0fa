"""How a search goes, by what its archive says: the best design, the front, and each generation in a few numbers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.search.archive import Archive
from lockstep.search.fronts import first_front
from lockstep.search.problem import Problem


class Found(NamedTuple):
    """A design, and its objectives' values."""

    design: dict[str, Any]
    values: dict[str, float]
    row: int  # of the archive


def best(problem: Problem, archive: Archive, rows: Tensor | None = None) -> Found | None:
    """The best; of several objectives a compromise: nearest to the best of each, over the front. None if all failed.

    `rows`: the front, where it is known.
    """
    rows = front(archive) if rows is None else rows
    if not len(rows):
        return None
    costs = archive.costs[rows] / 2  # so that no difference of two overflows
    low, high = costs.amin(0), costs.amax(0)
    distance = ((costs - low) / torch.where(high > low, high - low, 1.0)).square().sum(1)
    return found(problem, archive, int(rows[distance.argmin()]))


def found(problem: Problem, archive: Archive, row: int) -> Found:
    values = (archive.costs[row] * problem.signs).tolist()
    names = (objective.name for objective in problem.objectives)
    return Found(problem.genome.design(archive.designs[row]), dict(zip(names, values, strict=True)), row)


def front(archive: Archive, before: Tensor | None = None, num_before: int = 0) -> Tensor:
    """The rows than which no other is better in everything, by their first objective; none of those that failed.

    `before`: what the front was when there were `num_before` rows; then only the others are looked at.
    """
    good = num_before + archive.costs[num_before:].isfinite().all(1).nonzero().flatten()
    if before is not None:
        good = torch.cat([before.sort().values, good])
    rows = good[first_front(archive.costs[good])]
    return rows[archive.costs[rows, 0].argsort(stable=True)]


def history(
    problem: Problem, archive: Archive, num_generations: int, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """For each generation: the best of each objective so far, the median of its new designs, how many failed.

    `earlier`: the first lines of it, where they are known.
    """
    lines = list(earlier)
    so_far = _best_in(problem, lines)
    for generation, costs in enumerate(_by_generation(archive, num_generations, len(lines)), len(lines)):
        good = costs[costs.isfinite().all(1)]
        if len(good):
            so_far = torch.minimum(so_far, good.amin(0))
        lines.append(
            {
                "generation": generation + 1,
                "best": _by_name(problem, so_far),
                "median": _by_name(problem, good.median(0).values) if len(good) else None,
                "evaluated": len(costs),
                "failed": len(costs) - len(good),
            }
        )
    return lines


def generations_without_improvement(archive: Archive, num_generations: int, min_delta: float) -> int:
    """How many have gone by since the best of any objective improved by more than `min_delta`."""
    since, mark = 0, torch.full((1, archive.costs.shape[1]), torch.inf, dtype=torch.float64)
    for costs in _by_generation(archive, num_generations):
        good = costs[costs.isfinite().all(1)]
        best = torch.cat([good, mark]).amin(0, keepdim=True)
        is_better = best < mark - min_delta
        since = 0 if bool(is_better.any()) else since + 1
        mark = torch.where(is_better, best, mark)
    return since


def _by_generation(archive: Archive, num_generations: int, first: int = 0) -> Sequence[Tensor]:
    """The costs of each one's new designs, from generation `first` on."""
    edges = torch.searchsorted(archive.generations, torch.arange(first, num_generations + 1)).tolist()
    return [archive.costs[begin:end] for begin, end in pairwise(edges)]


def _best_in(problem: Problem, lines: Sequence[dict[str, Any]]) -> Tensor:
    """The costs of the best so far, as a history's last line has it."""
    values = lines[-1]["best"] if lines else None
    if values is None:
        return torch.full((len(problem.objectives),), torch.inf, dtype=torch.float64)
    return torch.tensor(list(values.values()), dtype=torch.float64) * problem.signs


def _by_name(problem: Problem, costs: Tensor) -> dict[str, float] | None:
    if not bool(costs.isfinite().all()):
        return None
    names = (objective.name for objective in problem.objectives)
    return dict(zip(names, (costs * problem.signs).tolist(), strict=True))
