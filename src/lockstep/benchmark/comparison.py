"""The table: for each entry what a step takes on one process and on N, and how far apart their weights end."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.benchmark.catalogue import HAND_WRITTEN, Entry
from lockstep.benchmark.ratios import Ratio, ratio
from lockstep.benchmark.record import Record
from lockstep.engine.digest import digest


class Time(NamedTuple):
    step_s: float  # the median of the rounds
    ratio: Ratio  # to hand-written
    seconds: list[float]  # by round

    def as_json(self) -> dict[str, Any]:
        return {"step_s": self.step_s, **self.ratio._asdict(), "seconds": self.seconds}


class Answer(NamedTuple):
    """Of the same training on one process and on several."""

    difference: float  # the largest of any weight
    digests: tuple[str, str]  # of the weights

    @property
    def is_same(self) -> bool:
        return self.digests[0] == self.digests[1]


class Row(NamedTuple):
    entry: Entry
    times: dict[int, Time]  # by number of processes
    answer: Answer | None = None
    failure: str | None = None

    @property
    def is_exact(self) -> bool:
        """Does it promise the same bits?"""
        return self.entry.loop == "lockstep"

    def as_json(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "name": self.entry.name,
            "title": self.entry.title,
            "lanes": self.entry.lanes,
            "times": {str(processes): time.as_json() for processes, time in self.times.items()},
            "difference": None if answer is None else answer.difference,
            "same_bits": None if answer is None else answer.is_same,
            "digests": None if answer is None else list(answer.digests),
            "failure": self.failure,
        }


def compare(entries: Sequence[Entry], records: Mapping[int, Record], failures: Mapping[str, str]) -> list[Row]:
    """`records` by number of processes: one and another. `failures` by entry, in words."""
    seconds = {processes: record.times().seconds for processes, record in records.items()}
    rows = []
    for entry in entries:
        sizes = [processes for processes in records if entry.name in seconds[processes]]
        times = {size: _time(seconds[size][entry.name], seconds[size][HAND_WRITTEN]) for size in sizes}
        weights = [records[size].weights(entry.name) for size in sizes]
        rows.append(Row(entry, times, _answer(*weights) if len(weights) == 2 else None, failures.get(entry.name)))
    return rows


def _time(seconds: list[float], others: list[float]) -> Time:
    return Time(median(seconds), ratio(seconds, others), seconds)


def _answer(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Answer:
    apart = max((one[name].double() - other[name].double()).abs().max().item() for name in one)
    return Answer(apart, (digest(one), digest(other)))
