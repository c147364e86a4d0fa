"""Time several variants in turn, round by round, and compare them by the ratio within each round."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from lockstep.world.collectives import barrier


class Ratio(NamedTuple):
    """The time of a step relative to that of another variant, over all rounds."""

    median: float
    low: float
    high: float
    quarter: float  # the first quartile
    three_quarters: float  # the third quartile

    @property
    def difference(self) -> float:
        """The difference as a fraction of the other variant's time; negative if this one is faster."""
        return self.median - 1.0

    @property
    def wobble(self) -> float:
        """How far the quartiles are from the median. Unlike the range, it does not grow with the number of rounds."""
        return max(self.median - self.quarter, self.three_quarters - self.median)

    @property
    def noise(self) -> float:
        """For a variant timed against itself: how far the quartiles are from 1."""
        return max(abs(self.quarter - 1.0), abs(self.three_quarters - 1.0))


def time_ratio(seconds: Sequence[float], base_seconds: Sequence[float]) -> Ratio:
    """Compare two variants by the ratio of their times in each round; there must be at least one round."""
    ratios = [own / base for own, base in zip(seconds, base_seconds, strict=True)]
    # `quantiles` needs two values, so a single round is counted twice.
    quarter, _, three_quarters = quantiles(ratios if len(ratios) > 1 else 2 * ratios, n=4, method="inclusive")
    return Ratio(median(ratios), min(ratios), max(ratios), quarter, three_quarters)


class VariantTiming(NamedTuple):
    """What `interleave` measured for one variant."""

    name: str
    median_s: float  # of a step
    ratio: Ratio  # to the first variant


def interleave(variants: Mapping[str, Callable[[], None]], rounds: int, steps: int) -> list[VariantTiming]:
    """Time every variant once per round, so that a noisy machine disturbs all of them alike.

    Args:
        variants: what to call, by name; each call makes `steps` steps. Ratios are relative to the first variant.
        rounds: the number of timed rounds. One more comes first, to warm up.
        steps: the number of steps of a call; times are per step.

    On several processes, all of them call this, and a variant's time ends when the last process is done.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            barrier()
            if number:
                seconds[name].append((time.perf_counter() - start) / steps)
    base = next(iter(seconds.values()))
    return [VariantTiming(name, median(values), time_ratio(values, base)) for name, values in seconds.items()]


def timing_table(title: str, timings: Sequence[VariantTiming]) -> str:
    """Format timings as a Markdown table."""
    lines = [title, "| | ms a step | ratio | range by round |", "|---|---|---|---|"]
    for name, median_s, ratio in timings:
        lines.append(f"| {name} | {1e3 * median_s:.3f} | {ratio.median:.3f} | {ratio.low:.2f}–{ratio.high:.2f} |")
    return "\n".join(lines)
