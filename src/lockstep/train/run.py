"""`Run`: what a training loop of one's own needs around it. The loop itself stays the user's:

run = lockstep.Run("runs/mine", world, seed=7)
model = run.prepare(make_model())
optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=3e-4))
train = run.loader(train_set, global_batch=512, lanes=8)
for step in run.steps(train, epochs=10, save_every=100):
    step.accumulate(loss, model)
    step.update(optimizer)

Run again, the same script goes on from the newest checkpoint in the folder, on as many processes as there are now.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.checkpoint.manifest import check_part_name
from lockstep.config.duration import RunLength
from lockstep.config.plain_settings import PlainSettings
from lockstep.data.evaluation import EvaluationLoader
from lockstep.data.foreign import Loader, rebuild
from lockstep.data.iterable import IterableLaneLoader
from lockstep.data.loader import LaneLoader
from lockstep.data.samples import is_iterable
from lockstep.engine.buffers import slots_of
from lockstep.engine.digest import digest, tensor_digests
from lockstep.engine.engine import Engine
from lockstep.engine.trace import gradients_of
from lockstep.errors import LockstepError, UserError
from lockstep.events.echo import Echo
from lockstep.events.event import Sink
from lockstep.events.run_folder import Settings
from lockstep.train.average import MovingAverage
from lockstep.train.checkpoints import Saving
from lockstep.train.continuity import Continuity, Resume
from lockstep.train.drift import fingerprint_of, numerics_of
from lockstep.train.engines import check_batch_norm, make_engine
from lockstep.train.evaluation import Metrics, evaluate
from lockstep.train.journal import Journal
from lockstep.train.nonfinite import Investigator
from lockstep.train.options import StepOptions
from lockstep.train.parts import Models, Parts, Resumable
from lockstep.train.precision import LossScaler, Precision
from lockstep.train.schedule import Factor, Schedule
from lockstep.train.step import Step, StepContext
from lockstep.train.update import Updater
from lockstep.world.arithmetic import set_arithmetic
from lockstep.world.collectives import broadcast
from lockstep.world.memory import peak_memory_bytes
from lockstep.world.objects import all_gather_object
from lockstep.world.randomness import key_of, seed_streams
from lockstep.world.setup import setup_distributed
from lockstep.world.world import World

Module = TypeVar("Module", bound=nn.Module)

logger = logging.getLogger("lockstep")

_AT_THE_END = Saving()


class Run:
    """One training run, on this rank. The number of ranks never changes what it computes.

    `folder`: where it leaves its events and checkpoints, and resumes from; or None. What would change the answer is
    then an error, unless `resume` is "accept-drift" (another machine or version) or "force" (also other settings).
    `trace=True` writes down every step's digests, so that `lockstep.first_difference` can say where two runs part. All
    other options (`seed`, `precision`, `clip_norm` …) say how steps are computed: see `StepOptions`.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        world: World | None = None,
        *,
        resume: Resume = "auto",
        trace: bool = False,
        log_every: int = 10,
        sinks: Sequence[Sink] | None = None,
        settings: Settings | None = None,
        facts: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.options = StepOptions.read(options)
        if trace and folder is None:
            raise UserError("trace=True needs a folder to write to")
        if resume not in get_args(Resume):
            raise UserError(f"resume={resume!r}: expected one of {', '.join(get_args(Resume))}")
        self.world = setup_distributed() if world is None else world
        set_arithmetic(self.world.device, tf32=self.options.tf32, deterministic=self.options.determinism == "lockstep")
        self._calls = 0  # of `steps`
        self._number = 0  # of the step that is being made, or of the last one
        self._current: Step | None = None  # the one that the loop's body has
        self.stop_after: int | None = None  # updates; then it is saved, and a `Stopped` is raised
        self.log_every = log_every
        self._settings = settings
        self._facts = dict(facts or {})  # for the start event
        self._parts = Parts()
        self._schedules: dict[Optimizer, Schedule | Factor] = {}
        self._engine: Engine | None = None
        self._is_save_asked = False
        self.journal = Journal(
            None if folder is None else Path(folder),
            self.world,
            [Echo()] if sinks is None and folder is not None else sinks or [],
            trace=trace,
            force=resume == "force",
        )
        self._continuity = Continuity(self.journal, self.world, self._parts, resume)
        seed_streams(key_of(self.seed, "weights"))

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def step(self) -> int:
        """Updates completed."""
        return self._continuity.progress.step

    @property
    def batches(self) -> int:
        """Global batches consumed."""
        return self._continuity.progress.batches

    def prepare(self, model: Module) -> Module:
        """The same module, on this rank's device, with rank 0's weights and buffers."""
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            raise UserError("the model has lazy modules without weights yet: run a batch through it first")
        if self._parts.has_model(model):
            return model
        model.to(self.world.device)
        if self.world.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                _take_from_rank_0(tensor)
        self._parts.add_model(model)
        self._engine = None
        return model

    def optimizer(
        self,
        models: Models,
        make: Callable[[list[Parameter]], Optimizer] | Optimizer,
        schedule: Schedule | Factor | None = None,
    ) -> Optimizer:
        """An optimizer for these models' trainable parameters: made by a function of them, or ready-made.

        `schedule`: its learning rates' course, as in `lockstep.Schedule.cosine(warmup="500 steps")`, or a function from
        the updates completed to a factor.
        """
        made = make if isinstance(make, Optimizer) else make(self._parts.parameters_of(models))
        if isinstance(made, torch.optim.LBFGS):
            raise UserError("LBFGS evaluates the loss several times in a step, which a step of lanes does not offer")
        self._parts.add_optimizer(made)
        if schedule is not None:
            self._schedules[made] = schedule
        return made

    def average(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> MovingAverage:
        """An exponential moving average of a prepared model's weights, which every update of them moves on."""
        if not self._parts.parameter_names().keys() >= set(model.parameters()):
            raise UserError("run.prepare(model) comes before run.average(model): it may give the model other weights")
        made = MovingAverage(model, decay, warmup=warmup)
        self._parts.add_average(made)
        return made

    def moves(self, average: MovingAverage) -> bool:
        """Is it one of this run's?"""
        return self._parts.has_average(average)

    def keep(self, name: str, thing: Resumable) -> None:
        """Have something else in every checkpoint: whatever has `state_dict` and `load_state_dict`, of plain values."""
        check_part_name(name)
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UserError(f"run.keep({name!r}, …) needs an object with state_dict and load_state_dict")
        self._parts.kept[name] = thing

    def loader(
        self,
        dataset: Any,
        global_batch: int | None = None,
        *,
        lanes: int | Literal["auto"] = "auto",
        tail: Literal["drop", "short", "pad"] | None = None,
        **options: Any,
    ) -> Loader:
        """Global batches of a data set, cut into lanes: see LaneLoader for the options.

        An iterable data set is read lane by lane. A torch DataLoader is rebuilt from its data set, collate function and
        workers, and its batch size is the global batch; one with a sampler of its own is used as it is, in fast mode.
        """
        if isinstance(dataset, DataLoader):
            return rebuild(
                dataset, self.world, seed=self.seed, global_batch=global_batch, lanes=lanes, tail=tail, **options
            )
        if global_batch is None:
            raise UserError("run.loader(…) needs global_batch=: the samples of one step, over all processes")
        kind = IterableLaneLoader if is_iterable(dataset) else LaneLoader
        return kind(dataset, global_batch, self.world, lanes=lanes, tail=tail or "drop", seed=self.seed, **options)

    def steps(
        self,
        loader: Loader,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        save_every: int | str | None = None,
        keep: int = 3,
        keep_every: int | None = None,
    ) -> Iterator[Step]:
        """Yield so many epochs' or updates' worth of steps, less what an earlier attempt has made; then the digest.

        `save_every`, as in `100` or `"1 epoch"`, saves in between as well; the newest `keep` checkpoints stay, and
        those of every `keep_every`-th step.
        """
        yield from self.open_steps(loader, epochs=epochs, steps=steps, saving=Saving(save_every, keep, keep_every))
        self.finish()

    def open_steps(
        self,
        loader: Loader,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        saving: Saving = _AT_THE_END,
    ) -> Iterator[Step]:
        """The same without the end, for a loop that has something to do after its last step."""
        if (epochs is None) == (steps is None):
            raise ValueError("give either epochs or steps")
        if (steps if epochs is None else epochs) == 0:
            return
        self._calls += 1
        context = self._start(loader, epochs, steps, saving)
        if context is None:
            return
        progress = self._continuity.progress
        per_epoch = _steps_per_epoch(loader)
        save_every = saving.in_steps(self.length(loader))
        started = time.perf_counter()
        try:
            for batch in self._continuity.batches(loader):
                fetched = time.perf_counter()
                if self.journal.trace is not None:
                    self.journal.trace.begin(batch)
                self._number = self.step + 1
                self._current = step = Step(self._number, batch, context)
                is_left = True
                try:
                    yield step
                    is_left = False
                finally:  # also where the loop is left by `break`; a step that nothing was done with is still to come
                    self._current = None
                    if step.is_begun or not is_left:
                        self._continuity.consume(loader, batch)
                    progress.step += step.is_updated
                progress.is_done = progress.is_at_its_end(per_epoch)
                if step.is_updated:
                    self._after(step, fetched - started, time.perf_counter() - fetched)
                if self._is_save_asked or (save_every is not None and step.is_updated and step.every(save_every)):
                    self.save()
                if progress.is_done:
                    break
                if self.step == self.stop_after:
                    self._continuity.stop()
                started = time.perf_counter()
            progress.is_done = True
        except BaseException:  # the loop was left in the middle; `finish` or `close` may still be called
            self._drop_engine(abandon=True)
            raise

    @property
    def is_saved(self) -> bool:
        """Is there a checkpoint of the current step, or one under way?"""
        return self._continuity.is_saved

    def save(self, *, is_best: bool = False, **facts: Any) -> None:
        """Save the run as it is now, or in the body of a step, as it is after it. Training goes on meanwhile.

        `is_best` marks a checkpoint that stays until there is a better one. `facts` are for its manifest.
        """
        if self._current is not None and self._current.is_begun:
            self._is_save_asked = True
        else:
            self._is_save_asked = False
            self._continuity.save(is_best=is_best, **facts)

    def length(self, loader: Loader, *, epochs: int | None = None, steps: int | None = None) -> RunLength:
        """What durations are counted in, and how many updates there will have been after so many more."""
        per_epoch = _steps_per_epoch(loader)
        if epochs is not None and per_epoch is not None:
            steps = epochs * per_epoch
        return RunLength(per_epoch, loader.global_batch, None if steps is None else self.step + steps)

    @property
    def loss_scale(self) -> float | None:
        """With fp16, what losses are multiplied with at present."""
        return None if self._parts.scaler is None else self._parts.scaler.scale

    def evaluate(self, model: Any, dataset: Any, metrics: Metrics, *, batch: int = 256) -> dict[str, Any]:
        """Each metric over every sample, counted once: a float, or nested lists of numbers.

        `metrics(model, batch)` → {name: (sum, count)} for means, or with others of `lockstep.metrics` as values.
        `dataset` may be a loader as well. The batches it is cut into do not depend on the number of ranks.
        """
        loader = dataset if isinstance(dataset, EvaluationLoader) else EvaluationLoader(dataset, batch, self.world)
        precision = Precision(self.options.precision, self.world.device)  # a lane's own may be entered already
        return evaluate(model, loader, metrics, self.world, seed=self.seed, precision=precision)

    def log(self, **values: Any) -> None:
        """Put values into the run's events, on rank 0; all ranks may call it."""
        self.journal.events.emit("step", self._number, **values)

    def log_image(self, name: str, image: Any) -> None:
        """Keep an image as RUN/media/NAME-STEP.png and show it in the loggers, on rank 0; all ranks may call it.

        A tensor or array of uint8, or of floats from 0 to 1 (what lies outside is clipped): height × width,
        height × width × 3, 3 × height × width or 1 × height × width. Without a folder it is not kept.
        """
        self.journal.keep_image(name, self._number, image)

    def log_text(self, name: str, text: str) -> None:
        """Put a text into the run's events and show it in the loggers, on rank 0; all ranks may call it."""
        self.journal.keep_text(name, self._number, text)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, under a name that says what it is."""
        return self._parts.state()

    def digest(self) -> str:
        """The sha256 of that state, in hex: equal digests, equal bits."""
        return digest(self.state())

    def finish(self, **facts: Any) -> str:
        """End the run: its digest is compared over the ranks, and returned; its state is saved."""
        own = self.digest()
        if len(set(all_gather_object(own))) > 1:
            digests = all_gather_object(tensor_digests(self.state()))
            names = dict.fromkeys(name for theirs in digests for name in theirs)
            name = next(name for name in names if len({theirs.get(name) for theirs in digests}) > 1)
            raise LockstepError(f"after step {self.step} the ranks differ in {name}: was it changed outside of a step?")
        self._continuity.finish(**facts)
        self.journal.events.emit("end", self.step, digest=own, **facts)
        self.close()
        return own

    def close(self, *, abandon: bool = False) -> None:
        """Let go of the folder and of the other ranks; `abandon`: without waiting for them. `finish` does it too."""
        self._drop_engine(abandon=abandon)
        self._continuity.close(abandon=abandon)
        self.journal.close()

    def _drop_engine(self, *, abandon: bool) -> None:
        if self._engine is not None:
            self._engine.close(abandon=abandon)
            self._engine = None

    def _start(self, loader: Loader, epochs: int | None, steps: int | None, saving: Saving) -> StepContext | None:
        """Claim the folder and go on where it says; None if there is nothing to do in this call of `steps`."""
        if not self._parts.models:
            raise UserError("nothing to train: run.prepare(model) comes before run.steps(…)")
        if self._parts.any_batch_norm:
            check_batch_norm(self.world, loader)
        self._parts.look_again()
        self._drop_engine(abandon=False)
        self._make_scaler(loader)
        settings = self._settings or PlainSettings(numerics_of(self.options, loader))
        self._continuity.open(settings, self._fingerprint(loader, self.length(loader, epochs=epochs, steps=steps)))
        if not self._continuity.begin_call(self._calls, epochs, steps, saving):
            return None
        length = self._length_of_call(loader)
        is_exact = self.options.determinism == "lockstep"
        resumed = self._continuity.take_up(loader, self._fingerprint(loader, length), is_exact=is_exact)
        self._tell_start(loader, length, resumed)
        if self._continuity.progress.is_at_its_end(_steps_per_epoch(loader)):
            return None
        self._engine = make_engine(self.world, loader, list(self._parts.models.values()), self.options)
        return StepContext(
            self._engine,
            lane_key=key_of(self.seed, "lane"),
            update_key=key_of(self.seed, "update") if loader.lanes.count > 1 else None,
            precision=Precision(self.options.precision, self.world.device),
            updater=self._make_updater(length),
            investigator=Investigator(
                self.options.on_nonfinite, loader.lanes, self._parts.parameter_names(), self.journal.tell_incident
            ),
            parameters=self._parts.parameters_of,
            buffers=list(slots_of(self._parts.models.values())),
        )

    def _fingerprint(self, loader: Loader, length: RunLength) -> dict[str, Any]:
        schedules = list(self._schedules.values())
        return fingerprint_of(self.world, self.options, loader, self._parts, schedules, length)

    def _length_of_call(self, loader: Loader) -> RunLength:
        progress = self._continuity.progress
        done = progress.step - progress.first_step
        length = self.length(loader, epochs=progress.asked_epochs, steps=progress.asked_steps)
        return length if length.total_steps is None else length._replace(total_steps=length.total_steps - done)

    def _tell_start(self, loader: Loader, length: RunLength, resumed: str | None) -> None:
        self.journal.events.emit(
            "start",
            self.step,
            processes=self.world.size,
            device=self.world.device.type,
            backend=self.world.backend,
            launcher=self.world.launcher,
            effective_batch=loader.global_batch,
            lanes=loader.lanes.count,
            speed_up_bound=loader.lanes.speed_up_bound,
            total_steps=length.total_steps,
            precision=self.options.precision,
            learning_rates=self._parts.learning_rates(),
            parameters=sum(parameter.numel() for parameter in self._parts.parameters_of(None)),
            resumed=resumed,
            **self._facts,
        )

    def _make_scaler(self, loader: Loader) -> None:
        if self.options.precision == "fp16" and self._parts.scaler is None:
            self._parts.scaler = LossScaler(loader.global_batch or 1, self.world.device)

    def _make_updater(self, length: RunLength) -> Updater:
        rates = {
            optimizer: schedule.bind(length) if isinstance(schedule, Schedule) else schedule
            for optimizer, schedule in self._schedules.items()
        }
        averages = list(self._parts.averages.values())
        return Updater(self.options, self._parts.scaler, rates, averages, self._continuity.before_update)

    def _after(self, step: Step, data_s: float, compute_s: float) -> None:
        self._continuity.look()
        if self.journal.trace is not None:
            self.journal.trace.record(step.number, step.loss, gradients_of(self._parts.models), self.state())
        if step.every(self.log_every) and self.journal.folder is not None:
            peaks = peak_memory_bytes(self.world.device)
            self.journal.rank_log.emit("step", step.number, data_s=data_s, compute_s=compute_s, **peaks)


@torch.no_grad()
def _take_from_rank_0(tensor: Tensor) -> None:
    """As bytes: a backend need not know every type, and wants its tensors contiguous."""
    if tensor.numel():
        flat = tensor.detach().contiguous().reshape(-1)
        tensor.copy_(broadcast(flat.view(torch.uint8)).view(tensor.dtype).view(tensor.shape))


def _steps_per_epoch(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of a stream, or of a DataLoader whose sampler does not say
        return None
