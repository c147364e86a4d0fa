"""The processes of a job, seen from outside through /proc: which are ours, who is whose child, who listens where.

A process is ours if it was started with our mark in its environment, which whatever it starts inherits.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_LISTENING = "0A"  # in /proc/net/tcp


class Process(NamedTuple):
    pid: int
    parent: int
    command: str


@dataclass(frozen=True)
class Marked:
    """All processes that have `NAME=value` in their environment."""

    name: str
    value: str

    @property
    def variables(self) -> dict[str, str]:
        return {self.name: self.value}

    def find(self) -> list[Process]:
        """Those that run or are stopped: the dead that nobody has buried have no environment any more."""
        return [process for pid in _pids() if (process := self._look_at(pid)) is not None]

    def is_one(self, pid: int) -> bool:
        return self._look_at(pid) is not None

    def send(self, pid: int, number: signal.Signals) -> bool:
        """Signal a process if it is one of them; was it?"""
        if not self.is_one(pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def listening(self) -> set[str]:
        """The sockets on which they listen now, by the kernel's number for each."""
        return {inode for process in self.find() for inode in _sockets_of(process.pid)} & open_listeners()

    def _look_at(self, pid: int) -> Process | None:
        folder = _PROC / str(pid)
        try:
            if f"{self.name}={self.value}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                return None
            # The name, in parentheses, may hold anything.
            _, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (OSError, ValueError):  # it has ended, or is somebody else's
            return None
        return Process(pid, int(parent), command)


def open_listeners() -> set[str]:
    """Every TCP socket of this machine that listens."""
    rows = (row.split() for row in _rows())
    return {row[9] for row in rows if len(row) > 9 and row[3] == _LISTENING}


def _rows() -> Iterator[str]:
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
