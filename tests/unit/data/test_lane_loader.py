"""LaneLoader: the same global batches from any start and on any number of ranks, with every sample used or dropped."""

from collections import Counter
from itertools import islice, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lockstep.data.lane_loader import LaneLoader
from lockstep.data.lanes import GlobalBatch, Tail
from lockstep.data.sample_order import SampleOrder
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.datasets import Stream

TAILS: tuple[Tail, ...] = ("drop", "short", "pad")


class Case(NamedTuple):
    """A loader's numbers: n samples, batches of B, V lanes, and how W ranks share them."""

    length: int
    global_batch: int
    lanes: int
    tail: Tail
    per_rank: list[int]

    def loaders(self, **options: Any) -> list[LaneLoader]:
        return [
            LaneLoader(
                TensorDataset(torch.arange(self.length)),
                self.global_batch,
                World(rank=rank, size=len(self.per_rank)),
                lanes=self.lanes,
                tail=self.tail,
                lanes_per_rank=self.per_rank,
                **options,
            )
            for rank in range(len(self.per_rank))
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lanes = draw(st.sampled_from([1, 2, 4, 8]))
    global_batch = lanes * draw(st.integers(1, 5))
    tail = draw(st.sampled_from(TAILS))
    length = draw(st.integers(global_batch if tail == "drop" else 1, 100))
    size = draw(st.integers(1, lanes))
    cuts = (
        draw(st.lists(st.integers(1, lanes - 1), min_size=size - 1, max_size=size - 1, unique=True))
        if lanes > 1
        else []
    )
    bounds = [0, *sorted(cuts), lanes]
    return Case(length, global_batch, lanes, tail, [b - a for a, b in pairwise(bounds)])


class Lane(NamedTuple):
    """A `LaneBatch` that can be compared."""

    lane: int
    indices: list[int]
    size: int
    weight: list[float] | None


class Batch(NamedTuple):
    number: int
    epoch: int
    size: int
    lanes: list[Lane]


def read(batch: GlobalBatch) -> Batch:
    lanes = [
        Lane(
            lane.lane,
            [] if lane.data is None else lane.data[0].tolist(),
            lane.size,
            None if lane.weight is None else lane.weight.tolist(),
        )
        for lane in batch.lanes
    ]
    return Batch(batch.number, batch.epoch, batch.size, lanes)


def together(loaders: list[LaneLoader], start: int, stop: int) -> list[Batch]:
    """Return the global batches, put together from all ranks."""
    united = []
    for parts in zip(*(loader.batches(start, stop) for loader in loaders), strict=True):
        read_parts = [read(part) for part in parts]
        assert len({(part.number, part.epoch, part.size) for part in read_parts}) == 1
        united.append(read_parts[0]._replace(lanes=[lane for part in read_parts for lane in part.lanes]))
    return united


@given(cases(), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_batches_do_not_depend_on_the_ranks(case: Case, seed: int) -> None:
    stop = 2 * len(case.loaders()[0]) + 1
    alone = together(case._replace(per_rank=[case.lanes]).loaders(seed=seed), 0, stop)
    assert together(case.loaders(seed=seed), 0, stop) == alone
    assert [lane.lane for lane in alone[0].lanes] == list(range(case.lanes))


@given(cases(), st.data())
@settings(max_examples=80, deadline=None)
def test_any_start_equals_iterating_to_it(case: Case, data: st.DataObject) -> None:
    loader = case.loaders()[-1]
    stop = 3 * len(loader)
    start = data.draw(st.integers(0, stop))
    whole = [read(batch) for batch in loader.batches(stop=stop)]
    assert [read(batch) for batch in loader.batches(start, stop)] == whole[start:]
    assert [batch.number for batch in whole] == list(range(stop))
    assert [batch.epoch for batch in whole] == [number // len(loader) for number in range(stop)]


@given(cases())
@settings(max_examples=80, deadline=None)
def test_an_epochs_samples(case: Case) -> None:
    loaders = case.loaders()
    loader, epoch = loaders[0], 1
    batches = together(loaders, len(loader), 2 * len(loader))
    order = SampleOrder(case.length, 0, epoch)
    used: Counter[int] = Counter()
    for batch in batches:
        positions_epoch, positions = loader.positions(batch.number)
        assert positions_epoch == epoch
        real = [index for lane in batch.lanes for index in lane.indices[: lane.size]]
        assert sorted(real) == sorted(order.indices(positions.start, positions.stop).tolist())
        assert batch.size == len(real) == sum(lane.size for lane in batch.lanes)
        used.update(real)
    dropped = loader.dropped(epoch)
    used.update(order.indices(dropped.start, dropped.stop).tolist())
    assert used == Counter(range(case.length)), "each sample is used or dropped, once"
    assert case.tail == "drop" or not dropped
    lane_batch = case.global_batch // case.lanes
    for batch in batches:
        full = batch.size == case.global_batch
        for lane in batch.lanes:
            if case.tail == "pad":
                assert lane.weight == [1.0] * lane.size + [0.0] * (lane_batch - lane.size)
                assert len(lane.indices) == lane_batch, "shapes are static"
            else:
                assert lane.weight is None
                assert len(lane.indices) == lane.size
                assert lane.size == lane_batch if full else lane.size <= lane_batch


def test_lanes_are_consecutive_positions_of_the_order() -> None:
    loader = Case(40, 8, 4, "drop", [4]).loaders(seed=5)[0]
    batch = read(next(islice(loader.batches(), 7, None)))
    expected = SampleOrder(40, 5, 1).indices(16, 24).reshape(4, 2).tolist()
    assert [lane.indices for lane in batch.lanes] == expected


def test_a_short_batch_is_spread_evenly() -> None:
    """Otherwise a lane could get a single sample, on which batch norm fails."""
    sizes = [lane.size for lane in together(Case(22, 16, 4, "short", [1, 3]).loaders(), 1, 2)[0].lanes]
    assert sizes == [1, 2, 1, 2]
    batch = together(Case(18, 16, 4, "short", [2, 2]).loaders(), 1, 2)[0]
    assert [lane.size for lane in batch.lanes] == [0, 1, 0, 1]
    assert next(Case(18, 16, 4, "short", [4]).loaders()[0].batches(1)).lanes[0].data is None


def test_padding_repeats_the_order_from_its_beginning_as_often_as_needed() -> None:
    (batch,) = together(Case(3, 8, 2, "pad", [1, 1]).loaders(), 0, 1)
    order = SampleOrder(3, 0, 0).indices(0, 3).tolist()
    assert [index for lane in batch.lanes for index in lane.indices] == (order * 3)[:8]
    assert [lane.size for lane in batch.lanes] == [3, 0]
    assert batch.size == 3


def test_without_a_stop_it_is_endless() -> None:
    loader = Case(5, 4, 1, "drop", [1]).loaders()[0]
    assert len(loader) == 1
    assert [batch.number for batch in islice(loader.batches(3), 10)] == list(range(3, 13))


def test_a_batch_larger_than_a_chunk_of_the_order() -> None:
    loader = Case(20_000, 8192, 2, "short", [2]).loaders()[0]
    epoch = [index for batch in loader.batches(0, 3) for lane in read(batch).lanes for index in lane.indices]
    assert epoch == SampleOrder(20_000, 0, 0).indices(0, 20_000).tolist()


def test_without_shuffling_every_epoch_is_in_natural_order() -> None:
    loader = Case(8, 4, 2, "drop", [2]).loaders(shuffle=False)[0]
    assert [lane.indices for batch in loader.batches(0, 4) for lane in read(batch).lanes] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ] * 2


def test_seeds_and_epochs_shuffle_differently() -> None:
    def first_epochs(seed: int) -> list[list[int]]:
        loader = Case(64, 64, 1, "drop", [1]).loaders(seed=seed)[0]
        return [read(batch).lanes[0].indices for batch in loader.batches(0, 3)]

    epochs = first_epochs(0) + first_epochs(1)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_lanes_default_to_a_number_that_does_not_depend_on_the_ranks() -> None:
    dataset = TensorDataset(torch.arange(100))
    for size in (1, 2, 4):
        assert LaneLoader(dataset, 12, World(size=size)).lanes.count == 4


def test_there_is_no_state_to_save() -> None:
    loader = Case(8, 4, 2, "drop", [2]).loaders()[0]
    assert loader.state_dict() == {}
    loader.load_state_dict({})
    with pytest.raises(UserError, match="saved position is that of an iterable data set"):
        loader.load_state_dict({"number": 3})


class WithoutLength(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        ([], {}, "the training data set is empty"),
        ([1] * 7, {}, r"global_batch=8 is larger than the training data set \(7 samples\).*tail='short' or 'pad'"),
        ([1] * 9, {"lanes": 2, "world": World(size=3)}, "3 processes cannot share lanes=2: .* set lanes=4"),
        (
            [1] * 9,
            {"global_batch": 6, "lanes": 4},
            "global_batch=6 cannot be split equally into lanes=4: .* or set lanes=2",
        ),
        ([1] * 9, {"lanes": 3}, "lanes=3: expected a power of two"),
        ([1] * 9, {"lanes": 0}, "lanes=0: expected a power of two"),
        ([1] * 9, {"global_batch": 0}, "global_batch=0: expected 1 or more"),
        ([1] * 9, {"workers": -1}, "workers=-1: expected 0"),
        ([1] * 9, {"workers": 100_000}, "workers=100000: expected at most 256 processes for each rank"),
        ([1] * 9, {"prefetch": 0}, "prefetch=0: expected 1 or more"),
        ([1] * 9, {"tail": "wrap"}, "tail='wrap': expected one of drop, short, pad"),
        (WithoutLength(), {}, "WithoutLength has no length: give it a __len__"),
        (Stream(), {}, "Stream is an iterable data set: this needs a map-style one"),
    ],
)
def test_impossible_loaders(dataset: Any, options: dict[str, Any], words: str) -> None:
    arguments = {"global_batch": 8, "world": World()} | options
    with pytest.raises(UserError, match=words) as caught:
        LaneLoader(dataset, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (3, 2)])
def test_impossible_ranges(start: int, stop: int | None) -> None:
    with pytest.raises(UserError, match="expected 0 <= start <= stop"):
        Case(8, 4, 2, "drop", [2]).loaders()[0].batches(start, stop)
