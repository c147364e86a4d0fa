"""Which engine sums a run's gradients, and what it asks of the model and the data."""

import logging
from collections.abc import Sequence

from torch import nn

from lockstep.data.foreign import Loader
from lockstep.engine.engine import Engine
from lockstep.engine.fast_engine import FastEngine
from lockstep.engine.one_lane_engine import OneLaneEngine
from lockstep.engine.requests import Requests
from lockstep.engine.tree_engine import TreeEngine
from lockstep.errors import UserError
from lockstep.train.options import StepOptions
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_FEW_FOR_BATCH_NORM = 16  # samples a lane


def make_engine(
    world: World, loader: Loader, models: Sequence[nn.Module], options: StepOptions, requests: Requests
) -> Engine:
    if loader.lanes.count == 1:
        return OneLaneEngine(world, models)
    if options.determinism == "fast" or not loader.exact:
        find_unused = options.find_unused_parameters
        return FastEngine(world, loader.lanes, models, find_unused_parameters=find_unused, requests=requests)
    bucket_bytes = int(options.bucket_mb * 2**20)
    return TreeEngine(
        world,
        loader.lanes,
        models,
        buffer_rules=options.buffers,
        bucket_bytes=bucket_bytes,
        requests=requests,
    )


def check_batch_norm(world: World, loader: Loader) -> None:
    """Batch norm sees a lane, not the global batch."""
    if loader.tail == "pad":
        raise UserError("tail=pad with batch norm: padding would enter its statistics; use tail=short or tail=drop")
    if loader.global_batch is None:
        return  # a loader of the user's own, which does not say
    lane_batch = loader.global_batch // loader.lanes.count
    if lane_batch < _FEW_FOR_BATCH_NORM and world.is_main:
        logger.warning(
            "batch norm sees %d samples at a time (global batch %d in %d lanes): use fewer lanes or a larger batch",
            lane_batch,
            loader.global_batch,
            loader.lanes.count,
        )
