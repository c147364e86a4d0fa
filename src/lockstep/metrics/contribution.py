"""What a metrics function may return for a metric: one chunk's contribution to it.

A contribution is made from a chunk's tensors. It gives a value (tensors, still on the device), names the keeper that
collects such values over chunks and ranks, and knows the metric's result from what has been collected. Any object with
these three methods is a metric.
"""

from typing import Any, Protocol, runtime_checkable

import torch

from lockstep.metrics.keepers import Keeper


@runtime_checkable
class Contribution(Protocol):
    def value(self, device: torch.device) -> Any:
        """This chunk's part, as the keeper takes it in. Must not wait for the device: it is asked for every chunk."""
        ...

    def keeper(self) -> Keeper:
        """A new, empty keeper for such values."""
        ...

    def result(self, kept: Any) -> Any:
        """The metric, from what the keeper has put together: a number, or tensors and lists of numbers, by name or
        not. Asked of one contribution on one rank, on the CPU; that it agrees with the other ranks needs no thought."""
        ...
