"""Numbered rounds instead of training steps, saved and resumed like steps: what a search runs on.

What a round changes must be registered: `run.register_state(name, thing, in_digest=True)`. A stop request ends the
attempt between two rounds, or inside one if its body checks `is_asked_to_stop` and calls `stop`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from lockstep.config import environment
from lockstep.errors import UserError
from lockstep.events.run_folder import ScriptSettings
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.stop_signals import stop_after_step
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.resume.progress import Progress
from lockstep.train.run_context import RunContext
from lockstep.world.determinism import environment_fingerprint
from lockstep.world.object_collectives import all_gather_object


class Round:
    """One round, as `run.rounds(…)` yields it."""

    def __init__(self, number: int, is_asked_to_stop: Callable[[], bool], stop: Callable[[], NoReturn]) -> None:
        self.number = number  # from 1
        self.is_last = False  # set it to True to end the rounds early
        self._is_asked_to_stop = is_asked_to_stop
        self._stop = stop

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this rank has received a stop signal. Other ranks may not have."""
        return self._is_asked_to_stop()

    def stop(self) -> NoReturn:
        """End the attempt inside the round, which is then repeated, so it must not have changed registered state yet.

        All ranks must call it.
        """
        self._stop()


class _NoLoader:
    """Stands in for a loader: rounds read no batches."""

    def load_state_dict(self, _state: Any) -> None:
        pass


class RoundLoop:
    """The loop behind `run.rounds(…)`."""

    def __init__(self, context: RunContext) -> None:
        self._world = context.world
        self._options = context.options
        self._state = context.state
        self._log = context.log
        self._checkpointer = context.checkpointer
        self._is_asked_to_stop = False

    def rounds(
        self,
        count: int,
        save_every: int,
        policy: CheckpointPolicy,
        stop_after: int | None,
        settings: Mapping[str, Any],
        is_over: Callable[[], bool] | None,
    ) -> Iterator[Round]:
        """Yield the remaining rounds of `count`."""
        if self._state.models:
            raise UserError("run.rounds(…) needs a run without models: train them in another run, without a folder")
        progress = self._start(count, policy, settings, is_over)
        with self._stopping_after_the_round(), heartbeat.counting_rounds():
            while not progress.is_at_end(None):
                if stop_after is not None and progress.step >= stop_after:
                    self._checkpointer.stop(stop_after)
                heartbeat.enter(Phase.COMPUTING)
                current = Round(progress.step + 1, lambda: self._is_asked_to_stop, self._checkpointer.stop)
                yield current
                progress.step += 1
                heartbeat.complete_round(progress.step)
                self._checkpointer.poll()
                if self._log.trace is not None:
                    self._log.trace.record_state(progress.step, self._state.state())
                progress.is_done = current.is_last or progress.step >= count
                if progress.step % save_every == 0 and not progress.is_done:  # `finish` saves the end
                    with heartbeat.during(Phase.SAVING):
                        self._checkpointer.save()
                if not progress.is_done and any(all_gather_object(self._is_asked_to_stop)):
                    self._checkpointer.stop()
            progress.is_done = True
        heartbeat.enter(Phase.SCRIPT)

    def _start(
        self, count: int, policy: CheckpointPolicy, settings: Mapping[str, Any], is_over: Callable[[], bool] | None
    ) -> Progress:
        """Claim the folder and resume if it has a checkpoint."""
        heartbeat.enter(Phase.RESUMING)
        conditions = environment_fingerprint(self._world) | self._options.numerics()
        if self._log.folder is not None:
            self._state.check_registered()
        own_settings = ScriptSettings({**self._options.numerics(), **settings})
        checkpointer = self._checkpointer
        checkpointer.open(self._log.settings or own_settings, conditions)
        earlier = checkpointer.found_progress
        checkpointer.begin_call(1, None, count, policy)
        is_exact = self._options.determinism == "lockstep"
        resumed_from = checkpointer.restore(_NoLoader(), conditions, is_exact=is_exact)
        progress = checkpointer.progress
        if earlier is not None and earlier.is_done and progress.step < count:
            # A run that ended early stays done even if more rounds are asked for now: it would have ended early anyway.
            was_cut_short = earlier.last_step is not None and earlier.step < earlier.last_step
            progress.is_done = was_cut_short if is_over is None else is_over()
        heartbeat.complete_round(progress.step)
        if (cause := environment.restart_cause()) is not None:
            self._log.events.emit("restart", progress.step, cause=cause)
        self._log.events.emit(
            "start",
            progress.step,
            **self._world.event_fields,
            total_rounds=count,
            resumed=resumed_from,
            is_done=progress.is_at_end(None),
            **self._log.start_info,
        )
        return progress

    def _stopping_after_the_round(self) -> AbstractContextManager[None]:
        if self._log.folder is None:
            return nullcontext()
        return stop_after_step(partial(setattr, self, "_is_asked_to_stop", True))
