"""DataLoaders: rebuilt as lane loaders if their meaning is kept, otherwise used in their own order, with a warning."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lockstep.data.distributed_dataloaders import DistributedSampler, create_dataloaders_distributed
from lockstep.data.iterable_loader import IterableLaneLoader
from lockstep.data.lane_loader import LaneLoader
from lockstep.data.loader_factory import choose_loader, rebuild
from lockstep.data.sample_workers import Workers
from lockstep.data.torch_loader import TorchLoader
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.datasets import Initialised, Plain, children, mark

SET = TensorDataset(torch.arange(20))


def rebuilt(*, world: World | None = None, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return rebuild(DataLoader(SET, **arguments), world or World(), seed=1, **(options or {}))


def indices(loader: Any, start: int, stop: int) -> list[list[list[int]]]:
    """Return each batch's lanes."""
    return [
        [[] if lane.data is None else lane.data[0].tolist() for lane in batch.lanes]
        for batch in loader.batches(start, stop)
    ]


@pytest.mark.parametrize(
    ("arguments", "shuffle", "global_batch"),
    [
        ({"batch_size": 8}, False, 8),
        ({"batch_size": 8, "shuffle": True}, True, 8),
        ({"batch_size": 8, "sampler": SequentialSampler(SET)}, False, 8),
        ({"batch_size": 8, "sampler": RandomSampler(SET)}, True, 8),
        ({"batch_size": 4, "sampler": TorchDistributedSampler(SET, 2, 1)}, True, 8),
        ({"batch_size": 4, "sampler": TorchDistributedSampler(SET, 2, 1, shuffle=False)}, False, 8),
        ({"batch_size": 4, "sampler": DistributedSampler(SET, 2, 1)}, True, 8),
    ],
)
@pytest.mark.parametrize("drop_last", [True, False])
def test_known_samplers_are_rebuilt(
    arguments: dict[str, Any], shuffle: bool, global_batch: int, drop_last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader = rebuilt(drop_last=drop_last, **arguments)
    assert isinstance(loader, LaneLoader)
    assert loader.exact
    assert loader.tail == ("drop" if drop_last else "short")
    own = LaneLoader(SET, global_batch, World(), seed=1, shuffle=shuffle, tail=loader.tail)
    stop = 2 * len(own)
    assert indices(loader, 0, stop) == indices(own, 0, stop)
    assert not caplog.records


def test_options_override_the_dataloader() -> None:
    options = {"global_batch": 16, "lanes": 2, "tail": "pad", "lanes_per_rank": [2]}
    loader = rebuilt(batch_size=8, options=options)
    assert (loader.global_batch, loader.lanes.count, loader.tail) == (16, 2, "pad")
    world = World(rank=1, size=2)
    loader = rebuilt(batch_size=8, world=world, options={"lanes": 4, "lanes_per_rank": [1, 3]})
    assert loader.lanes.of(1) == range(1, 4)


def test_a_loader_of_create_dataloaders_distributed_is_rebuilt() -> None:
    world = World(rank=1, size=2)
    loader = rebuild(create_dataloaders_distributed(SET, batch_size=8, world=world).train, world, seed=0)
    assert isinstance(loader, LaneLoader)
    assert loader.global_batch == 8


def test_collate_function_and_workers_are_kept() -> None:
    loader = rebuilt(batch_size=8, collate_fn=len, options={"lanes": 1})
    assert next(loader.batches()).lanes[0].data == 8
    loader = rebuild(DataLoader(Initialised(), 8, num_workers=1, worker_init_fn=mark), World(), seed=0)
    assert next(loader.batches()).lanes[0].data.tolist() == [0]


def test_an_iterable_data_set_is_read_by_lanes_and_its_workers() -> None:
    loader = rebuild(DataLoader(Plain(22), 8, drop_last=True), World(), seed=1)
    assert isinstance(loader, IterableLaneLoader)
    assert (loader.global_batch, loader.tail, loader.lanes.count) == (8, "drop", 8)
    before = children()
    batches: Any = rebuild(DataLoader(Plain(22), 8, num_workers=1), World(), seed=1).batches()
    next(batches)
    assert len(children()) == len(before) + 1
    batches.close()


class Own(Sampler[int]):
    """A sampler with `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 6))

    def __len__(self) -> int:
        return 6


class OwnBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1], [2, 3], [4, 5, 6]])

    def __len__(self) -> int:
        return 3


class OwnRandom(RandomSampler):
    pass


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 2, "sampler": Own()},
        {"batch_sampler": OwnBatches()},
        {"batch_sampler": BatchSampler(SequentialSampler(SET), 4, False)},
        {"batch_size": None},
        {"batch_size": 2, "sampler": RandomSampler(SET, replacement=True)},
        {"batch_size": 2, "sampler": RandomSampler(SET, num_samples=4)},
        {"batch_size": 2, "sampler": SubsetRandomSampler([1, 2])},
        {"batch_size": 2, "sampler": OwnRandom(SET)},
        {"batch_size": 2, "sampler": SequentialSampler(range(5))},
    ],
)
def test_other_samplers_are_used_in_their_own_order(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = rebuilt(**arguments)
    assert isinstance(loader, TorchLoader)
    assert not loader.exact
    assert len(loader) == len(DataLoader(SET, **arguments))
    assert loader.state_dict() == {}
    for _ in loader.batches(0, 3):
        pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "own order is used" in record.message and "no exact resume" in record.message
    assert "\n" not in record.message


def test_only_rank_0_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = rebuilt(batch_size=2, sampler=Own(), world=World(rank=2, size=3))
    assert not caplog.records
    assert loader.lanes.count == 3, "any number of ranks, not a power of two"
    assert loader.lanes.of(2) == range(2, 3)
    assert next(loader.batches()).lanes[0].lane == 2


def test_the_batches_of_a_torch_loader() -> None:
    loader = rebuilt(batch_size=2, sampler=Own())
    batches = list(loader.batches(0, 7))
    assert [batch.number for batch in batches] == list(range(7))
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1, 1, 2]
    assert indices(loader, 0, 7)[3:] == [[[1, 2]], [[3, 4]], [[5, 6]], [[2, 3]]], "set_epoch is called"
    assert indices(loader, 5, 7) == [[[5, 6]], [[2, 3]]]
    sizes = [batch.lanes[0].size for batch in rebuilt(batch_sampler=OwnBatches()).batches(0, 4)]
    assert sizes == [1, 2, 3, 1]


@pytest.mark.parametrize(
    ("collate", "size"),
    [(len, 1), (lambda _: {"a": [torch.zeros(3, 2)]}, 3), (lambda _: torch.tensor(1.0), 1), (str, 1)],
)
def test_the_size_of_a_lane_is_an_estimate(collate: Any, size: int) -> None:
    loader = rebuilt(batch_size=2, sampler=Own(), collate_fn=collate)
    assert next(loader.batches()).lanes[0].size == size


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_torch_loader_without_a_length() -> None:
    loader = rebuilt(batch_size=2, sampler=Unsized())
    with pytest.raises(TypeError, match="count steps instead"):
        len(loader)
    assert [batch.epoch for batch in loader.batches(0, 5)] == [0, 0, 1, 1, 2]
    assert [(batch.number, batch.epoch) for batch in loader.batches(3, 5)] == [(3, 1), (4, 2)]


def test_a_torch_loader_without_a_batch() -> None:
    with pytest.raises(UserError, match="gave no batch"):
        next(rebuilt(batch_sampler=SubsetRandomSampler([])).batches())


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (SET, {}, r"run.loader\(…\) needs global_batch="),
        (SET, {"global_batch": 8, "uneven": "cut"}, "uneven='cut' is only for a DataLoader with its own sampler"),
        (Plain(), {"global_batch": 8, "shuffle": False}, "shuffle=False: an iterable data set decides its own order"),
        (DataLoader(SET, 4), {"shuffle": True}, "has no option shuffle: set it in the DataLoader"),
        (DataLoader(SET, 4), {"workers": 0}, "has no option workers"),
        (DataLoader(SET, 4), {"prefetch": 2}, "has no option prefetch"),
        (DataLoader(SET, 4), {"collate": len}, "has no option collate"),
        (DataLoader(SET, 4), {"worker_init": mark}, "has no option worker_init"),
        (DataLoader(SET, 4), {"uneven": "pad"}, "uneven='pad': expected cut or join"),
    ],
)
def test_options_that_a_data_set_does_not_have(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_loader(dataset, World(), seed=0, **options)


def test_every_option_reaches_the_loader() -> None:
    loader = choose_loader(
        SET,
        World(rank=1, size=2),
        seed=3,
        global_batch=8,
        lanes=4,
        lanes_per_rank=[1, 3],
        shuffle=False,
        tail="short",
        workers=1,
        prefetch=3,
        collate=len,
        worker_init=mark,
    )
    assert isinstance(loader, LaneLoader)
    assert (loader.seed, loader.global_batch, loader.lanes.of(1), loader.tail) == (3, 8, range(1, 4), "short")
    assert loader.describe()["shuffle"] is False
    assert loader._workers == Workers(1, mark, 3)
    stream = choose_loader(Plain(), World(), seed=3, global_batch=8, lanes=4, workers=1, prefetch=3, worker_init=mark)
    assert isinstance(stream, IterableLaneLoader)
    assert (stream.seed, stream.global_batch, stream.lanes.count, stream.tail) == (3, 8, 4, "drop")
    assert stream._workers == Workers(1, mark, 3)
