"""What batch norm asks of the data: it sees a lane, not the global batch."""

import logging

from lockstep.data.foreign import Loader
from lockstep.errors import UserError
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_FEW = 16  # samples a lane


def check_batch_norm(world: World, loader: Loader) -> None:
    if loader.tail == "pad":
        raise UserError("tail=pad with batch norm: padding would enter its statistics; use tail=short or tail=drop")
    if loader.global_batch is None:
        return  # a loader of the user's own, which does not say
    lane_batch = loader.global_batch // loader.lanes.count
    if lane_batch < _FEW and world.is_main:
        logger.warning(
            "batch norm sees %d samples at a time (global batch %d in %d lanes): use fewer lanes or a larger batch",
            lane_batch,
            loader.global_batch,
            loader.lanes.count,
        )
