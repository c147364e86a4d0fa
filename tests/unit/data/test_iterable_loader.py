"""Iterable data sets: lanes of a stream, the end of epochs, and positions saved at every batch."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from lockstep.data.iterable_loader import IterableLaneLoader, merge_states
from lockstep.data.sample_source import is_iterable
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.datasets import SETS, Cursors, Lines, Once, Plain, PlainWithEpochs, draw, loader_of, read, seed_all


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


def test_a_stream_without_lanes_is_split_over_the_lanes() -> None:
    batches = list(loader_of(Plain(22), tail="short").batches(0, 4))
    assert [[int(value) for value in lane.data] for lane in batches[1].lanes] == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert [(batch.epoch, batch.size) for batch in batches] == [(0, 8), (0, 8), (0, 6), (1, 8)]
    assert [lane.size for lane in batches[2].lanes] == [2, 2, 1, 1]


def test_a_stream_without_lanes_gets_set_epoch() -> None:
    batches = [next(iter(batch.lanes[0].data.tolist())) for batch in loader_of(PlainWithEpochs(8)).batches(0, 3)]
    assert [int(value) for value in batches] == [0, 1000, 2000]


class Shuffled(IterableDataset[float]):
    """Draws when it is opened, before the first sample is read."""

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
    """Without a process group ranks cannot add up their samples, so only full batches agree. See tests/ranks."""
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
def test_resuming_at_every_batch_equals_not_stopping(kind: type, tail: Any) -> None:
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


def test_the_same_loader_can_start_again_anywhere() -> None:
    loader = loader_of(Lines())
    whole = [read(batch) for batch in loader.batches(0, 7)]
    assert [read(batch) for batch in loader.batches(2, 7)] == whole[2:], "back"
    list(loader.batches(0, 3))
    assert [read(batch) for batch in loader.batches(3, 7)] == whole[3:], "on from where it stands"
    list(loader.batches(0, 3))
    assert [read(batch) for batch in loader.batches(5, 7)] == whole[5:], "further"


def test_a_saved_position_can_be_loaded_by_any_number_of_ranks() -> None:
    """The ranks' loaders run without a process group: full batches need no all-reduce."""
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


def test_the_callers_random_numbers_are_not_disturbed() -> None:
    seed_all()
    undisturbed = [draw() for _ in range(3)]
    seed_all()
    assert [draw() for _ in loader_of(Lines()).batches(0, 3)] == undisturbed


@pytest.mark.parametrize(
    ("dataset", "tail", "words"),
    [
        (Lines(0), "short", "epoch 0 of the iterable data set gave no sample: check the data set$"),
        (Lines(0), "drop", "epoch 0 of the iterable data set gave no sample: check the data set$"),
        (Lines(1), "drop", "epoch 0 .* gave too few samples for a batch of global_batch=8: .* or use tail='short'"),
        (Lines(lengths={3: 0}), "drop", "epoch 0 .* gave too few samples"),
        (Once(), "drop", "epoch 1 .* gave no sample: each epoch must be a new stream"),
    ],
)
def test_a_stream_without_a_batch_is_an_error_not_an_endless_loop(dataset: Any, tail: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(loader_of(dataset, tail=tail).batches(0, 5))


def test_resuming_at_the_end_of_an_epoch_starts_the_next() -> None:
    loader = loader_of(Lines(2))
    next(loader.batches())
    resumed = loader_of(Lines(2))
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed.batches(1)).epoch == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tail": "pad"}, "tail='pad' needs a data set with a length: use tail='drop' or 'short'"),
        ({"tail": "wrap"}, "tail='wrap': expected one of"),
        ({"workers": -1}, r"workers=-1: expected 0 \(this process fetches\) or more"),
        ({"prefetch": 0}, "prefetch=0: expected 1 or more global batches"),
        ({"lanes": 16}, "global_batch=8 cannot be split equally into lanes=16"),
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
    with pytest.raises(UserError, match="ends after 3 samples, but 4 were taken before: the data has changed"):
        next(shorter.batches(2))
    loader = loader_of(Cursors())
    list(loader.batches(0, 2))
    without = loader_of(Lines(5))
    without.load_state_dict(loader.state_dict())
    with pytest.raises(UserError, match="needs an iterator with load_state_dict"):
        next(without.batches(2))


def test_an_iterable_loader_has_no_length() -> None:
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
