"""Following one call from the caller's side until every rank is done, or until waiting longer is of no use."""

import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from lockstep.testing.failures import PortTaken, RankFailure, RanksFailed, RanksTimeout
from lockstep.testing.messages import Call, Raised, Ready, Release, Returned
from lockstep.testing.pool import Worker, collect_stacks

# After the first failure the others may wait for the failed rank for ever; most notice at once that it has gone.
GRACE_S = 2.0

# A dying process closes its connections before the kernel announces its death, so its peers' errors can be dated
# earlier than the death that caused them.
_DEATH_NOTICE_S = 0.5


class CallInProgress:
    """The state of one call: which ranks have returned, failed, or are still at it."""

    def __init__(self, workers: Sequence[Worker], timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._values: dict[int, bytes] = {}
        self._failures: dict[int, RankFailure] = {}
        self._unreleased: set[int] = set()  # returned, and kept in the process group for the others' sake
        self._unfinished = set(range(len(workers)))
        self._port_was_taken = False

    def run(self, calls: Sequence[Call]) -> list[bytes]:
        """Give each worker its call and return the pickled results in rank order."""
        try:
            for worker, call in zip(self._workers, calls, strict=True):
                worker.begin(call)
            while self._unfinished and self._hear():
                pass
            self._raise_unless_done()
            return [self._values[rank] for rank in range(len(self._workers))]
        finally:
            # However this ends, a worker that is not ready for the next call will not be given one.
            for worker in self._workers:
                if not worker.is_ready:
                    worker.kill()

    def _hear(self) -> bool:
        """Wait for news from any rank and take it in; False if none came in time."""
        listening = [(rank, self._workers[rank]) for rank in sorted(self._unfinished)]
        sources = [source for _, worker in listening for source in (worker.pipe, worker.death)]
        news = wait(sources, max(self._deadline - time.monotonic(), 0))
        for rank, worker in listening:
            if worker.pipe in news or worker.death in news:
                self._take_in(rank)
        return bool(news)

    def _take_in(self, rank: int) -> None:
        worker = self._workers[rank]
        match worker.receive():
            case Ready():
                self._unfinished.remove(rank)
            case Returned(value):
                self._values[rank] = value
                self._unreleased.add(rank)
            case Raised(traceback, at_s, address_taken):
                self._port_was_taken |= address_taken
                self._fail(RankFailure(at_s, rank, traceback))
            case None:
                self._unfinished.remove(rank)
                self._unreleased.discard(rank)
                if rank not in self._failures:
                    account = "\n".join([worker.bury(), worker.stack])
                    self._fail(RankFailure(time.monotonic() - _DEATH_NOTICE_S, rank, account))
        if self._failures or len(self._values) == len(self._workers):
            self._release()

    def _fail(self, failure: RankFailure) -> None:
        self._failures[failure.rank] = failure
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _release(self) -> None:
        for rank in self._unreleased:
            self._workers[rank].tell(Release())
        self._unreleased.clear()

    def _raise_unless_done(self) -> None:
        if self._failures:
            abandoned = sorted(self._unfinished - self._failures.keys())
            stacks = collect_stacks([self._workers[rank] for rank in abandoned])
            kind = PortTaken if self._port_was_taken else RanksFailed
            raise kind(list(self._failures.values()), len(self._workers), dict(zip(abandoned, stacks, strict=True)))
        if self._unfinished:
            raise RanksTimeout(self._timeout_s, collect_stacks(self._workers), set(self._values))
