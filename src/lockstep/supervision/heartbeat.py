"""Each rank's heartbeat: its step and phase, in a page of shared memory that its agent reads.

[Note: heartbeat]

Each data worker of the rank also writes which sample it is reading. A write takes well under a microsecond and never
blocks. A read never disturbs the rank, and works when the rank hangs, is stopped or has died. Values are written one by
one, so a reader may see a new phase with the start time of the previous one: read twice before drawing conclusions.

In a process without an agent all of this does nothing.

[Note: one heartbeat per process]

A process has one heartbeat, and every layer writes to it, down to the loop that fetches samples. So it is not passed
around: this module holds one `HeartbeatWriter` for the process, and `enter`, `during` and the other functions are its
methods. `launcher.worker_main` owns it and begins it; a data worker, which is a fork, switches to another slot.
That object is the only state of this module.
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
    """What a rank is doing. Append new phases at the end: an agent may read the page of another version."""

    STARTING = 0  # before the script begins
    JOINING = 1  # waiting for the other ranks to join the job
    RESUMING = 2  # reading a checkpoint
    DATA = 3  # waiting for the next batch
    COMPUTING = 4  # the loop's body: forward and backward pass, and anything else that the script does in it
    EXCHANGING = 5  # waiting for the other ranks' gradients
    UPDATING = 6  # clipping, optimizer, EMA, and what the script does after that
    SAVING = 7  # copying the state for a save, or waiting for the previous save
    EVALUATING = 8
    FINISHING = 9  # comparing digests, last save
    SCRIPT = 10  # the script's own code, outside of any step
    LEAVING = 11  # the script is over
    DESIGNS = 12  # evaluating a search's designs
    AWAITING_DESIGNS = 13  # no design is left to evaluate, and other ranks are still evaluating theirs

    @property
    def words(self) -> str:
        """Text for messages."""
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
    Phase.EVALUATING: "evaluating",
    Phase.FINISHING: "finishing",
    Phase.SCRIPT: "the script's own code",
    Phase.LEAVING: "leaving",
    Phase.DESIGNS: "evaluating designs",
    Phase.AWAITING_DESIGNS: "waiting for the other ranks' designs",
}

# Torch's compiler. Only its module name is used, to see whether it is imported and to import it ahead of time.
COMPILER = "torch._dynamo"

# The phases of a lockstep training loop, from which a run can resume.
LOOP_PHASES = frozenset(Phase) - {Phase.STARTING, Phase.JOINING, Phase.SCRIPT, Phase.LEAVING}

# The phases of one training step, and of one generation of a search.
STEP_PHASES = (Phase.DATA, Phase.COMPUTING, Phase.EXCHANGING, Phase.UPDATING)
GENERATION_PHASES = (Phase.DESIGNS, Phase.AWAITING_DESIGNS)

# The phases that follow a training loop. Others, such as an evaluation, may come inside a step or after it.
_OUTSIDE_STEPS = frozenset({Phase.RESUMING, Phase.FINISHING, Phase.SCRIPT, Phase.LEAVING})

MAX_DATA_WORKERS = 96
NO_SAMPLE = -1

_SIZE = 4096
_MAGIC = 0x6C6F636B73746570
_VERSION = 1
# Layout of the page: indices of 8-byte values.
_AT_MAGIC, _AT_VERSION, _PID, _MAIN_THREAD, _STEP, _PHASE, _SINCE, _SAMPLE = range(8)
_IS_STOPPING, _HAS_COMPILER, _ACKNOWLEDGEMENTS, _IS_IN_STEP = range(8, 12)
_LONGEST = 12  # the longest duration of each phase, in seconds
_DATA_WORKERS = 32  # a slot for each data worker: process id, worker number, sample, since when
assert len(Phase) <= _DATA_WORKERS - _LONGEST and 8 * (_DATA_WORKERS + 4 * MAX_DATA_WORKERS) <= _SIZE
_SLOTS = range(_DATA_WORKERS, _DATA_WORKERS + 4 * MAX_DATA_WORKERS, 4)


class DataWorker(NamedTuple):
    """What a data worker of the rank is reading."""

    number: int
    pid: int
    sample: int | None  # None: it is not reading one
    since: float


class Heartbeat(NamedTuple):
    """A rank's page at one moment. Times are from `time.monotonic`, which all processes of a machine share."""

    pid: int
    main_thread: int
    step: int  # updates completed
    phase: Phase
    since: float
    sample: int | None  # that the rank itself is reading
    is_stopping: bool  # it was asked to stop, and will after its step
    has_compiler: bool  # torch's compiler is imported, which takes a second or more; DDP imports it
    longest_s: dict[Phase, float]  # the longest duration of each phase that it has completed
    data_workers: list[DataWorker]  # including those that have ended
    num_acknowledgements: int = 0  # of the agent's requests: [Note: listener]
    is_in_step: bool = False  # in a step of a training loop that is not complete yet, whatever the phase


class HeartbeatPage:
    """The page of one rank, opened by the rank itself (`create=True`) or by its agent."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0)
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if create:
                os.write(file, bytes(_SIZE))  # no hole: with memory full, the first access to one raises SIGBUS
            self._memory = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
        self.ints = memoryview(self._memory).cast("q")
        self.floats = memoryview(self._memory).cast("d")

    def begin(self) -> None:
        """Mark the page as this process's."""
        self.ints[_PID], self.ints[_MAIN_THREAD] = os.getpid(), threading.main_thread().ident or 0
        self.ints[_STEP], self.ints[_PHASE], self.ints[_SAMPLE] = 0, Phase.STARTING, NO_SAMPLE
        self.floats[_SINCE] = time.monotonic()
        self.ints[_AT_VERSION], self.ints[_AT_MAGIC] = _VERSION, _MAGIC  # last: from here on it may be read

    def read(self) -> Heartbeat | None:
        """Return what the rank has written, or None if it has written nothing."""
        ints, floats = self.ints.tolist(), self.floats.tolist()
        if ints[_AT_MAGIC] != _MAGIC or ints[_AT_VERSION] != _VERSION or not 0 <= ints[_PHASE] < len(Phase):
            return None
        return Heartbeat(
            pid=ints[_PID],
            main_thread=ints[_MAIN_THREAD],
            step=ints[_STEP],
            phase=Phase(ints[_PHASE]),
            since=floats[_SINCE],
            sample=_sample_or_none(ints[_SAMPLE]),
            is_stopping=bool(ints[_IS_STOPPING]),
            has_compiler=bool(ints[_HAS_COMPILER]),
            longest_s={phase: floats[_LONGEST + phase] for phase in Phase if floats[_LONGEST + phase] > 0},
            data_workers=[
                DataWorker(ints[slot + 1], ints[slot], _sample_or_none(ints[slot + 2]), floats[slot + 3])
                for slot in _SLOTS
                if ints[slot]
            ],
            num_acknowledgements=ints[_ACKNOWLEDGEMENTS],
            is_in_step=bool(ints[_IS_IN_STEP]),
        )


def _sample_or_none(written: int) -> int | None:
    return None if written == NO_SAMPLE else written


class HeartbeatWriter:
    """Writes the heartbeat of one process. Until `begin` is called, every method does nothing."""

    def __init__(self) -> None:
        self._page: HeartbeatPage | None = None
        self._sample_at = _SAMPLE  # index in the page of the sample that this process reads
        self._counts_rounds = False
        self._taken_slots: set[int] = set()

    def begin(self, path: Path) -> None:
        """Write this process's heartbeat to `path` from now on."""
        self._page = HeartbeatPage(path, create=True)
        self._page.begin()

    def end(self) -> None:
        """Stop writing the heartbeat."""
        self._page = None

    def enter(self, phase: Phase) -> None:
        """Begin the rank's next phase."""
        if self._page is None:
            return
        ints, floats, now = self._page.ints, self._page.floats, time.monotonic()
        longest_at = _LONGEST + ints[_PHASE]
        if (spent_s := now - floats[_SINCE]) > floats[longest_at]:
            floats[longest_at] = spent_s
        ints[_PHASE] = phase
        floats[_SINCE] = now
        if phase == Phase.DATA:  # with which every step begins
            ints[_IS_IN_STEP] = 1
        elif phase in _OUTSIDE_STEPS:
            ints[_IS_IN_STEP] = 0

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter `phase` for the `with` block, and return to the current phase after it."""
        outer = Phase.SCRIPT if self._page is None else Phase(self._page.ints[_PHASE])
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def count_optimizer_step(self) -> None:
        """Count a step of an optimizer: the heartbeat of a script with its own loop."""
        if self._page is None:
            return
        ints = self._page.ints
        if not ints[_HAS_COMPILER]:
            ints[_HAS_COMPILER] = COMPILER in sys.modules
        if ints[_PHASE] == Phase.SCRIPT:
            ints[_STEP] += 1
            if ints[_STEP] == 1:  # the time before the first step says nothing about the duration of the others
                self._page.floats[_SINCE] = time.monotonic()
            else:
                self.enter(Phase.SCRIPT)

    def complete_step(self, step: int) -> None:
        """Record that `step` updates are complete."""
        if not self._counts_rounds:
            self.complete_round(step)

    def complete_round(self, number: int) -> None:
        """Record that `number` rounds are complete, in a run that counts rounds."""
        if self._page is not None:
            self._page.ints[_STEP], self._page.ints[_IS_IN_STEP] = number, 0

    @contextmanager
    def counting_rounds(self) -> Iterator[None]:
        """Count rounds, instead of the training steps in them, during the `with` block."""
        self._counts_rounds = True
        try:
            yield
        finally:
            self._counts_rounds = False

    def acknowledge_request(self) -> None:
        """Acknowledge a request of the agent: [Note: listener]."""
        if self._page is not None:
            self._page.ints[_ACKNOWLEDGEMENTS] += 1

    def mark_stopping(self) -> None:
        """Record that this rank was asked to stop and will do so after its step."""
        if self._page is not None:
            self._page.ints[_IS_STOPPING] = 1

    def enter_sample(self, index: int) -> None:
        """Record that this process, a rank or a data worker, begins to read a sample."""
        if self._page is None:
            return
        self._page.ints[self._sample_at] = index
        if self._sample_at != _SAMPLE:
            self._page.floats[self._sample_at + 1] = time.monotonic()

    def leave_samples(self) -> None:
        """Record that this process is no longer reading a sample."""
        self.enter_sample(NO_SAMPLE)

    @contextmanager
    def data_worker_slots(self, count: int) -> Iterator[Sequence[int]]:
        """Reserve slots of the page for `count` data workers, for `begin_data_worker`; fewer if the page is full.

        What a worker wrote stays in its slot until the slot is used again, so that the agent can see what a dead
        worker was reading.
        """
        free = [slot for slot in _SLOTS if slot not in self._taken_slots][:count]
        self._taken_slots.update(free)
        try:
            yield free
        finally:
            self._taken_slots.difference_update(free)

    def begin_data_worker(self, number: int, slots: Sequence[int]) -> None:
        """Become data worker `number`, in a fork of the rank; `slots` are those of all workers of its loader."""
        if self._page is None:
            return
        if number >= len(slots):
            self._page = None
            return
        slot, ints = slots[number], self._page.ints
        ints[slot + 1], ints[slot + 2] = number, NO_SAMPLE
        self._page.floats[slot + 3] = time.monotonic()
        ints[slot] = os.getpid()  # last: from here on the slot may be read
        self._sample_at = slot + 2


_of_this_process = HeartbeatWriter()  # [Note: one heartbeat per process]

begin = _of_this_process.begin
end = _of_this_process.end
enter = _of_this_process.enter
during = _of_this_process.during
count_optimizer_step = _of_this_process.count_optimizer_step
complete_step = _of_this_process.complete_step
complete_round = _of_this_process.complete_round
counting_rounds = _of_this_process.counting_rounds
acknowledge_request = _of_this_process.acknowledge_request
mark_stopping = _of_this_process.mark_stopping
enter_sample = _of_this_process.enter_sample
leave_samples = _of_this_process.leave_samples
data_worker_slots = _of_this_process.data_worker_slots
begin_data_worker = _of_this_process.begin_data_worker
