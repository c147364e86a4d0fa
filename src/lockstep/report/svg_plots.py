"""Draw plots as inline SVG: lines over steps, scatter plots, and a bar of phases for each rank."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lockstep.observe.curve import Point
from lockstep.observe.step_timing import PHASE_LABELS, RankTimes
from lockstep.observe.text_format import format_number, format_percent, format_seconds, one_line
from lockstep.report.html_page import Markup, element, join_markup

_NUM_COLOURS = 8
_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 30
_MAX_DRAWN_POINTS = 400  # per line
_MAX_BANDS = 3  # with more lines, their bands would hide each other
_LARGEST = 1e300  # differences of larger values overflow
_MIN_LOG_RATIO = 50.0  # of the highest to the lowest value, for a logarithmic axis
_MAX_TICKS = 6

_BARS_WIDTH, _BARS_LEFT, _BARS_RIGHT = 760, 66, 84
_BAR_ROW, _BAR_HEIGHT = 26, 16


class PlotLine(NamedTuple):
    """One line of a plot, with its name in the legend."""

    name: str
    points: Sequence[Point]


class PlotMark(NamedTuple):
    """A vertical mark for something that happened at a step."""

    step: int
    kind: str  # "restart" or "incident"
    text: str


class PlotDot(NamedTuple):
    """One dot of a scatter plot."""

    x: float
    y: float


class PlotAxis(NamedTuple):
    """Maps values to coordinates, with ticks at round numbers."""

    low: float
    high: float
    begin: float  # coordinate of `low`
    end: float  # coordinate of `high`
    is_log: bool = False
    is_whole: bool = False  # ticks are whole numbers only

    def place(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high, value = (_log(each) if self.is_log else each for each in (self.low, self.high, value))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def labels(self) -> list[str]:
        """Return a label for each tick, with as many digits as tell neighbours apart."""
        ticks = self.ticks()
        if self.is_log or len(ticks) < 2:
            return [format_number(tick) for tick in ticks]
        unit = min(right - left for left, right in pairwise(ticks))
        digits = max(0, math.ceil(-math.log10(unit) - 1e-9))
        has_half = abs(unit * 10**digits - round(unit * 10**digits)) > 1e-6  # units of 2.5
        if digits > 6 or max(map(abs, ticks)) >= 1e9:
            return [f"{tick:.6g}" for tick in ticks]
        return [f"{tick:,.{digits + has_half}f}" for tick in ticks]

    def ticks(self) -> list[float]:
        """Return the values at which ticks are drawn."""
        if self.is_log:
            return _log_ticks(self.low, self.high)
        ticks = _linear_ticks(self.low, self.high)
        return [tick for tick in ticks if tick == round(tick)] if self.is_whole else ticks


def value_axis(low: float, high: float, begin: float, end: float, *, may_be_log: bool = False) -> PlotAxis:
    """Return an axis for values, with a margin at both ends.

    Args:
        low: the lowest value.
        high: the highest value.
        begin: the coordinate of the low end.
        end: the coordinate of the high end.
        may_be_log: use a logarithmic axis if the values span a large range.
    """
    if may_be_log and low > 0 and high / low >= _MIN_LOG_RATIO:
        margin = (high / low) ** 0.04
        return PlotAxis(low / margin, high * margin, begin, end, is_log=True)
    span = high - low
    margin = 0.06 * span if span > 0 and math.isfinite(span) else 0.1 * abs(high) or 1.0
    return PlotAxis(low - margin, high + margin, begin, end)


def step_axis(first: int, last: int, begin: float, end: float) -> PlotAxis:
    """Return an axis for steps, whose ticks are whole numbers."""
    margin = 0 if last > first else 1
    return PlotAxis(first - margin, last + margin, begin, end, is_whole=True)


def line_plot(
    title: str,
    lines: Sequence[PlotLine],
    marks: Sequence[PlotMark] = (),
    *,
    x_label: str = "step",
    may_be_log: bool = False,
) -> Markup | None:
    """Draw lines over steps; None if there is nothing to draw.

    Args:
        title: the caption.
        lines: the lines; where points were merged, a band shows their range.
        marks: events to show as vertical lines.
        x_label: what the x axis counts.
        may_be_log: use a logarithmic y axis if the values span a large range.
    """
    drawn = [PlotLine(one_line(line.name, 60), downsample(line.points)) for line in lines]
    drawn = [line for line in drawn if line.points]
    if not drawn:
        return None
    points = [point for line in drawn for point in line.points]
    x_axis = step_axis(min(p.step for p in points), max(p.step for p in points), _LEFT, _WIDTH - _RIGHT)
    low, high = min(p.low for p in points), max(p.high for p in points)
    y_axis = value_axis(low, high, _HEIGHT - _BOTTOM, _TOP, may_be_log=may_be_log)
    shapes = [_frame(x_axis, y_axis, x_label)]
    shapes += [_mark(mark, x_axis) for mark in marks if x_axis.low <= mark.step <= x_axis.high]
    for index, line in enumerate(drawn):
        shapes.append(_line(line, x_axis, y_axis, f"c{index % _NUM_COLOURS}", has_band=len(drawn) <= _MAX_BANDS))
    shapes.append(element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_HEIGHT - _BOTTOM, visibility="hidden"))
    data = {  # for page.js, which shows the values under the pointer
        "axis": [x_axis.low, x_axis.high, x_axis.begin, x_axis.end, _WIDTH],
        "lines": [[[point.step, float(f"{point.mean:.6g}")] for point in line.points] for line in drawn],
    }
    scale = " (logarithmic)" if y_axis.is_log else ""
    newest = [line.points[-1] for line in drawn]
    return _figure(f"{title}{scale}", [line.name for line in drawn], shapes, newest, data)


def scatter_plot(
    title: str, dots: Sequence[PlotDot], front: Sequence[PlotDot], names: tuple[str, str]
) -> Markup | None:
    """Draw designs by two objectives, with the Pareto front as a line; None if there is nothing to draw.

    Args:
        title: the caption, to which the names are added.
        dots: the designs.
        front: the designs of the front, in order of the first objective.
        names: of the objectives, on the x axis and on the y axis.
    """
    drawable = [dot for dot in [*dots, *front] if abs(dot.x) < _LARGEST and abs(dot.y) < _LARGEST]
    if not drawable:
        return None
    x_axis = value_axis(min(d.x for d in drawable), max(d.x for d in drawable), _LEFT, _WIDTH - _RIGHT)
    y_axis = value_axis(min(d.y for d in drawable), max(d.y for d in drawable), _HEIGHT - _BOTTOM, _TOP)
    front_places = [(x_axis.place(dot.x), y_axis.place(dot.y)) for dot in front]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in front_places)
    shapes = [_frame(x_axis, y_axis, names[0])]
    for dot in dots:
        x, y = f"{x_axis.place(dot.x):.1f}", f"{y_axis.place(dot.y):.1f}"
        shapes.append(element("circle", class_="dot fill c0", cx=x, cy=y, r=1.8))
    shapes.append(element("polyline", class_="line c1", points=path))
    shapes += [element("circle", class_="fill c1", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3) for x, y in front_places]
    return _figure(f"{title}: {names[1]} over {names[0]}", ["evaluated", "front"], shapes)


def phase_bars(ranks: Sequence[RankTimes]) -> Markup | None:
    """Draw each rank's step as a bar of its phases; None if no time was measured."""
    longest_s = max((each.step_s for each in ranks), default=0.0)
    if longest_s <= 0:
        return None
    scale = (_BARS_WIDTH - _BARS_LEFT - _BARS_RIGHT) / longest_s
    rows = [_phase_bar(each, index * _BAR_ROW, scale) for index, each in enumerate(ranks)]
    box = f"0 0 {_BARS_WIDTH} {len(ranks) * _BAR_ROW}"
    picture = element("svg", *rows, viewBox=box, role="img", aria_label="time per step, by rank and phase")
    caption = element("figcaption", "Time per step, by rank")
    return element("figure", caption, picture, _legend(list(PHASE_LABELS.values())), class_="wide")


def downsample(points: Sequence[Point], max_points: int = _MAX_DRAWN_POINTS) -> list[Point]:
    """Merge neighbouring points until there are at most `max_points`; their extremes are kept."""
    points = [point for point in points if -_LARGEST < point.low <= point.high < _LARGEST]
    size = -(-len(points) // max_points) or 1
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


def _figure(
    title: str,
    names: Sequence[str],
    shapes: Sequence[Markup],
    newest: Sequence[Point] = (),
    data: dict[str, Any] | None = None,
) -> Markup:
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    picture = element("svg", *shapes, viewBox=box, role="img", aria_label=title)
    data_plot = None if data is None else json.dumps(data, allow_nan=False)
    return element("figure", element("figcaption", title), picture, _legend(names, newest), data_plot=data_plot)


def _legend(names: Sequence[str], newest: Sequence[Point] = ()) -> Markup:
    entries = []
    for index, name in enumerate(names):
        value = element("b", format_number(newest[index].mean)) if newest else None
        entries.append(element("span", element("i", class_=f"c{index % _NUM_COLOURS}"), f"{name} ", value))
    return element("div", *entries, class_="legend")


def _frame(x_axis: PlotAxis, y_axis: PlotAxis, x_label: str) -> Markup:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    shapes = []
    for value, label in zip(y_axis.ticks(), y_axis.labels(), strict=True):
        y = f"{y_axis.place(value):.1f}"
        shapes.append(element("line", class_="grid", x1=_LEFT, x2=right, y1=y, y2=y))
        shapes.append(element("text", label, class_="up", x=_LEFT - 6, y=y))
    for value, label in zip(x_axis.ticks(), x_axis.labels(), strict=True):
        x = f"{x_axis.place(value):.1f}"
        shapes.append(element("text", label, class_="across", x=x, y=bottom + 14))
    shapes.append(element("line", class_="axis", x1=_LEFT, x2=right, y1=bottom, y2=bottom))
    shapes.append(element("text", one_line(x_label, 60), class_="along", x=right, y=bottom + 27))
    return join_markup(*shapes)


def _line(line: PlotLine, x_axis: PlotAxis, y_axis: PlotAxis, colour: str, *, has_band: bool) -> Markup:
    xs = [f"{x_axis.place(point.step):.1f}" for point in line.points]
    ys = [f"{y_axis.place(point.mean):.1f}" for point in line.points]
    shapes = []
    if has_band and any(point.high > point.low for point in line.points):
        above = [f"{x},{y_axis.place(point.high):.1f}" for x, point in zip(xs, line.points, strict=True)]
        below = [f"{x},{y_axis.place(point.low):.1f}" for x, point in zip(xs, line.points, strict=True)]
        shapes.append(element("polygon", class_=f"band {colour}", points=" ".join([*above, *reversed(below)])))
    path = " ".join(f"{x},{y}" for x, y in zip(xs, ys, strict=True))
    shapes.append(element("polyline", class_=f"line {colour}", points=path))
    if len(xs) <= 40:
        shapes += [element("circle", class_=f"fill {colour}", cx=x, cy=y, r=2) for x, y in zip(xs, ys, strict=True)]
    return join_markup(*shapes)


def _mark(mark: PlotMark, x_axis: PlotAxis) -> Markup:
    x = f"{x_axis.place(mark.step):.1f}"
    tooltip = element("title", one_line(mark.text))
    return element("line", tooltip, class_=f"mark {mark.kind}", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM)


def _phase_bar(times: RankTimes, top: int, scale: float) -> Markup:
    text_y = top + _BAR_HEIGHT // 2 + 4
    shapes = [element("text", f"rank {times.rank}", class_="up", x=_BARS_LEFT - 8, y=text_y)]
    x = float(_BARS_LEFT)
    for index, (phase, name) in enumerate(PHASE_LABELS.items()):
        phase_s = times.phases[phase]
        share = format_percent(phase_s / times.step_s if times.step_s else 0.0)
        tooltip = element("title", f"rank {times.rank}, {name}: {format_seconds(phase_s)}, {share} of a step")
        width, left = f"{phase_s * scale:.2f}", f"{x:.1f}"
        shapes.append(
            element("rect", tooltip, class_=f"fill c{index}", x=left, y=top + 4, width=width, height=_BAR_HEIGHT)
        )
        x += phase_s * scale
    shapes.append(element("text", format_seconds(times.step_s), class_="value", x=f"{x + 8:.1f}", y=text_y))
    return join_markup(*shapes)


def _log(value: float) -> float:
    return math.log(max(value, 1e-300))


def _linear_ticks(low: float, high: float) -> list[float]:
    min_unit = (high - low) / _MAX_TICKS
    magnitude = 10.0 ** math.floor(math.log10(min_unit))
    unit = next(unit * magnitude for unit in (1, 2, 2.5, 5, 10) if unit * magnitude >= min_unit)
    first, last = math.ceil(low / unit), math.floor(high / unit)
    return [index * unit for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if len(powers) > 4 else (1, 3) if len(powers) > 2 else (1, 2, 5)
    ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
    return ticks[:: -(-len(ticks) // _MAX_TICKS)] if ticks else [low, high]
