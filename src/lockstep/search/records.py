"""Evaluations that were finished, on the disk as soon as they are: a killed search does not make them again.

Each rank appends to a file of its own in the run folder, evaluations/R.jsonl, a line for each piece of work. A piece is
named by its generation and number, and by the designs in it: whoever goes on asks for the same pieces.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.events.jsonl import JsonLines, read_lines
from lockstep.search.problem import Evaluation
from lockstep.world.objects import all_gather_object
from lockstep.world.world import World

_MAX_LINE_BYTES = 2**28  # a batch may be large, and each failure in it has a reason


class Piece(NamedTuple):
    """Designs that are evaluated together."""

    generation: int
    number: int  # in the generation
    rows: Sequence[int]  # of the population
    designs: Tensor

    @property
    def key(self) -> str:
        content = hashlib.blake2b(self.designs.numpy().tobytes(), digest_size=12).hexdigest()
        return f"{self.generation}/{self.number}/{content}"


class Records:
    """Of one rank; without a folder there are none."""

    def __init__(self, folder: Path | None, world: World) -> None:
        self._folder = folder
        self._world = world
        self._lines: JsonLines | None = None

    def find(self, first_generation: int) -> dict[str, list[Evaluation]]:
        """What earlier attempts have finished from a generation on, the same on all ranks."""
        own: dict[str, Any] = {}
        if self._folder is not None and self._world.local_rank == 0:  # others on this machine see the same files
            for path in sorted(self._folder.glob("*.jsonl")):
                own |= _finished(path, first_generation)
        together: dict[str, Any] = {}
        for each in all_gather_object(own):
            together |= each
        return {key: list(map(Evaluation.from_json, evaluations)) for key, evaluations in together.items()}

    def add(self, piece: Piece, evaluations: Sequence[Evaluation], took_s: float) -> None:
        if self._folder is None:
            return
        if self._lines is None:
            self._lines = JsonLines(self._folder / f"{self._world.rank}.jsonl")
        self._lines.emit(
            {
                "generation": piece.generation,
                "key": piece.key,
                "evaluations": [each.as_json() for each in evaluations],
                "attempt": self._world.attempt,
                "took_s": round(took_s, 4),
            }
        )

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _finished(path: Path, first_generation: int) -> dict[str, Any]:
    """Lines that are not as `add` writes them are passed over: their pieces are made again."""
    found = {}
    for line in read_lines(path, _MAX_LINE_BYTES):
        generation, key, evaluations = (line.get(name) for name in ("generation", "key", "evaluations"))
        if isinstance(generation, int) and isinstance(key, str) and isinstance(evaluations, list):
            with suppress(ValueError):
                for each in evaluations:
                    Evaluation.from_json(each)
                if generation >= first_generation:
                    found[key] = evaluations
    return found
