"""`DistributedSampler`, and torch DataLoaders built on it, for training loops that keep torch's DataLoader."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lockstep.config.plurals import count_noun
from lockstep.data.evaluation_loader import RankSubset, share_for_rank
from lockstep.data.sample_order import SampleOrder
from lockstep.data.sample_source import Collate, dataset_length
from lockstep.errors import UserError
from lockstep.world.collectives import get_rank, get_world_size
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World

_CHUNK = 4096  # indices that are computed at once


class DistributedSampler(TorchDistributedSampler[Any]):
    """A replacement for torch's class of this name, with the same arguments; it holds no list of indices.

    Rank r of W takes the positions r, r + W, r + 2W, … of the epoch's order. Unless `drop_last` is set, samples from
    its beginning are repeated at its end, so that all ranks get the same number. For a fixed batch size × W, the
    samples in the k-th batches of all ranks together do not depend on W. Without a process group this is a world of
    one.

    Args:
        dataset: a data set with a length.
        num_replicas: the number of ranks; that of the process group if omitted.
        rank: this process's rank; that in the process group if omitted.
        shuffle: shuffle each epoch; call `set_epoch` before each.
        seed: decides the order.
        drop_last: drop the last samples instead of repeating the first ones.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            get_world_size() if num_replicas is None else num_replicas,
            get_rank() if rank is None else rank,
            shuffle,
            seed,
            drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        length = len(self.dataset)  # type: ignore[arg-type]
        order = SampleOrder(length, self.seed, self.epoch, self.shuffle)
        for start in range(self.rank, self.total_size, _CHUNK * self.num_replicas):
            stop = min(start + _CHUNK * self.num_replicas, self.total_size)
            yield from order.at(np.arange(start, stop, self.num_replicas, dtype=np.int64) % length).tolist()


class DataLoaders(NamedTuple):
    """This rank's loaders of the training set and of the validation set, if there is one."""

    train: DataLoader[Any]
    val: DataLoader[Any] | None


def create_dataloaders_distributed(
    train_set: Any,
    val_set: Any = None,
    *,
    batch_size: int,
    world: World | None = None,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = True,
    collate_fn: Collate | None = None,
    pin_memory: bool | None = None,
    per_device: bool = False,
) -> DataLoaders:
    """This rank's loaders of a training set and a validation set.

    Call `loaders.train.sampler.set_epoch(epoch)` before each epoch to shuffle it anew. Over all ranks the validation
    loaders yield every sample exactly once, without padding: some ranks may have one sample or one batch more.

    Args:
        train_set: the training data set; it must have a length.
        val_set: the validation data set, if there is one.
        batch_size: the batch size over all ranks; with `per_device`, of each rank.
        world: this process's place in the job; that of the process group if omitted.
        seed: decides the order of the samples.
        num_workers: the number of worker processes of each loader.
        drop_last: drop an incomplete last batch of the training set.
        collate_fn: turns a list of samples into a batch; torch's default if omitted.
        pin_memory: copy batches to pinned memory; by default if the device is a GPU.
        per_device: `batch_size` is that of each rank.
    """
    place = World(rank=get_rank(), size=get_world_size()) if world is None else world
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: expected 1 or more")
    if not per_device and batch_size % place.size:
        raise UserError(
            f"batch_size={batch_size} cannot be shared equally by {place.size} processes: "
            f"use a multiple of {place.size}, or per_device=True"
        )
    own_batch = batch_size if per_device else batch_size // place.size
    length = dataset_length(train_set)
    if length == 0:
        raise UserError("the training data set is empty")
    if drop_last and length < own_batch * place.size:
        raise UserError(
            f"batch_size={own_batch * place.size} over all processes is larger than the training data set "
            f"({count_noun(length, 'sample')}): use a smaller batch, or drop_last=False"
        )
    is_on_cuda = torch.cuda.is_available() if world is None else world.device.type == "cuda"
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "collate_fn": collate_fn,
        "pin_memory": is_on_cuda if pin_memory is None else pin_memory,
    }
    train: DataLoader[Any] = DataLoader(
        train_set,
        own_batch,
        sampler=DistributedSampler(train_set, place.size, place.rank, seed=seed, drop_last=drop_last),
        drop_last=drop_last,
        # Seeds the workers. By default the seed is drawn from the caller's generator, the same on every rank.
        generator=keyed_generator(seed, "workers", place.rank),
        **options,
    )
    if val_set is None:
        return DataLoaders(train, None)
    own_part = RankSubset(val_set, share_for_rank(dataset_length(val_set), place))
    return DataLoaders(train, DataLoader(own_part, own_batch, generator=torch.Generator(), **options))
