"""Times beside other times."""

import pytest

from lockstep.benchmark.ratios import ratio


def test_rounds_are_compared_one_by_one() -> None:
    """A machine that was ten times as slow for a round says nothing about what ran in it."""
    found = ratio([0.2, 2.0, 0.3], [0.1, 1.0, 0.1])
    assert found[:3] == pytest.approx((2.0, 2.0, 3.0))
    assert found.difference == pytest.approx(1.0)


def test_noise_is_that_of_the_middle_half_and_more_rounds_do_not_widen_it() -> None:
    calm = ratio([0.98, 0.99, 1.0, 1.01, 1.02, 5.0, 0.2], [1.0] * 7)
    assert calm.noise == calm.wobble == pytest.approx(0.015)
    assert (calm.low, calm.high) == (0.2, 5.0), "the range has all of them"
    assert ratio([0.5, 0.7, 1.0, 1.1, 1.2], [1.0] * 5).noise == pytest.approx(0.3), "also where it is faster"
    far = ratio([2.0, 2.1, 2.2, 2.4, 2.9], [1.0] * 5)
    assert (far.noise, far.wobble) == (pytest.approx(1.4), pytest.approx(0.2)), "from ×1, and from its own median"


def test_a_single_round_is_all_there_is() -> None:
    assert ratio([3.0], [2.0]) == (1.5, 1.5, 1.5, 1.5, 1.5)
