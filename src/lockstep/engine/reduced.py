"""What an update sees of the gradients that have come together: all of them, or this rank's part of each.

Whichever it is, all ranks come to the same norm and the same answer to whether everything is finite.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.channel import Channel
from lockstep.engine.finite import all_finite
from lockstep.engine.norm import BLOCK, block_squares, global_norm, norm_of_blocks
from lockstep.engine.sharding import Sharding


class Reduced(Protocol):
    gradients: list[Tensor]  # that are here

    def norm(self) -> Tensor:
        """Of all of them together, on every rank."""
        ...

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        """Are all gradients, on every rank, and these tensors, which all ranks have?"""
        ...

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        """Which of these have a gradient that is not finite, on any rank."""
        ...


class WholeGradients:
    """Every rank has all of them."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    def norm(self) -> Tensor:
        return global_norm(self.gradients)

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        return all_finite([*others, *self.gradients])

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        return [parameter.grad is not None and not all_finite([parameter.grad]) for parameter in parameters]


class ShardedSums:
    """Every rank has its own stretch of each, and asks the others for the rest of the answer. [Note: zero]"""

    def __init__(self, parameters: Sequence[Parameter], sharding: Sharding, channel: Channel) -> None:
        self._sharding = sharding
        self._channel = channel
        self._used = [p for p in parameters if sharding.shards[p].grad is not None]  # the same on all ranks
        self.gradients = [_gradient(sharding.shards[parameter]) for parameter in self._used]

    def norm(self) -> Tensor:
        """A stretch begins where a block does: so every block is on one rank, and has the bits it would have in the
        whole gradient. The others add zeros to it, which changes nothing."""
        num_blocks = [-(-parameter.numel() // BLOCK) for parameter in self._used]
        squares = torch.zeros(sum(num_blocks), dtype=torch.float64, device=self._channel.carrier)
        first = 0
        for parameter, gradient, number in zip(self._used, self.gradients, num_blocks, strict=True):
            at = first + self._sharding.stretches[parameter].start // BLOCK
            own = block_squares(gradient)
            squares[at : at + len(own)] = own
            first += number
        self._sum(squares)
        return norm_of_blocks(squares.to(self._sharding.device))

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        is_spoilt = not all_finite([*others, *self.gradients])
        return self._sum(torch.tensor([float(is_spoilt)], device=self._channel.carrier)).item() == 0.0

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        spoilt = [
            float(gradient is not None and not all_finite([gradient]))
            for gradient in (self._sharding.shards[parameter].grad for parameter in parameters)
        ]
        return [bool(each) for each in self._sum(torch.tensor(spoilt, device=self._channel.carrier)).tolist()]

    def _sum(self, numbers: Tensor) -> Tensor:
        def share() -> None:
            dist.all_reduce(numbers, group=self._channel.group)

        self._channel.submit(share).result()
        return numbers


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
