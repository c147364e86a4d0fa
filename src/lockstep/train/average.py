"""An exponential moving average of a model's weights, which often evaluates better than the weights themselves.

It follows the weights after each update, and those are the same on all ranks, so it is too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.world.boxes import held


class MovingAverage:
    """`decay` of the old average stays at each update. `warmup`: at first less, so that early weights fade quickly.

    Buffers are not averaged: they are the model's own. Half precisions are averaged in fp32, where a decay close to one
    still moves something.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise UserError(f"decay={decay!r}: a moving average needs a number from 0 up to, but not, 1")
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        # Whole numbers have no mean; as parameters they are frozen.
        parameters = model.named_parameters(remove_duplicate=False)  # tied ones have several names
        self._by_name = {name: p for name, p in parameters if p.is_floating_point() or p.is_complex()}
        self._parameters = list(dict.fromkeys(self._by_name.values()))
        self._averages = [_copied(parameter) for parameter in self._parameters]

    def follows(self, parameters: set[nn.Parameter]) -> bool:
        """Is any of these averaged here?"""
        return not parameters.isdisjoint(self._parameters)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights as they are now."""
        self.num_updates += 1
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        averages = [held(average) for average in self._averages]
        weights = [
            weight if weight.dtype == average.dtype else weight.to(average.dtype)
            for weight, average in zip(map(held, self._parameters), averages, strict=True)
        ]
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside, and its own again afterwards."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(own)

    def state(self) -> dict[str, Tensor]:
        """The averages by the parameters' names, for saving and for the digest."""
        averages = dict(zip(self._parameters, self._averages, strict=True))
        state = {name: averages[parameter] for name, parameter in self._by_name.items()}
        return state | {"num_updates": torch.tensor(self.num_updates)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
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
