"""The plots of one run: metrics, each rank's work and memory; a search's generations and front."""

from collections.abc import Iterator, Sequence

from lockstep.events.jsonl import parse_count
from lockstep.observe.curve import Curve, Point
from lockstep.observe.evaluated_designs import pareto_designs
from lockstep.observe.run_record import RunRecord
from lockstep.observe.text_format import one_line
from lockstep.report.html_page import Markup
from lockstep.report.svg_plots import PlotDot, PlotLine, PlotMark, downsample, line_plot, scatter_plot
from lockstep.report.text_report import describe_restart_or_incident

_MAX_PLOTS = 30
_MAX_OBJECTIVES = 8
_MAX_DOTS = 1500
_LOSSES = ("loss", "train_loss", "test/loss")
_SEARCH_TIMES = ("evaluate_s", "evolve_s", "train_s")
_SEARCH_METRICS = ("found/", "best/", "median/", *_SEARCH_TIMES)  # have their own plots
_TITLES = {"lr": "Learning rate", "gradient_norm": "Gradient norm", "loss_scale": "Loss scale"}


def run_plots(record: RunRecord) -> Iterator[Markup | None]:
    """Yield the plots of a run; None for one that has nothing to show."""
    marks = _marks(record)
    if record.is_search:
        yield from _search_plots(record, marks)
    curves = record.curves
    losses = [PlotLine(name, curves[name].points()) for name in _LOSSES if name in curves]
    yield line_plot("Loss", losses, marks, may_be_log=True)
    others = [name for name in curves if name not in _LOSSES and not name.startswith(_SEARCH_METRICS)]
    x_label = "generation" if record.is_search else "step"
    for name in others[:_MAX_PLOTS]:
        lines = [PlotLine(name, curves[name].points())]
        may_be_log = "loss" in name or name == "gradient_norm"
        yield line_plot(_title(name), lines, marks, x_label=x_label, may_be_log=may_be_log)
    yield from _rank_plots(record, marks)


def _marks(record: RunRecord) -> list[PlotMark]:
    restarts = [PlotMark(each.step, "restart", describe_restart_or_incident(each)) for each in record.restarts]
    incidents = [
        PlotMark(each.step, "incident", describe_restart_or_incident(each)) for each in record.incidents if each.step
    ]
    return restarts + incidents


def _rank_plots(record: RunRecord, marks: Sequence[PlotMark]) -> Iterator[Markup | None]:
    logs = record.ranks.first_logs()
    batch = parse_count(record.start.get("effective_batch"))
    if 0 in logs and batch:
        points = [_scale(point, batch) for point in logs[0].steps_per_s.points()]
        title = "Throughput in samples/s, including saving and evaluation"
        yield line_plot(title, [PlotLine("all ranks", points)], marks)
    own_work = [PlotLine(f"rank {rank}", _scaled(log.own_s, 1e3)) for rank, log in logs.items()]
    yield line_plot("Own work per step in ms: data wait and compute", own_work, marks)
    memory = [PlotLine(f"rank {rank}", _scaled(log.peak_bytes, 1e-6)) for rank, log in logs.items()]
    yield line_plot("Peak memory so far, in MB", memory, marks)


def _search_plots(record: RunRecord, marks: Sequence[PlotMark]) -> Iterator[Markup | None]:
    objectives = record.start.get("objectives")
    directions = objectives if isinstance(objectives, dict) else {}
    names = list(directions)
    for index, name in enumerate(names[:_MAX_OBJECTIVES]):
        spreads = record.designs.spreads(index)
        points = [Point(spread.generation, spread.low, spread.median, spread.high) for spread in spreads]
        lines = [PlotLine("median and middle half of each generation", points)]
        if (curve := record.curves.get(f"best/{name}")) is not None:
            lines.insert(0, PlotLine("best so far", curve.points()))
        yield line_plot(f"{one_line(name, 60)} over generations", lines, marks, x_label="generation")
    times = [name for name in _SEARCH_TIMES if name in record.curves]
    lines = [PlotLine(name.removesuffix("_s"), record.curves[name].points()) for name in times]
    yield line_plot("Seconds per generation", lines, marks, x_label="generation")
    if len(names) > 1:
        yield _front_plot(record, names, (directions[names[0]] == "max", directions[names[1]] == "max"))


def _front_plot(record: RunRecord, names: Sequence[str], is_max: tuple[bool, bool]) -> Markup | None:
    designs = [each for each in record.designs.all() if len(each) > 1]
    stride = -(-len(designs) // _MAX_DOTS) or 1
    dots = [PlotDot(each[0], each[1]) for each in designs[::stride]]
    front = [PlotDot(*each) for each in pareto_designs(designs, is_max)]
    return scatter_plot("Designs", dots, front, (one_line(names[0], 60), one_line(names[1], 60)))


def _scaled(curve: Curve, factor: float) -> list[Point]:
    return [_scale(point, factor) for point in downsample(curve.points())]


def _scale(point: Point, factor: float) -> Point:
    return Point(point.step, point.low * factor, point.mean * factor, point.high * factor)


def _title(name: str) -> str:
    metric = name.removeprefix("test/")
    return _TITLES.get(name) or one_line(f"Test: {metric}" if metric != name else name, 60)
