"""Where each rank's step time goes, and which rank holds up the others; read from RUN/ranks.

Ranks wait for each other once per step, for gradients, so their steps all take equally long. The slow rank is therefore
not the one with the longest step, but the one that works longest before that wait and waits least.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.events.jsonl import parse_count, parse_number
from lockstep.events.run_folder import RunFolder
from lockstep.observe.curve import Curve
from lockstep.observe.jsonl_tail import JsonlTail

# The phases of a step: their keys in files, and their names in reports.
PHASE_LABELS = {
    "data": "data wait",
    "compute": "compute",
    "exchange": "gradient wait",
    "update": "update",
    "rest": "other",
}

_MAX_RANKS = 4096
_MAX_S = 1e9  # thirty years: longer times are invalid
_MAX_TIMED_STEPS = 512  # the newest that are kept for each rank
_MAX_RANKS_WITH_CURVES = 8
_STRAGGLER_RATIO = 1.15  # a rank's own work, relative to the median of the other ranks
_STRAGGLER_WAIT = 0.3  # share of its extra work by which it waits less; below it, the others wait for something else
_IQR_PER_STD = 1.349  # the interquartile range of a normal distribution, in standard deviations


class RankTimes(NamedTuple):
    """The timing of one rank. Times of a step are medians over the newest timed steps."""

    rank: int
    num_timed: int
    num_lanes: int
    phases: dict[str, float]  # seconds of a step
    compute_spread_s: float  # from step to step: a standard deviation that is robust to outliers
    travel_s: float | None  # sending a step's gradients, including waiting for other ranks; None if not known
    sent_bytes: int  # per step
    saving: float  # share of the time between the first and the last timed step
    evaluating: float  # likewise
    steps_per_s: float  # over that time
    peak_host_bytes: int | None
    peak_device_bytes: int | None

    @property
    def step_s(self) -> float:
        """The time of a step."""
        return sum(self.phases.values())

    @property
    def training_per_s(self) -> float:
        """Steps per second, without the time for saving and evaluating."""
        training = 1.0 - self.saving - self.evaluating
        return self.steps_per_s / training if training > 0 else 0.0

    @property
    def own_s(self) -> float:
        """The rank's own work in a step, before it waits for other ranks."""
        return self.phases["data"] + self.phases["compute"]

    @property
    def hidden(self) -> float | None:
        """The share of the communication that overlapped with the backward pass; None if there is none."""
        if not self.travel_s:
            return None
        return max(0.0, 1.0 - self.phases["exchange"] / self.travel_s)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the device, or of the host if there is no device."""
        return self.peak_device_bytes or self.peak_host_bytes


class TimedStep(NamedTuple):
    """One timed step of one rank."""

    step: int
    attempt: int
    num_lanes: int
    num_steps: int  # since the last timed step
    phases: dict[str, float]
    saving_s: float  # since the last timed step
    evaluating_s: float  # likewise
    elapsed_s: float  # likewise
    travel_s: float | None
    sent_bytes: int
    peak_host_bytes: int | None
    peak_device_bytes: int | None


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    phase: str  # in which it is slow
    seconds: float  # that this phase takes on it
    others_s: float  # the median of the same phase on the other ranks
    held_up_s: float  # how long the others wait for it in each step
    num_lanes: int
    others_lanes: float


class RankLog:
    """The timed steps of one rank, read as its file grows. Only the newest attempt counts."""

    def __init__(self, path: Path) -> None:
        self.lines = JsonlTail(path)
        self.attempt = 0
        self.steps_per_s = Curve()
        self.own_s = Curve()
        self.peak_bytes = Curve()
        self._timed: deque[TimedStep] = deque(maxlen=_MAX_TIMED_STEPS)

    def refresh(self) -> None:
        """Read what was added since the last call."""
        for line in self.lines.read_new():
            if (timed := _parse_timed_step(line)) is not None and timed.attempt >= self.attempt:
                self._add(timed)

    def times(self, rank: int) -> RankTimes | None:
        """Summarize the timed steps; None if there are none."""
        return _summarize(rank, list(self._timed)) if self._timed else None

    def _add(self, timed: TimedStep) -> None:
        if timed.attempt > self.attempt:
            self.attempt = timed.attempt
            self._timed.clear()
            for curve in (self.steps_per_s, self.own_s, self.peak_bytes):
                curve.drop_after(timed.step - timed.num_steps)
        self._timed.append(timed)
        if timed.elapsed_s > 0:
            self.steps_per_s.add(timed.step, timed.num_steps / timed.elapsed_s)
        self.own_s.add(timed.step, timed.phases["data"] + timed.phases["compute"])
        peak = timed.peak_device_bytes or timed.peak_host_bytes
        if peak is not None:
            self.peak_bytes.add(timed.step, float(peak))


class RankLogs:
    """The timed steps of all ranks of a run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path / "ranks"
        self._logs: dict[int, RankLog] = {}
        self._times: list[RankTimes] | None = None  # since the last refresh

    def refresh(self) -> None:
        """Read what was added since the last call."""
        self._times = None
        paths = dict(_rank_files(self._folder))
        if len(paths) > _MAX_RANKS:
            raise UserError(f"{self._folder} has {len(paths)} files: expected at most {_MAX_RANKS}")
        for rank, path in paths.items():
            self._logs.setdefault(rank, RankLog(path)).refresh()

    def is_replaced(self) -> bool:
        """Has any file been replaced or shortened?"""
        return any(log.lines.is_replaced() for log in self._logs.values())

    def times(self) -> list[RankTimes]:
        """Return the timing of each rank of the newest attempt; earlier ones may have had other ranks."""
        if self._times is None:
            newest = max((log.attempt for log in self._logs.values()), default=0)
            current = (log.times(rank) for rank, log in sorted(self._logs.items()) if log.attempt == newest)
            self._times = [times for times in current if times is not None]
        return self._times

    def first_logs(self) -> dict[int, RankLog]:
        """Return the logs of the first few ranks, for plots."""
        return dict(sorted(self._logs.items())[:_MAX_RANKS_WITH_CURVES])


def read_rank_times(folder: RunFolder) -> list[RankTimes]:
    """Return the timing of each rank of a run."""
    logs = RankLogs(folder)
    logs.refresh()
    return logs.times()


def find_straggler(times: Sequence[RankTimes]) -> Straggler | None:
    """Return the rank that the others wait for, if one stands out."""
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda each: each.own_s)
    others = [each for each in times if each is not slowest]
    usual_s = median(each.own_s for each in others)
    held_up_s = slowest.own_s - usual_s
    waits_less_s = median(each.phases["exchange"] for each in others) - slowest.phases["exchange"]
    if slowest.own_s <= _STRAGGLER_RATIO * usual_s or waits_less_s < _STRAGGLER_WAIT * held_up_s:
        return None
    others_s = {phase: median(each.phases[phase] for each in others) for phase in ("data", "compute")}
    phase = max(others_s, key=lambda name: slowest.phases[name] - others_s[name])
    return Straggler(
        rank=slowest.rank,
        phase=phase,
        seconds=slowest.phases[phase],
        others_s=others_s[phase],
        held_up_s=held_up_s,
        num_lanes=slowest.num_lanes,
        others_lanes=median(each.num_lanes for each in others),
    )


def _rank_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("*.jsonl"):
        if re.fullmatch("[0-9]{1,9}", path.stem):
            yield int(path.stem), path


def _parse_timed_step(line: dict[str, Any]) -> TimedStep | None:
    """Return a timed step; None for a line of another kind, or one that is not well formed."""
    if line.get("kind") != "step":
        return None
    counts = [parse_count(line.get(name)) for name in ("step", "attempt", "num_lanes", "num_steps")]
    durations = [_parse_seconds(line.get(f"{name}_s")) for name in (*PHASE_LABELS, "saving", "evaluating", "elapsed")]
    known_counts = [count for count in counts if count is not None]
    known = [duration for duration in durations if duration is not None]
    if len(known_counts) < len(counts) or len(known) < len(durations):
        return None
    step, attempt, num_lanes, num_steps = known_counts
    *phases, saving_s, evaluating_s, elapsed_s = known
    return TimedStep(
        step,
        attempt,
        num_lanes,
        num_steps,
        dict(zip(PHASE_LABELS, phases, strict=True)),
        saving_s,
        evaluating_s,
        elapsed_s,
        travel_s=_parse_seconds(line.get("travel_s")),
        sent_bytes=parse_count(line.get("sent_bytes")) or 0,
        peak_host_bytes=parse_count(line.get("peak_host_bytes")),
        peak_device_bytes=parse_count(line.get("peak_device_bytes")),
    )


def _parse_seconds(value: Any) -> float | None:
    seconds = parse_number(value)
    return seconds if seconds is not None and 0 <= seconds < _MAX_S else None


def _summarize(rank: int, timed: Sequence[TimedStep]) -> RankTimes:
    steady = timed[1:] if len(timed) > 2 else timed  # the first is often a warm-up
    elapsed_s = sum(each.elapsed_s for each in steady)
    travels = [each.travel_s for each in steady if each.travel_s is not None]
    return RankTimes(
        rank=rank,
        num_timed=len(steady),
        num_lanes=steady[-1].num_lanes,
        phases={phase: median(each.phases[phase] for each in steady) for phase in PHASE_LABELS},
        compute_spread_s=_robust_std([each.phases["compute"] for each in steady]),
        travel_s=median(travels) if travels else None,
        sent_bytes=int(median(each.sent_bytes for each in steady)),
        saving=sum(each.saving_s for each in steady) / elapsed_s if elapsed_s else 0.0,
        evaluating=sum(each.evaluating_s for each in steady) / elapsed_s if elapsed_s else 0.0,
        steps_per_s=sum(each.num_steps for each in steady) / elapsed_s if elapsed_s else 0.0,
        peak_host_bytes=max((each.peak_host_bytes or 0 for each in timed), default=0) or None,
        peak_device_bytes=max((each.peak_device_bytes or 0 for each in timed), default=0) or None,
    )


def _robust_std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    lower, _, upper = quantiles(values, n=4)
    return (upper - lower) / _IQR_PER_STD
