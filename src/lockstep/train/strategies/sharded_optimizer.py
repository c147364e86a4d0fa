"""Strategies with sharded optimizers: each rank steps on its shards, and holds their state.

The user's optimizer defines the class, the groups and their learning rates. A copy of it, whose parameters are this
rank's shards, makes the steps and holds the state.
"""

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.loader_factory import Loader
from lockstep.engine.torch_internals import mark_as_stepped, share_step_hooks
from lockstep.errors import UserError
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.parallel_strategy import ParallelStrategy
from lockstep.world.world import World

# Optimizers that compute every element by itself. A subclass may not, so the exact type counts.
_ELEMENT_WISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_SCALAR_STATE = ("step", "mu_product", "eta", "mu")  # state entries of the whole parameter


class ShardedOptimizerStrategy(ParallelStrategy, ABC):
    """Base of `Zero` and `Mesh`: steps are made by copies of the optimizers, on this rank's shards."""

    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:
        super().__init__(world, options, keep_gradients=keep_gradients)
        self._copies: dict[Optimizer, Optimizer] = {}

    @property
    @abstractmethod
    def shards(self) -> Mapping[Parameter, Parameter]:
        """This rank's shard of each sharded parameter, in the parameter's own memory."""

    @abstractmethod
    def cut(self, parameters: Sequence[Parameter]) -> None:
        """Shard the parameters of one optimizer."""

    @abstractmethod
    def part_of(self, parameter: Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor with the parameter's layout."""

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:
        super().check_fit(optimizers, loader)
        owners: dict[Parameter, Optimizer] = {}
        for optimizer in optimizers:
            if type(optimizer) not in _ELEMENT_WISE:
                names = ", ".join(kind.__name__ for kind in _ELEMENT_WISE)
                raise UserError(
                    f"parallel={self.name} runs an optimizer on parts of parameters, and {type(optimizer).__name__} is "
                    f"not known to compute every element by itself: use one of {names}, or parallel=ddp"
                )
            for parameter in optimizer_parameters(optimizer):
                if owners.setdefault(parameter, optimizer) is not optimizer:
                    raise UserError(
                        f"a parameter of shape {tuple(parameter.shape)} is in two optimizers, but "
                        f"parallel={self.name} shards it for one: give it to one of them, or use parallel=ddp"
                    )

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        super().begin(optimizers)
        for optimizer in optimizers:
            if self.world.size > 1 and optimizer not in self._copies:
                self.cut([p for p in optimizer_parameters(optimizer) if p.requires_grad])
                self._copies[optimizer] = self._copy_for_shards(optimizer)

    def optimizer_here(self, optimizer: Optimizer) -> Optimizer:
        return self._copies.get(optimizer, optimizer)

    def holder(self, parameter: Parameter) -> Parameter:
        return self.shards.get(parameter, parameter)

    def to_load(self, parameter: Parameter, key: str, value: Any) -> Any:
        is_scalar = not isinstance(value, Tensor) or key in _SCALAR_STATE or value.shape != parameter.shape
        return value if is_scalar or parameter not in self.shards else self.part_of(parameter, value)

    def is_part(self, parameter: Parameter, value: Any) -> bool:
        """Return whether an entry of a parameter's state is sharded like the parameter."""
        shard = self.shards.get(parameter)
        return shard is not None and isinstance(value, Tensor) and value.shape == shard.shape

    def step(self, optimizer: Optimizer) -> None:
        if self.world.size == 1:
            optimizer.step()
            return
        here = self._copies.get(optimizer)
        if here is None or len(optimizer.param_groups) != len(here.param_groups):
            raise UserError(
                f"parallel={self.name} must know all optimizers and their groups when training begins: make them with "
                "run.optimizer(…), before run.steps(…)"
            )
        for given, group in zip(optimizer.param_groups, here.param_groups, strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        here.step()
        mark_as_stepped(optimizer)

    def _copy_for_shards(self, optimizer: Optimizer) -> Optimizer:
        here = copy.copy(optimizer)
        share_step_hooks(optimizer, here)
        shards = self.shards
        here.param_groups = [
            {**group, "params": [shards[p] for p in group["params"] if p.requires_grad]}
            for group in optimizer.param_groups
        ]
        here.state = defaultdict(dict)
        for parameter in shards.keys() & optimizer.state.keys():  # some optimizers make their state at once
            here.state[shards[parameter]] = {
                key: _cloned(self.to_load(parameter, key, value)) for key, value in optimizer.state[parameter].items()
            }
        optimizer.state.clear()
        return here


def optimizer_parameters(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
