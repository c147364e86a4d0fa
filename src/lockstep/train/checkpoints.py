"""A run's checkpoints: saving it as it stands, and finding what an earlier attempt has left."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lockstep.checkpoint.contents import changed_by_updates_alone
from lockstep.checkpoint.ledger import write_line
from lockstep.checkpoint.manifest import CheckpointError, Manifest
from lockstep.checkpoint.saver import Content, Outcome, Saver
from lockstep.checkpoint.store import Retention
from lockstep.config.duration import Duration, RunLength
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder
from lockstep.train.consumption import Consumption
from lockstep.train.journal import Journal
from lockstep.world.objects import broadcast_object, broadcast_value
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_LONG_WAIT_S = 1.0  # for the save before; worth a word


@dataclass(frozen=True)
class Saving:
    """When to save, and what stays: the newest `keep`, those of every `keep_every`-th step, and the best."""

    every: Duration | str | int | None = None  # None: at the end only
    keep: int = 3
    keep_every: int | None = None

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


class Checkpoints:
    """Of an open journal's run, in its folder."""

    def __init__(self, journal: Journal, folder: RunFolder, world: World, parent: str | None = None) -> None:
        self._journal = journal
        self._folder = folder
        self._world = world
        self._saver = Saver(folder.checkpoints, world, journal.run_id, journal.events.attempt)
        self.parent = parent  # the commit that the run has grown from
        self._ending: Callable[[Outcome], None] | None = None  # what the save under way still asks for
        self._is_good = True  # the latest save; ranks come to know it at different times

    def find(self) -> Found | None:
        """The newest intact checkpoint, the same on every rank; what is damaged is named and passed over."""
        found, problem = None, None
        if self._world.is_main:
            try:
                self._saver.store.tidy()
                found = self._saver.store.newest_intact(self._journal.run_id, self._tell_damage)
                if found is not None:
                    write_line(self._folder.ledger, found.manifest, self._saver.store)  # a kill may have come before it
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
            }
        )
        if content is None:
            return None
        self.parent = content["facts"]["commit"]
        return Found(**content)

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
        ledger = {
            "parent": self.parent,
            "attempt": self._journal.events.attempt,
            "processes": self._world.size,
            "spans": consumption.begin_commit(),
        }
        mark = self._journal.events_mark()
        history = None if mark is None else mark._asdict()
        saved_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        everything = {**facts, "saved_at": saved_at, "events": history, "ledger": ledger}
        content = Content(step, parts, everything, is_best, late=changed_by_updates_alone(parts))
        try:
            self._saver.save(content, retention, self._after_commit)
        except TypeError as error:
            raise UserError(f"step {step} cannot be saved: {error}") from None
        stall_s = time.perf_counter() - started - waited_s
        self._ending = partial(self._end, consumption, is_best, stall_s)

    def wait_for_copies(self) -> None:
        """Before an update; see [Note: late copies]."""
        self._saver.wait_for_copies()

    def look(self) -> None:
        """Say how the save under way went, if it is over."""
        self._conclude(self._saver.news())

    def wait(self) -> bool:
        """The same, after waiting for it; was the latest save made? All ranks answer alike."""
        self._conclude(self._saver.wait())
        return self._is_good

    def close(self, *, abandon: bool) -> None:
        if not abandon:
            self.wait()
        self._saver.close(abandon=abandon)

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
