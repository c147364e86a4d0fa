"""What a search has evaluated, read from RUN/evaluations/R.jsonl: how each generation spreads, and the front."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from lockstep.observe.curve import count_in, number_in
from lockstep.observe.growing import GrowingLines
from lockstep.observe.wording import one_line

_MOST_DESIGNS = 200_000
_MOST_FILES = 4096
_MOST_REASONS = 100


class Spread(NamedTuple):
    """Of one objective over one generation's designs: the middle half, and all."""

    generation: int  # from 1
    lowest: float
    low: float
    median: float
    high: float
    highest: float


class Designs:
    """Taken in as the files grow; those of a piece of work that was done twice, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, GrowingLines] = {}
        self._keys: set[str] = set()
        self.by_generation: dict[int, list[tuple[float, ...]]] = {}
        self.num_failed = 0
        self.reasons: Counter[str] = Counter()  # of failures
        self.num = 0

    @property
    def is_cut(self) -> bool:
        """Are there more than are looked at?"""
        return self.num >= _MOST_DESIGNS

    def look(self) -> None:
        for path in sorted(self._folder.glob("*.jsonl"))[:_MOST_FILES]:
            for line in self._files.setdefault(path, GrowingLines(path)).new():
                self._take(line)

    def spreads(self, objective: int) -> list[Spread]:
        spreads = []
        for generation in sorted(self.by_generation):
            values = sorted(each[objective] for each in self.by_generation[generation] if len(each) > objective)
            if not values:
                continue
            low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
            spreads.append(Spread(generation, values[0], low, middle, high, values[-1]))
        return spreads

    def all(self) -> list[tuple[float, ...]]:
        return [values for generation in sorted(self.by_generation) for values in self.by_generation[generation]]

    def _take(self, line: dict[str, Any]) -> None:
        generation, key, evaluations = count_in(line.get("generation")), line.get("key"), line.get("evaluations")
        if generation is None or not isinstance(key, str) or not isinstance(evaluations, list):
            return
        if key in self._keys or self.is_cut:
            return
        self._keys.add(key)
        for evaluation in evaluations:
            self.num += 1
            values = [number_in(value) for value in evaluation] if isinstance(evaluation, list) else []
            good = tuple(value for value in values if value is not None and math.isfinite(value))
            if good and len(good) == len(values):
                self.by_generation.setdefault(generation + 1, []).append(good)
            else:
                self.num_failed += 1
                self._count(evaluation)

    def _count(self, failure: Any) -> None:
        reason = one_line(failure, 120)
        if reason in self.reasons or len(self.reasons) < _MOST_REASONS:
            self.reasons[reason] += 1


def front(points: Sequence[tuple[float, ...]], is_max: tuple[bool, bool]) -> list[tuple[float, float]]:
    """Of the first two objectives: those than which no other is better in both, by the first."""
    signs = [-1.0 if each else 1.0 for each in is_max]
    costs = sorted({(signs[0] * point[0], signs[1] * point[1]) for point in points if len(point) > 1})
    kept: list[tuple[float, float]] = []
    for first, second in costs:
        if not kept or second < kept[-1][1]:
            kept.append((first, second))
    return [(signs[0] * first, signs[1] * second) for first, second in kept]
