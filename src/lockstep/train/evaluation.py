"""Evaluation: metrics over every sample of a data set, each counted once, with the same bits on any number of ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lockstep.data.evaluation import EvaluationLoader
from lockstep.metrics.tally import Part, Tally
from lockstep.train.parts import Models, as_list
from lockstep.train.precision import Precision
from lockstep.world.randomness import derived, key_of, seed_streams, undisturbed_streams
from lockstep.world.world import World

Metrics = Callable[[Any, Any], Mapping[str, Part]]


def evaluate(
    model: Models, loader: EvaluationLoader, metrics: Metrics, world: World, *, seed: int, precision: Precision
) -> dict[str, Any]:
    """In evaluation mode, without gradients; modes and random streams are afterwards what they were."""
    modules = [module for root in as_list(model) for module in root.modules()]
    were_training = [module.training for module in modules]
    tally = Tally(world.device)
    key = key_of(seed, "evaluation")
    try:
        for root in as_list(model):
            root.eval()
        with torch.no_grad(), undisturbed_streams(cuda=True), precision.autocast:
            for chunk in loader:
                seed_streams(derived(key, chunk.chunk))  # what a metric draws must not depend on who draws it
                parts = metrics(model, chunk.data)
                if chunk.counts:
                    tally.add(chunk.chunk, parts)
    finally:
        for module, was_training in zip(modules, were_training, strict=True):
            module.training = was_training
    return tally.results()
