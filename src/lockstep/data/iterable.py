"""The lane loader for iterable data sets: streams of samples that have an end at most, and no index.

Such a data set has either a method `lane(lane, num_lanes, epoch)` that returns one lane's samples, or only `__iter__`.
In the second case every rank reads the whole stream and keeps what is its own: sample i belongs to lane i mod V. So the
stream must not split itself by rank.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import default_collate

from lockstep.data.batch import GlobalBatch, LaneBatch
from lockstep.data.cut import check_batch, check_tail
from lockstep.data.lanes import choose_lanes, share_lanes
from lockstep.data.prefetch import moved
from lockstep.data.samples import Collate, explained
from lockstep.errors import UserError
from lockstep.world.collectives import Operation, all_reduce
from lockstep.world.randomness import key_of, seed_cpu_streams, undisturbed_streams
from lockstep.world.world import World

_WHOLE = "all"  # names the one stream of a data set without `lane`

State = dict[str, Any]


class IterableLaneLoader:
    """Global batches of an iterable data set, with the interface of `LaneLoader`.

    An epoch ends for all ranks at the same batch: with tail "drop" at the first one that some lane cannot fill, with
    "short" when all lanes are empty. That takes one small all-reduce per batch. `next` runs in this process, with
    torch, numpy and `random` seeded by (seed, epoch, lane, n-th sample); nothing is read ahead.

    `state_dict()` is the position after the last batch yielded, of this rank's lanes: how many samples each has
    taken, and the iterator's own state where it has `state_dict` and `load_state_dict`. Without those, resuming reads
    and throws away what was taken before in that epoch. States of several ranks become one by `merge_states`.
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
        workers: int = 0,
        collate: Collate | None = None,
        lanes_per_rank: Sequence[int] | None = None,
    ) -> None:
        check_tail(tail)
        if tail == "pad":
            raise UserError("tail='pad' needs a data set with a length: use 'drop' or 'short' with an iterable one")
        if workers:
            raise UserError(f"workers={workers}: an iterable data set is read by the training process, use workers=0")
        num_lanes = choose_lanes(global_batch) if lanes == "auto" else lanes
        self.lanes = share_lanes(num_lanes, world.size, lanes_per_rank)
        check_batch(global_batch, num_lanes)
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self.tail = tail
        self._world = world
        self._own = self.lanes.of(world.rank)
        self._collate = default_collate if collate is None else collate
        self._has_lanes = callable(getattr(dataset, "lane", None))
        self._saved = self._beginning()
        self._streams: dict[str, _Stream] | None = None  # of the iterator in use, if there is one

    def __len__(self) -> int:
        raise TypeError("an iterable data set has no length: count steps instead of epochs")

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[GlobalBatch]:
        """The batches numbered `start` to `stop`, over all epochs; endless without a `stop`.

        If `start` is the place that the loader's state names, it begins there; if not, everything before it is read and
        thrown away. One iterator at a time: the loader's state is that of the latest.
        """
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"batches({start}, {stop}): expected 0 <= start <= stop")
        return moved(self._batches(start, stop), self._world.device, ahead=False)

    def state_dict(self) -> State:
        if self._streams is None:
            return dict(self._saved)
        return {**self._saved, "streams": {name: stream.state() for name, stream in self._streams.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved position; it may hold the lanes of other ranks too."""
        if state.get("num_lanes") != self.lanes.count:
            raise UserError(
                f"the saved position has {state.get('num_lanes')} lanes, and this loader has {self.lanes.count}"
            )
        if state["streams"] and (missing := [name for name in self._names() if name not in state["streams"]]):
            raise UserError(f"the saved position lacks lanes {', '.join(missing)}: merge the states of all ranks")
        streams = {name: state["streams"][name] for name in self._names() if name in state["streams"]}
        self._saved = {**state, "streams": streams}
        self._streams = None

    def _batches(self, start: int, stop: int | None) -> Generator[GlobalBatch, None, None]:
        saved = self.state_dict()
        if saved["number"] > start:
            saved = self._beginning()
        number, epoch, batch = saved["number"], saved["epoch"], saved["batch"]
        streams = self._open(epoch, saved["streams"])
        while stop is None or number < stop:
            samples = self._take(streams)
            # Also where every rank has read the same stream: one that differs must not end its epoch alone.
            size = agreed(sum(map(len, samples)), "sum", self._world)
            if size == 0 or (self.tail == "drop" and size < self.global_batch):
                if batch == 0:
                    raise UserError(self._explain_empty(epoch, size))
                epoch, batch = epoch + 1, 0
                streams = self._open(epoch, {})
                continue
            number, batch = number + 1, batch + 1
            self._streams = streams
            self._saved = {"number": number, "epoch": epoch, "batch": batch, "num_lanes": self.lanes.count}
            if number > start:
                yield GlobalBatch(number - 1, epoch, size, self._collated(epoch, samples))

    def _beginning(self) -> State:
        return {"number": 0, "epoch": 0, "batch": 0, "num_lanes": self.lanes.count, "streams": {}}

    def _names(self) -> list[str]:
        return [str(lane) for lane in self._own] if self._has_lanes else [_WHOLE]

    def _open(self, epoch: int, saved: Mapping[str, State]) -> dict[str, "_Stream"]:
        with undisturbed_streams():
            if not self._has_lanes and hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            return {name: self._open_one(name, epoch, saved.get(name)) for name in self._names()}

    def _open_one(self, name: str, epoch: int, saved: State | None) -> "_Stream":
        count = self.lanes.count
        if self._has_lanes:
            lane = int(name)
            return _Stream(
                lambda: self.dataset.lane(lane, count, epoch),
                lambda n: key_of(self.seed, "sample", epoch, lane, n),
                key_of(self.seed, "stream", epoch, lane),
                f"lane {lane}, epoch {epoch}",
                saved,
            )
        return _Stream(
            lambda: self.dataset,
            lambda n: key_of(self.seed, "sample", epoch, n % count, n // count),
            key_of(self.seed, "stream", epoch),
            f"epoch {epoch}",
            saved,
        )

    def _take(self, streams: Mapping[str, "_Stream"]) -> list[list[Any]]:
        """The next batch's samples of each of this rank's lanes: fewer where a stream has ended."""
        with undisturbed_streams():
            if self._has_lanes:
                lane_batch = self.global_batch // self.lanes.count
                return [streams[name].take(lane_batch) for name in self._names()]
            samples = streams[_WHOLE].take(self.global_batch)
            return [samples[lane :: self.lanes.count] for lane in self._own]

    def _collated(self, epoch: int, samples: list[list[Any]]) -> tuple[LaneBatch, ...]:
        lanes = []
        for lane, part in zip(self._own, samples, strict=True):
            with explained(f"collating {len(part)} samples (epoch {epoch}, lane {lane})"):
                lanes.append(LaneBatch(lane, self._collate(part) if part else None, len(part), None))
        return tuple(lanes)

    def _explain_empty(self, epoch: int, size: int) -> str:
        gave = "no sample" if size == 0 else f"too few samples for a batch of global_batch={self.global_batch}"
        remedy = "each epoch must be a stream of its own" if epoch else "check the data set, or use tail='short'"
        return f"epoch {epoch} of the iterable data set gave {gave}: {remedy}"


def agreed(own: int, how: Operation, world: World) -> int:
    """A number that all ranks agree on. Over NCCL this waits for the device."""
    if world.size == 1:
        return own
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    return int(all_reduce(torch.tensor([own], device=device), how))


class _Stream:
    """One iterator of a data set, read with keyed randomness, and how far it has been read."""

    def __init__(
        self,
        start: Callable[[], Iterable[Any]],
        key_of_sample: Callable[[int], int],
        key: int,
        place: str,
        saved: State | None,
    ) -> None:
        seed_cpu_streams(key)
        self._iterator = iter(start())
        self._key_of_sample = key_of_sample
        self._place = place
        self._taken = 0
        self._has_ended = False
        if saved is not None:
            self._restore(saved)

    def take(self, count: int) -> list[Any]:
        """Up to `count` samples, fewer only at the stream's end."""
        samples: list[Any] = []
        while len(samples) < count and not self._has_ended:
            seed_cpu_streams(self._key_of_sample(self._taken))
            with explained(f"reading sample {self._taken} of an iterable data set ({self._place})"):
                try:
                    samples.append(next(self._iterator))
                    self._taken += 1
                except StopIteration:
                    self._has_ended = True
        return samples

    def state(self) -> State:
        state: State = {"taken": self._taken}
        if hasattr(self._iterator, "state_dict"):
            state["state"] = self._iterator.state_dict()
        return state

    def _restore(self, saved: State) -> None:
        if "state" in saved:
            if not hasattr(self._iterator, "load_state_dict"):
                raise UserError(f"{self._place}: the saved state needs an iterator with load_state_dict")
            self._iterator.load_state_dict(saved["state"])
            self._taken = saved["taken"]
        elif len(self.take(saved["taken"])) < saved["taken"]:
            raise UserError(
                f"{self._place}: the stream ends after {self._taken} samples, but {saved['taken']} had been taken: "
                "the data has changed"
            )


def merge_states(states: Sequence[State]) -> State:
    """The states of all ranks of one loader as one, which any number of ranks can load."""
    streams = {name: stream for state in states for name, stream in state["streams"].items()}
    return {**states[0], "streams": streams}
