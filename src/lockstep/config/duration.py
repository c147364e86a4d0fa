"""How long something takes: `500 steps`, `2 epochs`, `1e6 samples`; a bare whole number counts steps.

A duration is kept as it was declared and turned into steps once the run's data are known, so that a recipe can speak of
epochs whatever the data set and the batch.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Any, Literal, NamedTuple, Self

from lockstep.config.value import shown
from lockstep.errors import UserError

Unit = Literal["steps", "epochs", "samples"]

_LIMIT = 2**63
# Of few enough digits that what it is shown as reads back as the same.
_NUMBER = r"(?:[0-9]{1,19}(?:\.[0-9]{0,19})?|\.[0-9]{1,19})(?:[eE]\+?[0-9]{1,2})?"
_WRITTEN = re.compile(rf"\s*({_NUMBER})\s*(?:(step|epoch|sample)s?)?\s*")
_UNITS: dict[str | None, Unit] = {None: "steps", "step": "steps", "epoch": "epochs", "sample": "samples"}


class RunLength(NamedTuple):
    """What turns durations into steps; None where it is not known."""

    steps_per_epoch: int | None = None
    global_batch: int | None = None
    total_steps: int | None = None  # from the run's very first step, also when it resumes in the middle


@dataclass(frozen=True)
class Duration:
    number: Decimal  # and not a float: 0.55 epochs of 100 steps are 55 steps, not 56
    unit: Unit = "steps"

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read what a config or a script says; a ValueError says what was expected."""
        if isinstance(value, cls):
            return value
        written = _WRITTEN.fullmatch(str(value))
        if written is None:
            raise ValueError(f"expected a duration, as in 500 steps, 2 epochs or 1e6 samples, got {shown(value)}")
        number, unit = Decimal(written[1]), _UNITS[written[2]]
        if number >= _LIMIT:
            raise ValueError(f"expected a duration below 2⁶³ {unit}, got {shown(value)}")
        if unit != "epochs" and number % 1:
            raise ValueError(f"expected a whole number of {unit}, got {shown(value)}")
        return cls(number, unit)

    def __str__(self) -> str:
        digits = f"{self.number:f}"
        if "." in digits:
            digits = digits.rstrip("0").rstrip(".")
        return f"{digits} {self.unit[:-1] if self.number == 1 else self.unit}"

    def in_steps(self, run: RunLength, name: str) -> int:
        """The same in whole steps, rounded up; `name` is the setting's, for the error where that cannot be told.

        Samples are counted in full batches, also where the last one of an epoch is smaller.
        """
        steps = _STEPS_IN[self.unit](run)
        if steps is None:
            raise UserError(
                f"{name}: {self} cannot be turned into steps, since the data do not tell how long an epoch "
                "or how large a batch is: give it in steps"
            )
        return ceil(Fraction(self.number) * steps)


# The steps in one of each unit; None where that is not known.
_STEPS_IN: dict[Unit, Callable[[RunLength], Fraction | None]] = {
    "steps": lambda _: Fraction(1),
    "epochs": lambda run: None if run.steps_per_epoch is None else Fraction(run.steps_per_epoch),
    "samples": lambda run: None if run.global_batch is None else Fraction(1, run.global_batch),
}
