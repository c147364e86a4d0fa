"""The processes of a job, found through /proc: signal them, and check that they leave nothing behind.

A process belongs to the job if its environment contains a marker, which everything that it starts inherits.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.chaos.chaos_checks import ChaosCheck

_PROC = Path("/proc")
_TCP_LISTEN = "0A"  # a socket's state in /proc/net/tcp
_POLL_S = 0.02
_EXIT_TIMEOUT_S = 30.0  # for the processes of a dead launcher to end: an import may have to finish first
_KILL_TIMEOUT_S = 10.0


class JobProcess(NamedTuple):
    """A process, as /proc shows it."""

    pid: int
    parent: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command[:200]})"


@dataclass(frozen=True)
class MarkedProcesses:
    """All processes with `name=value` in their environment."""

    name: str
    value: str

    @property
    def variables(self) -> dict[str, str]:
        """The variables that mark a process."""
        return {self.name: self.value}

    def find(self) -> list[JobProcess]:
        """Return those that are running or stopped; zombies have no environment any more."""
        return [process for pid in _pids() if (process := self._read(pid)) is not None]

    def is_marked(self, pid: int) -> bool:
        """Does this process exist, and is it one of them?"""
        return self._read(pid) is not None

    def send(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to a process, but only if it is one of them; return whether it was."""
        if not self.is_marked(pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def kill_all(self) -> None:
        """Kill all of them, including any that start in the meantime."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (left := self.find()) and time.monotonic() < deadline:
            for process in left:
                self.send(process.pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def wait_until_gone(self, timeout_s: float) -> list[JobProcess]:
        """Wait until none of them is left; return those that are still there at the timeout."""
        deadline = time.monotonic() + timeout_s
        while (left := self.find()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return left

    def listening_sockets(self) -> set[str]:
        """Return the inodes of the TCP sockets on which they listen now."""
        return {inode for process in self.find() for inode in _sockets_of(process.pid)} & listening_tcp_sockets()

    def _read(self, pid: int) -> JobProcess | None:
        folder = _PROC / str(pid)
        try:
            if f"{self.name}={self.value}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                return None
            # The program's name, in parentheses, may contain anything.
            _, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, ValueError):  # it has ended, or belongs to another user
            return None
        return JobProcess(pid, int(parent), command)


class LeftoverCheck:
    """Checks that a launcher that has ended leaves no processes, listening sockets or shared memory behind."""

    def __init__(self, processes: MarkedProcesses, memory: Path) -> None:
        """`memory`: the folder in which all launchers keep their shared memory."""
        self._processes = processes
        self._memory = memory
        self._sockets: set[str] = set()  # all that were ever seen listening
        self._problems: list[str] = []  # since the last check

    def record_sockets(self) -> None:
        """Remember the sockets that listen now: they must be closed at the end."""
        self._sockets |= self._processes.listening_sockets()

    def expect_processes_to_end(self, how: str, timeout_s: float = _EXIT_TIMEOUT_S) -> None:
        """Wait for the processes of a launcher that ended `how`; note and kill those that do not end."""
        left = self._processes.wait_until_gone(timeout_s)
        self._problems += [f"{timeout_s:g} s after its launcher {how}, {process} was still there" for process in left]
        self._processes.kill_all()

    def expect_no_shared_memory(self) -> None:
        """Look for shared memory left by a launcher that ended by itself."""
        self._problems += [f"shared memory: {path.name}" for path in self._memory.iterdir()]

    def check(self) -> ChaosCheck:
        """Return what was left behind since the last call, including sockets that still listen."""
        left = self._sockets & listening_tcp_sockets()
        sockets = [f"{len(left)} of its sockets still listen"] if left else []
        problems, self._problems = self._problems, []
        return ChaosCheck("no process, port or shared memory is left", (*problems, *sockets))


def listening_tcp_sockets() -> set[str]:
    """Return the inodes of all listening TCP sockets of this machine."""
    rows = (row.split() for row in _tcp_rows())
    return {row[9] for row in rows if len(row) > 9 and row[3] == _TCP_LISTEN}


def _tcp_rows() -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            yield from (_PROC / "net" / name).read_text().splitlines()[1:]


def _pids() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()]


def _sockets_of(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for path in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                target = str(path.readlink())
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]
