"""Lockstep's own loop: in lockstep mode with some number of lanes, or in fast mode."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.benchmark.catalogue import lanes_for
from lockstep.benchmark.loop import SEED, Loop, Setting, make_optimizer
from lockstep.benchmark.workloads import Workload
from lockstep.train.run import Run
from lockstep.world.world import World

_ENDLESS = 10**9  # steps


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
        self.is_exact = options.get("determinism", "lockstep") == "lockstep"
        self.run = Run(None, world, **options)
        self.model = self.run.prepare(work.make_model())
        self.optimizer = self.run.optimizer(self.model, make_optimizer)
        self._loss_sum = work.loss_sum
        self._steps = iter(self.run.open_steps(self.run.loader(work.data, batch, lanes=lanes), steps=_ENDLESS))

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            step = next(self._steps)
            step.accumulate(self._loss_sum, self.model)
            step.update(self.optimizer)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def close(self) -> None:
        self.run.close()


def lockstep_mode(setting: Setting) -> Loop:
    assert setting.lanes is not None
    return LockstepLoop(setting.work, setting.world, setting.batch, setting.lanes, make_optimizer, seed=SEED)


def fast_mode(setting: Setting) -> Loop:
    lanes = lanes_for(setting.world.size)
    return LockstepLoop(
        setting.work, setting.world, setting.batch, lanes, make_optimizer, seed=SEED, determinism="fast"
    )
