"""`uneven="join"`: ranks with different numbers of batches; every sample counts once."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lockstep.errors import UserError
from lockstep.testing import ranks
from lockstep.train.options import StepOptions
from lockstep.train.run import Run
from lockstep.train.strategies.strategy import Ddp
from lockstep.world.world import World

# Whose samples are whose: rank 0 is through after one batch, rank 2 has none at all, and the last batches are short.
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

    for step in run.open_steps(loader, **({"epochs": EPOCHS} if sized else {"steps": EPOCHS * 3})):
        step.accumulate(loss, model)
        step.update(optimizer)
        losses.append(step.loss)
        sizes.append(step.batch.size)
    run.finish()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Trained(weights, torch.cat([b.flatten().double() for b in model.buffers()]), losses, sizes, seen)


def by_hand(shares: Sequence[Sequence[int]]) -> Trained:
    """The mean over the samples that there are, each rank's through the model by themselves."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, sizes = [], []
    for start in [*range(0, max(map(len, shares)), BATCH)] * EPOCHS:
        optimizer.zero_grad()
        batches = [share[start : start + BATCH] for share in shares]
        size = sum(map(len, batches))
        before = [buffer.clone() for buffer in model.buffers()]
        after: list[Tensor] = []
        loss = 0.0
        for indices in filter(None, batches):
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            own = sum_of_losses(model, DATA[list(indices)]) / size
            own.backward()
            loss += own.item()
            after = after or [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), after, strict=True):
            buffer.copy_(value)
        optimizer.step()
        losses.append(loss)
        sizes.append(size)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Trained(weights, torch.cat([b.flatten().double() for b in model.buffers()]), losses, sizes, [])


CASES: list[dict[str, Any]] = [
    {},
    {"with_two_terms": True},
    {"find_unused_parameters": True},
    {"compression": "fp16"},
    {"compression": {"kind": "powersgd", "start_after": 0}},
]


def train_all(world: World, sized: bool) -> list[Trained]:
    return [train(world, sized, **case) for case in CASES]


@pytest.mark.parametrize(("num_ranks", "sized"), [(1, True), (2, True), (2, False), (4, True)])
def test_the_gradient_is_the_mean_over_the_samples_that_there_are(num_ranks: int, sized: bool) -> None:
    shares = SHARES[:num_ranks]
    expected = by_hand(shares)
    for rank, own in enumerate(ranks(num_ranks).run(train_all, sized)):
        for case, trained in zip(CASES, own, strict=True):
            tolerance = {"rtol": 1e-3, "atol": 1e-3} if "compression" in case else {"rtol": 1e-4, "atol": 1e-6}
            if case.get("compression") not in (None, "fp16") and num_ranks > 1:
                assert trained.losses == pytest.approx(expected.losses, rel=0.1)
            else:
                torch.testing.assert_close(trained.weights, expected.weights, **tolerance)
                torch.testing.assert_close(trained.buffers, expected.buffers, rtol=1e-3, atol=1e-4)
                assert trained.losses == pytest.approx(expected.losses, rel=1e-3)
            assert trained.sizes == expected.sizes
            assert sum(trained.seen) == EPOCHS * len(shares[rank])


class Together(Ddp):
    name = "together"
    needs_equal_lanes: ClassVar[bool] = True


def test_a_strategy_may_need_all_ranks_to_run_the_model_together() -> None:
    strategy = Together(World(), StepOptions())
    run = Run(None, World(), determinism="fast")
    loader = DataLoader(DATA, BATCH, sampler=Sized(SHARES[0]))
    strategy.check_fit([], run.loader(loader))
    with pytest.raises(UserError, match=r"uneven=join .* under parallel=together all ranks run the model together"):
        strategy.check_fit([], run.loader(loader, uneven="join"))


def test_an_unknown_way_is_an_error() -> None:
    with pytest.raises(UserError, match="uneven='pad': expected cut or join"):
        Run(None, World()).loader(DataLoader(DATA, BATCH), uneven="pad")
