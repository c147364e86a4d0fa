"""The lane loader: global batches of a map-style data set, from any batch number on, as the lanes this rank runs.

Which samples a batch holds is a pure function of (seed, batch number), so there is no state to save and nothing to
replay: `batches(start=k)` begins at batch k at once.
"""

from collections.abc import Generator, Iterator, Sequence
from itertools import cycle
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batch import GlobalBatch, LaneBatch
from lockstep.data.cut import Cut, Tail
from lockstep.data.lanes import choose_lanes, share_lanes
from lockstep.data.order import ORDER_VERSION, Order
from lockstep.data.prefetch import moved
from lockstep.data.reading import Reading
from lockstep.data.samples import LaneRequest, num_samples, open_source
from lockstep.errors import UserError
from lockstep.world.world import World

# Positions of the order that are computed at once: enough to make numpy's cost per call vanish, 128 KB of indices.
_CHUNK = 16384


class _Span(NamedTuple):
    """Consecutive batches of one epoch that are all cut alike."""

    number: int  # of the first, since the run began
    num_batches: int
    epoch: int
    batch: int  # the first one's place in its epoch


class _Shape(NamedTuple):
    """What is known of a lane before its data is there."""

    lane: int
    size: int
    weight: Tensor | None


class LaneLoader:
    """Cuts a data set into global batches of `global_batch` samples, and these into lanes. [Note: sample keys]

    `tail` says what becomes of the samples left over at an epoch's end: "drop", "short" (smaller or empty lanes) or
    "pad" (full lanes; repeated samples get weight 0, and every batch carries weights).

    `reading`: see `Reading`. Workers are started once per call of `batches`, not per epoch, end with the iterator, and
    use one torch thread each. The start method is torch's default, on Linux fork: a forked process has none of this
    one's threads and cannot use CUDA, so the data set must need neither.
    """

    exact = True  # the same batches at any number of processes, and after any interruption

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
        **reading: Any,
    ) -> None:
        how = Reading.read(reading)
        num_lanes = choose_lanes(global_batch) if lanes == "auto" else lanes
        self.lanes = share_lanes(num_lanes, world.size, lanes_per_rank)
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self.tail = tail
        self._cut = Cut(num_samples(dataset), global_batch, num_lanes, tail)
        self._world = world
        self._own = self.lanes.of(world.rank)
        self._shuffle = shuffle
        self._workers = how.processes
        self._prefetch = how.prefetch
        self._source = open_source(dataset, how.collate, seed, in_process=how.workers == 0)
        self._weights: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._cut)

    @property
    def may_leave_lanes_empty(self) -> bool:
        return self._cut.has_empty_lanes

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[GlobalBatch]:
        """The batches numbered `start` to `stop`, over all epochs; endless without a `stop`."""
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"batches({start}, {stop}): expected 0 <= start <= stop")
        return moved(self._batches(start, stop), self._world.device)

    def positions(self, number: int) -> tuple[int, range]:
        """The epoch of a batch, and the positions in that epoch's order that it consumes."""
        epoch, batch = divmod(number, len(self._cut))
        return epoch, self._cut.positions(batch)

    def dropped(self, epoch: int) -> range:  # noqa: ARG002  (the same in each; a ledger asks by epoch)
        """The positions in an epoch's order that no batch consumes."""
        return self._cut.dropped()

    def facts(self) -> dict[str, Any]:
        """What decides which samples a batch holds; with it, the ledger's positions can be turned into samples."""
        return {
            "kind": "indexed",
            "length": self._cut.length,
            "global_batch": self.global_batch,
            "tail": self.tail,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "order_version": ORDER_VERSION,
        }

    def state_dict(self) -> dict[str, Any]:
        """Empty: the batch number says it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise UserError("the saved position is that of an iterable data set, and this one is map-style")

    def _batches(self, start: int, stop: int | None) -> Generator[GlobalBatch, None, None]:
        ahead = self._prefetch * len(self._own)
        with self._workers.fetched(self._source, self._requests(start, stop), ahead, self._world) as results:
            for span in self._spans(start, stop):
                epoch, size = span.epoch, len(self._cut.positions(span.batch))
                shapes = [self._shape(span.batch, lane) for lane in self._own]
                for number in range(span.number, span.number + span.num_batches):
                    lanes = [LaneBatch(lane, next(results), samples, weight) for lane, samples, weight in shapes]
                    yield GlobalBatch(number, epoch, size, tuple(lanes))

    def _spans(self, start: int, stop: int | None) -> Iterator[_Span]:
        number, most = start, max(_CHUNK // self.global_batch, 1)
        while stop is None or number < stop:
            epoch, batch = divmod(number, len(self._cut))
            num_batches = max(min(most, self._cut.num_full - batch), 1)
            if stop is not None:
                num_batches = min(num_batches, stop - number)
            yield _Span(number, num_batches, epoch, batch)
            number += num_batches

    def _shape(self, batch: int, lane: int) -> _Shape:
        size = self._cut.lane_size(batch, lane)
        return _Shape(lane, size, self._weight(size) if self.tail == "pad" else None)

    def _weight(self, size: int) -> Tensor:
        if size not in self._weights:
            weight = (torch.arange(self._cut.lane_batch) < size).float()
            self._weights[size] = weight.to(self._world.device)
        return self._weights[size]

    def _requests(self, start: int, stop: int | None) -> Iterator[LaneRequest]:
        """One request for each of this rank's lanes of each batch, in order; empty lanes too."""
        length = self._cut.length
        for span in self._spans(start, stop):
            order = Order(length, self.seed, span.epoch, self._shuffle)
            if span.batch < self._cut.num_full:
                starts = np.arange(span.batch, span.batch + span.num_batches, dtype=np.int64) * self.global_batch
                part = np.arange(self._own.start * self._cut.lane_batch, self._own.stop * self._cut.lane_batch)
                indices = order.at((starts[:, None] + part).reshape(-1)).reshape(-1, self._cut.lane_batch)
                rows = self._source.rows(indices)
            else:
                parts = (self._cut.lane(span.batch, lane) for lane in self._own)
                # Beyond the end the order begins again, as often as it takes: that is the padding.
                positions = (np.arange(part.start, part.stop, dtype=np.int64) % length for part in parts)
                rows = [self._source.rows(order.at(row)[None])[0] for row in positions]
            for row, lane in zip(rows, cycle(self._own), strict=False):
                yield LaneRequest(span.epoch, lane, row)
