"""Where the time of a run's steps goes, rank by rank, and who holds up the others: read from RUN/ranks/R.jsonl.

Ranks wait for each other once in a step, when gradients are exchanged. So a slow rank is not the one with the longest
step, for all take equally long, but the one that works longest before the exchange and waits least in it.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.events.jsonl import read_lines
from lockstep.events.run_folder import RunFolder

PHASES = {
    "data": "waiting for data",
    "compute": "forward and backward pass",
    "exchange": "waiting for gradients",
    "update": "update",
    "rest": "the rest of the loop's body",
}

_MAX_RANKS = 4096
_STRAGGLES = 1.15  # times as long as the middle one of the ranks

_QUARTILES_APART = 1.349  # standard deviations, of a normal distribution

Line = dict[str, Any]


class RankTimes(NamedTuple):
    """Of one rank; seconds of a step are medians over the steps that were timed."""

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
    def own_s(self) -> float:
        """What the rank itself takes before it has to wait for others."""
        return self.phases["data"] + self.phases["compute"]

    @property
    def hidden(self) -> float | None:
        """The share of the gradients' travel that was behind the backward pass; None, where nothing travels."""
        if not self.travel_s:
            return None
        return max(0.0, 1.0 - self.phases["exchange"] / self.travel_s)


class Straggler(NamedTuple):
    rank: int
    phase: str  # that it is slow in
    seconds: float  # that this phase takes there
    others_s: float  # and on the other ranks, in the middle
    held_up_s: float  # by which it holds up the others in each step
    num_lanes: int
    others_lanes: float


def read_times(folder: RunFolder) -> list[RankTimes]:
    """Of all ranks that have written any; of a step that was made again, its last time counts."""
    paths = sorted((folder.path / "ranks").glob("*.jsonl"), key=_rank_of)
    if len(paths) > _MAX_RANKS:
        raise UserError(f"{folder.path / 'ranks'} has {len(paths)} files: expected at most {_MAX_RANKS}")
    lines = {_rank_of(path): _timed_lines(path) for path in paths}
    newest = max((line["attempt"] for own in lines.values() for line in own), default=0)
    # Only of the last attempt: earlier ones may have had another number of ranks.
    current = {rank: [line for line in own if line["attempt"] == newest] for rank, own in lines.items()}
    return [_times_of(rank, own) for rank, own in current.items() if own]


def find_straggler(times: Sequence[RankTimes]) -> Straggler | None:
    """The rank for which the others wait, if one stands out."""
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda each: each.own_s)
    others = [each for each in times if each is not slowest]
    usual_s = median(each.own_s for each in others)
    if slowest.own_s <= _STRAGGLES * usual_s:
        return None
    excess = {phase: slowest.phases[phase] - median(o.phases[phase] for o in others) for phase in ("data", "compute")}
    phase = max(excess, key=lambda name: excess[name])
    return Straggler(
        rank=slowest.rank,
        phase=phase,
        seconds=slowest.phases[phase],
        others_s=median(other.phases[phase] for other in others),
        held_up_s=slowest.own_s - usual_s,
        num_lanes=slowest.num_lanes,
        others_lanes=median(other.num_lanes for other in others),
    )


def _rank_of(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else _MAX_RANKS


def _timed_lines(path: Path) -> list[Line]:
    """One for each timed step."""
    by_step: dict[int, Line] = {}
    for line in read_lines(path):
        if line.get("kind") == "step" and _is_whole(line):
            by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def _is_whole(line: Line) -> bool:
    numbers = [line.get(f"{phase}_s") for phase in (*PHASES, "saving", "evaluating", "elapsed")]
    numbers += [line.get(name) for name in ("step", "attempt", "num_steps", "num_lanes")]
    return all(isinstance(number, int | float) and number >= 0 for number in numbers)


def _times_of(rank: int, lines: Sequence[Line]) -> RankTimes:
    steady = lines[1:] if len(lines) > 2 else lines  # the first is often still warming up
    elapsed = sum(line["elapsed_s"] for line in steady)
    travels = [line["travel_s"] for line in steady if isinstance(line.get("travel_s"), int | float)]
    return RankTimes(
        rank=rank,
        num_timed=len(steady),
        num_lanes=steady[-1]["num_lanes"],
        phases={phase: median(line[f"{phase}_s"] for line in steady) for phase in PHASES},
        compute_spread_s=_spread([line["compute_s"] for line in steady]),
        travel_s=median(travels) if travels else None,
        sent_bytes=int(median(line.get("sent_bytes", 0) for line in steady)),
        saving=sum(line["saving_s"] for line in steady) / elapsed if elapsed else 0.0,
        evaluating=sum(line["evaluating_s"] for line in steady) / elapsed if elapsed else 0.0,
        steps_per_s=sum(line["num_steps"] for line in steady) / elapsed if elapsed else 0.0,
        peak_host_bytes=_most(lines, "peak_host_bytes"),
        peak_device_bytes=_most(lines, "peak_device_bytes"),
    )


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    lower, _, upper = quantiles(values, n=4)
    return (upper - lower) / _QUARTILES_APART


def _most(lines: Sequence[Line], name: str) -> int | None:
    return max((line[name] for line in lines if isinstance(line.get(name), int)), default=None)
