"""Durations: what can be written, what it is shown as, and how many steps it is."""

from decimal import Decimal
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.duration import Duration, RunLength, Unit
from lockstep.errors import UserError

KNOWN = RunLength(steps_per_epoch=100, global_batch=64, total_steps=1000)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (500, "500 steps"),
        (0, "0 steps"),
        (1e3, "1000 steps"),
        (1e17, "100000000000000000 steps"),
        ("500", "500 steps"),
        ("500 steps", "500 steps"),
        ("1 step", "1 step"),
        ("2 epochs", "2 epochs"),
        ("1 epochs", "1 epoch"),
        (" 0.50  epoch ", "0.5 epochs"),
        (".5epochs", "0.5 epochs"),
        ("1. epoch", "1 epoch"),
        ("1e6 samples", "1000000 samples"),
        ("1.5E+3 samples", "1500 samples"),
        ("100 samples", "100 samples"),
        (Duration(Decimal(3), "epochs"), "3 epochs"),
    ],
)
def test_written_and_shown(written: Any, shown: str) -> None:
    duration = Duration.parse(written)
    assert str(duration) == shown
    assert Duration.parse(shown) == duration


@pytest.mark.parametrize(
    "written",
    [
        *("", "steps", "5 weeks", "-1 steps", "1e-3 epochs", "1_000", "nan epochs", "inf", "1 2 steps", "٣ steps"),
        *(None, True, -1, -0.5, float("inf"), float("nan"), [1], "9" * 100, "1e100 steps"),
    ],
)
def test_anything_else_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected a duration, as in 500 steps, 2 epochs or 1e6 samples, got "):
        Duration.parse(written)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (0.5, "expected a whole number of steps, got 0.5"),
        ("0.5 steps", "expected a whole number of steps, got '0.5 steps'"),
        ("1.5 samples", "expected a whole number of samples, got '1.5 samples'"),
        ("1e99 samples", "expected a duration below 2⁶³ samples, got '1e99 samples'"),
        (str(2**63), f"expected a duration below 2⁶³ steps, got '{2**63}'"),
    ],
)
def test_impossible_numbers_are_refused(written: Any, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        Duration.parse(written)
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        ("7 steps", 7),
        ("2 epochs", 200),
        ("0.5 epochs", 50),
        ("0.55 epochs", 55),  # as floats 0.55 × 100 is a little more than 55
        ("0.001 epochs", 1),
        ("0 epochs", 0),
        ("6400 samples", 100),
        ("6401 samples", 101),
        ("1 sample", 1),
    ],
)
def test_in_steps(written: str, steps: int) -> None:
    assert Duration.parse(written).in_steps(KNOWN, "warmup") == steps


@pytest.mark.parametrize("written", ["2 epochs", "64 samples"])
def test_unknown_epoch_or_batch_is_an_error_that_asks_for_steps(written: str) -> None:
    with pytest.raises(UserError, match=rf"^warmup: {written} cannot be converted to steps.*: give it in steps$"):
        Duration.parse(written).in_steps(RunLength(total_steps=9), "warmup")


def test_steps_need_no_data() -> None:
    assert Duration.parse(5).in_steps(RunLength(), "warmup") == 5


UNITS: list[Unit] = ["steps", "epochs", "samples"]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**63 - 1), st.sampled_from(UNITS))
def test_whole_numbers_survive_being_shown(number: int, unit: Unit) -> None:
    duration = Duration.parse(f"{number} {unit}")
    assert duration == Duration(Decimal(number), unit)
    assert Duration.parse(str(duration)) == duration


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**12), st.integers(0, 19))
def test_fractions_of_an_epoch_survive_being_shown(digits: int, places: int) -> None:
    duration = Duration.parse(f"{Decimal(digits).scaleb(-places):f} epochs")
    assert Duration.parse(str(duration)) == duration


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**5))
def test_the_same_duration_in_any_unit(steps: int, global_batch: int) -> None:
    run = RunLength(steps_per_epoch=steps, global_batch=global_batch)
    samples = Duration.parse(f"{steps * global_batch} samples")
    assert samples.in_steps(run, "") == Duration.parse("1 epoch").in_steps(run, "") == steps
    assert Duration.parse("0.5 epochs").in_steps(run, "") == ceil(steps / 2)
