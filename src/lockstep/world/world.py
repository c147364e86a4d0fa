"""`World`: this process's rank, the number of ranks, and the device and backend they use.

A `World` is a value that is passed to whatever needs it; a world of one process is not a special case.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.config.placement import Launcher


@dataclass(frozen=True)
class World:
    """This process's place in the job; unpacks as `rank, local_rank, world_size`.

    `lockstep.launch(main)` passes one to `main`, and `lockstep.setup_distributed()` returns one:

        rank, local_rank, world_size = lockstep.setup_distributed()

    Args:
        rank: this process's number among all processes, from 0.
        local_rank: its number among the processes of its machine.
        size: the number of processes in the job.
        local_size: the number of processes on this machine.
        node: this machine's number, from 0.
        num_nodes: the number of machines.
        device: the device this process computes on.
        backend: the process group's backend. None: there is no process group, and a world of one needs none.
        launcher: what started this process.
        timeout_s: the time limit for joining the job and for every collective.
        attempt: how many times the launcher has restarted the job.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None
    launcher: Launcher = "none"
    timeout_s: float = field(default=600.0, compare=False)
    attempt: int = 0

    @property
    def is_main(self) -> bool:
        """Is this rank 0, the only one that prints and writes shared files?"""
        return self.rank == 0

    @property
    def event_fields(self) -> dict[str, Any]:
        """What the run's `start` event records of the world."""
        return {
            "processes": self.size,
            "machines": self.num_nodes,
            "device": self.device.type,
            "backend": self.backend,
            "launcher": self.launcher,
        }

    def __iter__(self) -> Iterator[int]:
        return iter((self.rank, self.local_rank, self.size))
