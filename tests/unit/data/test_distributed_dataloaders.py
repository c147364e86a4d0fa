"""DistributedSampler and the DataLoaders built on it: torch's contract, and batches that do not depend on the ranks."""

from collections import Counter
from collections.abc import Sized
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lockstep.data.distributed_dataloaders import DistributedSampler, create_dataloaders_distributed
from lockstep.data.sample_order import SampleOrder
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.datasets import Augmented, Stream, draw, seed_all

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
    order = SampleOrder(47, 3, 2).indices(0, 36).reshape(3, 12).tolist()
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


def test_the_callers_random_numbers_are_not_disturbed() -> None:
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


def test_an_empty_data_set_is_refused_as_such() -> None:
    with pytest.raises(UserError, match="the training data set is empty"):
        create_dataloaders_distributed([], batch_size=2, drop_last=False)


def test_iterable_data_sets_are_refused() -> None:
    with pytest.raises(UserError, match="Stream is an iterable data set"):
        create_dataloaders_distributed(Stream(), batch_size=2)


def indices(kind: Any, length: int, size: int, **options: Any) -> list[list[int]]:
    """Return each rank's indices."""
    samplers = [kind(range(length), size, rank, **options) for rank in range(size)]
    parts = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    return parts


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
@settings(max_examples=80, deadline=None)
def test_the_sampler_keeps_torchs_contract(length: int, size: int, drop_last: bool) -> None:
    options = {"shuffle": False, "drop_last": drop_last}
    assert indices(DistributedSampler, length, size, **options) == indices(
        TorchDistributedSampler, length, size, **options
    )
    shuffled = indices(DistributedSampler, length, size, drop_last=drop_last)
    torchs = indices(TorchDistributedSampler, length, size, drop_last=drop_last)
    assert [len(part) for part in shuffled] == [len(part) for part in torchs]
    used = [index for part in shuffled for index in part]
    if drop_last:
        assert len(set(used)) == len(used)
    else:
        assert set(used) == set(range(length))


@given(st.integers(1, 60), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_samples_of_a_step_do_not_depend_on_the_ranks(length: int, size: int, epoch: int) -> None:
    global_batch = 12
    order = SampleOrder(length, 5, epoch).indices(0, length).tolist()
    samplers: list[Any] = [DistributedSampler(range(length), size, rank, seed=5) for rank in range(size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(torch.utils.data.BatchSampler(sampler, global_batch // size, False)) for sampler in samplers]
    for number, parts in enumerate(zip(*batches, strict=True)):
        united = Counter(index for part in parts for index in part)
        expected = order[number * global_batch : (number + 1) * global_batch]
        # The last batch is filled up to a multiple of the number of ranks.
        assert (
            united - Counter(expected) == Counter() if len(expected) == global_batch else set(expected) <= united.keys()
        )
        assert len(expected) <= united.total() < len(expected) + size


def test_epochs_and_seeds_shuffle_differently() -> None:
    sampler: Any = DistributedSampler(range(50), 2, 0, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(DistributedSampler(range(50), 2, 0, seed=2)) != first


def test_the_sampler_without_a_process_group() -> None:
    assert sorted(DistributedSampler(range(5))) == [0, 1, 2, 3, 4]


def test_the_sampler_is_an_instance_of_torchs() -> None:
    assert isinstance(DistributedSampler(range(5)), TorchDistributedSampler)


def test_a_rank_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        DistributedSampler(range(5), 2, 2)


def test_the_sampler_holds_no_list_of_indices() -> None:
    class Endless(Sized):
        def __len__(self) -> int:
            return 10**15

    sampler: Any = DistributedSampler(Endless(), 4, 1)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(3)] == [SampleOrder(10**15, 0, 0)[position] for position in (1, 5, 9)]


def test_the_sampler_over_several_chunks() -> None:
    first, second = indices(DistributedSampler, 20_001, 2)
    order = SampleOrder(20_001, 0, 0).indices(0, 20_001).tolist()
    assert first == order[::2]
    assert second == [*order[1::2], order[0]]


def test_the_sampler_in_a_dataloader() -> None:
    loader = DataLoader(range(10), 5, sampler=DistributedSampler(range(10), 1, 0))  # type: ignore[arg-type, var-annotated]
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(10))
