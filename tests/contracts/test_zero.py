"""The promise of `parallel=zero`: each rank has its part of the optimizer's state, and no bit changes."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import UserError
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import loss
from tests.contracts.bit_cases import CASES, Case, assert_same, digests, digests_alone
from tests.contracts.workloads import train
from tests.contracts.zero_workloads import OPTIMIZERS, STEPS, Wide, data, train_wide

# Where sharding the optimizers could matter: how lanes become gradients is the subject of test_bits.py.
SHARDED = {
    "mlp": (2,),
    "conv": (4,),  # buffers
    "gpt": (3,),  # tied parameters
    "gan": (3,),  # two optimizers
    "awkward": (2, 3, 4),  # unused parameters
    "passes": (2,),
    "terms": (4,),
    "remembering": (3,),
    "clipped": (4,),
    "clipped gan": (2, 3),
    "empty lanes and unused parameters": (3,),
    "sixteen lanes": (4,),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_optimizers_change_no_bit(name: str) -> None:
    case = CASES[name]
    for num_ranks in SHARDED[name]:
        assert_same(digests(_with(case, parallel="zero"), num_ranks), digests_alone(case))


@pytest.mark.parametrize("bucket_mb", [1e-4, 2e-2, 100.0])
def test_buckets_of_any_size_change_no_bit(bucket_mb: float) -> None:
    alone = digests_alone(CASES["gpt"])
    assert_same(digests(_with(CASES["gpt"], parallel="zero", bucket_mb=bucket_mb), 3), alone)


def test_unequal_shares_change_no_bit() -> None:
    case = _with(CASES["awkward"], parallel="zero")
    assert_same(digests(case, 4, lanes_per_rank=[1, 2, 4, 1]), digests_alone(CASES["awkward"]))


@pytest.mark.parametrize("parts", [("zero", "ddp", 3), ("ddp", "zero", 2), ("zero", "zero", 3), ("zero", "single", 1)])
def test_a_run_resumes_under_another_strategy(parts: tuple[str, str, int], tmp_path: Path) -> None:
    """Saved on four processes under one strategy, and resumed under another."""
    before, after, num_ranks = parts
    loader = {"global_batch": 40, "lanes": 8}
    for name in ("conv", "awkward"):
        whole = train(World(), name, STEPS, loader)
        folder = tmp_path / name
        ranks(4).run(train, name, STEPS, loader, folder, stop_after=2, parallel=before)
        rest = ranks(num_ranks).run(train, name, STEPS, loader, folder, parallel=after)[0]
        assert_same(rest, whole._replace(losses=whole.losses[2:]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_element_wise_optimizer_has_the_bits_of_one(kind: str, tmp_path: Path) -> None:
    alone = train_wide(World(), kind)
    sharded = ranks(3).run(train_wide, kind, parallel="zero")
    assert all(each == sharded[0] for each in sharded)
    assert_same(sharded[0], alone)
    ranks(4).run(train_wide, kind, tmp_path, stop=2, parallel="zero")
    rest = ranks(2).run(train_wide, kind, tmp_path, parallel="zero")[0]
    assert_same(rest, alone._replace(losses=alone.losses[2:]))


def test_the_norm_of_sharded_gradients_has_the_bits_of_one() -> None:
    options = {"parallel": "zero", "clip_norm": 0.1}
    assert_same(ranks(3).run(train_wide, "sgd", **options)[0], train_wide(World(), "sgd", **options))


def sizes_of_state(world: World, parallel: str) -> tuple[int, int]:
    """Return the bytes of the optimizer's state on this rank, and in the user's own optimizer."""
    run = Run(None, world, parallel=parallel)
    model = run.prepare(nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 5)))
    optimizer = run.optimizer(model, lambda p: torch.optim.AdamW(p))
    dataset = TensorDataset(torch.randn(16, 300), torch.arange(16) % 5)
    for step in run.steps(run.loader(dataset, 8, lanes=4), steps=2):
        step.accumulate(loss, model)
        step.update(optimizer)
    here = run._state.strategy.optimizer_here(optimizer)
    return tuple(
        sum(value.nbytes for state in each.state.values() for value in state.values()) for each in (here, optimizer)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_has_its_part_of_the_state(num_ranks: int) -> None:
    (whole, _) = sizes_of_state(World(), "ddp")
    sizes = ranks(num_ranks).run(sizes_of_state, "zero")
    for here, in_the_users_own in sizes:
        assert here == pytest.approx(whole / num_ranks, rel=0.05)  # cut at whole blocks
        assert in_the_users_own == 0


def is_negative_everywhere(world: World) -> bool:
    run = Run(None, world, parallel="zero")
    model = run.prepare(Wide())
    run._state.strategy.begin([run.optimizer(model, lambda p: torch.optim.AdamW(p))])
    strategy, weight = run._state.strategy, model.first.weight
    whole = strategy.whole(weight, torch.full_like(strategy.holder(weight), -0.0))
    run.close()
    return bool(whole.signbit().all()) and whole.shape == weight.shape


def test_a_gathered_parameter_keeps_the_sign_of_zero() -> None:
    assert ranks(3).run(is_negative_everywhere) == [True] * 3


def what_happens(world: World, make: Callable[[Sequence[Parameter]], Optimizer], memory_format: Any = None) -> str:
    run = Run(None, world, parallel="zero")
    model = run.prepare(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)).to(memory_format=memory_format)
    )
    optimizer = run.optimizer(model, make)
    dataset = TensorDataset(torch.randn(16, 3, 4, 4), torch.arange(16) % 5)
    with pytest.raises(UserError) as caught:
        for step in run.steps(run.loader(dataset, 8, lanes=4), steps=1):
            step.accumulate(loss, model)
            step.update(optimizer)
    run.close(abandon=True)
    return str(caught.value)


class OwnAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, OwnAdam])
def test_other_optimizers_are_refused_by_name_before_the_first_step(kind: Any) -> None:
    for num_ranks in (1, 2):
        for message in ranks(num_ranks).run(what_happens, kind):
            assert f"{kind.__name__} is not known to compute every element by itself: use one of SGD, Adam" in message


def test_parameters_that_cannot_be_sharded_are_refused() -> None:
    assert "not contiguous (channels_last?)" in ranks(2).run(what_happens, torch.optim.Adam, torch.channels_last)[0]


def train_in_an_order_of_its_own(world: World) -> str:
    run = Run(None, world, parallel="zero")
    model = run.prepare(Wide())
    optimizer = run.optimizer(model, lambda p: torch.optim.Adam(p))
    loader = DataLoader(data(), batch_size=4, sampler=list(range(40)))
    with pytest.raises(UserError) as caught:
        for step in run.steps(run.loader(loader), steps=1):
            step.accumulate(loss, model)
            step.update(optimizer)
    run.close(abandon=True)
    return str(caught.value)


def test_a_loader_without_lanes_is_refused() -> None:
    assert "orders its own samples and has no lanes" in ranks(2).run(train_in_an_order_of_its_own)[0]


def train_part_of_a_model(world: World) -> str:
    run = Run(None, world, parallel="zero")
    model = run.prepare(nn.Sequential(nn.Linear(37, 8), nn.Linear(8, 5)))
    optimizer = run.optimizer(model[0], lambda p: torch.optim.Adam(p))
    with pytest.raises(UserError) as caught:
        for step in run.steps(run.loader(data(), 8, lanes=4), steps=1):
            step.accumulate(loss, model)
            step.update(optimizer)
    run.close(abandon=True)
    return str(caught.value)


def test_a_parameter_that_no_optimizer_has_is_refused() -> None:
    assert "parameters that no optimizer had" in ranks(2).run(train_part_of_a_model)[0]


def _with(case: Case, **options: Any) -> Case:
    return case._replace(options=case.options | options)


def rows(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def train_in_turns(world: World, parallel: str) -> tuple[str, list[str]]:
    """Train one model, then both, with hooks and a torch scheduler; return the digest and the messages."""
    run = Run(None, world, seed=3, parallel=parallel)
    one, other = run.prepare(nn.Linear(37, 60)), run.prepare(nn.Linear(60, 30))
    first = run.optimizer(one, lambda p: torch.optim.SGD(p, lr=0.01))
    second = run.optimizer(other, lambda p: torch.optim.SGD(p, lr=0.01))
    unknown = torch.optim.SGD(one.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    messages: list[str] = []
    first.register_step_post_hook(lambda *_: messages.append("stepped"))

    def both(models: Sequence[nn.Module], batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        return models[1](models[0](batch[0])).square().sum(), len(batch[0])

    for step in run.steps(run.loader(data(), 24, lanes=8), steps=4, finish=False):
        if step.number in (1, 3):
            step.accumulate(rows, one)
            step.update(first)
        else:
            step.accumulate(both, [one, other])
            step.update(first, second)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's, where it has seen no step
            scheduler.step()
        if step.number == 3:
            step.accumulate(rows, one)
            for optimizer in (second, unknown):
                with pytest.raises(UserError) as caught:
                    step.update(optimizer)
                messages.append(str(caught.value))
            step.skip()
    return run.finish(), messages


def test_models_may_take_turns() -> None:
    digest, messages = train_in_turns(World(), "single")
    assert messages.count("stepped") == 4
    assert messages[3].endswith("ran lanes for: pass its model to step.accumulate(loss, model)")
    assert "call optimizer = run.optimizer(model, optimizer)" in messages[4]
    for found, messages_there in ranks(2).run(train_in_turns, "zero"):
        assert found == digest
        assert messages_there.count("stepped") == 4
        assert "without gradients: its parameters are in none of the models" in messages_there[3]
        assert messages_there[4] == messages[4]


def share_a_parameter(world: World) -> str:
    run = Run(None, world, parallel="zero")
    model = run.prepare(Wide())
    for part in (model, model.first):
        run.optimizer(part, lambda p: torch.optim.SGD(p, lr=0.01))
    with pytest.raises(UserError) as caught:
        next(iter(run.steps(run.loader(data(), 24, lanes=8), steps=1)))
    run.close()
    return str(caught.value)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    assert "a parameter of shape (211, 37) is in two optimizers" in share_a_parameter(World())
