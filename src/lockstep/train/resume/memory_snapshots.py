"""Snapshots in shared memory: a run's newest state, so that a killed process loses little work.

[Note: snapshots] A snapshot has the format of a checkpoint and is made in the same way. It outlives the ranks and their
agent, but not the machine. It is not in the ledger: it holds the samples consumed since the last commit on the disk,
and the next commit on the disk covers those. So it can be used only while that last commit is the newest on the disk.

Only rank 0 knows when a snapshot is due, and requests it: the request is sent along with a step, [Note: requests], and
all ranks take the snapshot after the same step. The cost of the last one decides when the next is due: the step's stall
and all the time that it was written in the background, which is the most that it can have taken from training.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint import durable_files
from lockstep.checkpoint.async_saver import SaveContent, SaveOutcome, Saver
from lockstep.checkpoint.available_memory import format_megabytes, why_no_room
from lockstep.checkpoint.checkpoint_store import Checkpoint, CheckpointStore, Retention
from lockstep.checkpoint.ledger import ledger_line
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.memory_folder import (
    MemoryFolder,
    MemoryFolderError,
    claim_memory_folder,
    memory_folder_path,
    sweep_memory_folders,
)
from lockstep.config import environment
from lockstep.events.run_folder import RunFolder
from lockstep.train.resume.resume_checks import check_resumable
from lockstep.train.run_log import RunLog
from lockstep.world.object_collectives import broadcast_object
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_MAX_COST = 0.02  # as a share of training time
_FIRST_AFTER_S = 1.0
_MIN_INTERVAL_S = 0.5  # a restart takes longer
_GUESSED_BYTES_PER_S = 1e9  # until the first is measured
_NEWEST = Retention(keep=1)


class Cadence:
    """Decides when the next snapshot is due, so that snapshots cost at most their share of the time."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()
        self._interval_s = _FIRST_AFTER_S

    def is_due(self) -> bool:
        return time.perf_counter() >= self._began_at + self._interval_s

    def expect(self, cost_s: float) -> None:
        """Estimate what the first snapshot costs."""
        self._interval_s = max(_FIRST_AFTER_S, cost_s / _MAX_COST)

    def count(self, cost_s: float, began_at: float) -> None:
        """Account for a snapshot that began at `began_at`."""
        self._began_at, self._interval_s = began_at, max(_MIN_INTERVAL_S, cost_s / _MAX_COST)


class MemorySnapshots:
    """The snapshots of one attempt. New ones are made only if an agent may restart the run."""

    def __init__(self, log: RunLog, run_folder: RunFolder, world: World, disk_saver: Saver) -> None:
        self._log = log
        self._world = world
        self._folder = self._claim(run_folder.path) if world.is_main else None  # on rank 0 only
        self._is_on = self._folder is not None and environment.may_be_restarted()  # on rank 0 only
        place = broadcast_object(str(self._folder.path) if self._folder is not None and self._is_on else None)
        self._saver: Saver | None = None  # the same on all ranks
        if place is not None:
            self._saver = Saver(Path(place), world, log.run_id, log.events.attempt, disk_saver)
        self._cadence = Cadence()
        self._num_bytes: int | None = None  # of the latest, or estimated for the first
        self._is_requested = False
        self._began_at = 0.0  # the latest snapshot
        self._stall_s = 0.0

    def find(self, checkpoints: CheckpointStore) -> Checkpoint | None:
        """On rank 0: return the newest intact snapshot that continues the newest checkpoint, and remove all others."""
        if self._folder is None:
            return None
        store, found = CheckpointStore(self._folder.path), None
        try:
            store.tidy()
            on_disk = _newest(checkpoints, self._log.run_id)
            for step in store.steps():
                if found is None and (on_disk is None or step > on_disk.step):
                    found = self._load(store, step, None if on_disk is None else on_disk.commit)
                if found is None or found.manifest.step != step:
                    durable_files.remove_folder(store.path(step))
        except OSError as error:
            self._turn_off(0, f"{self._folder.path}: {error.strerror or error}")
        return found

    def request_if_due(self, step: int, guess_bytes: Callable[[], int]) -> bool:
        """On rank 0: request a snapshot if one is due and there is room for it. Returns whether one is requested.

        `guess_bytes` estimates the size of the first.
        """
        if not self._is_on or self._is_requested or self._saver is None or self._saver.is_busy:
            return False
        if not self._cadence.is_due():
            return False
        if self._num_bytes is None:
            self._num_bytes = guess_bytes()
            self._cadence.expect(self._num_bytes / _GUESSED_BYTES_PER_S)
            return False
        self._is_requested = self._has_room(step, self._num_bytes)
        return self._is_requested

    def skip(self) -> None:
        """Drop the request: there is a newer checkpoint."""
        self._is_requested = False

    def take(self, content: SaveContent, began_at: float) -> None:
        """Begin a snapshot, on all ranks; no save may be in progress. The step has been stalled since `began_at`."""
        self._is_requested = False
        if self._saver is not None:
            self._saver.save(content, _NEWEST)
            self._began_at, self._stall_s = began_at, time.perf_counter() - began_at

    def count_stall(self, seconds: float) -> None:
        """Add the time that an update had to wait for copies."""
        self._stall_s += seconds

    def poll(self) -> None:
        """Check whether the snapshot in progress is done."""
        if self._saver is not None:
            self._conclude(self._saver.poll())

    def wait(self) -> None:
        if self._saver is not None:
            self._conclude(self._saver.wait())

    def remove(self) -> None:
        """Remove all snapshots: everything is on the disk."""
        self.wait()
        self._is_on = False
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def close(self, *, abandon: bool) -> None:
        if self._saver is not None:
            self._saver.close(abandon=abandon)
        if self._folder is not None:
            self._folder.release()
            self._folder = None

    def _claim(self, run_folder: Path) -> MemoryFolder | None:
        memory, makes_new = environment.shared_memory_root(), environment.may_be_restarted()
        if memory is None:
            if makes_new:
                logger.info("this system has no shared-memory folder: no snapshots, only checkpoints on the disk")
            return None
        try:
            path = memory_folder_path(memory, self._log.run_id)
            sweep_memory_folders(memory, spare=path)
            if makes_new or path.exists():
                return claim_memory_folder(path, run_folder)
        except MemoryFolderError as problem:
            if makes_new:
                self._report_off(0, str(problem))
        return None

    def _load(self, store: CheckpointStore, step: int, parent: str | None) -> Checkpoint | None:
        try:
            manifest = store.manifest(step)
            if manifest.run_id != self._log.run_id or ledger_line(manifest)["parent"] != parent:
                return None
            found = store.load(step)
            check_resumable(found)
            return found
        except CheckpointError as error:
            self._log.log_incident(0, f"{error}; this snapshot is not used")
            return None

    def _has_room(self, step: int, num_bytes: int) -> bool:
        assert self._folder is not None
        path = self._folder.path
        try:
            num_new = 1 if CheckpointStore(path).steps() else 2  # the previous one stays until the new one is complete
            problem = why_no_room(path, num_new * num_bytes)
        except OSError as error:
            self._turn_off(step, f"{path}: {error.strerror or error}")
            return False
        if problem is not None:
            self._turn_off(step, f"{problem} for {num_new} of {format_megabytes(num_bytes)}")
        return problem is None

    def _conclude(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        self._cadence.count(self._stall_s + outcome.write_s, self._began_at)
        if outcome.problem is not None:
            self._turn_off(outcome.step, f"{outcome.problem} (while writing {format_megabytes(self._num_bytes or 0)})")
            return
        self._num_bytes = outcome.num_bytes
        if self._world.is_main:
            self._log.rank_log.emit(
                "checkpoint",
                outcome.step,
                in_memory=True,
                num_bytes=outcome.num_bytes,
                stall_s=round(self._stall_s, 4),
                write_s=round(outcome.write_s, 4),
            )

    def _turn_off(self, step: int, reason: str) -> None:
        if self._is_on:
            self._is_on = False
            self._report_off(step, reason)

    def _report_off(self, step: int, reason: str) -> None:
        self._log.log_incident(
            step,
            f"no snapshots in memory; after a kill, the run continues from the last checkpoint on the disk: {reason}",
        )


def _newest(checkpoints: CheckpointStore, run_id: str) -> Manifest | None:
    """Return the newest whose manifest can be read: a snapshot may continue a checkpoint that was damaged since."""
    for step in checkpoints.steps():
        with suppress(CheckpointError):
            manifest = checkpoints.manifest(step)
            if manifest.run_id == run_id:
                return manifest
    return None
