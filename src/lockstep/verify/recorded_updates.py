"""The updates of a script with its own loop: all ranks' records combined into one trace.

`lockstep.supervision.step_recorder` records them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.events.jsonl import read_jsonl
from lockstep.events.step_trace import TraceDifference
from lockstep.supervision.batch_rows import RecordedRow
from lockstep.supervision.io_recorder import OutputRecord
from lockstep.supervision.step_recorder import BUFFERS, GRADIENT, RATES, ROWS, START, WEIGHTS

# The phases of an update; each follows from those before it.
UPDATE_PHASES = (START, ROWS, GRADIENT, RATES, WEIGHTS, BUFFERS)
NUM_ROWS = "the number of rows"
THE_ROWS = "the rows"

# Buffers are omitted: batch norm's statistics differ between ranks until the next forward pass.
_EQUAL_ON_ALL_RANKS = (START, GRADIENT, RATES, WEIGHTS)
_MAX_LINE_BYTES = 256 * 2**20


class RankDisagreement(NamedTuple):
    """The first difference between the ranks of one job."""

    rank: int  # the one that differs from rank 0
    at: TraceDifference


class RecordedUpdates(NamedTuple):
    """The updates of a job, over all its ranks."""

    trace: Path
    updates_by_rank: list[int]
    rows: list[list[list[RecordedRow]]]  # by update and rank
    layers: list[str]  # those that mix the samples of a batch, or draw random numbers
    disagreement: RankDisagreement | None
    has_low_precision: bool  # bf16, fp16 or TF32
    repeated_epoch: Sequence[int] | None  # two updates that begin the same epoch of a DistributedSampler that shuffles
    rank_0: OutputRecord

    @property
    def num_updates(self) -> int:
        """Return how many updates all ranks have made."""
        return len(self.rows)

    def num_rows(self, update: int) -> int:
        """Return how many rows all ranks were given for an update; updates count from 1."""
        return sum(len(rows) for rows in self.rows[update - 1])

    def rows_of(self, update: int) -> list[RecordedRow]:
        """Return the rows of all ranks."""
        return [row for rows in self.rows[update - 1] for row in rows]

    def all_rows(self, update: int) -> Counter[str]:
        """Return the digests of the rows of all ranks, and how often each was given."""
        return Counter(row.digest for row in self.rows_of(update))

    def is_work_repeated(self, one: "RecordedUpdates", update: int) -> bool:
        """Was each rank given all the rows that one process was given?"""
        every = one.all_rows(update)
        return bool(every) and all(Counter(row.digest for row in rows) == every for rows in self.rows[update - 1])


def collect_updates(records: Sequence[OutputRecord]) -> RecordedUpdates | None:
    """Combine the ranks' records into one trace; None if no optimizer made a step on any rank."""
    recorded = [list(read_jsonl(files.updates, _MAX_LINE_BYTES)) if files.updates.exists() else [] for files in records]
    if not any(recorded):
        return None
    count = min(len(lines) for lines in recorded)
    by_update = [[lines[update] for lines in recorded] for update in range(count)]
    rows = [[[RecordedRow(*row) for row in line["phases"][ROWS]["rows"]] for line in lines] for lines in by_update]
    trace = records[0].folder / "digests.jsonl"
    with trace.open("w") as file:
        for lines, theirs in zip(by_update, rows, strict=True):
            phases = lines[0]["phases"] | {ROWS: _combine_rows(theirs)}
            file.write(json.dumps({"step": lines[0]["step"], "phases": phases}) + "\n")
    return RecordedUpdates(
        trace,
        updates_by_rank=[len(lines) for lines in recorded],
        rows=rows,
        layers=sorted({layer for lines in recorded if lines for layer in lines[-1]["layers"]}),
        disagreement=_first_disagreement(by_update),
        has_low_precision=any(lines[-1]["has_low_precision"] for lines in recorded if lines),
        repeated_epoch=next((pair for lines in recorded if lines and (pair := lines[-1]["repeated_epoch"])), None),
        rank_0=records[0],
    )


def _combine_rows(ranks: Sequence[Sequence[RecordedRow]]) -> dict[str, str]:
    """Combine the rows of all ranks, whichever rank has which; empty if no data was observed."""
    rows = sorted(row.digest for rank in ranks for row in rank)
    if not rows:
        return {}
    return {NUM_ROWS: str(len(rows)), THE_ROWS: hashlib.sha256(" ".join(rows).encode()).hexdigest()[:16]}


def _first_disagreement(by_update: Sequence[Sequence[dict[str, Any]]]) -> RankDisagreement | None:
    for lines in by_update:
        for phase in (phase for phase in _EQUAL_ON_ALL_RANKS if phase in lines[0]["phases"]):
            for rank, line in enumerate(lines[1:], 1):
                own, theirs = lines[0]["phases"][phase], line["phases"].get(phase, {})
                names = [name for name in dict.fromkeys([*own, *theirs]) if own.get(name) != theirs.get(name)]
                if names:
                    return RankDisagreement(rank, TraceDifference(lines[0]["step"], phase, names[0], len(names)))
    return None
