"""How much memory a process has needed so far, and how much it may have."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SHARE = 0.85  # of what is available may be tried out: the rest is for whoever else is there

_WORDS = re.compile(
    "out of memory|can't allocate memory|not enough memory|bad_alloc|ALLOC_FAILED|"
    "could not (create|execute) a (primitive|memory)",  # oneDNN, where it gets no scratch pad
    re.IGNORECASE,
)


def peak_memory_bytes(device: torch.device) -> dict[str, int]:
    """The most this process ever held: in main memory where the platform tells, and on its GPU."""
    peaks = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peaks["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peaks["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks


def memory_share(available: int | None, processes: int = 1) -> int | None:
    """What each of so many processes may try to take."""
    return None if available is None else int(_SHARE * available) // processes


@contextmanager
def limited_memory(room: int | None) -> Iterator[None]:
    """Inside, this process gets so many bytes more than it has, and then a MemoryError or torch's own. Linux only.

    So that a machine need neither swap nor kill to say that something does not fit.
    """
    if room is None or sys.platform != "linux":
        yield
        return
    import resource

    held = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = room + (1024 * int(held[1]) if held else 0)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """torch says it in as many ways as it has allocators."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None
    )
