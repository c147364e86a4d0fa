"""What the threads of a rank wait for, by their Python stacks: can one of them end the main thread's wait?"""

import linecache
import re
from typing import NamedTuple

from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.stack_dumps import StackFrame, ThreadStack, parse_stacks
from lockstep.supervision.wait_analysis import is_save_that_waits

# Threads that never end a wait of the script's own code: by where they began, or by their package.
_NEVER_HELPING = ("/lockstep/supervision/flight_recorder.py", "/tqdm/_monitor.py")
_TRACKERS = ("/site-packages/tensorboard/", "/site-packages/wandb/")
# Those that, besides, never begin a collective.
_WITHOUT_COLLECTIVES = ("/lockstep/engine/comm_thread.py", "/torch/utils/data/_utils/pin_memory.py")

# Where a thread waits for work.
_IDLE_LOOPS = (
    ("/concurrent/futures/thread.py", "_worker"),
    ("/multiprocessing/queues.py", "_feed"),
    ("/lockstep/engine/comm_thread.py", "_work"),
)
_THREADING = "/threading.py"
_WAITING = (_THREADING, "/queue.py")
# Without a deadline: with one, `acquire` has arguments. A `with` that calls something makes another kind of context.
_ACQUIRES = re.compile(r"\.acquire\(\)")
_TAKES_LOCK = re.compile(r"\.acquire\(\)|^with (?!.* as )[\w.\[\], ]+:")


class _Wait(NamedTuple):
    """The wait of a thread, without a deadline, for other threads of its process."""

    frame: StackFrame
    is_for_lock: bool  # else for an event, a queue or the end of a thread


def can_be_helped(rank: RankObservation) -> bool:
    """May another thread that runs Python code end the main thread's wait in a collective, or for a pipe?"""
    threads, main_thread = parse_stacks(rank.stacks), rank.heartbeat.main_thread
    return not threads or any(thread.ident != main_thread and not _is_harmless(thread) for thread in threads)


def find_deadlock(rank: RankObservation) -> list[StackFrame]:
    """Return the lines at which threads of a rank wait for locks that none of its threads can release.

    It is a deadlock if the main thread and all others that run the script's code wait for each other without a
    deadline, and at least one for a lock. Nothing is returned otherwise: a thread that does anything else may release
    the lock, and an event alone may be set by code that is not Python's.
    """
    threads = parse_stacks(rank.stacks) if rank.waits_for_own_lock else []
    waits = {thread.ident: _wait_of(thread) for thread in threads if thread.frames and not _never_helps(thread)}
    known = [wait for wait in waits.values() if wait is not None]
    if rank.heartbeat.main_thread not in waits or len(known) < len(waits):
        return []
    return [wait.frame for wait in known if wait.is_for_lock]


def _is_harmless(thread: ThreadStack) -> bool:
    if not thread.frames or is_save_that_waits(thread):  # without frames, it runs no Python code
        return True
    return _never_helps(thread) or _began_in(thread).file.endswith(_WITHOUT_COLLECTIVES) or _is_idle(thread)


def _never_helps(thread: ThreadStack) -> bool:
    file = _began_in(thread).file
    return file.endswith(_NEVER_HELPING) or any(package in file for package in _TRACKERS)


def _began_in(thread: ThreadStack) -> StackFrame:
    """Return the outermost frame that is not the standard library's, or the outermost."""
    own = [frame for frame in thread.frames if not frame.is_in_standard_library]
    return own[-1] if own else thread.frames[-1]


def _is_idle(thread: ThreadStack) -> bool:
    """Does it wait for work, in a loop that does nothing else, rather than do it or have a deadline?"""
    loop = next((frame for frame in thread.frames if not frame.file.endswith(_WAITING)), None)
    return loop is not None and any(
        loop.file.endswith(file) and loop.function == function for file, function in _IDLE_LOOPS
    )


def _wait_of(thread: ThreadStack) -> _Wait | None:
    """Return what a thread waits for without a deadline; None if it does something else, or may."""
    innermost = thread.frames[0]
    if innermost.file.endswith(_THREADING):
        return _wait_in_threading(thread)
    if _TAKES_LOCK.search(_text_of(innermost)):
        return _Wait(innermost, is_for_lock=True)
    return _Wait(innermost, is_for_lock=False) if _is_idle(thread) else None


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
