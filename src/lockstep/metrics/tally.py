"""Named sums and counts, in fp64, added up over batches and then over ranks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.world.collectives import all_reduce
from lockstep.world.objects import all_gather_object


class Tally:
    """The mean of each metric over every sample of every rank, however unevenly the samples lie."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, tuple[Tensor | float, int]]) -> None:
        """Add a batch's (sum, count) for each metric."""
        for name, (value, count) in parts.items():
            sum_ = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach()
            pair = torch.stack([sum_, sum_.new_tensor(count)])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def means(self) -> dict[str, float]:
        """The global means, the same on every rank."""
        # A rank with no sample knows no names: take everyone's, in the order they were first heard of.
        names = list(dict.fromkeys(name for theirs in all_gather_object(list(self._sums)) for name in theirs))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        totals = all_reduce(torch.stack([self._sums.get(name, nothing) for name in names])).tolist()
        return {name: sum_ / count if count else math.nan for name, (sum_, count) in zip(names, totals, strict=True)}
