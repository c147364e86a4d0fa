"""The pulse of a rank: a page of shared memory in which it writes where it is, for its agent to read. [Note: pulse]

A rank says which step and phase it is in, and since when; each of its data workers says which sample it reads. Writing
costs well under a microsecond and nobody is asked; reading never disturbs the rank, and works when it hangs, is stopped
or has died. Values are written one by one, so a reader may see a phase with the time of the one before it: who draws
conclusions reads twice.

In a process that nobody supervises all of it does nothing.
"""

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple


class Phase(IntEnum):
    """What a rank is doing. New ones go to the end: an agent may read the page of another version."""

    STARTING = 0  # until the script begins
    JOINING = 1  # waiting for the other ranks to join the job
    RESUMING = 2  # reading a checkpoint
    DATA = 3  # waiting for the next batch
    COMPUTING = 4  # the loop's body: forward and backward pass, and whatever else the script does in it
    EXCHANGING = 5  # waiting for the other ranks' gradients
    UPDATING = 6  # clipping, optimizer, average; and what the script does after that
    SAVING = 7  # copying the state for a save, or waiting for the save before
    EVALUATING = 8
    FINISHING = 9  # comparing digests, last save
    SCRIPT = 10  # the script's own code, outside of any step
    LEAVING = 11  # the script is over
    DESIGNS = 12  # evaluating a search's designs
    AWAITING_DESIGNS = 13  # none is left to begin with, and other ranks have not ended theirs

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Phase.STARTING: "starting",
    Phase.JOINING: "joining the other ranks",
    Phase.RESUMING: "reading a checkpoint",
    Phase.DATA: "waiting for data",
    Phase.COMPUTING: "forward and backward pass",
    Phase.EXCHANGING: "waiting for the other ranks' gradients",
    Phase.UPDATING: "update, or the rest of the loop's body",
    Phase.SAVING: "saving",
    Phase.EVALUATING: "evaluation",
    Phase.FINISHING: "finishing",
    Phase.SCRIPT: "the script's own code",
    Phase.LEAVING: "leaving",
    Phase.DESIGNS: "evaluating designs",
    Phase.AWAITING_DESIGNS: "waiting for the other ranks' designs",
}

COMPILER = "torch._dynamo"

# Those of a loop of lockstep's, from which a run can go on.
LOOP_PHASES = frozenset(Phase) - {Phase.STARTING, Phase.JOINING, Phase.SCRIPT, Phase.LEAVING}

# Those in which a rank makes a step of training, or evaluates a generation of a search.
IN_A_STEP = (Phase.DATA, Phase.COMPUTING, Phase.EXCHANGING, Phase.UPDATING)
IN_A_GENERATION = (Phase.DESIGNS, Phase.AWAITING_DESIGNS)

MAX_DATA_WORKERS = 96
NO_SAMPLE = -1

_SIZE = 4096
_MAGIC = 0x6C6F636B73746570
_VERSION = 1
# Places in the page, in units of 8 bytes.
_IS_VALID, _AT_VERSION, _PID, _MAIN_THREAD, _STEP, _PHASE, _SINCE, _SAMPLE = range(8)
_IS_STOPPING, _HAS_COMPILER, _ANSWERS = range(8, 11)
_LONGEST = 12  # of each phase, in seconds
_DATA_WORKERS = 32  # for each: process id, number, sample, since when
assert len(Phase) <= _DATA_WORKERS - _LONGEST and 8 * (_DATA_WORKERS + 4 * MAX_DATA_WORKERS) <= _SIZE
_PLACES = range(_DATA_WORKERS, _DATA_WORKERS + 4 * MAX_DATA_WORKERS, 4)


class DataWorker(NamedTuple):
    number: int
    pid: int
    sample: int | None  # that it is reading
    since: float


class Reading(NamedTuple):
    """A rank's page at one moment. Times are of `time.monotonic`, which all processes of a machine share."""

    pid: int
    main_thread: int
    step: int  # updates completed
    phase: Phase
    since: float
    sample: int | None  # that the rank itself is reading
    is_stopping: bool  # it was asked to stop, and will after its step
    has_compiler: bool  # torch's compiler is imported there, which DDP does and which takes a second or more
    longest_s: dict[Phase, float]  # of the phases that it has completed, the longest each has taken
    data_workers: list[DataWorker]  # also of processes that have ended
    answers: int = 0  # so many questions of its agent were answered: [Note: listener]


class Page:
    """One rank's page, of the rank itself or of its agent."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if create:
                os.write(file, bytes(_SIZE))  # not a hole: where memory is full, who first touches that dies of SIGBUS
            self._memory = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
        self.ints = memoryview(self._memory).cast("q")
        self.floats = memoryview(self._memory).cast("d")

    def begin(self) -> None:
        """This process is the rank."""
        self.ints[_PID], self.ints[_MAIN_THREAD] = os.getpid(), threading.main_thread().ident or 0
        self.ints[_STEP], self.ints[_PHASE], self.ints[_SAMPLE] = 0, Phase.STARTING, NO_SAMPLE
        self.floats[_SINCE] = time.monotonic()
        self.ints[_AT_VERSION], self.ints[_IS_VALID] = _VERSION, _MAGIC  # last: now there is something to read

    def read(self) -> Reading | None:
        """None, if the rank has not begun."""
        ints, floats = self.ints.tolist(), self.floats.tolist()
        if ints[_IS_VALID] != _MAGIC or ints[_AT_VERSION] != _VERSION or not 0 <= ints[_PHASE] < len(Phase):
            return None
        return Reading(
            pid=ints[_PID],
            main_thread=ints[_MAIN_THREAD],
            step=ints[_STEP],
            phase=Phase(ints[_PHASE]),
            since=floats[_SINCE],
            sample=_sample(ints[_SAMPLE]),
            is_stopping=bool(ints[_IS_STOPPING]),
            has_compiler=bool(ints[_HAS_COMPILER]),
            longest_s={phase: floats[_LONGEST + phase] for phase in Phase if floats[_LONGEST + phase] > 0},
            data_workers=[
                DataWorker(ints[at + 1], ints[at], _sample(ints[at + 2]), floats[at + 3]) for at in _PLACES if ints[at]
            ],
            answers=ints[_ANSWERS],
        )


def _sample(written: int) -> int | None:
    return None if written == NO_SAMPLE else written


# Of this process. Globals, because a rank has one pulse and writes it from every layer: [Note: pulse].
_page: Page | None = None
_sample_at = _SAMPLE
_counts_rounds = False
_taken: set[int] = set()  # places of data workers


def begin(path: Path) -> None:
    """Have this process write its pulse there, from now on."""
    global _page
    _page = Page(path, create=True)
    _page.begin()


def enter(phase: Phase) -> None:
    """This rank's next phase begins."""
    if _page is None:
        return
    ints, floats, now = _page.ints, _page.floats, time.monotonic()
    place = _LONGEST + ints[_PHASE]
    if (spent_s := now - floats[_SINCE]) > floats[place]:
        floats[place] = spent_s
    ints[_PHASE] = phase
    floats[_SINCE] = now


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """A phase inside another, which then goes on."""
    outer = Phase.SCRIPT if _page is None else Phase(_page.ints[_PHASE])
    enter(phase)
    try:
        yield
    finally:
        enter(outer)


def count_optimizer_step() -> None:
    """An optimizer has made a step: a sign of life in a script that says nothing else about itself."""
    if _page is None:
        return
    if not _page.ints[_HAS_COMPILER]:
        _page.ints[_HAS_COMPILER] = COMPILER in sys.modules
    if _page.ints[_PHASE] == Phase.SCRIPT:
        _page.ints[_STEP] += 1
        if _page.ints[_STEP] == 1:  # what came before the first step says nothing about how long the others take
            _page.floats[_SINCE] = time.monotonic()
        else:
            enter(Phase.SCRIPT)


def complete_step(step: int) -> None:
    """So many updates are made."""
    if not _counts_rounds:
        complete_round(step)


def complete_round(number: int) -> None:
    """So many rounds are, of a run that goes by rounds."""
    if _page is not None:
        _page.ints[_STEP] = number


@contextmanager
def counting_rounds() -> Iterator[None]:
    """Inside, how far this rank has come is told in rounds, and steps of training are a part of them."""
    global _counts_rounds
    _counts_rounds = True
    try:
        yield
    finally:
        _counts_rounds = False


def answer() -> None:
    """A question of the agent was heard: [Note: listener]."""
    if _page is not None:
        _page.ints[_ANSWERS] += 1


def promise_to_stop() -> None:
    """This rank was asked to stop, and will after its step: whoever asked can wait."""
    if _page is not None:
        _page.ints[_IS_STOPPING] = 1


def read_sample(index: int) -> None:
    """This process, a rank or a data worker, begins to read a sample."""
    if _page is None:
        return
    _page.ints[_sample_at] = index
    if _sample_at != _SAMPLE:
        _page.floats[_sample_at + 1] = time.monotonic()


def all_samples_read() -> None:
    read_sample(NO_SAMPLE)


@contextmanager
def data_workers(count: int) -> Iterator[Sequence[int]]:
    """Places in the page for so many data workers, until they have ended; fewer, where there is no more room.

    What stands there stays until it is overwritten: of a worker that died, its agent wants to know what it was reading.
    """
    free = [place for place in _PLACES if place not in _taken][:count]
    _taken.update(free)
    try:
        yield free
    finally:
        _taken.difference_update(free)


def begin_data_worker(number: int, places: Sequence[int]) -> None:
    """This process, a fork of a rank, is its data worker of that number; `places`: those of all of them."""
    global _page, _sample_at
    if _page is None:
        return
    if number >= len(places):
        _page = None
        return
    place = places[number]
    _page.ints[place + 1], _page.ints[place + 2] = number, NO_SAMPLE
    _page.floats[place + 3] = time.monotonic()
    _page.ints[place] = os.getpid()  # last: now it is there
    _sample_at = place + 2
