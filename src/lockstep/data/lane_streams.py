"""Read the lanes of an iterable data set from any saved position, with keyed random numbers.

The same code runs in this process and in worker processes, so where a lane is read does not change it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from lockstep.config.plurals import count_noun
from lockstep.data.lanes import LaneBatch
from lockstep.data.sample_source import Collate, note_on_error
from lockstep.data.stream_check import NO_ROW, mark_of
from lockstep.errors import UserError
from lockstep.world.keyed_random import key_of, preserve_rng_states, seed_cpu_rngs

StreamState = dict[str, Any]
StreamStates = Callable[[], dict[str, StreamState]]  # by stream name; called when they are needed

_WHOLE = "all"  # the name of the only stream of a data set without `lane`


class StreamPosition(NamedTuple):
    """Where reading begins: after `batch` batches of an epoch, with the streams' saved states by name, if any."""

    epoch: int
    batch: int
    streams: Mapping[str, StreamState]


class StreamRound(Protocol):
    """One batch of some lanes. It is not used if another lane has ended the epoch."""

    mark: int  # of the first row of the batch, whichever lane it belongs to; see `stream_check.py`

    @property
    def size(self) -> int:
        """The number of samples in it."""

    @property
    def states(self) -> "StreamStates":
        """The streams' states after it. Keeping them does not keep the samples in memory."""

    def lanes(self) -> tuple[LaneBatch, ...]:
        """The collated lanes, in lane order."""


class Reader(Protocol):
    """Reads some lanes batch by batch."""

    def read(self, epoch: int) -> StreamRound:
        """The next batch of an epoch; a new epoch starts at its beginning."""


@dataclass(frozen=True)
class LaneStreams:
    """An iterable data set, and how its samples are split into lanes."""

    dataset: Any
    seed: int
    num_lanes: int
    lane_batch: int
    collate: Collate
    num_ranks: int

    @property
    def has_lanes(self) -> bool:
        """Is there a stream for each lane? If not, one serves all, and sample i belongs to lane i mod `num_lanes`."""
        return callable(getattr(self.dataset, "lane", None))

    def names(self, lanes: Sequence[int]) -> list[str]:
        """The streams to read for these lanes."""
        return [str(lane) for lane in lanes] if self.has_lanes else [_WHOLE]

    def open(self, lanes: Sequence[int], epoch: int, saved: Mapping[str, StreamState]) -> dict[str, "SampleStream"]:
        """Start an epoch's streams for these lanes, each at its saved state if there is one."""
        if not self.has_lanes and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return {name: self._open_one(name, epoch, saved.get(name)) for name in self.names(lanes)}

    def take(self, lanes: Sequence[int], streams: Mapping[str, "SampleStream"]) -> "TakenSamples":
        """The samples of each lane for the next batch; fewer if a stream has ended."""
        if self.has_lanes:
            return TakenSamples([streams[name].take(self.lane_batch) for name in self.names(lanes)], NO_ROW)
        samples = streams[_WHOLE].take(self.lane_batch * self.num_lanes)
        mark = mark_of(samples[0]) if samples and self.num_ranks > 1 else NO_ROW
        return TakenSamples([samples[lane :: self.num_lanes] for lane in lanes], mark)

    def has_row_again(self, epoch: int, row: int, mark: int) -> bool:
        """Does a row of a stream without lanes have this mark each time the stream is read from its beginning?"""
        if iter(self.dataset) is iter(self.dataset):  # it can be read only once: leave it alone
            return False
        # Twice: a generator that the data set has kept since it was made is, in a worker's process, another copy.
        return all(self._read_mark(epoch, row) == mark for _ in range(2))

    def _read_mark(self, epoch: int, row: int) -> int:
        with preserve_rng_states():
            rows = self.open((), epoch, {})[_WHOLE].take(row + 1)
        return mark_of(rows[row]) if len(rows) > row else NO_ROW

    def _open_one(self, name: str, epoch: int, saved: StreamState | None) -> "SampleStream":
        if self.has_lanes:
            lane = int(name)
            return SampleStream(
                lambda: self.dataset.lane(lane, self.num_lanes, epoch),
                lambda n: key_of(self.seed, "sample", epoch, lane, n),
                key_of(self.seed, "stream", epoch, lane),
                f"lane {lane}, epoch {epoch}",
                saved,
            )
        return SampleStream(
            lambda: self.dataset,
            lambda n: key_of(self.seed, "sample", epoch, n % self.num_lanes, n // self.num_lanes),
            key_of(self.seed, "stream", epoch),
            f"epoch {epoch}",
            saved,
        )


class TakenSamples(NamedTuple):
    """The samples of some lanes for one batch, and the mark of the batch's first row."""

    by_lane: list[list[Any]]
    mark: int


class LaneReader:
    """Reads some lanes batch by batch, in this process."""

    def __init__(self, streams: LaneStreams, lanes: Sequence[int], start: StreamPosition) -> None:
        self.dataset = streams.dataset
        self._source = streams
        self._lanes = lanes
        self._start = start
        self._streams: dict[str, SampleStream] = {}  # of the epoch that is being read
        self._epoch = -1
        self._batch = 0
        self.num_reads = 0

    def read(self, epoch: int) -> "LaneRound":
        """The next batch of an epoch."""
        self.num_reads += 1
        with preserve_rng_states():
            if epoch != self._epoch:
                position = self._start if self._epoch < 0 else StreamPosition(epoch, 0, {})
                self._streams = self._source.open(self._lanes, epoch, position.streams)
                self._epoch, self._batch = epoch, position.batch
            taken = self._source.take(self._lanes, self._streams)
        self._batch += 1
        return LaneRound(self, taken)

    def collated(self, index: int, samples: list[Any]) -> LaneBatch:
        """The lane at an index among this reader's lanes, of the last batch read."""
        lane, epoch = self._lanes[index], self._epoch
        if not samples:
            return LaneBatch(lane, None, 0, None)
        with preserve_rng_states():
            seed_cpu_rngs(key_of(self._source.seed, "collate", epoch, lane, self._batch))
            with note_on_error(f"collating {len(samples)} samples (epoch {epoch}, lane {lane})"):
                return LaneBatch(lane, self._source.collate(samples), len(samples), None)

    def states(self) -> StreamStates:
        """A function that returns the streams' states as they are now, whenever it is called."""
        taken = {name: {"taken": stream.taken} for name, stream in self._streams.items()}
        return partial(self._states_after, self.num_reads, taken)

    def _states_after(self, num_reads: int, taken: dict[str, StreamState]) -> dict[str, StreamState]:
        if num_reads == self.num_reads:
            return {name: stream.state() for name, stream in self._streams.items()}
        # The next read has failed, or has ended the epoch, and the iterators have moved on: only the counts are known.
        return taken


class LaneRound:
    """What a `LaneReader` has read for one batch; collated on demand."""

    def __init__(self, reader: LaneReader, taken: TakenSamples) -> None:
        self.samples, self.mark = taken
        self.states = reader.states()
        self._reader = reader

    @property
    def size(self) -> int:
        """The number of samples in it."""
        return sum(map(len, self.samples))

    def lane(self, index: int) -> LaneBatch:
        """The collated lane at an index among the reader's lanes."""
        return self._reader.collated(index, self.samples[index])

    def lanes(self) -> tuple[LaneBatch, ...]:
        """All lanes, collated."""
        return tuple(map(self.lane, range(len(self.samples))))


class SampleStream:
    """One iterator of a data set, and how many samples were taken from it.

    Args:
        start: returns the iterable; called once.
        key_of_sample: the random key of the n-th sample.
        key: the random key that is set before `start` is called.
        place: how errors name the stream.
        saved: a saved state to continue from.
    """

    def __init__(
        self,
        start: Callable[[], Iterable[Any]],
        key_of_sample: Callable[[int], int],
        key: int,
        place: str,
        saved: StreamState | None,
    ) -> None:
        seed_cpu_rngs(key)
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
            seed_cpu_rngs(self._key_of_sample(self.taken))
            with note_on_error(f"reading sample {self.taken} of an iterable data set ({self._place})"):
                try:
                    samples.append(next(self._iterator))
                    self.taken += 1
                except StopIteration:
                    self._has_ended = True
        return samples

    def state(self) -> StreamState:
        """How many samples were taken, and the iterator's own state if it has one."""
        state: StreamState = {"taken": self.taken}
        if hasattr(self._iterator, "state_dict"):
            state["state"] = self._iterator.state_dict()
        return state

    def _restore(self, saved: StreamState) -> None:
        if "state" in saved:
            if not hasattr(self._iterator, "load_state_dict"):
                raise UserError(
                    f"{self._place}: the saved state needs an iterator with load_state_dict, and this one has none: "
                    "resume with the data set that the run was started with"
                )
            self._iterator.load_state_dict(saved["state"])
            self.taken = saved["taken"]
        elif len(self.take(saved["taken"])) < saved["taken"]:
            raise UserError(
                f"{self._place}: the stream ends after {count_noun(self.taken, 'sample')}, but {saved['taken']} were "
                "taken before: the data has changed, so restore it or start a new run"
            )
