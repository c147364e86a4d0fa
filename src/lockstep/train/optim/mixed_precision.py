"""Mixed precision: autocast for a lane's forward pass, and for fp16 a loss scale that follows overflows.

The scale is a power of two, so scaling and unscaling round nothing. Whether a step overflowed is read off the gradients
over all lanes of all ranks, so all ranks see the same overflows without communicating.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.train.step_options import PrecisionName

_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_STEPS_TO_GROW = 2000  # without an overflow

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision:
    """Two reusable contexts: `autocast` for forward passes, and `no_autocast` inside it, for backward passes."""

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.autocast: AbstractContextManager[Any] = nullcontext()
        self.no_autocast: AbstractContextManager[Any] = nullcontext()
        if name != "fp32":
            self.autocast = torch.autocast(device.type, _DTYPES[name])
            self.no_autocast = torch.autocast(device.type, enabled=False)


class LossScaler:
    """The factor that an fp16 run's losses are multiplied by, so that small gradients do not vanish.

    A lane's loss is a sum, larger than the means that loss scales are made for. So it is also divided by the samples of
    a step, rounded up to a power of two.
    """

    def __init__(self, global_batch: int, device: torch.device) -> None:
        self._shrink = 2.0 ** -math.ceil(math.log2(global_batch))
        self._device = device
        self._scale = _FIRST_SCALE
        self._good_steps = 0
        self._factor = self._new_factor()

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def factor(self) -> Tensor:
        """What the lanes' loss sums are multiplied by, and their gradients divided by."""
        return self._factor

    @property
    def factor_value(self) -> float:
        """The factor as a Python number."""
        return self._scale * self._shrink

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can still shrink. If not, it is not what makes the gradients infinite."""
        return self._scale > 1.0

    def grow(self) -> None:
        """Count a step that did not overflow; after many of them, the scale doubles."""
        self._good_steps += 1
        if self._good_steps >= _STEPS_TO_GROW and self._scale < _LARGEST_SCALE:
            self._set(self._scale * 2)

    def shrink(self) -> None:
        """Halve the scale, after a step that overflowed."""
        self._set(self._scale / 2)

    def state(self) -> dict[str, Tensor]:
        return {"scale": torch.tensor(self._scale), "good_steps": torch.tensor(self._good_steps)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._set(state["scale"].item())
        self._good_steps = int(state["good_steps"].item())

    def _set(self, scale: float) -> None:
        self._scale = scale
        self._good_steps = 0
        self._factor = self._new_factor()

    def _new_factor(self) -> Tensor:
        return torch.tensor(self.factor_value, dtype=torch.float32, device=self._device)
