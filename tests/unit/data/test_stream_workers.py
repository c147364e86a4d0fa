"""Worker processes for iterable data sets: reading ahead changes neither batches nor saved positions."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data.iterable_loader import IterableLaneLoader
from lockstep.errors import UserError
from lockstep.world.world import World
from tests.unit.data.datasets import (
    SETS,
    Cursors,
    Lines,
    Once,
    Plain,
    PlainWithEpochs,
    children,
    draw,
    loader_of,
    read,
    seed_all,
)

# torch counts the cores, and this machine may have two.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

STOP = 9
UNEVEN = {0: 9, 1: 4, 2: 5, 3: 7}


def saved(loader: IterableLaneLoader) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def read_all(loader: IterableLaneLoader, start: int = 0, stop: int = STOP) -> list[Any]:
    """Return each batch, and the position after it."""
    return [(read(batch), saved(loader)) for batch in loader.batches(start, stop)]


@pytest.mark.parametrize("tail", ["drop", "short"])
@pytest.mark.parametrize("make", [*SETS, lambda: Lines(lengths=UNEVEN)], ids=[*(k.__name__ for k in SETS), "uneven"])
def test_the_number_of_workers_changes_neither_batches_nor_positions(make: Any, tail: Any) -> None:
    alone = read_all(loader_of(make(), tail=tail))
    assert len({epoch for (_, epoch, _, _), _ in alone}) > 1
    for workers in (1, 4):
        assert read_all(loader_of(make(), tail=tail, workers=workers)) == alone


@pytest.mark.parametrize(("before", "after"), [(1, 1), (4, 4), (4, 0), (0, 4)])
@pytest.mark.parametrize("kind", [Lines, Cursors, PlainWithEpochs])
def test_resuming_at_every_batch_equals_not_stopping(kind: type, before: int, after: int) -> None:
    loader = loader_of(kind(), tail="short", workers=before)
    states = [saved(loader), *(state for _, state in read_all(loader))]
    whole = read_all(loader_of(kind(), tail="short"))
    for number, state in enumerate(states[:-1]):
        resumed = loader_of(kind(), tail="short", workers=after)
        resumed.load_state_dict(state)
        assert read_all(resumed, number, min(number + 3, STOP)) == whole[number : number + 3]


def test_any_start_equals_iterating_to_it() -> None:
    loader = loader_of(Lines(), workers=2)
    whole = read_all(loader_of(Lines()), stop=7)
    assert read_all(loader, 3, 7) == whole[3:]
    assert read_all(loader, 2, 5) == whole[2:5], "back"
    assert read_all(loader, 5, 7) == whole[5:], "on from where it stands"


def test_there_are_at_most_as_many_workers_as_streams_and_they_start_once() -> None:
    before = children()
    for dataset, workers, started in ((Lines(), 2, 2), (Lines(), 9, 4), (Plain(), 3, 1)):
        batches: Any = loader_of(dataset, workers=workers).batches()
        assert children() == before, "none starts before the first batch is asked for"
        next(batches)
        pids = {child.pid for child in children()} - {child.pid for child in before}
        assert len(pids) == started
        assert [next(batches).epoch for _ in range(6)][-1] > 0
        assert {child.pid for child in children()} - {child.pid for child in before} == pids
        batches.close()
        assert children() == before


@pytest.mark.parametrize("how", ["collect", "exhaust", "loop fails", "stream fails", "stream is empty"])
def test_workers_end_with_the_iterator(how: str) -> None:
    before = children()
    dataset: Any = {"stream fails": Breaks(), "stream is empty": Lines(0)}.get(how, Lines())
    batches: Any = loader_of(dataset, workers=2).batches(0, 2 if how == "exhaust" else None)
    if how == "collect":
        next(batches)
        assert len(children()) == len(before) + 2
        del batches
        gc.collect()
    elif how == "exhaust":
        assert len(list(batches)) == 2
    elif how == "loop fails":
        with pytest.raises(ZeroDivisionError):
            for _ in batches:
                _ = 1 // 0
        batches.close()
    else:
        error, message = (ValueError, "a planted failure") if how == "stream fails" else (UserError, "gave no sample")
        with pytest.raises(error, match=message):
            list(batches)
    assert children() == before


class Breaks:
    """Lane 1 raises at its sixth sample, and lane 0 ends after `length`."""

    def __init__(self, error: Any = ValueError, length: int = 20) -> None:
        self.error = error
        self.length = length

    def lane(self, lane: int, _num_lanes: int, epoch: int) -> Iterator[float]:
        for number in range(self.length if lane == 0 else 20):
            if (lane, number) == (1, 5):
                raise self.error("a planted failure")
            yield epoch * 1000.0 + lane * 100 + number


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError])
@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_is_raised_at_its_batch_with_the_workers_traceback(kind: type[Exception], workers: int) -> None:
    whole, got = read_all(loader_of(Breaks()), stop=2), []
    loader = loader_of(Breaks(kind), workers=workers)
    with pytest.raises(kind) as caught:
        for batch in loader.batches():
            got.append((read(batch), saved(loader)))
    assert got == whole
    text = str(caught.value)
    assert "in a data worker" in text
    assert 'raise self.error("a planted failure")' in text
    assert "while reading sample 5 of an iterable data set (lane 1, epoch 0)" in text


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_after_an_error_the_position_is_that_of_the_last_batch(workers: int) -> None:
    loader = loader_of(Breaks(), workers=workers)
    with pytest.raises(ValueError, match="a planted failure"):
        list(loader.batches())
    assert saved(loader) == read_all(loader_of(Breaks()), stop=2)[-1][1]


class CursorsThatBreak(Cursors):
    def lane(self, lane: int, num_lanes: int, epoch: int) -> Any:
        cursor = super().lane(lane, num_lanes, epoch)
        cursor.values[5:] = ["no number"] * (lane == 3)
        return cursor


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_left_by_an_error_can_be_resumed(workers: int) -> None:
    """The error occurs while collating, when every iterator has already advanced."""
    loader = loader_of(CursorsThatBreak(), tail="short", workers=workers)
    with pytest.raises(TypeError, match="must be real number, not str"):
        list(loader.batches())
    state = saved(loader)
    assert state["number"] == 2
    resumed = loader_of(Cursors(), tail="short")
    resumed.load_state_dict(state)
    whole = [read(batch) for batch in loader_of(Cursors(), tail="short").batches(0, 6)]
    assert [read(batch) for batch in resumed.batches(2, 6)] == whole[2:]


def test_an_error_read_ahead_in_an_epoch_that_has_ended_is_dropped() -> None:
    for workers in (0, 4):
        batches = loader_of(Breaks(length=2), workers=workers, prefetch=4).batches(0, 3)
        assert [batch.epoch for batch in batches] == [0, 1, 2]


def pairs(samples: list[float]) -> Any:
    return torch.tensor(samples).view(2)


def test_dropped_lanes_are_not_collated() -> None:
    for workers in (0, 1, 4):
        loader = loader_of(Lines(lengths=UNEVEN), workers=workers, collate=pairs)
        assert [batch.epoch for batch in loader.batches(0, 6)] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(RuntimeError, match=r"(?s)in a data worker.*while collating 1 samples \(epoch 0, lane 2\)"):
        list(loader_of(Lines(lengths=UNEVEN), tail="short", workers=4, collate=pairs).batches(0, 6))


def test_an_error_whose_class_cannot_be_pickled_is_raised_too() -> None:
    class Local(Exception):
        pass

    with pytest.raises(RuntimeError, match="Local: a planted failure"):
        list(loader_of(Breaks(Local), workers=1).batches())


@pytest.mark.parametrize(
    ("dataset", "words"),
    [(Lines(1), "epoch 0 .* gave too few samples"), (Once(), "epoch 1 .* gave no sample")],
)
def test_streams_without_a_batch_raise_the_same_error(dataset: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        list(loader_of(dataset, workers=2).batches())


def test_a_user_error_in_a_worker_stays_one_line() -> None:
    loader = loader_of(Lines(5))
    list(loader.batches(0, 2))
    shorter = loader_of(Lines(3), workers=2)
    shorter.load_state_dict(loader.state_dict())
    with pytest.raises(UserError) as caught:
        next(shorter.batches(2))
    assert str(caught.value) == (
        "lane 0, epoch 0: the stream ends after 3 samples, but 4 were taken before: the data has changed, "
        "so restore it or start a new run"
    )


class Splitting(IterableDataset[int]):
    """Splits itself among torch's workers, as the torch documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(40)) if info is None else iter(range(info.id, 40, 2))


class SplittingLanes:
    def lane(self, lane: int, _num_lanes: int, _epoch: int) -> Iterator[int]:
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        return iter(range(lane * 100, lane * 100 + 40, step))


@pytest.mark.parametrize("kind", [Splitting, SplittingLanes])
def test_a_data_set_does_not_see_worker_info(kind: Any) -> None:
    assert read_all(loader_of(kind(), workers=4), stop=3) == read_all(loader_of(kind()), stop=3)


class LiveState:
    """Returns its own dictionary as its state, and keeps changing it."""

    def __init__(self) -> None:
        self.progress = {"position": 0}

    def __iter__(self) -> "LiveState":
        return self

    def __next__(self) -> int:
        self.progress["position"] += 1
        return self.progress["position"]

    def state_dict(self) -> dict[str, int]:
        return self.progress

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.progress = dict(state)


class Live:
    def lane(self, *_: int) -> LiveState:
        return LiveState()


def test_a_state_is_saved_before_the_iterator_advances() -> None:
    loader = loader_of(Live(), workers=1, prefetch=8)
    positions = []
    for _ in loader.batches(0, 20):
        positions.append([stream["state"]["position"] for stream in loader.state_dict()["streams"].values()])
    assert positions == [[2 * number] * 4 for number in range(1, 21)]


class NoPickle(LiveState):
    def state_dict(self) -> Any:
        return lambda: None


class NoPickles:
    def lane(self, *_: int) -> NoPickle:
        return NoPickle()


def test_a_state_that_cannot_be_pickled_is_an_error_not_a_hang() -> None:
    with pytest.raises((AttributeError, RuntimeError), match=r"(?s)in a data worker.*pickle"):
        next(loader_of(NoPickles(), workers=1).batches())


def drawn(samples: list[float]) -> tuple[float, ...]:
    return draw()


@pytest.mark.parametrize("kind", [Lines, Plain])
def test_what_a_collate_function_draws_is_keyed_by_lane_and_batch(kind: type) -> None:
    def lanes(**options: Any) -> list[Any]:
        return [
            lane.data for batch in loader_of(kind(), collate=drawn, **options).batches(0, 4) for lane in batch.lanes
        ]

    alone = lanes()
    assert len(set(alone)) == 16
    assert lanes(workers=1) == lanes(workers=4) == alone
    loader, resumed = loader_of(kind(), collate=drawn), loader_of(kind(), collate=drawn)
    next(loader.batches())
    resumed.load_state_dict(loader.state_dict())
    assert [lane.data for lane in next(resumed.batches(1)).lanes] == alone[4:8]
    second = IterableLaneLoader(kind(), 8, World(rank=1, size=2), lanes=4, seed=1, collate=drawn, tail="short")
    assert [lane.data for lane in next(second.batches()).lanes] == alone[2:4]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_callers_random_numbers_are_not_disturbed(workers: int) -> None:
    seed_all()
    undisturbed = [draw() for _ in range(3)]
    seed_all()
    loader = loader_of(Lines(), workers=workers, collate=drawn)
    assert [draw() for _ in loader.batches(0, 3)] == undisturbed


class Marked:
    number = -1

    def lane(self, *_: int) -> Iterator[int]:
        return iter([self.number] * 8)


def mark(worker: int) -> None:
    Marked.number = worker


def test_lane_i_is_read_by_worker_i_mod_n_after_its_own_start() -> None:
    batch = next(loader_of(Marked(), workers=2, worker_init=mark).batches())
    assert [lane.data[0].item() for lane in batch.lanes] == [0, 1, 0, 1]
    assert Marked.number == -1


ORPHANS = """
import os, signal, psutil, random
from tests.unit.data.datasets import Lines, loader_of
batches = loader_of(Lines(), workers=2).batches()
next(batches)
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_die_with_the_training_process() -> None:
    """A killed process cannot end its workers: they have to notice."""
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", ORPHANS], stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left
