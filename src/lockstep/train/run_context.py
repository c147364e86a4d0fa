"""What the loops of a run share: its ranks, its options, the state that it trains, its log and its checkpoints."""

from typing import NamedTuple

from lockstep.train.resume.checkpointer import Checkpointer
from lockstep.train.run_log import RunLog
from lockstep.train.step_options import StepOptions
from lockstep.train.train_state import TrainState
from lockstep.world.world import World


class RunContext(NamedTuple):
    """Handed to the training loop and to the round loop."""

    world: World
    options: StepOptions
    state: TrainState
    log: RunLog
    checkpointer: Checkpointer
