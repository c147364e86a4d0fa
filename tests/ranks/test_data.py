"""Data on several ranks: epochs of streams end together, TorchLoaders stay in step, and samples are split."""

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lockstep.data.distributed_dataloaders import DistributedSampler, create_dataloaders_distributed
from lockstep.data.iterable_loader import IterableLaneLoader, merge_states
from lockstep.data.lane_loader import LaneLoader
from lockstep.data.loader_factory import rebuild
from lockstep.testing import RanksFailed, ranks
from lockstep.world.collectives import all_reduce
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.world import World
from tests.unit.data.datasets import Augmented, Cursors, Lines, Plain, flat, read

Batches = list[tuple[Any, ...]]

# Lanes of different lengths, so that each rank alone would end its epochs at another batch.
UNEVEN = {0: 9, 1: 4, 2: 5, 3: 7}


def stream_of(kind: str) -> Any:
    return {"lanes": lambda: Lines(lengths=UNEVEN), "cursors": Cursors, "plain": lambda: Plain(21)}[kind]()


def open_stream(world: World, kind: str, tail: Any, workers: int = 0) -> IterableLaneLoader:
    return IterableLaneLoader(stream_of(kind), 8, world, lanes=4, seed=1, tail=tail, workers=workers)


def read_stream(world: World, kind: str, tail: str, stop: int) -> Batches:
    return [read(batch) for batch in open_stream(world, kind, tail).batches(0, stop)]


def united(parts: list[Batches]) -> Batches:
    """Return all ranks' batches as one rank would have read them."""
    batches = []
    for of_ranks in zip(*parts, strict=True):
        assert len({batch[:3] for batch in of_ranks}) == 1, f"number, epoch and size agree: {of_ranks}"
        batches.append((*of_ranks[0][:3], [lane for batch in of_ranks for lane in batch[3]]))
    return batches


@pytest.mark.parametrize("tail", ["drop", "short"])
@pytest.mark.parametrize("kind", ["lanes", "cursors", "plain"])
def test_epochs_end_together_at_any_number_of_ranks(kind: str, tail: str) -> None:
    alone = read_stream(World(), kind, tail, 9)
    assert len({epoch for _, epoch, _, _ in alone}) > 1
    for size in (2, 3):
        assert united(ranks(size).run(read_stream, kind, tail, 9)) == alone


def save_in_the_middle(world: World, kind: str, tail: str, stop: int) -> str:
    loader = open_stream(world, kind, tail)
    for _ in loader.batches(0, stop):
        pass
    return json.dumps(merge_states(all_gather_object(loader.state_dict())))


def resume(world: World, kind: str, tail: str, state: str, stop: int, workers: int = 0) -> Batches:
    loader = open_stream(world, kind, tail, workers)
    loader.load_state_dict(json.loads(state))
    return [read(batch) for batch in loader.batches(json.loads(state)["number"], stop)]


@pytest.mark.parametrize("tail", ["drop", "short"])
@pytest.mark.parametrize("kind", ["lanes", "cursors", "plain"])
def test_a_position_saved_at_one_number_of_ranks_is_resumed_at_another(kind: str, tail: str) -> None:
    alone = read_stream(World(), kind, tail, 9)
    for number in (1, 4):
        state = ranks(3).run(save_in_the_middle, kind, tail, number)[0]
        assert united(ranks(2).run(resume, kind, tail, state, 9)) == alone[number:]
        assert resume(World(), kind, tail, state, 9) == alone[number:]


def read_nothing(world: World) -> None:
    lengths = {0: 8, 1: 8, 2: 8, 3: 1}  # only the last rank's lane is too short
    next(IterableLaneLoader(Lines(lengths=lengths), 8, world, lanes=4).batches())


def test_all_ranks_raise_if_a_stream_gives_no_batch() -> None:
    with pytest.raises(RanksFailed, match="2 of 2 ranks failed") as caught:
        ranks(2).run(read_nothing)
    assert str(caught.value).count("UserError: epoch 0 of the iterable data set gave too few samples") == 2


class Uneven(Sampler[int]):
    """Rank 1 has fewer samples than the others."""

    def __init__(self, rank: int, sized: bool) -> None:
        self.length = 4 if rank == 1 else 8
        self.sized = sized

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("no length")
        return self.length


def read_torch_loader(world: World, sized: bool) -> list[tuple[int, int, int, int]]:
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, sampler=Uneven(world.rank, sized))
    batches = rebuild(loader, world, seed=0).batches(0, 5)
    # A collective in each step, as in training: it hangs if the ranks get out of step.
    return [(batch.number, batch.epoch, batch.size, int(all_reduce(torch.tensor([batch.number])))) for batch in batches]


@pytest.mark.parametrize("sized", [True, False])
def test_torch_loaders_of_different_lengths_stay_in_step(sized: bool) -> None:
    for batches in ranks(3).run(read_torch_loader, sized):
        assert batches == [(number, number // 2, 6, 3 * number) for number in range(5)]


class TooLong(Uneven):
    def __len__(self) -> int:
        return 8


def read_too_long(world: World) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), 2, sampler=TooLong(world.rank, sized=True))
    for batch in rebuild(loader, world, seed=0).batches(0, 5):
        all_reduce(torch.tensor([batch.number]))


def test_a_torch_loader_that_ends_before_its_length_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="gave 2 batches, but its length is 4"):
        ranks(2).run(read_too_long)


def split_data(world: World) -> tuple[list[list[int]], list[int], list[int]]:
    """Split the data without a `world` argument, over the process group."""
    dataset = TensorDataset(torch.arange(50))
    loaders = create_dataloaders_distributed(dataset, TensorDataset(torch.arange(7)), batch_size=8, seed=3)
    assert loaders.val is not None
    train = [batch.tolist() for (batch,) in loaders.train]
    validation = [index for (batch,) in loaders.val for index in batch.tolist()]
    return train, validation, list(DistributedSampler(range(6)))


def test_dataloaders_are_split_over_the_process_group() -> None:
    first, second = ranks(2).run(split_data)
    alone = split_data(World())
    assert [sorted(a + b) for a, b in zip(first[0], second[0], strict=True)] == [sorted(batch) for batch in alone[0]]
    assert first[1] + second[1] == alone[1] == list(range(7))
    assert [index for pair in zip(first[2], second[2], strict=True) for index in pair] == alone[2]


def read_with_workers(world: World, workers: int) -> list[Any]:
    loader = LaneLoader(Augmented(11), 8, world, lanes=4, tail="short", workers=workers)
    return flat(list(loader.batches(0, 4)))


def test_workers_in_several_ranks() -> None:
    assert ranks(2).run(read_with_workers, 1) == ranks(2).run(read_with_workers, 0)


def read_ahead(world: World, kind: str, tail: Any, workers: int, start_method: str) -> tuple[Batches, list[str]]:
    """Return the batches, and the position of all ranks after each."""
    loader = open_stream(world, kind, tail, workers)
    batches, states = [], []
    with starting_by(start_method):
        for batch in loader.batches(0, 9):
            batches.append(read(batch))
            states.append(json.dumps(merge_states(all_gather_object(loader.state_dict()))))
    return batches, states


@contextmanager
def starting_by(start_method: str) -> Iterator[None]:
    """Start child processes by this method: spawned ranks spawn theirs by default, but under torchrun they fork."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(start_method, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("tail", ["drop", "short"])
@pytest.mark.parametrize("kind", ["lanes", "cursors", "plain"])
def test_workers_that_read_ahead_change_neither_batches_nor_positions(kind: str, tail: str) -> None:
    alone, states = read_ahead(World(), kind, tail, 0, "fork")
    for workers in (0, 1, 4):
        results = ranks(2).run(read_ahead, kind, tail, workers, "fork")
        assert united([batches for batches, _ in results]) == alone
        assert [positions for _, positions in results] == [states, states]


def test_workers_may_be_spawned() -> None:
    assert ranks(1).run(read_ahead, "lanes", "short", 1, "spawn") == [read_ahead(World(), "lanes", "short", 0, "fork")]


def resume_everywhere(world: World, kind: str, states: list[str]) -> list[Batches]:
    with starting_by("fork"):
        return [resume(world, kind, "short", state, number + 2, workers=2) for number, state in enumerate(states, 1)]


@pytest.mark.parametrize("kind", ["lanes", "cursors", "plain"])
def test_workers_resume_at_every_batch(kind: str) -> None:
    alone, states = read_ahead(World(), kind, "short", 0, "fork")
    results = ranks(2).run(resume_everywhere, kind, states[:-2])
    for number, parts in enumerate(zip(*results, strict=True), 1):
        assert united(list(parts)) == alone[number : number + 2]
