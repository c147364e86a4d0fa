"""Reading the lanes of an iterable data set with keyed randomness, from any place on.

The same code runs in this process and in worker processes, so where a lane is read does not change it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from lockstep.data.batch import LaneBatch
from lockstep.data.samples import Collate, explained
from lockstep.errors import UserError
from lockstep.world.randomness import key_of, seed_cpu_streams, undisturbed_streams

State = dict[str, Any]
States = Callable[[], dict[str, State]]  # by the streams' names, asked for when they are needed

_WHOLE = "all"  # names the one stream of a data set without `lane`


class Place(NamedTuple):
    """Where reading begins: after so many batches of an epoch; the streams' own states by name, if there are any."""

    epoch: int
    batch: int
    streams: Mapping[str, State]


class Round(Protocol):
    """One batch's part of some lanes, which may turn out to be unwanted: the epoch may have ended elsewhere."""

    @property
    def size(self) -> int:
        """The samples in it."""

    @property
    def states(self) -> "States":
        """The streams' states after it; whoever keeps this does not keep the samples."""

    def lanes(self) -> tuple[LaneBatch, ...]:
        """Collated, in lane order."""


class Reader(Protocol):
    def read(self, epoch: int) -> Round:
        """The next batch of an epoch; a new epoch begins at its beginning."""


@dataclass(frozen=True)
class LaneStreams:
    """An iterable data set, and how its samples become lanes."""

    dataset: Any
    seed: int
    num_lanes: int
    lane_batch: int
    collate: Collate

    @property
    def has_lanes(self) -> bool:
        """Is there a stream for each lane? Else there is one for all, and sample i belongs to lane i mod V."""
        return callable(getattr(self.dataset, "lane", None))

    def names(self, lanes: Sequence[int]) -> list[str]:
        """The streams to read for these lanes."""
        return [str(lane) for lane in lanes] if self.has_lanes else [_WHOLE]

    def open(self, lanes: Sequence[int], epoch: int, saved: Mapping[str, State]) -> dict[str, "Stream"]:
        if not self.has_lanes and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return {name: self._open_one(name, epoch, saved.get(name)) for name in self.names(lanes)}

    def take(self, lanes: Sequence[int], streams: Mapping[str, "Stream"]) -> list[list[Any]]:
        """The next batch's samples of each lane: fewer where a stream has ended."""
        if self.has_lanes:
            return [streams[name].take(self.lane_batch) for name in self.names(lanes)]
        samples = streams[_WHOLE].take(self.lane_batch * self.num_lanes)
        return [samples[lane :: self.num_lanes] for lane in lanes]

    def _open_one(self, name: str, epoch: int, saved: State | None) -> "Stream":
        if self.has_lanes:
            lane = int(name)
            return Stream(
                lambda: self.dataset.lane(lane, self.num_lanes, epoch),
                lambda n: key_of(self.seed, "sample", epoch, lane, n),
                key_of(self.seed, "stream", epoch, lane),
                f"lane {lane}, epoch {epoch}",
                saved,
            )
        return Stream(
            lambda: self.dataset,
            lambda n: key_of(self.seed, "sample", epoch, n % self.num_lanes, n // self.num_lanes),
            key_of(self.seed, "stream", epoch),
            f"epoch {epoch}",
            saved,
        )


class LaneReader:
    """Reads some lanes, batch after batch, when it is asked to."""

    def __init__(self, streams: LaneStreams, lanes: Sequence[int], start: Place) -> None:
        self._source = streams
        self._lanes = lanes
        self._start = start
        self._streams: dict[str, Stream] = {}  # of the epoch that is being read
        self._epoch = -1
        self._batch = 0
        self.num_reads = 0

    def read(self, epoch: int) -> "LaneRound":
        self.num_reads += 1
        with undisturbed_streams():
            if epoch != self._epoch:
                place = self._start if self._epoch < 0 else Place(epoch, 0, {})
                self._streams = self._source.open(self._lanes, epoch, place.streams)
                self._epoch, self._batch = epoch, place.batch
            samples = self._source.take(self._lanes, self._streams)
        self._batch += 1
        return LaneRound(self, samples)

    def collated(self, place: int, samples: list[Any]) -> LaneBatch:
        """A lane of the batch read last; `place`: among the lanes read here."""
        lane, epoch = self._lanes[place], self._epoch
        if not samples:
            return LaneBatch(lane, None, 0, None)
        with undisturbed_streams():
            seed_cpu_streams(key_of(self._source.seed, "collate", epoch, lane, self._batch))
            with explained(f"collating {len(samples)} samples (epoch {epoch}, lane {lane})"):
                return LaneBatch(lane, self._source.collate(samples), len(samples), None)

    def states(self) -> States:
        """As they are now, whenever they are asked for."""
        taken = {name: {"taken": stream.taken} for name, stream in self._streams.items()}
        return partial(self._states_after, self.num_reads, taken)

    def _states_after(self, num_reads: int, taken: dict[str, State]) -> dict[str, State]:
        if num_reads == self.num_reads:
            return {name: stream.state() for name, stream in self._streams.items()}
        # Reading on has failed, and the iterators stand somewhere behind: what was taken is known all the same.
        return taken


class LaneRound:
    """What a `LaneReader` has read for one batch; collated when it is wanted."""

    def __init__(self, reader: LaneReader, samples: list[list[Any]]) -> None:
        self.samples = samples
        self.states = reader.states()
        self._reader = reader

    @property
    def size(self) -> int:
        return sum(map(len, self.samples))

    def lane(self, place: int) -> LaneBatch:
        return self._reader.collated(place, self.samples[place])

    def lanes(self) -> tuple[LaneBatch, ...]:
        return tuple(map(self.lane, range(len(self.samples))))


class Stream:
    """One iterator of a data set, and how far it has been read."""

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
        self._has_ended = False
        self.taken = 0
        if saved is not None:
            self._restore(saved)

    def take(self, count: int) -> list[Any]:
        """Up to `count` samples, fewer only at the stream's end."""
        samples: list[Any] = []
        while len(samples) < count and not self._has_ended:
            seed_cpu_streams(self._key_of_sample(self.taken))
            with explained(f"reading sample {self.taken} of an iterable data set ({self._place})"):
                try:
                    samples.append(next(self._iterator))
                    self.taken += 1
                except StopIteration:
                    self._has_ended = True
        return samples

    def state(self) -> State:
        state: State = {"taken": self.taken}
        if hasattr(self._iterator, "state_dict"):
            state["state"] = self._iterator.state_dict()
        return state

    def _restore(self, saved: State) -> None:
        if "state" in saved:
            if not hasattr(self._iterator, "load_state_dict"):
                raise UserError(f"{self._place}: the saved state needs an iterator with load_state_dict")
            self._iterator.load_state_dict(saved["state"])
            self.taken = saved["taken"]
        elif len(self.take(saved["taken"])) < saved["taken"]:
            raise UserError(
                f"{self._place}: the stream ends after {self.taken} samples, but {saved['taken']} had been taken: "
                "the data has changed"
            )
