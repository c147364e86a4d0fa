"""What is in a folder of checkpoints: a list for people and programs, and whether every file is as it was written."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.store import Store, read_file


class Entry(NamedTuple):
    step: int
    path: Path
    problem: str | None  # with its manifest; then nothing else is known
    num_bytes: int = 0
    saved_at: str | None = None
    processes: int | None = None
    metrics: Mapping[str, Any] | None = None
    is_latest: bool = False  # the newest whose manifest can be read
    is_best: bool = False


class Checkup(NamedTuple):
    step: int
    path: Path
    num_files: int
    num_bytes: int
    problems: list[str]  # a line for each thing that is damaged


def entries(store: Store) -> Iterator[Entry]:
    """All of them, the newest first."""
    best, is_latest = store.readable_best(), True
    for step in store.steps():
        path = store.path(step)
        try:
            manifest = store.manifest(step)
        except CheckpointError as error:
            if path.exists():  # else the run, which is going on, has just removed it
                yield Entry(step, path, str(error))
            continue
        facts = manifest.facts
        ledger, metrics, saved_at = facts.get("ledger"), facts.get("metrics"), facts.get("saved_at")
        processes = ledger.get("processes") if isinstance(ledger, Mapping) else None
        yield Entry(
            step,
            path,
            None,
            _num_bytes(manifest),
            saved_at if isinstance(saved_at, str) else None,
            processes if isinstance(processes, int) else None,
            metrics if isinstance(metrics, Mapping) else None,
            is_latest,
            step == best,
        )
        is_latest = False


def examine(store: Store, step: int, tell: Callable[[str], None] = lambda _progress: None) -> Checkup | None:
    """Compare all files of a checkpoint with their hashes; `tell` is called before each.

    None if it is not there any more: a run that is going on removes old ones.
    """
    path = store.path(step)
    try:
        manifest = store.manifest(step)
    except CheckpointError as error:
        return Checkup(step, path, 0, 0, [str(error)]) if path.exists() else None
    problems = []
    for number, (name, stored) in enumerate(manifest.files.items(), 1):
        tell(f"{path.name}: {name} ({number} of {len(manifest.files)})")
        try:
            read_file(path, name, stored)
        except CheckpointError as error:
            problems.append(str(error))
    if not path.exists():
        return None
    return Checkup(step, path, len(manifest.files), _num_bytes(manifest), problems)


def _num_bytes(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())
