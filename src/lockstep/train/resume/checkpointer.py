"""Saving a run and resuming it: the one path from `run.save()` to the disk, and from the disk back into the run.

A run folder may hold an earlier attempt's checkpoint, and a script may call `run.steps` several times. So a run resumes
in stages:

    open()        claim the run folder, and read the newest checkpoint, if there is one
    begin_call()  in each call of `run.steps`: skip the call if the checkpoint was saved in a later one
    restore()     in the first call that is not skipped: load the checkpoint into the models, optimizers, loader, …

From then on, and without a checkpoint from the start, the state in memory is the run's newest.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

from lockstep.checkpoint.async_saver import SaveContent, SaveOutcome, Saver
from lockstep.checkpoint.checkpoint_contents import LOADER_PART, parts_changed_only_by_updates
from lockstep.checkpoint.ledger import append_to_ledger, ledger_line
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.config.folder_remedies import IN_SCRIPT
from lockstep.data.lanes import GlobalBatch
from lockstep.data.loader_factory import Loader
from lockstep.errors import Stopped, UserError
from lockstep.events.event_log import json_safe
from lockstep.events.run_folder import RunFolder, RunSettings
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.resume.drift import DriftError, compiling_changed, differences
from lockstep.train.resume.memory_snapshots import MemorySnapshots
from lockstep.train.resume.progress import BatchCursor, ConsumedSamples, Progress
from lockstep.train.resume.resume_checks import check_resumable
from lockstep.train.run_log import RunLog
from lockstep.train.train_state import TrainState
from lockstep.world.object_collectives import all_gather_object, broadcast_object, broadcast_value
from lockstep.world.world import World

Resume = Literal["auto", "accept-drift", "force"]

logger = logging.getLogger("lockstep")

_SLOW_DISK_S = 1.0  # waiting this long for the previous save is worth a warning
_MAX_STEPS_TO_AGREE = 2  # from a rank's request until all ranks act on it


class HasPosition(Protocol):
    """What resuming needs of a loader: it can continue from a saved position in its data."""

    def load_state_dict(self, state: Any, /) -> Any: ...


class FoundCheckpoint(NamedTuple):
    """The newest state that an earlier attempt has saved; the same on every rank."""

    path: str
    facts: dict[str, Any]
    values: dict[str, Any]
    is_snapshot: bool

    @property
    def progress(self) -> Progress:
        return Progress.from_json(self.facts["position"])


class _Storage:
    """Where an open run's checkpoints and snapshots go."""

    def __init__(self, log: RunLog, folder: RunFolder, world: World) -> None:
        self.folder = folder
        self.saver = Saver(folder.checkpoints, world, log.run_id, log.events.attempt)
        self.snapshots = MemorySnapshots(log, folder, world, self.saver)
        self.on_outcome: Callable[[SaveOutcome], None] | None = None  # of the save in progress
        self.is_latest_good = True  # did the latest save succeed? Ranks learn it at different times


class Checkpointer:
    """Saves and restores one run. Without a folder it keeps `progress` and does nothing else."""

    def __init__(self, log: RunLog, world: World, state: TrainState, resume: Resume) -> None:
        self.progress = Progress()
        self._log = log
        self._world = world
        self._state = state
        self._resume = resume
        self._remedies = IN_SCRIPT
        self._storage: _Storage | None = None
        self._found: FoundCheckpoint | None = None  # until it is restored
        self._policy = CheckpointPolicy()
        self._last_saved: Progress | None = None
        self._parent: str | None = None  # the commit that the run continues from
        self._fingerprint: Mapping[str, Any] = {}
        self._consumed = ConsumedSamples()
        self._cursor: BatchCursor | None = None

    # -- resuming

    def open(self, settings: RunSettings, fingerprint: Mapping[str, Any]) -> None:
        """Claim the run folder and read an earlier attempt's checkpoint, if neither has been done yet."""
        if self._log.is_open:
            return
        self._remedies = settings.remedies
        self._log.open(settings, fingerprint)
        if self._log.folder is None:
            return
        self._storage = _Storage(self._log, self._log.folder, self._world)
        # Once a call of `steps` was made in this process, its state counts: the script may have changed it since.
        if self.progress.call == 0:
            self._found = self._find(self._storage)

    @property
    def found_progress(self) -> Progress | None:
        """How far an earlier attempt got, as long as its checkpoint is not restored."""
        return None if self._found is None else self._found.progress

    def begin_call(self, number: int, epochs: int | None, steps: int | None, policy: CheckpointPolicy) -> bool:
        """Begin the `number`-th call of `steps`. Returns False if an earlier attempt finished it."""
        self._policy = policy
        if self._found is not None:
            found = self._found.progress
            if found.call > number:
                return False
            self.progress = found
            if found.call == number:
                self.progress.continue_call(epochs, steps)
                return True
        self.progress.begin_call(number, epochs, steps)
        return True

    def restore(self, loader: HasPosition, fingerprint: Mapping[str, Any], *, is_exact: bool) -> str | None:
        """Load the checkpoint that was found, after checking that the result will not change. Returns its path."""
        self._fingerprint = fingerprint
        found, self._found = self._found, None
        if found is None:
            return None
        self._check_drift(found, is_exact=is_exact)
        values = dict(found.values)
        loader.load_state_dict(values.pop(LOADER_PART))
        self._state.load(values, keep_settings=self._resume == "force")
        if found.is_snapshot:
            self._consumed.restore(found.facts["ledger"]["spans"])
        else:
            self._last_saved = replace(self.progress)
        return found.path

    def follow(self, cursor: BatchCursor) -> None:
        """Save the position of this cursor's loader in checkpoints from now on."""
        self._cursor = cursor

    def consume(self, loader: Loader, batch: GlobalBatch) -> None:
        """Record that a step has used this batch."""
        self.progress.batches += 1
        if self._cursor is not None:
            self._cursor.consume()
        if self._storage is not None:
            self._consumed.add(loader, batch)

    # -- saving

    def save(self, *, is_best: bool = False, metadata: Mapping[str, Any] | None = None) -> None:
        """Begin to save the run as it is between two steps, once the previous save is done."""
        storage = self._storage
        if storage is None:
            return
        step = self.progress.step
        started = time.perf_counter()
        self._wait_for_save(storage)
        waited_s = time.perf_counter() - started
        if waited_s > _SLOW_DISK_S and self._world.is_main:
            logger.warning("step %d waited %.1f s for the previous save: the disk is slow", step, waited_s)
        mark = self._log.events_mark()
        facts = {**json_safe(metadata or {}), "events": None if mark is None else mark._asdict()}
        content = self._content(facts, self._consumed.begin_commit(), is_best=is_best)
        with _naming_what_cannot_be_saved(step):
            storage.saver.save(content, self._policy.retention, partial(self._write_ledger_line, storage))
        self._last_saved = replace(self.progress)
        stall_s = time.perf_counter() - started - waited_s
        storage.on_outcome = partial(self._report_save, is_best, stall_s)

    def request_snapshot(self) -> bool:
        """Return whether this rank requests a snapshot in memory now. Only rank 0 ever does. [Note: snapshots]"""
        storage = self._storage
        return (
            storage is not None
            and self._policy.memory
            and not storage.saver.is_busy
            and storage.snapshots.request_if_due(self.progress.step, self._state.num_bytes)
        )

    def take_snapshot(self) -> None:
        """Begin to copy the run's state into shared memory, unless a checkpoint was saved since it was requested."""
        storage = self._storage
        if storage is None:
            return
        if self._last_saved is not None and self.progress.batches - self._last_saved.batches <= _MAX_STEPS_TO_AGREE:
            storage.snapshots.skip()
            return
        self._wait_for_save(storage)
        began_at = time.perf_counter()
        content = self._content({}, self._consumed.since_last_commit())
        with _naming_what_cannot_be_saved(self.progress.step):
            storage.snapshots.take(content, began_at)

    def wait_for_copies(self) -> None:
        """Wait before an update changes what a save is still copying. [Note: late copies]"""
        if self._storage is not None:
            started = time.perf_counter()
            self._storage.saver.wait_for_copies()
            self._storage.snapshots.count_stall(time.perf_counter() - started)

    def poll(self) -> None:
        """Report a save or a snapshot that has ended meanwhile."""
        if self._storage is not None:
            self._handle_outcome(self._storage, self._storage.saver.poll())
            self._storage.snapshots.poll()

    # -- ending

    def stop(self, limit: int | None = None) -> NoReturn:
        """Save the run as it is now, and end this attempt: on request, or at the limit of `stop_after`."""
        self._ensure_saved("where the run was to stop", {})
        if self._storage is None:
            remedy = "nothing was saved, because the run has no folder"
        elif limit is None:
            remedy = "run the same command again to continue"
        else:
            remedy = f"run the same command without --stop-after {limit} (in a script, run.stop_after) to continue"
        raise Stopped(f"stopped after step {self.progress.step}, as requested: {remedy}")

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Save the run as finished."""
        self.progress.is_done = True
        self._ensure_saved("the run's end", metadata)

    @property
    def is_saved(self) -> bool:
        """Whether nothing would be lost if the run ended now."""
        is_untouched = self._found is not None or self.progress.batches == 0
        return self._storage is None or is_untouched or self._last_saved == self.progress

    def leave(self, metadata: Mapping[str, Any]) -> None:
        """Save the run as it is now, where the script has left it without finishing it."""
        self._ensure_saved("where the script has left the run", metadata)

    def wait_for_save(self) -> None:
        """Let a save in progress finish; not for long, because this process fails and other ranks may not answer."""
        if self._storage is not None:
            self._storage.saver.join()

    def close(self, *, abandon: bool) -> None:
        """Release the run folder. `abandon`: do not wait for a save in progress."""
        if self._storage is None:
            return
        if not abandon:
            self._wait_for_save(self._storage)
        self._storage.snapshots.close(abandon=abandon)
        self._storage.saver.close(abandon=abandon)
        self._storage = None

    def _ensure_saved(self, what: str, metadata: Mapping[str, Any]) -> None:
        """Save the run as it is now, unless it is saved already, and wait until it is on the disk."""
        storage = self._storage
        if storage is None:
            return
        self._wait_for_save(storage)
        if not storage.is_latest_good or self._last_saved != self.progress:
            self.save(metadata=metadata)
            self._wait_for_save(storage)
        if not storage.is_latest_good:
            raise CheckpointError(
                f"step {self.progress.step}, {what}, could not be saved: correct the problem reported above, then run "
                "the same command again"
            )
        storage.snapshots.remove()

    def _find(self, storage: _Storage) -> FoundCheckpoint | None:
        """Return the newest intact state, the same on every rank."""
        found, problem = None, None
        if self._world.is_main:
            try:
                found = self._read_newest(storage)
            except (OSError, CheckpointError) as error:
                problem = str(error)
        problem = broadcast_object(problem)
        if problem is not None:
            raise CheckpointError(f"the checkpoints in {storage.folder.checkpoints} cannot be used: {problem}")
        content = broadcast_value(None if found is None else found._asdict())
        if content is None:
            return None
        found = FoundCheckpoint(**content)
        self._parent = found.facts["ledger"]["parent"] if found.is_snapshot else found.facts["commit"]
        return found

    def _read_newest(self, storage: _Storage) -> FoundCheckpoint | None:
        """On rank 0: read the newest intact snapshot or checkpoint, and report damaged ones."""
        store = storage.saver.store
        store.tidy()
        snapshot = storage.snapshots.find(store)
        found = snapshot or store.newest_intact(self._log.run_id, self._report_damage, check_resumable)
        if found is None:
            return None
        commit: Manifest | None = found.manifest
        if snapshot is not None:
            parent = ledger_line(snapshot.manifest)["parent"]
            commit = None if parent is None else store.find(parent)
        if commit is not None:
            append_to_ledger(storage.folder.ledger, commit, store)  # the process may have been killed before it
        facts = {**found.manifest.facts, "commit": found.manifest.commit}
        return FoundCheckpoint(str(found.path), facts, found.values, is_snapshot=snapshot is not None)

    def _check_drift(self, found: FoundCheckpoint, *, is_exact: bool) -> None:
        notice = compiling_changed(found.facts["fingerprint"], self._fingerprint)
        if notice is not None and self._world.is_main:
            logger.warning("%s %s", found.path, notice)
        own = differences(found.facts["fingerprint"], self._fingerprint)
        changed = list(dict.fromkeys(line for lines in all_gather_object(own) for line in lines))
        if not changed or self._resume != "auto":
            return
        text = f"{found.path} was made under other conditions:\n" + "\n".join(f"  {line}" for line in changed)
        if is_exact:
            raise DriftError(
                f"{text}\ncontinuing would change the result: restore them, or accept it with "
                f"{self._remedies.accept_drift}"
            )
        if self._world.is_main:
            logger.warning("%s", text)

    def _content(self, facts: Mapping[str, Any], spans: list[dict[str, Any]], *, is_best: bool = False) -> SaveContent:
        position = {} if self._cursor is None else self._cursor.position()
        values = {**self._state.values(), LOADER_PART: position}
        ledger = {
            "parent": self._parent,
            "attempt": self._log.events.attempt,
            "processes": self._world.size,
            "spans": spans,
        }
        facts = {
            "position": self.progress.as_json(),
            "fingerprint": self._fingerprint,
            **facts,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "ledger": ledger,
        }
        return SaveContent(self.progress.step, values, facts, is_best, late=parts_changed_only_by_updates(values))

    def _wait_for_save(self, storage: _Storage) -> None:
        storage.snapshots.wait()
        self._handle_outcome(storage, storage.saver.wait())

    def _handle_outcome(self, storage: _Storage, outcome: SaveOutcome | None) -> None:
        if outcome is None or storage.on_outcome is None:
            return
        storage.is_latest_good = outcome.commit is not None
        self._consumed.end_commit(is_committed=storage.is_latest_good)
        on_outcome, storage.on_outcome = storage.on_outcome, None
        on_outcome(outcome)

    def _report_save(self, is_best: bool, stall_s: float, outcome: SaveOutcome) -> None:
        step = outcome.step
        if outcome.commit is not None:
            self._parent = outcome.commit
            self._log.events.emit(
                "checkpoint",
                step,
                path=f"checkpoints/step-{step}",
                is_best=is_best,
                num_bytes=outcome.num_bytes,
                stall_s=round(stall_s, 4),
                write_s=round(outcome.write_s, 4),
            )
        if outcome.problem is not None:
            what = "was saved, but" if outcome.commit is not None else "could not be saved, and training continues:"
            self._log.log_incident(step, f"step {step} {what} {outcome.problem}")

    def _report_damage(self, problem: str) -> None:
        self._log.log_incident(0, f"{problem}; an earlier checkpoint is used, if there is one")

    @staticmethod
    def _write_ledger_line(storage: _Storage, manifest: Manifest) -> None:
        append_to_ledger(storage.folder.ledger, manifest, storage.saver.store)


@contextmanager
def _naming_what_cannot_be_saved(step: int) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"step {step} cannot be saved: {error}") from None
