"""`parallel: zero`: each rank has its part of the optimizers' state, and steps there. [Note: zero]"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.foreign import Loader
from lockstep.engine.engine import Engine
from lockstep.engine.requests import Requests
from lockstep.engine.sharding import Sharding
from lockstep.errors import UserError
from lockstep.train.options import StepOptions
from lockstep.train.strategies.partial_steps import PartialSteps, parameters_in
from lockstep.world.boxes import Box, gathered
from lockstep.world.plain_values import Shard
from lockstep.world.world import World


class Zero(PartialSteps):
    name = "zero"

    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:
        super().__init__(world, options, keep_gradients=keep_gradients)
        self._sharding = Sharding(world, options.bucket_bytes, keep_gradients=keep_gradients)

    @property
    def shards(self) -> Mapping[Parameter, Parameter]:
        return self._sharding.shards

    def cut(self, parameters: Sequence[Parameter]) -> None:
        self._sharding.add(parameters)

    def part_of(self, parameter: Parameter, whole: Tensor) -> Tensor:
        stretch = self._sharding.stretches[parameter]
        return whole.reshape(-1)[stretch.start : stretch.stop]

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:
        super().check_fit(optimizers, loader)
        if self.world.size == 1:
            return
        if not loader.exact:
            raise UserError(
                "parallel=zero adds up gradients lane by lane, and this DataLoader has an order of its own instead of "
                "lanes: give run.loader(…) the data set, or use parallel=ddp"
            )
        for optimizer in optimizers:
            for parameter in parameters_in(optimizer):
                if not parameter.is_contiguous():
                    raise UserError(
                        f"parallel=zero cuts parameters into stretches of memory, and one of {tuple(parameter.shape)} "
                        "is not contiguous (channels_last?): use its usual memory format, or parallel=ddp"
                    )
            is_fused = any(group.get("fused") for group in optimizer.param_groups)
            if is_fused and type(optimizer) is torch.optim.SGD and self.world.device.type == "cpu":
                # Seen with torch 2.13 and bf16: the last elements depend on what is beside them in memory.
                raise UserError("SGD(fused=True) does not treat all elements alike on a CPU: leave fused away")

    def make_engine(self, loader: Loader, models: Sequence[nn.Module], requests: Requests) -> Engine:
        if self.world.size == 1:
            return super().make_engine(loader, models, requests)
        return self.make_tree_engine(loader, models, requests, sharding=self._sharding)

    def to_save(self, parameter: Parameter, value: Any) -> Any:
        if not self.is_part(parameter, value):
            return value
        return Shard(value, (self._sharding.stretches[parameter].start,), tuple(parameter.shape))

    def whole(self, parameter: Parameter, value: Any) -> Any:
        if not self.is_part(parameter, value):
            return value
        start = self._sharding.stretches[parameter].start
        return gathered(value, Box((start,), (value.numel(),), (parameter.numel(),), True)).view(parameter.shape)
