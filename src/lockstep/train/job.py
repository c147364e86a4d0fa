"""One run of a recipe, from its config to a trained model in a run folder; the same code on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset, Subset

from lockstep.checkpoint.store import save_checkpoint
from lockstep.config.resolved import ResolvedSettings
from lockstep.config.schema import Config
from lockstep.data.evaluation import EvaluationLoader
from lockstep.errors import UserError
from lockstep.events.event import Sink
from lockstep.events.run_folder import RunFolder
from lockstep.train.optimizer import build_optimizer
from lockstep.train.recipe import Recipe, Splits
from lockstep.train.run import Run
from lockstep.train.trainer import Trainer
from lockstep.world.collectives import barrier
from lockstep.world.world import World

_QUICK_STEPS = 8
_QUICK_TEST_SAMPLES = 256


class Batch(NamedTuple):
    """What one update sees over all processes, and into how many lanes it is cut."""

    size: int
    lanes: int | Literal["auto"]


class Outcome(NamedTuple):
    step: int
    metrics: dict[str, float]  # of the last evaluation; the recipe's first metric comes first
    digest: str
    folder: Path


def train_recipe(recipe: Recipe, config: Config, world: World, folder: RunFolder, sinks: Sequence[Sink]) -> Outcome:
    """Train. `sinks` (the terminal, loggers) are told on rank 0 alone, which also alone writes what is shared."""
    if world.size > 1 and not config.use_ddp:
        raise UserError(f"use_ddp=false means one process, but {world.size} were started: leave -n away")
    run = Run(
        folder.path,
        world,
        seed=config.seed,
        determinism=config.determinism,
        clip_norm=config.clip_norm,
        buffers=config.buffers,
        bucket_mb=config.bucket_mb,
        find_unused_parameters=config.find_unused_parameters,
        trace=config.trace,
        log_every=config.log_every,
        sinks=sinks,
        settings=ResolvedSettings(config),
        facts={"recipe": config.recipe, "folder": str(folder.path)},
    )
    model = recipe.model(config)  # drawn from the seed's stream for weights, which Run has just begun
    batch = global_batch(config, world)
    splits = recipe.data(config)
    if config.quick:
        splits = Splits(_first(splits.train, _QUICK_STEPS * batch.size), _first(splits.test, _QUICK_TEST_SAMPLES))
    # Before the folder is claimed: a mistake found here leaves no trace.
    train = run.loader(
        splits.train,
        batch.size,
        lanes=batch.lanes,
        tail=config.tail,
        workers=config.workers,
        lanes_per_rank=config.lanes_per_rank,
    )
    test = EvaluationLoader(splits.test, config.evaluation_batch, world, workers=config.workers)
    trainer = Trainer(model, build_optimizer(model, config.optim, batch.size), recipe.loss, recipe.metrics, run=run)
    steps = _QUICK_STEPS if config.quick else config.steps
    try:
        history = trainer.train(train, test, epochs=None if steps else config.epochs, steps=steps)
        metrics = {name: value for name, value in history[-1].items() if name != "step"}
        if world.is_main:
            checkpoint = save_checkpoint(folder.checkpoints, run.step, trainer.model.state_dict(), {"metrics": metrics})
            run.journal.events.emit("checkpoint", run.step, path=str(checkpoint.relative_to(folder.path)))
        barrier()  # nobody is done before the result is on the disk
        digest = run.finish(metrics=metrics, folder=str(folder.path))
    except BaseException:
        run.close(abandon=True)
        raise
    return Outcome(run.step, metrics, digest, folder.path)


def global_batch(config: Config, world: World) -> Batch:
    """The effective batch and its lanes, whichever way the config says them."""
    if config.batch.global_batch is not None:
        return Batch(config.batch.global_batch, config.lanes)
    assert config.batch.per_device is not None
    if config.accumulate is None:
        return Batch(config.batch.per_device * world.size, config.lanes)
    return Batch(config.batch.per_device * world.size * config.accumulate, world.size * config.accumulate)


def _first(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    return Subset(dataset, range(min(count, len(dataset))))  # type: ignore[arg-type]
