"""The loop of a run that does not go by steps of training: numbered rounds, saved and resumed like steps.

What a round changes must be kept: `run.keep(name, thing, in_digest=True)`. A stop request ends the attempt between two
rounds, or inside one where its body looks at `is_asked_to_stop` and calls `stop`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from lockstep.config import environment
from lockstep.config.plain_settings import PlainSettings
from lockstep.errors import UserError
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase
from lockstep.supervision.stop_signals import stops_after_the_step
from lockstep.train.checkpoints import Saving
from lockstep.train.continuity import Continuity
from lockstep.train.journal import Journal
from lockstep.train.loop import Told
from lockstep.train.options import StepOptions
from lockstep.train.parts import Parts
from lockstep.train.progress import Progress
from lockstep.world.fingerprint import fingerprint
from lockstep.world.objects import all_gather_object
from lockstep.world.world import World


class Round:
    """One of them, as the loop's body has it."""

    def __init__(self, number: int, is_asked_to_stop: Callable[[], bool], stop: Callable[[], NoReturn]) -> None:
        self.number = number  # from 1
        self.is_last = False  # if the body says so, though fewer were made than asked for
        self._is_asked_to_stop = is_asked_to_stop
        self._stop = stop

    @property
    def is_asked_to_stop(self) -> bool:
        """This rank, by a signal; others may not have heard of it."""
        return self._is_asked_to_stop()

    def stop(self) -> NoReturn:
        """End the attempt inside the round, which will be made again: nothing that is kept may have changed in it.

        All ranks must call it.
        """
        self._stop()


class _NoData:
    """In the place of a loader, where there is none."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: Any) -> None:
        pass


class RoundLoop:
    def __init__(
        self, world: World, options: StepOptions, parts: Parts, journal: Journal, continuity: Continuity, told: Told
    ) -> None:
        self._world = world
        self._options = options
        self._parts = parts
        self._journal = journal
        self._continuity = continuity
        self._told = told
        self._is_asked = False

    def rounds(
        self,
        count: int,
        save_every: int,
        saving: Saving,
        stop_after: int | None,
        settings: Mapping[str, Any],
        is_over: Callable[[], bool] | None,
    ) -> Iterator[Round]:
        """What is left of so many."""
        if self._parts.models:
            raise UserError("run.rounds(…) needs a run without models: train those in a run without a folder")
        progress = self._start(count, saving, settings, is_over)
        with self._stops_after_the_round(), pulse.counting_rounds():
            while not progress.is_at_its_end(None):
                if stop_after is not None and progress.step >= stop_after:
                    self._continuity.stop()
                pulse.enter(Phase.COMPUTING)
                current = Round(progress.step + 1, lambda: self._is_asked, self._continuity.stop)
                yield current
                progress.step += 1
                pulse.complete_round(progress.step)
                self._continuity.look()
                if self._journal.trace is not None:
                    self._journal.trace.record_state(progress.step, self._parts.state())
                progress.is_done = current.is_last or progress.step >= count
                if progress.step % save_every == 0 and not progress.is_done:  # else `finish` saves, with what it knows
                    with pulse.during(Phase.SAVING):
                        self._continuity.save()
                if not progress.is_done and any(all_gather_object(self._is_asked)):
                    self._continuity.stop()
            progress.is_done = True
        pulse.enter(Phase.SCRIPT)

    def _start(
        self, count: int, saving: Saving, settings: Mapping[str, Any], is_over: Callable[[], bool] | None
    ) -> Progress:
        """Claim the folder and go on where it says."""
        pulse.enter(Phase.RESUMING)
        facts = fingerprint(self._world) | self._options.numerics()
        if self._journal.folder is not None:
            self._parts.check_kept()
        plain = PlainSettings({**self._options.numerics(), **settings})
        self._continuity.open(self._told.settings or plain, facts)
        earlier = self._continuity.found_progress
        self._continuity.begin_call(1, None, count, saving)
        is_exact = self._options.determinism == "lockstep"
        resumed = self._continuity.take_up(_NoData(), facts, is_exact=is_exact)
        progress = self._continuity.progress
        if earlier is not None and earlier.is_done and progress.step < count:
            # Also if it is asked for more rounds now: with as many from the beginning it would have ended there, too.
            was_cut_short = earlier.last_step is not None and earlier.step < earlier.last_step
            progress.is_done = was_cut_short if is_over is None else is_over()
        pulse.complete_round(progress.step)
        if (cause := environment.restarted_after()) is not None:
            self._journal.events.emit("restart", progress.step, cause=cause)
        self._tell_start(count, resumed, progress.is_at_its_end(None), self._told.facts)
        return progress

    def _tell_start(self, count: int, resumed: str | None, is_done: bool, facts: Mapping[str, Any]) -> None:
        self._journal.events.emit(
            "start",
            self._continuity.progress.step,
            **self._world.facts,
            total_rounds=count,
            resumed=resumed,
            is_done=is_done,
            **facts,
        )

    def _stops_after_the_round(self) -> AbstractContextManager[None]:
        if self._journal.folder is None:
            return nullcontext()
        return stops_after_the_step(partial(setattr, self, "_is_asked", True))
