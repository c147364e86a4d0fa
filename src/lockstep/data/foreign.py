"""Torch DataLoaders made by others: rebuilt as lane loaders where that keeps their meaning, else used as they are."""

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lockstep.data.batch import GlobalBatch, LaneBatch
from lockstep.data.cut import Tail
from lockstep.data.iterable import IterableLaneLoader, agreed
from lockstep.data.lanes import Lanes
from lockstep.data.loader import LaneLoader
from lockstep.data.prefetch import moved
from lockstep.data.sampler import DistributedSampler
from lockstep.data.samples import given_collate
from lockstep.errors import UserError
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

Uneven = Literal["cut", "join"]

_END = object()


class _Reading(NamedTuple):
    """How a DataLoader goes through its data set, as far as a lane loader can do the same."""

    shuffle: bool
    num_replicas: int = 1  # among which its sampler splits; its batch size is then that of one of them


def rebuild(
    loader: DataLoader[Any],
    world: World,
    *,
    seed: int,
    global_batch: int | None = None,
    lanes: int | Literal["auto"] = "auto",
    tail: Tail | None = None,
    lanes_per_rank: Sequence[int] | None = None,
    uneven: Uneven = "cut",
) -> "Loader":
    """A DataLoader as a lane loader of the same data set, collate function, workers and tail.

    Its batch size is the global batch, or with a distributed sampler that of each of the sampler's replicas. One with a
    sampler or batch sampler that lockstep does not know is used as it is, by a `ForeignLoader`; `uneven` is for those
    alone, because of others every sample is used once anyway, or what is dropped is said by `tail`.
    """
    if uneven not in get_args(Uneven):
        raise UserError(f"uneven={uneven!r}: expected {' or '.join(get_args(Uneven))}")
    tail = ("drop" if loader.drop_last else "short") if tail is None else tail
    collate, batch_size = given_collate(loader), loader.batch_size
    if isinstance(loader.dataset, IterableDataset) and batch_size is not None:
        return IterableLaneLoader(
            loader.dataset,
            batch_size if global_batch is None else global_batch,
            world,
            lanes=lanes,
            seed=seed,
            tail=tail,
            workers=loader.num_workers,
            collate=collate,
            lanes_per_rank=lanes_per_rank,
            worker_init=loader.worker_init_fn,
        )
    reading = _reading(loader)
    if reading is None or batch_size is None:
        return ForeignLoader(loader, world, uneven=uneven)
    return LaneLoader(
        loader.dataset,
        batch_size * reading.num_replicas if global_batch is None else global_batch,
        world,
        lanes=lanes,
        seed=seed,
        tail=tail,
        shuffle=reading.shuffle,
        workers=loader.num_workers,
        collate=collate,
        lanes_per_rank=lanes_per_rank,
        worker_init=loader.worker_init_fn,
    )


def _reading(loader: DataLoader[Any]) -> _Reading | None:
    # Exact types: a subclass may do anything.
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    dataset: Any = loader.dataset
    match sampler := loader.sampler:
        case RandomSampler() if type(sampler) is RandomSampler:
            whole = not sampler.replacement and sampler._num_samples is None and sampler.data_source is dataset
            return _Reading(shuffle=True) if whole else None
        case SequentialSampler() if type(sampler) is SequentialSampler and sampler.data_source is dataset:
            return _Reading(shuffle=False)
        case TorchDistributedSampler() if type(sampler) in (TorchDistributedSampler, DistributedSampler):
            whole = sampler.dataset is dataset
            return _Reading(sampler.shuffle, sampler.num_replicas) if whole else None
    return None


class ForeignLoader:
    """A DataLoader as it is, one lane per rank: its own order, so no exact resume and no independence of the ranks.

    `batches(start)` begins at epoch `start // len(loader)` and throws away what comes before `start` in it; without a
    length, all epochs before. Sizes are guesses: the length of a batch's first tensor, times the ranks.

    Ranks may have different numbers of batches. `uneven="cut"` ends every epoch with the rank that has the fewest;
    `uneven="join"` with the one that has the most: the others then take part without samples.
    """

    exact = False

    def __init__(self, loader: DataLoader[Any], world: World, *, uneven: Uneven = "cut") -> None:
        self.joins = uneven == "join"
        self.dataset = loader.dataset
        self.lanes = Lanes(world.size, tuple(range(rank, rank + 1) for rank in range(world.size)))
        self.global_batch = None if loader.batch_size is None else loader.batch_size * world.size
        self.tail = "drop" if loader.drop_last else "short"
        self._loader = loader
        self._world = world
        self._length = self._agreed_length()
        if world.is_main:
            logger.warning(
                "this DataLoader's own order is used (%s): fast mode, no exact resume",
                type(loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler).__name__,
            )

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this DataLoader has no length: count steps instead of epochs")
        return self._length

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[GlobalBatch]:
        """The batches numbered `start` to `stop`, over all epochs; endless without a `stop`."""
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"batches({start}, {stop}): expected 0 <= start <= stop")
        return moved(self._batches(start, stop), self._world.device)

    def facts(self) -> dict[str, Any]:
        """As a LaneLoader's. Which samples its batches hold is not known to anybody."""
        return {"kind": "foreign", "tail": self.tail}

    def state_dict(self) -> dict[str, Any]:
        """Empty: how far a DataLoader has come is not known to anybody."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise UserError("the saved position is that of an iterable data set, and this is a DataLoader of its own")

    def _batches(self, start: int, stop: int | None) -> Generator[GlobalBatch, None, None]:
        epoch = start // self._length if self._length else 0
        number = epoch * (self._length or 0)
        while stop is None or number < stop:
            first = number
            for data in self._epoch(epoch):
                if number == stop:
                    return
                if number >= start:
                    size = 0 if data is None else _num_rows(data)
                    lane = LaneBatch(self._world.rank, data, size, None)
                    yield GlobalBatch(number, epoch, self._global_size(size), (lane,))
                number += 1
            if number == first:
                raise UserError(f"epoch {epoch} of the DataLoader gave no batch")
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[Any]:
        """One epoch's batches, equally many on all ranks; None where this one has no more and others have."""
        for sampler in (self._loader.batch_sampler, self._loader.sampler):
            if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
                set_epoch(epoch)
        iterator = iter(self._loader)
        for number in count() if self._length is None else range(self._length):
            data = next(iterator, _END)
            has_data = data is not _END
            if self._length is None:
                has_data = bool(agreed(int(has_data), self._whose, self._world))
            elif self.joins:
                has_data = True  # somewhere
            elif not has_data and self._world.size > 1:
                raise UserError(
                    f"the DataLoader promised {self._length} batches and gave {number}: the ranks would come apart"
                )
            if not has_data:
                return
            yield None if data is _END else data

    def _global_size(self, own: int) -> int:
        return agreed(own, "sum", self._world) if self.joins else own * self._world.size

    @property
    def _whose(self) -> Literal["min", "max"]:
        """Batches end an epoch."""
        return "max" if self.joins else "min"

    def _agreed_length(self) -> int | None:
        """The fewest batches that any rank's DataLoader has, or the most; None if one does not know."""
        try:
            own = len(self._loader)
        except (TypeError, NotImplementedError):
            own = -1
        if agreed(own, "min", self._world) < 0:
            return None
        return agreed(own, self._whose, self._world)


Loader = LaneLoader | IterableLaneLoader | ForeignLoader


def _num_rows(data: Any) -> int:
    """The length of the first tensor in a batch; 1 if there is none."""
    tensor = _first_tensor(data)
    return len(tensor) if tensor is not None and tensor.dim() else 1


def _first_tensor(data: Any) -> Tensor | None:
    if isinstance(data, Tensor):
        return data
    elements = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    return next((tensor for element in elements if (tensor := _first_tensor(element)) is not None), None)
