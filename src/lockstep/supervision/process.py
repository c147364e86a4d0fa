"""What the kernel knows about a process: whether it runs, sleeps, is stopped or dead, and what it is blocked in.

Read from /proc; where that does not exist, or may not be read, nothing is known.
"""

import os
import platform
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PAGE = 4096
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

# System calls in which a process may be blocked for long, by machine: what to call them, and where the file is.
_ON_FILE = {
    "x86_64": {0: "read", 1: "write", 17: "read", 18: "write", 19: "read", 20: "write", 73: "lock", 72: "lock"}
    | {74: "flush", 75: "flush", 44: "send to", 45: "receive from", 46: "send to", 47: "receive from", 42: "connect"},
    "aarch64": {63: "read", 64: "write", 67: "read", 68: "write", 65: "read", 66: "write", 32: "lock", 25: "lock"}
    | {82: "flush", 83: "flush", 206: "send to", 207: "receive from", 203: "connect"},
}
_OPEN = {"x86_64": 257, "aarch64": 56}


class ProcessState(NamedTuple):
    pid: int
    name: str
    state: str  # the kernel's letter: R runs, S sleeps, D sleeps and hears nothing, T stopped, t traced, Z dead
    cpu_s: float  # used so far
    started: int  # when, in the kernel's ticks
    exit_signal: int  # of a dead one: what it was killed by; 0: it ended by itself, or that may not be known

    @property
    def is_stopped(self) -> bool:
        return self.state == "T"

    @property
    def is_traced(self) -> bool:
        """By a debugger: somebody is looking into it already."""
        return self.state == "t"

    @property
    def is_dead(self) -> bool:
        return self.state in "ZX"


def state_of(pid: int) -> ProcessState | None:
    """None, if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    before, _, after = text.rpartition(")")  # its name, in brackets, may contain anything, also half a letter
    name, fields = before.partition("(")[2], after.split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    ended = int(fields[49]) & 0x7F if len(fields) > 49 else 0
    state = "t" if fields[0] == "T" and _has_tracer(pid) else fields[0]
    return ProcessState(pid, name, state, cpu_s, int(fields[19]), ended if state in "ZX" else 0)


def children_of(pid: int) -> list[int]:
    """In the order in which they were started."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    states = [state for child in found if (state := state_of(child)) is not None]
    return [state.pid for state in sorted(states, key=lambda state: (state.started, state.pid))]


def blocked_in(pid: int) -> str:
    """The file that its main thread is blocked in, in words: `read of /data/a.bin`; empty if it is not so."""
    machine = platform.machine()
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text().split()
        number = int(fields[0])  # "running", if it is
        if number == _OPEN.get(machine):
            return f"open of {_text_at(pid, int(fields[2], 16))}"
        verb = _ON_FILE.get(machine, {}).get(number)
        target = str(Path(f"/proc/{pid}/fd/{int(fields[1], 16)}").readlink()) if verb else ""
    except (OSError, ValueError, IndexError):
        return ""
    if not target:
        return ""
    kind, _, _ = target.partition(":[")
    return f"{verb} of {target}" if target.startswith("/") else f"{verb} of a {kind}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _has_tracer(pid: int) -> bool:
    try:
        return "\nTracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False


def _text_at(pid: int, address: int) -> str:
    """A text in the process's memory, up to the end of its page."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(_PAGE - address % _PAGE).partition(b"\0")[0].decode(errors="replace")
