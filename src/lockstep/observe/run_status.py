"""Whether a run is waiting, running, finished or stopped, from its events and the lock on its folder."""

import os
import re
import struct
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

from lockstep.observe.jsonl_tail import open_regular_file
from lockstep.observe.run_record import RunRecord
from lockstep.observe.text_format import format_duration, one_line

_FLOCK = "hhqqi4x"  # Linux's struct flock: type, whence, start, length, process

# "left": no process is training in the folder, and the run is not finished.
RunState = Literal["waiting", "running", "ended", "left", "unknown"]


class RunLock(NamedTuple):
    """Who holds the lock on a run folder."""

    is_held: bool | None  # None: this system cannot tell
    owner: str  # "process 123 on host"; "" if the lock file does not say


class RunStatus(NamedTuple):
    """The state of a run, and a line that describes it."""

    state: RunState
    text: str


def read_run_lock(folder: Path) -> RunLock:
    """Ask the system who holds a run folder's lock.

    Not for the training process itself: closing the lock file there would release its lock.
    """
    with open_regular_file(folder / ".lock") as file:
        if file is None:
            return RunLock(False, "")
        owner = re.match(rb"process (\d{1,10}) on ([\w.-]{1,100})", file.read(200))
        return RunLock(_is_locked(file.fileno()), "" if owner is None else owner[0].decode())


def run_status(record: RunRecord, lock: RunLock) -> RunStatus:
    """Return the state of a run, from its record and its lock."""
    if record.is_ended:
        reason = f", stopped early: {one_line(record.stopped)}" if record.stopped else ""
        return RunStatus("ended", f"finished after {_progress(record)}{reason}")
    if lock.is_held:
        return RunStatus("running", f"running ({lock.owner}): {_progress(record)}" if record.start else "starting")
    if not record.start:
        return RunStatus("waiting", "not started yet")
    if lock.is_held is None:
        age = "" if record.last_t is None else f", last event {_age(record.last_t)} ago"
        return RunStatus("unknown", f"not finished: {_progress(record)}{age}")
    saved_step = record.checkpoints.newest_step
    remedy = "" if saved_step is None else f"; start it again to resume from step {saved_step:,}"
    return RunStatus("left", f"not running, not finished: {_progress(record)}{remedy}")


def _is_locked(descriptor: int) -> bool | None:
    if sys.platform != "linux":
        return None
    import fcntl

    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, query)
    except OSError:
        return None
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _progress(record: RunRecord) -> str:
    unit = "generation" if record.is_search else "step"
    total = "" if record.total_steps is None else f" of {record.total_steps:,}"
    return f"{unit} {record.step:,}{total}"


def _age(t: float) -> str:
    return format_duration(max(0.0, time.time() - t))
