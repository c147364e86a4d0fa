"""Determinism switches of the GPU, and the fingerprint of everything besides the config that can change bits.

torch's switches are process-wide and their defaults differ between versions, so lockstep sets each one explicitly. On
the CPU there is nothing to set: with a fixed number of threads its kernels are deterministic, and it has no TF32.
"""

import platform
import re
from typing import Any

import torch

from lockstep.config.environment import set_cublas_workspace
from lockstep.errors import UserError
from lockstep.world.world import World


def set_determinism_flags(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """Choose which kernels a CUDA device may use; does nothing on other devices.

    Args:
        device: the device this process computes on.
        tf32: allow TF32, which rounds the factors of fp32 products to 10 bits of mantissa.
        deterministic: use only deterministic kernels; for an operation that has none, torch raises an error, of which
            `raise_for_missing_kernel` makes one for users. If False, cuDNN searches for its fastest kernels instead.
    """
    if device.type != "cuda":
        return
    if deterministic:
        set_cublas_workspace()
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]


def get_determinism_flags(device: torch.device) -> dict[str, Any]:
    """The switches' current values, for the fingerprint; empty on devices that have none."""
    if device.type != "cuda":
        return {}
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": torch.backends.cuda.matmul.fp32_precision,
        "conv_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    }


def raise_for_missing_kernel(error: RuntimeError) -> None:
    """Raise a `UserError` with the remedy, if this is torch's error for an operation without a deterministic kernel.

    torch's own advice is for those who called `use_deterministic_algorithms` themselves.
    """
    found = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if found is not None:
        raise UserError(
            f"{found[1]}, which the model or its loss uses, has no deterministic kernel, so the same run would not "
            'give the same bits twice: use another operation, or give up the same bits with determinism="fast"'
        ) from error


def environment_fingerprint(world: World) -> dict[str, Any]:
    """The software and hardware that can change the bits of a result; saved in every checkpoint."""
    fields: dict[str, Any] = {
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if world.device.type == "cuda":
        fields["gpu"] = torch.cuda.get_device_name(world.device)
        fields["cuda"] = torch.version.cuda
        fields["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return fields | get_determinism_flags(world.device)
