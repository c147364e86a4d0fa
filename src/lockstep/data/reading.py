"""How a loader gets at its samples: by whom, how far ahead, and how they become a batch. Not which."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from lockstep.config.arguments import require_known
from lockstep.data.samples import Collate
from lockstep.data.workers import WorkerInit, Workers
from lockstep.errors import UserError


@dataclass(frozen=True)
class Reading:
    """`workers` processes read `prefetch` global batches ahead; with 0 this process reads."""

    workers: int = 0
    prefetch: int = 2
    collate: Collate | None = None  # torch's default
    worker_init: WorkerInit | None = None  # called with its number, first in each worker

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise UserError(f"prefetch={self.prefetch}: expected 1 or more global batches")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From a loader's keyword arguments; one that there is not is an error that names the nearest."""
        require_known("a loader has no option", given, [each.name for each in fields(cls)])
        return cls(**given)

    @property
    def processes(self) -> Workers:
        return Workers(self.workers, self.worker_init)
