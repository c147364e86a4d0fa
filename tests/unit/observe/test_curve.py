"""Curves stay bounded, keep their extremes, and drop steps that are repeated."""

import math

from lockstep.observe.curve import Curve, Point


def curve_of(values: list[float], max_points: int = 2000) -> Curve:
    curve = Curve(max_points)
    for step, value in enumerate(values):
        curve.add(step, value)
    return curve


def test_a_short_curve_keeps_every_value() -> None:
    assert curve_of([3.0, 1.0]).points() == [Point(0, 3, 3, 3), Point(1, 1, 1, 1)]


def test_a_long_curve_is_bounded_and_keeps_its_extremes() -> None:
    values = [math.sin(step) for step in range(5000)]
    values[1234] = 99.0
    curve = curve_of(values, max_points=50)
    points = curve.points()
    assert 50 <= len(points) < 100
    highest, last = curve.highest(), curve.last
    assert highest is not None and highest.high == 99.0
    assert abs(highest.step - 1234) <= 128
    assert last is not None and last.step == 4999
    assert min(point.low for point in points) == min(values)


def test_merging_keeps_the_mean() -> None:
    curve = curve_of([float(step) for step in range(64)], max_points=4)
    sizes = 64 // len(curve.points())
    assert sum(point.mean * sizes for point in curve.points()) == sum(range(64))


def test_repeated_steps_are_dropped() -> None:
    curve = curve_of([1.0, 2.0, math.nan, 4.0])
    curve.drop_after(1)
    curve.add(2, 5.0)
    assert [(point.step, point.mean) for point in curve.points()] == [(0, 1), (1, 2), (2, 5)]
    assert curve.nonfinite_steps == []


def test_a_second_value_of_a_step_replaces_the_first_and_nonfinite_values_are_noted() -> None:
    curve = curve_of([1.0])
    curve.add(0, 2.0)
    curve.add(1, math.inf)
    assert curve.points() == [Point(0, 2, 2, 2)]
    assert curve.nonfinite_steps == [1]
