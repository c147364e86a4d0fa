"""Batches that are declared globally and shared out over the ranks.

Every rank walks the same order of the data set, a function of (seed, epoch), and takes its own contiguous part of every
global batch. So the samples of a step do not depend on the number of processes.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.errors import UserError
from lockstep.world.randomness import stream
from lockstep.world.world import World


class GlobalBatchSampler(Sampler[list[int]]):
    """This rank's part of each global batch, reshuffled every epoch; a last batch that is not full is dropped."""

    def __init__(self, length: int, global_batch: int, world: World, seed: int) -> None:
        if length == 0:
            raise UserError("the training data set is empty")
        if global_batch > length:
            raise UserError(f"batch.global={global_batch} is larger than the training data set ({length} samples)")
        if global_batch < world.size:
            raise UserError(f"batch.global={global_batch} leaves some of {world.size} processes without a sample")
        self._length = length
        self._global_batch = global_batch
        self._world = world
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length // self._global_batch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._length, generator=stream(self._seed, "order", self._epoch)).tolist()
        part = share(self._global_batch, self._world)
        for batch in range(len(self)):
            start = batch * self._global_batch
            yield order[start + part.start : start + part.stop]


def share(total: int, world: World) -> range:
    """This rank's contiguous part of `total` things: disjoint, complete, sizes at most one apart."""
    return range(total * world.rank // world.size, total * (world.rank + 1) // world.size)


def train_loader(dataset: Dataset[object], global_batch: int, world: World, seed: int) -> DataLoader[object]:
    sampler = GlobalBatchSampler(_length(dataset), global_batch, world, seed)
    return DataLoader(dataset, batch_sampler=sampler, pin_memory=world.device.type == "cuda")


def evaluation_loader(dataset: Dataset[object], batch: int, world: World) -> DataLoader[object]:
    """This rank's part of the data set, so that over all ranks every sample is seen exactly once."""
    part = torch.utils.data.Subset(dataset, share(_length(dataset), world))
    return DataLoader(part, batch_size=batch, pin_memory=world.device.type == "cuda")


def _length(dataset: Dataset[object]) -> int:
    return len(dataset)  # type: ignore[arg-type]
