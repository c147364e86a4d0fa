"""EvaluationLoader: every sample exactly once, in chunks that do not depend on the ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from lockstep.data.distributed_dataloaders import create_dataloaders_distributed
from lockstep.data.evaluation_loader import EvaluationLoader, share_for_rank
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.datasets import Augmented, Stream


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_chunks_are_complete_and_do_not_depend_on_the_ranks(length: int, batch: int, size: int) -> None:
    chunks = []
    for rank in range(size):
        loader = EvaluationLoader(numbers(length), batch, World(rank=rank, size=size))
        own = [(part.chunk, part.data[0].tolist(), part.size) for part in loader]
        assert len(loader) == len(own)
        chunks += own
    assert [chunk for chunk, _, _ in chunks] == list(range(len(chunks)))
    assert [index for _, indices, _ in chunks for index in indices] == list(range(length))
    assert all(size == len(indices) for _, indices, size in chunks)
    assert all(size == batch for _, _, size in chunks[:-1])


@given(st.integers(0, 1000), st.integers(1, 40))
def test_shares_are_disjoint_complete_and_even(total: int, size: int) -> None:
    parts = [share_for_rank(total, World(rank=rank, size=size)) for rank in range(size)]
    assert [index for part in parts for index in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_random_transforms_draw_the_same_every_time() -> None:
    loader = EvaluationLoader(Augmented(10), 4, World())
    first, again = ([part.data["noise"].tolist() for part in loader] for _ in range(2))
    assert first == again
    smaller = [row for part in EvaluationLoader(Augmented(10), 3, World()) for row in part.data["noise"].tolist()]
    assert smaller == [row for noise in first for row in noise]


def test_collating() -> None:
    assert [part.data for part in EvaluationLoader(list("abcde"), 2, World(), collate="".join)] == ["ab", "cd", "e"]


@pytest.mark.parametrize(
    ("dataset", "batch", "words"),
    [
        ([], 4, "the evaluation data set is empty"),
        ([1], 0, "batch=0: expected 1 or more"),
        (Stream(), 4, "Stream is an iterable data set"),
    ],
)
def test_impossible_loaders(dataset: Any, batch: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        EvaluationLoader(dataset, batch, World())


def indices_of(loader: DataLoader[Any]) -> list[list[int]]:
    """Return what two ranks evaluate together, given a DataLoader."""
    parts = [EvaluationLoader(loader, None, World(rank=rank, size=2)) for rank in range(2)]
    return [part.data[0].tolist() for loader in parts for part in loader]


SET = numbers(7)


@pytest.mark.parametrize(
    "sampler",
    [None, SequentialSampler(SET), RandomSampler(SET), DistributedSampler(SET, 2, 0)],
    ids=["none", "sequential", "random", "distributed"],
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_samples_of_a_dataloader_are_evaluated_once(sampler: Any, drop_last: bool) -> None:
    loader = DataLoader(SET, 3, sampler=sampler, drop_last=drop_last)
    assert indices_of(loader) == [[0, 1, 2], [3, 4, 5], [6]], "all samples, once"


def test_a_dataloader_of_a_subset_evaluates_that_subset() -> None:
    assert indices_of(DataLoader(SET, 2, sampler=SubsetRandomSampler([5, 1, 3]))) == [[1, 3], [5]]
    assert indices_of(DataLoader(Subset(SET, [5, 1, 3]), 2)) == [[5, 1], [3]]


def test_a_dataloader_of_one_ranks_subset_means_the_whole_data_set() -> None:
    for rank in range(2):
        loaders = create_dataloaders_distributed(SET, SET, batch_size=4, world=World(rank=rank, size=2))
        assert loaders.val is not None
        assert indices_of(loaders.val) == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_dataloaders_collate_function_and_workers_are_used() -> None:
    loader: DataLoader[Any] = DataLoader(list("abc"), 2, collate_fn="".join)  # type: ignore[arg-type]
    assert [part.data for part in EvaluationLoader(loader, None, World())] == ["ab", "c"]
    loader = DataLoader(SET, 4, num_workers=1)
    assert EvaluationLoader(loader, None, World())._workers.count == 1


class Own(Sampler[int]):
    def __iter__(self) -> Any:
        return iter([1, 2])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": Own(), "batch_size": 2},
        {"batch_sampler": BatchSampler(Own(), 2, False)},
        {"sampler": RandomSampler(SET, replacement=True), "batch_size": 2},
        {"sampler": RandomSampler(SET, num_samples=3), "batch_size": 2},
        {"batch_size": None},
    ],
)
def test_a_dataloader_that_does_not_say_which_samples_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="give the data set itself"):
        EvaluationLoader(DataLoader(SET, **options), 2, World())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_equal_numbers_of_chunks_count_every_sample_once(num_ranks: int) -> None:
    loader = EvaluationLoader(TensorDataset(torch.arange(19)), 4, World())  # 5 chunks
    shares = [list(loader.with_equal_chunks(World(rank=rank, size=num_ranks))) for rank in range(num_ranks)]
    assert {len(share) for share in shares} == {-(-5 // num_ranks)}
    counted = [number for share in shares for batch in share if batch.counts for number in batch.data[0].tolist()]
    assert sorted(counted) == list(range(19))
    assert not any(batch.counts for batch in loader.with_equal_chunks(World(), counts=False))
    assert len(list(loader)) == 5
