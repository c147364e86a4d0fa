"""Iterable data sets: lanes of a stream, epochs that end, and a position that can be saved at every batch."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from lockstep.data.iterable import IterableLaneLoader, merge_states
from lockstep.data.samples import is_iterable
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.test_samples import draw, seed_all


class Lines:
    """A stream of `length` samples per lane, or as many as `lengths` says."""

    def __init__(self, length: int = 5, lengths: dict[int, int] | None = None) -> None:
        self.length = length
        self.lengths = lengths or {}
        self.opened: list[tuple[int, int, int]] = []

    def lane(self, lane: int, num_lanes: int, epoch: int) -> Iterator[float]:
        self.opened.append((lane, num_lanes, epoch))
        for number in range(self.lengths.get(lane, self.length)):
            # What the streams give is part of the sample, so that resuming must seed them alike.
            yield epoch * 1000 + lane * 100 + number + 0.3 * (torch.rand(1).item() + np.random.rand() + random.random())


class Cursor:
    """An iterator that can say where it is. Reading it before the position is an error, so skipping shows."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.position = 0
        self.is_restored = False

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> float:
        if self.position == len(self.values):
            raise StopIteration
        self.position += 1
        return self.values[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert self.position == 0, "restored before it is read"
        self.is_restored = True
        self.position = state["position"]


class Cursors:
    def __init__(self) -> None:
        self.made: list[Cursor] = []

    def lane(self, lane: int, _num_lanes: int, epoch: int) -> Cursor:
        self.made.append(Cursor([float(epoch * 1000 + lane * 100 + number) for number in range(5)]))
        return self.made[-1]


class Plain(IterableDataset[float]):
    """No lanes, no epochs: the same stream each time, but for what it draws."""

    def __init__(self, length: int = 22) -> None:
        self.length = length

    def __iter__(self) -> Iterator[float]:
        for number in range(self.length):
            yield number + 0.5 * random.random()


class PlainWithEpochs(Plain):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        return (number + self.epoch * 1000 for number in super().__iter__())


class PlainCursor(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return Cursor([float(number) for number in range(22)])


def read(batch: Any) -> tuple[Any, ...]:
    lanes = [(lane.lane, None if lane.data is None else lane.data.tolist(), lane.size) for lane in batch.lanes]
    return batch.number, batch.epoch, batch.size, lanes


def loader_of(dataset: Any, **options: Any) -> IterableLaneLoader:
    return IterableLaneLoader(dataset, 8, World(), **({"lanes": 4, "seed": 1} | options))


SETS = [Lines, Cursors, Plain, PlainWithEpochs, PlainCursor]


def test_a_lane_yields_its_own_samples_in_order() -> None:
    dataset = Lines(5)
    batches = list(loader_of(dataset).batches(0, 5))
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1, 2], "the fifth sample fills no lane"
    assert [batch.size for batch in batches] == [8] * 5
    whole = [[int(value) for value in lane.data] for batch in batches[2:4] for lane in batch.lanes]
    assert whole == [
        [1000, 1001],
        [1100, 1101],
        [1200, 1201],
        [1300, 1301],
        [1002, 1003],
        [1102, 1103],
        [1202, 1203],
        [1302, 1303],
    ]
    assert dataset.opened[:5] == [(0, 4, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0), (0, 4, 1)]


def test_a_plain_stream_is_dealt_out_to_the_lanes() -> None:
    batches = list(loader_of(Plain(22), tail="short").batches(0, 4))
    assert [[int(value) for value in lane.data] for lane in batches[1].lanes] == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert [(batch.epoch, batch.size) for batch in batches] == [(0, 8), (0, 8), (0, 6), (1, 8)]
    assert [lane.size for lane in batches[2].lanes] == [2, 2, 1, 1]


def test_a_plain_stream_is_told_the_epoch() -> None:
    batches = [next(iter(batch.lanes[0].data.tolist())) for batch in loader_of(PlainWithEpochs(8)).batches(0, 3)]
    assert [int(value) for value in batches] == [0, 1000, 2000]


class Shuffled(IterableDataset[float]):
    """Draws when it is opened, before the first sample is asked for."""

    def __iter__(self) -> Iterator[float]:
        return iter([random.random()] * 8)


def test_opening_a_stream_is_keyed_too() -> None:
    first, second, third = (batch.lanes[0].data[0].item() for batch in loader_of(Shuffled()).batches(0, 3))
    assert len({first, second, third}) == 3
    random.seed(99)
    assert next(loader_of(Shuffled()).batches(1)).lanes[0].data[0].item() == second


@pytest.mark.parametrize("kind", [Plain, PlainWithEpochs])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_takes_its_lanes_of_a_plain_stream(kind: type[Plain], size: int) -> None:
    """Without a process group the ranks cannot add up their samples; full batches alone agree. See tests/ranks."""
    alone = [read(batch) for batch in loader_of(kind(16), tail="short").batches(0, 2)]
    lanes: list[list[Any]] = [[], []]
    for rank in range(size):
        loader = IterableLaneLoader(kind(16), 8, World(rank=rank, size=size), lanes=4, seed=1, tail="short")
        for parts, batch in zip(lanes, loader.batches(0, 2), strict=True):
            parts += read(batch)[3]
    assert lanes == [lanes for _, _, _, lanes in alone]


def test_short_lanes_and_empty_ones() -> None:
    batches = [read(batch) for batch in loader_of(Lines(lengths={0: 1, 1: 2, 2: 3, 3: 0}), tail="short").batches(0, 3)]
    assert [batch[:3] for batch in batches] == [(0, 0, 5), (1, 0, 1), (2, 1, 5)]
    assert [lane[2] for lane in batches[0][3]] == [1, 2, 2, 0]
    assert [lane[2] for lane in batches[1][3]] == [0, 0, 1, 0]
    assert batches[1][3][0] == (0, None, 0)


def test_drop_ends_at_the_first_lane_that_cannot_be_filled() -> None:
    batches = loader_of(Lines(length=9, lengths={2: 5})).batches(0, 3)
    assert [batch.epoch for batch in batches] == [0, 0, 1]


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("tail", ["drop", "short"])
def test_resuming_at_every_batch_equals_going_on(kind: type, tail: Any) -> None:
    stop = 9
    whole, states = [], []
    loader = loader_of(kind(), tail=tail)
    states.append(json.loads(json.dumps(loader.state_dict())))
    for batch in loader.batches(0, stop):
        whole.append(read(batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert len({epoch for _, epoch, _, _ in whole}) > 2
    for number, state in enumerate(states):
        dataset = kind()
        resumed = loader_of(dataset, tail=tail)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [read(batch) for batch in resumed.batches(number, stop)] == whole[number:]
        if kind is Cursors and 0 < number < stop:
            assert all(cursor.is_restored for cursor in dataset.made[:4]), "nothing was skipped by reading it"


@pytest.mark.parametrize("kind", SETS)
def test_any_start_equals_iterating_to_it(kind: type) -> None:
    whole = [read(batch) for batch in loader_of(kind()).batches(0, 7)]
    for start in (0, 1, 4, 6):
        assert [read(batch) for batch in loader_of(kind()).batches(start, 7)] == whole[start:]


def test_the_same_loader_again_from_any_place() -> None:
    loader = loader_of(Lines())
    whole = [read(batch) for batch in loader.batches(0, 7)]
    assert [read(batch) for batch in loader.batches(2, 7)] == whole[2:], "back"
    list(loader.batches(0, 3))
    assert [read(batch) for batch in loader.batches(3, 7)] == whole[3:], "on from where it stands"
    list(loader.batches(0, 3))
    assert [read(batch) for batch in loader.batches(5, 7)] == whole[5:], "further"


def test_a_position_saved_by_some_ranks_is_taken_up_by_any_other_number() -> None:
    """Each rank's loader stands for itself here: with full batches they need not ask each other."""
    whole = [read(batch) for batch in loader_of(Lines(20)).batches(0, 6)]
    states = []
    for rank in range(2):
        loader = IterableLaneLoader(Lines(20), 8, World(rank=rank, size=2), lanes=4, seed=1, tail="short")
        list(islice(loader.batches(), 3))
        states.append(loader.state_dict())
        assert loader.state_dict()["streams"].keys() == {str(2 * rank), str(2 * rank + 1)}
    merged = merge_states(states)
    alone = loader_of(Lines(20))
    alone.load_state_dict(merged)
    assert [read(batch) for batch in alone.batches(3, 6)] == whole[3:]
    parts = []
    for rank in range(4):
        loader = IterableLaneLoader(Lines(20), 8, World(rank=rank, size=4), lanes=4, seed=1, tail="short")
        loader.load_state_dict(merged)
        assert loader.state_dict()["streams"].keys() == {str(rank)}
        parts += [read(next(loader.batches(3)))[3][0]]
    assert parts == whole[3][3]
    with pytest.raises(UserError, match="the saved position lacks lanes 2, 3: merge the states of all ranks"):
        loader_of(Lines(20)).load_state_dict(states[0])


def test_randomness_is_keyed_by_lane_and_number() -> None:
    whole = [read(batch) for batch in loader_of(Lines(20)).batches(0, 4)]
    assert [read(batch) for batch in loader_of(Lines(20)).batches(0, 4)] == whole
    torch.manual_seed(99)
    assert [read(batch) for batch in loader_of(Lines(20)).batches(0, 4)] == whole
    other = [read(batch) for batch in loader_of(Lines(20), seed=2).batches(0, 4)]
    fractions = [{value % 1 for _, values, _ in lanes for value in values} for _, _, _, lanes in whole + other]
    assert len(set().union(*fractions)) == 64, "no two samples draw the same"


def test_the_callers_streams_are_not_disturbed() -> None:
    seed_all()
    undisturbed = [draw() for _ in range(3)]
    seed_all()
    assert [draw() for _ in loader_of(Lines()).batches(0, 3)] == undisturbed


class Once(IterableDataset[int]):
    """A stream that is used up after its first epoch."""

    def __init__(self) -> None:
        self.iterator = iter(range(16))

    def __iter__(self) -> Iterator[int]:
        return self.iterator


@pytest.mark.parametrize(
    ("dataset", "tail", "words"),
    [
        (Lines(0), "short", "epoch 0 of the iterable data set gave no sample"),
        (Lines(0), "drop", "epoch 0 of the iterable data set gave no sample"),
        (Lines(1), "drop", "epoch 0 .* gave too few samples for a batch of global_batch=8"),
        (Lines(lengths={3: 0}), "drop", "epoch 0 .* gave too few samples"),
        (Once(), "drop", "epoch 1 .* gave no sample: each epoch must be a stream of its own"),
    ],
)
def test_a_stream_without_a_batch_is_an_error_and_not_an_endless_loop(dataset: Any, tail: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(loader_of(dataset, tail=tail).batches(0, 5))


def test_resuming_at_an_epochs_end_is_no_empty_epoch() -> None:
    loader = loader_of(Lines(2))
    next(loader.batches())
    resumed = loader_of(Lines(2))
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed.batches(1)).epoch == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tail": "pad"}, "tail='pad' needs a data set with a length: use 'drop' or 'short'"),
        ({"tail": "wrap"}, "tail='wrap': expected one of"),
        ({"workers": -1}, r"workers=-1: expected 0 \(this process fetches\) or more"),
        ({"prefetch": 0}, "prefetch=0: expected 1 or more global batches"),
        ({"lanes": 16}, "global_batch=8 cannot be cut into lanes=16"),
        ({"lanes": 3}, "lanes=3: expected a power of two"),
    ],
)
def test_impossible_loaders(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        loader_of(Lines(), **options)
    assert "\n" not in str(caught.value)


def test_a_position_that_does_not_fit_is_refused() -> None:
    loader = loader_of(Lines(5))
    list(loader.batches(0, 2))
    state = loader.state_dict()
    with pytest.raises(UserError, match="the saved position has 4 lanes, and this loader has 8"):
        loader_of(Lines(5), lanes=8).load_state_dict(state)
    shorter = loader_of(Lines(3))
    shorter.load_state_dict(state)
    with pytest.raises(UserError, match="ends after 3 samples, but 4 had been taken: the data has changed"):
        next(shorter.batches(2))
    loader = loader_of(Cursors())
    list(loader.batches(0, 2))
    without = loader_of(Lines(5))
    without.load_state_dict(loader.state_dict())
    with pytest.raises(UserError, match="needs an iterator with load_state_dict"):
        next(without.batches(2))


def test_it_has_no_length() -> None:
    with pytest.raises(TypeError, match="count steps instead of epochs"):
        len(loader_of(Lines()))


class Broken:
    def lane(self, *_: int) -> Iterator[int]:
        yield 1
        raise ValueError("a planted failure")


def test_an_error_names_the_place() -> None:
    with pytest.raises(ValueError, match="a planted failure") as caught:
        next(loader_of(Broken()).batches())
    assert caught.value.__notes__ == ["lockstep: while reading sample 1 of an iterable data set (lane 0, epoch 0)"]


def test_what_counts_as_iterable() -> None:
    assert is_iterable(Lines()) and is_iterable(Plain()) and is_iterable(iter([1]))
    assert not is_iterable([1]) and not is_iterable(torch.utils.data.TensorDataset(torch.zeros(1)))
