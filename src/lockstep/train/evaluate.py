"""Evaluation: metrics over every sample of a data set exactly once, the same bits on any number of ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.errors import UserError
from lockstep.metrics.aggregator import MetricAggregator, MetricValue
from lockstep.train.optim.mixed_precision import MixedPrecision
from lockstep.train.train_state import Models, as_list
from lockstep.world.keyed_random import derive_key, key_of, preserve_rng_states, seed_rngs
from lockstep.world.world import World

Metrics = Callable[[Any, Any], Mapping[str, MetricValue]]


def evaluate(
    model: Models, loader: EvaluationLoader, metrics: Metrics, world: World, *, seed: int, precision: MixedPrecision
) -> dict[str, Any]:
    """Evaluate in evaluation mode, without gradients; modes and random streams are restored afterwards."""
    if not all(isinstance(root, nn.Module) for root in as_list(model)):
        raise UserError("run.evaluate(…): the model comes first, run.evaluate(model, dataset, metrics)")
    modules = [module for root in as_list(model) for module in root.modules()]
    were_training = [module.training for module in modules]
    aggregator = MetricAggregator(world.device)
    key = key_of(seed, "evaluation")
    try:
        for root in as_list(model):
            root.eval()
        with torch.no_grad(), preserve_rng_states(cuda=True), precision.autocast:
            for chunk in loader:
                seed_rngs(derive_key(key, chunk.chunk))  # what a metric draws must not depend on who draws it
                parts = metrics(model, chunk.data)
                if not isinstance(parts, Mapping):
                    raise UserError(
                        "metrics(model, batch) returns a dictionary, {name: (sum, count), …}, not a "
                        f"{type(parts).__name__}"
                    )
                if chunk.counts:
                    aggregator.add(chunk.chunk, parts)
    finally:
        for module, was_training in zip(modules, were_training, strict=True):
            module.training = was_training
    return aggregator.results()
