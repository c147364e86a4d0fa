"""How long one thing takes beside another, from interleaved rounds: medians, and how far they spread."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple


class Ratio(NamedTuple):
    """Of the time of a step to that of another, by round."""

    median: float
    low: float
    high: float
    quarter: float  # the middle half of the rounds begins here,
    three_quarters: float  # and ends here

    @property
    def difference(self) -> float:
        """As a share of the other's time; below 0: it is faster."""
        return self.median - 1.0

    @property
    def wobble(self) -> float:
        """How far the middle half of the rounds is from the median. Unlike the range, more rounds do not widen it."""
        return max(self.median - self.quarter, self.three_quarters - self.median)

    @property
    def noise(self) -> float:
        """Of something against itself: how far the middle half of the rounds is from ×1."""
        return max(abs(self.quarter - 1.0), abs(self.three_quarters - 1.0))


def ratio(seconds: Sequence[float], others: Sequence[float]) -> Ratio:
    """From at least one round of both."""
    by_round = [own / other for own, other in zip(seconds, others, strict=True)]
    # A single round counts twice: alone, it has no quarters.
    quarter, _, three_quarters = quantiles(by_round if len(by_round) > 1 else 2 * by_round, n=4, method="inclusive")
    return Ratio(median(by_round), min(by_round), max(by_round), quarter, three_quarters)
