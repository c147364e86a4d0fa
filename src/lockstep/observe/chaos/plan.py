"""What is done to a job, and when: drawn from a seed before anything starts, so that it can be done again.

Who exactly is hit depends on what runs at that moment; `Attack.lot` decides among those that may be.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")

Victim = Literal["rank 0", "any rank", "launcher", "nursery", "data worker", "everything"]
Act = Literal["kill", "stop, then kill", "stop, then let go on"]
Moment = Literal["start", "step", "save", "evaluation"]

# Out of some hundred. Start: shortly after the attack before, so while a restart or a new launcher comes up.
_VICTIMS: dict[Victim, int] = {
    "rank 0": 20,
    "any rank": 30,
    "launcher": 15,
    "nursery": 10,
    "data worker": 15,
    "everything": 10,  # at once, as a container's end has it
}
_ACTS: dict[Act, int] = {"kill": 85, "stop, then kill": 15}
_MOMENTS: dict[Moment, int] = {"start": 30, "step": 35, "save": 25, "evaluation": 10}
_SHARE_OF_PAUSES = 0.15  # for so many of the kills there is a stop besides that kills nobody

# A launcher's start takes some three seconds and a rank's one: each part of it gets its turn.
_LONGEST_START_S: dict[Victim, float] = {"launcher": 3.0, "nursery": 3.0, "everything": 3.0}
_LONGEST_RANK_START_S = 1.0
_LONGEST_DELAY_S: dict[Moment, float] = {"step": 0.03, "save": 0.01, "evaluation": 0.02}
_LONGEST_STOP_S = 1.5


@dataclass(frozen=True)
class Attack:
    number: int  # from 1
    victim: Victim
    lot: float  # 0 … 1: which of several
    act: Act
    moment: Moment
    after_steps: int  # that the job has made since it came back; not for `start`
    delay_s: float  # after that moment has come; at a start, after the attack before or the victim's own beginning
    stop_s: float  # how long a stop lasts
    processes: int  # of the next launcher, if this one ends

    @property
    def is_kill(self) -> bool:
        return self.act != "stop, then let go on"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def draw_plan(seed: int, kills: int, *, processes: int, steps: int, with_data_workers: bool) -> list[Attack]:
    """So many kills, and a few stops between them, spread over a run of `steps`; on 1 to `processes` processes."""
    draw = random.Random(f"lockstep chaos {seed}")
    acts: list[Act] = []
    for _ in range(kills):
        if draw.random() < _SHARE_OF_PAUSES:
            acts.append("stop, then let go on")
        acts.append(_chosen(draw, _ACTS))
    victims = {name: weight for name, weight in _VICTIMS.items() if with_data_workers or name != "data worker"}
    most_steps = max(1, round(2 * steps / (kills + 1)))
    return [
        _draw_attack(draw, number, act, _chosen(draw, victims), processes, most_steps)
        for number, act in enumerate(acts, start=1)
    ]


def _draw_attack(draw: random.Random, number: int, act: Act, victim: Victim, processes: int, most_steps: int) -> Attack:
    moment = _chosen(draw, _MOMENTS)
    longest_s = _LONGEST_START_S.get(victim, _LONGEST_RANK_START_S) if moment == "start" else _LONGEST_DELAY_S[moment]
    return Attack(
        number=number,
        victim=victim,
        lot=draw.random(),
        act=act,
        moment=moment,
        after_steps=draw.randint(0, most_steps),
        delay_s=round(longest_s * draw.random() ** 2, 4),  # rather short: most starts are quick
        stop_s=round(draw.uniform(0.05, _LONGEST_STOP_S), 3),
        processes=max(draw.randint(1, processes), draw.randint(1, processes)),  # rather many than few
    )


def _chosen(draw: random.Random, weights: Mapping[_T, int]) -> _T:
    return draw.choices(list(weights), list(weights.values()))[0]
