"""The designs that a search has evaluated, read from RUN/evaluations, and their Pareto front."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from lockstep.events.jsonl import parse_count, parse_number
from lockstep.observe.jsonl_tail import JsonlTail
from lockstep.observe.text_format import one_line

_MAX_DESIGNS = 200_000
_MAX_FILES = 4096
_MAX_REASONS = 100


class GenerationSpread(NamedTuple):
    """How the values of one objective spread over one generation's designs."""

    generation: int  # from 1
    lowest: float
    low: float  # first quartile
    median: float
    high: float  # third quartile
    highest: float


class EvaluatedDesigns:
    """Reads evaluations as the files grow; an evaluation that was repeated counts once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, JsonlTail] = {}
        self._keys: set[str] = set()
        self.by_generation: dict[int, list[tuple[float, ...]]] = {}
        self.num_failed = 0
        self.failure_reasons: Counter[str] = Counter()
        self.num = 0

    @property
    def is_cut(self) -> bool:
        """Has the limit on the number of designs been reached?"""
        return self.num >= _MAX_DESIGNS

    def refresh(self) -> None:
        """Read what was added since the last call."""
        for path in sorted(self._folder.glob("*.jsonl"))[:_MAX_FILES]:
            for line in self._files.setdefault(path, JsonlTail(path)).read_new():
                self._add(line)

    def spreads(self, objective: int) -> list[GenerationSpread]:
        """Return the spread of an objective, by its index, for each generation."""
        spreads = []
        for generation in sorted(self.by_generation):
            values = sorted(each[objective] for each in self.by_generation[generation] if len(each) > objective)
            if not values:
                continue
            low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
            spreads.append(GenerationSpread(generation, values[0], low, middle, high, values[-1]))
        return spreads

    def all(self) -> list[tuple[float, ...]]:
        """Return the objectives of all designs, in order of generation."""
        return [values for generation in sorted(self.by_generation) for values in self.by_generation[generation]]

    def _add(self, line: dict[str, Any]) -> None:
        generation, key, evaluations = parse_count(line.get("generation")), line.get("key"), line.get("evaluations")
        if generation is None or not isinstance(key, str) or not isinstance(evaluations, list):
            return
        if key in self._keys or self.is_cut:
            return
        self._keys.add(key)
        for evaluation in evaluations:
            self.num += 1
            values = [parse_number(value) for value in evaluation] if isinstance(evaluation, list) else []
            finite = tuple(value for value in values if value is not None and math.isfinite(value))
            if finite and len(finite) == len(values):
                self.by_generation.setdefault(generation + 1, []).append(finite)
            else:
                self.num_failed += 1
                self._count_reason(evaluation)

    def _count_reason(self, failure: Any) -> None:
        reason = one_line(failure, 120)
        if reason in self.failure_reasons or len(self.failure_reasons) < _MAX_REASONS:
            self.failure_reasons[reason] += 1


def pareto_designs(points: Sequence[tuple[float, ...]], is_max: tuple[bool, bool]) -> list[tuple[float, float]]:
    """Return the Pareto front of the first two objectives, sorted by the first.

    Args:
        points: the objectives of each design.
        is_max: for each of the two objectives, whether it is maximized.
    """
    signs = [-1.0 if each else 1.0 for each in is_max]
    costs = sorted({(signs[0] * point[0], signs[1] * point[1]) for point in points if len(point) > 1})
    front: list[tuple[float, float]] = []
    for first, second in costs:
        if not front or second < front[-1][1]:
            front.append((first, second))
    return [(signs[0] * first, signs[1] * second) for first, second in front]
