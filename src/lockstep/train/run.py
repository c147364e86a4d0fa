"""`Run`: what a training loop of one's own needs around it. The loop itself stays the user's:

run = lockstep.Run("runs/mine", world, seed=7)
model = run.prepare(make_model())
optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=3e-4))
train = run.loader(train_set, global_batch=512, lanes=8)
for step in run.steps(train, epochs=10):
    step.accumulate(loss, model)
    step.update(optimizer)
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.config.duration import RunLength
from lockstep.config.plain_settings import PlainSettings
from lockstep.data.batch import GlobalBatch
from lockstep.data.evaluation import EvaluationLoader
from lockstep.data.foreign import ForeignLoader, rebuild
from lockstep.data.iterable import IterableLaneLoader
from lockstep.data.loader import LaneLoader
from lockstep.data.order import ORDER_VERSION
from lockstep.data.samples import is_iterable
from lockstep.engine.buffers import slots_of
from lockstep.engine.digest import digest, tensor_digests
from lockstep.engine.engine import Engine
from lockstep.engine.fast_engine import FastEngine
from lockstep.engine.one_lane_engine import OneLaneEngine
from lockstep.engine.tree import TREE_VERSION
from lockstep.engine.tree_engine import TreeEngine
from lockstep.errors import LockstepError, UserError
from lockstep.events.echo import Echo
from lockstep.events.event import Sink
from lockstep.events.run_folder import Settings
from lockstep.train.average import MovingAverage
from lockstep.train.evaluation import Metrics, evaluate
from lockstep.train.journal import Journal
from lockstep.train.nonfinite import Investigator
from lockstep.train.options import StepOptions
from lockstep.train.parts import Models, Parts
from lockstep.train.precision import LossScaler, Precision
from lockstep.train.schedule import Factor, Schedule
from lockstep.train.step import Step, StepContext
from lockstep.train.update import Updater
from lockstep.world.arithmetic import set_arithmetic
from lockstep.world.collectives import broadcast
from lockstep.world.fingerprint import fingerprint
from lockstep.world.memory import peak_memory_bytes
from lockstep.world.objects import all_gather_object
from lockstep.world.randomness import key_of, seed_streams
from lockstep.world.setup import setup_distributed
from lockstep.world.world import World

Loader = LaneLoader | IterableLaneLoader | ForeignLoader
Module = TypeVar("Module", bound=nn.Module)

logger = logging.getLogger("lockstep")

_FEW_FOR_BATCH_NORM = 16  # samples a lane


class Run:
    """One training run, on this rank. The number of ranks never changes what it computes.

    `folder`: where it leaves its events, or None. `trace=True` writes down every step's digests, so that
    `lockstep.first_difference` can say where two runs part. All other options (`seed`, `precision`, `clip_norm` …) say
    how steps are computed: see `StepOptions`.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        world: World | None = None,
        *,
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
        self.world = setup_distributed() if world is None else world
        set_arithmetic(self.world.device, tf32=self.options.tf32, deterministic=self.options.determinism == "lockstep")
        self.step = 0  # updates completed
        self.batches = 0  # global batches consumed
        self._number = 0  # of the step that is being made, or of the last one
        self.log_every = log_every
        self._settings = settings
        self._facts = dict(facts or {})  # for the start event
        self._parts = Parts()
        self._schedules: dict[Optimizer, Schedule | Factor] = {}
        self._engine: Engine | None = None
        self.journal = Journal(
            None if folder is None else Path(folder),
            self.world,
            [Echo()] if sinks is None and folder is not None else sinks or [],
            trace=trace,
        )
        seed_streams(key_of(self.seed, "weights"))

    @property
    def seed(self) -> int:
        return self.options.seed

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

    def steps(self, loader: Loader, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Step]:
        """Yield this many (more) epochs' or updates' worth of steps, then print the run's digest."""
        yield from self.open_steps(loader, epochs=epochs, steps=steps)
        self.finish()

    def open_steps(self, loader: Loader, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Step]:
        """The same without the end, for a loop that has something to do after its last step."""
        if (epochs is None) == (steps is None):
            raise ValueError("give either epochs or steps")
        if (steps if epochs is None else epochs) == 0:
            return
        context = self._start(loader, epochs, steps)
        last_step = None if steps is None else self.step + steps
        started = time.perf_counter()
        try:
            for batch in self._batches(loader, epochs):
                fetched = time.perf_counter()
                self._number = self.step + 1
                step = Step(self._number, batch, context)
                is_left = True
                try:
                    yield step
                    is_left = False
                finally:  # also where the loop is left by `break`; a step that nothing was done with is still to come
                    self.batches += step.is_begun or not is_left
                    self.step += step.is_updated
                if step.is_updated:
                    self._after(step.number, fetched - started, time.perf_counter() - fetched)
                if self.step == last_step:
                    break
                started = time.perf_counter()
        except BaseException:  # the loop was left in the middle; `finish` or `close` may still be called
            self._drop_engine(abandon=True)
            raise

    def _batches(self, loader: Loader, epochs: int | None) -> Iterator[GlobalBatch]:
        """From where the run is, for so many epochs, or without end."""
        if epochs is None:
            return loader.batches(self.batches)
        if isinstance(loader, IterableLaneLoader):
            return loader.batches(self.batches, epochs=epochs)
        return loader.batches(self.batches, self.batches + epochs * len(loader))

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
        """End the run: its digest is compared over the ranks, put into the events, and returned."""
        own = self.digest()
        if len(set(all_gather_object(own))) > 1:
            digests = all_gather_object(tensor_digests(self.state()))
            names = dict.fromkeys(name for theirs in digests for name in theirs)
            name = next(name for name in names if len({theirs.get(name) for theirs in digests}) > 1)
            raise LockstepError(f"after step {self.step} the ranks differ in {name}: was it changed outside of a step?")
        self.journal.events.emit("end", self.step, digest=own, **facts)
        self.close()
        return own

    def close(self, *, abandon: bool = False) -> None:
        """Let go of the folder and of the other ranks; `abandon`: without waiting for them. `finish` does it too."""
        self._drop_engine(abandon=abandon)
        self.journal.close()

    def _drop_engine(self, *, abandon: bool) -> None:
        if self._engine is not None:
            self._engine.close(abandon=abandon)
            self._engine = None

    def _start(self, loader: Loader, epochs: int | None, steps: int | None) -> StepContext:
        if not self._parts.models:
            raise UserError("nothing to train: run.prepare(model) comes before run.steps(…)")
        self._check_batch_norm(loader)
        self._parts.look_again()
        self._drop_engine(abandon=False)
        self._engine = self._make_engine(loader)
        length = self.length(loader, epochs=epochs, steps=steps)
        numerics = self.options.numerics() | {
            "global_batch": loader.global_batch,
            "lanes": loader.lanes.count if loader.exact else None,
            "tail": loader.tail,
        }
        versions = {"order_version": ORDER_VERSION, "tree_version": TREE_VERSION}
        self.journal.open(self._settings or PlainSettings(numerics), fingerprint(self.world) | numerics | versions)
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
            **self._facts,
        )
        return StepContext(
            self._engine,
            lane_key=key_of(self.seed, "lane"),
            update_key=key_of(self.seed, "update") if loader.lanes.count > 1 else None,
            precision=Precision(self.options.precision, self.world.device),
            updater=self._make_updater(length),
            investigator=Investigator(
                self.options.on_nonfinite, loader.lanes, self._parts.parameter_names(), self._tell_incident
            ),
            parameters=self._parts.parameters_of,
            buffers=list(slots_of(self._parts.models.values())),
        )

    def _make_updater(self, length: RunLength) -> Updater:
        if self.options.precision == "fp16" and self._parts.scaler is None:
            self._parts.scaler = LossScaler(length.global_batch or 1, self.world.device)
        rates = {
            optimizer: schedule.bind(length) if isinstance(schedule, Schedule) else schedule
            for optimizer, schedule in self._schedules.items()
        }
        return Updater(self.options, self._parts.scaler, rates, list(self._parts.averages.values()))

    def _tell_incident(self, step: int, text: str) -> None:
        self.journal.events.emit("incident", step, text=text)
        if self.world.is_main and not self.journal.has_sinks:  # else they say it
            logger.warning("%s", text)

    def _make_engine(self, loader: Loader) -> Engine:
        models = list(self._parts.models.values())
        if loader.lanes.count == 1:
            return OneLaneEngine(self.world, models)
        if self.options.determinism == "fast" or not loader.exact:
            unused = self.options.find_unused_parameters
            return FastEngine(self.world, loader.lanes, models, find_unused_parameters=unused)
        bucket_bytes = int(self.options.bucket_mb * 2**20)
        return TreeEngine(
            self.world, loader.lanes, models, buffer_rules=self.options.buffers, bucket_bytes=bucket_bytes
        )

    def _check_batch_norm(self, loader: Loader) -> None:
        """Batch norm sees a lane, not the global batch."""
        if not self._parts.any_batch_norm:
            return
        if loader.tail == "pad":
            raise UserError("tail=pad with batch norm: padding would enter its statistics; use tail=short or tail=drop")
        if loader.global_batch is None:
            return  # a loader of the user's own, which does not say
        lane_batch = loader.global_batch // loader.lanes.count
        if lane_batch < _FEW_FOR_BATCH_NORM and self.world.is_main:
            logger.warning(
                "batch norm sees %d samples at a time (global batch %d in %d lanes): use fewer lanes or a larger batch",
                lane_batch,
                loader.global_batch,
                loader.lanes.count,
            )

    def _after(self, step: int, data_s: float, compute_s: float) -> None:
        if self.journal.is_tracing:
            self.journal.trace(step, self.state())
        if step % self.log_every == 0 and self.journal.folder is not None:
            peaks = peak_memory_bytes(self.world.device)
            self.journal.rank_log.emit("step", step, data_s=data_s, compute_s=compute_s, **peaks)


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
