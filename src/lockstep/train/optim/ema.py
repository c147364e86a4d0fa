"""EMA: an exponential moving average of a model's weights, equal on all ranks.

It is computed after each update, from weights that are the same on all ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.engine.compiled_models import named_parameters
from lockstep.engine.torch_internals import interpolate_all_
from lockstep.errors import UserError
from lockstep.world.dtensor import local_tensor


class ExponentialMovingAverage:
    """An average made by `run.ema(model)`. Averaged weights often evaluate better than the weights themselves.

    Buffers are not averaged. Half precisions are averaged in fp32, where a decay close to one still has an effect.

    Args:
        model: whose floating-point parameters are averaged.
        decay: how much of the old average each update keeps.
        warmup: begin with a smaller decay, so that the initial weights fade quickly.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise UserError(f"decay={decay!r}: expected a number of at least 0 and less than 1")
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        # Integer parameters are frozen, and have no average.
        parameters = named_parameters(model, remove_duplicate=False)  # tied ones have several names
        self._by_name = {name: p for name, p in parameters if p.is_floating_point() or p.is_complex()}
        self._parameters = list(dict.fromkeys(self._by_name.values()))
        self._averages = [_copied(parameter) for parameter in self._parameters]

    def follows(self, parameters: set[nn.Parameter]) -> bool:
        """Return whether any of these parameters is averaged here."""
        return not parameters.isdisjoint(self._parameters)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        self.num_updates += 1
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        averages = [local_tensor(average) for average in self._averages]
        weights = [
            weight if weight.dtype == average.dtype else weight.to(average.dtype)
            for weight, average in zip(map(local_tensor, self._parameters), averages, strict=True)
        ]
        interpolate_all_(averages, weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the model has the averaged weights; afterwards it has its own again."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(own)

    def state(self) -> dict[str, Tensor]:
        """Return the averages by the parameters' names, for saving and for the digest."""
        averages = dict(zip(self._parameters, self._averages, strict=True))
        state = {name: averages[parameter] for name, parameter in self._by_name.items()}
        return state | {"num_updates": torch.tensor(self.num_updates)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, in place."""
        averages = dict(zip(self._parameters, self._averages, strict=True))
        for name, parameter in self._by_name.items():
            averages[parameter].copy_(state[name])
        self.num_updates = int(state["num_updates"].item())

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)


def _copied(parameter: Tensor) -> Tensor:
    is_half = parameter.dtype in (torch.float16, torch.bfloat16)
    return parameter.detach().to(torch.float32 if is_half else parameter.dtype, copy=True)
