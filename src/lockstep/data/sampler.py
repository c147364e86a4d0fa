"""A distributed sampler for people who keep torch's DataLoader: torch's, over an order that needs no memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lockstep.data.order import Order
from lockstep.world.collectives import get_rank, get_world_size

_CHUNK = 4096


class DistributedSampler(TorchDistributedSampler[Any]):
    """In place of torch's class of this name, with the same arguments.

    Rank r takes positions r, r + W, r + 2W, … of the epoch's order; unless `drop_last`, the order is filled up from its
    beginning so that all ranks get equally many. So for a fixed batch size × W, the samples of all ranks' k-th batches
    do not depend on W. Without a process group this is a world of one.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            get_world_size() if num_replicas is None else num_replicas,
            get_rank() if rank is None else rank,
            shuffle,
            seed,
            drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        length = len(self.dataset)  # type: ignore[arg-type]
        order = Order(length, self.seed, self.epoch, self.shuffle)
        for start in range(self.rank, self.total_size, _CHUNK * self.num_replicas):
            stop = min(start + _CHUNK * self.num_replicas, self.total_size)
            yield from order.at(np.arange(start, stop, self.num_replicas, dtype=np.int64) % length).tolist()
