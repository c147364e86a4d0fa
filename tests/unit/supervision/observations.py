"""Observations of ranks, as a probe of a real job would make them."""

import torch

from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.heartbeat import Heartbeat, Phase
from lockstep.supervision.linux_processes import ProcessState
from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.stack_dumps import StackFrame

TORCH = torch.__file__.removesuffix("/__init__.py")
C10D = f"{TORCH}/distributed/distributed_c10d.py"


def seen(
    rank: int, *frames: StackFrame, phase: Phase = Phase.COMPUTING, state: str = "S", **more: object
) -> RankObservation:
    heartbeat = Heartbeat(100 + rank, 1, 5, phase, 10.0, None, False, False, {}, [])
    observed = RankObservation(
        rank, None, heartbeat, 52.0, ProcessState(100 + rank, "python", state, 0.0, 0, 0), frames=frames
    )
    return observed._replace(**more)


def calls(name: str, line: int) -> tuple[StackFrame, ...]:
    """The stack of a rank in a collective."""
    wrapper = StackFrame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
    return StackFrame(C10D, 3001, name), wrapper, StackFrame("train.py", line, "main")


def recorded(*names: str) -> tuple[Collective, ...]:
    return tuple(Collective(number, "0", name, "[[3]]", True) for number, name in enumerate(names, 1))
