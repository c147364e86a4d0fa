"""Trains a recipe: from its config to a trained model in a run folder; the same code on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset, Subset

from lockstep.checkpoint.weights_io import load_checkpoint
from lockstep.config.folder_remedies import IN_COMMAND, FolderRemedies
from lockstep.config.job_schema import JobConfig
from lockstep.config.plurals import count_noun
from lockstep.config.resolved_config import ResolvedSettings
from lockstep.config.train_schema import Config
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.errors import UserError
from lockstep.events.event_log import Sink
from lockstep.events.run_folder import RunFolder
from lockstep.train.callbacks import Callback, EarlyStopping, SaveBest
from lockstep.train.evaluate import evaluate
from lockstep.train.optim.lr_schedule import build_schedule
from lockstep.train.optim.mixed_precision import MixedPrecision
from lockstep.train.optim.optimizer_factory import build_optimizer
from lockstep.train.recipe import Recipe, Splits, recipe_for_run
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.resume.checkpointer import Resume
from lockstep.train.run import Run
from lockstep.train.step_options import StepOptions
from lockstep.train.trainer import Trainer
from lockstep.world.determinism import set_determinism_flags
from lockstep.world.keyed_random import key_of, seed_rngs
from lockstep.world.object_collectives import broadcast_object
from lockstep.world.world import World

_QUICK_STEPS = 8
_QUICK_TEST_SAMPLES = 256


class BatchPlan(NamedTuple):
    """The samples of one update over all processes, and how many lanes they are cut into."""

    size: int
    lanes: int | Literal["auto"]


class TrainingOutcome(NamedTuple):
    """How a training ended."""

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
) -> TrainingOutcome:
    """Train a recipe, or resume it from the folder. `sinks` (the terminal, loggers) receive rank 0's events."""
    run = open_run(config, world, folder, sinks, resume=resume, stop_after=stop_after, **run_options(config))
    recipe = recipe_for_run(config, recipe)
    model = recipe.model(config)  # drawn from the random stream for weights, which `Run` has just started
    batch = _batch_of_the_run(config, run.data_world, folder)
    splits = recipe.data(config)
    if config.quick:
        splits = splits._replace(train=_first(splits.train, _QUICK_STEPS * batch.size))
    # Before the folder is claimed: a mistake found here leaves no files behind.
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
    checkpoints = CheckpointPolicy(**dict(config.checkpoint))
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
        trainer.ema = run.ema(trainer.model, config.average.decay, warmup=config.average.warmup)
    steps = min(_QUICK_STEPS, config.steps or _QUICK_STEPS) if config.quick else config.steps
    epochs = None if steps else config.epochs
    try:
        trainer.train(
            train,
            test,
            epochs=epochs,
            steps=steps,
            evaluate_every=config.evaluate_every,
            checkpoints=checkpoints,
            finish=False,
        )
        metrics = trainer.metrics
        if conclude := getattr(recipe, "conclude", None):
            with trainer.evaluated_weights():
                conclude(run, trainer.model, config)
        digest = run.finish(metrics=metrics, folder=str(folder.path))
    except BaseException:
        run.close(abandon=True)
        raise
    return TrainingOutcome(run.step, metrics, digest, folder.path)


def evaluate_checkpoint(recipe: Recipe | type[Any], config: Config, world: World, source: Path) -> dict[str, Any]:
    """Return the recipe's metrics over its test set, with the weights of a run's newest checkpoint."""
    set_determinism_flags(world.device, tf32=config.tf32, deterministic=config.determinism == "lockstep")
    recipe = recipe_for_run(config, recipe)
    seed_rngs(key_of(config.seed, "other weights"))  # any weights but those that are loaded
    model = recipe.model(config)
    load_checkpoint(model, source, weights="model" if config.average is None else "average", device=world.device)
    loader = _test_loader(config, recipe.data(config), world)
    precision = MixedPrecision(config.precision, world.device)
    return evaluate(model, loader, recipe.metrics, world, seed=config.seed, precision=precision)


def open_run(
    config: JobConfig,
    world: World,
    folder: RunFolder,
    sinks: Sequence[Sink],
    *,
    resume: Resume,
    stop_after: int | None,
    remedies: FolderRemedies = IN_COMMAND,
    **options: Any,
) -> Run:
    """Open the run of a config, of training or of a search; `options`: as for `Run`."""
    run = Run(
        folder.path,
        world,
        resume=resume,
        shared_folder=folder.is_shared,
        trace=config.trace,
        log_every=config.log_every,
        sinks=sinks,
        **options,
    )
    run.run_log.settings = ResolvedSettings(config, remedies)
    run.run_log.start_info |= {"recipe": config.recipe, "folder": str(folder.path)}
    if stop_after is not None:
        run.stop_after = stop_after
    return run


def run_options(config: Config) -> dict[str, Any]:
    """Return the options of `Run` that a config holds."""
    options = {name: getattr(config, name) for name in StepOptions.names()}
    options["compression"] = dict(config.compression)
    if config.activation_checkpointing is not None:
        options["activation_checkpointing"] = dict(config.activation_checkpointing)
    options["fsdp"] = dict(config.fsdp)
    if not isinstance(config.parallel, str):
        options["parallel"] = dict(config.parallel)
    if not config.use_ddp:
        if config.parallel not in ("auto", "dp", "single"):
            raise UserError(f"use_ddp=false means parallel=dp, but parallel={config.parallel} is given: omit one")
        options["parallel"] = "dp" if config.parallel == "auto" else config.parallel
    return options


def plan_batch(config: Config, world: World) -> BatchPlan:
    """Return the global batch and its lanes at a run's first start, in whichever way the config gives them."""
    if config.batch.global_batch is not None:
        return BatchPlan(config.batch.global_batch, config.lanes)
    assert config.batch.per_device is not None
    if config.accumulate is None:
        return BatchPlan(config.batch.per_device * world.size, config.lanes)
    lanes = world.size * config.accumulate
    if lanes & (lanes - 1):
        raise UserError(
            f"accumulate={config.accumulate} on {count_noun(world.size, 'process')} makes {lanes} lanes: "
            "expected a power of two"
        )
    return BatchPlan(config.batch.per_device * lanes, lanes)


def _batch_of_the_run(config: Config, world: World, folder: RunFolder) -> BatchPlan:
    """Return the batch that the run had at its first start, whatever the number of processes is now."""
    known = broadcast_object(_known_batch(config, folder) if world.is_main else None)
    return plan_batch(config, world) if known is None else BatchPlan(*known)


def _known_batch(config: Config, folder: RunFolder) -> list[int] | None:
    if config.batch.per_device is None or not folder.run_json.exists():
        return None
    try:
        fingerprint = folder.read_run_json().get("fingerprint", {})
        changes = ResolvedSettings(config).changes_since(folder.config)
    except (UserError, OSError):  # it is reported when the folder is claimed
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
        callbacks.append(SaveBest(config.best.metric, config.best.mode))
    if (stopping := config.early_stopping) is not None:
        callbacks.append(EarlyStopping(stopping.metric, stopping.mode, stopping.patience, stopping.min_delta))
    return callbacks


def _own_callbacks(recipe: Recipe, config: Config) -> Sequence[Callback]:
    own = getattr(recipe, "callbacks", None)
    return () if own is None else own(config)


def _first(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    return Subset(dataset, range(min(count, len(dataset))))  # type: ignore[arg-type]
