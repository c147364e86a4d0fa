"""What stands on the page of a run, and on that of several: tiles, verdict, plots, tables, happenings, pictures."""

from collections.abc import Iterator, Sequence

from lockstep import __version__
from lockstep.observe.curve import Point
from lockstep.observe.findings import findings, verdict
from lockstep.observe.record import Record
from lockstep.observe.report.bars import phase_bars
from lockstep.observe.report.comparison import Row, cells, notes
from lockstep.observe.report.markup import Markup, element, join
from lockstep.observe.report.pictures import pictures
from lockstep.observe.report.plots import Line, line_plot
from lockstep.observe.report.run_plots import run_plots
from lockstep.observe.report.words import about, gradient_lines, happenings, slowest, title
from lockstep.observe.state import State
from lockstep.observe.timing import PHASES, RankTimes
from lockstep.observe.wording import number, one_line, seconds, several_lines, share, size, times

_MOST_RANKS = 32
_MOST_TILES = 8
_MAX_TEXT = 4000
_SMALL = 64  # pixels: images below it are shown larger, with their pixels to be seen


def run_contents(record: Record, state: State) -> Markup:
    return join(
        element("h1", one_line(record.name, 120)),
        element("p", element("span", state.words, class_=f"state {state.standing}")),
        element("p", title(record), class_="faint"),
        *(element("p", line, class_="faint") for line in about(record)),
        _progress(record),
        _tiles(record),
        _verdict(record),
        _section("Plots", _grid(run_plots(record))),
        _section("Where the time went", _times(record)),
        _section("What happened", _list(happenings(record))),
        _section("Pictures and texts", join(_pictures(record), _texts(record))),
        _section("Settings", element("pre", "\n".join(several_lines(record.config, 100_000, 2000)))),
        _section("Machine", _machine(record)),
        _footer(),
    )


def comparison_contents(rows: Sequence[Row]) -> Markup:
    return join(
        element("h1", f"{times(len(rows), 'run')} compared"),
        _section("Scaling", join(_table(cells(rows)), _list(notes(rows)))),
        _section("Plots", _grid([*_scaling_plots(rows), *_overlaid(rows)])),
        _footer(),
    )


def _scaling_plots(rows: Sequence[Row]) -> Iterator[Markup | None]:
    measured = [row for row in rows if row.speed_up is not None]
    reached = [_point(row.processes, row.speed_up or 0.0) for row in measured]
    ideal = [_point(row.processes, row.processes / rows[0].processes) for row in measured]
    yield line_plot("Speed-up", [Line("reached", reached), Line("ideal", ideal)], along="processes")
    rates = [_point(row.processes, row.rate.per_s) for row in measured if row.rate is not None]
    yield line_plot("Throughput", [Line("a second", rates)], along="processes")


def _overlaid(rows: Sequence[Row]) -> Iterator[Markup | None]:
    """The curves that all have, one line for each run."""
    common = [name for name in rows[0].record.curves if all(name in row.record.curves for row in rows)]
    for name in common[:_MOST_TILES]:
        lines = [Line(f"{row.record.name} ({row.processes})", row.record.curves[name].points()) for row in rows]
        yield line_plot(one_line(name, 60), lines, may_be_log="loss" in name)


def _point(processes: int, value: float) -> Point:
    return Point(processes, value, value, value)


def _progress(record: Record) -> Markup | None:
    if not record.total_steps:
        return None
    done = min(1.0, record.step / record.total_steps)
    room = element("rect", class_="room", width=1000, height=8)
    bar = element("rect", class_="done", width=f"{1000 * done:.1f}", height=8)
    label = f"{share(done)} done"
    return element(
        "svg", room, bar, class_="bar", viewBox="0 0 1000 8", preserveAspectRatio="none", role="img", aria_label=label
    )


def _tiles(record: Record) -> Markup:
    of = "" if record.total_steps is None else f" of {record.total_steps:,}"
    tiles = [(f"{record.step:,}", f"{'generation' if record.is_search else 'step'}{of}")]
    if record.samples_per_s is not None:
        tiles.append((number(record.samples_per_s), "samples/s"))
    tiles += [
        (number(curve.last.mean), one_line(name, 40))
        for name, curve in record.curves.items()
        if curve.last is not None and (name == "loss" or name.startswith(("test/", "best/")))
    ]
    if record.num_restarts:
        tiles.append((str(record.num_restarts), "restart" + "s" * (record.num_restarts > 1)))
    shown = tiles[:_MOST_TILES]
    return element(
        "div", *(element("div", element("b", v), element("span", n), class_="tile") for v, n in shown), class_="tiles"
    )


def _verdict(record: Record) -> Markup | None:
    lines = verdict(record)
    kind = "finding" if findings(record) else "finding none"
    return _section("Verdict", join(*(element("p", line, class_=kind) for line in lines)))


def _times(record: Record) -> Markup | None:
    ranks = record.ranks.times()
    if not ranks:
        return None
    shown = slowest(ranks, _MOST_RANKS)
    left_out = f"the {len(shown)} slowest of {len(ranks)} ranks; " if len(shown) < len(ranks) else ""
    timed = element("p", f"{left_out}medians over {times(ranks[0].num_timed, 'timed step')}", class_="faint")
    lines = [["rank", "lanes", *PHASES, "step", "saving", "evaluating", "peak memory"], *map(_cells, shown)]
    return join(timed, phase_bars(shown), _table(lines), _list(gradient_lines(ranks)))


def _cells(rank: RankTimes) -> list[str]:
    peak = rank.peak_device_bytes or rank.peak_host_bytes
    phases = [seconds(rank.phases[phase]) for phase in PHASES]
    asides = [share(rank.saving), share(rank.evaluating), "" if peak is None else size(peak)]
    return [str(rank.rank), str(rank.num_lanes), *phases, seconds(rank.step_s), *asides]


def _pictures(record: Record) -> Markup | None:
    figures = []
    for picture in pictures(record):
        step = "" if picture.step is None else f", step {picture.step:,}"
        is_small = max(picture.width, picture.height) <= _SMALL
        scale = 4 if is_small else 1
        image = element(
            "img",
            src=picture.uri,
            alt=one_line(picture.name),
            class_="small" if is_small else None,
            width=scale * picture.width,
            height=scale * picture.height,
        )
        figures.append(element("figure", element("figcaption", f"{one_line(picture.name, 100)}{step}"), image))
    return element("div", *figures, class_="pictures") if figures else None


def _texts(record: Record) -> Markup:
    return join(
        *(
            join(
                element("p", f"{one_line(name, 100)}, step {text.step:,}", class_="faint"),
                element("pre", "\n".join(several_lines(text.text, _MAX_TEXT, 100))),
            )
            for name, text in record.texts.items()
        )
    )


def _machine(record: Record) -> Markup | None:
    fingerprint = record.facts.get("fingerprint")
    if not isinstance(fingerprint, dict):
        return None
    known = {name: value for name, value in fingerprint.items() if isinstance(value, str | int | float)}
    told = [f"{one_line(name, 40)}: {one_line(value, 80)}" for name, value in list(known.items())[:40]]
    created = one_line(record.facts.get("created", ""), 40)
    return element(
        "p", f"run {one_line(record.facts.get('run_id', ''), 40)}, created {created}; ", ", ".join(told), class_="faint"
    )


def _section(heading: str, contents: Markup | None) -> Markup | None:
    return join(element("h2", heading), contents) if contents else None


def _grid(plots: "Iterator[Markup | None] | Sequence[Markup | None]") -> Markup | None:
    drawn = [plot for plot in plots if plot is not None]
    return element("div", *drawn, class_="plots") if drawn else None


def _table(rows: Sequence[Sequence[str]]) -> Markup:
    head, *body = rows
    top = element("tr", *(element("th", cell) for cell in head))
    lines = [element("tr", *(element("td", cell) for cell in row)) for row in body]
    return element("div", element("table", top, *lines), class_="scroll")


def _list(lines: Sequence[str]) -> Markup | None:
    return element("ul", *(element("li", line) for line in lines)) if lines else None


def _footer() -> Markup:
    return element("footer", f"lockstep {__version__}, read from the run folder alone")
