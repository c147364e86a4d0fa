"""Interleaved timing: every variant once a round, so that a noisy machine disturbs all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Timing(NamedTuple):
    name: str
    median_s: float
    ratio: float  # to the first variant: the median over rounds
    low: float
    high: float


def interleave(variants: Mapping[str, Callable[[], None]], rounds: int, steps: int) -> list[Timing]:
    """Each variant runs `steps` steps a round; the first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append((time.perf_counter() - began) / steps)
    base = next(iter(seconds.values()))
    timings = []
    for name, values in seconds.items():
        ratios = sorted(value / reference for value, reference in zip(values, base, strict=True))
        timings.append(Timing(name, statistics.median(values), statistics.median(ratios), ratios[0], ratios[-1]))
    return timings


def table(title: str, timings: list[Timing]) -> str:
    lines = [f"{title}", "| | ms a step | ratio | range by round |", "|---|---|---|---|"]
    lines += [f"| {t.name} | {1e3 * t.median_s:.3f} | {t.ratio:.3f} | {t.low:.2f}–{t.high:.2f} |" for t in timings]
    return "\n".join(lines)
