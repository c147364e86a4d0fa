"""`World`: this process's place in the job. A value that is passed around; a world of one is not a special case."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.config.placement import Launcher


@dataclass(frozen=True)
class World:
    """Unpacks as `rank, local_rank, world_size`, the three numbers a hand-written script starts from."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None  # None: no process group, which a world of one does not need
    launcher: Launcher = "none"
    timeout_s: float = field(default=600.0, compare=False)  # of joining, and of every collective
    attempt: int = 0  # how often the launcher has restarted the job

    @property
    def is_main(self) -> bool:
        """Rank 0 alone writes what is shared and alone prints."""
        return self.rank == 0

    @property
    def facts(self) -> dict[str, Any]:
        """For events."""
        return {
            "processes": self.size,
            "device": self.device.type,
            "backend": self.backend,
            "launcher": self.launcher,
        }

    def __iter__(self) -> Iterator[int]:
        return iter((self.rank, self.local_rank, self.size))
