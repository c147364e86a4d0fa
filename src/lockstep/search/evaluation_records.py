"""Finished evaluations on disk, so that a search does not repeat them after it was killed.

Each rank appends to its own file in the run folder, evaluations/R.jsonl, one line per batch. A batch is identified by
its generation, its number and a hash of its designs; a resumed search asks for the same batches.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.errors import UserError
from lockstep.events.jsonl import JsonlWriter, read_jsonl
from lockstep.search.problem import Evaluation
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.world import World

_MAX_LINE_BYTES = 2**28  # a batch may be large, and each failure in it has a reason


class DesignBatch(NamedTuple):
    """Designs that are evaluated together."""

    generation: int
    number: int  # within the generation
    rows: Sequence[int]  # of the population
    designs: Tensor

    @property
    def key(self) -> str:
        content = hashlib.blake2b(self.designs.numpy().tobytes(), digest_size=12).hexdigest()
        return f"{self.generation}/{self.number}/{content}"


class EvaluationRecords:
    """Reads and writes one rank's records; without a folder, nothing is recorded."""

    def __init__(self, folder: Path | None, world: World) -> None:
        self._folder = folder
        self._world = world
        self._lines: JsonlWriter | None = None

    def find(self, first_generation: int) -> dict[str, list[Evaluation]]:
        """Return what earlier attempts finished from a generation on, by batch key; the same on all ranks."""
        own: dict[str, Any] = {}
        if self._folder is not None and self._world.local_rank == 0:  # one rank per machine reads the shared files
            for path in sorted(self._folder.glob("*.jsonl")):
                own |= _read_finished(path, first_generation)
        merged: dict[str, Any] = {}
        for each in all_gather_object(own):
            merged |= each
        return {key: list(map(Evaluation.from_json, evaluations)) for key, evaluations in merged.items()}

    def add(self, batch: DesignBatch, evaluations: Sequence[Evaluation], took_s: float) -> None:
        """Append a finished batch to this rank's file."""
        if self._folder is None:
            return
        if self._lines is None:
            self._lines = JsonlWriter(self._folder / f"{self._world.rank}.jsonl")
        self._lines.emit(
            {
                "generation": batch.generation,
                "key": batch.key,
                "evaluations": [each.as_json() for each in evaluations],
                "attempt": self._world.attempt,
                "took_s": round(took_s, 4),
            }
        )

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _read_finished(path: Path, first_generation: int) -> dict[str, Any]:
    """Read one file; malformed lines are skipped, and their batches evaluated again."""
    found = {}
    for line in read_jsonl(path, _MAX_LINE_BYTES):
        generation, key, evaluations = (line.get(name) for name in ("generation", "key", "evaluations"))
        if isinstance(generation, int) and isinstance(key, str) and isinstance(evaluations, list):
            with suppress(UserError):
                for each in evaluations:
                    Evaluation.from_json(each)
                if generation >= first_generation:
                    found[key] = evaluations
    return found
