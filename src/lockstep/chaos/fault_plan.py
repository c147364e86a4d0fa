"""The plan of faults to inject: drawn from a seed before anything starts, so that it can be repeated.

Which process is hit depends on what is running at that moment; `PlannedFault.lot` decides among the candidates.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")

# These words are written to plan.jsonl and attacks.jsonl, and printed by --json.
TargetKind = Literal["rank 0", "any rank", "launcher", "fork server", "data worker", "everything"]
Act = Literal["kill", "stop, then kill", "stop, then let go on"]
Moment = Literal["start", "step", "save", "evaluation"]

# Weights, out of 100.
_TARGET_WEIGHTS: dict[TargetKind, int] = {
    "rank 0": 20,
    "any rank": 30,
    "launcher": 15,
    "fork server": 10,
    "data worker": 15,
    "everything": 10,  # all processes at once, as when a container is killed
}
_ACTS: dict[Act, int] = {"kill": 85, "stop, then kill": 15}
# "start": shortly after the previous fault, while a restart or a new launcher is coming up.
_MOMENTS: dict[Moment, int] = {"start": 30, "step": 35, "save": 25, "evaluation": 10}
_PAUSES_PER_KILL = 0.15  # additional faults that stop a process and let it continue

# A launcher takes about three seconds to start, a rank about one: faults are spread over all of it.
_MAX_START_DELAY_S: dict[TargetKind, float] = {"launcher": 3.0, "fork server": 3.0, "everything": 3.0}
_MAX_RANK_START_DELAY_S = 1.0
_MAX_DELAY_S: dict[Moment, float] = {"step": 0.03, "save": 0.01, "evaluation": 0.02}
_MAX_STOP_S = 1.5


@dataclass(frozen=True)
class PlannedFault:
    """One fault: what to do to which process, and when. Its fields are those of a line of plan.jsonl."""

    number: int  # from 1
    victim: TargetKind  # the process to hit
    lot: float  # from 0 to 1: chooses among several candidates
    act: Act
    moment: Moment
    after_steps: int  # steps since the job recovered; not used for `start`
    delay_s: float  # after the moment; for `start`, after the previous fault or the target's own start
    stop_s: float  # how long a stop lasts
    processes: int  # of the next launcher, if this one ends

    @property
    def is_kill(self) -> bool:
        """Does the fault end its target?"""
        return self.act != "stop, then let go on"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def draw_fault_plan(
    seed: int, kills: int, *, processes: int, steps: int, with_data_workers: bool
) -> list[PlannedFault]:
    """Draw faults, spread over a whole run.

    Args:
        seed: the same seed and arguments draw the same plan.
        kills: the number of faults that kill; a few more only stop a process for a while.
        processes: the largest number of processes that a launcher starts; the smallest is 1.
        steps: the number of steps of the run.
        with_data_workers: whether there are data workers to hit.
    """
    draw = random.Random(f"lockstep chaos {seed}")
    acts: list[Act] = []
    for _ in range(kills):
        if draw.random() < _PAUSES_PER_KILL:
            acts.append("stop, then let go on")
        acts.append(_weighted_choice(draw, _ACTS))
    victims = {name: weight for name, weight in _TARGET_WEIGHTS.items() if with_data_workers or name != "data worker"}
    max_steps = max(1, round(2 * steps / (kills + 1)))
    return [
        _draw_fault(draw, number, act, _weighted_choice(draw, victims), processes, max_steps)
        for number, act in enumerate(acts, start=1)
    ]


def _draw_fault(
    draw: random.Random, number: int, act: Act, victim: TargetKind, processes: int, max_steps: int
) -> PlannedFault:
    moment = _weighted_choice(draw, _MOMENTS)
    start_s = _MAX_START_DELAY_S.get(victim, _MAX_RANK_START_DELAY_S)
    max_delay_s = start_s if moment == "start" else _MAX_DELAY_S[moment]
    return PlannedFault(
        number=number,
        victim=victim,
        lot=draw.random(),
        act=act,
        moment=moment,
        after_steps=draw.randint(0, max_steps),
        delay_s=round(max_delay_s * draw.random() ** 2, 4),  # squared: mostly short, because most starts are quick
        stop_s=round(draw.uniform(0.05, _MAX_STOP_S), 3),
        processes=max(draw.randint(1, processes), draw.randint(1, processes)),  # more rather than fewer
    )


def _weighted_choice(draw: random.Random, weights: Mapping[_T, int]) -> _T:
    return draw.choices(list(weights), list(weights.values()))[0]
