"""The metric aggregator: exact sums whatever the order, and errors for values that are not metrics."""

import math
from typing import Any

import pytest
import torch

from lockstep.errors import UserError
from lockstep.metrics import Mean, Total
from lockstep.metrics.accumulators import PieceAccumulator
from lockstep.metrics.aggregator import MetricAggregator

CPU = torch.device("cpu")


def test_the_sum_is_rounded_once() -> None:
    """Added one after another, the ones would be lost next to 1e16."""
    aggregator = MetricAggregator(CPU)
    for chunk, value in enumerate([1e16, 1.0, 1.0, -1e16]):
        aggregator.add(chunk, {"x": (value, 1), "total": Total(value)})
    assert aggregator.results() == {"x": 0.5, "total": 2.0}


def test_means_are_weighted_by_count_and_nan_without_any() -> None:
    aggregator = MetricAggregator(CPU)
    aggregator.add(0, {"x": (torch.tensor(3.0), 1), "nothing": (0.0, 0)})
    aggregator.add(1, {"x": Mean(torch.tensor([3.0]), torch.tensor(5))})
    results = aggregator.results()
    assert results["x"] == 1.0
    assert math.isnan(results["nothing"])


def test_infinities_of_both_signs_give_nan() -> None:
    aggregator = MetricAggregator(CPU)
    for chunk, value in enumerate([math.inf, -math.inf]):
        aggregator.add(chunk, {"x": (value, 1)})
    assert math.isnan(aggregator.results()["x"])


def test_no_metrics_no_results() -> None:
    aggregator = MetricAggregator(CPU)
    aggregator.add(0, {})
    assert aggregator.results() == {}


class Several:
    """A user-defined metric with several results by name."""

    def value(self, device: torch.device) -> list[torch.Tensor]:
        return [torch.ones(2, dtype=torch.bool, device=device)]

    def accumulator(self) -> PieceAccumulator:
        return PieceAccumulator()

    def result(self, collected: Any) -> Any:
        return {
            "count": torch.tensor(len(collected)),
            "deep": {"pieces": [piece for (piece,) in collected], "whole": (1, 2.5)},
        }


def test_nested_results_are_flattened_and_ready_for_json() -> None:
    aggregator = MetricAggregator(CPU)
    aggregator.add(4, {"own": Several()})
    aggregator.add(2, {"own": Several(), "late": (1.0, 1)})
    results = aggregator.results()
    assert results == {"late": 1.0, "own/count": 2.0, "own/deep/pieces": [[True, True]] * 2, "own/deep/whole": [1, 2.5]}
    assert isinstance(results["own/count"], float)


@pytest.mark.parametrize("value", [torch.tensor(1.0), 0.5, (1.0, 2, 3), torch.nn.Identity()])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(UserError, match=rf"metric 'x': a {type(value).__name__} is not a metric value: return"):
        MetricAggregator(CPU).add(0, {"x": value})


def test_a_sum_is_one_number() -> None:
    with pytest.raises(UserError, match=r"metric 'x': a sum or a count must be one number, .* shape \(3,\)"):
        MetricAggregator(CPU).add(0, {"x": (torch.ones(3), 3)})


def test_added_values_are_copied() -> None:
    """A tensor that the metrics function keeps adding to, in place, must not change what earlier chunks gave."""
    running = torch.zeros((), dtype=torch.float64)
    aggregator = MetricAggregator(CPU)
    for chunk in range(3):
        running += 1
        aggregator.add(chunk, {"x": Total(running)})
    assert aggregator.results() == {"x": 6.0}
