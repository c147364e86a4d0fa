"""Models that the user has already wrapped in DistributedDataParallel."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.world.world import World


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def train(world: World, wrap: bool, use_the_wrapper: bool = False) -> str:
    run = Run(None, world, seed=3)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    wrapped = DistributedDataParallel(model) if wrap else model
    prepared = run.prepare(wrapped)
    optimizer = run.optimizer(prepared, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
    for step in run.steps(run.loader(data, 16, lanes=4), steps=3, finish=False):
        step.accumulate(loss, wrapped if use_the_wrapper else prepared)
        step.update(optimizer)
    return run.finish()


def refused(world: World) -> str:
    with pytest.raises(UserError) as caught:
        train(world, wrap=True, use_the_wrapper=True)
    return str(caught.value)


def test_the_wrapper_changes_no_bit() -> None:
    assert set(ranks(2).run(train, wrap=True)) == {train(World(), wrap=False)}


def test_calling_the_wrapper_itself_is_refused() -> None:
    for message in ranks(2).run(refused):
        assert "would reduce gradients a second time: use what run.prepare(model) returns" in message
