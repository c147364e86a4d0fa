"""Measures where a rank's time goes: the phases of some steps, and evaluation and saving between steps.

[Note: timed steps] A GPU runs asynchronously, so the host's clock does not show how long its work takes. A timed step
therefore waits for the GPU wherever one phase ends and the next begins. At most one step in ten is timed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from lockstep.engine.engine import CommStats, Engine

TimedPhase = Literal["data", "compute", "exchange", "update", "rest"]
TIMED_PHASES: tuple[TimedPhase, ...] = ("data", "compute", "exchange", "update", "rest")

Aside = Literal["saving", "evaluating"]
ASIDES: tuple[Aside, ...] = ("saving", "evaluating")

_MIN_STEPS_BETWEEN = 10  # timed steps, on a GPU


class StepTimer:
    """Times every `every`-th step of one rank; on a GPU, fewer. None: no step."""

    def __init__(self, device: torch.device, every: int | None) -> None:
        self._device = device
        self._every = every
        if every is not None and device.type != "cpu":
            self._every = every * -(-_MIN_STEPS_BETWEEN // every)
        self._is_on = False
        self._lap_began = 0.0
        self._laps: dict[TimedPhase, float] = {}
        self._comm_before = CommStats()
        self._asides: dict[Aside, float] = dict.fromkeys(ASIDES, 0.0)
        self._since: tuple[int, float] | None = None  # the update and the time from which asides are counted

    def begin(self, number: int, engine: Engine | None) -> None:
        """Begin step `number`, which waits for its batch now."""
        if self._since is None:
            self._since = number - 1, time.perf_counter()
        self._is_on = self._every is not None and number % self._every == 0
        if self._is_on:
            self._laps = dict.fromkeys(TIMED_PHASES, 0.0)
            self._comm_before = CommStats() if engine is None else engine.comm_stats(timed=True)
            self._lap_began = self._now()

    def lap(self, phase: TimedPhase) -> None:
        """Add the time since the previous lap to this phase."""
        if self._is_on:
            now = self._now()
            self._laps[phase] += now - self._lap_began
            self._lap_began = now

    @contextmanager
    def aside(self, what: Aside) -> Iterator[None]:
        """Keep the time inside this context out of the phases of a step, even if it is entered within one."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - began
            self._asides[what] += spent_s
            self._lap_began += spent_s

    def end(self, number: int, engine: Engine | None) -> dict[str, Any] | None:
        """Return a timed step's phases, and the time since the previous timed step; None for any other step."""
        if not self._is_on:
            return None
        self.lap("rest")
        self._is_on = False
        comm = CommStats() if engine is None else engine.comm_stats(timed=False)
        assert self._since is not None
        (since, began), now = self._since, time.perf_counter()
        values: dict[str, Any] = {f"{phase}_s": seconds for phase, seconds in self._laps.items()}
        if comm.seconds is not None:
            values["travel_s"] = comm.seconds - (self._comm_before.seconds or 0.0)
            values["sent_bytes"] = comm.num_bytes - self._comm_before.num_bytes
        values |= {f"{aside}_s": seconds for aside, seconds in self._asides.items()}
        values |= {"num_steps": number - since, "elapsed_s": now - began}
        self._asides = dict.fromkeys(ASIDES, 0.0)
        self._since = number, now
        return values

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
