"""Compare the contenders: time of a step, weights of one process against those of several, and a verdict in words."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.bench.bench_record import BenchRecord
from lockstep.bench.contenders import AGAIN, HAND_WRITTEN, Contender
from lockstep.bench.interleaved_timing import Ratio, time_ratio
from lockstep.config.plurals import count_noun
from lockstep.engine.state_digest import digest


class StepTime(NamedTuple):
    """How long a step takes on one number of processes."""

    step_s: float  # the median over the rounds
    ratio: Ratio  # to the hand-written loop
    seconds: list[float]  # by round

    def as_json(self) -> dict[str, Any]:
        return {"step_s": self.step_s, **self.ratio._asdict(), "seconds": self.seconds}


class WeightComparison(NamedTuple):
    """The weights from the same training on one process and on several."""

    difference: float  # the largest absolute difference of any weight
    digests: tuple[str, str]

    @property
    def is_same(self) -> bool:
        """Are all bits equal?"""
        return self.digests[0] == self.digests[1]


class BenchRow(NamedTuple):
    """The results of one contender: a row of the table."""

    contender: Contender
    times: dict[int, StepTime]  # by number of processes
    weights: WeightComparison | None = None
    failure: str | None = None

    @property
    def promises_bits(self) -> bool:
        """Does this contender promise the same bits on any number of processes?"""
        return self.contender.loop == "lockstep"

    def as_json(self) -> dict[str, Any]:
        weights = self.weights
        return {
            "name": self.contender.name,
            "title": self.contender.title,
            "lanes": self.contender.lanes,
            "times": {str(processes): time.as_json() for processes, time in self.times.items()},
            "difference": None if weights is None else weights.difference,
            "same_bits": None if weights is None else weights.is_same,
            "digests": None if weights is None else list(weights.digests),
            "failure": self.failure,
        }


def compare_contenders(
    contenders: Sequence[Contender], records: Mapping[int, BenchRecord], failures: Mapping[str, str]
) -> list[BenchRow]:
    """Make a row for each contender.

    Args:
        contenders: in the order of the rows.
        records: by number of processes: one, and another number.
        failures: reasons, by the name of the contender.
    """
    seconds = {processes: record.times().seconds for processes, record in records.items()}
    rows = []
    for contender in contenders:
        name = contender.name
        sizes = [processes for processes in records if name in seconds[processes]]
        times = {size: _step_time(seconds[size][name], seconds[size][HAND_WRITTEN]) for size in sizes}
        weights = [records[size].weights(name) for size in sizes]
        compared = _compare_weights(*weights) if len(weights) == 2 else None
        rows.append(BenchRow(contender, times, compared, failures.get(name)))
    return rows


def _step_time(seconds: list[float], base_seconds: list[float]) -> StepTime:
    return StepTime(median(seconds), time_ratio(seconds, base_seconds), seconds)


def _compare_weights(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> WeightComparison:
    difference = max((one[name].double() - other[name].double()).abs().max().item() for name in one)
    return WeightComparison(difference, (digest(one), digest(other)))


class BenchVerdict(NamedTuple):
    """The table, summarized in a few sentences."""

    lines: list[str]
    is_kept: bool  # lockstep's promise: the same bits on any number of processes


def judge_rows(rows: Sequence[BenchRow], processes: int, capacity: int, capacity_unit: str) -> BenchVerdict:
    """Say what lockstep costs here, and whether it kept its promise.

    Args:
        rows: from `compare_contenders`.
        processes: the number of processes that one process is compared with.
        capacity: the number of processes that this machine has a core or a GPU for.
        capacity_unit: the unit of the capacity, in singular or plural: "core", "GPUs".
    """
    lines = [line for size in (1, processes) if (line := _cost_line(rows, size)) is not None]
    if processes > capacity:
        lines.append(
            f"{processes} processes share {capacity} {capacity_unit} here: "
            f"the time of a step on {processes} says little."
        )
    promising = [row for row in rows if row.promises_bits]
    broken = [row for row in promising if row.weights is not None and not row.weights.is_same]
    failed = [row for row in promising if row.failure is not None]
    lines += _bits_lines(rows, promising, broken, processes)
    return BenchVerdict(lines, not broken and not failed)


def _cost_line(rows: Sequence[BenchRow], size: int) -> str | None:
    """Describe the cost of lockstep with the fewest lanes, which is closest to what the hand-written loop does."""
    measured = [row for row in rows if row.promises_bits and size in row.times]
    again = next((row for row in rows if row.contender.name == AGAIN and size in row.times), None)
    if not measured or again is None:
        return None
    least, most = measured[0], measured[-1]
    ratio, noise = least.times[size].ratio, again.times[size].ratio.noise
    spread = f"×{ratio.median:.2f}, by round {ratio.low:.2f}–{ratio.high:.2f}"
    more = "" if most is least else f"; with {_lanes(most)} ×{most.times[size].ratio.median:.2f}"
    where = "On one process" if size == 1 else f"On {size} processes"
    cost = f"takes {_compared(ratio.difference)} hand-written ({spread}){more}"
    line = f"{where}, a step of lockstep with {_lanes(least)} {cost}"
    if abs(ratio.difference) > max(noise, ratio.wobble):
        return f"{line}."
    doubt = f"by round it varies by {ratio.wobble:.0%}, and hand-written against itself is off by {noise:.0%}"
    return f"{line}. Too noisy here to tell: {doubt}."


def _bits_lines(
    rows: Sequence[BenchRow], promising: Sequence[BenchRow], broken: Sequence[BenchRow], processes: int
) -> list[str]:
    if broken:
        worst = max(broken, key=lambda row: row.weights.difference if row.weights else 0.0)
        assert worst.weights is not None
        return [
            f"LOCKSTEP'S OWN BITS DIFFER between one process and {processes}: {worst.contender.title}, by up to "
            f"{worst.weights.difference:.2g}. This is a bug in lockstep: please report it with the output of --json."
        ]
    if not any(row.weights is not None for row in promising):
        return []
    by_hand = next((row.weights for row in rows if row.contender.name == HAND_WRITTEN), None)
    other = (
        "" if by_hand is None or by_hand.is_same else f"; hand-written, the weights end {by_hand.difference:.2g} apart"
    )
    return [f"On one process and on {processes}, lockstep computes the same bits{other}."]


def _lanes(row: BenchRow) -> str:
    assert row.contender.lanes is not None  # rows that promise bits are lockstep's
    return count_noun(row.contender.lanes, "lane")


def _compared(difference: float) -> str:
    if abs(difference) < 0.005:
        return "as long as"
    if difference >= 1.0:
        return f"{1.0 + difference:.1f} times as long as"
    return f"{abs(difference):.0%} {'longer' if difference > 0 else 'less'} than"
