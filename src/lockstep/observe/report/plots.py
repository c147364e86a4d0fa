"""Plots as inline SVG: lines over steps, a band where points were put together, marks where things happened."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.observe.curve import Point
from lockstep.observe.report.axis import Axis, step_axis, value_axis
from lockstep.observe.report.markup import Markup, element, join
from lockstep.observe.wording import number, one_line

NUM_COLOURS = 8

_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 30
_MOST_DRAWN = 400  # points of a line
_MOST_BANDS = 3  # lines that are drawn with a band: more would hide each other
_LARGEST = 1e300  # beyond it, differences overflow


class Line(NamedTuple):
    name: str
    points: Sequence[Point]


class Mark(NamedTuple):
    """Something that happened at a step."""

    step: int
    kind: str  # "restart" or "incident"
    text: str


class Dot(NamedTuple):
    x: float
    y: float


def line_plot(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    along: str = "step",
    may_be_log: bool = False,
) -> Markup | None:
    """None, where there is nothing to draw."""
    drawn = [Line(one_line(line.name, 60), thinned(line.points)) for line in lines]
    drawn = [line for line in drawn if line.points]
    if not drawn:
        return None
    across, up = _axes(drawn, may_be_log)
    parts = [_frame(across, up, along), *(_mark(mark, across) for mark in marks if _is_on(mark.step, across))]
    for index, line in enumerate(drawn):
        parts.append(_line(line, across, up, f"c{index % NUM_COLOURS}", has_band=len(drawn) <= _MOST_BANDS))
    parts.append(element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_HEIGHT - _BOTTOM, visibility="hidden"))
    data = {
        "axis": [across.low, across.high, across.begin, across.end, _WIDTH],
        "lines": [[[point.step, float(f"{point.mean:.6g}")] for point in line.points] for line in drawn],
    }
    scale = " (logarithmic)" if up.is_log else ""
    return _figure(f"{title}{scale}", [line.name for line in drawn], parts, [line.points[-1] for line in drawn], data)


def dot_plot(title: str, dots: Sequence[Dot], front: Sequence[Dot], names: tuple[str, str]) -> Markup | None:
    """Designs by two objectives; those of the front joined."""
    known = [dot for dot in [*dots, *front] if abs(dot.x) < _LARGEST and abs(dot.y) < _LARGEST]
    if not known:
        return None
    across = value_axis(min(d.x for d in known), max(d.x for d in known), _LEFT, _WIDTH - _RIGHT)
    up = value_axis(min(d.y for d in known), max(d.y for d in known), _HEIGHT - _BOTTOM, _TOP)
    places = [(across.place(dot.x), up.place(dot.y)) for dot in front]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [
        _frame(across, up, names[0]),
        *(
            element("circle", class_="dot fill c0", cx=f"{across.place(d.x):.1f}", cy=f"{up.place(d.y):.1f}", r=1.8)
            for d in dots
        ),
        element("polyline", class_="line c1", points=path),
        *(element("circle", class_="fill c1", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3) for x, y in places),
    ]
    return _figure(f"{title}: {names[1]} over {names[0]}", ["evaluated", "front"], parts)


def thinned(points: Sequence[Point], most: int = _MOST_DRAWN) -> list[Point]:
    """As many as can be seen; extremes stay."""
    points = [point for point in points if -_LARGEST < point.low <= point.high < _LARGEST]
    size = -(-len(points) // most) or 1
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        Point(
            group[-1].step,
            min(point.low for point in group),
            sum(point.mean / len(group) for point in group),
            max(point.high for point in group),
        )
        for group in groups
    ]


def legend(names: Sequence[str], last: Sequence[Point] = ()) -> Markup:
    entries = []
    for index, name in enumerate(names):
        value = element("b", number(last[index].mean)) if last else None
        entries.append(element("span", element("i", class_=f"c{index % NUM_COLOURS}"), f"{name} ", value))
    return element("div", *entries, class_="legend")


def _figure(
    title: str,
    names: Sequence[str],
    parts: Sequence[Markup],
    last: Sequence[Point] = (),
    data: dict[str, Any] | None = None,
) -> Markup:
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    picture = element("svg", *parts, viewBox=box, role="img", aria_label=title)
    shown = None if data is None else json.dumps(data, allow_nan=False)
    return element("figure", element("figcaption", title), picture, legend(names, last), data_plot=shown)


def _axes(lines: Sequence[Line], may_be_log: bool) -> tuple[Axis, Axis]:
    points = [point for line in lines for point in line.points]
    first, last = min(point.step for point in points), max(point.step for point in points)
    low, high = min(point.low for point in points), max(point.high for point in points)
    across = step_axis(first, last, _LEFT, _WIDTH - _RIGHT)
    return across, value_axis(low, high, _HEIGHT - _BOTTOM, _TOP, may_be_log=may_be_log)


def _frame(across: Axis, up: Axis, along: str) -> Markup:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value, label in zip(up.ticks(), up.labels(), strict=True):
        y = f"{up.place(value):.1f}"
        parts.append(element("line", class_="grid", x1=_LEFT, x2=right, y1=y, y2=y))
        parts.append(element("text", label, class_="up", x=_LEFT - 6, y=y))
    for value, label in zip(across.ticks(), across.labels(), strict=True):
        x = f"{across.place(value):.1f}"
        parts.append(element("text", label, class_="across", x=x, y=bottom + 14))
    parts.append(element("line", class_="axis", x1=_LEFT, x2=right, y1=bottom, y2=bottom))
    parts.append(element("text", one_line(along, 60), class_="along", x=right, y=bottom + 27))
    return join(*parts)


def _line(line: Line, across: Axis, up: Axis, colour: str, *, has_band: bool) -> Markup:
    xs = [across.place(point.step) for point in line.points]
    parts = []
    if has_band and any(point.high > point.low for point in line.points):
        above = [f"{x:.1f},{up.place(point.high):.1f}" for x, point in zip(xs, line.points, strict=True)]
        below = [f"{x:.1f},{up.place(point.low):.1f}" for x, point in zip(xs, line.points, strict=True)]
        parts.append(element("polygon", class_=f"band {colour}", points=" ".join([*above, *reversed(below)])))
    places = [f"{x:.1f},{up.place(point.mean):.1f}" for x, point in zip(xs, line.points, strict=True)]
    parts.append(element("polyline", class_=f"line {colour}", points=" ".join(places)))
    if len(places) <= 40:
        for x, point in zip(xs, line.points, strict=True):
            parts.append(
                element("circle", class_=f"fill {colour}", cx=f"{x:.1f}", cy=f"{up.place(point.mean):.1f}", r=2)
            )
    return join(*parts)


def _mark(mark: Mark, across: Axis) -> Markup:
    x = f"{across.place(mark.step):.1f}"
    told = element("title", one_line(mark.text))
    return element("line", told, class_=f"mark {mark.kind}", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM)


def _is_on(step: int, across: Axis) -> bool:
    return across.low <= step <= across.high
