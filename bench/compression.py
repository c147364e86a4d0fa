"""Gradient compression: bytes and time of a step, and the accuracy on `digits` after equally many steps.

    .venv/bin/python bench/compression.py [--processes 2] [--steps 250] [--seeds 3]

Fast mode, one thread per process. Bytes are those that a rank sends; without compression they are computed. Times are
of whole steps, one kind after another: not interleaved, so they are only a hint.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch

from lockstep.recipes.registry import load_recipe
from lockstep.testing import ranks
from lockstep.train.optim.optimizer_factory import build_optimizer
from lockstep.train.recipe import recipe_for_run
from lockstep.train.run import Run
from lockstep.world.world import World

KINDS: dict[str, Any] = {
    "none": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "powersgd, rank 1": {"kind": "powersgd", "rank": 1},
    "powersgd, rank 4": {"kind": "powersgd", "rank": 4},
    "powersgd, rank 1, no feedback": {"kind": "powersgd", "rank": 1, "error_feedback": False},
}


class Outcome(NamedTuple):
    sent: int  # bytes per step; 0 if they are not counted
    uncompressed: int
    step_s: float
    accuracy: float


def train(world: World, kind: Any, steps: int, seed: int) -> Outcome:
    torch.set_num_threads(1)
    recipe, config = load_recipe("digits", [f"seed={seed}"])
    recipe = recipe_for_run(config, recipe)
    run = Run(None, world, seed=seed, determinism="fast", compression=kind)
    model = run.prepare(recipe.model(config))
    assert config.batch.global_batch is not None
    optimizer = run.optimizer(model, build_optimizer(model, config.optim, config.batch.global_batch))
    splits = recipe.data(config)
    loader = run.loader(splits.train, config.batch.global_batch, lanes=config.lanes)
    began = time.perf_counter()
    for step in run.steps(loader, steps=steps, finish=False):
        step.accumulate(recipe.loss, model)
        step.update(optimizer)
    step_s = (time.perf_counter() - began) / steps
    model.eval()
    accuracy = run.evaluate(model, splits.test, recipe.metrics)["accuracy"]
    run.finish()
    traffic = run.traffic
    return Outcome(traffic.get("gradient_bytes", 0), traffic.get("uncompressed_bytes", 0), step_s, accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    group = ranks(options.processes, timeout_s=600)
    print(f"digits: {options.processes} processes, {options.steps} steps, {options.seeds} seeds")
    print("| compression | bytes per step | of uncompressed | ms per step | accuracy, median | range |")
    print("|---|---|---|---|---|---|")
    found = {
        name: [group.run(train, kind, options.steps, seed)[0] for seed in range(options.seeds)]
        for name, kind in KINDS.items()
    }
    uncompressed = max(outcome.uncompressed for outcomes in found.values() for outcome in outcomes)
    for name, outcomes in found.items():
        accuracies = sorted(outcome.accuracy for outcome in outcomes)
        sent, step_s = outcomes[0].sent or uncompressed, statistics.median(outcome.step_s for outcome in outcomes)
        print(
            f"| {name} | {sent:,} | {sent / uncompressed:.3f} | {1e3 * step_s:.2f} "
            f"| {statistics.median(accuracies):.4f} | {accuracies[0]:.4f}–{accuracies[-1]:.4f} |"
        )


if __name__ == "__main__":
    main()
