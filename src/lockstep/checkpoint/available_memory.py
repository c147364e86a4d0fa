"""How much memory is available, and whether a snapshot still fits into shared memory.

Files in /dev/shm use the same memory as everything else. The kernel must not kill a run that only just fits because of
the run's own snapshots.
"""

import os
import re
from pathlib import Path

_RESERVED_FRACTION = 1 / 8  # of the file system stays free: data workers pass their samples through it
_MAX_FRACTION = 1 / 2  # of the available memory
_MAX_BYTES = 2**16


def why_no_room(folder: Path, num_bytes: int, available: int | None = None) -> str | None:
    """Say why `num_bytes` more should not be written to a folder in shared memory, or return None if they may.

    Args:
        folder: a folder in shared memory.
        num_bytes: what is to be written.
        available: the machine's available memory in bytes; measured if omitted.
    """
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    reserve = int(system.f_blocks * system.f_frsize * _RESERVED_FRACTION)
    if num_bytes + reserve > free:
        return (
            f"{folder} has {format_megabytes(free)} free, of which {format_megabytes(reserve)} must stay free, "
            f"and {format_megabytes(num_bytes)} is needed"
        )
    available = available_memory_bytes() if available is None else available
    if available is not None and num_bytes > available * _MAX_FRACTION:
        return (
            f"{format_megabytes(available)} of memory is available, "
            f"and {format_megabytes(num_bytes)} would be more than half of it"
        )
    return None


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how much memory new processes could use without swapping, or None if it is not known.

    The limits of this process's control groups count too; a batch system sets one for each job.
    """
    found = []
    if (machine_kb := _number(proc / "meminfo", r"^MemAvailable: +(\d+) kB$")) is not None:
        found.append(1024 * machine_kb)
    own = re.search(r"^0::/(.*)$", _text(proc / "self" / "cgroup"), re.MULTILINE)
    names = Path(own[1]).parts if own else ()
    for depth in range(len(names) + 1):  # a group's limit also holds for all groups inside it
        group = cgroups.joinpath(*names[:depth])
        limit, used = _number(group / "memory.max", r"^(\d+)$"), _number(group / "memory.current", r"^(\d+)$")
        if limit is not None and used is not None:
            cached = _number(group / "memory.stat", r"^inactive_file (\d+)$") or 0  # reclaimed on demand
            found.append(max(0, limit - used + cached))
    return min(found, default=None)


def format_megabytes(num_bytes: int) -> str:
    """Format a size in megabytes: `1,234.5 MB`."""
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
