"""The loop that is timed: a workload's steps through a `Run`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.benchmark.workloads import Workload
from lockstep.train.run import Run
from lockstep.world.world import World


class LockstepLoop:
    def __init__(
        self,
        work: Workload,
        world: World,
        batch: int,
        lanes: int,
        make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
        **options: Any,
    ) -> None:
        """`options`: of the run."""
        self.run = Run(None, world, **options)
        self.model = self.run.prepare(work.make_model())
        self.optimizer = self.run.optimizer(self.model, make_optimizer)
        self._loss_sum = work.loss_sum
        self._steps = iter(self.run.open_steps(self.run.loader(work.data, batch, lanes=lanes), steps=10**9))

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            step = next(self._steps)
            step.accumulate(self._loss_sum, self.model)
            step.update(self.optimizer)
        if dist.is_initialized():
            dist.barrier()
