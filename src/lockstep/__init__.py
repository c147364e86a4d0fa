"""lockstep: train PyTorch models on one process or many; the number of processes never changes the result.

    run = lockstep.Run("runs/mine", world, seed=7)
    model = run.prepare(make_model())
    optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    for step in run.steps(run.loader(train_set, global_batch=512), epochs=10):
        step.accumulate(loss, model)
        step.update(optimizer)

Also: `lockstep.metrics` for evaluation, `lockstep.loggers` for TensorBoard and W&B, `lockstep.search` for evolutionary
search. Names are imported on first use: `lockstep --help` loads no torch, and a script needs none of the command line's
libraries.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lockstep import loggers as loggers
    from lockstep import metrics as metrics
    from lockstep import search as search
    from lockstep.checkpoint.manifest import CheckpointError
    from lockstep.checkpoint.weights_io import export_weights, load_checkpoint
    from lockstep.config.train_schema import Config
    from lockstep.data.distributed_dataloaders import DistributedSampler, create_dataloaders_distributed
    from lockstep.data.evaluation_loader import EvaluationLoader
    from lockstep.data.iterable_loader import IterableLaneLoader
    from lockstep.data.lane_loader import LaneLoader
    from lockstep.data.loader_factory import Loader
    from lockstep.data.torch_loader import TorchLoader
    from lockstep.engine.state_digest import digest, state_of
    from lockstep.errors import ConfigError, LockstepError, RendezvousError, Stopped, UserError, WorldError
    from lockstep.events.step_trace import first_difference
    from lockstep.recipes.model_lookup import get_model
    from lockstep.recipes.search_pipeline import main_distributed
    from lockstep.train.batch_search import largest_batch
    from lockstep.train.callbacks import Callback, EarlyStopping, SaveBest
    from lockstep.train.model_registry import register_model
    from lockstep.train.optim.ema import ExponentialMovingAverage
    from lockstep.train.optim.lr_schedule import Schedule
    from lockstep.train.optim.nonfinite import NonFiniteError
    from lockstep.train.optim.optimizer_factory import parameter_groups, scaled_lr
    from lockstep.train.recipe import Recipe, Splits
    from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
    from lockstep.train.resume.drift import DriftError
    from lockstep.train.run import Run
    from lockstep.train.step import Step
    from lockstep.train.strategies.fsdp_units import FsdpOptions
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
    from lockstep.world.object_collectives import all_gather_object, broadcast_object, gather_object, scatter_object
    from lockstep.world.process_group import cleanup_distributed, init_process_group, setup_distributed
    from lockstep.world.world import World
else:  # hidden from type checkers, so that they find misspelt names
    from lockstep.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "checkpoint.manifest": "CheckpointError",
            "checkpoint.weights_io": "export_weights load_checkpoint",
            "config.train_schema": "Config",
            "data.distributed_dataloaders": "DistributedSampler create_dataloaders_distributed",
            "data.evaluation_loader": "EvaluationLoader",
            "data.iterable_loader": "IterableLaneLoader",
            "data.lane_loader": "LaneLoader",
            "data.loader_factory": "Loader",
            "data.torch_loader": "TorchLoader",
            "engine.state_digest": "digest state_of",
            "errors": "ConfigError LockstepError RendezvousError Stopped UserError WorldError",
            "events.step_trace": "first_difference",
            "recipes.model_lookup": "get_model",
            "recipes.search_pipeline": "main_distributed",
            "train.batch_search": "largest_batch",
            "train.callbacks": "Callback EarlyStopping SaveBest",
            "train.model_registry": "register_model",
            "train.optim.ema": "ExponentialMovingAverage",
            "train.optim.lr_schedule": "Schedule",
            "train.optim.nonfinite": "NonFiniteError",
            "train.optim.optimizer_factory": "parameter_groups scaled_lr",
            "train.recipe": "Recipe Splits",
            "train.resume.checkpoint_policy": "CheckpointPolicy",
            "train.resume.drift": "DriftError",
            "train.run": "Run",
            "train.step": "Step",
            "train.strategies.fsdp_units": "FsdpOptions",
            "train.trainer": "Trainer",
            "world.collectives": "all_gather all_reduce barrier broadcast gather get_rank get_world_size "
            "is_main_process no_sync reduce_tensor scatter",
            "world.launch": "launch",
            "world.object_collectives": "all_gather_object broadcast_object gather_object scatter_object",
            "world.process_group": "cleanup_distributed init_process_group setup_distributed",
            "world.world": "World",
        },
        submodules=("loggers", "metrics", "search"),
    )

__all__ = [
    "Callback",
    "CheckpointError",
    "CheckpointPolicy",
    "Config",
    "ConfigError",
    "DistributedSampler",
    "DriftError",
    "EarlyStopping",
    "EvaluationLoader",
    "ExponentialMovingAverage",
    "FsdpOptions",
    "IterableLaneLoader",
    "LaneLoader",
    "Loader",
    "LockstepError",
    "NonFiniteError",
    "Recipe",
    "RendezvousError",
    "Run",
    "SaveBest",
    "Schedule",
    "Splits",
    "Step",
    "Stopped",
    "TorchLoader",
    "Trainer",
    "UserError",
    "World",
    "WorldError",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "cleanup_distributed",
    "create_dataloaders_distributed",
    "digest",
    "export_weights",
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
