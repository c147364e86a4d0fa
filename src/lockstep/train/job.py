"""One run of a recipe, from its config to a trained model in a run folder; the same code on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset, Subset

from lockstep.checkpoint.exchange import load_checkpoint
from lockstep.config.job import JobConfig
from lockstep.config.resolved import ResolvedSettings
from lockstep.config.schema import Config
from lockstep.data.evaluation import EvaluationLoader
from lockstep.errors import UserError
from lockstep.events.event import Sink
from lockstep.events.run_folder import RunFolder
from lockstep.train.callbacks import Callback, EarlyStopping, KeepBest
from lockstep.train.checkpoints import Saving
from lockstep.train.continuity import Resume
from lockstep.train.evaluation import evaluate
from lockstep.train.optimizer import build_optimizer
from lockstep.train.options import StepOptions
from lockstep.train.precision import Precision
from lockstep.train.recipe import Recipe, Splits, made_for
from lockstep.train.run import Run
from lockstep.train.schedule import build_schedule
from lockstep.train.trainer import Trainer
from lockstep.world.arithmetic import set_arithmetic
from lockstep.world.objects import broadcast_object
from lockstep.world.randomness import key_of, seed_streams
from lockstep.world.world import World

_QUICK_STEPS = 8
_QUICK_TEST_SAMPLES = 256


class Batch(NamedTuple):
    """What one update sees over all processes, and into how many lanes it is cut."""

    size: int
    lanes: int | Literal["auto"]


class Outcome(NamedTuple):
    step: int
    metrics: dict[str, Any]  # of the last evaluation; the recipe's first metric comes first
    digest: str
    folder: Path


def train_recipe(
    recipe: Recipe | type[Any],
    config: Config,
    world: World,
    folder: RunFolder,
    sinks: Sequence[Sink],
    *,
    resume: Resume = "auto",
    stop_after: int | None = None,
) -> Outcome:
    """Train, or go on where the folder says. `sinks` (the terminal, loggers) are told on rank 0 alone."""
    run = open_run(config, world, folder, sinks, resume=resume, stop_after=stop_after, **step_options(config))
    recipe = made_for(config, recipe)
    model = recipe.model(config)  # drawn from the seed's stream for weights, which Run has just begun
    batch = _batch_of_the_run(config, run.data_world, folder)
    splits = recipe.data(config)
    if config.quick:
        splits = splits._replace(train=_first(splits.train, _QUICK_STEPS * batch.size))
    # Before the folder is claimed: a mistake found here leaves no trace.
    train = run.loader(
        splits.train,
        batch.size,
        lanes=batch.lanes,
        tail=config.tail,
        collate=splits.collate,
        workers=config.workers,
        lanes_per_rank=config.lanes_per_rank,
    )
    test = _test_loader(config, splits, world)
    saving = Saving(**dict(config.checkpoint))
    trainer = Trainer(
        model,
        build_optimizer(model, config.optim, batch.size),
        recipe.loss,
        recipe.metrics,
        schedule=build_schedule(config.schedule),
        callbacks=[*_callbacks(config), *_own_callbacks(recipe, config)],
        run=run,
    )
    if config.average is not None:
        trainer.average = run.average(trainer.model, config.average.decay, warmup=config.average.warmup)
    steps = min(_QUICK_STEPS, config.steps or _QUICK_STEPS) if config.quick else config.steps
    epochs = None if steps else config.epochs
    try:
        trainer.train(train, test, epochs=epochs, steps=steps, evaluate_every=config.evaluate_every, saving=saving)
        metrics = trainer.metrics
        if conclude := getattr(recipe, "conclude", None):
            with trainer.evaluated_weights():
                conclude(run, trainer.model, config)
        digest = run.finish(metrics=metrics, folder=str(folder.path))
    except BaseException:
        run.close(abandon=True)
        raise
    return Outcome(run.step, metrics, digest, folder.path)


def evaluate_checkpoint(recipe: Recipe | type[Any], config: Config, world: World, source: Path) -> dict[str, Any]:
    """The recipe's metrics over its test set, of the weights in a run's newest checkpoint and nothing else of it."""
    set_arithmetic(world.device, tf32=config.tf32, deterministic=config.determinism == "lockstep")
    recipe = made_for(config, recipe)
    seed_streams(key_of(config.seed, "other weights"))  # those that are loaded must be all that counts
    model = recipe.model(config)
    load_checkpoint(model, source, weights="model" if config.average is None else "average", device=world.device)
    loader = _test_loader(config, recipe.data(config), world)
    precision = Precision(config.precision, world.device)
    return evaluate(model, loader, recipe.metrics, world, seed=config.seed, precision=precision)


def open_run(
    config: JobConfig,
    world: World,
    folder: RunFolder,
    sinks: Sequence[Sink],
    *,
    resume: Resume,
    stop_after: int | None,
    **options: Any,
) -> Run:
    """The run of a config, of training or of a search; `options`: see `StepOptions`."""
    run = Run(
        folder.path,
        world,
        resume=resume,
        trace=config.trace,
        log_every=config.log_every,
        sinks=sinks,
        settings=ResolvedSettings(config),
        facts={"recipe": config.recipe, "folder": str(folder.path)},
        **options,
    )
    if stop_after is not None:
        run.stop_after = stop_after
    return run


def step_options(config: Config) -> dict[str, Any]:
    options = {name: getattr(config, name) for name in StepOptions.names()}
    options["compression"] = dict(config.compression)
    if config.activation_checkpointing is not None:
        options["activation_checkpointing"] = dict(config.activation_checkpointing)
    options["fsdp"] = dict(config.fsdp)
    if not isinstance(config.parallel, str):
        options["parallel"] = dict(config.parallel)
    if not config.use_ddp:
        if config.parallel not in ("auto", "dp", "single"):
            raise UserError(f"use_ddp=false means parallel=dp, but parallel={config.parallel} is given: leave one away")
        options["parallel"] = "dp" if config.parallel == "auto" else config.parallel
    return options


def global_batch(config: Config, world: World) -> Batch:
    """The effective batch and its lanes at a run's first start, whichever way the config says them."""
    if config.batch.global_batch is not None:
        return Batch(config.batch.global_batch, config.lanes)
    assert config.batch.per_device is not None
    if config.accumulate is None:
        return Batch(config.batch.per_device * world.size, config.lanes)
    lanes = world.size * config.accumulate
    if lanes & (lanes - 1):
        raise UserError(
            f"accumulate={config.accumulate} on {world.size} processes makes {lanes} lanes: expected a power of two"
        )
    return Batch(config.batch.per_device * lanes, lanes)


def _batch_of_the_run(config: Config, world: World, folder: RunFolder) -> Batch:
    """What the first start made of it stays, on however many processes the run goes on."""
    known = broadcast_object(_known_batch(config, folder) if world.is_main else None)
    return global_batch(config, world) if known is None else Batch(*known)


def _known_batch(config: Config, folder: RunFolder) -> list[int] | None:
    if config.batch.per_device is None or not folder.facts.exists():
        return None
    try:
        fingerprint = folder.read_facts().get("fingerprint", {})
        changes = ResolvedSettings(config).changes_since(folder.config)
    except (UserError, OSError):  # it is told when the folder is claimed, to all ranks
        return None
    if any(change.startswith(("batch.", "lanes:", "accumulate:")) for change in changes):
        return None
    numbers = [fingerprint.get("global_batch"), fingerprint.get("lanes")]
    return numbers if all(isinstance(number, int) for number in numbers) else None


def _test_loader(config: Config, splits: Splits, world: World) -> EvaluationLoader:
    test = _first(splits.test, _QUICK_TEST_SAMPLES) if config.quick else splits.test
    return EvaluationLoader(test, config.evaluation_batch, world, workers=config.workers, collate=splits.collate)


def _callbacks(config: Config) -> list[Callback]:
    callbacks: list[Callback] = []
    if config.best is not None:
        callbacks.append(KeepBest(config.best.metric, config.best.mode))
    if (stopping := config.early_stopping) is not None:
        callbacks.append(EarlyStopping(stopping.metric, stopping.mode, stopping.patience, stopping.min_delta))
    return callbacks


def _own_callbacks(recipe: Recipe, config: Config) -> Sequence[Callback]:
    own = getattr(recipe, "callbacks", None)
    return () if own is None else own(config)


def _first(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    return Subset(dataset, range(min(count, len(dataset))))  # type: ignore[arg-type]
