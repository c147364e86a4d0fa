"""Durations in configs and scripts: `500 steps`, `2 epochs`, `1e6 samples`; a bare number counts steps.

A duration is kept as it was written and converted to steps once the run's data are known, so that a recipe can be
written in epochs whatever the data set and the batch size.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Any, Literal, NamedTuple, Self

from lockstep.config.located_value import show_value
from lockstep.errors import UserError

Unit = Literal["steps", "epochs", "samples"]

_LIMIT = 2**63
# Limits the digits, so that `parse(str(duration))` gives an equal duration.
_NUMBER = r"(?:[0-9]{1,19}(?:\.[0-9]{0,19})?|\.[0-9]{1,19})(?:[eE]\+?[0-9]{1,2})?"
_PATTERN = re.compile(rf"\s*({_NUMBER})\s*(?:(step|epoch|sample)s?)?\s*")
_UNITS: dict[str | None, Unit] = {None: "steps", "step": "steps", "epoch": "epochs", "sample": "samples"}


class RunLength(NamedTuple):
    """What converting a duration to steps needs; None where it is not known."""

    steps_per_epoch: int | None = None
    global_batch: int | None = None
    total_steps: int | None = None  # from the run's first step, also when it resumes


@dataclass(frozen=True)
class Duration:
    """A number of steps, epochs or samples."""

    number: Decimal  # not a float: 0.55 epochs of 100 steps are 55 steps, not 56
    unit: Unit = "steps"

    @classmethod
    def parse(cls, value: Any) -> Self:
        """A duration from text, a number of steps, or a Duration; a ValueError says what is valid."""
        if isinstance(value, cls):
            return value
        written = _PATTERN.fullmatch(str(value))
        if written is None:
            raise ValueError(f"expected a duration, as in 500 steps, 2 epochs or 1e6 samples, got {show_value(value)}")
        number, unit = Decimal(written[1]), _UNITS[written[2]]
        if number >= _LIMIT:
            raise ValueError(f"expected a duration below 2⁶³ {unit}, got {show_value(value)}")
        if unit != "epochs" and number % 1:
            raise ValueError(f"expected a whole number of {unit}, got {show_value(value)}")
        return cls(number, unit)

    def __str__(self) -> str:
        digits = f"{self.number:f}"
        if "." in digits:
            digits = digits.rstrip("0").rstrip(".")
        return f"{digits} {self.unit[:-1] if self.number == 1 else self.unit}"

    def in_steps(self, run: RunLength, name: str) -> int:
        """The duration in whole steps, rounded up.

        Samples are counted in full batches, even if the last batch of an epoch is smaller.

        Args:
            run: the length of the run's epochs and batches.
            name: the setting's name, for the error if that is not known.
        """
        steps = _STEPS_IN[self.unit](run)
        if steps is None:
            raise UserError(
                f"{name}: {self} cannot be converted to steps, because the length of an epoch or the batch size "
                "is not known: give it in steps"
            )
        return ceil(Fraction(self.number) * steps)


# How many steps one of each unit is; None where that is not known.
_STEPS_IN: dict[Unit, Callable[[RunLength], Fraction | None]] = {
    "steps": lambda _: Fraction(1),
    "epochs": lambda run: None if run.steps_per_epoch is None else Fraction(run.steps_per_epoch),
    "samples": lambda run: None if run.global_batch is None else Fraction(1, run.global_batch),
}
