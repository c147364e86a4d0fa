"""`Run`: saving, resuming, evaluation and logging for a training loop that you write yourself."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lockstep.config.argument_checks import as_whole, require_count
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.data.lanes import Tail
from lockstep.data.loader_factory import Loader, choose_loader, require_loader
from lockstep.data.sample_source import Collate
from lockstep.data.sample_workers import WorkerInit
from lockstep.data.torch_loader import Uneven
from lockstep.engine.compression import Compression
from lockstep.engine.lane_buffers import BufferRule
from lockstep.engine.state_digest import digest, tensor_digests
from lockstep.errors import LockstepError, UserError
from lockstep.events.event_log import PrintSink, Sink
from lockstep.events.run_folder import RunFolder
from lockstep.launcher.exit_callbacks import Ending, call_at_exit, forget_at_exit
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.train.activation_checkpointing import RecomputedModules, checkpoint_activations
from lockstep.train.evaluate import Metrics, evaluate
from lockstep.train.optim.ema import ExponentialMovingAverage
from lockstep.train.optim.lr_schedule import Factor, Schedule
from lockstep.train.optim.mixed_precision import MixedPrecision
from lockstep.train.optim.optimizer_classes import require_no_closure
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.resume.checkpointer import Checkpointer, Resume
from lockstep.train.resume.progress import Progress
from lockstep.train.round_loop import Round, RoundLoop
from lockstep.train.run_context import RunContext
from lockstep.train.run_log import RunLog
from lockstep.train.step import Step
from lockstep.train.step_options import Determinism, OnNonFinite, PrecisionName, StepOptions
from lockstep.train.strategies.fsdp_units import FsdpOptions
from lockstep.train.strategies.parallel_strategy import refuse_activation_checkpointing, unwrapped
from lockstep.train.strategies.strategy_factory import choose_strategy
from lockstep.train.train_state import Models, Resumable, TrainState
from lockstep.train.training_loop import TrainingLoop
from lockstep.train.verify_redirect import run_place
from lockstep.world.determinism import set_determinism_flags
from lockstep.world.keyed_random import key_of, seed_rngs
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.process_group import setup_distributed
from lockstep.world.script_process import prepare_script_process
from lockstep.world.world import World

Module = TypeVar("Module", bound=nn.Module)

logger = logging.getLogger("lockstep")


class Run:
    """One training run, on this rank. The number of ranks never changes its result.

    Example:
        def loss(model, batch):
            x, y = batch
            return F.cross_entropy(model(x), y, reduction="sum"), len(y)     # a sum and a count

        def accuracy(model, batch):
            x, y = batch
            return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}

        def main(world: lockstep.World) -> None:
            run = lockstep.Run("runs/mine", world, seed=7)
            model = run.prepare(make_model())
            optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
            train = run.loader(train_set, global_batch=512, lanes=8)
            for step in run.steps(train, epochs=10, save_every=100):
                step.accumulate(loss, model)
                step.update(optimizer)
                if step.every(100):
                    run.log(loss=step.loss, **run.evaluate(model, test_set, accuracy))

        if __name__ == "__main__":
            lockstep.launch(main)

    Run the same script again, and it continues from the newest checkpoint in the folder, on any number of processes; a
    finished run yields no more steps. Settings that would change the result must be the same: see `resume`.

    Args:
        folder: where to write events and checkpoints, and what to resume from. None: nothing is written.
        world: this process's place in the job, as `lockstep.launch` hands it to `main`. None: call
            `lockstep.setup_distributed()`.
        resume: what to do if continuing would change the result. "auto" refuses; "accept-drift" accepts another
            machine or library version; "force" also accepts other settings.
        shared_folder: write to the folder even if other users own it or can write to it.
        trace: write the digests of every step, so that `lockstep.first_difference` can tell where two runs diverge.
        log_every: steps between two lines of timing, and between two step events of a `Trainer`.
        sinks: where events go besides the folder (see `lockstep.loggers`); default: lines on standard output.
        seed: starts every random stream, including the one that weights are drawn from.
        determinism: "lockstep" for the same bits on any number of processes; "fast" for torch's own reductions.
        precision: "fp32", or "bf16" and "fp16" to run the lanes under autocast. fp16 scales the loss as well.
        tf32: allow TF32 in fp32 matrix products on a GPU.
        clip_norm: clip the gradients' global norm to this value.
        on_nonfinite: what to do about a NaN or an infinity in the loss or the gradients: "stop" the run, "skip" the
            update on every rank, or "ignore" it.
        buffers: how to combine the buffers that lanes change, by name pattern:
            `{"*.codebook": "mean" | "first" | "max"}`. Batch-norm statistics need no rule.
        bucket_mb: how many megabytes of gradients travel together.
        find_unused_parameters: as in DistributedDataParallel. For fast mode; lockstep mode needs no flag.
        compression: compress gradients, in fast mode: "fp16", "bf16", "powersgd" or a mapping with settings.
        activation_checkpointing: recompute activations in every prepared model: `{"every": k, "classes": [...]}`.
        parallel: "auto", "single", "dp", "ddp", "zero", "fsdp", or the sizes of a mesh: `{"data": 2, "shard": 4}`.
        fsdp: how `parallel="fsdp"` or a mesh divides a model; see `FsdpOptions`.
        tensor_plan: how layers are split along a mesh's axis `tensor`, by module name: `{"*.query": "column"}`.

    Attributes:
        world: this process's place in the job.
        options: the options that say how steps are computed, from `seed` to `tensor_plan`, as they were checked.
        log_every: as given.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        world: World | None = None,
        *,
        resume: Resume = "auto",
        shared_folder: bool = False,
        trace: bool = False,
        log_every: int = 10,
        sinks: Sequence[Sink] | None = None,
        seed: int = 0,
        determinism: Determinism = "lockstep",
        precision: PrecisionName = "fp32",
        tf32: bool = False,
        clip_norm: float | None = None,
        on_nonfinite: OnNonFinite = "stop",
        buffers: Mapping[str, BufferRule] | None = None,
        bucket_mb: float = 4.0,
        find_unused_parameters: bool = False,
        compression: str | Mapping[str, Any] | Compression = "none",
        activation_checkpointing: Mapping[str, Any] | None = None,
        parallel: str | Mapping[str, int | None] = "auto",
        fsdp: FsdpOptions | Mapping[str, Any] | None = None,
        tensor_plan: Mapping[str, str] | None = None,
    ) -> None:
        prepare_script_process()  # before errors of the arguments: [Note: one contract]
        self.options = StepOptions(
            seed=seed,
            determinism=determinism,
            precision=precision,
            tf32=tf32,
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
            buffers=buffers or {},
            bucket_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
            compression=compression,
            activation_checkpointing=activation_checkpointing,
            parallel=parallel,
            fsdp=FsdpOptions.read(fsdp or {}),
            tensor_plan={} if tensor_plan is None else tensor_plan,
        )
        require_count("log_every", log_every)
        if world is not None and not isinstance(world, World):
            raise UserError(f"Run(folder, world): the world is what lockstep.launch hands to main, not {world!r}")
        if trace and folder is None:
            raise UserError("trace=True needs a folder to write to")
        if resume not in get_args(Resume):
            raise UserError(f"resume={resume!r}: expected one of {', '.join(get_args(Resume))}")
        self.world = setup_distributed() if world is None else world
        set_determinism_flags(self.world.device, tf32=tf32, deterministic=determinism == "lockstep")
        self.log_every = log_every
        self._has_warned_unsaved = False
        place = run_place(folder, trace=trace)
        self._is_traced = place.trace is not None
        self._state = TrainState()
        self._choose_strategy()
        self.run_log = RunLog(
            None if place.folder is None else RunFolder(place.folder, is_shared=shared_folder),
            self.world,
            [PrintSink()] if sinks is None and folder is not None else sinks or [],
            trace=place.trace,
            force=resume == "force",
        )
        self._recomputed = RecomputedModules(activation_checkpointing, self.run_log.start_info)
        self._checkpointer = Checkpointer(self.run_log, self.world, self._state, resume)
        context = RunContext(self.world, self.options, self._state, self.run_log, self._checkpointer)
        self._loop = TrainingLoop(context, log_every)
        self._loop.stop_after = place.stop_after
        self._round_loop = RoundLoop(context)
        seed_rngs(key_of(self.seed, "weights"))

    @property
    def folder(self) -> Path | None:
        """Where the run writes, and what it resumes from; None without a folder. `lockstep verify` gives it another."""
        return None if self.run_log.folder is None else self.run_log.folder.path

    @property
    def seed(self) -> int:
        """What every random stream starts from."""
        return self.options.seed

    @property
    def data_world(self) -> World:
        """This rank's place among the ranks that have different samples: all ranks, except along a `tensor` axis."""
        return self._state.strategy.data_world

    @property
    def step(self) -> int:
        """Updates completed."""
        return self._loop.step

    @property
    def batches(self) -> int:
        """Global batches consumed."""
        return self._checkpointer.progress.batches

    # -- what is trained

    def prepare(self, model: Module) -> Module:
        """Move the module to this rank's device and give it rank 0's weights and buffers; returns the same module.

        A DataParallel or DistributedDataParallel around it is removed: the run reduces gradients itself.
        """
        if not isinstance(model, nn.Module):
            kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
            raise UserError(f"run.prepare(…) takes a module, not {kind}: give it the model itself, as in Model()")
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            raise UserError("the model has lazy modules without weights yet: run a batch through it first")
        bare = unwrapped(model)
        if not self._state.has_model(bare):
            self._require_before_steps("prepare")
            if self.options.parallel == "auto" and self._state.strategy.can_be_replaced:
                self._choose_strategy([*self._state.models.values(), bare])  # the models' sizes count
            self._recomputed.begin(bare)
            self._state.strategy.place(bare)
            self._state.add_model(bare)
        return cast(Module, self._state.strategy.to_call(bare))

    def optimizer(
        self,
        models: Models,
        optimizer: Optimizer | Callable[[list[Parameter]], Optimizer],
        schedule: Schedule | Factor | None = None,
    ) -> Optimizer:
        """Register an optimizer for one or several prepared models, so that it is stepped, saved and resumed.

        Args:
            models: the prepared model or models that it trains.
            optimizer: a ready-made one, `torch.optim.AdamW(model.parameters(), lr=3e-4)`, or a function that makes
                one of the models' trainable parameters, `lambda params: torch.optim.AdamW(params, lr=3e-4)`.
            schedule: its learning rates, as in `lockstep.Schedule.cosine(warmup="500 steps")`, or a function from the
                updates completed to a factor.

        Returns the optimizer, to be given to `step.update`.
        """
        if isinstance(models, Optimizer):
            raise UserError("run.optimizer(…): the model comes first, run.optimizer(model, optimizer)")
        if isinstance(schedule, LRScheduler):
            raise UserError(
                f"run.optimizer(…, schedule={type(schedule).__name__}): a torch scheduler is stepped by the script: "
                "give lockstep.Schedule.cosine(…) or a function from the updates completed to a factor, or keep it and "
                'call run.register_state("scheduler", scheduler)'
            )
        if schedule is not None and not isinstance(schedule, Schedule) and not callable(schedule):
            raise UserError(f"run.optimizer(…, schedule={schedule!r}): expected a lockstep.Schedule or a function")
        made = optimizer if isinstance(optimizer, Optimizer) else optimizer(self._state.parameters_of(models))
        if not isinstance(made, Optimizer):
            raise UserError(f"run.optimizer(…): expected a torch optimizer or a function that makes one, not {made!r}")
        self._state.strategy.adopt(made)
        require_no_closure(type(made))
        self._state.add_optimizer(made)
        if schedule is not None:
            self._state.schedules[made] = schedule
        return made

    def ema(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> ExponentialMovingAverage:
        """Keep an exponential moving average of a prepared model's weights; every update moves it.

        Example:
            ema = run.ema(model, 0.999)
            with ema.applied():  # the model has the averaged weights inside
                scores = run.evaluate(model, test_set, metrics)

        Args:
            model: a prepared model.
            decay: how much of the average each update keeps.
            warmup: begin with a smaller decay, so that early averages are not stuck at the initial weights.

        Returns the average. It is saved and resumed with the run.
        """
        if not self._state.parameter_names().keys() >= set(model.parameters()):
            raise UserError("call run.prepare(model) before run.ema(model): it may give the model other weights")
        self._require_before_steps("ema")
        average = ExponentialMovingAverage(model, decay, warmup=warmup)
        self._state.add_average(average)
        return average

    def has_ema(self, average: ExponentialMovingAverage) -> bool:
        """Return whether an average was made by this run's `ema`."""
        return self._state.has_average(average)

    def register_state(self, name: str, thing: Resumable, *, in_digest: bool = False) -> None:
        """Save something else in every checkpoint and restore it on resume: a curriculum, a replay buffer.

        Call it before `run.steps(…)`, which restores it. Example: `run.register_state("curriculum", curriculum)`.

        Args:
            name: what it is called in the checkpoint.
            thing: anything with `state_dict` and `load_state_dict`, of plain values, tensors and numpy arrays.
            in_digest: count its tensors and numbers in the run's digest; they must be equal on all ranks.
        """
        self._require_before_steps("register_state")
        self._state.register(name, thing, in_digest=in_digest, once=self.folder is not None)

    def checkpoint_activations(self, model: nn.Module, *, every: int = 1, classes: Sequence[str] = ()) -> str:
        """Recompute some modules' activations in the backward pass: less memory, more time, the same bits.

        Args:
            model: a model, prepared or not.
            every: recompute every `every`-th of the modules chosen.
            classes: the names of the module classes to choose. Default: the blocks that the model repeats.

        Returns a description of the modules chosen.
        """
        if isinstance(model, nn.DataParallel):
            refuse_activation_checkpointing()
        chosen = checkpoint_activations(unwrapped(model), every=every, classes=classes)
        self._recomputed.note(unwrapped(model), chosen)
        return str(chosen)

    # -- data and steps

    def loader(
        self,
        dataset: Any,
        global_batch: int | None = None,
        *,
        lanes: int | Literal["auto"] = "auto",
        tail: Tail | None = None,
        shuffle: bool | None = None,
        lanes_per_rank: Sequence[int] | None = None,
        workers: int | None = None,
        prefetch: int | None = None,
        collate: Collate | None = None,
        worker_init: WorkerInit | None = None,
        uneven: Uneven | None = None,
    ) -> Loader:
        """Return a loader of global batches, cut into lanes.

        Args:
            dataset: a map-style or iterable data set, or a torch DataLoader. A DataLoader is rebuilt from its data
                set, collate function and workers; one with a custom sampler is used as it is, in fast mode.
            global_batch: samples of one step, over all ranks. Of a DataLoader, its batch size is the default.
            lanes: how many parts a global batch is cut into, a power of two. At most this many ranks can share it.
            tail: what to do with the samples left over at an epoch's end: "drop" them (default), "short" for a
                smaller last batch, "pad" for full batches with weights.
            shuffle: read samples in a new random order in each epoch (default), or in the data set's own.
            lanes_per_rank: how many lanes each rank runs, for devices of unequal speed.
            workers: processes that read samples; 0 (default): this process reads them.
            prefetch: global batches that workers read ahead; 2 by default.
            collate: how samples become a batch; torch's default collate function by default.
            worker_init: called first in each worker, with the worker's number.
            uneven: for a DataLoader with a custom sampler: "cut" ends an epoch with the rank that has the fewest
                batches, "join" with the rank that has the most.

        Returns the loader, to be given to `run.steps`.
        """
        return choose_loader(
            dataset,
            self.data_world,
            seed=self.seed,
            global_batch=global_batch,
            lanes=lanes,
            lanes_per_rank=lanes_per_rank,
            shuffle=shuffle,
            tail=tail,
            workers=workers,
            prefetch=prefetch,
            collate=collate,
            worker_init=worker_init,
            uneven=uneven,
        )

    def steps(
        self,
        loader: Loader | DataLoader[Any],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        save_every: int | str | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        checkpoints: CheckpointPolicy | None = None,
        finish: bool = True,
    ) -> Iterator[Step]:
        """Yield the steps of this many epochs or updates, less those that an earlier attempt has made.

        The run resumes here: when the loop starts, models, optimizers and registered state have the values of the
        newest checkpoint.

        Args:
            loader: what `run.loader` returned, or a torch DataLoader, whose batch size is the global batch.
            epochs: how many epochs to train. Give either this or `steps`.
            steps: how many updates to make.
            save_every: save in between as well, not only at the end: `100` steps, or `"1 epoch"`.
            keep: how many of the newest checkpoints stay.
            keep_every: keep the checkpoints of every `keep_every`-th step as well.
            checkpoints: the three above in one value, instead of them.
            finish: call `run.finish()` after the last step; then the run takes no more logs. With False, call it
                yourself, as after several loops in one script.
        """
        if (epochs is None) == (steps is None):
            problem = "give epochs= or steps=" if epochs is None else "give either epochs= or steps=, not both"
            raise UserError(f"run.steps(…): {problem}")
        epochs = None if epochs is None else as_whole("epochs", epochs)
        steps = None if steps is None else as_whole("steps", steps)
        loader = self.loader(loader) if isinstance(loader, DataLoader) else require_loader("run.steps", loader)
        policy = CheckpointPolicy(save_every, keep, keep_every)
        if checkpoints is not None:
            if policy != CheckpointPolicy():
                raise UserError("run.steps(…): give either checkpoints=, or save_every=, keep= and keep_every=")
            if not isinstance(checkpoints, CheckpointPolicy):
                raise UserError(f"checkpoints={checkpoints!r}: expected a lockstep.CheckpointPolicy(every=…)")
            policy = checkpoints
        if self.folder is None and policy.every is not None and self.world.is_main:
            logger.warning("save_every=%s has no effect: the run has no folder, Run(folder, …)", policy.every)
        self._recomputed.check(list(self._state.models.values()))
        self._close_at_exit()
        return self._loop.steps(loader, epochs, steps, policy, self.finish if finish else None)

    def end_steps(self) -> None:
        """End `run.steps(…)` after the current step, as if it were the last one requested. All ranks must call it."""
        self._loop.end_steps()

    def rounds(
        self,
        count: int,
        *,
        save_every: int = 1,
        checkpoints: CheckpointPolicy | None = None,
        settings: Mapping[str, Any] | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> Iterator[Round]:
        """Yield numbered rounds, less those of earlier attempts: for a loop that does not train by steps.

        Example:
            run.register_state("population", population, in_digest=True)  # what the rounds change
            for each in run.rounds(100):
                population.evolve(each.number)  # from 1
                each.is_last = population.has_converged()
            run.finish()

        Args:
            count: how many rounds.
            save_every: rounds between two checkpoints.
            checkpoints: which checkpoints stay.
            settings: plain values that the rounds depend on, which no attempt may change. In a run with a config, the
                config is used instead.
            is_over: called on all ranks if an earlier attempt finished after fewer rounds; it returns whether the run
                is still finished. By default it is, if that attempt ended early by `Round.is_last`.
        """
        require_count("save_every", save_every)
        policy = checkpoints or CheckpointPolicy()
        self._close_at_exit()
        return self._round_loop.rounds(count, save_every, policy, self.stop_after, settings or {}, is_over)

    @property
    def resumes_later(self) -> bool:
        """Whether the checkpoint to resume from was saved in a later call of `run.steps` than those made so far."""
        return self._checkpointer.found_progress is not None

    @property
    def stop_after(self) -> int | None:
        """Stop after this many updates: the run is saved, and `Stopped` is raised. None: run to the end."""
        return self._loop.stop_after

    @stop_after.setter
    def stop_after(self, steps: int | None) -> None:
        self._loop.stop_after = steps

    @property
    def checkpoint_metadata(self) -> dict[str, Any]:
        """Plain values that the manifest of every checkpoint saved from now on includes; change it as you like."""
        return self._loop.checkpoint_metadata

    def save(self, *, is_best: bool = False, **metadata: Any) -> None:
        """Save the run now, or, called inside a step, after that step. Training continues while files are written.

        Args:
            is_best: this checkpoint stays until there is a better one.
            metadata: plain values for the checkpoint's manifest.
        """
        if self.folder is None and self.world.is_main and not self._has_warned_unsaved:
            self._has_warned_unsaved = True
            logger.warning("run.save() has no effect: the run has no folder, Run(folder, …)")
        self._loop.save(is_best=is_best, metadata=metadata)

    @property
    def loss_scale(self) -> float | None:
        """With fp16, the current factor that losses are multiplied by."""
        return None if self._state.scaler is None else self._state.scaler.scale

    @property
    def traffic(self) -> dict[str, int]:
        """With compression, the bytes of gradients that this rank sends in a step, and would send uncompressed."""
        traffic = self._state.strategy.traffic
        return {} if traffic is None else traffic.per_step()

    # -- evaluation and logging

    def evaluate(self, model: Any, dataset: Any, metrics: Metrics, *, batch: int = 256) -> dict[str, Any]:
        """Compute each metric over every sample of a data set, counted exactly once, on any number of ranks.

        All ranks must call it.

        Args:
            model: the model that `metrics` is called with; it is in evaluation mode meanwhile.
            dataset: a data set, a torch DataLoader, or a `lockstep.EvaluationLoader`.
            metrics: `metrics(model, batch)` returns `{name: (sum, count)}` for means, or values of `lockstep.metrics`.
            batch: samples in a batch. The batches do not depend on the number of ranks.

        Returns a number, or nested lists of numbers, for each metric; the same on every rank.
        """
        loader = dataset if isinstance(dataset, EvaluationLoader) else EvaluationLoader(dataset, batch, self.world)
        loader = self._state.strategy.share_evaluation(loader)
        precision = MixedPrecision(self.options.precision, self.world.device)  # the step's own may be entered already
        with heartbeat.during(Phase.EVALUATING), self._loop.timer.aside("evaluating"):
            results = evaluate(model, loader, metrics, self.world, seed=self.seed, precision=precision)
        self._state.strategy.settle()
        return results

    def log(self, **values: Any) -> None:
        """Write values into the run's events, on rank 0; all ranks may call it.

        `values`: numbers, texts, or lists and dictionaries of them. A tensor of one element counts as a number.
        """
        self._check_open("log")
        self.run_log.log_values(self._loop.number, values)

    def log_image(self, name: str, image: Any) -> None:
        """Write an image to RUN/media/NAME-STEP.png and show it in the loggers, on rank 0; all ranks may call it.

        Args:
            name: letters, digits, `-` and `_`.
            image: a tensor or array of uint8, or of floats from 0 to 1: height × width, height × width × 3,
                3 × height × width or 1 × height × width. Without a folder it is dropped.
        """
        self._check_open("log_image")
        self.run_log.log_image(name, self._loop.number, image)

    def log_text(self, name: str, text: str) -> None:
        """Write a text into the run's events and show it in the loggers, on rank 0; all ranks may call it.

        Args:
            name: what the loggers call it.
            text: the text.
        """
        self._check_open("log_text")
        self.run_log.log_text(name, self._loop.number, text)

    # -- state and end

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run without a folder needs to continue, for your own checkpoints."""
        return {"parts": self._state.values(), "step": self.step, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, with the same models, optimizers and averages, outside `steps`."""
        self._state.load(state["parts"])
        self._checkpointer.progress = Progress(step=state["step"], batches=state["batches"])

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that training changes, by name. All ranks must call it together."""
        return self._state.state()

    def digest(self) -> str:
        """Return the sha256 of `state()`, in hex: equal digests mean equal bits. All ranks must call it together."""
        return digest(self._state.tensors())

    def finish(self, **metadata: Any) -> str:
        """End the run: check that all ranks have the same state, save it, and return its digest.

        `metadata`: plain values for the last checkpoint's manifest and the end event.
        """
        if self._loop.is_in_step:
            raise UserError(
                "run.finish() inside a step: call it after the loop over run.steps(…), or run.end_steps() to end that "
                "loop after this step"
            )
        if self.resumes_later:
            raise UserError(
                "the checkpoint was saved in a later call of run.steps(…) than this script makes: restore the missing "
                "calls, or choose another folder"
            )
        heartbeat.enter(Phase.FINISHING)
        own = self.digest()
        if len(set(all_gather_object(own))) > 1:
            digests = all_gather_object(tensor_digests(self._state.tensors()))
            names = dict.fromkeys(name for theirs in digests for name in theirs)
            name = next(name for name in names if len({theirs.get(name) for theirs in digests}) > 1)
            raise LockstepError(
                f"after step {self.step} the ranks differ in {name}: change it inside a step, or in the same way on "
                "every rank"
            )
        if self._loop.is_closed:
            return own
        self._loop.save_if_requested()
        self._checkpointer.finish(self.checkpoint_metadata | metadata)
        self.run_log.events.emit("end", self.step, digest=own, **self.traffic, **metadata)
        self.close()
        return own

    def close(self, *, abandon: bool = False) -> None:
        """Release the folder and the engine, as `finish` does. `abandon`: do not wait for a save or for other ranks."""
        forget_at_exit(self)
        self._loop.close(abandon=abandon)
        self._checkpointer.close(abandon=abandon)
        self.run_log.close()

    def _close_at_exit(self) -> None:
        if self.folder is not None:
            call_at_exit(self, self._leave)

    def _leave(self, ending: Ending) -> None:
        """Close a run that the script has left open: by `break`, `return` or an exception, or without `finish`."""
        if ending is Ending.FAILED:
            self._checkpointer.wait_for_save()
            self.close(abandon=True)
            return
        can_save = ending is Ending.NORMAL and (self.world.size == 1 or dist.is_initialized())
        if not self._checkpointer.is_saved:
            text = f"the script has left the run after step {self.step} without run.finish(): "
            if can_save and self._loop.is_begun:  # a round that was left halfway is repeated
                self.run_log.log_incident(self.step, text + "it is saved as it is, and the same command continues it")
                self._loop.save_if_requested()
                self._checkpointer.leave(self.checkpoint_metadata)
            else:
                self.run_log.log_incident(self.step, text + "what came after the last checkpoint is lost")
        self.close(abandon=not can_save)

    def _choose_strategy(self, models: Sequence[nn.Module] = ()) -> None:
        choice = choose_strategy(self.world, self.options, models, keep_gradients=self._is_traced)
        self._state.strategy, self._state.why_strategy = choice

    def _require_before_steps(self, what: str) -> None:
        """Raise inside a step: after a resume, the checkpoint would be loaded before the script comes here again."""
        if self._loop.is_in_step:
            raise UserError(f"run.{what}(…) inside a step: call it before run.steps(…), which restores what is saved")

    def _check_open(self, what: str) -> None:
        """Raise if the run has ended. Called on every rank, so that they all fail alike."""
        if self._loop.is_closed:
            raise UserError(
                f"run.{what}(…) after the run's end: give finish=False to run.steps or trainer.train, and call "
                "run.finish() last"
            )
