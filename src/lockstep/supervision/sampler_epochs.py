"""Notices, for `lockstep verify`, a `DistributedSampler` that shuffles every epoch in the same order."""

from collections.abc import Iterator
from typing import Any

_EpochOfData = tuple[int, int, int]  # the data set, the sampler's seed, the epoch


class SamplerEpochs:
    """Sees each `DistributedSampler` of this process begin an epoch, until it is removed.

    A script may make a new sampler for each epoch, so what counts is the data set. An epoch counts with the update that
    follows its begin: one that is begun only to look at a batch, or to evaluate, is not trained.
    """

    def __init__(self) -> None:
        from torch.utils.data import DistributedSampler

        self.repeated: tuple[int, int] | None = None  # the updates with which the same epoch began
        self._num_updates = 0
        self._begun: dict[tuple[int, int], int] = {}  # since the last update: by data set and seed, the last epoch
        self._trained: dict[_EpochOfData, int] = {}  # the update with which it began
        self._datasets: dict[int, Any] = {}  # kept, so that no other one gets its number
        self._class: Any = DistributedSampler
        self._iter = self._class.__iter__

        def begin_epoch(sampler: Any) -> Iterator[Any]:
            self._note(sampler)
            return iter(self._iter(sampler))

        self._class.__iter__ = begin_epoch  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the class."""
        self._class.__iter__ = self._iter

    def note_update(self) -> None:
        """Note that an update of the weights begins."""
        self._num_updates += 1
        for (data, seed), epoch in self._begun.items():
            last = self._trained.get((data, seed, epoch))
            # The order of an epoch that is a single update does not matter.
            if self.repeated is None and last is not None and self._num_updates - last > 1:
                self.repeated = (last, self._num_updates)
            self._trained[data, seed, epoch] = self._num_updates
        self._begun.clear()

    def _note(self, sampler: Any) -> None:
        import torch

        if sampler.shuffle and torch.is_grad_enabled():
            self._datasets[id(sampler.dataset)] = sampler.dataset
            self._begun[id(sampler.dataset), sampler.seed] = sampler.epoch
