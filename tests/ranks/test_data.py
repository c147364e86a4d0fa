"""Data on several ranks: epochs of streams end together, TorchLoaders stay in step, and samples are split."""

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lockstep.data.distributed_dataloaders import DistributedSampler, create_dataloaders_distributed
from lockstep.data.iterable_loader import IterableLaneLoader, merge_states
from lockstep.data.lane_loader import LaneLoader
from lockstep.data.loader_factory import rebuild
from lockstep.errors import UserError
from lockstep.testing import RanksFailed, ranks
from lockstep.world.collectives import all_reduce
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.world import World
from tests.unit.data.datasets import Augmented, Cursors, Lines, Plain, flat, read, starting_by

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


class Rows(IterableDataset[tuple[str, int]]):
    """A heading, then `length` numbered rows: those that `keep` says for this rank, with noise if it is asked for."""

    def __init__(self, keep: slice, *, length: int = 40, is_noisy: bool = False) -> None:
        self.keep = keep
        self.length = length
        self.is_noisy = is_noisy
        self.noise = random.Random()  # not seeded

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield from [("heading", 0.0)] * 8
        for number in range(self.length)[self.keep]:
            yield f"row {number}", self.noise.random() if self.is_noisy else random.random()


def read_rows(world: World, how: str, workers: int, nodes: int) -> tuple[int, str]:
    """Return how many batches were read, and what was said about the rows."""
    keep = {
        "interleaved": slice(world.rank, None, world.size),
        "in blocks": slice(world.rank * 20, (world.rank + 1) * 20),
        "shorter": slice(0, 40 - 8 * world.rank),
    }.get(how, slice(None))
    world = replace(world, node=world.rank % nodes)
    data = Rows(keep, is_noisy=how == "noisy")
    loader = IterableLaneLoader(iter(data) if how == "once" else data, 8, world, lanes=4, seed=1, workers=workers)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    number = 0
    try:
        for number, _ in enumerate(loader.batches(0, None, epochs=2 if how != "once" else 1), 1):  # noqa: B007
            pass
    except UserError as error:
        said.append(str(error))
    finally:
        logging.getLogger("lockstep").removeHandler(handler)
    return number, "\n".join(said)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("how", "row"), [("interleaved", 8), ("in blocks", 8), ("shorter", 40)])
def test_a_stream_that_depends_on_the_rank_is_refused_at_the_first_row_that_differs(
    how: str, row: int, workers: int
) -> None:
    for number, said in ranks(2).run(read_rows, how, workers, nodes=1):
        assert number == row // 8
        assert f"row {row} of epoch 0 is not the same on rank 1 as on rank 0" in said
        assert "would be sharded twice" in said


@pytest.mark.parametrize("workers", [0, 1])
def test_noise_that_nobody_seeds_is_a_warning_and_only_one(workers: int) -> None:
    first, second = ranks(2).run(read_rows, "noisy", workers, nodes=1)
    assert first[0] == second[0] == 12
    assert first[1].count("rows may be missing or repeated") == 1
    assert second[1] == ""


def test_machines_that_compute_other_rows_are_a_warning() -> None:
    """They may only round differently."""
    (number, said), _ = ranks(2).run(read_rows, "shorter", 0, nodes=2)
    assert number == 10
    assert "rows may be missing or repeated" in said


def test_a_stream_that_can_be_read_only_once_is_not_read_again() -> None:
    assert ranks(2).run(read_rows, "once", 0, nodes=1) == [(6, ""), (6, "")]


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 1), (3, 0)])
def test_seeded_random_numbers_are_not_mistaken_for_sharding(size: int, workers: int) -> None:
    assert ranks(size).run(read_rows, "whole", workers, nodes=1) == [(12, "")] * size


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
