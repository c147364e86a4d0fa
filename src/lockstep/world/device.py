"""Choose the device a process computes on, and the backend (NCCL or gloo) of its process group."""

import sys
from collections.abc import Callable

import torch

from lockstep.config.placement import Placement
from lockstep.config.plurals import count_noun
from lockstep.errors import WorldError


def choose_device(placement: Placement, requested: str | torch.device | None = None) -> torch.device:
    """The requested device; by default this process's GPU, MPS if this is the only process, or the CPU."""
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
        count = torch.cuda.device_count()
        if index >= count:
            choice = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise WorldError(
                f"device=cuda:{index}, but torch sees {count_noun(count, 'CUDA device')}: "
                f"use {choice}, or omit the number"
            )
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise WorldError("device=mps, but this torch has no MPS device: use device=cpu")
    return device


def choose_backend(device_type: str, devices_are_shared: bool = False, system: str = sys.platform) -> str:
    """NCCL for CUDA where the platform has it, gloo otherwise.

    NCCL refuses two ranks on one GPU. gloo can send CUDA tensors too, slowly, so ranks that share a GPU use it.
    """
    if device_type == "cuda" and system != "win32" and not devices_are_shared:
        return "nccl"
    return "gloo"


def devices_are_shared(placement: Placement, device: torch.device) -> bool:
    """Do several processes of this machine use the same GPU?"""
    return device.type == "cuda" and placement.local_world_size > torch.cuda.device_count()


def warn_if_no_parallelism(placement: Placement, device: torch.device, warn: Callable[[str], None]) -> None:
    """Warn about several processes on one device, and about a single process under a launcher."""
    if placement.world_size == 1:
        warn("one process under a launcher: this works, but brings no parallelism; plain `python` does the same")
    elif devices_are_shared(placement, device):
        warn(
            f"{placement.local_world_size} processes share {count_noun(torch.cuda.device_count(), 'CUDA device')}: "
            "this works, but brings no parallelism; start one process per device (-n auto)"
        )
    elif torch.backends.mps.is_available():
        warn(
            f"{placement.world_size} processes on a machine with one MPS device: this works"
            f" on {device.type}, but brings no parallelism; start one process"
        )
