"""Numbers that all ranks add to without waiting for each other: what work is shared out with, piece by piece."""

from itertools import count

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed re-exports these untyped
from torch.distributed.distributed_c10d import _get_default_store

from lockstep.world.objects import broadcast_object
from lockstep.world.world import World

_numbers = count()  # of sets of counters; rank 0's counts, since others may have made some that it has not


class SharedCounters:
    """By name, each from 0. All ranks of the world make one together."""

    def __init__(self, world: World) -> None:
        number = broadcast_object(next(_numbers))
        self._here: dict[str, int] = {}
        self._store: Store | None = None
        if world.size > 1 and dist.is_initialized():
            self._store = PrefixStore(f"counters/{number}", _get_default_store())

    def add(self, name: str, amount: int = 1) -> int:
        """The sum after that, over all ranks; `amount=0` reads it."""
        if self._store is not None:
            return int(self._store.add(name, amount))
        self._here[name] = self._here.get(name, 0) + amount
        return self._here[name]

    def forget(self, name: str) -> None:
        """One rank does it for all, when none will ask for it again."""
        if self._store is not None:
            self._store.delete_key(name)
        self._here.pop(name, None)
