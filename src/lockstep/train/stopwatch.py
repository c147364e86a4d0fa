"""Where this rank's time goes: each phase of some of the steps, and all that is done between steps.

[Note: timed steps] A GPU works behind the host's back, so the host's clock does not say what takes how long there. A
step that is timed therefore waits for the device wherever one phase ends and the next begins. It is one step in ten, at
most, and the others are left alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from lockstep.engine.engine import Engine, Travel

Phase = Literal["data", "compute", "exchange", "update", "rest"]
PHASES: tuple[Phase, ...] = ("data", "compute", "exchange", "update", "rest")

Aside = Literal["saving", "evaluating"]
ASIDES: tuple[Aside, ...] = ("saving", "evaluating")


_FEWEST_BETWEEN = 10  # timed steps, on a GPU


class Stopwatch:
    """Of one rank. `every`: so many updates from one timed step to the next; on a GPU it may be more. None: never."""

    def __init__(self, device: torch.device, every: int | None) -> None:
        self._device = device
        self._every = every
        if every is not None and device.type != "cpu":
            self._every = every * -(-_FEWEST_BETWEEN // every)
        self._is_on = False
        self._lap_began = 0.0
        self._laps: dict[Phase, float] = {}
        self._travelled = Travel()
        self._asides: dict[Aside, float] = dict.fromkeys(ASIDES, 0.0)
        self._since: tuple[int, float] | None = None  # the update and the time from which asides are counted

    def begin(self, number: int, engine: Engine | None) -> None:
        """The batch of this update is about to be waited for."""
        if self._since is None:
            self._since = number - 1, time.perf_counter()
        self._is_on = self._every is not None and number % self._every == 0
        if self._is_on:
            self._laps = dict.fromkeys(PHASES, 0.0)
            self._travelled = Travel() if engine is None else engine.travel(timed=True)
            self._lap_began = self._now()

    def lap(self, phase: Phase) -> None:
        """What was done since the lap before was this."""
        if self._is_on:
            now = self._now()
            self._laps[phase] += now - self._lap_began
            self._lap_began = now

    @contextmanager
    def aside(self, what: Aside) -> Iterator[None]:
        """Inside, something else than steps is done; also in the body of a step, whose lap it does not count in."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - began
            self._asides[what] += spent_s
            self._lap_began += spent_s

    def end(self, number: int, engine: Engine | None) -> dict[str, Any] | None:
        """Of a timed step, where its time went, and the time since the timed step before; None of any other."""
        if not self._is_on:
            return None
        self.lap("rest")
        self._is_on = False
        travelled = Travel() if engine is None else engine.travel(timed=False)
        assert self._since is not None
        (since, began), now = self._since, time.perf_counter()
        values: dict[str, Any] = {f"{phase}_s": seconds for phase, seconds in self._laps.items()}
        if travelled.seconds is not None:
            values["travel_s"] = travelled.seconds - (self._travelled.seconds or 0.0)
            values["sent_bytes"] = travelled.num_bytes - self._travelled.num_bytes
        values |= {f"{aside}_s": seconds for aside, seconds in self._asides.items()}
        values |= {"num_steps": number - since, "elapsed_s": now - began}
        self._asides = dict.fromkeys(ASIDES, 0.0)
        self._since = number, now
        return values

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
