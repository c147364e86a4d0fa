"""Memory of this process: its peak use, a limit on it, and recognizing out-of-memory errors."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_USABLE_FRACTION = 0.85  # of the available memory; the rest is left to other processes

_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|bad_alloc|ALLOC_FAILED|"
    "could not (create|execute) a (primitive|memory)",  # oneDNN, if it cannot allocate its scratchpad
    re.IGNORECASE,
)


def peak_memory_bytes(device: torch.device) -> dict[str, int]:
    """This process's peak use of host memory (where the platform reports it) and of its GPU's memory."""
    peaks = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peaks["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peaks["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks


def memory_share(available: int | None, processes: int = 1) -> int | None:
    """How many of the `available` bytes each of `processes` processes may use; None if `available` is None."""
    return None if available is None else int(_USABLE_FRACTION * available) // processes


@contextmanager
def limit_memory(room: int | None) -> Iterator[None]:
    """In the block, let this process allocate at most `room` bytes more than it holds now. Linux only.

    Beyond that it gets a MemoryError (or torch's own error), before the machine starts to swap or to kill processes.
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
    """Does this error mean that memory has run out? Each of torch's allocators words it differently."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )
