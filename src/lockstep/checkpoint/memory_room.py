"""How much room there is in memory: in the file system that lies there, and for all processes together.

What is written to such a file system takes from the same memory as everything else: a run that just fits must not be
killed by the kernel for its own snapshots.
"""

import os
import re
from pathlib import Path

_RESERVE = 1 / 8  # of the file system stays free: data workers hand their samples over there
_MOST = 1 / 2  # of the memory that is available
_MAX_BYTES = 2**16


def why_no_room(folder: Path, num_bytes: int, available: int | None = None) -> str | None:
    """Why so much more should not be written there, with the sizes; None if it may. `available`: on this machine."""
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    reserve = int(system.f_blocks * system.f_frsize * _RESERVE)
    if num_bytes + reserve > free:
        return (
            f"{folder} has {megabytes(free)} free, of which {megabytes(reserve)} must stay so, "
            f"and {megabytes(num_bytes)} are needed"
        )
    available = available_bytes() if available is None else available
    if available is not None and num_bytes > available * _MOST:
        return f"{megabytes(available)} of memory are available, and {megabytes(num_bytes)} would be more than half"
    return None


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What new processes could take without swapping, on the machine and within our control groups; None: not known."""
    found = []
    if (machine := _number(proc / "meminfo", r"^MemAvailable: +(\d+) kB$")) is not None:
        found.append(1024 * machine)
    own = re.search(r"^0::/(.*)$", _text(proc / "self" / "cgroup"), re.MULTILINE)
    names = Path(own[1]).parts if own else ()
    for depth in range(len(names) + 1):  # a limit holds for all groups below: a batch system sets it on the job's
        group = groups.joinpath(*names[:depth])
        limit, used = _number(group / "memory.max", r"^(\d+)$"), _number(group / "memory.current", r"^(\d+)$")
        if limit is not None and used is not None:
            cached = _number(group / "memory.stat", r"^inactive_file (\d+)$") or 0  # given back on demand
            found.append(max(0, limit - used + cached))
    return min(found, default=None)


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _number(path: Path, pattern: str) -> int | None:
    match = re.search(pattern, _text(path), re.MULTILINE)
    return int(match[1]) if match else None


def _text(path: Path) -> str:
    try:
        with path.open() as file:
            return file.read(_MAX_BYTES)
    except (OSError, UnicodeDecodeError):
        return ""
