"""Data parallelism by torch's DistributedDataParallel, with a loss that is normalised over all ranks."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.world.collectives import all_reduce
from lockstep.world.world import World


class Total(NamedTuple):
    """A loss summed over all ranks and the count it stands for: their quotient is the global mean."""

    loss_sum: Tensor
    num_losses: Tensor


class Replicas:
    """One copy of a model per rank. A lane's loss is a sum and a count, so that uneven ranks weigh as they should."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model = model  # the user's own module, for evaluation and saving
        self._world = world
        self.wrapped: nn.Module = DistributedDataParallel(model) if world.size > 1 else model

    def backward(self, loss_sum: Tensor, count: int) -> Total:
        """Leave in `.grad` the gradient of (sum of all ranks' losses) / (sum of all ranks' counts)."""
        parts = torch.stack([loss_sum.detach().double(), loss_sum.new_tensor(count, dtype=torch.float64)])
        total_sum, total_count = all_reduce(parts)
        # DDP divides by the number of ranks what it sums: multiply first, and the sum is what remains.
        scale = self._world.size / total_count.clamp(min=1)
        (loss_sum * scale.to(loss_sum.dtype)).backward()
        return Total(total_sum, total_count)
