"""A model of which each step uses only a part."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.state_digest import tensor_digests
from lockstep.train.run import Run
from lockstep.world.world import World

ROWS = 9  # two batches: of eight, and of one, for which there are four lanes: rank 0 has none of it


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 1)
        self.right = nn.Linear(4, 1)
        self.spare = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: Tensor, branch: str) -> Tensor:
        result: Tensor = getattr(self, branch)(self.trunk(inputs).tanh())
        return result


def loss(branch: str, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return (model(batch[0], branch) - 1.0).square().sum(), len(batch[0])


class Trained(NamedTuple):
    digests: dict[str, str]
    weights: list[list[float]]
    said: list[str]


def train(world: World, branches: Sequence[str], **options: Any) -> Trained:
    """Train with one branch for each rank."""
    torch.set_num_threads(1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    run = Run(None, world, seed=2, **options)
    model = run.prepare(Branches())
    optimizer = run.optimizer(model, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5))
    data = TensorDataset(torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)))
    try:
        for step in run.steps(run.loader(data, 8, lanes=4, tail="short"), epochs=2, finish=False):
            step.accumulate(partial(loss, branches[world.rank]), model)
            step.update(optimizer)
    finally:
        logging.getLogger("lockstep").removeHandler(handler)
    digests = tensor_digests(run.state())
    run.finish()
    weights = [parameter.flatten().tolist() for parameter in model.parameters()]
    return Trained(digests, weights, [line for line in said if "no rank used" in line])
