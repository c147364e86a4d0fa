"""Worker processes: they change no sample, and they end with the iterator."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.data.lane_loader import LaneLoader
from lockstep.data.sample_workers import _answers
from lockstep.world.world import World
from tests.unit.data.datasets import Augmented, Failing, Initialised, Many, Marked, children, draw, flat, mark, seed_all

# torch counts the cores, and this machine may have two.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.parametrize("dataset", [Augmented(11), Many(11), TensorDataset(torch.arange(11))])
@pytest.mark.parametrize("tail", ["short", "pad"])
def test_the_number_of_workers_changes_nothing(dataset: Any, tail: Any) -> None:
    def batches(workers: int) -> list[Any]:
        loader = LaneLoader(dataset, 8, World(rank=1, size=2), lanes=4, tail=tail, workers=workers)
        return flat(list(loader.batches(1, 6)))

    alone = batches(0)
    assert [batch[0] for batch in alone] == [1, 2, 3, 4, 5]
    assert batches(1) == alone
    assert batches(4) == alone


def test_the_callers_random_numbers_are_not_disturbed() -> None:
    seed_all()
    undisturbed = [draw() for _ in range(3)]
    seed_all()
    assert [draw() for _ in LaneLoader(Augmented(), 8, World(), workers=1).batches(0, 3)] == undisturbed


def as_array(samples: list[int]) -> np.ndarray:
    return np.array(samples)


def test_collated_data_is_not_converted() -> None:
    for workers in (0, 1):
        (batch,) = LaneLoader(range(8), 8, World(), lanes=1, workers=workers, collate=as_array).batches(0, 1)
        assert isinstance(batch.lanes[0].data, np.ndarray)


def test_workers_start_once_not_each_epoch() -> None:
    loader = LaneLoader(Marked(), 8, World(), lanes=4, workers=2)
    pids = {int(pid) for batch in loader.batches(0, 5) for lane in batch.lanes for pid in lane.data}
    assert len(pids) == 2
    assert psutil.Process().pid not in pids


@pytest.mark.parametrize("how", ["close", "collect", "exhaust"])
def test_workers_end_with_the_iterator(how: str) -> None:
    before = children()
    batches: Any = LaneLoader(Marked(), 8, World(), workers=2).batches(0, 2 if how == "exhaust" else None)
    assert children() == before, "none starts before the first batch is asked for"
    next(batches)
    assert len(children()) == len(before) + 2
    if how == "close":
        batches.close()
    elif how == "exhaust":
        assert len(list(batches)) == 1
    else:
        del batches
        gc.collect()
    assert children() == before


def test_workers_end_when_the_loop_fails() -> None:
    before = children()

    def loop() -> None:
        for _ in LaneLoader(Marked(), 8, World(), workers=1).batches():
            raise ValueError("in the loop")

    with pytest.raises(ValueError, match="in the loop"):
        loop()
    gc.collect()
    assert children() == before


def test_workers_end_while_their_error_is_still_held() -> None:
    before = children()
    with pytest.raises(ValueError) as caught:
        list(LaneLoader(Failing(ValueError), 8, World(), workers=1).batches(0, 3))
    assert caught.value is not None
    assert children() == before


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError])
def test_a_workers_error_names_the_sample(kind: type[Exception]) -> None:
    loader = LaneLoader(Failing(kind), 8, World(), lanes=2, shuffle=False, workers=1)
    with pytest.raises(kind) as caught:
        list(loader.batches(24, 26))
    text = str(caught.value)
    assert "a planted failure" in text
    assert "while reading sample 5 of the data set (epoch 24, lane 1)" in text


class Ends:
    """Writes down which process collects it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.itself = self  # so that only the garbage collector can

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Marked):
    """Collects garbage while it is read."""

    def __getitem__(self, index: int) -> int:
        assert gc.isenabled()
        gc.collect()
        return os.getpid()


def test_garbage_of_the_rank_is_not_collected_by_its_workers(tmp_path: Path) -> None:
    gc.disable()
    Ends(tmp_path / "ended")
    gc.enable()
    batch = next(LaneLoader(Collecting(), 8, World(), lanes=4, workers=1).batches())
    assert os.getpid() not in batch.lanes[0].data.tolist()
    assert gc.isenabled()
    gc.collect()
    assert (tmp_path / "ended").read_text().split() == [str(os.getpid())]


class Prepared(Marked):
    number = -1

    def __getitem__(self, index: int) -> int:
        return self.number


def prepare(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.number = info.id


def test_worker_init_can_prepare_the_data_set_of_its_worker() -> None:
    dataset = Prepared()
    batch = next(LaneLoader(dataset, 8, World(), lanes=4, workers=2, worker_init=prepare).batches())
    assert {number for lane in batch.lanes for number in lane.data.tolist()} == {0, 1}
    assert dataset.number == -1


def test_worker_init_of_a_dataloader_for_evaluation_is_called() -> None:
    loader = DataLoader(Prepared(), 2, num_workers=2, worker_init_fn=prepare)
    assert {number for chunk in EvaluationLoader(loader, None, World()) for number in chunk.data.tolist()} == {0, 1}


def test_worker_init_is_called_in_each_worker() -> None:
    loader = LaneLoader(Initialised(), 8, World(), lanes=4, workers=2, worker_init=mark)
    (batch,) = loader.batches(0, 1)
    assert [lane.data[0].item() for lane in batch.lanes] == [0, 1, 0, 1]
    assert Initialised.number == -1


def test_workers_use_one_thread() -> None:
    class Threads(Marked):
        def __getitem__(self, index: int) -> int:
            return torch.get_num_threads()

    (batch,) = LaneLoader(Threads(), 8, World(), lanes=1, workers=1).batches(0, 1)
    assert batch.lanes[0].data.tolist() == [1] * 8


def test_evaluation_with_workers() -> None:
    here, there = (EvaluationLoader(Augmented(10), 4, World(), workers=workers) for workers in (0, 1))
    assert flat(list(there)) == flat(list(here))  # type: ignore[arg-type]


class Lost:
    """Like torch's iterator when a worker has died while a tensor was received from it."""

    def __init__(self, exit_code: int) -> None:
        worker = multiprocessing.get_context("fork").Process(target=os._exit, args=[exit_code])
        worker.start()
        self._workers = [worker]

    def __iter__(self) -> Iterator[int]:
        yield 1
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_worker_that_dies_while_answering_is_reported_as_dead() -> None:
    answers = _answers(Lost(7))
    assert next(answers) == 1
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) has died \(exit code 7\)"):
        next(answers)


def die_while_asking(number: int) -> None:
    """In a worker: be killed while it asks whether the loader is done, and so holds the lock of that event, if any."""
    frame = sys._getframe()
    while frame is not None and "done_event" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    lock = getattr(frame.f_locals["done_event"], "_cond", nullcontext())
    lock.__enter__()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(30)
def test_a_worker_that_is_killed_at_any_moment_is_an_error_and_no_hang() -> None:
    loader = LaneLoader(range(8), 8, World(), lanes=1, workers=1, worker_init=die_while_asking)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\S* \d+\)"):
        list(loader.batches(0, 1))
