"""Who ends with whom, and who looks after the orphans: what Linux offers for that. Elsewhere these do nothing."""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def be_told_of_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Have processes that our descendants leave behind become our children, instead of the whole machine's."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The process ids of this process's children, zombies too."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
