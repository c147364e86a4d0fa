"""Following a job from attempt to attempt: which one is alive, where it began, and whether anything moves."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.observe.chaos.job import Job, is_back
from lockstep.supervision.pulse import Reading


class View(NamedTuple):
    """Of the attempt that is alive, as far as it shows itself."""

    pulses: Mapping[int, Reading]  # by rank
    first_step: int | None  # updates that were made when it came back; None: it is not back yet
    is_new: bool  # it came back just now

    @property
    def num_steps(self) -> int:
        """Made since then."""
        return max(pulse.step for pulse in self.pulses.values()) - (self.first_step or 0)


class Watch:
    def __init__(self) -> None:
        self._doomed: set[int] = set()  # ranks that end, or have ended, by an attack
        self._first_steps: dict[frozenset[int], int] = {}  # of each attempt, by its ranks' process ids
        self._last_sign: object = None
        self._moved_at = 0.0

    def look(self, job: Job) -> View:
        all_pulses = job.pulses()
        pulses = {rank: pulse for rank, pulse in all_pulses.items() if pulse.pid not in self._doomed}
        # Of all: a rank does not end with a data worker that was done already.
        sign = (job, {(pulse.pid, pulse.step, pulse.phase) for pulse in all_pulses.values()})
        if sign != self._last_sign:
            self._last_sign, self._moved_at = sign, time.monotonic()
        attempt = frozenset(pulse.pid for pulse in pulses.values())
        is_new = bool(pulses) and attempt not in self._first_steps and all(map(is_back, pulses.values()))
        if is_new:
            self._first_steps[attempt] = max(pulse.step for pulse in pulses.values())
        return View(pulses, self._first_steps.get(attempt), is_new)

    def doom(self, job: Job) -> None:
        """All its ranks of now end with one that was killed."""
        self._doomed |= {pulse.pid for pulse in job.pulses().values()}

    @property
    def still_s(self) -> float:
        """For how long nothing has moved."""
        return time.monotonic() - self._moved_at
