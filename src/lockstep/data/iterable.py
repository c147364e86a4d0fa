"""The lane loader for iterable data sets: streams of samples that have an end at most, and no index.

Such a data set has either a method `lane(lane, num_lanes, epoch)` that returns one lane's samples, or only `__iter__`.
In the second case every rank reads the whole stream and keeps what is its own: sample i belongs to lane i mod V. So the
stream must not split itself by rank.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.utils.data import default_collate

from lockstep.data.batch import GlobalBatch
from lockstep.data.cut import check_batch, check_tail
from lockstep.data.lanes import choose_lanes, share_lanes
from lockstep.data.prefetch import moved
from lockstep.data.read_ahead import read_ahead
from lockstep.data.reading import Reading
from lockstep.data.streams import LaneReader, LaneStreams, Place, Reader, State, States
from lockstep.errors import UserError
from lockstep.world.collectives import Operation, all_reduce, get_world_size
from lockstep.world.world import World


class IterableLaneLoader:
    """Global batches of an iterable data set, with the interface of `LaneLoader`.

    An epoch ends for all ranks at the same batch: with tail "drop" at the first one that some lane cannot fill, with
    "short" when all lanes are empty. That takes one small all-reduce per batch. Before each `next` torch, numpy and
    `random` are seeded by (seed, epoch, lane, n-th sample).

    `reading`: see `Reading`. Workers read beyond an epoch's end too; without them, nothing is read ahead. Lanes are
    shared out among them, so more than this rank has lanes are of no use, and of a data set without `lane` one worker
    reads all. See `LaneLoader` for their start and end.

    `state_dict()` is the position after the last batch yielded, of this rank's lanes: how many samples each has
    taken, and the iterator's own state where it has `state_dict` and `load_state_dict` (workers ask for it after every
    batch, so it should be small). Without those, resuming reads and throws away what was taken before in that epoch.
    States of several ranks become one by `merge_states`.
    """

    exact = True

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        world: World,
        *,
        lanes: int | Literal["auto"] = "auto",
        seed: int = 0,
        tail: Literal["drop", "short", "pad"] = "drop",
        lanes_per_rank: Sequence[int] | None = None,
        **reading: Any,
    ) -> None:
        check_tail(tail)
        if tail == "pad":
            raise UserError("tail='pad' needs a data set with a length: use 'drop' or 'short' with an iterable one")
        how = Reading.read(reading)
        num_lanes = choose_lanes(global_batch) if lanes == "auto" else lanes
        self.lanes = share_lanes(num_lanes, world.size, lanes_per_rank)
        check_batch(global_batch, num_lanes)
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self.tail = tail
        self._world = world
        self._own = self.lanes.of(world.rank)
        self._workers = how.processes
        self._prefetch = how.prefetch
        collate = default_collate if how.collate is None else how.collate
        self._streams = LaneStreams(dataset, seed, num_lanes, global_batch // num_lanes, collate)
        self._saved = self._beginning()
        self._states: States | None = None  # of the iterator in use, if there is one

    def __len__(self) -> int:
        raise TypeError("an iterable data set has no length: count steps instead of epochs")

    @property
    def may_leave_lanes_empty(self) -> bool:
        return self.tail != "drop"  # streams end when they end

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        epochs: int | None = None,
        first_epoch: int | None = None,
    ) -> Iterator[GlobalBatch]:
        """The batches numbered `start` to `stop`, over all epochs; endless without a `stop`. `epochs`: to the end of so
        many; nothing of a further one is asked for. They are counted from `first_epoch`, or the first batch's.

        If `start` is the place that the loader's state names, it begins there; if not, everything before it is read and
        thrown away. One iterator at a time: the loader's state is that of the latest.
        """
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"batches({start}, {stop}): expected 0 <= start <= stop")
        return moved(self._batches(start, stop, epochs, first_epoch), self._world.device, ahead=False)

    def facts(self) -> dict[str, Any]:
        """As a LaneLoader's. Samples of a stream have no number that could be looked up."""
        return {"kind": "stream", "global_batch": self.global_batch, "tail": self.tail, "seed": self.seed}

    def state_dict(self) -> State:
        if self._states is None:
            return dict(self._saved)
        return {**self._saved, "streams": self._states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved position; it may hold the lanes of other ranks too."""
        if state.get("num_lanes") != self.lanes.count:
            raise UserError(
                f"the saved position has {state.get('num_lanes')} lanes, and this loader has {self.lanes.count}"
            )
        names = self._streams.names(self._own)
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
        # Without a first epoch, known with the first batch: the place may be an epoch's very end.
        last_epoch = None if epochs is None or first_epoch is None else first_epoch + epochs - 1
        with self._reader(Place(epoch, batch, saved["streams"])) as reader:
            while stop is None or number < stop:
                read = reader.read(epoch)
                # Also where every rank has read the same stream: one that differs must not end its epoch alone.
                size = agreed(read.size, "sum", self._world)
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

    def _reader(self, start: Place) -> AbstractContextManager[Reader]:
        if self._workers.count == 0:
            return nullcontext(LaneReader(self._streams, self._own, start))
        return read_ahead(self._streams, self._own, start, self._workers, self._prefetch, self._world)

    def _beginning(self) -> State:
        return {"number": 0, "epoch": 0, "batch": 0, "num_lanes": self.lanes.count, "streams": {}}

    def _explain_empty(self, epoch: int, size: int) -> str:
        gave = "no sample" if size == 0 else f"too few samples for a batch of global_batch={self.global_batch}"
        remedy = "each epoch must be a stream of its own" if epoch else "check the data set, or use tail='short'"
        return f"epoch {epoch} of the iterable data set gave {gave}: {remedy}"


def agreed(own: int, how: Operation, world: World) -> int:
    """A number that all ranks agree on. Over NCCL this waits for the device."""
    if world.size == 1:
        return own
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    total = int(all_reduce(torch.tensor([own], device=device), how))
    # Of ranks that read the same samples each has been counted.
    return total // max(get_world_size() // world.size, 1) if how == "sum" else total


def merge_states(states: Sequence[State]) -> State:
    """The states of all ranks of one loader as one, which any number of ranks can load."""
    streams = {name: stream for state in states for name, stream in state["streams"].items()}
    return {**states[0], "streams": streams}
