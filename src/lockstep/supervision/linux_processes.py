"""Process information from Linux (state, children, OOM kills), and parent-death signals.

Everything is read from /proc and the control groups. On systems without them, or where they are not readable, functions
return None or an empty result, and those that set something do nothing.
"""

import ctypes
import os
import platform
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PAGE = 4096
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

# System calls on an open file in which a process may block for long, by machine.
_FILE_CALLS = {
    "x86_64": {0: "read", 1: "write", 17: "read", 18: "write", 19: "read", 20: "write", 73: "lock", 72: "lock"}
    | {74: "flush", 75: "flush", 44: "send to", 45: "receive from", 46: "send to", 47: "receive from", 42: "connect"},
    "aarch64": {63: "read", 64: "write", 67: "read", 68: "write", 65: "read", 66: "write", 32: "lock", 25: "lock"}
    | {82: "flush", 83: "flush", 206: "send to", 207: "receive from", 203: "connect"},
}
_OPENAT = {"x86_64": 257, "aarch64": 56}
_FUTEX = {"x86_64": 202, "aarch64": 98}

# Operations of futex(2), and their flags.
_FUTEX_WAITS = (0, 9)
_FUTEX_PRIVATE = 128
_FUTEX_FLAGS = _FUTEX_PRIVATE | 256

# Options of prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_MAX_COUNTER_BYTES = 2**16
_MAX_TREE = 256  # processes
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class ProcessState(NamedTuple):
    """One process, as /proc/PID/stat describes it."""

    pid: int
    name: str
    state: str  # the kernel's letter: R running, S sleeping, D uninterruptible, T stopped, t traced, Z zombie
    cpu_s: float  # used so far
    started: int  # in kernel ticks since boot
    exit_signal: int  # of a zombie: the signal that killed it; 0 if it exited by itself or that is not readable

    @property
    def is_stopped(self) -> bool:
        """Is it stopped by SIGSTOP or job control?"""
        return self.state == "T"

    @property
    def is_traced(self) -> bool:
        """Is it stopped by a debugger?"""
        return self.state == "t"

    @property
    def is_dead(self) -> bool:
        """Has it ended, though its parent has not reaped it yet?"""
        return self.state in "ZX"


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    before, _, after = text.rpartition(")")  # the name, in parentheses, may contain anything, even a cut-off character
    name, fields = before.partition("(")[2], after.split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    exit_signal = int(fields[49]) & 0x7F if len(fields) > 49 else 0
    state = "t" if fields[0] == "T" and _has_tracer(pid) else fields[0]
    return ProcessState(pid, name, state, cpu_s, int(fields[19]), exit_signal if state in "ZX" else 0)


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children, in the order they were started."""
    states = [state for child in _child_pids(pid) if (state := process_state(child)) is not None]
    return [state.pid for state in sorted(states, key=lambda state: (state.started, state.pid))]


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants, those included that have ended and were waited for."""
    ticks, tree = 0, [pid]
    for each in tree:  # it grows meanwhile
        with suppress(OSError, ValueError):
            fields = Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
        if len(tree) < _MAX_TREE:
            tree += _child_pids(each)
    return ticks / _TICKS_PER_S


def _child_pids(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def is_only_writer_of_its_pipe(pid: int) -> bool:
    """Is a process's main thread reading a pipe, without a name, that nobody but itself has open for writing?

    If it has not, a read that blocks has a writer elsewhere, even one that cannot be seen from here. False also if
    some process, started since this one, does not let us see what it has open, or if a signal may write to the pipe:
    Python does so, where it is opened without blocking.
    """
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text().split()
        if _FILE_CALLS.get(platform.machine(), {}).get(int(fields[0])) != "read":
            return False
        pipe = str(Path(f"/proc/{pid}/fd/{int(fields[1], 16)}").readlink())
        own = _writing_ends(pid, pipe)
        others = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and each.name != str(pid)]
    except (OSError, ValueError, IndexError):
        return False
    if not pipe.startswith("pipe:") or not own or any(flags & os.O_NONBLOCK for flags in own):
        return False
    return not any(_may_write(other, pipe, since=pid) for other in others)


def _may_write(pid: int, pipe: str, *, since: int) -> bool:
    """Does a process have a pipe open for writing? Yes also if that is unknown and it is younger than `since`."""
    try:
        return bool(_writing_ends(pid, pipe))
    except OSError:
        state, reader = process_state(pid), process_state(since)
        return state is not None and reader is not None and not state.is_dead and state.started >= reader.started


def _writing_ends(pid: int, pipe: str) -> list[int]:
    """Return the flags with which a process has a pipe open for writing, for each descriptor; none if it has ended."""
    ends = []
    with suppress(FileNotFoundError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if str(file.readlink()) == pipe:
                    info = Path(f"/proc/{pid}/fdinfo/{file.name}").read_text()
                    found = re.search(r"^flags:\s*([0-7]+)$", info, re.MULTILINE)
                    ends.append(os.O_RDWR if found is None else int(found[1], 8))
    return [flags for flags in ends if flags & os.O_ACCMODE != os.O_RDONLY]


def waits_for_own_lock(pid: int) -> bool:
    """Does a process's main thread wait without a deadline for a lock that only this process can release?

    False also if another thread of it waits for a lock that is shared with other processes: one of them may release
    that, and the thread then the main thread's.
    """
    main = _futex_wait(pid, pid)
    if main is None or main.has_deadline:
        return False
    try:
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return not any((wait := _futex_wait(pid, thread)) is not None and wait.is_shared for thread in threads)


class _FutexWait(NamedTuple):
    has_deadline: bool
    is_shared: bool


def _futex_wait(pid: int, thread: int) -> _FutexWait | None:
    """Return how a thread waits in futex(2); None if it does not."""
    try:
        number, *arguments = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        if int(number) != _FUTEX.get(platform.machine()):
            return None
        operation, timeout = int(arguments[1], 16) & 0xFFFFFFFF, int(arguments[3], 16)
    except (OSError, ValueError, IndexError):
        return None
    if operation & ~_FUTEX_FLAGS not in _FUTEX_WAITS:
        return None
    return _FutexWait(has_deadline=timeout != 0, is_shared=not operation & _FUTEX_PRIVATE)


def own_children() -> list[int]:
    """Return the process ids of this process's children, zombies included."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def blocked_in(pid: int) -> str:
    """Name the file operation that blocks a process's main thread: `read of /data/a.bin`; empty if none does."""
    machine = platform.machine()
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text().split()
        number = int(fields[0])  # fails on the word "running": the process is not in a system call
        if number == _OPENAT.get(machine):
            return f"open of {_text_at(pid, int(fields[2], 16))}"
        verb = _FILE_CALLS.get(machine, {}).get(number)
        target = str(Path(f"/proc/{pid}/fd/{int(fields[1], 16)}").readlink()) if verb else ""
    except (OSError, ValueError, IndexError):
        return ""
    if not target:
        return ""
    kind, _, _ = target.partition(":[")
    return f"{verb} of {target}" if target.startswith("/") else f"{verb} of a {kind}"


def available_cores() -> int:
    """Return the number of CPU cores that this process may use; not only on Linux."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def signal_name(number: int) -> str:
    """Return a signal's name, `SIGKILL`, or `signal 70` for one that Python does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies, even by SIGKILL."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(1)


def signal_on_parent_death(number: int) -> None:
    """Make the kernel send this process a signal when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children instead of init's."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class OutOfMemoryKills:
    """The kernel's out-of-memory kills since this object was created.

    Counted in this process's control group; where that count cannot be read, on the whole machine.
    """

    def __init__(self, counters: list[Path] | None = None) -> None:
        candidates = _oom_counters() if counters is None else counters
        self._path = next((path for path in candidates if _read_oom_kills(path) is not None), None)
        self._before = self._now()

    def any_since(self) -> bool:
        """Return whether there has been a kill."""
        return self._now() > self._before

    def _now(self) -> int:
        return 0 if self._path is None else _read_oom_kills(self._path) or 0


def _has_tracer(pid: int) -> bool:
    try:
        return "\nTracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False


def _text_at(pid: int, address: int) -> str:
    """Read a string from a process's memory, up to the end of its page."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(_PAGE - address % _PAGE).partition(b"\0")[0].decode(errors="replace")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _oom_counters() -> list[Path]:
    """Return the files that may hold the count, narrowest first: cgroup v2, cgroup v1, the whole machine."""
    found = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in groups:
        if controllers == "":
            found.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
        elif "memory" in controllers.split(","):
            found.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return [*found, Path("/proc/vmstat")]


def _read_oom_kills(path: Path) -> int | None:
    try:
        with path.open() as file:
            match = _OOM_KILLS.search(file.read(_MAX_COUNTER_BYTES))
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None
