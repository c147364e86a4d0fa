"""The Python stacks of a process, asked for from outside.

Python's faulthandler writes them from inside a signal handler: it needs neither the interpreter lock nor the process's
cooperation, so they can be had from one that hangs in a native call as well.
"""

import ctypes
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# A signal that nobody uses otherwise. None: this system has no such signals, and stacks are not asked for.
ASK_FOR_STACKS: int | None = None if sys.platform in ("win32", "darwin") else signal.SIGRTMIN + 7

_MAX_BYTES = 2**20
_PAUSE_S = 0.005
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_RECIPES = _PACKAGE + "recipes" + os.sep  # what a user may have written, and so reads like one's own code
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)  # Python's, and whatever is installed


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """As editors and people read it: `train.py:12`."""
        return f"{self.file}:{self.line}"

    @property
    def is_users(self) -> bool:
        if self.file.startswith("<"):
            return False
        if self.file.startswith(_PACKAGE):
            return self.file.startswith(_RECIPES)
        return not self.file.startswith(_LIBRARIES)

    def is_in(self, *folders: str) -> bool:
        """Of a package, by the end of its path: `torch/distributed/`."""
        return any(f"/{folder}" in self.file for folder in folders)


class ThreadStack(NamedTuple):
    ident: int
    frames: list[Frame]  # the innermost first


def ask_for_stacks(pid: int, path: Path, timeout_s: float = 0.5, *, wake: bool = False) -> str:
    """What the process writes about its threads into `path`; empty, if it does not answer in time.

    `wake`: it is stopped, and may go on; it writes before it does anything else.

    The file is emptied: it is shared with the process's forks, so only one of them may be asked at a time.
    """
    if ASK_FOR_STACKS is None or not _would_hear(pid):
        return ""
    try:
        os.truncate(path, 0)
        if wake:
            _send_to_main_thread(pid, ASK_FOR_STACKS)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, ASK_FOR_STACKS)
        return _awaited(path, time.monotonic() + timeout_s)
    except OSError:  # it has ended meanwhile
        return ""


def _send_to_main_thread(pid: int, number: int) -> None:
    """Of a stopped process any thread may take a signal that was sent to all, while the main one runs on already."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:
        os.kill(pid, number)
    else:
        tgkill(pid, pid, number)


def _would_hear(pid: int) -> bool:
    """Has it a handler? The signal would kill a process that has none: one that was started afresh, say."""
    assert ASK_FOR_STACKS is not None
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")  # a name may end in half a letter
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (ASK_FOR_STACKS - 1) & 1)


def _awaited(path: Path, deadline: float) -> str:
    """The dump has no end mark: it is whole when nothing more comes."""
    size = -1
    while (now_size := path.stat().st_size) == 0 or now_size != size:
        if time.monotonic() > deadline:
            break
        size = now_size
        time.sleep(_PAUSE_S)
    with path.open("rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace")


def parse_stacks(text: str) -> list[ThreadStack]:
    """Of faulthandler's text; lines that are neither a thread nor a frame are passed over."""
    threads: list[ThreadStack] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            threads.append(ThreadStack(int(thread[1], 16), []))
        elif threads and (frame := _FRAME.fullmatch(line)) is not None:
            threads[-1].frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return threads


def frames_of(threads: Sequence[ThreadStack], ident: int) -> list[Frame]:
    """Of the thread with that number; none, if it is not there."""
    return next((thread.frames for thread in threads if thread.ident == ident), [])


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is the user's own."""
    return next((frame for frame in frames if frame.is_users), None)
