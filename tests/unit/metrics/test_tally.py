"""The tally: exact, whatever the order; and what it says of parts that are none."""

import math
from typing import Any

import pytest
import torch

from lockstep.errors import UserError
from lockstep.metrics import Mean, Total
from lockstep.metrics.keepers import Pieces
from lockstep.metrics.tally import Tally

CPU = torch.device("cpu")


def test_the_sum_is_rounded_once() -> None:
    """Added up one after another, the ones would vanish beside 1e16."""
    tally = Tally(CPU)
    for chunk, value in enumerate([1e16, 1.0, 1.0, -1e16]):
        tally.add(chunk, {"x": (value, 1), "total": Total(value)})
    assert tally.results() == {"x": 0.5, "total": 2.0}


def test_counts_weigh_and_nothing_counted_is_no_number() -> None:
    tally = Tally(CPU)
    tally.add(0, {"x": (torch.tensor(3.0), 1), "nothing": (0.0, 0)})
    tally.add(1, {"x": Mean(torch.tensor([3.0]), torch.tensor(5))})
    results = tally.results()
    assert results["x"] == 1.0
    assert math.isnan(results["nothing"])


def test_infinities_of_both_signs_are_no_number() -> None:
    tally = Tally(CPU)
    for chunk, value in enumerate([math.inf, -math.inf]):
        tally.add(chunk, {"x": (value, 1)})
    assert math.isnan(tally.results()["x"])


def test_no_metrics_no_results() -> None:
    tally = Tally(CPU)
    tally.add(0, {})
    assert tally.results() == {}


class Several:
    """A metric of a user's own, with results by name."""

    def value(self, device: torch.device) -> list[torch.Tensor]:
        return [torch.ones(2, dtype=torch.bool, device=device)]

    def keeper(self) -> Pieces:
        return Pieces()

    def result(self, kept: Any) -> Any:
        return {"count": torch.tensor(len(kept)), "deep": {"pieces": [piece for (piece,) in kept], "whole": (1, 2.5)}}


def test_results_by_name_come_out_flat_and_ready_for_json() -> None:
    tally = Tally(CPU)
    tally.add(4, {"own": Several()})
    tally.add(2, {"own": Several(), "late": (1.0, 1)})
    results = tally.results()
    assert results == {"late": 1.0, "own/count": 2.0, "own/deep/pieces": [[True, True]] * 2, "own/deep/whole": [1, 2.5]}
    assert isinstance(results["own/count"], float)


@pytest.mark.parametrize("part", [torch.tensor(1.0), 0.5, (1.0, 2, 3), torch.nn.Identity()])
def test_what_is_no_contribution_is_refused_by_name(part: Any) -> None:
    with pytest.raises(UserError, match=rf"metric 'x': a {type(part).__name__} is no contribution to a metric: return"):
        Tally(CPU).add(0, {"x": part})


def test_a_sum_is_one_number() -> None:
    with pytest.raises(UserError, match=r"metric 'x': a sum or a count is one number, not a tensor of shape \(3,\)"):
        Tally(CPU).add(0, {"x": (torch.ones(3), 3)})


def test_what_is_kept_is_a_value_of_its_own() -> None:
    """A tensor that the metrics function goes on adding to, in place, must not take earlier chunks along."""
    running = torch.zeros((), dtype=torch.float64)
    tally = Tally(CPU)
    for chunk in range(3):
        running += 1
        tally.add(chunk, {"x": Total(running)})
    assert tally.results() == {"x": 6.0}
