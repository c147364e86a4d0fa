"""Curves stay bounded, keep their extremes, and forget what was undone."""

import math

from lockstep.observe.curve import Curve, Point, count_in, number_in


def curve_of(values: list[float], most_points: int = 2000) -> Curve:
    curve = Curve(most_points)
    for step, value in enumerate(values):
        curve.add(step, value)
    return curve


def test_a_short_curve_is_as_it_was() -> None:
    assert curve_of([3.0, 1.0]).points() == [Point(0, 3, 3, 3), Point(1, 1, 1, 1)]


def test_a_long_one_is_bounded_and_keeps_its_extremes_and_its_mean() -> None:
    values = [math.sin(step) for step in range(5000)]
    values[1234] = 99.0
    curve = curve_of(values, most_points=50)
    points = curve.points()
    assert 50 <= len(points) < 100
    highest, last = curve.highest(), curve.last
    assert highest is not None and highest.high == 99.0
    assert abs(highest.step - 1234) <= 128
    assert last is not None and last.step == 4999
    assert min(point.low for point in points) == min(values)


def test_the_mean_of_all_stays() -> None:
    curve = curve_of([float(step) for step in range(64)], most_points=4)
    sizes = 64 // len(curve.points())
    assert sum(point.mean * sizes for point in curve.points()) == sum(range(64))


def test_what_was_undone_is_forgotten() -> None:
    curve = curve_of([1.0, 2.0, math.nan, 4.0])
    curve.forget_after(1)
    curve.add(2, 5.0)
    assert [(point.step, point.mean) for point in curve.points()] == [(0, 1), (1, 2), (2, 5)]
    assert curve.nonfinite == []


def test_what_is_said_twice_counts_once_and_what_is_no_number_is_noted() -> None:
    curve = curve_of([1.0])
    curve.add(0, 2.0)
    curve.add(1, math.inf)
    assert curve.points() == [Point(0, 2, 2, 2)]
    assert curve.nonfinite == [1]


def test_numbers_as_events_hold_them() -> None:
    assert number_in(3) == 3.0
    assert math.isnan(number_in("nan") or 0.0)
    assert [number_in(value) for value in (True, "3", None, [], 10**400)] == [None] * 5
    assert count_in(3) == 3
    assert [count_in(value) for value in (-1, True, 3.0, 2**63)] == [None] * 4
