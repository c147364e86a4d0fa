"""Axes have round numbers, and values of any size can be drawn."""

from collections.abc import Sequence

import pytest

from lockstep.observe.curve import Point
from lockstep.report.svg_plots import PlotLine, downsample, line_plot, scatter_plot, step_axis, value_axis
from tests.unit.report.parsed_page import ParsedPage


def points_of(values: Sequence[float]) -> list[Point]:
    return [Point(step, value, value, value) for step, value in enumerate(values)]


def test_axes_have_round_numbers() -> None:
    assert value_axis(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert step_axis(1, 3, 0, 100).ticks() == [1, 2, 3]
    assert value_axis(1000.0, 1000.5, 0, 100).labels() == [
        "1,000.0",
        "1,000.1",
        "1,000.2",
        "1,000.3",
        "1,000.4",
        "1,000.5",
    ]
    assert value_axis(0.0, 0.12, 0, 100).labels() == ["0.000", "0.025", "0.050", "0.075", "0.100", "0.125"]
    logarithmic = value_axis(0.01, 10.0, 0, 100, may_be_log=True)
    assert logarithmic.is_log
    assert logarithmic.ticks() == pytest.approx([0.01, 0.1, 1, 10])
    assert value_axis(5.0, 5.0, 0, 100).place(5.0) == pytest.approx(50)


def test_numbers_of_any_size_can_be_drawn() -> None:
    plot = line_plot("Loss", [PlotLine("loss", points_of([0.0, -1e308, 1e308, 1e-320, 5.0, 5.0]))], may_be_log=True)
    assert plot is not None
    drawn = [attributes.get("points") or "" for _, attributes in ParsedPage(plot).elements]
    assert any(drawn)
    assert not [points for points in drawn if "nan" in points or "inf" in points]


def test_nothing_to_draw_is_no_plot() -> None:
    assert line_plot("Loss", [PlotLine("loss", [])]) is None
    assert scatter_plot("Designs", [], [], ("a", "b")) is None


def test_downsampling_keeps_the_extremes() -> None:
    points = downsample(points_of([0.0, 9.0, 1.0, -5.0, 2.0]), max_points=3)
    assert points == [Point(1, 0, 4.5, 9), Point(3, -5, -2, 1), Point(4, 2, 2, 2)]
