"""Strategies under which a rank has parts of the parameters to step on, and the optimizers' state for those.

The user's optimizer says what to do: its kind, its groups and their rates. A copy of it, whose parameters are this
rank's parts of the real ones, does it and has the state.
"""

import copy
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.foreign import Loader
from lockstep.errors import UserError
from lockstep.train.options import StepOptions
from lockstep.train.strategies.strategy import Strategy
from lockstep.world.world import World

# Those that compute every element by itself. Of a subclass that is not known.
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
_ONE_NUMBER = ("step", "mu_product", "eta", "mu")  # in their states: of the whole parameter


class PartialSteps(Strategy):
    def __init__(self, world: World, options: StepOptions, *, keep_gradients: bool = False) -> None:
        super().__init__(world, options, keep_gradients=keep_gradients)
        self._copies: dict[Optimizer, Optimizer] = {}

    @property
    @abstractmethod
    def shards(self) -> Mapping[Parameter, Parameter]:
        """This rank's part of each parameter that was cut, in the parameter's own memory."""

    @abstractmethod
    def cut(self, parameters: Sequence[Parameter]) -> None:
        """Those of one optimizer."""

    @abstractmethod
    def part_of(self, parameter: Parameter, whole: Tensor) -> Tensor:
        """What this rank has of a tensor that lies as the parameter does."""

    def check_fit(self, optimizers: Collection[Optimizer], loader: Loader) -> None:
        super().check_fit(optimizers, loader)
        owners: dict[Parameter, Optimizer] = {}
        for optimizer in optimizers:
            if type(optimizer) not in _ELEMENT_WISE:
                names = ", ".join(kind.__name__ for kind in _ELEMENT_WISE)
                raise UserError(
                    f"parallel={self.name} runs an optimizer on parts of parameters, and {type(optimizer).__name__} is "
                    f"none that computes every element by itself ({names}): use one of these, or parallel=ddp"
                )
            for parameter in parameters_in(optimizer):
                if owners.setdefault(parameter, optimizer) is not optimizer:
                    raise UserError(
                        f"a parameter of {tuple(parameter.shape)} is in two optimizers, and under parallel={self.name} "
                        "it is one's to have parts of: give it to one of them, or use parallel=ddp"
                    )

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        super().begin(optimizers)
        for optimizer in optimizers:
            if self.world.size > 1 and optimizer not in self._copies:
                self.cut([p for p in parameters_in(optimizer) if p.requires_grad])
                self._copies[optimizer] = self._copied(optimizer)

    def optimizer_here(self, optimizer: Optimizer) -> Optimizer:
        return self._copies.get(optimizer, optimizer)

    def holder(self, parameter: Parameter) -> Parameter:
        return self.shards.get(parameter, parameter)

    def to_load(self, parameter: Parameter, key: str, value: Any) -> Any:
        is_one = not isinstance(value, Tensor) or key in _ONE_NUMBER or value.shape != parameter.shape
        return value if is_one or parameter not in self.shards else self.part_of(parameter, value)

    def is_part(self, parameter: Parameter, value: Any) -> bool:
        """Is a piece of the parameter's state one that lies as the parameter does?"""
        shard = self.shards.get(parameter)
        return shard is not None and isinstance(value, Tensor) and value.shape == shard.shape

    def step(self, optimizer: Optimizer) -> None:
        if self.world.size == 1:
            optimizer.step()
            return
        here = self._copies.get(optimizer)
        if here is None or len(optimizer.param_groups) != len(here.param_groups):
            raise UserError(
                f"parallel={self.name} must know optimizers and their groups when training begins: make them by "
                "run.optimizer(…), before run.steps(…)"
            )
        for told, group in zip(optimizer.param_groups, here.param_groups, strict=True):
            group.update({key: value for key, value in told.items() if key != "params"})
        here.step()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # which torch's schedulers look for

    def _copied(self, optimizer: Optimizer) -> Optimizer:
        here = copy.copy(optimizer)
        # Also those that are registered later.
        here._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        here._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        shards = self.shards
        here.param_groups = [
            {**group, "params": [shards[p] for p in group["params"] if p.requires_grad]}
            for group in optimizer.param_groups
        ]
        here.state = defaultdict(dict)
        for parameter in shards.keys() & optimizer.state.keys():  # some have a state from the beginning
            here.state[shards[parameter]] = {
                key: _own(self.to_load(parameter, key, value)) for key, value in optimizer.state[parameter].items()
            }
        optimizer.state.clear()
        return here


def parameters_in(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
