"""How much memory a process has needed so far."""

import sys

import torch


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
