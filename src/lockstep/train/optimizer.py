"""From the config's `optim:` section to a torch optimizer."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import OptimConfig

Parameters = Iterable[nn.Parameter]

_BUILDERS: dict[str, Callable[[Parameters, OptimConfig], Optimizer]] = {
    "sgd": lambda parameters, optim: torch.optim.SGD(
        parameters, lr=optim.lr, weight_decay=optim.weight_decay, momentum=optim.momentum
    ),
    "adam": lambda parameters, optim: torch.optim.Adam(parameters, lr=optim.lr, weight_decay=optim.weight_decay),
    "adamw": lambda parameters, optim: torch.optim.AdamW(parameters, lr=optim.lr, weight_decay=optim.weight_decay),
}


def build_optimizer(parameters: Parameters, optim: OptimConfig) -> Optimizer:
    return _BUILDERS[optim.name](parameters, optim)
