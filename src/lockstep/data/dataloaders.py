"""Torch DataLoaders for people who keep their own loop: the training set shared out anew each epoch, the other once."""

from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lockstep.data.evaluation import Share, share
from lockstep.data.sampler import DistributedSampler
from lockstep.data.samples import Collate, num_samples
from lockstep.errors import UserError
from lockstep.world.collectives import get_rank, get_world_size
from lockstep.world.randomness import stream
from lockstep.world.world import World


class DataLoaders(NamedTuple):
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

    `batch_size` is that of all ranks together, unless `per_device`. Call `loaders.train.sampler.set_epoch(epoch)`
    before each epoch to shuffle anew. Over all ranks the validation loaders go through every sample exactly once,
    without padding: some ranks may have one sample more than others, or one batch more.
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
    length = num_samples(train_set)
    if length < (own_batch * place.size if drop_last else 1):
        raise UserError(
            f"batch_size={own_batch * place.size} over all processes is larger than the training data set "
            f"({length} samples): use a smaller batch, or drop_last=False"
        )
    on_cuda = torch.cuda.is_available() if world is None else world.device.type == "cuda"
    options: dict[str, Any] = {
        "num_workers": num_workers,
        "collate_fn": collate_fn,
        "pin_memory": on_cuda if pin_memory is None else pin_memory,
    }
    train: DataLoader[Any] = DataLoader(
        train_set,
        own_batch,
        sampler=DistributedSampler(train_set, place.size, place.rank, seed=seed, drop_last=drop_last),
        drop_last=drop_last,
        # Seeds the workers: else from the caller's stream, which would also be the same one on every rank.
        generator=stream(seed, "workers", place.rank),
        **options,
    )
    if val_set is None:
        return DataLoaders(train, None)
    part = Share(val_set, share(num_samples(val_set), place))
    return DataLoaders(train, DataLoader(part, own_batch, generator=torch.Generator(), **options))
