"""A metric over steps for plotting, in bounded memory however long the run is."""

import math
from typing import NamedTuple

_MAX_POINTS = 2000  # right after merging; up to twice as many before the next merge


class Point(NamedTuple):
    """One value, or several neighbouring values merged into their minimum, mean and maximum."""

    step: int
    low: float
    mean: float
    high: float


class Curve:
    """Takes values in order of step. When there are too many points, neighbours are merged two by two."""

    def __init__(self, max_points: int = _MAX_POINTS) -> None:
        self._max_points = max_points
        self._points: list[Point] = []
        self._counts: list[int] = []  # how many values each point stands for
        self._per_point = 1
        self.nonfinite_steps: list[int] = []  # the first few steps with a NaN or infinite value

    def add(self, step: int, value: float) -> None:
        """Add a value. A second value for the last step replaces the first; one for an earlier step is ignored."""
        if not math.isfinite(value):
            if len(self.nonfinite_steps) < self._max_points and step not in self.nonfinite_steps[-1:]:
                self.nonfinite_steps.append(step)
            return
        if self._points and step < self._points[-1].step:
            return
        new = Point(step, value, value, value)
        if self._points and step == self._points[-1].step and self._counts[-1] == 1:
            self._points[-1] = new
            return
        if self._points and self._counts[-1] < self._per_point:
            self._points[-1] = _merge(self._points[-1], self._counts[-1], new, 1)
            self._counts[-1] += 1
        else:
            self._points.append(new)
            self._counts.append(1)
        if len(self._points) >= 2 * self._max_points:
            self._merge_neighbours()

    def drop_after(self, step: int) -> None:
        """Drop the values of later steps: the run resumed from this one and repeats them."""
        while self._points and self._points[-1].step > step:
            self._points.pop()
            self._counts.pop()
        self.nonfinite_steps = [each for each in self.nonfinite_steps if each <= step]

    def points(self) -> list[Point]:
        """Return all points, in order of step."""
        return list(self._points)

    @property
    def last(self) -> Point | None:
        """The newest point."""
        return self._points[-1] if self._points else None

    def lowest(self) -> Point | None:
        """Return the point with the lowest value."""
        return min(self._points, key=lambda point: point.low, default=None)

    def highest(self) -> Point | None:
        """Return the point with the highest value."""
        return max(self._points, key=lambda point: point.high, default=None)

    def _merge_neighbours(self) -> None:
        points, counts = self._points, self._counts
        lefts = range(0, len(points) - 1, 2)
        merged = [_merge(points[left], counts[left], points[left + 1], counts[left + 1]) for left in lefts]
        sums = [counts[left] + counts[left + 1] for left in lefts]
        if len(points) % 2:
            merged.append(points[-1])
            sums.append(counts[-1])
        self._points, self._counts = merged, sums
        self._per_point *= 2


def _merge(left: Point, num_left: int, right: Point, num_right: int) -> Point:
    share = num_right / (num_left + num_right)
    mean = left.mean * (1 - share) + right.mean * share
    return Point(right.step, min(left.low, right.low), mean, max(left.high, right.high))
