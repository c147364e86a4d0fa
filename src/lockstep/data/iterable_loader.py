"""`IterableLaneLoader`: global batches of an iterable data set, whose samples have no index and may have no end.

Such a data set has either a method `lane(lane, num_lanes, epoch)` that returns one lane's samples, or only `__iter__`.
In the second case every rank reads the whole stream and keeps its own samples: sample i belongs to lane i mod
`num_lanes`. So the stream must not split itself by rank.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.utils.data import default_collate

from lockstep.data.device_prefetch import prefetch_to_device
from lockstep.data.lane_streams import LaneReader, LaneStreams, Reader, StreamPosition, StreamStates
from lockstep.data.lanes import GlobalBatch, Tail, check_batch, check_batch_range, check_tail, choose_lanes, share_lanes
from lockstep.data.sample_source import Collate
from lockstep.data.sample_workers import WorkerInit, Workers
from lockstep.data.stream_check import report_difference, sum_size_and_compare
from lockstep.data.stream_workers import read_ahead
from lockstep.errors import UserError
from lockstep.events.jsonl import parse_count
from lockstep.world.collectives import Operation, all_reduce, get_world_size
from lockstep.world.world import World


class IterableLaneLoader:
    """Global batches of an iterable data set, with the interface of `LaneLoader`.

    An epoch ends for all ranks at the same batch: with tail "drop" at the first one that some lane cannot fill, with
    "short" when all lanes are empty. That takes one small all-reduce per batch. Before each `next`, torch, numpy and
    `random` are seeded by (seed, epoch, lane, n-th sample).

    `state_dict()` is the position of this rank's lanes after the last batch yielded: how many samples each has taken,
    and the iterator's own state if it has `state_dict` and `load_state_dict` (workers call it after every batch, so it
    should be small). Without those, resuming reads and discards what was taken before in that epoch. A run saves the
    positions of all ranks as one.

    Args:
        dataset: the iterable data set.
        global_batch: the number of samples of one step, over all processes.
        world: this process's place in the job.
        lanes: the number of lanes, a power of two that divides `global_batch`; "auto" is 8, or the largest power of two
            below 8 that divides it.
        seed: decides the random numbers that the data set draws.
        tail: what happens to the samples left over at an epoch's end: "drop", or "short" for smaller or empty lanes.
        lanes_per_rank: how many lanes each rank runs, for devices of different speeds; evenly split if omitted.
        workers: the number of worker processes that read the streams, at most one per lane of this rank, or a single
            one for a data set without `lane`. They also read beyond an epoch's end. With 0 nothing is read ahead. See
            `LaneLoader` for their start and end.
        prefetch: how many global batches the workers read ahead.
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
        lanes_per_rank: Sequence[int] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        collate: Collate | None = None,
        worker_init: WorkerInit | None = None,
    ) -> None:
        check_tail(tail)
        if tail == "pad":
            raise UserError(
                "tail='pad' needs a data set with a length: use tail='drop' or 'short' with an iterable one"
            )
        self._workers = Workers(workers, worker_init, prefetch)
        num_lanes = choose_lanes(global_batch) if lanes == "auto" else lanes
        self.lanes = share_lanes(num_lanes, world.size, lanes_per_rank)
        check_batch(global_batch, num_lanes)
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self.tail = tail
        self._world = world
        self._own_lanes = self.lanes.of(world.rank)
        self._streams = LaneStreams(
            dataset,
            seed,
            num_lanes,
            global_batch // num_lanes,
            default_collate if collate is None else collate,
            world.size,
        )
        self._has_reported = False
        self._saved = self._beginning()
        self._states: StreamStates | None = None  # of the latest iterator, if there is one

    def __len__(self) -> int:
        raise TypeError("an iterable data set has no length: count steps instead of epochs")

    @property
    def may_leave_lanes_empty(self) -> bool:
        """Can a batch have lanes without samples?"""
        return self.tail != "drop"  # a stream may end at any sample

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        epochs: int | None = None,
        first_epoch: int | None = None,
    ) -> Iterator[GlobalBatch]:
        """The batches from number `start` up to `stop`, counted over all epochs; endless without a `stop`.

        If `start` is the loader's saved position, reading begins there; otherwise everything before it is read and
        discarded. Use one iterator at a time: the loader's state is that of the latest.

        Args:
            start: the number of the first batch.
            stop: the number after the last batch.
            epochs: end after this number of epochs, without reading any of the next one.
            first_epoch: the epoch from which `epochs` are counted; that of the first batch if omitted.
        """
        check_batch_range(start, stop)
        return prefetch_to_device(self._batches(start, stop, epochs, first_epoch), self._world.device, ahead=False)

    def describe(self) -> dict[str, Any]:
        """Like a LaneLoader's, but the samples of a stream have no indices."""
        return {"kind": "stream", "global_batch": self.global_batch, "tail": self.tail, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch yielded, of this rank's lanes."""
        if self._states is None:
            return dict(self._saved)
        return {**self._saved, "streams": self._states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, which may contain the lanes of other ranks too."""
        if state.get("num_lanes") != self.lanes.count:
            raise UserError(
                f"the saved position has {state.get('num_lanes')} lanes, and this loader has {self.lanes.count}: "
                "use the same lanes="
            )
        saved = state.get("streams")
        positions = list(saved.values()) if isinstance(saved, dict) else [None]
        counts = [state.get(name) for name in ("number", "epoch", "batch")]
        counts += [each.get("taken") if isinstance(each, dict) else None for each in positions]
        if None in map(parse_count, counts):
            raise UserError("the saved position is damaged: it does not say how many batches and samples were taken")
        names = self._streams.names(self._own_lanes)
        if state["streams"] and (missing := [name for name in names if name not in state["streams"]]):
            raise UserError(f"the saved position lacks lanes {', '.join(missing)}: merge the states of all ranks")
        streams = {name: state["streams"][name] for name in names if name in state["streams"]}
        self._saved = {**state, "streams": streams}
        self._states = None

    def _batches(
        self, start: int, stop: int | None, epochs: int | None, first_epoch: int | None
    ) -> Generator[GlobalBatch, None, None]:
        saved = self.state_dict()
        if saved["number"] > start:
            saved = self._beginning()
        number, epoch, batch = saved["number"], saved["epoch"], saved["batch"]
        # Without `first_epoch`, the last epoch is known only after the first batch: `start` may be at an epoch's end.
        last_epoch = None if epochs is None or first_epoch is None else first_epoch + epochs - 1
        with self._reader(StreamPosition(epoch, batch, saved["streams"])) as reader:
            while stop is None or number < stop:
                read = reader.read(epoch)
                # Needed even if every rank reads the whole stream: where one differs, that rank must not end alone.
                size, is_same = sum_size_and_compare(read.size, read.mark, self._world)
                if not (is_same or self._has_reported):
                    self._has_reported = True
                    self._report_difference(epoch, batch * self.global_batch, read.mark)
                if size == 0 or (self.tail == "drop" and size < self.global_batch):
                    if batch == 0:
                        raise UserError(self._explain_empty(epoch, size))
                    if epoch == last_epoch:
                        return
                    epoch, batch = epoch + 1, 0
                    continue
                lanes = read.lanes() if number >= start else None
                number, batch = number + 1, batch + 1
                self._states = read.states
                self._saved = {"number": number, "epoch": epoch, "batch": batch, "num_lanes": self.lanes.count}
                if lanes is not None:
                    if epochs is not None and last_epoch is None:
                        last_epoch = epoch + epochs - 1
                    yield GlobalBatch(number - 1, epoch, size, lanes)

    def _reader(self, start: StreamPosition) -> AbstractContextManager[Reader]:
        if self._workers.count == 0:
            return nullcontext(LaneReader(self._streams, self._own_lanes, start))
        return read_ahead(self._streams, self._own_lanes, start, self._workers, self._world)

    def _report_difference(self, epoch: int, row: int, mark: int) -> None:
        is_repeatable = self._streams.has_row_again(epoch, row, mark)
        report_difference(type(self.dataset).__name__, epoch, row, mark, is_repeatable, self._world)

    def _beginning(self) -> dict[str, Any]:
        return {"number": 0, "epoch": 0, "batch": 0, "num_lanes": self.lanes.count, "streams": {}}

    def _explain_empty(self, epoch: int, size: int) -> str:
        gave = "no sample" if size == 0 else f"too few samples for a batch of global_batch={self.global_batch}"
        if epoch > 0:
            remedy = (
                "each epoch must be a new stream, and a generator can be read only once: use an IterableDataset whose "
                "__iter__ starts again"
            )
        else:
            remedy = "check the data set" if size == 0 else "check the data set, or use tail='short'"
        return f"epoch {epoch} of the iterable data set gave {gave}: {remedy}"


def all_reduce_int(own: int, op: Operation, world: World) -> int:
    """Reduce a number over all ranks. With NCCL this waits for the device."""
    if world.size == 1:
        return own
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    total = int(all_reduce(torch.tensor([own], device=device), op))
    # With tensor parallelism the process group is larger than `world`: then several ranks have counted each sample.
    return total // max(get_world_size() // world.size, 1) if op == "sum" else total


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the states of all ranks of a loader into one, which any number of ranks can load."""
    streams = {name: stream for state in states for name, stream in state["streams"].items()}
    return {**states[0], "streams": streams}
