"""Worker processes for iterable data sets: each reads some of this rank's lanes ahead.

A worker cannot know when an epoch ends, because a lane of another worker or another rank may end it. So every request
names the epoch, and what was read ahead in an epoch that has meanwhile ended is discarded, errors included.
"""

import pickle
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple, NoReturn

from lockstep.data.lane_streams import LaneReader, LaneRound, LaneStreams, Reader, StreamPosition, StreamState
from lockstep.data.lanes import LaneBatch
from lockstep.data.sample_workers import Workers, hide_worker_info
from lockstep.data.stream_check import NO_ROW
from lockstep.errors import UserError
from lockstep.world.world import World


@contextmanager
def read_ahead(
    streams: LaneStreams, lanes: range, start: StreamPosition, workers: Workers, world: World
) -> Iterator[Reader]:
    """A reader of these lanes that is `workers.prefetch` batches ahead; its workers end with the context."""
    # A stream belongs to one worker: read by several, each would do all of the work.
    num_workers = min(workers.count, len(streams.names(lanes)))
    lanes_by_worker = [lanes[number::num_workers] for number in range(num_workers)]
    requests = _Requests(num_workers, start.epoch)
    source = _WorkerReader([LaneReader(streams, own_lanes, start) for own_lanes in lanes_by_worker])
    processes = Workers(num_workers, workers.init, workers.prefetch)
    with processes.fetched(source, requests, workers.prefetch * num_workers, world) as answers:
        yield _ReadAhead(requests, answers)


class _Request(NamedTuple):
    """A request for the next batch of one worker's lanes."""

    epoch: int
    worker: int
    number: int  # how many requests this worker got before


class _Answer(NamedTuple):
    epoch: int
    lanes: list[LaneBatch]  # with a `_Failure` as data if the samples could not be collated
    states: bytes  # after this batch
    mark: int = NO_ROW  # of the batch's first row
    failure: "_Failure | None" = None  # the samples could not be read


class _WorkerReader:
    """Answers requests in the worker processes. They are sent in turn, so a worker always reads the same lanes."""

    def __init__(self, readers: Sequence[LaneReader]) -> None:
        self._readers = readers
        self.dataset = readers[0].dataset

    def fetch(self, request: _Request) -> _Answer:
        reader = self._readers[request.worker]
        assert reader.num_reads == request.number, "another worker has read these lanes before"
        try:
            hide_worker_info()
            read = reader.read(request.epoch)
            lanes = [_collated(read, index) for index in range(len(read.samples))]
            # Pickled now: the object that an iterator returns as its state may change, and the answer is sent later.
            return _Answer(request.epoch, lanes, pickle.dumps(read.states()), read.mark)
        except Exception as error:
            return _Answer(request.epoch, [], b"", failure=_Failure(error))


def _collated(read: LaneRound, index: int) -> LaneBatch:
    try:
        return read.lane(index)
    except Exception as error:
        return LaneBatch(-1, _Failure(error), len(read.samples[index]), None)


class _Failure:
    """An error in a worker process, to be raised in the training process if the batch is needed there."""

    def __init__(self, error: Exception) -> None:
        # A UserError is raised as it is; any other one says where it came from.
        self._user_error = error if type(error) is UserError else None
        self._message = f"{type(error).__name__} in a data worker:\n{''.join(traceback.format_exception(error))}"
        self._type: type[Exception] = type(error)
        try:
            pickle.dumps(self._type)
        except Exception:  # a class defined inside a function, say, which another process cannot import
            self._type = RuntimeError

    def reraise(self) -> NoReturn:
        """Raise the error, with the worker's traceback in its message."""
        if self._user_error is not None:
            raise self._user_error
        try:
            error = self._type(_Verbatim(self._message))
        except Exception:  # its constructor takes other arguments
            error = RuntimeError(self._message)
        raise error


class _Verbatim(str):
    """A text that is its own `repr`, for errors that show the `repr` of their argument, as KeyError does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Requests:
    """Endless rounds of requests, one for each worker.

    Separate from `_ReadAhead`, so that no reference cycle keeps the workers alive.
    """

    def __init__(self, num_workers: int, epoch: int) -> None:
        self.num_workers = num_workers
        self.epoch = epoch  # the latest that the training process has asked for

    def __iter__(self) -> Iterator[_Request]:
        for number in count():
            epoch = self.epoch  # the same for all workers
            for worker in range(self.num_workers):
                yield _Request(epoch, worker, number)


class _ReadAhead:
    """Combines the workers' answers in the training process."""

    def __init__(self, requests: _Requests, answers: Iterator[_Answer]) -> None:
        self._requests = requests
        self._answers = answers

    def read(self, epoch: int) -> "_ReadAheadRound":
        self._requests.epoch = epoch
        answers = self._next_answers()
        while answers[0].epoch != epoch:
            answers = self._next_answers()
        for answer in answers:
            if answer.failure is not None:
                answer.failure.reraise()
        return _ReadAheadRound(answers)

    def _next_answers(self) -> list[_Answer]:
        return [next(self._answers) for _ in range(self._requests.num_workers)]


class _ReadAheadRound:
    def __init__(self, answers: list[_Answer]) -> None:
        self._lanes = [lane for answer in answers for lane in answer.lanes]
        self.mark = answers[0].mark  # a stream without lanes has one worker
        self.states = partial(_unpickled, [answer.states for answer in answers])

    @property
    def size(self) -> int:
        return sum(lane.size for lane in self._lanes)

    def lanes(self) -> tuple[LaneBatch, ...]:
        for lane in self._lanes:
            if isinstance(lane.data, _Failure):
                lane.data.reraise()
        return tuple(sorted(self._lanes, key=lambda lane: lane.lane))


def _unpickled(parts: Sequence[bytes]) -> dict[str, StreamState]:
    """The states that this process's own workers have pickled; nothing else ever gets here."""
    return {name: state for part in parts for name, state in pickle.loads(part).items()}
