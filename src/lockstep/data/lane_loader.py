"""`LaneLoader`: global batches of a map-style data set, from any batch number on, as the lanes this rank runs.

Which samples a batch contains is a pure function of (seed, batch number), so there is no state to save and nothing to
replay: `batches(start=k)` starts at batch k at once.
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import cycle
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.data.device_prefetch import prefetch_to_device
from lockstep.data.lanes import Batching, GlobalBatch, LaneBatch, Tail, check_batch_range, choose_lanes, share_lanes
from lockstep.data.sample_order import ORDER_VERSION, SampleOrder
from lockstep.data.sample_source import Collate, LaneRequest, create_source, dataset_length
from lockstep.data.sample_workers import WorkerInit, Workers
from lockstep.errors import UserError
from lockstep.world.world import World

# Positions whose indices are computed at once: enough to make numpy's cost per call negligible, 128 KB of indices.
_CHUNK = 16384


class _Span(NamedTuple):
    """Consecutive batches of one epoch with the same lane sizes."""

    number: int  # of the first batch, over all epochs
    num_batches: int
    epoch: int
    batch: int  # of the first batch, within its epoch


class _LaneShape(NamedTuple):
    """What is known of a lane before its data is fetched."""

    lane: int
    size: int
    weight: Tensor | None


class LaneLoader:
    """Splits a map-style data set into global batches, and those into lanes. [Note: sample keys]

    Workers are started once per call of `batches`, not per epoch, end with the iterator, and use one torch thread each.
    They are started by torch's default method, which on Linux is fork: a forked process cannot use CUDA or the threads
    of its parent, so the data set must not need them.

    Args:
        dataset: a data set with `__len__` and `__getitem__` (or `__getitems__`).
        global_batch: the number of samples of one step, over all processes.
        world: this process's place in the job.
        lanes: the number of lanes, a power of two that divides `global_batch`; "auto" is 8, or the largest power of two
            below 8 that divides it.
        seed: decides the order of the samples and the random numbers that the data set draws.
        tail: what happens to the samples left over at an epoch's end: "drop"; "short" for smaller or empty lanes; "pad"
            for full lanes, in which repeated samples get weight 0 (every batch then has weights).
        shuffle: shuffle each epoch; if False, every epoch is in natural order.
        lanes_per_rank: how many lanes each rank runs, for devices of different speeds; evenly split if omitted.
        workers: the number of worker processes that fetch samples; with 0 this process does.
        prefetch: how many global batches the workers fetch ahead.
        collate: turns a list of samples into a lane's data; torch's default if omitted.
        worker_init: called first in each worker process, with its number.
    """

    exact = True  # the same batches on any number of processes, and after any interruption

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        world: World,
        *,
        lanes: int | Literal["auto"] = "auto",
        seed: int = 0,
        tail: Tail = "drop",
        shuffle: bool = True,
        lanes_per_rank: Sequence[int] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        collate: Collate | None = None,
        worker_init: WorkerInit | None = None,
    ) -> None:
        self._workers = Workers(workers, worker_init, prefetch)
        num_lanes = choose_lanes(global_batch) if lanes == "auto" else lanes
        self.lanes = share_lanes(num_lanes, world.size, lanes_per_rank)
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self.tail = tail
        self._batching = Batching(dataset_length(dataset), global_batch, num_lanes, tail)
        self._world = world
        self._own_lanes = self.lanes.of(world.rank)
        self._shuffle = shuffle
        self._source = create_source(dataset, collate, seed, in_process=workers == 0)
        self._weights: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self._batching)

    @property
    def may_leave_lanes_empty(self) -> bool:
        """Can a batch have lanes without samples?"""
        return self._batching.has_empty_lanes

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[GlobalBatch]:
        """The batches from number `start` up to `stop`, counted over all epochs; endless without a `stop`."""
        check_batch_range(start, stop)
        return prefetch_to_device(self._batches(start, stop), self._world.device)

    def positions(self, number: int) -> tuple[int, range]:
        """The epoch of a batch, and the positions in that epoch's order that it consumes."""
        epoch, batch = divmod(number, len(self._batching))
        return epoch, self._batching.positions(batch)

    def dropped(self, epoch: int) -> range:  # noqa: ARG002  (the same in every epoch; the ledger asks by epoch)
        """The positions in an epoch's order that no batch consumes."""
        return self._batching.dropped()

    def describe(self) -> dict[str, Any]:
        """What decides which samples a batch contains; the ledger needs it to turn positions into samples."""
        return {
            "kind": "indexed",
            "length": self._batching.length,
            "global_batch": self.global_batch,
            "tail": self.tail,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "order_version": ORDER_VERSION,
        }

    def state_dict(self) -> dict[str, Any]:
        """Empty: the batch number is all the state there is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept an empty state; refuse that of an iterable data set."""
        if state:
            raise UserError(
                "the saved position is that of an iterable data set, and this one is map-style: "
                "resume with the data set that the run was started with"
            )

    def _batches(self, start: int, stop: int | None) -> Generator[GlobalBatch, None, None]:
        ahead = self._workers.prefetch * len(self._own_lanes)
        with self._workers.fetched(self._source, self._requests(start, stop), ahead, self._world) as results:
            for span in self._spans(start, stop):
                epoch, size = span.epoch, len(self._batching.positions(span.batch))
                shapes = [self._shape(span.batch, lane) for lane in self._own_lanes]
                for number in range(span.number, span.number + span.num_batches):
                    lanes = [LaneBatch(lane, next(results), samples, weight) for lane, samples, weight in shapes]
                    yield GlobalBatch(number, epoch, size, tuple(lanes))

    def _spans(self, start: int, stop: int | None) -> Iterator[_Span]:
        number, max_batches = start, max(_CHUNK // self.global_batch, 1)
        while stop is None or number < stop:
            epoch, batch = divmod(number, len(self._batching))
            num_batches = max(min(max_batches, self._batching.num_full - batch), 1)
            if stop is not None:
                num_batches = min(num_batches, stop - number)
            yield _Span(number, num_batches, epoch, batch)
            number += num_batches

    def _shape(self, batch: int, lane: int) -> _LaneShape:
        size = self._batching.lane_size(batch, lane)
        return _LaneShape(lane, size, self._weight(size) if self.tail == "pad" else None)

    def _weight(self, size: int) -> Tensor:
        if size not in self._weights:
            weight = (torch.arange(self._batching.lane_batch) < size).float()
            self._weights[size] = weight.to(self._world.device)
        return self._weights[size]

    def _requests(self, start: int, stop: int | None) -> Iterator[LaneRequest]:
        """One request for each of this rank's lanes of each batch, in order; empty lanes too."""
        length = self._batching.length
        for span in self._spans(start, stop):
            order = SampleOrder(length, self.seed, span.epoch, self._shuffle)
            if span.batch < self._batching.num_full:
                starts = np.arange(span.batch, span.batch + span.num_batches, dtype=np.int64) * self.global_batch
                offsets = np.arange(
                    self._own_lanes.start * self._batching.lane_batch, self._own_lanes.stop * self._batching.lane_batch
                )
                indices = order.at((starts[:, None] + offsets).reshape(-1)).reshape(-1, self._batching.lane_batch)
                rows = self._source.rows(indices)
            else:
                lanes = (self._batching.lane(span.batch, lane) for lane in self._own_lanes)
                # Padding: beyond the end, the order starts again, as often as needed.
                positions = (np.arange(lane.start, lane.stop, dtype=np.int64) % length for lane in lanes)
                rows = [self._source.rows(order.at(row)[None])[0] for row in positions]
            for row, lane in zip(rows, cycle(self._own_lanes), strict=False):
                yield LaneRequest(span.epoch, lane, row)
