"""Which device a process computes on, and which backend its job talks over."""

import sys
from collections.abc import Callable

import torch

from lockstep.config.placement import Placement
from lockstep.errors import WorldError


def choose_device(placement: Placement, requested: str | torch.device | None = None) -> torch.device:
    """The script's choice if it made one; else this process's GPU, the Mac's GPU if we are alone, the CPU."""
    if requested is None or requested == "auto":
        if torch.cuda.is_available():
            requested = "cuda"
        elif torch.backends.mps.is_available() and placement.world_size == 1:
            requested = "mps"
        else:
            requested = "cpu"
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise WorldError(f"device={str(requested)[:40]!r}: expected auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise WorldError("device=cuda, but torch sees no CUDA device: use device=cpu or check nvidia-smi")
        index = placement.local_rank % torch.cuda.device_count() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise WorldError(f"device=cuda:{index}, but torch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise WorldError("device=mps, but this torch has no MPS device: use device=cpu")
    return device


def choose_backend(device_type: str, devices_are_shared: bool = False, system: str = sys.platform) -> str:
    """NCCL where CUDA and the platform have it, gloo otherwise.

    NCCL refuses two ranks on one GPU; gloo carries CUDA tensors too, slowly, so a shared GPU works.
    """
    if device_type == "cuda" and system != "win32" and not devices_are_shared:
        return "nccl"
    return "gloo"


def devices_are_shared(placement: Placement, device: torch.device) -> bool:
    return device.type == "cuda" and placement.local_world_size > torch.cuda.device_count()


def warn_if_pointless(placement: Placement, device: torch.device, warn: Callable[[str], None]) -> None:
    """Several processes on one device, or one process under a launcher, run but bring no parallelism: say so."""
    if placement.world_size == 1:
        warn("one process under a launcher: this runs, but brings no parallelism; plain `python` does the same")
    elif devices_are_shared(placement, device):
        warn(
            f"{placement.local_world_size} processes share {torch.cuda.device_count()} CUDA device(s): this runs, but "
            "brings no parallelism; start one process per device (-n auto)"
        )
    elif torch.backends.mps.is_available():
        warn(
            f"{placement.world_size} processes on a machine with one MPS device: this runs"
            f" on {device.type}, but brings no parallelism; start one process"
        )
