"""The model of a step on other numbers of processes, against steps that are made up by known rules."""

from math import log2
from typing import Any

import pytest

from lockstep.observe.scaling import Measured, Prediction, ScalingModel, largest_worth_it, measured
from lockstep.observe.timing import RankTimes

LANES = 8


def step(
    processes: int, *, crowding: float = 0.0, travel_s: float = 0.0, hidden_s: float = 0.0, **more: Any
) -> Measured:
    """As a machine that keeps to the model would have it: 10 ms a lane, 5 ms of everything else."""
    lanes = -(-LANES // processes)
    compute_s = 0.01 * lanes * (1 + crowding * log2(processes))
    exchange_s = max(0.0, travel_s - hidden_s) if processes > 1 else 0.0
    values: dict[str, Any] = {
        "data_s": 0.0,
        "compute_s": compute_s,
        "exchange_s": exchange_s,
        "travel_s": travel_s if processes > 1 else 0.0,
        "rest_s": 0.005,
        "spread_s": 0.0,
        "step_s": compute_s + exchange_s + 0.005,
    }
    return Measured(processes, lanes, **(values | more))


@pytest.mark.parametrize("crowding", [0.0, 0.1])
def test_what_was_measured_is_predicted_and_so_is_more_of_the_same(crowding: float) -> None:
    model = ScalingModel([step(1, crowding=crowding), step(2, crowding=crowding)], LANES)
    for processes in (1, 2, 4, 8):
        truth = step(1).step_s / step(processes, crowding=crowding).step_s
        assert model.predict(processes).speed_up == pytest.approx(truth)


def test_three_processes_go_at_the_pace_of_the_one_with_three_lanes() -> None:
    prediction = ScalingModel([step(1)], LANES).predict(3)
    assert prediction.lanes == 3
    assert prediction.speed_up == pytest.approx(0.085 / 0.035)


def test_gradients_that_were_hidden_stay_hidden_and_more_bytes_are_waited_for() -> None:
    model = ScalingModel([step(1), step(2, travel_s=0.01, hidden_s=0.01)], LANES)
    assert model.predict(2).exchange_s == 0.0
    assert model.predict(4).exchange_s == pytest.approx(0.01 * 1.5 - 0.01)
    assert model.predict(3).exchange_s == pytest.approx(0.01 * 4 / 3 * 4 / 3 - 0.01)


def test_one_process_alone_says_that_it_knows_nothing_of_gradients() -> None:
    assert not ScalingModel([step(1)], LANES).knows_travel
    assert ScalingModel([step(1), step(2, travel_s=0.01)], LANES).knows_travel


def test_steps_that_spread_make_everybody_wait_for_the_slowest() -> None:
    steady, uneven = (ScalingModel([step(1, spread_s=spread)], LANES).predict(8) for spread in (0.0, 0.01))
    assert uneven.step_s - steady.step_s == pytest.approx(0.01 * (1 / 8) ** 0.5 * 1.42, rel=0.02)


def test_doubt_grows_with_every_doubling_beyond_what_was_measured() -> None:
    model = ScalingModel([step(1), step(2)], LANES)
    doubts = [model.predict(processes).doubt for processes in (1, 2, 4, 8)]
    assert 0 == doubts[0] < doubts[1] < doubts[2] < doubts[3], "one process is what the others are compared with"


def test_the_error_is_against_what_was_measured() -> None:
    assert Prediction(4, 2, 0.1, 0.0, 3.3, 0.1).error is None
    assert Prediction(4, 2, 0.1, 0.0, 3.3, 0.1, measured=3.0).error == pytest.approx(0.1)


@pytest.mark.parametrize(("speed_ups", "most"), [([1, 1.9, 3.5], 4), ([1, 1.9, 2.0], 2), ([1, 0.9, 1.5], 1), ([1], 1)])
def test_how_many_are_worth_it(speed_ups: list[float], most: int) -> None:
    predictions = [Prediction(1 << power, 1, 0.1, 0.0, value, 0.1) for power, value in enumerate(speed_ups)]
    assert largest_worth_it(predictions) == most


def test_two_that_bring_nothing_are_not_worth_it_although_one_was_not_asked_about() -> None:
    assert largest_worth_it([Prediction(2, 4, 0.1, 0.0, 0.9, 0.1), Prediction(4, 2, 0.1, 0.0, 1.2, 0.1)]) == 1


def times(rank: int, compute_s: float, exchange_s: float, travel_s: float) -> RankTimes:
    phases = {"data": 0.001, "compute": compute_s, "exchange": exchange_s, "update": 0.01, "rest": 0.002}
    return RankTimes(rank, 5, 4, phases, 0.0, travel_s, 100, 0.0, 0.0, 1.0, None, None)


def test_of_several_ranks_the_one_that_works_longest_tells_how_long_a_step_takes() -> None:
    run = measured([times(0, 0.1, 0.06, 0.07), times(1, 0.15, 0.01, 0.02)])
    assert (run.processes, run.compute_s, run.exchange_s, run.travel_s) == (2, 0.15, 0.01, 0.02)
    assert run.rest_s == pytest.approx(0.012)
