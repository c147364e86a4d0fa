"""Tries one batch size: a few real steps of a recipe, with its optimizer and EMA, on one process."""

import time
from typing import Any, NamedTuple

import torch

from lockstep.config.train_schema import Config
from lockstep.train.optim.optimizer_factory import build_optimizer
from lockstep.train.recipe import Recipe, recipe_for_run
from lockstep.train.run import Run
from lockstep.train.train_job import run_options
from lockstep.world.process_memory import peak_memory_bytes
from lockstep.world.world import World

_MAX_STEPS = 8
_LONG_ENOUGH_S = 0.5


class BatchTrial(NamedTuple):
    """What the steps needed."""

    peak_bytes: int | None  # on a CPU, above what the process had before
    sample_s: float
    num_samples: int | None  # in the training set, if known


def try_lane(recipe: Recipe | type[Any], config: Config, world: World, lane_batch: int, lanes: int) -> BatchTrial:
    """Run as many lanes as each process of the real run will have."""
    recipe = recipe_for_run(config, recipe)
    before = peak_memory_bytes(world.device)
    run = Run(None, world, **run_options(config))
    model = run.prepare(recipe.model(config))
    batch = lane_batch * lanes
    optimizer = run.optimizer(model, build_optimizer(model, config.optim, batch))
    if config.average is not None:
        run.ema(model, config.average.decay)
    dataset, _, collate = recipe.data(config)
    model.train()
    seconds, timed = 0.0, 0
    loader = run.loader(dataset, batch, lanes=lanes, tail=config.tail, collate=collate)
    for step in run.steps(loader, steps=_MAX_STEPS, finish=False):
        began = _now(world)
        step.accumulate(recipe.loss, model)
        step.update(optimizer)
        if step.number > 1:  # the first also makes the optimizer's state
            seconds += _now(world) - began
            timed += 1
        if seconds > _LONG_ENOUGH_S:
            break
    peaks = peak_memory_bytes(world.device)
    run.close()
    kind = "peak_device_bytes" if world.device.type == "cuda" else "peak_host_bytes"
    peak = peaks[kind] - before[kind] if kind in peaks else None
    return BatchTrial(peak, seconds / (timed * batch), _length(dataset))


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # a stream
        return None
