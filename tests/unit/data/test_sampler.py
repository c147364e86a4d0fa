"""The distributed sampler: torch's contract, and batches whose union does not depend on the ranks."""

from collections import Counter
from collections.abc import Sized
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lockstep.data.order import Order
from lockstep.data.sampler import DistributedSampler


def indices(kind: Any, length: int, size: int, **options: Any) -> list[list[int]]:
    """Each rank's indices."""
    samplers = [kind(range(length), size, rank, **options) for rank in range(size)]
    parts = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    return parts


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
@settings(max_examples=80, deadline=None)
def test_the_contract_of_torchs_sampler(length: int, size: int, drop_last: bool) -> None:
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
    order = Order(length, 5, epoch).indices(0, length).tolist()
    samplers: list[Any] = [DistributedSampler(range(length), size, rank, seed=5) for rank in range(size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(torch.utils.data.BatchSampler(sampler, global_batch // size, False)) for sampler in samplers]
    for number, parts in enumerate(zip(*batches, strict=True)):
        united = Counter(index for part in parts for index in part)
        expected = order[number * global_batch : (number + 1) * global_batch]
        # A last batch is filled up to a multiple of the ranks.
        assert (
            united - Counter(expected) == Counter() if len(expected) == global_batch else set(expected) <= united.keys()
        )
        assert len(expected) <= united.total() < len(expected) + size


def test_epochs_and_seeds_shuffle_anew() -> None:
    sampler: Any = DistributedSampler(range(50), 2, 0, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(DistributedSampler(range(50), 2, 0, seed=2)) != first


def test_alone_without_a_process_group() -> None:
    assert sorted(DistributedSampler(range(5))) == [0, 1, 2, 3, 4]


def test_it_passes_where_torchs_is_asked_for() -> None:
    assert isinstance(DistributedSampler(range(5)), TorchDistributedSampler)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="rank"):
        DistributedSampler(range(5), 2, 2)


def test_nothing_of_the_data_sets_size_is_held() -> None:
    class Endless(Sized):
        def __len__(self) -> int:
            return 10**15

    sampler: Any = DistributedSampler(Endless(), 4, 1)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(3)] == [Order(10**15, 0, 0)[position] for position in (1, 5, 9)]


def test_more_than_a_chunk() -> None:
    first, second = indices(DistributedSampler, 20_001, 2)
    order = Order(20_001, 0, 0).indices(0, 20_001).tolist()
    assert first == order[::2]
    assert second == [*order[1::2], order[0]]


def test_in_a_dataloader() -> None:
    loader = DataLoader(range(10), 5, sampler=DistributedSampler(range(10), 1, 0))  # type: ignore[arg-type, var-annotated]
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(10))
