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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lockstep.config.arguments import require_count
from lockstep.config.duration import RunLength
from lockstep.data.choice import choose_loader
from lockstep.data.evaluation import EvaluationLoader
from lockstep.data.foreign import Loader
from lockstep.engine.digest import digest, tensor_digests
from lockstep.errors import LockstepError, UserError
from lockstep.events.echo import Echo
from lockstep.events.event import Sink
from lockstep.events.run_folder import Settings
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase
from lockstep.train.activation_checkpointing import checkpoint_activations
from lockstep.train.average import MovingAverage
from lockstep.train.checkpoints import Saving
from lockstep.train.continuity import Continuity, Resume
from lockstep.train.evaluation import Metrics, evaluate
from lockstep.train.journal import Journal
from lockstep.train.loop import Loop, Told
from lockstep.train.observed import place_of
from lockstep.train.options import StepOptions
from lockstep.train.parts import Models, Parts, Resumable
from lockstep.train.precision import Precision
from lockstep.train.progress import Progress
from lockstep.train.recomputed import Recomputed
from lockstep.train.rounds import Round, RoundLoop
from lockstep.train.schedule import Factor, Schedule
from lockstep.train.step import Step
from lockstep.train.strategies.choice import choose_strategy
from lockstep.train.strategies.data_parallel import refuse_recomputation
from lockstep.train.strategies.strategy import unwrapped
from lockstep.world.arithmetic import set_arithmetic
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
        self.log_every = log_every
        place = place_of(folder, trace=trace)
        self._traces = place.trace is not None
        self._parts = Parts()
        self._choose_strategy()
        self.journal = Journal(
            place.folder,
            self.world,
            [Echo()] if sinks is None and folder is not None else sinks or [],
            trace=place.trace,
            force=resume == "force",
        )
        self._continuity = Continuity(self.journal, self.world, self._parts, resume)
        self._facts = dict(facts or {})
        self._recomputed = Recomputed(self.options.activation_checkpointing, self._facts)
        told = Told(settings, self._facts, log_every)
        about = (self.world, self.options, self._parts, self.journal, self._continuity, told)
        self._loop = Loop(*about)
        self._loop.stop_after = place.stop_after
        self._round_loop = RoundLoop(*about)
        seed_streams(key_of(self.seed, "weights"))

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def data_world(self) -> World:
        """This rank's place among those with samples of their own; along a mesh's axis `tensor` they share them."""
        return self._parts.strategy.data_world

    @property
    def step(self) -> int:
        """Updates completed."""
        return self._continuity.progress.step

    @property
    def batches(self) -> int:
        """Global batches consumed."""
        return self._continuity.progress.batches

    def prepare(self, model: Module) -> Module:
        """The same module, on this rank's device, with rank 0's weights and buffers.

        A DataParallel or DistributedDataParallel around it is taken off: the run shares gradients itself.
        """
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            raise UserError("the model has lazy modules without weights yet: run a batch through it first")
        bare = unwrapped(model)
        if not self._parts.has_model(bare):
            if self.options.parallel == "auto" and self._parts.strategy.can_be_replaced:
                self._choose_strategy([*self._parts.models.values(), bare])  # now there is more to go by
            self._recomputed.begin(bare)
            self._parts.strategy.place(bare)
            self._parts.add_model(bare)
        return cast(Module, self._parts.strategy.to_call(bare))

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
        self._parts.strategy.adopt(made)
        if isinstance(made, torch.optim.LBFGS):
            raise UserError("LBFGS evaluates the loss several times in a step, which a step of lanes does not offer")
        self._parts.add_optimizer(made)
        if schedule is not None:
            self._parts.schedules[made] = schedule
        return made

    def average(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> MovingAverage:
        """An exponential moving average of a prepared model's weights, which every update of them moves on."""
        if not self._parts.parameter_names().keys() >= set(model.parameters()):
            raise UserError("run.prepare(model) comes before run.average(model): it may give the model other weights")
        made = MovingAverage(model, decay, warmup=warmup)
        self._parts.add_average(made)
        return made

    def checkpoint_activations(self, model: nn.Module, *, every: int = 1, classes: Sequence[str] = ()) -> str:
        """Recompute in the backward pass what some modules would keep for it: less memory, more time, the same bits.

        Every `every`-th module of these classes; without classes, of the blocks that the model repeats. Returns which.
        """
        if isinstance(model, nn.DataParallel):
            refuse_recomputation()
        chosen = checkpoint_activations(unwrapped(model), every=every, classes=classes)
        self._recomputed.note(unwrapped(model), chosen)
        return str(chosen)

    def moves(self, average: MovingAverage) -> bool:
        """Is it one of this run's?"""
        return self._parts.has_average(average)

    def keep(self, name: str, thing: Resumable, *, in_digest: bool = False) -> None:
        """Have something else in every checkpoint: whatever has `state_dict` and `load_state_dict`, of plain values.

        `in_digest`: its tensors and numbers count in the run's digest, and must be equal on all ranks.
        """
        self._parts.keep(name, thing, in_digest=in_digest, once=self.journal.folder is not None)

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
        With such a one, every epoch ends with the rank that has the fewest batches; `uneven="join"` lets the others go
        on until all are through.
        """
        return choose_loader(
            dataset, self.data_world, seed=self.seed, global_batch=global_batch, lanes=lanes, tail=tail, **options
        )

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
        if not self._continuity.is_ahead:
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
        self._recomputed.check(list(self._parts.models.values()))
        return self._loop.steps(loader, epochs, steps, saving)

    def rounds(
        self,
        count: int,
        *,
        save_every: int = 1,
        saving: Saving = _AT_THE_END,
        settings: Mapping[str, Any] | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> Iterator[Round]:
        """Yield so many numbered rounds, less those of earlier attempts: for a loop that does not go by steps.

        What they change is saved if the run keeps it: `run.keep(name, thing, in_digest=True)`. Then call `finish`.
        `settings`: plain values that rounds go by, which no attempt may change. Where the run has a config, it counts.
        `is_over`, on all ranks: where an earlier attempt has come to its end, is that the end for this one, too? If
        left out, it is where a round was made the last before time.
        """
        require_count("save_every", save_every)
        return self._round_loop.rounds(count, save_every, saving, self.stop_after, settings or {}, is_over)

    @property
    def stop_after(self) -> int | None:
        """So many updates; then the run is saved, and a `Stopped` is raised."""
        return self._loop.stop_after

    @stop_after.setter
    def stop_after(self, steps: int | None) -> None:
        self._loop.stop_after = steps

    @property
    def is_saved(self) -> bool:
        """Is there a checkpoint of the current step, or one under way?"""
        return self._continuity.is_saved

    def save(self, *, is_best: bool = False, **facts: Any) -> None:
        """Save the run as it is now, or in the body of a step, as it is after it. Training goes on meanwhile.

        `is_best` marks a checkpoint that stays until there is a better one. `facts` are for its manifest. Where the
        loop is then left by `break`, it is saved by `finish` or `close`.
        """
        self._loop.save(is_best=is_best, **facts)

    def length(self, loader: Loader, *, epochs: int | None = None, steps: int | None = None) -> RunLength:
        """What durations are counted in, and how many updates there will have been after so many more."""
        return self._loop.length(loader, epochs, steps)

    @property
    def loss_scale(self) -> float | None:
        """With fp16, what losses are multiplied with at present."""
        return None if self._parts.scaler is None else self._parts.scaler.scale

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes of gradients that this rank sends in a step, and uncompressed would send; where they are compressed."""
        traffic = self._parts.strategy.traffic
        return {} if traffic is None else traffic.per_step()

    def evaluate(self, model: Any, dataset: Any, metrics: Metrics, *, batch: int = 256) -> dict[str, Any]:
        """Each metric over every sample, counted once: a float, or nested lists of numbers.

        `metrics(model, batch)` → {name: (sum, count)} for means, or with others of `lockstep.metrics` as values.
        `dataset` may be a loader as well. The batches it is cut into do not depend on the number of ranks.
        """
        loader = dataset if isinstance(dataset, EvaluationLoader) else EvaluationLoader(dataset, batch, self.world)
        loader = self._parts.strategy.share_evaluation(loader)
        precision = Precision(self.options.precision, self.world.device)  # a lane's own may be entered already
        with pulse.during(Phase.EVALUATING), self._loop.stopwatch.aside("evaluating"):
            results = evaluate(model, loader, metrics, self.world, seed=self.seed, precision=precision)
        self._parts.strategy.settle()
        return results

    def tell_at_start(self, **facts: Any) -> None:
        """Have the run's start event say so too; before the first step or round."""
        self._facts.update(facts)

    def log(self, **values: Any) -> None:
        """Put values into the run's events, on rank 0; all ranks may call it."""
        self._check_open("log")
        self.journal.events.emit("step", self._loop.number, **values)

    def log_image(self, name: str, image: Any) -> None:
        """Keep an image as RUN/media/NAME-STEP.png and show it in the loggers, on rank 0; all ranks may call it.

        A tensor or array of uint8, or of floats from 0 to 1 (what lies outside is clipped): height × width,
        height × width × 3, 3 × height × width or 1 × height × width. Without a folder it is not kept.
        """
        self._check_open("log_image")
        self.journal.keep_image(name, self._loop.number, image)

    def log_text(self, name: str, text: str) -> None:
        """Put a text into the run's events and show it in the loggers, on rank 0; all ranks may call it."""
        self._check_open("log_text")
        self.journal.keep_text(name, self._loop.number, text)

    def state_dict(self) -> dict[str, Any]:
        """Of a run without a folder: all that it needs to go on, for somebody else's checkpoint."""
        return {"parts": self._parts.values(), "step": self.step, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with the same models, optimizers and averages; between two calls of `steps`."""
        self._parts.load(state["parts"])
        self._continuity.progress = Progress(step=state["step"], batches=state["batches"])

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, under a name that says what it is. All ranks ask together."""
        return self._parts.state()

    def digest(self) -> str:
        """The sha256 of that state, in hex: equal digests, equal bits. All ranks ask together."""
        return digest(self._parts.tensors())

    def finish(self, **facts: Any) -> str:
        """End the run: its digest is compared over the ranks, and returned; its state is saved."""
        if self._continuity.is_ahead:
            raise UserError("an earlier attempt had come further: its script had more calls of run.steps(…)")
        pulse.enter(Phase.FINISHING)
        own = self.digest()
        if len(set(all_gather_object(own))) > 1:
            digests = all_gather_object(tensor_digests(self._parts.tensors()))
            names = dict.fromkeys(name for theirs in digests for name in theirs)
            name = next(name for name in names if len({theirs.get(name) for theirs in digests}) > 1)
            raise LockstepError(f"after step {self.step} the ranks differ in {name}: was it changed outside of a step?")
        if self._loop.is_closed:
            return own
        self._loop.save_as_asked()
        self._continuity.finish(**facts)
        self.journal.events.emit("end", self.step, digest=own, **self.traffic, **facts)
        self.close()
        return own

    def close(self, *, abandon: bool = False) -> None:
        """Let go of the folder and of the other ranks; `abandon`: without waiting for them. `finish` does it too."""
        self._loop.close(abandon=abandon)
        self._continuity.close(abandon=abandon)
        self.journal.close()

    def _choose_strategy(self, models: Sequence[nn.Module] = ()) -> None:
        choice = choose_strategy(self.world, self.options, models, keep_gradients=self._traces)
        self._parts.strategy, self._parts.why_strategy = choice

    def _check_open(self, what: str) -> None:
        """On every rank, or rank 0 alone would fail."""
        if self._loop.is_closed:
            raise UserError(f"run.{what}(…) after the run's end: run.open_steps(…) leaves it open, until run.finish()")
