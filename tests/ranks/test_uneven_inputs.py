"""`uneven="join"`: ranks with different numbers of batches; every sample counts once."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.errors import UserError
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.parallel_strategy import Ddp
from lockstep.world.world import World
from tests.ranks.uneven_workloads import BATCH, DATA, EPOCHS, SHARES, Sized, Trained, make_model, sum_of_losses, train


def by_hand(shares: Sequence[Sequence[int]]) -> Trained:
    """Compute the mean over all samples, with each rank's samples run through the model separately."""
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
def test_the_gradient_is_the_mean_over_all_samples_of_the_step(num_ranks: int, sized: bool) -> None:
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


def test_a_strategy_with_equal_lanes_refuses_uneven_inputs() -> None:
    strategy = Together(World(), StepOptions())
    run = Run(None, World(), determinism="fast")
    loader = DataLoader(DATA, BATCH, sampler=Sized(SHARES[0]))
    strategy.check_fit([], run.loader(loader))
    with pytest.raises(UserError, match=r"uneven=join .* under parallel=together all ranks run the model together"):
        strategy.check_fit([], run.loader(loader, uneven="join"))


def test_an_unknown_value_of_uneven_is_refused() -> None:
    with pytest.raises(UserError, match="uneven='pad': expected cut or join"):
        Run(None, World()).loader(DataLoader(DATA, BATCH), uneven="pad")
