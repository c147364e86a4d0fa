"""The evaluation loader: every sample exactly once, in chunks whose shapes do not depend on the number of ranks."""

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

from lockstep.data.prefetch import moved
from lockstep.data.samples import Collate, LaneRequest, given_collate, num_samples, open_source
from lockstep.data.workers import Workers
from lockstep.errors import UserError
from lockstep.world.world import World

# Evaluation has no epochs: a data set that draws random numbers draws the same ones every time.
_SEED, _EPOCH = 0, -1

_CHUNKS_AHEAD = 2


class EvaluationBatch(NamedTuple):
    chunk: int  # counts from 0 over all ranks
    data: Any  # collated, on the device
    size: int
    counts: bool = True  # else another rank's is counted, and this one was only to be run


class Share(Subset[Any]):
    """One rank's part of a data set. Whoever shares out samples itself takes the whole instead."""


def share(total: int, world: World) -> range:
    """This rank's contiguous part of `total` things: disjoint, complete, sizes at most one apart."""
    return range(total * world.rank // world.size, total * (world.rank + 1) // world.size)


class EvaluationLoader:
    """The data set in natural order, cut into chunks of `batch` samples (the last may be smaller).

    Each rank takes a contiguous share of the chunks; with more ranks than chunks some have none. A torch DataLoader may
    be given in place of a data set: its data set, batch size, collate function and workers are used.
    """

    def __init__(
        self, dataset: Any, batch: int | None, world: World, *, workers: int = 0, collate: Collate | None = None
    ) -> None:
        if isinstance(dataset, DataLoader):
            batch = dataset.batch_size or batch
            workers = workers or dataset.num_workers
            collate = collate or given_collate(dataset)
            dataset = _samples_of(dataset)
        if batch is None or batch < 1:
            raise UserError(f"batch={batch}: expected 1 or more samples")
        self.dataset = dataset
        self.batch = batch
        self._length = num_samples(dataset)
        if self._length == 0:
            raise UserError("the evaluation data set is empty")
        self._world = world
        self._workers = Workers(workers)
        self._source = open_source(dataset, collate, _SEED, in_process=workers == 0)
        self.num_chunks = -(-self._length // batch)  # of all ranks
        self._chunks: Sequence[int] = share(self.num_chunks, world)
        self._num_counted = len(self._chunks)  # the first of them

    def equally(self, world: World, *, counts: bool = True) -> "EvaluationLoader":
        """The same with equally many chunks on every rank: some are run again, and do not count once more.

        `counts=False`: none does, because another rank of the same place counts them.
        """
        loader = copy.copy(self)
        own = share(self.num_chunks, world)
        most = -(-self.num_chunks // world.size)
        again = own[-1] if own else 0
        loader._chunks = [*own, *[again] * (most - len(own))]
        loader._num_counted = len(own) if counts else 0
        return loader

    def __len__(self) -> int:
        """Chunks of this rank."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return moved(self._batches(), self._world.device)

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
    """The samples that a DataLoader would go through, in natural order."""
    sampler, dataset = loader.sampler, loader.dataset
    if loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler:
        if isinstance(sampler, SubsetRandomSampler):
            return Subset(dataset, sorted(sampler.indices))
        whole = isinstance(sampler, SequentialSampler | DistributedSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == num_samples(dataset)
        )
        if whole:
            return dataset.dataset if isinstance(dataset, Share) else dataset
    num_samples(dataset)  # an iterable data set is refused by that name
    raise UserError(
        "a DataLoader with a sampler of its own does not say which samples it evaluates: "
        "give the data set itself, as a torch.utils.data.Subset if only some are meant"
    )
