"""`lockstep ckpt ls` and `lockstep ckpt verify`: list a run's checkpoints, and compare every file with its hash."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.tensor_files import read_tensor_file


class CheckpointEntry(NamedTuple):
    """One line of the list."""

    step: int
    path: Path
    problem: str | None  # with its manifest; if set, nothing else is known
    num_bytes: int = 0
    saved_at: str | None = None
    processes: int | None = None
    metrics: Mapping[str, Any] | None = None
    is_latest: bool = False  # the newest with a readable manifest
    is_best: bool = False


class CheckResult(NamedTuple):
    """The result of comparing a checkpoint's files with their hashes."""

    step: int
    path: Path
    num_files: int
    num_bytes: int
    problems: list[str]  # one line for each damaged file


def checkpoint_entries(store: CheckpointStore) -> Iterator[CheckpointEntry]:
    """Describe each checkpoint of a folder, newest first."""
    best, is_latest = store.newest_readable_best(), True
    for step in store.steps():
        path = store.path(step)
        try:
            manifest = store.manifest(step)
        except CheckpointError as error:
            if path.exists():  # otherwise the run, which is still training, has just pruned it
                yield CheckpointEntry(step, path, str(error))
            continue
        facts = manifest.facts
        ledger, metrics, saved_at = facts.get("ledger"), facts.get("metrics"), facts.get("saved_at")
        processes = ledger.get("processes") if isinstance(ledger, Mapping) else None
        yield CheckpointEntry(
            step=step,
            path=path,
            problem=None,
            num_bytes=_num_bytes(manifest),
            saved_at=saved_at if isinstance(saved_at, str) else None,
            processes=processes if isinstance(processes, int) else None,
            metrics=metrics if isinstance(metrics, Mapping) else None,
            is_latest=is_latest,
            is_best=step == best,
        )
        is_latest = False


def check_files(
    store: CheckpointStore, step: int, show_progress: Callable[[str], None] = lambda _text: None
) -> CheckResult | None:
    """Compare all files of a checkpoint with their hashes.

    Returns None if the checkpoint is no longer there: a run that is still training prunes old ones.

    Args:
        store: the folder of checkpoints.
        step: the step of the checkpoint.
        show_progress: called with a line of text before each file.
    """
    path = store.path(step)
    try:
        manifest = store.manifest(step)
    except CheckpointError as error:
        return CheckResult(step, path, 0, 0, [str(error)]) if path.exists() else None
    problems = []
    for number, (name, stored) in enumerate(manifest.files.items(), 1):
        show_progress(f"{path.name}: {name} ({number} of {len(manifest.files)})")
        try:
            read_tensor_file(path, name, stored)
        except CheckpointError as error:
            problems.append(str(error))
    if not path.exists():
        return None
    return CheckResult(step, path, len(manifest.files), _num_bytes(manifest), problems)


def _num_bytes(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())
