"""A run's checkpoints: saving it as it stands, and finding what an earlier attempt has left."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lockstep.checkpoint.contents import changed_by_updates_alone
from lockstep.checkpoint.ledger import line_of, write_line
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.saver import Content, Outcome, Saver
from lockstep.checkpoint.store import Retention
from lockstep.config.duration import Duration, RunLength
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder
from lockstep.train.consumption import Consumption
from lockstep.train.journal import Journal
from lockstep.train.snapshots import Snapshots
from lockstep.world.objects import broadcast_object, broadcast_value
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_LONG_WAIT_S = 1.0  # for the save before; worth a word


@dataclass(frozen=True)
class Saving:
    """When to save, and what stays: the newest `keep`, those of every `keep_every`-th step, and the best.

    `memory`: where an agent may restart the run, the newest state is also kept in memory.
    """

    every: Duration | str | int | None = None  # None: at the end only
    keep: int = 3
    keep_every: int | None = None
    memory: bool = True

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"keep={self.keep}: expected 1 or more checkpoints")
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(f"keep_every={self.keep_every}: expected 1 or more steps")

    def in_steps(self, length: RunLength) -> int | None:
        if self.every is None:
            return None
        try:
            steps = Duration.parse(self.every).in_steps(length, "save_every")
        except ValueError as error:
            raise UserError(f"save_every: {error}") from None
        if steps < 1:
            raise UserError(f"save_every={self.every}: expected 1 step or more")
        return steps

    @property
    def retention(self) -> Retention:
        return Retention(self.keep, self.keep_every)


class Found(NamedTuple):
    """What an earlier attempt left, on every rank."""

    path: str
    facts: dict[str, Any]
    values: dict[str, Any]
    is_snapshot: bool


class Checkpoints:
    """Of an open journal's run, in its folder."""

    def __init__(self, journal: Journal, folder: RunFolder, world: World, parent: str | None = None) -> None:
        self._journal = journal
        self._folder = folder
        self._world = world
        self._saver = Saver(folder.checkpoints, world, journal.run_id, journal.events.attempt)
        self._snapshots = Snapshots(journal, folder, world, self._saver)
        self.parent = parent  # the commit that the run has grown from
        self._ending: Callable[[Outcome], None] | None = None  # what the save under way still asks for
        self._is_good = True  # the latest save; ranks come to know it at different times

    def find(self) -> Found | None:
        """The newest intact state, the same on every rank: a snapshot, or a checkpoint. What is damaged is named."""
        found, snapshot, problem = None, None, None
        store = self._saver.store
        if self._world.is_main:
            try:
                store.tidy()
                snapshot = self._snapshots.find(store)
                found = snapshot or store.newest_intact(self._journal.run_id, self._tell_damage)
                commit = None if found is None else found.manifest
                if snapshot is not None:
                    parent = line_of(snapshot.manifest)["parent"]
                    commit = None if parent is None else store.find(parent)
                if commit is not None:
                    write_line(self._folder.ledger, commit, store)  # a kill may have come before it
            except (OSError, CheckpointError) as error:
                problem = str(error)
        problem = broadcast_object(problem)
        if problem is not None:
            raise CheckpointError(f"the checkpoints in {self._folder.checkpoints} cannot be used: {problem}")
        content = broadcast_value(
            None
            if found is None
            else {
                "path": str(found.path),
                "facts": {**found.manifest.facts, "commit": found.manifest.commit},
                "values": found.values,
                "is_snapshot": snapshot is not None,
            }
        )
        if content is None:
            return None
        answer = Found(**content)
        self.parent = answer.facts["ledger"]["parent"] if answer.is_snapshot else answer.facts["commit"]
        return answer

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        facts: Mapping[str, Any],
        consumption: Consumption,
        *,
        retention: Retention,
        is_best: bool,
    ) -> None:
        """Begin to save, after the save before has come to its end."""
        started = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - started
        if waited_s > _LONG_WAIT_S and self._world.is_main:
            logger.warning("step %d waited %.1f s for the save before: the disk is slow", step, waited_s)
        mark = self._journal.events_mark()
        history = None if mark is None else mark._asdict()
        content = self._content(step, parts, {**facts, "events": history}, consumption.begin_commit(), is_best)
        with _told_what_cannot_be_saved(step):
            self._saver.save(content, retention, self._after_commit)
        stall_s = time.perf_counter() - started - waited_s
        self._ending = partial(self._end, consumption, is_best, stall_s)

    def ask_for_snapshot(self, step: int, guess_bytes: Callable[[], int]) -> bool:
        """On rank 0: is one due? [Note: snapshots]"""
        return not self._saver.is_busy and self._snapshots.ask(step, guess_bytes)

    def skip_snapshot(self) -> None:
        self._snapshots.skip()

    def snapshot(
        self, step: int, state: Callable[[], Mapping[str, Any]], facts: Mapping[str, Any], consumption: Consumption
    ) -> None:
        """Begin to keep the state in memory, on all ranks."""
        self.wait()
        began_at = time.perf_counter()
        content = self._content(step, state(), facts, consumption.so_far())
        with _told_what_cannot_be_saved(step):
            self._snapshots.take(content, began_at)

    def remove_snapshots(self) -> None:
        self._snapshots.remove()

    def wait_for_copies(self) -> None:
        """Before an update; see [Note: late copies]."""
        started = time.perf_counter()
        self._saver.wait_for_copies()
        self._snapshots.count_stall(time.perf_counter() - started)

    def look(self) -> None:
        """Say how the save under way went, if it is over."""
        self._conclude(self._saver.news())
        self._snapshots.look()

    def wait(self) -> bool:
        """The same, after waiting for it; was the latest save made? All ranks answer alike."""
        self._snapshots.wait()
        self._conclude(self._saver.wait())
        return self._is_good

    def close(self, *, abandon: bool) -> None:
        if not abandon:
            self.wait()
        self._snapshots.close(abandon=abandon)
        self._saver.close(abandon=abandon)

    def _content(
        self,
        step: int,
        parts: Mapping[str, Any],
        facts: Mapping[str, Any],
        spans: list[dict[str, Any]],
        is_best: bool = False,
    ) -> Content:
        ledger = {
            "parent": self.parent,
            "attempt": self._journal.events.attempt,
            "processes": self._world.size,
            "spans": spans,
        }
        saved_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        everything = {**facts, "saved_at": saved_at, "ledger": ledger}
        return Content(step, parts, everything, is_best, late=changed_by_updates_alone(parts))

    def _after_commit(self, manifest: Manifest) -> None:
        write_line(self._folder.ledger, manifest, self._saver.store)

    def _conclude(self, outcome: Outcome | None) -> None:
        if outcome is not None and self._ending is not None:
            self._ending(outcome)
            self._ending = None

    def _end(self, consumption: Consumption, is_best: bool, stall_s: float, outcome: Outcome) -> None:
        self._is_good = outcome.commit is not None
        consumption.end_commit(is_made=self._is_good)
        if outcome.commit is not None:
            self.parent = outcome.commit
            self._journal.events.emit(
                "checkpoint",
                outcome.step,
                path=f"checkpoints/step-{outcome.step}",
                is_best=is_best,
                num_bytes=outcome.num_bytes,
                stall_s=round(stall_s, 4),
                write_s=round(outcome.write_s, 4),
            )
        if outcome.problem is not None:
            what = "was saved, but" if outcome.commit is not None else "could not be saved, and training goes on:"
            self._tell(outcome.step, f"step {outcome.step} {what} {outcome.problem}")

    def _tell_damage(self, problem: str) -> None:
        self._tell(0, f"{problem}; an earlier checkpoint is used, if there is one")

    def _tell(self, step: int, text: str) -> None:
        self._journal.tell_incident(step, text)


@contextmanager
def _told_what_cannot_be_saved(step: int) -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        raise UserError(f"step {step} cannot be saved: {error}") from None
