"""What can change the bits of a result besides the config: the software and the hardware under it."""

import platform
from typing import Any

import torch

from lockstep.world.arithmetic import arithmetic
from lockstep.world.world import World


def fingerprint(world: World) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if world.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(world.device)
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return facts | arithmetic(world.device)
