"""Lockstep's own loop: in lockstep mode with some number of lanes, or in fast mode."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from lockstep.benchmark.catalogue import lanes_for
from lockstep.benchmark.loop import SEED, Setting, make_optimizer
from lockstep.train.run import Run

_ENDLESS = 10**9  # steps


class LockstepLoop:
    def __init__(self, setting: Setting, determinism: Literal["lockstep", "fast"] = "lockstep") -> None:
        self.is_exact = determinism == "lockstep"
        self._run = Run(None, setting.world, seed=SEED, determinism=determinism)
        self._model = self._run.prepare(setting.work.make_model())
        self._optimizer = self._run.optimizer(self._model, make_optimizer)
        self._loss_sum = setting.work.loss_sum
        lanes = lanes_for(setting.world.size) if setting.lanes is None else setting.lanes
        loader = self._run.loader(setting.work.data, setting.batch, lanes=lanes)
        self._steps = iter(self._run.open_steps(loader, steps=_ENDLESS))

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            step = next(self._steps)
            step.accumulate(self._loss_sum, self._model)
            step.update(self._optimizer)

    def weights(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    def close(self) -> None:
        self._run.close()


def fast_mode(setting: Setting) -> LockstepLoop:
    return LockstepLoop(setting, "fast")
