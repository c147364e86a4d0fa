"""The loop of a run: from a loader's batches to steps, with what is to be done before the first and after each."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from lockstep.config import environment
from lockstep.config.duration import RunLength
from lockstep.config.plain_settings import PlainSettings
from lockstep.data.foreign import Loader
from lockstep.engine.buffers import slots_of
from lockstep.engine.engine import Engine
from lockstep.engine.requests import SNAPSHOT, STOP, Requests
from lockstep.errors import UserError
from lockstep.events.run_folder import Settings
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase
from lockstep.supervision.stop_signals import stops_after_the_step
from lockstep.train.batch_norm import check_batch_norm
from lockstep.train.checkpoints import Saving
from lockstep.train.continuity import Continuity
from lockstep.train.drift import fingerprint_of, numerics_of, optimizer_settings
from lockstep.train.journal import Journal
from lockstep.train.nonfinite import Investigator
from lockstep.train.options import StepOptions
from lockstep.train.parts import Parts
from lockstep.train.precision import LossScaler, Precision
from lockstep.train.schedule import Schedule
from lockstep.train.step import Step, StepContext
from lockstep.train.stopwatch import Stopwatch
from lockstep.train.strategies.choice import Choice, settled
from lockstep.train.update import Updater
from lockstep.world.memory import peak_memory_bytes
from lockstep.world.randomness import key_of
from lockstep.world.world import World

logger = logging.getLogger("lockstep")


class Told(NamedTuple):
    """What a run was told about the traces it leaves."""

    settings: Settings | None  # None: those that are known when it starts
    facts: Mapping[str, Any]  # for the start event
    log_every: int


class Loop:
    """Of one run: each call of `steps` goes on where the one before, or an earlier attempt, has ended."""

    def __init__(
        self,
        world: World,
        options: StepOptions,
        parts: Parts,
        journal: Journal,
        continuity: Continuity,
        told: Told,
    ) -> None:
        self.number = 0  # of the step that is being made, or of the last one
        self.stop_after: int | None = None  # updates
        self.is_closed = False
        self.engine: Engine | None = None
        self._requests = Requests()
        self._world = world
        self._options = options
        self._parts = parts
        self._journal = journal
        self._continuity = continuity
        self._told = told
        self._settings = told.settings
        self.stopwatch = Stopwatch(world.device, None if journal.folder is None else told.log_every)
        self._num_calls = 0  # of `steps`
        self._current: Step | None = None  # the one that the loop's body has
        self._save_asked: dict[str, Any] | None = None  # in the body of a step: what `save` was called with

    def steps(self, loader: Loader, epochs: int | None, steps: int | None, saving: Saving) -> Iterator[Step]:
        """What is left of so many epochs or updates."""
        with self._stops_after_the_step():
            yield from self._steps(loader, epochs, steps, saving)
        pulse.enter(Phase.SCRIPT)

    def _steps(self, loader: Loader, epochs: int | None, steps: int | None, saving: Saving) -> Iterator[Step]:
        if (epochs is None) == (steps is None):
            raise ValueError("give either epochs or steps")
        if (steps if epochs is None else epochs) == 0:
            return
        self._num_calls += 1
        context = self._start(loader, epochs, steps, saving)
        if context is None:
            return
        progress = self._continuity.progress
        per_epoch = _steps_per_epoch(loader)
        save_every = saving.in_steps(self.length(loader))
        pulse.enter(Phase.DATA)
        self.stopwatch.begin(progress.step + 1, self.engine)
        try:
            self._stop_if_told()
            for batch in self._continuity.batches(loader):
                self.stopwatch.lap("data")
                pulse.enter(Phase.COMPUTING)
                if self._journal.trace is not None:
                    self._journal.trace.begin(batch)
                self.number = progress.step + 1
                self._current = step = Step(self.number, batch, context)
                is_left = True
                try:
                    yield step
                    is_left = False
                finally:  # also where the loop is left by `break`; a step that nothing was done with is still to come
                    self._current = None
                    if step.is_begun or not is_left:
                        self._continuity.consume(loader, batch)
                    progress.step += step.is_updated
                    if step.is_begun and (traffic := self._parts.strategy.traffic) is not None:
                        traffic.steps += 1  # its gradients have travelled, also where it was skipped
                progress.is_done = progress.is_at_its_end(per_epoch)
                if step.is_updated:
                    self._after(step)
                if save_every is not None and step.is_updated and step.every(save_every):
                    self.save(**self._save_asked or {})
                self.save_as_asked()
                if progress.is_done:
                    break
                self._stop_if_told()
                self._do_as_asked()
                pulse.enter(Phase.DATA)
                self.stopwatch.begin(progress.step + 1, self.engine)
            progress.is_done = True
        except BaseException:  # the loop was left in the middle; `finish` or `close` may still be called
            self._drop_engine(abandon=True)
            raise

    def save(self, *, is_best: bool = False, **facts: Any) -> None:
        """Now, or in the body of a step, after it."""
        if self._current is not None and self._current.is_begun:
            asked = self._save_asked or {}
            self._save_asked = {**asked, **facts, "is_best": is_best or asked.get("is_best", False)}
        elif self._num_calls == 0 and self._journal.folder is not None:
            raise UserError("run.save() comes after the beginning of run.steps(…): until then it may have to resume")
        else:
            self._save_asked = None
            with pulse.during(Phase.SAVING), self.stopwatch.aside("saving"):
                self._continuity.save(is_best=is_best, **facts)

    def save_as_asked(self) -> None:
        if self._save_asked is not None:
            self.save(**self._save_asked)

    def length(self, loader: Loader, epochs: int | None = None, steps: int | None = None) -> RunLength:
        per_epoch = _steps_per_epoch(loader)
        if epochs is not None and per_epoch is not None:
            steps = epochs * per_epoch
        total = None if steps is None else self._continuity.progress.step + steps
        return RunLength(per_epoch, loader.global_batch, total)

    def close(self, *, abandon: bool) -> None:
        if not abandon:
            self.save_as_asked()
        self._drop_engine(abandon=abandon)
        self.is_closed = True

    def _stops_after_the_step(self) -> AbstractContextManager[None]:
        """Only where the run can be saved: else a stop signal does what it always does."""
        if self._journal.folder is None:
            return nullcontext()
        return stops_after_the_step(partial(self._requests.ask, STOP))

    def _do_as_asked(self) -> None:
        """What one rank or another has asked of all: [Note: requests]."""
        if self._continuity.ask_for_snapshot():
            self._requests.ask(SNAPSHOT)
        asked = self._requests.pass_on() if self._world.size == 1 else self._requests.take()
        if asked & STOP:
            self._continuity.stop()
        if asked & SNAPSHOT:
            with pulse.during(Phase.SAVING), self.stopwatch.aside("saving"):
                self._continuity.snapshot()

    def _stop_if_told(self) -> None:
        if self.stop_after is not None and self._continuity.progress.step >= self.stop_after:
            self._continuity.stop()

    def _drop_engine(self, *, abandon: bool) -> None:
        if self.engine is not None:
            self.engine.close(abandon=abandon)
            self.engine = None

    def _start(self, loader: Loader, epochs: int | None, steps: int | None, saving: Saving) -> StepContext | None:
        """Claim the folder and go on where it says; None if there is nothing to do in this call of `steps`."""
        pulse.enter(Phase.RESUMING)
        if not self._parts.models:
            raise UserError("nothing to train: run.prepare(model) comes before run.steps(…)")
        if self._parts.any_batch_norm:
            check_batch_norm(self._world, loader)
        self._parts.look_again()
        self._begin_strategy(loader)
        self._drop_engine(abandon=False)
        self._make_scaler(loader)
        if self._settings is None:  # as the run begins: later on, rates may be others
            self._settings = PlainSettings(numerics_of(self._options, loader) | optimizer_settings(self._parts))
        if self._journal.folder is not None:
            self._parts.check_kept()
        self.is_closed = False
        fingerprint = self._fingerprint(loader, self.length(loader, epochs=epochs, steps=steps))
        self._continuity.open(self._settings, fingerprint)
        if not self._continuity.begin_call(self._num_calls, epochs, steps, saving):
            return None
        length = self._length_of_call(loader)
        is_exact = self._options.determinism == "lockstep"
        resumed = self._continuity.take_up(loader, self._fingerprint(loader, length), is_exact=is_exact)
        is_done = self._continuity.progress.is_at_its_end(_steps_per_epoch(loader))
        pulse.complete_step(self._continuity.progress.step)
        if self._num_calls == 1 and (cause := environment.restarted_after()) is not None:
            self._journal.events.emit("restart", self._continuity.progress.step, cause=cause)
        self._tell_start(loader, length, resumed, is_done)
        if is_done:
            return None
        if self._num_calls == 1:
            self._tell_what_has_no_effect()
        models = list(self._parts.models.values())
        self.engine = self._parts.strategy.make_engine(loader, models, self._requests)
        return StepContext(
            self.engine,
            lane_key=key_of(self._options.seed, "lane"),
            update_key=key_of(self._options.seed, "update") if loader.lanes.count > 1 else None,
            precision=Precision(self._options.precision, self._world.device),
            updater=self._make_updater(length),
            investigator=Investigator(
                self._options.on_nonfinite, loader.lanes, self._parts.parameter_names(), self._journal.tell_incident
            ),
            stopwatch=self.stopwatch,
            parameters=self._parts.parameters_of,
            buffers=list(slots_of(self._parts.models.values())),
        )

    def _fingerprint(self, loader: Loader, length: RunLength) -> dict[str, Any]:
        schedules = list(self._parts.schedules.values())
        return fingerprint_of(self._world, self._options, loader, self._parts, schedules, length)

    def _length_of_call(self, loader: Loader) -> RunLength:
        progress = self._continuity.progress
        done = progress.step - progress.first_step
        length = self.length(loader, epochs=progress.asked_epochs, steps=progress.asked_steps)
        return length if length.total_steps is None else length._replace(total_steps=length.total_steps - done)

    def _tell_start(self, loader: Loader, length: RunLength, resumed: str | None, is_done: bool) -> None:
        self._journal.events.emit(
            "start",
            self._continuity.progress.step,
            **self._world.facts,
            effective_batch=loader.global_batch,
            lanes=loader.lanes.count,
            speed_up_bound=loader.lanes.speed_up_bound,
            total_steps=length.total_steps,
            parallel=self._parts.strategy.name,
            why_parallel=self._parts.why_strategy,
            precision=self._options.precision,
            learning_rates=self._parts.learning_rates(),
            parameters=sum(parameter.numel() for parameter in self._parts.parameters_of(None)),
            resumed=resumed,
            is_done=is_done,
            **self._told.facts,
        )

    def _tell_what_has_no_effect(self) -> None:
        kind = self._options.compression.kind
        if kind != "none" and self._world.size == 1:
            logger.warning("compression=%s has no effect on one process: nothing travels", kind)

    def _make_scaler(self, loader: Loader) -> None:
        if self._options.precision == "fp16" and self._parts.scaler is None:
            self._parts.scaler = LossScaler(loader.global_batch or 1, self._world.device)

    def _begin_strategy(self, loader: Loader) -> None:
        parts, optimizers = self._parts, self._parts.optimizers.values()
        parts.strategy, parts.why_strategy = settled(Choice(parts.strategy, parts.why_strategy), optimizers, loader)
        parts.strategy.begin(optimizers)

    def _make_updater(self, length: RunLength) -> Updater:
        rates = {
            optimizer: schedule.bind(length) if isinstance(schedule, Schedule) else schedule
            for optimizer, schedule in self._parts.schedules.items()
        }
        averages = list(self._parts.averages.values())
        strategy, before = self._parts.strategy, self._continuity.before_update
        return Updater(self._options, self._parts.scaler, rates, averages, strategy, before)

    def _after(self, step: Step) -> None:
        times = self.stopwatch.end(step.number, self.engine)
        pulse.complete_step(step.number)
        self._continuity.look()
        if self._journal.trace is not None:
            self._journal.trace.record(step.number, step.loss, self._parts.gradients(), self._parts.state())
        if times is not None:
            num_lanes = len(step.batch.lanes)
            peaks = peak_memory_bytes(self._world.device)
            self._journal.rank_log.emit("step", step.number, num_lanes=num_lanes, **times, **peaks)


def _steps_per_epoch(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of a stream, or of a DataLoader whose sampler does not say
        return None
