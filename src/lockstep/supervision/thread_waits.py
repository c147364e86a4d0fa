"""What the threads of a rank wait for, by their Python stacks: can one of them end the main thread's wait?"""

import linecache
import re
from typing import NamedTuple

from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.stack_dumps import StackFrame, ThreadStack, parse_stacks
from lockstep.supervision.wait_analysis import is_save_that_waits

_LISTENER = "/lockstep/supervision/flight_recorder.py"  # it takes no lock of the script, and begins no collective
# Threads that never begin a collective which the main thread waits for, by where they began. They may release a lock.
_WITHOUT_COLLECTIVES = (
    "/lockstep/engine/comm_thread.py",
    "/torch/utils/data/_utils/pin_memory.py",
    "/tqdm/_monitor.py",
)
_TRACKERS = ("/site-packages/tensorboard/", "/site-packages/wandb/")  # like those, by their package

# Where a thread waits for work, or for the time to look for some.
_IDLE_LOOPS = (
    ("/concurrent/futures/thread.py", "_worker"),
    ("/multiprocessing/queues.py", "_feed"),
    ("/lockstep/engine/comm_thread.py", "_work"),
    ("/tensorboard/summary/writer/event_file_writer.py", "_run"),
    ("/tqdm/_monitor.py", "run"),
)
_THREADING = "/threading.py"
_WAITING = (_THREADING, "/queue.py")
# Without a deadline: with one, `acquire` has arguments. A `with` that calls something makes another kind of context.
_ACQUIRES = re.compile(r"\.acquire\(\)")
_TAKES_LOCK = re.compile(r"\.acquire\(\)|^with (?!.* as )[\w.\[\], ]+:")


class _Wait(NamedTuple):
    """The wait of a thread for other threads of its process."""

    frame: StackFrame
    is_for_lock: bool  # else for an event, a queue or the end of a thread


def can_be_helped(rank: RankObservation) -> bool:
    """May another thread that runs Python code end the main thread's wait in a collective, or for a pipe?"""
    threads, main_thread = parse_stacks(rank.stacks), rank.heartbeat.main_thread
    return not threads or any(thread.ident != main_thread and not _is_harmless(thread) for thread in threads)


def find_deadlock(rank: RankObservation) -> list[StackFrame]:
    """Return the lines at which threads of a rank wait for locks that none of its threads can release.

    It is a deadlock if the main thread and all others wait for each other without a deadline, or for work, and at least
    one for a lock. Nothing is returned otherwise: a thread that does anything else, a library's included, may release
    the lock, and an event alone may be set by code that is not Python's.
    """
    threads = parse_stacks(rank.stacks) if rank.waits_for_own_lock else []
    waits = {thread.ident: _wait_of(thread) for thread in threads if thread.frames and not _is_listener(thread)}
    known = [wait for wait in waits.values() if wait is not None]
    if rank.heartbeat.main_thread not in waits or len(known) < len(waits):
        return []
    return [wait.frame for wait in known if wait.is_for_lock]


def _is_harmless(thread: ThreadStack) -> bool:
    if not thread.frames or is_save_that_waits(thread):  # without frames, it runs no Python code
        return True
    if _is_listener(thread) or _is_idle(thread):
        return True
    file = _file_of(thread)
    return file.endswith(_WITHOUT_COLLECTIVES) or any(package in file for package in _TRACKERS)


def _is_listener(thread: ThreadStack) -> bool:
    return _file_of(thread).endswith(_LISTENER)


def _file_of(thread: ThreadStack) -> str:
    """Return the file in which a thread's own code begins; empty if it runs the standard library's alone."""
    return next((frame.file for frame in reversed(thread.frames) if not frame.is_in_standard_library), "")


def _is_idle(thread: ThreadStack) -> bool:
    """Does it wait for work, in a loop that does nothing else, rather than do it or have a deadline?"""
    loop = next((frame for frame in thread.frames if not frame.file.endswith(_WAITING)), None)
    return loop is not None and any(
        loop.file.endswith(file) and loop.function == function for file, function in _IDLE_LOOPS
    )


def _wait_of(thread: ThreadStack) -> _Wait | None:
    """Return what a thread waits for without a deadline, or as an idle one; None if it does something else, or may."""
    innermost = thread.frames[0]
    if _is_idle(thread):
        return _Wait(innermost, is_for_lock=False)
    if innermost.file.endswith(_THREADING):
        return _wait_in_threading(thread)
    return _Wait(innermost, is_for_lock=True) if _TAKES_LOCK.search(_text_of(innermost)) else None


def _wait_in_threading(thread: ThreadStack) -> _Wait | None:
    innermost = thread.frames[0]
    caller = next((frame for frame in thread.frames if not frame.file.endswith(_THREADING)), innermost)
    if innermost.function == "__enter__":  # of a condition
        return _Wait(caller, is_for_lock=True)
    if innermost.function in ("wait", "_shutdown"):
        has_deadline = not _ACQUIRES.search(_text_of(innermost))
    else:  # up to Python 3.12, `join` calls another function
        has_deadline = innermost.function not in ("join", "_wait_for_tstate_lock") or ".join()" not in _text_of(caller)
    return None if has_deadline else _Wait(caller, is_for_lock=False)


def _text_of(frame: StackFrame) -> str:
    return linecache.getline(frame.file, frame.line).strip()
