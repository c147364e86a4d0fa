"""Worker processes for iterable data sets: each owns some of this rank's lanes and reads them ahead.

A worker cannot know when an epoch ends, because another worker's lane or another rank's may end it. So every request
names the epoch; what was read ahead in one that has ended meanwhile is thrown away, errors included.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple, NoReturn

import torch.utils.data._utils.worker as torch_worker
from torch._utils import ExceptionWrapper

from lockstep.data.batch import LaneBatch
from lockstep.data.streams import LaneReader, LaneRound, LaneStreams, Place, Reader, State
from lockstep.data.workers import Workers
from lockstep.errors import UserError
from lockstep.world.world import World


@contextmanager
def read_ahead(
    streams: LaneStreams, lanes: range, start: Place, workers: Workers, prefetch: int, world: World
) -> Iterator[Reader]:
    """A reader of these lanes that is `prefetch` batches ahead; its workers end with the context."""
    # One stream is one worker's: reading it in several would be the same work again in each.
    num_workers = min(workers.count, len(streams.names(lanes)))
    owned = [lanes[number::num_workers] for number in range(num_workers)]
    requests = _Requests(num_workers, start.epoch)
    source = _InWorker([LaneReader(streams, part, start) for part in owned])
    processes = Workers(num_workers, workers.init)
    with processes.fetched(source, requests, prefetch * num_workers, world) as answers:
        yield _Ahead(requests, answers)


class _Request(NamedTuple):
    """The next batch of one worker's lanes."""

    epoch: int
    worker: int
    number: int  # of this worker's requests before it


class _Answer(NamedTuple):
    epoch: int
    lanes: list[LaneBatch]  # with a `_Failure` as data where the samples could not be collated
    states: bytes  # after this batch
    failure: "_Failure | None" = None  # the samples could not be read


class _InWorker:
    """What runs in the worker processes. Requests go round, so that a worker gets those for the same lanes always."""

    def __init__(self, readers: Sequence[LaneReader]) -> None:
        self._readers = readers

    def fetch(self, request: _Request) -> _Answer:
        # A data set that splits itself among the workers it is told of would lose samples: it is told of none.
        torch_worker._worker_info = None
        reader = self._readers[request.worker]
        assert reader.num_reads == request.number, "another worker has read these lanes before"
        try:
            read = reader.read(request.epoch)
            lanes = [_collated(read, place) for place in range(len(read.samples))]
            # Now, because what an iterator calls its state may change with it, and answers are sent a little later.
            return _Answer(request.epoch, lanes, pickle.dumps(read.states()))
        except Exception as error:
            return _Answer(request.epoch, [], b"", _Failure(error))


def _collated(read: LaneRound, place: int) -> LaneBatch:
    try:
        return read.lane(place)
    except Exception as error:
        return LaneBatch(-1, _Failure(error), len(read.samples[place]), None)


class _Failure:
    """A worker's error, to be raised in the training process if the batch is wanted there."""

    def __init__(self, error: Exception) -> None:
        # What is meant for the user is said as it is; anything else says where it came from.
        self._own = error if type(error) is UserError else None
        self._wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where="in a data worker")  # type: ignore[no-untyped-call]
        try:
            pickle.dumps(type(error))
        except Exception:  # a class inside a function, say: it cannot be named in another process
            self._wrapped.exc_type = RuntimeError

    def reraise(self) -> NoReturn:
        if self._own is not None:
            raise self._own
        self._wrapped.reraise()  # type: ignore[no-untyped-call]
        raise AssertionError("unreachable")


class _Requests:
    """Rounds of requests without end, one for each worker. Apart from `_Ahead`, so that no cycle keeps the workers."""

    def __init__(self, num_workers: int, epoch: int) -> None:
        self.num_workers = num_workers
        self.epoch = epoch  # as far as is known

    def __iter__(self) -> Iterator[_Request]:
        for number in count():
            epoch = self.epoch  # the same for all workers
            for worker in range(self.num_workers):
                yield _Request(epoch, worker, number)


class _Ahead:
    """The training process's side: puts the workers' answers together."""

    def __init__(self, requests: _Requests, answers: Iterator[_Answer]) -> None:
        self._requests = requests
        self._answers = answers

    def read(self, epoch: int) -> "_AheadRound":
        self._requests.epoch = epoch
        answers = self._next_answers()
        while answers[0].epoch != epoch:
            answers = self._next_answers()
        for answer in answers:
            if answer.failure is not None:
                answer.failure.reraise()
        return _AheadRound(answers)

    def _next_answers(self) -> list[_Answer]:
        return [next(self._answers) for _ in range(self._requests.num_workers)]


class _AheadRound:
    def __init__(self, answers: list[_Answer]) -> None:
        self._lanes = [lane for answer in answers for lane in answer.lanes]
        self.states = partial(_unpickled, [answer.states for answer in answers])

    @property
    def size(self) -> int:
        return sum(lane.size for lane in self._lanes)

    def lanes(self) -> tuple[LaneBatch, ...]:
        for lane in self._lanes:
            if isinstance(lane.data, _Failure):
                lane.data.reraise()
        return tuple(sorted(self._lanes, key=lambda lane: lane.lane))


def _unpickled(parts: Sequence[bytes]) -> dict[str, State]:
    """From this process's own workers, with which torch speaks in pickle too; nothing else ever gets here."""
    return {name: state for part in parts for name, state in pickle.loads(part).items()}
