"""Learning-rate schedules: warm-up, then constant, linear, cosine or stepwise decay.

A schedule is a pure function of the number of completed updates. So there is nothing to save: a resumed run continues
where it was, a skipped update does not move the schedule, and all ranks agree.

    schedule = Schedule.cosine(warmup="2 epochs", final=0.1)
    factor = schedule.bind(RunLength(steps_per_epoch=100, global_batch=512, total_steps=1000))
    set_rates(optimizer, factor(updates_completed))       # before each optimizer.step()
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from math import cos, isfinite, pi
from typing import TYPE_CHECKING, Self

from torch import Tensor
from torch.optim import Optimizer

from lockstep.config.duration import Duration, RunLength
from lockstep.errors import UserError

if TYPE_CHECKING:  # scripts need no pydantic
    from lockstep.config.train_schema import ScheduleConfig

Factor = Callable[[int], float]
"""Returns, for the number of updates completed before this one, what every group's base rate is multiplied by."""
DurationLike = Duration | str | int
"""`"500 steps"`, `"2 epochs"`, `"1e6 samples"`, or a number of steps."""

NONE = Duration.parse(0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning-rate schedule: `Schedule.constant`, `.linear`, `.cosine` or `.step`.

    Example:
        run.optimizer(model, optimizer, lockstep.Schedule.cosine(warmup="500 steps", final=0.1))

    Durations are `"500 steps"`, `"2 epochs"`, `"1e6 samples"` or a number of steps. With a warm-up of w steps, update n
    (from 1) gets n/w of the learning rate; the schedule proper begins after the w-th.

    Args:
        kind: "constant", "linear", "cosine" or "step".
        warmup: how long the warm-up lasts.
        length: of linear and cosine: when the decay ends, warm-up included. None: with the run.
        final: of linear and cosine: the learning rate at the end, as a fraction of the optimizer's.
        every: of step: the interval, counted from the end of the warm-up.
        factor: of step: what the learning rate is multiplied by after each interval.
    """

    kind: str = "constant"
    warmup: Duration = NONE
    length: Duration | None = None
    final: float = 0.0
    every: Duration | None = None
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            near = get_close_matches(self.kind, _KINDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"schedule: expected one of {', '.join(_KINDS)}, got {self.kind!r}{hint}")
        for name, duration in (("length", self.length), ("every", self.every)):
            if duration is not None and not duration.number:
                raise UserError(f"schedule: {name}={duration}: expected a duration greater than 0")
        if not (isfinite(self.final) and self.final >= 0):
            raise UserError(f"schedule: final={self.final}: expected a number of at least 0")
        if not 0 < self.factor <= 1:
            raise UserError(f"schedule: factor={self.factor}: expected a number greater than 0 and of at most 1")

    @classmethod
    def constant(cls, *, warmup: DurationLike = NONE) -> Self:
        """Warm up, then keep the learning rate.

        `warmup`: how long the warm-up lasts; 0 by default.
        """
        return cls(kind="constant", warmup=_read("warmup", warmup))

    @classmethod
    def linear(cls, *, warmup: DurationLike = NONE, length: DurationLike | None = None, final: float = 0.0) -> Self:
        """Warm up, then decay linearly.

        Args:
            warmup: how long the warm-up lasts.
            length: when the decay ends, counted from the start of the run, warm-up included. None: with the run.
            final: the learning rate at the end, as a fraction of the optimizer's.
        """
        return cls(kind="linear", warmup=_read("warmup", warmup), length=_read_optional("length", length), final=final)

    @classmethod
    def cosine(cls, *, warmup: DurationLike = NONE, length: DurationLike | None = None, final: float = 0.0) -> Self:
        """Warm up, then decay along half a cosine.

        Args:
            warmup: how long the warm-up lasts.
            length: when the decay ends, counted from the start of the run, warm-up included. None: with the run.
            final: the learning rate at the end, as a fraction of the optimizer's.
        """
        return cls(kind="cosine", warmup=_read("warmup", warmup), length=_read_optional("length", length), final=final)

    @classmethod
    def step(cls, *, every: DurationLike, factor: float = 0.1, warmup: DurationLike = NONE) -> Self:
        """Warm up, then lower the learning rate at regular intervals.

        Args:
            every: the interval, counted from the end of the warm-up.
            factor: what the learning rate is multiplied by after each interval.
            warmup: how long the warm-up lasts.
        """
        return cls(kind="step", warmup=_read("warmup", warmup), every=_read("every", every), factor=factor)

    def bind(self, run: RunLength) -> Factor:
        """Return the schedule for a run of this length, as a function of the updates completed."""
        warmup = self.warmup.in_steps(run, "schedule: warmup")
        after = _KINDS[self.kind](self, warmup, run)
        return lambda completed: (completed + 1) / warmup if completed < warmup else after(completed)

    @property
    def ends_with_the_run(self) -> bool:
        """Whether a longer run would have different learning rates from its first step on."""
        return self.kind in ("linear", "cosine") and self.length is None

    def __str__(self) -> str:
        """Return it as a call, `cosine(warmup=500 steps, final=0.1)`, for run folders and messages."""
        given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)[1:]]
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value, default in given if value != default)})"


def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Set every group's rate to its base rate times `factor`. The base is kept as torch's schedulers keep it."""
    for group in optimizer.param_groups:  # all of them first: groups may share one tensor
        if "initial_lr" not in group:
            group["initial_lr"] = float(group["lr"])  # once: reading a tensor on a GPU waits for the GPU
    for group in optimizer.param_groups:
        rate = float(group["initial_lr"]) * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # in place: a captured graph reads it there
        else:
            group["lr"] = rate


def build_schedule(config: "ScheduleConfig") -> Schedule:
    """Return the schedule of the config's `schedule:` section."""
    return Schedule(
        kind=config.kind,
        warmup=config.warmup,
        length=config.length,
        final=config.final,
        every=config.every,
        factor=config.factor,
    )


def _constant(_schedule: Schedule, _warmup: int, _run: RunLength) -> Factor:
    return lambda _: 1.0


def _decay(shape: Callable[[float], float], schedule: Schedule, warmup: int, run: RunLength) -> Factor:
    """Decay from 1 to `final`; `shape` maps the share of time to the share of the decay."""
    end = _end(schedule, warmup, run)
    final = schedule.final

    def factor(completed: int) -> float:
        if completed >= end:
            return final
        return 1 - (1 - final) * shape((completed - warmup) / (end - warmup))

    return factor


def _step(schedule: Schedule, warmup: int, run: RunLength) -> Factor:
    if schedule.every is None:
        raise UserError("schedule: step needs every=, as in every='30 epochs'")
    every = schedule.every.in_steps(run, "schedule: every")
    return lambda completed: float(schedule.factor ** ((completed - warmup) // every))


_KINDS: dict[str, Callable[[Schedule, int, RunLength], Factor]] = {
    "constant": _constant,
    "linear": partial(_decay, lambda time: time),
    "cosine": partial(_decay, lambda time: (1 - cos(pi * time)) / 2),
    "step": _step,
}


def _end(schedule: Schedule, warmup: int, run: RunLength) -> int:
    """Return the step at which a decaying schedule reaches its final factor."""
    if schedule.length is None:
        if run.total_steps is None:
            raise UserError(
                f"schedule: {schedule.kind} ends with the run, and this run's length is not known: "
                "give length=, as in length='10000 steps'"
            )
        # A run may end in its warm-up, as a smoke run does.
        return run.total_steps
    end = schedule.length.in_steps(run, "schedule: length")
    if end < warmup:
        raise UserError(
            f"schedule: length={schedule.length} ends in the warm-up of {schedule.warmup}: it includes the warm-up"
        )
    return end


def _read(name: str, value: DurationLike) -> Duration:
    try:
        return Duration.parse(value)
    except ValueError as error:
        raise UserError(f"schedule: {name}: {error}") from None


def _read_optional(name: str, value: DurationLike | None) -> Duration | None:
    return None if value is None else _read(name, value)
