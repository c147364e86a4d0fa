"""Global batches: disjoint, complete, the same samples at any number of processes."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from lockstep.data.batches import GlobalBatchSampler, evaluation_loader, share
from lockstep.errors import UserError
from lockstep.world.world import World


def batches(length: int, batch: int, size: int, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    """Every global batch, put together from all ranks."""
    samplers = [GlobalBatchSampler(length, batch, World(rank=rank, size=size), seed) for rank in range(size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(chain(*parts)) for parts in zip(*samplers, strict=True)]


@given(st.integers(0, 1000), st.integers(1, 40))
def test_shares_are_disjoint_complete_and_even(total: int, size: int) -> None:
    parts = [share(total, World(rank=rank, size=size)) for rank in range(size)]
    assert [index for part in parts for index in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_processes(size: int) -> None:
    assert batches(50, 8, size) == batches(50, 8, 1)


def test_an_epoch_uses_no_sample_twice_and_drops_only_the_tail() -> None:
    seen = list(chain(*batches(50, 8, 3)))
    assert len(seen) == len(set(seen)) == 48


def test_epochs_and_seeds_reshuffle() -> None:
    orders = [batches(50, 8, 2, epoch, seed) for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert batches(50, 8, 2, epoch=1) == orders[1]


@pytest.mark.parametrize(
    ("length", "batch", "size", "words"),
    [(0, 8, 1, "empty"), (7, 8, 1, "larger than the training data set"), (50, 3, 4, "without a sample")],
)
def test_impossible_batches(length: int, batch: int, size: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        GlobalBatchSampler(length, batch, World(size=size), 0)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_evaluation_sees_every_sample_exactly_once(size: int) -> None:
    dataset = TensorDataset(torch.arange(17))
    seen: list[int] = []
    for rank in range(size):
        for (values,) in evaluation_loader(dataset, 4, World(rank=rank, size=size)):
            seen += values.tolist()
    assert sorted(seen) == list(range(17))
