"""An axis of a plot: from values to places, with round numbers along it."""

import math
from itertools import pairwise
from typing import NamedTuple

from lockstep.observe.wording import number

_LOG_FROM = 50.0  # times the lowest: then a logarithmic axis shows more
_MOST_TICKS = 6


class Axis(NamedTuple):
    low: float
    high: float
    begin: float  # place of `low`
    end: float  # place of `high`
    is_log: bool = False
    is_whole: bool = False  # nothing lies between two whole numbers

    def place(self, value: float) -> float:
        low, high, value = (math.log(max(each, 1e-300)) if self.is_log else each for each in (*self[:2], value))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def labels(self) -> list[str]:
        """Of the ticks: as many digits as tell one from the next."""
        ticks = self.ticks()
        if self.is_log or len(ticks) < 2:
            return [number(tick) for tick in ticks]
        unit = min(right - left for left, right in pairwise(ticks))
        digits = max(0, math.ceil(-math.log10(unit) - 1e-9))
        has_half = abs(unit * 10**digits - round(unit * 10**digits)) > 1e-6  # steps of 2.5
        if digits > 6 or max(map(abs, ticks)) >= 1e9:
            return [f"{tick:.6g}" for tick in ticks]
        return [f"{tick:,.{digits + has_half}f}" for tick in ticks]

    def ticks(self) -> list[float]:
        if self.is_log:
            return _log_ticks(self.low, self.high)
        ticks = _ticks(self.low, self.high)
        return [tick for tick in ticks if tick == round(tick)] if self.is_whole else ticks


def value_axis(low: float, high: float, begin: float, end: float, *, may_be_log: bool = False) -> Axis:
    """With some room above and below."""
    if may_be_log and low > 0 and high / low >= _LOG_FROM:
        room = (high / low) ** 0.04
        return Axis(low / room, high * room, begin, end, is_log=True)
    span = high - low
    room = 0.06 * span if span > 0 and math.isfinite(span) else 0.1 * abs(high) or 1.0
    return Axis(low - room, high + room, begin, end)


def step_axis(first: int, last: int, begin: float, end: float) -> Axis:
    room = 0 if last > first else 1
    return Axis(first - room, last + room, begin, end, is_whole=True)


def _ticks(low: float, high: float) -> list[float]:
    span = high - low
    rough = span / _MOST_TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    unit = next(unit * magnitude for unit in (1, 2, 2.5, 5, 10) if unit * magnitude >= rough)
    first, last = math.ceil(low / unit), math.floor(high / unit)
    return [number * unit for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if len(powers) > 4 else (1, 3) if len(powers) > 2 else (1, 2, 5)
    ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
    return ticks[:: -(-len(ticks) // _MOST_TICKS)] if ticks else [low, high]
