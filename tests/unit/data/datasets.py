"""Data sets and helpers that several tests share."""

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lockstep.data.iterable_loader import IterableLaneLoader
from lockstep.data.lanes import GlobalBatch
from lockstep.world.world import World


class Augmented(Dataset[dict[str, Any]]):
    """Draws from torch, numpy and `random`."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.rand(2), "other": (np.random.rand(), random.random())}


class Many(Augmented):
    """Fetches many samples at once."""

    calls: Sequence[list[int]] = ()

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.calls = [*self.calls, indices]
        return [self[index] for index in indices]


class Failing(Dataset[Tensor]):
    """Cannot read sample 5."""

    def __init__(self, kind: type[Exception], length: int = 8) -> None:
        self.kind = kind
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            raise self.kind("a planted failure")
        return torch.tensor(index)


class Marked(Dataset[int]):
    """A sample is the id of the process that fetched it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return psutil.Process().pid


def mark(worker: int) -> None:
    Initialised.number = worker


class Initialised(Marked):
    number = -1

    def __getitem__(self, index: int) -> int:
        return self.number


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Lines:
    """A stream of `length` samples per lane; `lengths` overrides it by lane."""

    def __init__(self, length: int = 5, lengths: dict[int, int] | None = None) -> None:
        self.length = length
        self.lengths = lengths or {}
        self.opened: list[tuple[int, int, int]] = []

    def lane(self, lane: int, num_lanes: int, epoch: int) -> Iterator[float]:
        self.opened.append((lane, num_lanes, epoch))
        for number in range(self.lengths.get(lane, self.length)):
            # Random numbers are part of the sample, so that a resumed run must seed them in the same way.
            yield epoch * 1000 + lane * 100 + number + 0.3 * (torch.rand(1).item() + np.random.rand() + random.random())


class Cursor:
    """An iterator with a state. It may not be read before it is restored, which would mean skipping samples."""

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
    """A stream without lanes or epochs: the same each time, except for its random numbers."""

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


class Once(IterableDataset[int]):
    """A stream that is used up after its first epoch."""

    def __init__(self) -> None:
        self.iterator = iter(range(16))

    def __iter__(self) -> Iterator[int]:
        return self.iterator


SETS = [Lines, Cursors, Plain, PlainWithEpochs, PlainCursor]


def loader_of(dataset: Any, **options: Any) -> IterableLaneLoader:
    return IterableLaneLoader(dataset, 8, World(), **({"lanes": 4, "seed": 1} | options))


def read(batch: Any) -> tuple[Any, ...]:
    lanes = [(lane.lane, None if lane.data is None else lane.data.tolist(), lane.size) for lane in batch.lanes]
    return batch.number, batch.epoch, batch.size, lanes


def flat(batches: list[GlobalBatch]) -> list[Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(element) for key, element in value.items()}
        return [plain(element) for element in value] if isinstance(value, list | tuple) else value

    return [plain(batch) for batch in batches]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def starting_by(start_method: str) -> Iterator[None]:
    """Start child processes by this method: spawned ranks spawn theirs by default, but under torchrun they fork."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(start_method, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def seed_all() -> None:
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    np.random.randn(), random.gauss(0, 1)  # leaves half of a pair behind, which is part of the state


def draw() -> tuple[float, ...]:
    return (*torch.rand(2).tolist(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1))
