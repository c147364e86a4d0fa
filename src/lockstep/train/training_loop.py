"""The training loop: fetch a batch, yield a step to the script, count it, save if a save is due; repeat.

`_start` comes before the first step: it claims the run folder, resumes, and builds the engine. `_run_steps` is the loop
itself; the script's own code runs where it yields a step.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.utils.hooks import RemovableHandle

from lockstep.config import environment
from lockstep.config.duration import RunLength
from lockstep.config.plurals import count_noun
from lockstep.data.lanes import GlobalBatch
from lockstep.data.loader_factory import Loader
from lockstep.engine.engine import Engine
from lockstep.engine.lane_buffers import buffer_slots
from lockstep.engine.loss_table import SNAPSHOT, STOP, ControlFlags
from lockstep.errors import UserError
from lockstep.events.run_folder import ScriptSettings
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.stop_signals import stop_after_step
from lockstep.train.first_step_checks import FirstStepChecks
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.optim.mixed_precision import LossScaler, MixedPrecision
from lockstep.train.optim.nonfinite import Investigator
from lockstep.train.optim.optimizer_update import Updater
from lockstep.train.optim.torch_schedulers import check_schedulers
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.resume.drift import fingerprint_of, numerics_of, optimizer_settings
from lockstep.train.resume.progress import BatchCursor, StepBoundaries, length_of_run, steps_per_epoch
from lockstep.train.run_context import RunContext
from lockstep.train.step import Step, StepContext
from lockstep.train.step_timer import StepTimer
from lockstep.train.strategies.strategy_factory import StrategyChoice, recheck_choice
from lockstep.world.keyed_random import key_of
from lockstep.world.process_memory import peak_memory_bytes
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_FEW_SAMPLES = 16  # batch norm with fewer in a lane is worth a warning


@dataclass
class SaveRequest:
    """A save that was requested inside a step, to be made after it."""

    is_best: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def merge(self, is_best: bool, metadata: Mapping[str, Any]) -> None:
        self.is_best |= is_best
        self.metadata |= metadata


class TrainingLoop:
    """The loop of one run. Each call of `steps` continues where the previous one, or an earlier attempt, ended."""

    def __init__(self, context: RunContext, log_every: int) -> None:
        self.number = 0  # of the current step, or of the last one
        self.stop_after: int | None = None  # updates
        self.is_closed = False
        self.engine: Engine | None = None
        self.checkpoint_metadata: dict[str, Any] = {}  # goes into the manifest of every checkpoint
        self.timer = StepTimer(context.world.device, None if context.log.folder is None else log_every)
        self._world = context.world
        self._options = context.options
        self._state = context.state
        self._log = context.log
        self._checkpointer = context.checkpointer
        self._flags = ControlFlags()
        self._num_calls = 0  # of `steps`
        self._current: Step | None = None  # the step that the script is in
        self._save_request: SaveRequest | None = None
        self._is_ending = False  # the script has called `end_steps`
        self._step_hooks: list[RemovableHandle] = []  # of the optimizers

    @property
    def step(self) -> int:
        """Updates completed, including that of the current step once it is made."""
        return self._checkpointer.progress.step + (self._current is not None and self._current.is_updated)

    @property
    def is_begun(self) -> bool:
        """Whether training has begun in this process."""
        return self._num_calls > 0

    @property
    def is_in_step(self) -> bool:
        """Whether the script is in the body of its loop over `steps`."""
        return self._current is not None

    def steps(
        self,
        loader: Loader,
        epochs: int | None,
        steps: int | None,
        policy: CheckpointPolicy,
        finish: Callable[[], object] | None = None,
    ) -> Iterator[Step]:
        """Yield the remaining steps of this many epochs or updates, then call `finish`."""
        if self._current is not None:
            raise UserError(
                "run.steps(…) inside a step of another run.steps(…): end that loop first, or use another Run"
            )
        is_empty = (steps if epochs is None else epochs) == 0
        with self._stopping_after_the_step():
            context = None if is_empty else self._start(loader, epochs, steps, policy)
            if context is not None:
                yield from self._run_steps(loader, context, policy)
        heartbeat.enter(Phase.SCRIPT)
        if finish is not None and self._checkpointer.found_progress is None:
            finish()

    def _run_steps(self, loader: Loader, context: StepContext, policy: CheckpointPolicy) -> Iterator[Step]:
        """Fetch batches and yield a step for each, up to the end of this call of `steps`."""
        progress = self._checkpointer.progress
        cursor = BatchCursor(loader, progress)
        self._checkpointer.follow(cursor)
        boundaries = StepBoundaries(progress, steps_per_epoch(loader), partial(self._peek, cursor))
        save_every = policy.in_steps(length_of_run(loader))
        checks: FirstStepChecks | None = self._first_step_checks(context)
        num_skipped = 0  # by the script, in a row
        try:
            self._stop_if_reached()
            while (batch := self._next_batch(cursor)) is not None:
                self.number = progress.step + 1
                self._current = step = Step(self.number, batch, context, boundaries, checks)
                checks = None
                left_early = True
                try:
                    yield step
                    left_early = False
                finally:
                    # If the script leaves the loop here, the batch counts as consumed only if the step has run lanes.
                    self._count(step, loader, is_consumed=step.is_begun or not left_early)
                step.check_end()
                num_skipped = 0 if step.is_updated or step.was_skipped else num_skipped + 1
                if progress.asked_steps is not None and num_skipped == boundaries.batches_per_epoch:
                    raise UserError(
                        f"no step of an epoch made an update: steps={progress.asked_steps} would never be reached: "
                        "call step.update(optimizer) in place of step.skip(), or give epochs="
                    )
                progress.is_done = self._is_ending or progress.is_at_end(boundaries.batches_per_epoch)
                self._record_and_save(step, save_every)
                if progress.is_done:
                    break
                self._stop_if_reached()
                self._act_on_requests()
            progress.is_done = True
        except BaseException:  # the loop was left early; `finish` or `close` may still be called
            self._close_engine(abandon=True)
            raise
        finally:
            cursor.close()

    def end_steps(self) -> None:
        """End this call of `steps` after the current step, as if it were the last one requested."""
        if self._current is None:
            raise UserError("run.end_steps() belongs inside `for step in run.steps(…):`")
        self._is_ending = True

    def save(self, *, is_best: bool = False, metadata: Mapping[str, Any] | None = None) -> None:
        """Save now or, if called inside a step, after it."""
        metadata = self.checkpoint_metadata | dict(metadata or {})
        if self._current is not None and self._current.is_begun:
            self._save_request = self._save_request or SaveRequest()
            self._save_request.merge(is_best, metadata)
        elif not self.is_begun and self._log.folder is not None:
            raise UserError("call run.save() after run.steps(…) has begun: until then the run may still have to resume")
        else:
            with heartbeat.during(Phase.SAVING), self.timer.aside("saving"):
                self._checkpointer.save(is_best=is_best, metadata=metadata)

    def save_if_requested(self) -> None:
        """Make the save that was requested inside a step, now that the step is over."""
        if self._save_request is not None:
            request, self._save_request = self._save_request, None
            self.save(is_best=request.is_best, metadata=request.metadata)

    def close(self, *, abandon: bool) -> None:
        if not abandon:
            self.save_if_requested()
        self._close_engine(abandon=abandon)
        self.is_closed = True

    # -- one step

    def _next_batch(self, cursor: BatchCursor) -> GlobalBatch | None:
        heartbeat.enter(Phase.DATA)
        self.timer.begin(self._checkpointer.progress.step + 1, self.engine)
        batch = cursor.next()
        if batch is not None:
            self.timer.lap("data")
            heartbeat.enter(Phase.COMPUTING)
            if self._log.trace is not None:
                self._log.trace.begin(batch)
        return batch

    def _peek(self, cursor: BatchCursor) -> GlobalBatch | None:
        """Return the batch after the current step's, fetched early."""
        self.timer.lap("rest")
        with heartbeat.during(Phase.DATA):
            batch = cursor.peek()
        self.timer.lap("data")
        return batch

    def _count(self, step: Step, loader: Loader, *, is_consumed: bool) -> None:
        self._current = None
        if is_consumed:
            self._checkpointer.consume(loader, step.batch)
        self._checkpointer.progress.step += step.is_updated
        if step.is_begun and (traffic := self._state.strategy.traffic) is not None:
            traffic.steps += 1  # its gradients have been sent, even if the update was skipped

    def _record_and_save(self, step: Step, save_every: int | None) -> None:
        if step.is_updated:
            self._record(step)
            if save_every is not None and step.every(save_every) and self._save_request is None:
                self.save()
        self.save_if_requested()

    def _record(self, step: Step) -> None:
        """Record where the step's time went, and its digests if the run is traced."""
        times = self.timer.end(step.number, self.engine)
        heartbeat.complete_step(step.number)
        self._checkpointer.poll()
        if self._log.trace is not None:
            self._log.trace.record(step.number, step.loss, self._state.gradients(), self._state.state())
        if times is not None:
            memory = peak_memory_bytes(self._world.device)
            self._log.rank_log.emit("step", step.number, num_lanes=len(step.batch.lanes), **times, **memory)

    def _stop_if_reached(self) -> None:
        if self.stop_after is not None and self._checkpointer.progress.step >= self.stop_after:
            self._checkpointer.stop(self.stop_after)

    def _act_on_requests(self) -> None:
        """Do what any rank has requested of all ranks. [Note: requests]"""
        if self._checkpointer.request_snapshot():
            self._flags.request(SNAPSHOT)
        requests = self._flags.take_own() if self._world.size == 1 else self._flags.take_received()
        if requests & STOP:
            self._checkpointer.stop()
        if requests & SNAPSHOT:
            with heartbeat.during(Phase.SAVING), self.timer.aside("saving"):
                self._checkpointer.take_snapshot()

    def _stopping_after_the_step(self) -> AbstractContextManager[None]:
        """Let a stop signal take effect after the step. Without a folder there is no save, so it acts at once."""
        if self._log.folder is None:
            return nullcontext()
        return stop_after_step(partial(self._flags.request, STOP))

    # -- before the first step

    def _start(
        self, loader: Loader, epochs: int | None, steps: int | None, policy: CheckpointPolicy
    ) -> StepContext | None:
        """Claim the folder, resume if it has a checkpoint, build the engine. Returns None if no step is left."""
        self._num_calls += 1
        self._is_ending = False
        heartbeat.enter(Phase.RESUMING)
        self._prepare_state(loader)
        self._close_engine(abandon=False)  # of an earlier call
        self._open_folder(loader, self._planned_length(loader, epochs, steps))
        checkpointer = self._checkpointer
        if not checkpointer.begin_call(self._num_calls, epochs, steps, policy):
            return None
        length = self._length_of_call(loader)
        is_exact = self._options.determinism == "lockstep"
        resumed_from = checkpointer.restore(loader, self._fingerprint(loader, length), is_exact=is_exact)
        is_done = checkpointer.progress.is_at_end(steps_per_epoch(loader))
        self._report_start(loader, length, resumed_from, is_done)
        if is_done:
            return None
        models = list(self._state.models.values())
        self.engine = self._state.strategy.make_engine(loader, models, self._flags)
        context = self._step_context(self.engine, loader, length)
        self._refuse_other_steps(context.updater)
        return context

    def _prepare_state(self, loader: Loader) -> None:
        """Check that the models and the strategy suit this loader, and let the strategy prepare the optimizers."""
        state, optimizers = self._state, self._state.optimizers.values()
        if not state.models:
            raise UserError("nothing to train: call run.prepare(model) before run.steps(…)")
        if state.any_batch_norm:
            _check_batch_norm(self._world, loader)
        state.check_optimizers()
        state.forget_parameters()
        state.strategy, state.why_strategy = recheck_choice(
            StrategyChoice(state.strategy, state.why_strategy), optimizers, loader
        )
        state.strategy.begin(optimizers)
        if self._options.precision == "fp16" and state.scaler is None:
            state.scaler = LossScaler(loader.global_batch or 1, self._world.device)

    def _open_folder(self, loader: Loader, length: RunLength) -> None:
        """Claim the run folder, now that all that it records is known: the settings and the fingerprint."""
        if self._log.settings is None:  # before the first step: the learning rates may change later
            self._log.settings = ScriptSettings(numerics_of(self._options, loader) | optimizer_settings(self._state))
        if self._log.folder is not None:
            self._state.check_registered()
            warning = check_schedulers(
                self._state.optimizers.values(), self._state.schedules, self._state.registered.values()
            )
            if warning is not None and self._world.is_main and self._num_calls == 1:
                logger.warning("%s", warning)
        self.is_closed = False
        self._checkpointer.open(self._log.settings, self._fingerprint(loader, length))

    def _first_step_checks(self, context: StepContext) -> FirstStepChecks:
        compares_lanes = self._options.determinism == "lockstep" and context.engine.can_replay
        models, saves = list(self._state.models.values()), self._log.folder is not None
        return FirstStepChecks(models, context.buffers, compares_lanes=compares_lanes, saves=saves)

    def _refuse_other_steps(self, updater: Updater) -> None:
        """Let `optimizer.step()` raise inside a step, where `step.update` calls it."""

        def check(*_: Any) -> None:
            if self._current is not None and not updater.is_stepping:
                raise UserError("optimizer.step() inside a step: step.update(optimizer) calls it: omit it")

        self._step_hooks = [optimizer.register_step_pre_hook(check) for optimizer in self._state.optimizers.values()]

    def _step_context(self, engine: Engine, loader: Loader, length: RunLength) -> StepContext:
        return StepContext(
            engine,
            lane_key=key_of(self._options.seed, "lane"),
            update_key=key_of(self._options.seed, "update") if loader.lanes.count > 1 else None,
            precision=MixedPrecision(self._options.precision, self._world.device),
            updater=self._make_updater(length),
            investigator=Investigator(
                self._options.on_nonfinite, loader.lanes, self._state.parameter_names(), self._log.log_incident
            ),
            timer=self.timer,
            parameters=self._state.parameters_of,
            gradients=self._state.named_gradients,
            optimizer_ids=frozenset(map(id, self._state.optimizers.values())),
            buffers=list(buffer_slots(self._state.models.values())),
        )

    def _fingerprint(self, loader: Loader, length: RunLength) -> dict[str, Any]:
        schedules = list(self._state.schedules.values())
        return fingerprint_of(self._world, self._options, loader, self._state, schedules, length)

    def _planned_length(self, loader: Loader, epochs: int | None, steps: int | None) -> RunLength:
        """Return the run's length if it ends after this many more epochs or updates."""
        per_epoch = steps_per_epoch(loader)
        if epochs is not None and per_epoch is not None:
            steps = epochs * per_epoch
        return length_of_run(loader, None if steps is None else self._checkpointer.progress.step + steps)

    def _length_of_call(self, loader: Loader) -> RunLength:
        """Return the run's length if it ends with this call, some of whose steps may be made already."""
        progress = self._checkpointer.progress
        length = self._planned_length(loader, progress.asked_epochs, progress.asked_steps)
        if length.total_steps is None:
            return length
        already_done = progress.step - progress.first_step
        return length._replace(total_steps=length.total_steps - already_done)

    def _make_updater(self, length: RunLength) -> Updater:
        rates = {
            optimizer: schedule.bind(length) if isinstance(schedule, Schedule) else schedule
            for optimizer, schedule in self._state.schedules.items()
        }
        averages = list(self._state.averages.values())
        before_update = self._checkpointer.wait_for_copies
        return Updater(self._options, self._state.scaler, rates, averages, self._state.strategy, before_update)

    def _report_start(self, loader: Loader, length: RunLength, resumed_from: str | None, is_done: bool) -> None:
        step = self._checkpointer.progress.step
        heartbeat.complete_step(step)
        if self._num_calls == 1 and (cause := environment.restart_cause()) is not None:
            self._log.events.emit("restart", step, cause=cause)
        self._log.events.emit(
            "start",
            step,
            **self._world.event_fields,
            effective_batch=loader.global_batch,
            lanes=loader.lanes.count,
            speed_up_bound=loader.lanes.speed_up_bound,
            total_steps=length.total_steps,
            parallel=self._state.strategy.name,
            why_parallel=self._state.why_strategy,
            precision=self._options.precision,
            learning_rates=self._state.learning_rates(),
            parameters=sum(parameter.numel() for parameter in self._state.parameters_of(None)),
            resumed=resumed_from,
            is_done=is_done,
            **self._log.start_info,
        )
        if self._num_calls == 1 and not is_done and (untrained := self._state.untrained_parameters()):
            self._log.log_incident(
                step,
                f"{count_noun(len(untrained), 'parameter')} in no optimizer, so not trained: {', '.join(untrained[:3])}"
                f"{' …' * (len(untrained) > 3)}: give them to one, or freeze them by requires_grad_(False)",
            )
        compression = self._options.compression.kind
        if self._num_calls == 1 and not is_done and self._world.size == 1 and compression != "none":
            logger.warning("compression=%s has no effect on one process: nothing is sent", compression)

    def _close_engine(self, *, abandon: bool) -> None:
        if self.engine is not None:
            self.engine.close(abandon=abandon)
            self.engine = None
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []


def _check_batch_norm(world: World, loader: Loader) -> None:
    """Raise or warn if the loader's lanes do not suit batch norm, which sees one lane at a time."""
    if loader.tail == "pad":
        raise UserError("tail=pad with batch norm: padding would enter its statistics; use tail=short or tail=drop")
    if loader.global_batch is None:
        return  # a torch DataLoader whose batch size is not known
    lane_batch = loader.global_batch // loader.lanes.count
    if lane_batch < _FEW_SAMPLES and world.is_main:
        logger.warning(
            "batch norm sees %s at a time (global batch %d in %s): use fewer lanes or a larger batch",
            count_noun(lane_batch, "sample"),
            loader.global_batch,
            count_noun(loader.lanes.count, "lane"),
        )
