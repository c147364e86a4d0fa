"""The loop that is timed: a workload's steps through a `Run`, to their end on all ranks."""

import torch.distributed as dist

from lockstep.benchmark import with_lockstep


class LockstepLoop(with_lockstep.LockstepLoop):
    def advance(self, steps: int) -> None:
        super().advance(steps)
        if dist.is_initialized():
            dist.barrier()
