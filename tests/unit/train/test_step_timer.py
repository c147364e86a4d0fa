"""Where a step's time goes, by a clock that the test moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.engine.engine import CommStats
from lockstep.train import step_timer as module
from lockstep.train.step_timer import StepTimer


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class Engine:
    def __init__(self) -> None:
        self.so_far = CommStats(0.0, 0)
        self.asked: list[bool] = []

    def comm_stats(self, *, timed: bool) -> CommStats:
        self.asked.append(timed)
        return self.so_far


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_step(
    watch: StepTimer, clock: Clock, number: int, engine: Any, *, body: Callable[[], None] | None = None
) -> Any:
    watch.begin(number, engine)
    for phase, seconds in (("data", 1.0), ("compute", 2.0), ("exchange", 3.0), ("update", 4.0)):
        clock.pass_by(seconds)
        watch.lap(phase)  # type: ignore[arg-type]
    if body is not None:
        body()
    clock.pass_by(0.5)
    return watch.end(number, engine)


def test_only_a_timed_step_reports_how_long_each_phase_took(clock: Clock) -> None:
    watch = StepTimer(torch.device("cpu"), every=2)
    assert make_step(watch, clock, 1, None) is None
    times = make_step(watch, clock, 2, None)
    assert {name: times[name] for name in ("data_s", "compute_s", "exchange_s", "update_s", "rest_s")} == {
        "data_s": 1.0,
        "compute_s": 2.0,
        "exchange_s": 3.0,
        "update_s": 4.0,
        "rest_s": 0.5,
    }
    assert (times["num_steps"], times["elapsed_s"]) == (2, 21.0)
    assert "travel_s" not in times, "it was not measured"


def test_what_is_done_between_steps_counts_once_and_in_no_phase(clock: Clock) -> None:
    watch = StepTimer(torch.device("cpu"), every=2)
    make_step(watch, clock, 1, None)
    with watch.aside("saving"):
        clock.pass_by(7.0)

    def evaluate() -> None:
        with watch.aside("evaluating"):
            clock.pass_by(11.0)

    times = make_step(watch, clock, 2, None, body=evaluate)
    assert (times["saving_s"], times["evaluating_s"], times["rest_s"]) == (7.0, 11.0, 0.5)
    assert times["elapsed_s"] == 2 * 10.5 + 7.0 + 11.0
    make_step(watch, clock, 3, None)
    later = make_step(watch, clock, 4, None)
    assert (later["saving_s"], later["evaluating_s"], later["elapsed_s"]) == (0.0, 0.0, 21.0)


def test_two_updates_in_a_step_add_up(clock: Clock) -> None:
    watch = StepTimer(torch.device("cpu"), every=1)
    watch.begin(1, None)
    for _ in range(2):
        clock.pass_by(1.0)
        watch.lap("compute")
        clock.pass_by(0.25)
        watch.lap("update")
    assert (watch.end(1, None) or {})["compute_s"] == 2.0


def test_travel_is_what_this_step_added(clock: Clock) -> None:
    watch, engine = StepTimer(torch.device("cpu"), every=1), Engine()
    engine.so_far = CommStats(5.0, 1000)

    def send() -> None:
        engine.so_far = CommStats(5.5, 1300)

    times = make_step(watch, clock, 1, engine, body=send)
    assert (times["travel_s"], times["sent_bytes"]) == (0.5, 300)
    assert engine.asked == [True, False], "a GPU's messages are timed in timed steps alone"


def test_a_gpu_is_waited_for_in_one_step_of_ten_at_most(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: waited.append(1))
    watch = StepTimer(torch.device("cuda", 0), every=3)
    timed = [number for number in range(1, 37) if make_step(watch, clock, number, None) is not None]
    assert timed == [12, 24, 36]
    assert len(waited) == 3 * 6


def test_a_run_without_a_folder_times_nothing(clock: Clock) -> None:
    watch = StepTimer(torch.device("cpu"), every=None)
    assert all(make_step(watch, clock, number, None) is None for number in range(1, 20))
