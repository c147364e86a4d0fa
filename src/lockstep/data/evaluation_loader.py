"""`EvaluationLoader`: every sample exactly once, in chunks that do not depend on the number of ranks."""

import copy
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.device_prefetch import prefetch_to_device
from lockstep.data.sample_source import Collate, LaneRequest, create_source, custom_collate, dataset_length
from lockstep.data.sample_workers import Workers
from lockstep.errors import UserError
from lockstep.world.world import World

# Evaluation has no epochs: a data set that draws random numbers draws the same ones every time.
_SEED, _EPOCH = 0, -1

_CHUNKS_AHEAD = 2


class EvaluationBatch(NamedTuple):
    """One chunk of an evaluation."""

    chunk: int  # from 0, over all ranks
    data: Any  # collated, on the device
    size: int  # the number of samples
    counts: bool = True  # if False, another rank counts the chunk: this one only has to run it


class RankSubset(Subset[Any]):
    """One rank's part of a data set. `EvaluationLoader` uses the whole data set instead, because it does the split."""


def share_for_rank(total: int, world: World) -> range:
    """This rank's contiguous part of `total` items: disjoint, complete, sizes at most one apart."""
    return range(total * world.rank // world.size, total * (world.rank + 1) // world.size)


class EvaluationLoader:
    """The data set in natural order, split into chunks of `batch` samples (the last may be smaller).

    Each rank takes a contiguous range of the chunks; with more ranks than chunks some have none.

    Args:
        dataset: a map-style data set, or a torch DataLoader: its data set, batch size, collate function and workers are
            then used.
        batch: the number of samples in a chunk; may be None with a DataLoader that has a batch size.
        world: this process's place in the job.
        workers: the number of worker processes that fetch samples; with 0 this process does.
        collate: turns a list of samples into a batch; torch's default if omitted.
    """

    def __init__(
        self, dataset: Any, batch: int | None, world: World, *, workers: int = 0, collate: Collate | None = None
    ) -> None:
        worker_init = None
        if isinstance(dataset, DataLoader):
            worker_init = dataset.worker_init_fn
            batch = dataset.batch_size or batch
            workers = workers or dataset.num_workers
            collate = collate or custom_collate(dataset)
            dataset = _samples_of(dataset)
        if batch is None or batch < 1:
            raise UserError(f"batch={batch}: expected 1 or more samples")
        self.dataset = dataset
        self.batch = batch
        self._length = dataset_length(dataset)
        if self._length == 0:
            raise UserError("the evaluation data set is empty")
        self._world = world
        self._workers = Workers(workers, worker_init)
        self._source = create_source(dataset, collate, _SEED, in_process=workers == 0)
        self.num_chunks = -(-self._length // batch)  # over all ranks
        self._chunks: Sequence[int] = share_for_rank(self.num_chunks, world)
        self._num_counted = len(self._chunks)  # the first ones; other ranks count the rest

    def with_equal_chunks(self, world: World, *, counts: bool = True) -> "EvaluationLoader":
        """This loader with the same number of chunks on every rank: some are run twice, but counted only once.

        Args:
            world: the ranks over which the chunks are split.
            counts: if False, this rank's chunks are not counted, because another rank with the same ones counts them.
        """
        loader = copy.copy(self)
        own = share_for_rank(self.num_chunks, world)
        most = -(-self.num_chunks // world.size)
        repeated = own[-1] if own else 0
        loader._chunks = [*own, *[repeated] * (most - len(own))]
        loader._num_counted = len(own) if counts else 0
        return loader

    def __len__(self) -> int:
        """The number of chunks of this rank."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return prefetch_to_device(self._batches(), self._world.device)

    def _batches(self) -> Generator[EvaluationBatch, None, None]:
        if not self._chunks:
            return
        with self._workers.fetched(self._source, self._requests(), _CHUNKS_AHEAD, self._world) as results:
            for number, chunk in enumerate(self._chunks):
                counts = number < self._num_counted
                yield EvaluationBatch(chunk, next(results), len(self._positions(chunk)), counts)

    def _requests(self) -> Iterator[LaneRequest]:
        for chunk in self._chunks:
            positions = self._positions(chunk)
            indices = np.arange(positions.start, positions.stop, dtype=np.int64)
            yield LaneRequest(_EPOCH, chunk, self._source.rows(indices[None])[0])

    def _positions(self, chunk: int) -> range:
        return range(chunk * self.batch, min((chunk + 1) * self.batch, self._length))


def _samples_of(loader: DataLoader[Any]) -> Any:
    """The samples that a DataLoader yields, as a data set in natural order."""
    sampler, dataset = loader.sampler, loader.dataset
    if loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler:
        if isinstance(sampler, SubsetRandomSampler):
            return Subset(dataset, sorted(sampler.indices))
        is_whole = isinstance(sampler, SequentialSampler | DistributedSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == dataset_length(dataset)
        )
        if is_whole:
            return dataset.dataset if isinstance(dataset, RankSubset) else dataset
    dataset_length(dataset)  # raises for an iterable data set
    raise UserError(
        "it is not known which samples a DataLoader with a custom sampler evaluates: "
        "give the data set itself, or a torch.utils.data.Subset of it"
    )
