"""A closer look at ranks that may hang: their processes' states, their stacks, and those of their data workers.

It disturbs a rank a little (a signal, an answer of its listener), so it is made only when somebody is overdue.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from lockstep.supervision import listener
from lockstep.supervision.collectives import Collective, read_collectives
from lockstep.supervision.process import ProcessState, blocked_in, children_of, state_of
from lockstep.supervision.pulse import DataWorker, Phase, Reading
from lockstep.supervision.rank_files import RankFiles
from lockstep.supervision.stacks import Frame, ask_for_stacks, frames_of, parse_stacks

_ANSWER_WITHIN_S = 1.0
_MAX_CHILDREN = 32  # that are looked at
_PAUSE_S = 0.01

ReadPulse = Callable[[int], Reading | None]


class RankNow(NamedTuple):
    """A rank as its agent sees it at every poll."""

    rank: int
    pid: int
    exit_code: int | None  # None: it runs
    reading: Reading | None  # None: it has not begun


class Child(NamedTuple):
    """A process that a rank has started: mostly a data worker."""

    pid: int
    state: ProcessState | None  # None: it is gone
    stacks: str
    frames: tuple[Frame, ...]  # of its main thread
    blocked_in: str
    pulse: DataWorker | None  # of a worker of lockstep's loaders


class Observation(NamedTuple):
    """One rank, at one moment."""

    rank: int
    exit_code: int | None
    reading: Reading
    at: float
    state: ProcessState | None = None
    stacks: str = ""  # of all threads, as they came
    frames: tuple[Frame, ...] = ()  # of the main thread
    children: tuple[Child, ...] = ()
    blocked_in: str = ""
    has_answered: bool = True
    collectives: tuple[Collective, ...] = ()  # the last ones, the latest last

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None or self.reading.phase == Phase.LEAVING

    @property
    def cpu_s(self) -> float:
        """Used by it and by what it has started."""
        states = [self.state, *(child.state for child in self.children)]
        return sum(state.cpu_s for state in states if state is not None)


def examine(
    ranks: Sequence[tuple[RankNow, Reading]], files: Callable[[int], RankFiles], read: ReadPulse
) -> list[Observation]:
    observed = [
        _observed(rank, reading, files(rank.rank))
        if rank.exit_code is None
        else Observation(rank.rank, rank.exit_code, reading, time.monotonic())
        for rank, reading in ranks
    ]
    return _with_answers(observed, files, read)


def _observed(rank: RankNow, reading: Reading, files: RankFiles) -> Observation:
    state = state_of(rank.pid)
    stacks = _stacks(state, files)
    threads = parse_stacks(stacks)
    pulses = {worker.pid: worker for worker in reading.data_workers}
    return Observation(
        rank=rank.rank,
        exit_code=None,
        reading=reading,
        at=time.monotonic(),
        state=state,
        stacks=stacks,
        frames=tuple(frames_of(threads, reading.main_thread)),
        children=tuple(_child(pid, files, reading, pulses.get(pid)) for pid in children_of(rank.pid)[:_MAX_CHILDREN]),
        blocked_in=blocked_in(rank.pid),
    )


def _child(pid: int, files: RankFiles, reading: Reading, worker: DataWorker | None) -> Child:
    state = state_of(pid)
    stacks = _stacks(state, files)
    # A fork's main thread has its parent's number.
    frames = tuple(frames_of(parse_stacks(stacks), reading.main_thread))
    return Child(pid, state, stacks, frames, blocked_in(pid), worker)


def _stacks(state: ProcessState | None, files: RankFiles) -> str:
    """None of one that cannot answer: it would do so as soon as it can, when nobody expects it any more."""
    return "" if state is None or state.state in "TtDZX" else ask_for_stacks(state.pid, files.stacks)


def with_stacks_of_the_stopped(observed: Observation, files: RankFiles) -> Observation:
    """The same, with its stacks. It runs for some milliseconds: only for a rank that hangs for sure."""
    pid = observed.reading.pid
    with suppress(OSError):
        try:
            stacks = ask_for_stacks(pid, files.stacks, wake=True)
        finally:
            os.kill(pid, signal.SIGSTOP)
        frames = frames_of(parse_stacks(stacks), observed.reading.main_thread)
        return observed._replace(stacks=stacks, frames=tuple(frames))
    return observed


def _with_answers(
    observed: Sequence[Observation], files: Callable[[int], RankFiles], read: ReadPulse
) -> list[Observation]:
    """The same, with the last collectives, and with who does not answer: those cannot get the interpreter lock."""
    before = {each.rank: each.reading.answers for each in observed}
    asked = {
        each.rank
        for each in observed
        if each.exit_code is None and listener.ask(files(each.rank), listener.YOUR_COLLECTIVES)
    }
    num_answers = dict.fromkeys(asked, 0)
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    while min(num_answers.values(), default=2) < 2 and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        for rank in asked:
            now = read(rank)
            num_answers[rank] = 2 if now is None else now.answers - before[rank]
    return [
        each._replace(
            has_answered=num_answers.get(each.rank, 1) > 0,
            collectives=tuple(read_collectives(files(each.rank).collectives)) if each.rank in asked else (),
        )
        for each in observed
    ]
