"""The plots of one run: its numbers over steps, its ranks' work and memory; of a search, generations and the front."""

from collections.abc import Iterator, Sequence

from lockstep.observe.curve import Curve, Point, count_in
from lockstep.observe.designs import Spread, front
from lockstep.observe.record import Record
from lockstep.observe.report.markup import Markup
from lockstep.observe.report.plots import Dot, Line, Mark, dot_plot, line_plot, thinned
from lockstep.observe.report.words import in_words
from lockstep.observe.wording import one_line

_MOST_PLOTS = 30
_MOST_DOTS = 1500
_LOSSES = ("loss", "train_loss", "test/loss")
_SECONDS = ("evaluate_s", "evolve_s", "train_s")
_APART = ("found/", "best/", "median/", *_SECONDS)  # a search's own plots show them


def run_plots(record: Record) -> Iterator[Markup | None]:
    marks = marks_of(record)
    if record.is_search:
        yield from _search_plots(record, marks)
    curves = record.curves
    losses = [Line(name, curves[name].points()) for name in _LOSSES if name in curves]
    yield line_plot("Loss", losses, marks, may_be_log=True)
    others = [name for name in curves if name not in _LOSSES and not name.startswith(_APART)]
    along = "generation" if record.is_search else "step"
    for name in others[:_MOST_PLOTS]:
        may_be_log = "loss" in name or name == "gradient_norm"
        yield line_plot(_title(name), [Line(name, curves[name].points())], marks, along=along, may_be_log=may_be_log)
    yield from _rank_plots(record, marks)


def marks_of(record: Record) -> list[Mark]:
    restarts = [Mark(each.step, "restart", in_words(each)) for each in record.restarts]
    return restarts + [Mark(each.step, "incident", in_words(each)) for each in record.incidents if each.step]


def _rank_plots(record: Record, marks: Sequence[Mark]) -> Iterator[Markup | None]:
    logs = record.ranks.drawn()
    batch = count_in(record.start.get("effective_batch"))
    if 0 in logs and batch:
        points = [Point(p.step, *(batch * value for value in p[1:])) for p in logs[0].steps_per_s.points()]
        yield line_plot(
            "Throughput in samples/s, with all that is done between steps", [Line("all ranks", points)], marks
        )
    own = [Line(f"rank {rank}", _scaled(log.own_s, 1e3)) for rank, log in logs.items()]
    yield line_plot("Own work of a step, in ms: data and compute", own, marks)
    memory = [Line(f"rank {rank}", _scaled(log.peak_bytes, 1e-6)) for rank, log in logs.items()]
    yield line_plot("Peak memory so far, in MB", memory, marks)


def _search_plots(record: Record, marks: Sequence[Mark]) -> Iterator[Markup | None]:
    objectives = record.start.get("objectives")
    names = list(objectives) if isinstance(objectives, dict) else []
    for index, name in enumerate(names[:8]):
        spreads = record.designs.spreads(index)
        lines = [Line("median of a generation, and its middle half", [_middle(each) for each in spreads])]
        if (curve := record.curves.get(f"best/{name}")) is not None:
            lines.insert(0, Line("best so far", curve.points()))
        yield line_plot(f"{one_line(name, 60)} over generations", lines, marks, along="generation")
    spent = [Line(name.removesuffix("_s"), record.curves[name].points()) for name in _SECONDS if name in record.curves]
    yield line_plot("Seconds of a generation", spent, marks, along="generation")
    if len(names) > 1 and isinstance(objectives, dict):
        is_max = (objectives[names[0]] == "max", objectives[names[1]] == "max")
        designs = [each for each in record.designs.all() if len(each) > 1]
        every = -(-len(designs) // _MOST_DOTS) or 1
        dots = [Dot(each[0], each[1]) for each in designs[::every]]
        best = [Dot(*each) for each in front(designs, is_max)]
        yield dot_plot("Designs", dots, best, (one_line(names[0], 60), one_line(names[1], 60)))


def _middle(spread: Spread) -> Point:
    return Point(spread.generation, spread.low, spread.median, spread.high)


def _scaled(curve: Curve, factor: float) -> list[Point]:
    return [Point(p.step, p.low * factor, p.mean * factor, p.high * factor) for p in thinned(curve.points())]


def _title(name: str) -> str:
    known = {"lr": "Learning rate", "gradient_norm": "Norm of the gradients", "loss_scale": "Loss scale"}
    plain = name.removeprefix("test/")
    return known.get(name) or (f"Test: {plain}" if plain != name else one_line(name, 60))
