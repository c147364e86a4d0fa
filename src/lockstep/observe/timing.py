"""Where the time of a run's steps goes, rank by rank, and who holds up the others: read from RUN/ranks/R.jsonl.

Ranks wait for each other once in a step, when gradients are exchanged. So a slow rank is not the one with the longest
step, for all take equally long, but the one that works longest before the exchange and waits least in it.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder
from lockstep.observe.curve import Curve, count_in, number_in
from lockstep.observe.growing import GrowingLines

PHASES = {
    "data": "waiting for data",
    "compute": "forward and backward pass",
    "exchange": "waiting for gradients",
    "update": "update",
    "rest": "the rest of the loop's body",
}

_MAX_RANKS = 4096
_LONGEST_S = 1e9  # thirty years: whatever is longer was not measured
_MOST_TIMED = 512  # steps of a rank that are remembered, the newest
_MOST_DRAWN = 8  # ranks that have curves
_STRAGGLES = 1.15  # times as long as the middle one of the ranks
_WAITS_LESS = 0.3  # of what it works longer: else it is chance, or the others wait for something else

_QUARTILES_APART = 1.349  # standard deviations, of a normal distribution

Line = dict[str, Any]


class RankTimes(NamedTuple):
    """Of one rank; seconds of a step are medians over the newest steps that were timed."""

    rank: int
    num_timed: int
    num_lanes: int
    phases: dict[str, float]  # seconds of a step
    compute_spread_s: float  # from step to step, as a standard deviation that outliers do not move
    travel_s: float | None  # of a step's gradients, waiting for other ranks included; None: not known
    sent_bytes: int  # in a step
    saving: float  # shares of all time between the first timed step and the last
    evaluating: float
    steps_per_s: float  # over that time
    peak_host_bytes: int | None
    peak_device_bytes: int | None

    @property
    def step_s(self) -> float:
        return sum(self.phases.values())

    @property
    def training_per_s(self) -> float:
        """Steps, over the time that was spent on steps alone."""
        training = 1.0 - self.saving - self.evaluating
        return self.steps_per_s / training if training > 0 else 0.0

    @property
    def own_s(self) -> float:
        """What the rank itself takes before it has to wait for others."""
        return self.phases["data"] + self.phases["compute"]

    @property
    def hidden(self) -> float | None:
        """The share of the gradients' travel that was behind the backward pass; None, where nothing travels."""
        if not self.travel_s:
            return None
        return max(0.0, 1.0 - self.phases["exchange"] / self.travel_s)


class Timed(NamedTuple):
    """One timed step of one rank."""

    step: int
    attempt: int
    num_lanes: int
    num_steps: int  # since the timed step before
    phases: dict[str, float]
    saving_s: float  # since then
    evaluating_s: float
    elapsed_s: float
    travel_s: float | None
    sent_bytes: int
    peak_host_bytes: int | None
    peak_device_bytes: int | None


class Straggler(NamedTuple):
    rank: int
    phase: str  # that it is slow in
    seconds: float  # that this phase takes there
    others_s: float  # and on the other ranks, in the middle
    held_up_s: float  # by which it holds up the others in each step
    num_lanes: int
    others_lanes: float


class RankLog:
    """One rank's timed steps, taken in as its file grows; of an earlier attempt nothing is kept."""

    def __init__(self, path: Path) -> None:
        self.lines = GrowingLines(path)
        self.attempt = 0
        self.steps_per_s = Curve()
        self.own_s = Curve()  # what the rank itself takes for a step, before it waits for others
        self.peak_bytes = Curve()  # on its GPU, or else in main memory
        self._timed: deque[Timed] = deque(maxlen=_MOST_TIMED)

    def look(self) -> None:
        for line in self.lines.new():
            if (timed := _timed_in(line)) is not None and timed.attempt >= self.attempt:
                self._add(timed)

    def times(self, rank: int) -> RankTimes | None:
        return _times_of(rank, list(self._timed)) if self._timed else None

    def _add(self, timed: Timed) -> None:
        if timed.attempt > self.attempt:
            self.attempt = timed.attempt
            self._timed.clear()
            for curve in (self.steps_per_s, self.own_s, self.peak_bytes):
                curve.forget_after(timed.step - timed.num_steps)
        self._timed.append(timed)
        if timed.elapsed_s > 0:
            self.steps_per_s.add(timed.step, timed.num_steps / timed.elapsed_s)
        self.own_s.add(timed.step, timed.phases["data"] + timed.phases["compute"])
        peak = timed.peak_device_bytes or timed.peak_host_bytes
        if peak is not None:
            self.peak_bytes.add(timed.step, float(peak))


class RankLogs:
    """Of all ranks that have written any."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path / "ranks"
        self._logs: dict[int, RankLog] = {}
        self._times: list[RankTimes] | None = None  # of the last look

    def look(self) -> None:
        """Take in what has come since the last look."""
        self._times = None
        paths = dict(_rank_files(self._folder))
        if len(paths) > _MAX_RANKS:
            raise UserError(f"{self._folder} has {len(paths)} files: expected at most {_MAX_RANKS}")
        for rank, path in paths.items():
            self._logs.setdefault(rank, RankLog(path)).look()

    def is_replaced(self) -> bool:
        return any(log.lines.is_replaced() for log in self._logs.values())

    def times(self) -> list[RankTimes]:
        """Of the newest attempt only: earlier ones may have had another number of ranks."""
        if self._times is None:
            newest = max((log.attempt for log in self._logs.values()), default=0)
            current = (log.times(rank) for rank, log in sorted(self._logs.items()) if log.attempt == newest)
            self._times = [times for times in current if times is not None]
        return self._times

    def drawn(self) -> dict[int, RankLog]:
        """The first few, for curves."""
        return dict(sorted(self._logs.items())[:_MOST_DRAWN])


def read_times(folder: RunFolder) -> list[RankTimes]:
    logs = RankLogs(folder)
    logs.look()
    return logs.times()


def find_straggler(times: Sequence[RankTimes]) -> Straggler | None:
    """The rank for which the others wait, if one stands out."""
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda each: each.own_s)
    others = [each for each in times if each is not slowest]
    usual_s = median(each.own_s for each in others)
    held_up_s = slowest.own_s - usual_s
    waits_less_s = median(each.phases["exchange"] for each in others) - slowest.phases["exchange"]
    if slowest.own_s <= _STRAGGLES * usual_s or waits_less_s < _WAITS_LESS * held_up_s:
        return None
    excess = {phase: slowest.phases[phase] - median(o.phases[phase] for o in others) for phase in ("data", "compute")}
    phase = max(excess, key=lambda name: excess[name])
    return Straggler(
        rank=slowest.rank,
        phase=phase,
        seconds=slowest.phases[phase],
        others_s=median(other.phases[phase] for other in others),
        held_up_s=held_up_s,
        num_lanes=slowest.num_lanes,
        others_lanes=median(other.num_lanes for other in others),
    )


def _rank_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("*.jsonl"):
        if re.fullmatch("[0-9]{1,9}", path.stem):
            yield int(path.stem), path


def _timed_in(line: Line) -> Timed | None:
    """None, if the line is of another kind, or not as a stopwatch writes it."""
    if line.get("kind") != "step":
        return None
    counts = [count_in(line.get(name)) for name in ("step", "attempt", "num_lanes", "num_steps")]
    durations = [_seconds_in(line.get(f"{name}_s")) for name in (*PHASES, "saving", "evaluating", "elapsed")]
    known_counts = [count for count in counts if count is not None]
    known = [duration for duration in durations if duration is not None]
    if len(known_counts) < len(counts) or len(known) < len(durations):
        return None
    step, attempt, num_lanes, num_steps = known_counts
    *phases, saving_s, evaluating_s, elapsed_s = known
    return Timed(
        step,
        attempt,
        num_lanes,
        num_steps,
        dict(zip(PHASES, phases, strict=True)),
        saving_s,
        evaluating_s,
        elapsed_s,
        travel_s=_seconds_in(line.get("travel_s")),
        sent_bytes=count_in(line.get("sent_bytes")) or 0,
        peak_host_bytes=count_in(line.get("peak_host_bytes")),
        peak_device_bytes=count_in(line.get("peak_device_bytes")),
    )


def _seconds_in(value: Any) -> float | None:
    found = number_in(value)
    return found if found is not None and 0 <= found < _LONGEST_S else None


def _times_of(rank: int, timed: Sequence[Timed]) -> RankTimes:
    steady = timed[1:] if len(timed) > 2 else timed  # the first is often still warming up
    elapsed_s = sum(each.elapsed_s for each in steady)
    travels = [each.travel_s for each in steady if each.travel_s is not None]
    return RankTimes(
        rank=rank,
        num_timed=len(steady),
        num_lanes=steady[-1].num_lanes,
        phases={phase: median(each.phases[phase] for each in steady) for phase in PHASES},
        compute_spread_s=_spread([each.phases["compute"] for each in steady]),
        travel_s=median(travels) if travels else None,
        sent_bytes=int(median(each.sent_bytes for each in steady)),
        saving=sum(each.saving_s for each in steady) / elapsed_s if elapsed_s else 0.0,
        evaluating=sum(each.evaluating_s for each in steady) / elapsed_s if elapsed_s else 0.0,
        steps_per_s=sum(each.num_steps for each in steady) / elapsed_s if elapsed_s else 0.0,
        peak_host_bytes=max((each.peak_host_bytes or 0 for each in timed), default=0) or None,
        peak_device_bytes=max((each.peak_device_bytes or 0 for each in timed), default=0) or None,
    )


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    lower, _, upper = quantiles(values, n=4)
    return (upper - lower) / _QUARTILES_APART
