"""lockstep: train PyTorch models on one process or many, with the same code.

Names are imported on first use, so that `lockstep --help` answers without loading torch, and a loop of one's own works
without the command line's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.checkpoint.exchange import load_checkpoint
    from lockstep.config.schema import Config
    from lockstep.config.search import SearchConfig
    from lockstep.data.dataloaders import create_dataloaders_distributed
    from lockstep.data.sampler import DistributedSampler
    from lockstep.engine.digest import digest, state_of
    from lockstep.events.trace import first_difference
    from lockstep.recipes.models import get_model
    from lockstep.recipes.pipeline import SearchPipeline, main_distributed
    from lockstep.search.evaluators import OneByOne, Together
    from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
    from lockstep.search.problem import Objective, Problem
    from lockstep.search.program import Program
    from lockstep.search.search import Search, SearchSettings
    from lockstep.train.average import MovingAverage
    from lockstep.train.batch_search import largest_batch
    from lockstep.train.callbacks import Callback, EarlyStopping, KeepBest
    from lockstep.train.checkpoints import Saving
    from lockstep.train.model_registry import register_model
    from lockstep.train.nonfinite import NonFiniteError
    from lockstep.train.optimizer import parameter_groups, scaled_lr
    from lockstep.train.run import Run
    from lockstep.train.schedule import Schedule
    from lockstep.train.step import Step
    from lockstep.train.trainer import Trainer
    from lockstep.world.collectives import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        gather,
        get_rank,
        get_world_size,
        is_main_process,
        no_sync,
        reduce_tensor,
        scatter,
    )
    from lockstep.world.launch import launch
    from lockstep.world.objects import all_gather_object, broadcast_object, gather_object, scatter_object
    from lockstep.world.setup import cleanup_distributed, init_process_group, setup_distributed
    from lockstep.world.world import World

__version__ = "0.1.0"

_HOME = {
    "Callback": "train.callbacks",
    "ChoiceGene": "search.genome",
    "Config": "config.schema",
    "DistributedSampler": "data.sampler",
    "EarlyStopping": "train.callbacks",
    "FloatGene": "search.genome",
    "Genome": "search.genome",
    "IntegerGene": "search.genome",
    "KeepBest": "train.callbacks",
    "MovingAverage": "train.average",
    "NonFiniteError": "train.nonfinite",
    "Objective": "search.problem",
    "OneByOne": "search.evaluators",
    "Problem": "search.problem",
    "Program": "search.program",
    "Run": "train.run",
    "Saving": "train.checkpoints",
    "Schedule": "train.schedule",
    "Search": "search.search",
    "SearchConfig": "config.search",
    "SearchPipeline": "recipes.pipeline",
    "SearchSettings": "search.search",
    "Step": "train.step",
    "Together": "search.evaluators",
    "Trainer": "train.trainer",
    "World": "world.world",
    "all_gather": "world.collectives",
    "all_gather_object": "world.objects",
    "all_reduce": "world.collectives",
    "barrier": "world.collectives",
    "broadcast": "world.collectives",
    "broadcast_object": "world.objects",
    "cleanup_distributed": "world.setup",
    "create_dataloaders_distributed": "data.dataloaders",
    "digest": "engine.digest",
    "first_difference": "events.trace",
    "gather": "world.collectives",
    "gather_object": "world.objects",
    "get_model": "recipes.models",
    "get_rank": "world.collectives",
    "get_world_size": "world.collectives",
    "init_process_group": "world.setup",
    "is_main_process": "world.collectives",
    "largest_batch": "train.batch_search",
    "launch": "world.launch",
    "load_checkpoint": "checkpoint.exchange",
    "main_distributed": "recipes.pipeline",
    "no_sync": "world.collectives",
    "parameter_groups": "train.optimizer",
    "reduce_tensor": "world.collectives",
    "register_model": "train.model_registry",
    "scaled_lr": "train.optimizer",
    "scatter": "world.collectives",
    "scatter_object": "world.objects",
    "setup_distributed": "world.setup",
    "state_of": "engine.digest",
}

__all__ = [
    "Callback",
    "ChoiceGene",
    "Config",
    "DistributedSampler",
    "EarlyStopping",
    "FloatGene",
    "Genome",
    "IntegerGene",
    "KeepBest",
    "MovingAverage",
    "NonFiniteError",
    "Objective",
    "OneByOne",
    "Problem",
    "Program",
    "Run",
    "Saving",
    "Schedule",
    "Search",
    "SearchConfig",
    "SearchPipeline",
    "SearchSettings",
    "Step",
    "Together",
    "Trainer",
    "World",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "cleanup_distributed",
    "create_dataloaders_distributed",
    "digest",
    "first_difference",
    "gather",
    "gather_object",
    "get_model",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_main_process",
    "largest_batch",
    "launch",
    "load_checkpoint",
    "main_distributed",
    "no_sync",
    "parameter_groups",
    "reduce_tensor",
    "register_model",
    "scaled_lr",
    "scatter",
    "scatter_object",
    "setup_distributed",
    "state_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = getattr(import_module(f"lockstep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
