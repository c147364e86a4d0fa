"""`Mean` and `Total`, and the exact sums that all metrics use: added in fp64 and rounded once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.accumulators import RowAccumulator

Number = Tensor | float  # a tensor of one element, or a Python number


@dataclass(frozen=True, eq=False)
class Mean:
    """The sum over the count of all chunks; a plain `(sum, count)` means the same. NaN if the count is 0.

    Args:
        sum: this batch's sum.
        count: what it is a sum over, such as the number of samples.
    """

    sum: Number
    count: Number

    def value(self, device: torch.device) -> Tensor:
        """This chunk's value for the accumulator."""
        return fp64_row(device, self.sum, self.count)

    def accumulator(self) -> RowAccumulator:
        """A new, empty accumulator."""
        return RowAccumulator()

    def result(self, collected: Tensor) -> float:
        """The metric over all samples."""
        sum_, count = column_sums(collected)
        return exact_ratio(sum_, count)


@dataclass(frozen=True, eq=False)
class Total:
    """The sum over all chunks.

    Args:
        sum: this batch's sum.
    """

    sum: Number

    def value(self, device: torch.device) -> Tensor:
        """This chunk's value for the accumulator."""
        return fp64_row(device, self.sum)

    def accumulator(self) -> RowAccumulator:
        """A new, empty accumulator."""
        return RowAccumulator()

    def result(self, collected: Tensor) -> float:
        """The metric over all samples."""
        return column_sums(collected)[0]


def fp64_row(device: torch.device, *numbers: Number) -> Tensor:
    """The numbers as one fp64 tensor on the device, without waiting for the device."""
    return torch.stack([_scalar(number, device) for number in numbers])


def column_sums(rows: Tensor) -> list[float]:
    """The exact sum of each column, rounded once, so that the order of the rows does not matter."""
    return [exact_sum(column) for column in rows.T.tolist()]


def exact_sum(values: Iterable[float]) -> float:
    """The sum of the values, rounded once."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or an overflow
        return sum(values)


def exact_ratio(numerator: float, denominator: float) -> float:
    """The ratio; NaN if the denominator is 0."""
    return numerator / denominator if denominator else math.nan


def _scalar(number: Any, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        if number.numel() != 1:
            raise UserError(
                f"a sum or a count must be one number, not a tensor of shape {tuple(number.shape)}: "
                "sum it over the batch"
            )
        return number.detach().to(device, torch.float64).reshape(())
    # Filled by the device: a copy from the host would wait for it.
    return torch.full((), float(number), dtype=torch.float64, device=device)
