"""`parallel: dp`: torch's DataParallel, one process for all GPUs that it sees.

It cuts every batch into a piece for each GPU, so the bits follow their number. With one GPU, or none, it is the same as
`single`.
"""

from typing import NoReturn

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.train.strategies.strategy import Strategy, require_one_process


class DataParallel(Strategy):
    name = "dp"

    def check(self) -> None:
        require_one_process(self.world, "parallel=dp (or use_ddp=false)")
        if self._num_devices() > 1 and self.options.determinism == "lockstep":
            raise UserError(
                f"parallel=dp cuts every lane into pieces for {self._num_devices()} GPUs, so the bits follow their "
                "number: set determinism=fast, or take parallel=single, or a process for each GPU (-n auto)"
            )

        if self._num_devices() > 1 and self.options.activation_checkpointing is not None:
            refuse_recomputation()

    def to_call(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model) if self._num_devices() > 1 else model

    def _num_devices(self) -> int:
        return torch.cuda.device_count() if self.world.device.type == "cuda" else 1


def refuse_recomputation() -> NoReturn:
    """Copies of a module share its dictionary, and with it the original's forward."""
    raise UserError(
        "activation checkpointing does not go with parallel=dp on several GPUs, which copies the model in every step: "
        "start a process for each GPU (-n auto)"
    )
