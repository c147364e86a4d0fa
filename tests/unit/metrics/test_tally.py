"""Means over chunks: exact, whatever the order."""

import math

import torch

from lockstep.metrics.tally import Tally

CPU = torch.device("cpu")


def test_the_sum_is_rounded_once() -> None:
    """Added up one after another, the ones would vanish beside 1e16."""
    tally = Tally(CPU)
    for chunk, value in enumerate([1e16, 1.0, 1.0, -1e16]):
        tally.add(chunk, {"x": (value, 1)})
    assert tally.means(4) == {"x": 0.5}


def test_counts_weigh_and_nothing_counted_is_no_number() -> None:
    tally = Tally(CPU)
    tally.add(0, {"x": (torch.tensor(3.0), 1), "nothing": (0.0, 0)})
    tally.add(1, {"x": (torch.tensor(3.0), 5)})
    means = tally.means(2)
    assert means["x"] == 1.0
    assert math.isnan(means["nothing"])


def test_infinities_of_both_signs_are_no_number() -> None:
    tally = Tally(CPU)
    for chunk, value in enumerate([math.inf, -math.inf]):
        tally.add(chunk, {"x": (value, 1)})
    assert math.isnan(tally.means(2)["x"])
