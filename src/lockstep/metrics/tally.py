"""Named sums and counts, in fp64, added up over the chunks of a data set and over ranks."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lockstep.world.collectives import all_reduce
from lockstep.world.objects import all_gather_object


class Tally:
    """The mean of each metric over every sample of every rank. Which rank saw which chunk does not change a bit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[str, dict[int, Tensor]] = {}

    def add(self, chunk: int, parts: Mapping[str, tuple[Tensor | float, int]]) -> None:
        """Take in a chunk's (sum, count) for each metric."""
        for name, (value, count) in parts.items():
            sum_ = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach()
            self._rows.setdefault(name, {})[chunk] = torch.stack([sum_, sum_.new_tensor(count)])

    def means(self, num_chunks: int) -> dict[str, float]:
        """The global means, the same on every rank."""
        # A rank with no sample knows no names: take everyone's, in the order they were first heard of.
        names = list(dict.fromkeys(name for theirs in all_gather_object(list(self._rows)) for name in theirs))
        if not names:
            return {}
        table = torch.zeros(len(names), num_chunks, 2, dtype=torch.float64, device=self._device)
        for metric, name in enumerate(names):
            for chunk, row in self._rows.get(name, {}).items():
                table[metric, chunk] = row
        # Exact in any order: each element is zero on all ranks but one. And fsum rounds once, at the end.
        rows = all_reduce(table).tolist()
        return {name: _mean(*map(_sum, zip(*row, strict=True))) for name, row in zip(names, rows, strict=True)}


def _sum(values: Iterable[float]) -> float:
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or beyond the largest number
        return sum(values)


def _mean(sum_: float, count: float) -> float:
    return sum_ / count if count else math.nan
