"""A script with a loop of its own, from what its ranks have noted of each update: one trace of all ranks.

See `lockstep.supervision.updates`, which notes it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.events.jsonl import read_lines
from lockstep.events.trace import Difference
from lockstep.supervision.updates import BUFFERS, GRADIENT, RATES, ROWS, START, WEIGHTS
from lockstep.supervision.witness import WitnessFiles

# Of an update, in the order in which one follows from another.
UPDATE_PHASES = (START, ROWS, GRADIENT, RATES, WEIGHTS, BUFFERS)
NUM_ROWS = "the number of rows"
THE_ROWS = "the rows"

# Batch norm's statistics are each rank's own, until the next forward pass: there rank 0 speaks for all.
_AGREED = (START, GRADIENT, RATES, WEIGHTS)
_MAX_LINE_BYTES = 256 * 2**20


class Discord(NamedTuple):
    """Ranks that do not agree among themselves."""

    rank: int  # that differs from rank 0
    at: Difference


class Updates(NamedTuple):
    """Of all ranks of a job."""

    trace: Path
    num_made: int  # that all ranks have made
    rows: list[list[list[str]]]  # of each update, of each rank, in order
    layers: list[str]  # of the models, that see a batch as a whole or draw
    discord: Discord | None
    rank_0: WitnessFiles

    def num_rows(self, update: int) -> int:
        return sum(len(rows) for rows in self.rows[update - 1])

    def all_rows(self, update: int) -> "Counter[str]":
        return Counter(row for rows in self.rows[update - 1] for row in rows)


def collect(witnesses: Sequence[WitnessFiles]) -> Updates | None:
    """Put the ranks' notes together into one trace; None where an optimizer has made no step."""
    noted = [list(read_lines(files.updates, _MAX_LINE_BYTES)) for files in witnesses if files.updates.exists()]
    if len(noted) < len(witnesses):
        return None
    count = min(len(lines) for lines in noted)
    if count == 0:
        return None
    by_update = [[lines[update] for lines in noted] for update in range(count)]
    rows = [[list(line["phases"][ROWS]["rows"]) for line in lines] for lines in by_update]
    trace = witnesses[0].folder / "digests.jsonl"
    with trace.open("w") as file:
        for lines, theirs in zip(by_update, rows, strict=True):
            phases = lines[0]["phases"] | {ROWS: _rows_as_one(theirs)}
            file.write(json.dumps({"step": lines[0]["step"], "phases": phases}) + "\n")
    layers = sorted({layer for lines in noted for layer in lines[-1]["layers"]})
    return Updates(trace, count, rows, layers, _first_discord(by_update), witnesses[0])


def _rows_as_one(ranks: Sequence[Sequence[str]]) -> dict[str, str]:
    """In any order: who has which row is for the ranks to decide. Empty where no data was seen."""
    rows = sorted(row for rank in ranks for row in rank)
    if not rows:
        return {}
    return {NUM_ROWS: str(len(rows)), THE_ROWS: hashlib.sha256(" ".join(rows).encode()).hexdigest()[:16]}


def _first_discord(by_update: Sequence[Sequence[dict[str, Any]]]) -> Discord | None:
    for lines in by_update:
        for phase in (phase for phase in _AGREED if phase in lines[0]["phases"]):
            for rank, line in enumerate(lines[1:], 1):
                own, theirs = lines[0]["phases"][phase], line["phases"].get(phase, {})
                names = [name for name in dict.fromkeys([*own, *theirs]) if own.get(name) != theirs.get(name)]
                if names:
                    return Discord(rank, Difference(lines[0]["step"], phase, names[0], len(names)))
    return None
