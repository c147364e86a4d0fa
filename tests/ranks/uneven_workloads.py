"""A small model trained on ranks that have unequal numbers of samples."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lockstep.train.run import Run
from lockstep.world.world import World

# The samples of each rank: rank 0 finishes after one batch, rank 2 has none, and the last batches are short.
SHARES = [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10], [], [11, 12, 13, 14, 15]]


BATCH = 3


DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3)


EPOCHS = 2


class Own(Sampler[int]):
    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class Sized(Own):
    def __len__(self) -> int:
        return len(self.indices)


class Trained(NamedTuple):
    weights: Tensor
    buffers: Tensor
    losses: list[float]
    sizes: list[int]  # of the global batches
    seen: list[int]  # samples, on this rank


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.BatchNorm1d(3, eps=1.0))


def sum_of_losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def train(world: World, sized: bool, with_two_terms: bool = False, **options: Any) -> Trained:
    torch.set_num_threads(1)
    run = Run(None, world, determinism="fast", **options)
    model = run.prepare(make_model())
    optimizer = run.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    sampler = (Sized if sized else Own)(SHARES[world.rank])
    loader = run.loader(DataLoader(DATA, BATCH, sampler=sampler), uneven="join")
    losses, sizes, seen = [], [], []

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
        seen.append(len(batch[1]))
        total, count = sum_of_losses(model, batch), len(batch[1])
        return {"half": (total / 2, count), "rest": (total / 2, count)} if with_two_terms else (total, count)

    for step in run.steps(loader, **({"epochs": EPOCHS} if sized else {"steps": EPOCHS * 3}), finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
        losses.append(step.loss)
        sizes.append(step.batch.size)
    run.finish()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Trained(weights, torch.cat([b.flatten().double() for b in model.buffers()]), losses, sizes, seen)
