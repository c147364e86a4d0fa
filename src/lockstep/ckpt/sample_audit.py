"""`lockstep ckpt audit`: was every sample of every finished epoch used exactly once?

It reads the ledger, the checkpoints' manifests and the event history, and cross-checks them: the commits must lead back
to the start of the run; their batches must follow each other and add up to what the checkpoints say; the positions that
they list must be those of the batches, each once; and the event history must begin as each checkpoint recorded it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.ledger import Faults, Lineage, read_lineage
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.ckpt.sample_coverage import LoaderCoverage, ShowProgress, loader_coverage
from lockstep.config.plurals import count_noun
from lockstep.config.regular_files import open_to_read
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder

_CHUNK_BYTES = 2**20
_MAX_LISTED = 8


@dataclass(frozen=True)
class SampleAudit:
    """The result of auditing a run."""

    turns: tuple[LoaderCoverage, ...]  # of the run's loaders, in the order of their use
    num_commits: int
    num_undone: int  # commits of attempts that were undone, so the weights do not reflect their samples
    processes: tuple[int, ...]  # the number of processes of each attempt that was not undone
    notes: tuple[str, ...]  # what could not be checked
    faults: tuple[str, ...]

    def __str__(self) -> str:
        turns = "; then ".join(map(str, self.turns)) or "nothing was consumed yet"
        commits, attempts = count_noun(self.num_commits, "commit"), count_noun(len(self.processes), "attempt")
        undone = f" ({self.num_undone:,} more were undone)" if self.num_undone else ""
        return f"{turns}; {commits} over {attempts} on {_listed(self.processes)}{undone}"

    def as_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
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


def audit_samples(run_folder: Path, show_progress: ShowProgress = lambda _text: None) -> SampleAudit:
    """Check everything that a run recorded about its samples.

    Args:
        run_folder: the run.
        show_progress: called with a line of text now and then.
    """
    folder = RunFolder(run_folder)
    if not folder.run_json.exists() and not folder.ledger.exists():
        raise UserError(f"{run_folder} is not a run folder: it has neither run.json nor ledger.jsonl")
    notes: list[str] = []
    faults = Faults()
    manifests = _manifests(folder, notes)
    lineage = read_lineage(folder.ledger, manifests, faults)
    if not lineage.path and not faults.lines:
        raise UserError(f"{run_folder} has nothing to audit: it has not committed a checkpoint yet")
    turns = loader_coverage(lineage.path, faults, show_progress)
    _check_positions(lineage, manifests, faults)
    _check_history(folder.events, manifests, faults)
    attempts = {commit.attempt: commit.processes for commit in lineage.path}
    more = [f"{faults.num_more:,} more faults are not listed"] if faults.num_more else []
    return SampleAudit(
        turns=tuple(turns),
        num_commits=len(lineage.path),
        num_undone=lineage.num_undone,
        processes=tuple(attempts.values()),
        notes=tuple(notes),
        faults=(*faults.lines, *more),
    )


def _manifests(folder: RunFolder, notes: list[str]) -> list[Manifest]:
    """Read the manifests of the run's checkpoints. Those that cannot be read become notes."""
    run_id = folder.read_run_json()["run_id"] if folder.run_json.exists() else None
    store, manifests = CheckpointStore(folder.checkpoints), []
    for step in store.steps():
        try:
            manifest = store.manifest(step)
        except CheckpointError as error:
            if store.path(step).exists():  # otherwise the run, which is still training, has just pruned it
                notes.append(f"skipped: {error}")
            continue
        if run_id in (None, manifest.run_id):
            manifests.append(manifest)
        else:
            notes.append(f"skipped: {store.path(step)}: belongs to another run")
    return manifests


def _check_positions(lineage: Lineage, manifests: Sequence[Manifest], faults: Faults) -> None:
    """Check that the ledger lists as many batches as the checkpoints, which are protected by a hash."""
    positions = {manifest.commit: manifest.facts.get("position") for manifest in manifests}
    consumed = 0
    for commit in lineage.path:
        consumed = commit.spans[-1].batches.stop if commit.spans else consumed
        position = positions.get(commit.name)
        expected = position.get("batches") if isinstance(position, Mapping) else None
        if type(expected) is int and expected != consumed:
            faults.add(f"{commit}: its checkpoint has consumed {expected:,} batches, the ledger lists {consumed:,}")


class _EventsMark(NamedTuple):
    """The size of the event history when a step was saved, and the hash of all of it."""

    size: int
    sha256: str
    step: int


def _check_history(events: Path, manifests: Sequence[Manifest], faults: Faults) -> None:
    """Check that the event history begins as it was when each checkpoint was saved; report the first difference."""
    marks: list[_EventsMark] = []
    for manifest in manifests:
        mark = manifest.facts.get("events")
        size, sha256 = (mark.get("size"), mark.get("sha256")) if isinstance(mark, Mapping) else (None, None)
        if type(size) is int and size >= 0 and isinstance(sha256, str):
            marks.append(_EventsMark(size, sha256, manifest.step))
    if not marks:
        return
    if not events.exists():
        faults.add(f"{events.name} is missing: it existed when step {marks[0].step:,} was saved")
        return
    marks.sort()
    hashed = hashlib.sha256()
    with open_to_read(events) as file:
        for before, mark in pairwise([_EventsMark(0, "", 0), *marks]):
            num_missing = _hash_next(file, mark.size - before.size, hashed)
            if num_missing:
                faults.add(f"{events.name} is {num_missing:,} bytes shorter than when step {mark.step:,} was saved")
                return
            if hashed.hexdigest() != mark.sha256:
                faults.add(
                    f"{events.name} was altered between bytes {before.size:,} and {mark.size:,}, "
                    f"after step {mark.step:,} was saved"
                )
                return


def _hash_next(file: BinaryIO, num_bytes: int, hashed: "hashlib._Hash") -> int:
    """Hash the next bytes of a file; return how many of them are missing at its end."""
    while num_bytes:
        chunk = file.read(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            return num_bytes
        hashed.update(chunk)
        num_bytes -= len(chunk)
    return 0


def _listed(processes: Sequence[int]) -> str:
    """Format the processes of each attempt: `4, 1 and 2 processes`; after many attempts only the first few."""
    if len(set(processes)) <= 1:
        return count_noun(processes[0] if processes else 0, "process")
    shown = [str(number) for number in processes[:_MAX_LISTED]]
    if len(processes) > _MAX_LISTED:
        return f"{', '.join(shown)} … processes"
    return f"{', '.join(shown[:-1])} and {shown[-1]} processes"
