"""Which kernels a GPU may choose: torch's process-wide switches, set explicitly, for defaults differ and change.

On the CPU there is nothing to set: with a fixed number of threads its kernels are deterministic, and it has no TF32.
"""

from typing import Any

import torch

from lockstep.config.environment import choose_cublas_workspace


def set_arithmetic(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """`tf32`: factors of fp32 may be rounded to 10 bits. `deterministic`: only kernels that repeat their bits; an
    operation without one raises an error that names it. Otherwise the fastest are searched for."""
    if device.type != "cuda":
        return
    if deterministic:
        choose_cublas_workspace()
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "tf32" if tf32 else "ieee"  # type: ignore[attr-defined]


def arithmetic(device: torch.device) -> dict[str, Any]:
    """The switches as they are, for the fingerprint."""
    if device.type != "cuda":
        return {}
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": torch.backends.cuda.matmul.fp32_precision,
        "conv_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    }
