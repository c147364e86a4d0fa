"""The audit of a run: was every sample of every finished epoch used exactly once, whatever happened on the way?

It reads the ledger, the checkpoints' manifests and the event history, and believes none of them alone. Commits must
lead back to the run's beginning; their batches must follow each other and come to what the checkpoints say; the
positions that they list must be those of the batches, each once; the history must begin as every checkpoint found it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.checkpoint.coverage import Tell, Turn, follow
from lockstep.checkpoint.lineage import Faults, Lineage, read_lineage
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.store import Store
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder

_PIECE_BYTES = 2**20
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Audit:
    turns: tuple[Turn, ...]  # the loaders', one after the other
    num_commits: int
    num_undone: int  # commits of attempts that were undone: what they consumed, the run has not seen
    processes: tuple[int, ...]  # of each attempt that the run has grown from
    notes: tuple[str, ...]  # what could not be looked at
    faults: tuple[str, ...]

    def __str__(self) -> str:
        turns = "; then ".join(map(str, self.turns)) or "nothing was consumed yet"
        commits = f"{self.num_commits:,} commit{'' if self.num_commits == 1 else 's'}"
        attempts = f"{len(self.processes)} attempt{'' if len(self.processes) == 1 else 's'}"
        undone = f" ({self.num_undone:,} more were undone)" if self.num_undone else ""
        return f"{turns}; {commits} over {attempts} on {_listed(self.processes)}{undone}"

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.faults,
            "summary": str(self),
            "turns": [
                {
                    **turn._asdict(),
                    "batches": [turn.batches.start, turn.batches.stop],
                    "partial": [[part.epoch + 1, part.start, part.stop] for part in turn.partial],
                }
                for turn in self.turns
            ],
            "num_commits": self.num_commits,
            "num_undone": self.num_undone,
            "processes": self.processes,
            "notes": self.notes,
            "faults": self.faults,
        }


def audit(run_folder: Path, tell: Tell = lambda _progress: None) -> Audit:
    """Look at all that a run has written down; `tell` is called while that takes its time."""
    folder = RunFolder(run_folder)
    if not folder.facts.exists() and not folder.ledger.exists():
        raise UserError(f"{run_folder} is not a run folder: it has neither run.json nor ledger.jsonl")
    notes: list[str] = []
    faults = Faults()
    manifests = _manifests(folder, notes)
    lineage = read_lineage(folder.ledger, manifests, faults)
    if not lineage.path and not faults.lines:
        raise UserError(f"{run_folder} has nothing to audit: no checkpoint was committed yet")
    turns = follow(lineage.path, faults, tell)
    _check_positions(lineage, manifests, faults)
    _check_history(folder.events, manifests, faults)
    attempts = {commit.attempt: commit.processes for commit in lineage.path}
    more = [f"{faults.num_more:,} more faults are not listed"] if faults.num_more else []
    return Audit(
        tuple(turns),
        len(lineage.path),
        lineage.num_undone,
        tuple(attempts.values()),
        tuple(notes),
        (*faults.lines, *more),
    )


def _manifests(folder: RunFolder, notes: list[str]) -> list[Manifest]:
    """Of the run's checkpoints, those that can be read."""
    run_id = folder.read_facts()["run_id"] if folder.facts.exists() else None
    store, manifests = Store(folder.checkpoints), []
    for step in store.steps():
        try:
            manifest = store.manifest(step)
        except CheckpointError as error:
            if store.path(step).exists():  # else the run, which is going on, has just removed it
                notes.append(f"left out: {error}")
            continue
        if run_id in (None, manifest.run_id):
            manifests.append(manifest)
        else:
            notes.append(f"left out: {store.path(step)}: is of another run")
    return manifests


def _check_positions(lineage: Lineage, manifests: Sequence[Manifest], faults: Faults) -> None:
    """Has the ledger come as far as the checkpoints, which have a hash?"""
    positions = {manifest.commit: manifest.facts.get("position") for manifest in manifests}
    consumed = 0
    for commit in lineage.path:
        consumed = commit.spans[-1].batches.stop if commit.spans else consumed
        position = positions.get(commit.name)
        said = position.get("batches") if isinstance(position, Mapping) else None
        if type(said) is int and said != consumed:
            faults.add(f"{commit}: its checkpoint has consumed {said:,} batches, and the ledger lists {consumed:,}")


def _check_history(events: Path, manifests: Sequence[Manifest], faults: Faults) -> None:
    """Does the event history begin as it was when each checkpoint was made? The first that it does not is named."""
    marks: list[tuple[int, str, int]] = []
    for manifest in manifests:
        mark = manifest.facts.get("events")
        size, sha256 = (mark.get("size"), mark.get("sha256")) if isinstance(mark, Mapping) else (None, None)
        if type(size) is int and size >= 0 and isinstance(sha256, str):
            marks.append((size, sha256, manifest.step))
    if not marks:
        return
    if not events.exists():
        faults.add(f"{events.name} is gone: there was one when step {marks[0][2]:,} was saved")
        return
    marks.sort()
    hashed = hashlib.sha256()
    with events.open("rb") as file:
        for (before, _, _), (size, sha256, step) in pairwise([(0, "", 0), *marks]):
            num_missing = _read_on(file, size - before, hashed)
            if num_missing:
                faults.add(f"{events.name} is {num_missing:,} bytes shorter than when step {step:,} was saved")
                return
            if hashed.hexdigest() != sha256:
                faults.add(
                    f"{events.name} was altered between bytes {before:,} and {size:,}, after step {step:,} was saved"
                )
                return


def _read_on(file: BinaryIO, num_bytes: int, hashed: "hashlib._Hash") -> int:
    """Hash so many more bytes; how many of them were not there."""
    while num_bytes:
        piece = file.read(min(num_bytes, _PIECE_BYTES))
        if not piece:
            return num_bytes
        hashed.update(piece)
        num_bytes -= len(piece)
    return 0


def _listed(processes: Sequence[int]) -> str:
    """`4, 1 and 2 processes`; of very many attempts the first few."""
    if len(set(processes)) <= 1:
        number = processes[0] if processes else 0
        return f"{number} process{'' if number == 1 else 'es'}"
    shown = [str(number) for number in processes[:_MOST_SHOWN]]
    if len(processes) > _MOST_SHOWN:
        return f"{', '.join(shown)} … processes"
    return f"{', '.join(shown[:-1])} and {shown[-1]} processes"
