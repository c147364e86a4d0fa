"""`ranks(n)`: run a function on n processes and return its results by rank, or raise with every rank's traceback."""

import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lockstep.config import environment
from lockstep.config.placement import LOOPBACK
from lockstep.errors import UserError
from lockstep.testing.failures import PortTaken, RankFailure, RanksFailed, RanksTimeout
from lockstep.testing.rank_worker import Call, Raised, Ready, Release, Returned
from lockstep.testing.worker_pool import WorkerProcess, collect_stacks, shared_pool

if TYPE_CHECKING:  # for the signature only: the caller does not import torch
    from lockstep.world.world import World

P = ParamSpec("P")
T = TypeVar("T")

# The process group's time limit is longer than the call's, so that a hang shows every rank's stack, not one's error.
_GROUP_TIMEOUT_MARGIN_S = 60.0

# How long the other ranks may run after the first failure. Most notice it at once; some would wait forever.
GRACE_S = 2.0

# A dying process closes its connections before the kernel reports its death, so its peers' errors can be dated earlier
# than the death that caused them.
_DEATH_NOTICE_S = 0.5

# Loopback only; and one thread each, because the ranks share the machine's cores with their caller.
_VARIABLES = {"MASTER_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ranks:
    """`size` processes to run a function on, as returned by `ranks`.

    Args:
        size: the number of processes.
        env: additional environment variables.
        timeout_s: the time limit of each call of `run`.
    """

    size: int
    env: Mapping[str, str]
    timeout_s: float

    def run(self, function: Callable[Concatenate["World", P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `function(world, *args, **kwargs)` on every rank, in a new process group; return results in rank order.

        The function must be defined at the top level of a module; arguments and results are copied. It runs in the
        caller's environment (plus `env`) and working directory, with torch's generator seeded by its rank. Workers are
        reused, so other process-wide settings that it changes stay changed.

        Raises `RanksFailed` if a rank raises or dies, and `RanksTimeout` after `timeout_s`.
        """
        try:
            task = pickle.dumps((function, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"{function!r} cannot be sent to its ranks: {error}; define it at the top level of a module and pass "
                "it values that pickle"
            ) from error
        try:
            values = self._attempt(task)
        except PortTaken:
            # Another process took the port after we picked it and before rank 0 listened on it: try once more.
            values = self._attempt(task)
        return [pickle.loads(value) for value in values]

    def _attempt(self, task: bytes) -> list[bytes]:
        workers = shared_pool.first(self.size)
        port = _free_port()
        variables = {**environment.all_variables(), **_VARIABLES, "MASTER_PORT": str(port), **self.env}
        calls = [
            Call(
                rank=rank,
                size=self.size,
                timeout_s=self.timeout_s + _GROUP_TIMEOUT_MARGIN_S,
                task=task,
                environment=variables,
                working_directory=str(Path.cwd()),
                import_path=sys.path,
            )
            for rank in range(self.size)
        ]
        return CallInProgress(workers, self.timeout_s).run(calls)


def ranks(size: int, *, env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> Ranks:
    """Return `size` processes on this machine: `ranks(3).run(function, 10)` calls `function(world, 10)` on each.

    The processes are started on first use and kept for the next call, whatever its size.

    Args:
        size: the number of processes.
        env: environment variables in addition to the caller's.
        timeout_s: the time limit of a call. After it the ranks are killed, and the error shows their stacks.
    """
    if size < 1:
        raise UserError(f"ranks({size}): expected 1 or more")
    return Ranks(size, env or {}, timeout_s)


class CallInProgress:
    """One call on all ranks: which of them have returned, failed, or are still running."""

    def __init__(self, workers: Sequence[WorkerProcess], timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._values: dict[int, bytes] = {}
        self._failures: dict[int, RankFailure] = {}
        self._unreleased: set[int] = set()  # returned, but kept in the process group because others may need them
        self._unfinished = set(range(len(workers)))
        self._port_was_taken = False

    def run(self, calls: Sequence[Call]) -> list[bytes]:
        """Send each worker its call and return the pickled results in rank order."""
        try:
            for worker, call in zip(self._workers, calls, strict=True):
                worker.begin(call)
            while self._unfinished and self._receive():
                pass
            self._raise_unless_done()
            return [self._values[rank] for rank in range(len(self._workers))]
        finally:
            # A worker that is not ready for the next call is not used again.
            for worker in self._workers:
                if not worker.is_ready:
                    worker.kill()

    def _receive(self) -> bool:
        """Wait for messages or deaths of any rank and handle them; return False if none came in time."""
        waiting = [(rank, self._workers[rank]) for rank in sorted(self._unfinished)]
        sources = [source for _, worker in waiting for source in (worker.pipe, worker.death)]
        readable = wait(sources, max(self._deadline - time.monotonic(), 0))
        for rank, worker in waiting:
            if worker.pipe in readable or worker.death in readable:
                self._handle_message(rank)
        return bool(readable)

    def _handle_message(self, rank: int) -> None:
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
                    details = "\n".join([worker.describe_exit(), worker.stack])
                    self._fail(RankFailure(time.monotonic() - _DEATH_NOTICE_S, rank, details))
        if self._failures or len(self._values) == len(self._workers):
            self._release()

    def _fail(self, failure: RankFailure) -> None:
        self._failures[failure.rank] = failure
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _release(self) -> None:
        for rank in self._unreleased:
            self._workers[rank].send(Release())
        self._unreleased.clear()

    def _raise_unless_done(self) -> None:
        if self._failures:
            abandoned = sorted(self._unfinished - self._failures.keys())
            stacks = collect_stacks([self._workers[rank] for rank in abandoned])
            kind = PortTaken if self._port_was_taken else RanksFailed
            raise kind(list(self._failures.values()), len(self._workers), dict(zip(abandoned, stacks, strict=True)))
        if self._unfinished:
            raise RanksTimeout(self._timeout_s, collect_stacks(self._workers), set(self._values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
