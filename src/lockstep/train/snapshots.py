"""Snapshots: a run's newest state in shared memory, so that a killed process loses little. [Note: snapshots]

A snapshot is a checkpoint by its format and by how it is made. It outlives the ranks and their agent, but not the
machine. The ledger knows nothing of it: it carries what the run has consumed since the last commit on the disk, and the
next commit there covers that. So it is of use only as long as that last commit is the newest on the disk.

Rank 0 alone knows when one is due, and asks for it: the request travels with a step, [Note: requests], and all ranks
take it after the same one. What it cost says when the next one is due: the stall of the step, and all the time that its
writing took beside the training, which is the most that it can have taken from it.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint import disk
from lockstep.checkpoint.ledger import line_of
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.memory_folder import MemoryFolder, Unusable, claim, path_in, sweep
from lockstep.checkpoint.memory_room import megabytes, why_no_room
from lockstep.checkpoint.saver import Content, Outcome, Saver
from lockstep.checkpoint.store import Checkpoint, Retention, Store
from lockstep.config import environment
from lockstep.events.run_folder import RunFolder
from lockstep.train.journal import Journal
from lockstep.world.objects import broadcast_object
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_COST = 0.02  # of the time, at most
_FIRST_AFTER_S = 1.0
_LEAST_INTERVAL_S = 0.5  # a restart takes longer than that anyway
_GUESSED_BYTES_PER_S = 1e9  # until one was taken
_NEWEST = Retention(keep=1)


class Cadence:
    """When the next one is due: so late that all so far have cost no more than their part of the time."""

    def __init__(self) -> None:
        self._began_at = time.perf_counter()
        self._interval_s = _FIRST_AFTER_S

    def is_due(self) -> bool:
        return time.perf_counter() >= self._began_at + self._interval_s

    def expect(self, cost_s: float) -> None:
        """What the first one may cost."""
        self._interval_s = max(_FIRST_AFTER_S, cost_s / _COST)

    def count(self, cost_s: float, began_at: float) -> None:
        """What one has cost that began then."""
        self._began_at, self._interval_s = began_at, max(_LEAST_INTERVAL_S, cost_s / _COST)


class Snapshots:
    """Of one attempt. Only where an agent may restart it are new ones made; an earlier attempt's are used anywhere."""

    def __init__(self, journal: Journal, run_folder: RunFolder, world: World, beside: Saver) -> None:
        self._journal = journal
        self._world = world
        self._folder = self._claim(run_folder.path) if world.is_main else None  # rank 0 alone looks after it
        self._is_on = self._folder is not None and environment.may_be_restarted()  # there too
        place = broadcast_object(str(self._folder.path) if self._folder is not None and self._is_on else None)
        self._saver: Saver | None = None  # the same on all ranks
        if place is not None:
            self._saver = Saver(Path(place), world, journal.run_id, journal.events.attempt, beside)
        self._cadence = Cadence()
        self._num_bytes: int | None = None  # of the latest, or what the first will have
        self._is_asked = False
        self._began_at = 0.0  # the latest
        self._stall_s = 0.0

    def find(self, checkpoints: Store) -> Checkpoint | None:
        """On rank 0: the newest intact one that goes on from the newest checkpoint. All others are removed."""
        if self._folder is None:
            return None
        store, found = Store(self._folder.path), None
        try:
            store.tidy()
            on_disk = _newest(checkpoints, self._journal.run_id)
            for step in store.steps():
                if found is None and (on_disk is None or step > on_disk.step):
                    found = self._load(store, step, None if on_disk is None else on_disk.commit)
                if found is None or found.manifest.step != step:
                    disk.remove_folder(store.path(step))
        except OSError as error:
            self._turn_off(0, f"{self._folder.path}: {error.strerror or error}")
        return found

    def ask(self, step: int, guess_bytes: Callable[[], int]) -> bool:
        """On rank 0: is one due, and is there room for it? `guess_bytes`: of the first one."""
        if not self._is_on or self._is_asked or self._saver is None or self._saver.is_busy:
            return False
        if not self._cadence.is_due():
            return False
        if self._num_bytes is None:
            self._num_bytes = guess_bytes()
            self._cadence.expect(self._num_bytes / _GUESSED_BYTES_PER_S)
            return False
        self._is_asked = self._has_room(step, self._num_bytes)
        return self._is_asked

    def skip(self) -> None:
        """What was asked for is not needed: there is a newer checkpoint."""
        self._is_asked = False

    def take(self, content: Content, began_at: float) -> None:
        """Begin to make one, on all ranks; no save may be under way. The step was held up from `began_at` on."""
        self._is_asked = False
        if self._saver is not None:
            self._saver.save(content, _NEWEST)
            self._began_at, self._stall_s = began_at, time.perf_counter() - began_at

    def count_stall(self, seconds: float) -> None:
        """An update had to wait for copies."""
        self._stall_s += seconds

    def look(self) -> None:
        """See whether the one under way is done."""
        if self._saver is not None:
            self._conclude(self._saver.news())

    def wait(self) -> None:
        if self._saver is not None:
            self._conclude(self._saver.wait())

    def remove(self) -> None:
        """The disk has all of it."""
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
        memory, makes = environment.memory_folder(), environment.may_be_restarted()
        if memory is None:
            if makes:
                logger.info("this system has no folder in memory: no snapshots, only checkpoints on the disk")
            return None
        try:
            path = path_in(memory, self._journal.run_id)
            sweep(memory, spare=path)
            if makes or path.exists():
                return claim(path, run_folder)
        except Unusable as problem:
            if makes:
                self._tell_off(0, str(problem))
        return None

    def _load(self, store: Store, step: int, parent: str | None) -> Checkpoint | None:
        try:
            manifest = store.manifest(step)
            if manifest.run_id != self._journal.run_id or line_of(manifest)["parent"] != parent:
                return None
            return store.load(step)
        except CheckpointError as error:
            self._journal.tell_incident(0, f"{error}; this snapshot is not used")
            return None

    def _has_room(self, step: int, num_bytes: int) -> bool:
        assert self._folder is not None
        path = self._folder.path
        try:
            num_new = 1 if Store(path).steps() else 2  # the one before stays until the new one is whole
            problem = why_no_room(path, num_new * num_bytes)
        except OSError as error:
            self._turn_off(step, f"{path}: {error.strerror or error}")
            return False
        if problem is not None:
            self._turn_off(step, f"{problem} for {num_new} of {megabytes(num_bytes)}")
        return problem is None

    def _conclude(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        self._cadence.count(self._stall_s + outcome.write_s, self._began_at)
        if outcome.problem is not None:
            self._turn_off(outcome.step, f"{outcome.problem} ({megabytes(self._num_bytes or 0)} were to be written)")
            return
        self._num_bytes = outcome.num_bytes
        if self._world.is_main:
            self._journal.rank_log.emit(
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
            self._tell_off(step, reason)

    def _tell_off(self, step: int, reason: str) -> None:
        self._journal.tell_incident(
            step, f"no snapshots in memory, a killed process goes back to the last checkpoint on the disk: {reason}"
        )


def _newest(checkpoints: Store, run_id: str) -> Manifest | None:
    """Of those whose manifest can be read: a damaged one is still what its snapshot goes on from."""
    for step in checkpoints.steps():
        with suppress(CheckpointError):
            manifest = checkpoints.manifest(step)
            if manifest.run_id == run_id:
                return manifest
    return None
