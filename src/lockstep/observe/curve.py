"""Numbers over steps, in bounded memory however long a run is: what a plot needs and no more."""

import math
from typing import Any, NamedTuple

_MOST_POINTS = 2000  # of a curve, when its points were just put together; before that, twice as many


class Point(NamedTuple):
    """One value, or several neighbours put together: how low, how high, and what in the middle."""

    step: int
    low: float
    mean: float
    high: float


class Curve:
    """Steps come in order. Where there are too many points, neighbours are put together, two by two."""

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._most = most_points
        self._points: list[Point] = []
        self._counts: list[int] = []  # of the values in each point
        self._per_point = 1
        self.nonfinite: list[int] = []  # steps whose value was none: the first few

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            if len(self.nonfinite) < self._most and step not in self.nonfinite[-1:]:
                self.nonfinite.append(step)
            return
        if self._points and step < self._points[-1].step:
            return
        if self._points and step == self._points[-1].step and self._counts[-1] == 1:
            self._points[-1] = Point(step, value, value, value)  # said again: the later counts
            return
        new = Point(step, value, value, value)
        if self._points and self._counts[-1] < self._per_point:
            self._points[-1] = _together(self._points[-1], self._counts[-1], new, 1)
            self._counts[-1] += 1
        else:
            self._points.append(new)
            self._counts.append(1)
        if len(self._points) >= 2 * self._most:
            self._halve()

    def forget_after(self, step: int) -> None:
        """What came later was undone, and is made again."""
        while self._points and self._points[-1].step > step:
            self._points.pop()
            self._counts.pop()
        self.nonfinite = [each for each in self.nonfinite if each <= step]

    def points(self) -> list[Point]:
        return list(self._points)

    @property
    def last(self) -> Point | None:
        return self._points[-1] if self._points else None

    def lowest(self) -> Point | None:
        return min(self._points, key=lambda point: point.low, default=None)

    def highest(self) -> Point | None:
        return max(self._points, key=lambda point: point.high, default=None)

    def _halve(self) -> None:
        points, counts = self._points, self._counts
        pairs = range(0, len(points) - 1, 2)
        joined = [_together(points[at], counts[at], points[at + 1], counts[at + 1]) for at in pairs]
        sums = [counts[at] + counts[at + 1] for at in pairs]
        if len(points) % 2:
            joined.append(points[-1])
            sums.append(counts[-1])
        self._points, self._counts = joined, sums
        self._per_point *= 2


def number_in(value: Any) -> float | None:
    """A number as an event holds it, where also `"nan"` and `"inf"` are; None of anything else."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # a stranger's integer of hundreds of digits
        return None


def count_in(value: Any) -> int | None:
    """A number of things: an integer of a sane size, not negative."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def _together(left: Point, num_left: int, right: Point, num_right: int) -> Point:
    share = num_right / (num_left + num_right)
    mean = left.mean * (1 - share) + right.mean * share
    return Point(right.step, min(left.low, right.low), mean, max(left.high, right.high))
