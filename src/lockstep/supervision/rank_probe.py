"""A closer look at ranks that may hang: process state, stacks, data workers, last collectives.

A probe disturbs a rank a little (a signal, and an answer from its listener thread), so ranks are probed only when one
of them is overdue. `wait_analysis` interprets the result.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from lockstep.supervision.agent_folder import RankFiles
from lockstep.supervision.flight_recorder import (
    NUM_ACKNOWLEDGEMENTS,
    Collective,
    read_collectives,
    request_collectives,
)
from lockstep.supervision.heartbeat import DataWorker, Heartbeat, Phase
from lockstep.supervision.linux_processes import (
    ProcessState,
    blocked_in,
    children_of,
    is_only_writer_of_its_pipe,
    process_state,
    waits_for_own_lock,
)
from lockstep.supervision.stack_dumps import StackFrame, frames_of, parse_stacks, request_stacks

_ACKNOWLEDGE_WITHIN_S = 1.0
_MAX_CHILDREN = 32  # of a rank; any more are not probed
_PAUSE_S = 0.01

ReadHeartbeat = Callable[[int], Heartbeat | None]  # of a rank, at this moment


class RankStatus(NamedTuple):
    """What the agent knows about a rank at each poll."""

    rank: int
    pid: int
    exit_code: int | None  # None: it is running
    heartbeat: Heartbeat | None  # None: it has not begun to write one


class ChildProcess(NamedTuple):
    """A process that a rank has started, usually a data worker."""

    pid: int
    state: ProcessState | None  # None: it is gone
    stacks: str
    frames: tuple[StackFrame, ...]  # of its main thread
    blocked_in: str
    data_worker: DataWorker | None  # what a worker of a lockstep loader has written into the heartbeat page


class RankObservation(NamedTuple):
    """The result of probing one rank."""

    rank: int
    exit_code: int | None
    heartbeat: Heartbeat
    at: float  # when, by `time.monotonic`
    state: ProcessState | None = None
    stacks: str = ""  # of all threads, as dumped
    frames: tuple[StackFrame, ...] = ()  # of the main thread
    children: tuple[ChildProcess, ...] = ()
    blocked_in: str = ""
    reads_own_pipe: bool = False  # a pipe that no other process can write to
    waits_for_own_lock: bool = False  # its main thread does, for one that no other process can release
    has_answered: bool = True  # whether its listener thread has; if not, something holds the interpreter lock
    collectives: tuple[Collective, ...] = ()  # the latest last

    @property
    def has_ended(self) -> bool:
        """Is its process or its script over?"""
        return self.exit_code is not None or self.heartbeat.phase == Phase.LEAVING

    @property
    def cpu_s(self) -> float:
        """CPU time used by the rank and the processes that it has started."""
        states = [self.state, *(child.state for child in self.children)]
        return sum(state.cpu_s for state in states if state is not None)


def probe_ranks(
    ranks: Sequence[tuple[RankStatus, Heartbeat]], files: Callable[[int], RankFiles], read: ReadHeartbeat
) -> list[RankObservation]:
    """Probe all ranks of this machine.

    Args:
        ranks: each with its heartbeat of this poll.
        files: the files of a rank in the agent's folder.
        read: reads a rank's heartbeat again, to see whether its listener answers.
    """
    observed = [
        _probe(status, heartbeat, files(status.rank))
        if status.exit_code is None
        else RankObservation(status.rank, status.exit_code, heartbeat, time.monotonic())
        for status, heartbeat in ranks
    ]
    return _with_collectives(observed, files, read)


def with_stacks_if_stopped(observed: RankObservation, files: RankFiles) -> RankObservation:
    """Add the stacks of a stopped rank. It has to run for a few milliseconds, so do this only if it certainly hangs."""
    pid = observed.heartbeat.pid
    with suppress(OSError):
        try:
            stacks = request_stacks(pid, files.stacks, wake=True)
        finally:
            os.kill(pid, signal.SIGSTOP)
        frames = frames_of(parse_stacks(stacks), observed.heartbeat.main_thread)
        return observed._replace(stacks=stacks, frames=tuple(frames))
    return observed


def _probe(status: RankStatus, heartbeat: Heartbeat, files: RankFiles) -> RankObservation:
    state = process_state(status.pid)
    stacks = _stacks(state, files)
    data_workers = {worker.pid: worker for worker in heartbeat.data_workers}
    children = children_of(status.pid)[:_MAX_CHILDREN]
    return RankObservation(
        rank=status.rank,
        exit_code=None,
        heartbeat=heartbeat,
        at=time.monotonic(),
        state=state,
        stacks=stacks,
        frames=tuple(frames_of(parse_stacks(stacks), heartbeat.main_thread)),
        children=tuple(_probe_child(pid, files, heartbeat.main_thread, data_workers.get(pid)) for pid in children),
        blocked_in=blocked_in(status.pid),
        reads_own_pipe=is_only_writer_of_its_pipe(status.pid),
        waits_for_own_lock=waits_for_own_lock(status.pid),
    )


def _probe_child(pid: int, files: RankFiles, main_thread: int, worker: DataWorker | None) -> ChildProcess:
    """`main_thread` is the rank's: the main thread of a fork has the same ident."""
    state = process_state(pid)
    stacks = _stacks(state, files)
    frames = tuple(frames_of(parse_stacks(stacks), main_thread))
    return ChildProcess(pid, state, stacks, frames, blocked_in(pid), worker)


def _stacks(state: ProcessState | None, files: RankFiles) -> str:
    """Dump a process's stacks, unless it cannot answer now: it would dump them later, when nobody reads them."""
    return "" if state is None or state.state in "TtDZX" else request_stacks(state.pid, files.stacks)


def _with_collectives(
    observed: Sequence[RankObservation], files: Callable[[int], RankFiles], read: ReadHeartbeat
) -> list[RankObservation]:
    """Add each rank's last collectives, and which ranks do not answer: [Note: listener]."""
    before = {each.rank: each.heartbeat.num_acknowledgements for each in observed if each.exit_code is None}
    num_new = ask_for_collectives(before, files, read)
    return [
        each._replace(
            has_answered=num_new.get(each.rank, 1) > 0,
            collectives=tuple(read_collectives(files(each.rank).collectives)) if each.rank in num_new else (),
        )
        for each in observed
    ]


def ask_for_collectives(
    before: Mapping[int, int], files: Callable[[int], RankFiles], read: ReadHeartbeat
) -> dict[int, int]:
    """Have ranks write their last collectives; return how often each has acknowledged the request: [Note: listener].

    Args:
        before: the ranks, each with its number of acknowledgements so far. Those without a listener are omitted.
        files: the files of a rank in the agent's folder.
        read: reads a rank's heartbeat.
    """
    num_new = dict.fromkeys((rank for rank in before if request_collectives(files(rank))), 0)
    deadline = time.monotonic() + _ACKNOWLEDGE_WITHIN_S
    while min(num_new.values(), default=NUM_ACKNOWLEDGEMENTS) < NUM_ACKNOWLEDGEMENTS and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        for rank in num_new:
            now = read(rank)
            num_new[rank] = NUM_ACKNOWLEDGEMENTS if now is None else now.num_acknowledgements - before[rank]
    return num_new
