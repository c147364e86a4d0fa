"""Interleaved timing: every variant once a round, so that a noisy machine disturbs all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lockstep.benchmark.ratios import Ratio, ratio


class Timing(NamedTuple):
    name: str
    median_s: float
    ratio: Ratio  # to the first variant


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
    return [Timing(name, statistics.median(values), ratio(values, base)) for name, values in seconds.items()]


def table(title: str, timings: list[Timing]) -> str:
    lines = [f"{title}", "| | ms a step | ratio | range by round |", "|---|---|---|---|"]
    for name, median_s, of in timings:
        lines.append(f"| {name} | {1e3 * median_s:.3f} | {of.median:.3f} | {of.low:.2f}–{of.high:.2f} |")
    return "\n".join(lines)
