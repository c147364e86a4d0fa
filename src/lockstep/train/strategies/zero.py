"""`parallel: zero`: each rank holds its part of the optimizers' state, and steps there. [Note: zero]"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.loader_factory import Loader
from lockstep.engine.engine import Engine
from lockstep.engine.loss_table import ControlFlags
from lockstep.engine.zero_sharding import ZeroSharding
from lockstep.errors import UserError
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.sharded_optimizer import ShardedOptimizerStrategy, optimizer_parameters
from lockstep.world.dtensor import LocalShard, gather_full_tensor
from lockstep.world.serialization import Shard
from lockstep.world.world import World


class Zero(ShardedOptimizerStrategy):
    """Shards optimizer state and gradients over the ranks; parameters stay whole."""

    name = "zero"

    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:
        super().__init__(world, options, keep_gradients=keep_gradients)
        self._sharding = ZeroSharding(world, options.bucket_bytes, keep_gradients=keep_gradients)

    @property
    def shards(self) -> Mapping[Parameter, Parameter]:
        return self._sharding.shards

    def cut(self, parameters: Sequence[Parameter]) -> None:
        self._sharding.add(parameters)

    def part_of(self, parameter: Parameter, whole: Tensor) -> Tensor:
        own = self._sharding.ranges[parameter]
        return whole.reshape(-1)[own.start : own.stop]

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:
        super().check_fit(optimizers, loader)
        if self.world.size == 1:
            return
        if not loader.exact:
            raise UserError(
                "parallel=zero adds up gradients lane by lane, but this DataLoader orders its own samples and has no "
                "lanes: pass the data set to run.loader(…), or use parallel=ddp"
            )
        for optimizer in optimizers:
            for parameter in optimizer_parameters(optimizer):
                if not parameter.is_contiguous():
                    raise UserError(
                        f"parallel=zero shards parameters by memory ranges, and one of shape {tuple(parameter.shape)} "
                        "is not contiguous (channels_last?): use the default memory format, or parallel=ddp"
                    )
            is_fused = any(group.get("fused") for group in optimizer.param_groups)
            if is_fused and type(optimizer) is torch.optim.SGD and self.world.device.type == "cpu":
                # Seen with torch 2.13 and bf16: the last elements depend on their neighbours in memory.
                raise UserError("SGD(fused=True) does not treat all elements alike on a CPU: omit fused")

    def make_engine(self, loader: Loader, models: Sequence[nn.Module], control_flags: ControlFlags) -> Engine:
        if self.world.size == 1:
            return super().make_engine(loader, models, control_flags)
        return self.make_tree_engine(loader, models, control_flags, sharding=self._sharding)

    def to_save(self, parameter: Parameter, value: Any) -> Any:
        if not self.is_part(parameter, value):
            return value
        return Shard(value, (self._sharding.ranges[parameter].start,), tuple(parameter.shape))

    def whole(self, parameter: Parameter, value: Any) -> Any:
        if not self.is_part(parameter, value):
            return value
        start = self._sharding.ranges[parameter].start
        return gather_full_tensor(value, LocalShard((start,), (value.numel(),), (parameter.numel(),), True)).view(
            parameter.shape
        )
