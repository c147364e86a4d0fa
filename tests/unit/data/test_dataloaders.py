"""DataLoaders for a loop of one's own: the training set shared out each epoch, the other one exactly once."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data.dataloaders import create_dataloaders_distributed
from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.test_loader import Stream
from tests.unit.data.test_samples import Augmented, draw, seed_all

TRAIN, VAL = TensorDataset(torch.arange(47)), TensorDataset(torch.arange(17))


def loaders(rank: int = 0, size: int = 1, **options: Any) -> Any:
    return create_dataloaders_distributed(
        TRAIN, VAL, **({"batch_size": 12, "world": World(rank=rank, size=size)} | options)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_batch_size_is_that_of_all_ranks(size: int) -> None:
    batches: list[set[int]] = [set() for _ in range(3)]
    for rank in range(size):
        train = loaders(rank, size, seed=3).train
        train.sampler.set_epoch(2)
        assert len(train) == 3
        for batch, (part,) in zip(batches, train, strict=True):
            assert len(part) == 12 // size
            batch.update(part.tolist())
    order = Order(47, 3, 2).indices(0, 36).reshape(3, 12).tolist()
    assert batches == [set(indices) for indices in order]


def test_per_device() -> None:
    assert [len(part) for (part,) in loaders(0, 2, batch_size=5, per_device=True).train] == [5] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_validation_sees_every_sample_exactly_once(size: int) -> None:
    seen, lengths = [], []
    for rank in range(size):
        own = [
            index
            for (part,) in loaders(rank, size, batch_size=2 * size, drop_last=False).val
            for index in part.tolist()
        ]
        seen += own
        lengths.append(len(own))
    assert seen == list(range(17))
    assert max(lengths) - min(lengths) <= 1


def test_without_a_validation_set() -> None:
    assert create_dataloaders_distributed(TRAIN, batch_size=4).val is None


def test_keeping_the_last_batch() -> None:
    parts = [[part.tolist() for (part,) in loaders(rank, 2, drop_last=False).train] for rank in range(2)]
    assert [len(part) for part in parts[0]] == [6, 6, 6, 6]
    assert {index for part in parts for batch in part for index in batch} == set(range(47))


def test_options_reach_both_loaders() -> None:
    both = loaders(collate_fn=len, num_workers=1, pin_memory=False)
    assert [loader.num_workers for loader in both] == [1, 1]
    assert [next(iter(loader)) for loader in both] == [12, 12]
    assert [loader.pin_memory for loader in loaders()] == [False, False]


def test_the_callers_stream_is_not_disturbed() -> None:
    seed_all()
    undisturbed = draw()
    seed_all()
    for loader in loaders():
        for _ in loader:
            pass
    assert draw() == undisturbed


def test_workers_of_different_ranks_draw_different_numbers() -> None:
    drawn = []
    for rank in range(2):
        train = create_dataloaders_distributed(
            Augmented(), batch_size=8, world=World(rank=rank, size=2), num_workers=1
        ).train
        drawn.append(next(iter(train))["noise"].tolist())
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"batch_size": 13, "world": World(size=2)},
            "batch_size=13 cannot be shared equally by 2 processes: use a multiple of 2",
        ),
        ({"batch_size": 0}, "batch_size=0: expected 1 or more"),
        ({"batch_size": 52, "world": World(size=2)}, "batch_size=52 over all processes is larger than .* 47 samples"),
        ({"batch_size": 26, "world": World(size=2), "per_device": True}, "batch_size=52 over all processes is larger"),
    ],
)
def test_impossible_loaders(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("47 samples", r"\(47 samples\)")):
        loaders(**options)


def test_iterable_data_sets_are_refused() -> None:
    with pytest.raises(UserError, match="Stream is an iterable data set"):
        create_dataloaders_distributed(Stream(), batch_size=2)
