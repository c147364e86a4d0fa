"""A model whose parameters are sharded at odd places, under every optimizer that `parallel=zero` accepts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import Stopped
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import loss
from tests.contracts.workloads import Trained

STEPS = 4


class Wide(nn.Module):
    """Parameters that are sharded at odd places: no multiple of any block, some smaller than a block, one a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 211)
        self.second = nn.Linear(211, 5)
        self.scale = Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.second(self.first(inputs).tanh()) * self.scale
        return scores


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(120, 37, generator=generator), torch.arange(120) % 5)


def that_has_stepped(parameters: Sequence[Parameter]) -> Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


OPTIMIZERS: dict[str, Callable[[Sequence[Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p),
    "fused adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw with a past": that_has_stepped,
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=2),
}


def train_wide(world: World, kind: str, folder: Path | None = None, stop: int | None = None, **options: Any) -> Trained:
    torch.set_num_threads(1)
    run = Run(folder, world, seed=5, sinks=[], **options)
    run.stop_after = stop
    model = run.prepare(Wide())
    optimizer = run.optimizer(model, OPTIMIZERS[kind], lockstep.Schedule.linear(warmup=3))
    losses = []
    try:
        for step in run.steps(run.loader(data(), 24, lanes=8), steps=STEPS, finish=False):
            step.accumulate(loss, model)
            step.update(optimizer)
            losses.append(step.loss if run.options.clip_norm is None else step.grad_norm)
    except Stopped:
        run.close()
        return Trained("", {}, losses)
    tensors = lockstep.engine.state_digest.tensor_digests(run.state())
    return Trained(run.finish(), tensors, losses)
