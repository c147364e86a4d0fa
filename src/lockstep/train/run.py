"""One run of a recipe, from its config to a trained model in a run folder; the same code on every rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from lockstep.checkpoint.store import save_checkpoint
from lockstep.config.schema import Config
from lockstep.data.batches import evaluation_loader, train_loader
from lockstep.errors import UserError
from lockstep.events.event import Events, Sink
from lockstep.events.jsonl import JsonLines
from lockstep.events.run_folder import Claim, RunFolder
from lockstep.train.optimizer import build_optimizer
from lockstep.train.recipe import Recipe, Splits
from lockstep.train.trainer import Trainer
from lockstep.world.collectives import barrier
from lockstep.world.fingerprint import fingerprint
from lockstep.world.objects import broadcast_object
from lockstep.world.randomness import key_of
from lockstep.world.world import World

_QUICK_STEPS = 8
_QUICK_TEST_SAMPLES = 256


class Job(NamedTuple):
    """What a recipe and a config come to on this rank."""

    model: nn.Module
    train: DataLoader[Any]
    test: DataLoader[Any]
    batch: int  # over all ranks
    steps: int


class Outcome(NamedTuple):
    step: int
    metrics: dict[str, float]  # of the last evaluation; the recipe's first metric comes first
    folder: Path


def train_recipe(recipe: Recipe, config: Config, world: World, folder: RunFolder, sinks: Sequence[Sink]) -> Outcome:
    """Train. `sinks` (the terminal, loggers) are told on rank 0 alone, which also alone writes what is shared."""
    if world.size > 1 and not config.use_ddp:
        raise UserError(f"use_ddp=false means one process, but {world.size} were started: leave -n away")
    job = _prepare(recipe, config, world)  # before the folder is claimed: a mistake found here leaves no trace
    with _claimed(folder, config, world) as attempt:
        rank_log = JsonLines(folder.rank_log(world.rank))
        events = Events([JsonLines(folder.events), *sinks] if world.is_main else [], attempt)
        try:
            return _train(recipe, config, job, world, folder, events, rank_log)
        finally:
            events.close()
            rank_log.close()


def global_batch(config: Config, world: World) -> int:
    """The effective batch: what one optimizer step sees over all processes."""
    if config.batch.global_batch is not None:
        return config.batch.global_batch
    assert config.batch.per_device is not None
    return config.batch.per_device * world.size


def _prepare(recipe: Recipe, config: Config, world: World) -> Job:
    # Equal weights on every rank to begin with; afterwards each rank draws from a stream of its own.
    torch.manual_seed(key_of(config.seed, "weights"))
    model = recipe.model(config).to(world.device)
    torch.manual_seed(key_of(config.seed, "rank", world.rank))

    batch = global_batch(config, world)
    splits = recipe.data(config)
    if config.quick:
        splits = Splits(_first(splits.train, _QUICK_STEPS * batch), _first(splits.test, _QUICK_TEST_SAMPLES))
    train = train_loader(splits.train, batch, world, config.seed)
    return Job(
        model=model,
        train=train,
        test=evaluation_loader(splits.test, batch, world),
        batch=batch,
        steps=_QUICK_STEPS if config.quick else config.steps or (config.epochs or 1) * len(train),
    )


def _train(
    recipe: Recipe, config: Config, job: Job, world: World, folder: RunFolder, events: Events, rank_log: Sink
) -> Outcome:
    events.emit(
        "start",
        0,
        recipe=config.recipe,
        processes=world.size,
        device=world.device.type,
        backend=world.backend,
        launcher=world.launcher,
        effective_batch=job.batch,
        total_steps=job.steps,
        parameters=sum(parameter.numel() for parameter in job.model.parameters()),
        folder=str(folder.path),
    )
    trainer = Trainer(
        job.model,
        build_optimizer(job.model.parameters(), config.optim),
        recipe.loss,
        recipe.metrics,
        world=world,
        events=events,
        rank_log=rank_log,
        log_every=config.log_every,
    )
    history = trainer.train(job.train, job.test, steps=job.steps)
    metrics = {name: value for name, value in history[-1].items() if name != "step"}
    if world.is_main:
        checkpoint = save_checkpoint(folder.checkpoints, trainer.step, job.model.state_dict(), {"metrics": metrics})
        events.emit("checkpoint", trainer.step, path=str(checkpoint.relative_to(folder.path)))
    barrier()  # nobody is done before the result is on the disk
    events.emit("end", trainer.step, metrics=metrics, folder=str(folder.path))
    return Outcome(trainer.step, metrics, folder.path)


@contextmanager
def _claimed(folder: RunFolder, config: Config, world: World) -> Iterator[int]:
    """Rank 0 claims the folder for as long as the run lasts; all learn the attempt's number, or fail alike."""
    claim: Claim | None = None
    answer: dict[str, Any] = {}
    if world.is_main:
        try:
            claim = folder.claim(config, fingerprint(world))
            answer = {"attempt": claim.attempt}
        except UserError as error:
            answer = {"refused": str(error)}
    answer = broadcast_object(answer)
    if "refused" in answer:
        raise UserError(answer["refused"])
    try:
        yield int(answer["attempt"])
    finally:
        if claim is not None:
            claim.release()


def _first(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    return Subset(dataset, range(min(count, len(dataset))))  # type: ignore[arg-type]
