"""Python stacks of another process: requested by a signal, dumped by that process's faulthandler, and parsed here.

The faulthandler runs inside a signal handler. It needs neither the interpreter lock nor the process's cooperation, so
it also works for a process that hangs in a native call.
"""

import ctypes
import functools
import importlib.util
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# A real-time signal that nothing else uses. None: this system has no such signals, so no stacks are requested.
STACKS_SIGNAL: int | None = None if sys.platform in ("win32", "darwin") else signal.SIGRTMIN + 7

_MAX_BYTES = 2**20
_PAUSE_S = 0.005
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_RECIPES = _PACKAGE + "recipes" + os.sep  # counts as user code, like a recipe that a user wrote
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")  # of this environment or any other that it builds on


@functools.cache
def _torch_folder() -> str:
    """Return the folder that torch is imported from, which may be a source tree, without importing it."""
    spec = importlib.util.find_spec("torch")
    return "<none>" if spec is None or spec.origin is None else f"{Path(spec.origin).parent}{os.sep}"


class StackFrame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The form that editors understand: `train.py:12`."""
        return f"{self.file}:{self.line}"

    @property
    def is_users(self) -> bool:
        """Is it user code, not a library's or lockstep's? Lockstep's recipes count as user code."""
        if self.file.startswith("<"):
            return False
        if self.file.startswith(_PACKAGE):
            return self.file.startswith(_RECIPES)
        is_installed = any(folder in self.file for folder in _INSTALLED)
        return not is_installed and not self.is_in_standard_library and not self.file.startswith(_torch_folder())

    @property
    def is_in_standard_library(self) -> bool:
        """Is it Python's own code?"""
        is_installed = any(folder in self.file for folder in _INSTALLED)  # often below the standard library's folder
        return self.file.startswith(("<", *_STANDARD_LIBRARY)) and not is_installed

    def is_in(self, *folders: str) -> bool:
        """Is it library code in one of these folders, given by the end of their paths: `torch/distributed/`?"""
        return not self.is_users and any(f"/{folder}" in self.file for folder in folders)


class ThreadStack(NamedTuple):
    """The stack of one thread."""

    ident: int
    frames: list[StackFrame]  # the innermost first


def request_stacks(pid: int, path: Path, timeout_s: float = 0.5, *, wake: bool = False) -> str:
    """Make a process dump the stacks of its threads into `path`; return them, or "" if it does not in time.

    The file is truncated first. The process shares it with its forks, so request the stacks of only one at a time.

    Args:
        pid: the process.
        path: the file that the process registered with its faulthandler.
        timeout_s: how long to wait.
        wake: the process is stopped: resume it; it dumps its stacks before it does anything else.
    """
    if STACKS_SIGNAL is None or not _has_handler(pid):
        return ""
    try:
        os.truncate(path, 0)
        if wake:
            _send_to_main_thread(pid, STACKS_SIGNAL)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, STACKS_SIGNAL)
        return _wait_for_dump(path, time.monotonic() + timeout_s)
    except OSError:  # it has ended in the meantime
        return ""


def _send_to_main_thread(pid: int, number: int) -> None:
    """Signal the main thread: in a stopped process any thread may take the signal, while the main one already runs."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:
        os.kill(pid, number)
    else:
        tgkill(pid, pid, number)


def _has_handler(pid: int) -> bool:
    """Does it handle the signal? If not, for example after an exec, the signal would kill it."""
    assert STACKS_SIGNAL is not None
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")  # its name may end in a cut-off character
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def _wait_for_dump(path: Path, deadline: float) -> str:
    """Read the dump once the file stops growing: it has no end mark."""
    size = -1
    while (now_size := path.stat().st_size) == 0 or now_size != size:
        if time.monotonic() > deadline:
            break
        size = now_size
        time.sleep(_PAUSE_S)
    with path.open("rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace")


def parse_stacks(text: str) -> list[ThreadStack]:
    """Parse faulthandler's text; skip lines that are neither a thread nor a frame."""
    threads: list[ThreadStack] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            threads.append(ThreadStack(int(thread[1], 16), []))
        elif threads and (frame := _FRAME.fullmatch(line)) is not None:
            threads[-1].frames.append(StackFrame(frame[1], int(frame[2]), frame[3]))
    return threads


def frames_of(threads: Sequence[ThreadStack], ident: int) -> list[StackFrame]:
    """Return the frames of the thread with this ident; an empty list if there is none."""
    return next((thread.frames for thread in threads if thread.ident == ident), [])


def user_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Return the innermost frame of user code, if there is one."""
    return next((frame for frame in frames if frame.is_users), None)
