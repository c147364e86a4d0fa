"""Means and totals: sums in fp64, rounded once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.keepers import Rows

Number = Tensor | float  # a tensor of one element, or a plain number


@dataclass(frozen=True, eq=False)
class Mean:
    """A sum over a count, each over all chunks; a plain `(sum, count)` means the same. No number if nothing counts."""

    sum: Number
    count: Number

    def value(self, device: torch.device) -> Tensor:
        return row(device, self.sum, self.count)

    def keeper(self) -> Rows:
        return Rows()

    def result(self, kept: Tensor) -> float:
        sum_, count = column_sums(kept)
        return ratio(sum_, count)


@dataclass(frozen=True, eq=False)
class Total:
    """A sum over all chunks."""

    sum: Number

    def value(self, device: torch.device) -> Tensor:
        return row(device, self.sum)

    def keeper(self) -> Rows:
        return Rows()

    def result(self, kept: Tensor) -> float:
        return column_sums(kept)[0]


def row(device: torch.device, *numbers: Number) -> Tensor:
    """Numbers side by side in fp64 on the device, without waiting for it."""
    return torch.stack([_scalar(number, device) for number in numbers])


def column_sums(rows: Tensor) -> list[float]:
    """The sum of each column, in any order the same: it is rounded once, at the end."""
    return [exact_sum(column) for column in rows.T.tolist()]


def exact_sum(values: Iterable[float]) -> float:
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or beyond the largest number
        return sum(values)


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _scalar(number: Any, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        if number.numel() != 1:
            raise UserError(
                f"a sum or a count is one number, not a tensor of shape {tuple(number.shape)}: add it up over the batch"
            )
        return number.detach().to(device, torch.float64).reshape(())
    # Filled in by the device: a copy from here would wait for it.
    return torch.full((), float(number), dtype=torch.float64, device=device)
