"""Notices, for `lockstep verify`, a `DistributedSampler` that shuffles every epoch in the same order."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary


class SamplerEpochs:
    """Sees each `DistributedSampler` of this process begin an epoch, until it is removed."""

    def __init__(self) -> None:
        from torch.utils.data import DistributedSampler

        self.has_repeated = False  # a sampler that shuffles has begun the same epoch twice
        self._epochs: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        self._class: Any = DistributedSampler
        self._iter = self._class.__iter__

        def begin_epoch(sampler: Any) -> Iterator[Any]:
            self._note(sampler)
            return iter(self._iter(sampler))

        self._class.__iter__ = begin_epoch  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the class."""
        self._class.__iter__ = self._iter

    def _note(self, sampler: Any) -> None:
        begun = self._epochs.setdefault(sampler, set())
        self.has_repeated |= bool(sampler.shuffle) and sampler.epoch in begun
        begun.add(sampler.epoch)
