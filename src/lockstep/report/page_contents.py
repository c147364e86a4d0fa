"""The contents of the report page: tiles, verdict, plots, tables, history and images."""

from collections.abc import Iterable, Iterator, Sequence

from lockstep import __version__
from lockstep.config.plurals import count_noun
from lockstep.observe.curve import Point
from lockstep.observe.run_findings import run_findings, verdict_lines
from lockstep.observe.run_record import RunRecord
from lockstep.observe.run_status import RunStatus
from lockstep.observe.text_format import format_number, format_percent, one_line, several_lines
from lockstep.report.embedded_images import embed_images
from lockstep.report.html_page import Markup, element, join_markup, render_page
from lockstep.report.run_comparison import ComparisonRow, comparison_cells, comparison_notes
from lockstep.report.run_plots import run_plots
from lockstep.report.svg_plots import PlotLine, line_plot, phase_bars
from lockstep.report.text_report import (
    TIMING_HEADINGS,
    communication_lines,
    history_lines,
    run_summary,
    run_title,
    slowest_ranks,
    timing_cells,
)

_MAX_RANKS = 32
_MAX_TILES = 8
_MAX_COMPARED_CURVES = 8
_MAX_TEXT_CHARS = 4000
_SMALL_IMAGE = 64  # pixels: smaller images are enlarged so that their pixels are visible


def run_page(record: RunRecord, status: RunStatus) -> str:
    """Return the page of one run."""
    return render_page(f"{record.name}: lockstep report", run_contents(record, status))


def comparison_page(rows: Sequence[ComparisonRow]) -> str:
    """Return the page that compares several runs."""
    return render_page("lockstep report: runs compared", _comparison_contents(rows))


def run_contents(record: RunRecord, status: RunStatus) -> Markup:
    """Return the contents of the page of one run."""
    return join_markup(
        element("h1", one_line(record.name, 120)),
        element("p", element("span", status.text, class_=f"state {status.state}")),
        element("p", run_title(record), class_="faint"),
        *(element("p", line, class_="faint") for line in run_summary(record)),
        _progress(record),
        _tiles(record),
        _verdict(record),
        _section("Plots", _plot_grid(run_plots(record))),
        _section("Where the time went", _timing(record)),
        _section("What happened", _list(history_lines(record))),
        _section("Images and texts", join_markup(_images(record), _texts(record))),
        _section("Settings", element("pre", "\n".join(several_lines(record.config, 100_000, 2000)))),
        _section("Machine", _machine(record)),
        _footer(),
    )


def _comparison_contents(rows: Sequence[ComparisonRow]) -> Markup:
    return join_markup(
        element("h1", f"{count_noun(len(rows), 'run')} compared"),
        _section("Scaling", join_markup(_table(comparison_cells(rows)), _list(comparison_notes(rows)))),
        _section("Plots", _plot_grid([*_scaling_plots(rows), *_overlaid_curves(rows)])),
        _footer(),
    )


def _scaling_plots(rows: Sequence[ComparisonRow]) -> Iterator[Markup | None]:
    measured = [row for row in rows if row.speed_up is not None]
    reached = [_point(row.processes, row.speed_up or 0.0) for row in measured]
    ideal = [_point(row.processes, row.processes / rows[0].processes) for row in measured]
    yield line_plot("Speed-up", [PlotLine("measured", reached), PlotLine("ideal", ideal)], x_label="processes")
    rates = [_point(row.processes, row.throughput.per_s) for row in measured if row.throughput is not None]
    yield line_plot("Throughput", [PlotLine("per second", rates)], x_label="processes")


def _overlaid_curves(rows: Sequence[ComparisonRow]) -> Iterator[Markup | None]:
    """Yield a plot for each metric that all runs have, with one line per run."""
    common = [name for name in rows[0].record.curves if all(name in row.record.curves for row in rows)]
    for name in common[:_MAX_COMPARED_CURVES]:
        lines = [PlotLine(f"{row.record.name} ({row.processes})", row.record.curves[name].points()) for row in rows]
        yield line_plot(one_line(name, 60), lines, may_be_log="loss" in name)


def _point(processes: int, value: float) -> Point:
    return Point(processes, value, value, value)


def _progress(record: RunRecord) -> Markup | None:
    if not record.total_steps:
        return None
    done = min(1.0, record.step / record.total_steps)
    room = element("rect", class_="room", width=1000, height=8)
    bar = element("rect", class_="done", width=f"{1000 * done:.1f}", height=8)
    label = f"{format_percent(done)} done"
    return element(
        "svg", room, bar, class_="bar", viewBox="0 0 1000 8", preserveAspectRatio="none", role="img", aria_label=label
    )


def _tiles(record: RunRecord) -> Markup:
    total = "" if record.total_steps is None else f" of {record.total_steps:,}"
    tiles = [(f"{record.step:,}", f"{'generation' if record.is_search else 'step'}{total}")]
    if record.samples_per_s is not None:
        tiles.append((format_number(record.samples_per_s), "samples/s"))
    for name, curve in record.curves.items():
        if curve.last is not None and (name == "loss" or name.startswith(("test/", "best/"))):
            tiles.append((format_number(curve.last.mean), one_line(name, 40)))
    if record.num_restarts:
        tiles.append((str(record.num_restarts), "restart" + "s" * (record.num_restarts > 1)))
    shown = [
        element("div", element("b", value), element("span", name), class_="tile") for value, name in tiles[:_MAX_TILES]
    ]
    return element("div", *shown, class_="tiles")


def _verdict(record: RunRecord) -> Markup | None:
    kind = "finding" if run_findings(record) else "finding none"
    return _section("Verdict", join_markup(*(element("p", line, class_=kind) for line in verdict_lines(record))))


def _timing(record: RunRecord) -> Markup | None:
    ranks = record.ranks.times()
    if not ranks:
        return None
    shown = slowest_ranks(ranks, _MAX_RANKS)
    omitted = f"the {len(shown)} slowest of {len(ranks)} ranks; " if len(shown) < len(ranks) else ""
    note = element("p", f"{omitted}medians over {count_noun(ranks[0].num_timed, 'timed step')}", class_="faint")
    table = _table([TIMING_HEADINGS, *map(timing_cells, shown)])
    return join_markup(note, phase_bars(shown), table, _list(communication_lines(ranks)))


def _images(record: RunRecord) -> Markup | None:
    figures = []
    for image in embed_images(record):
        step = "" if image.step is None else f", step {image.step:,}"
        is_small = max(image.width, image.height) <= _SMALL_IMAGE
        scale = 4 if is_small else 1
        picture = element(
            "img",
            src=image.uri,
            alt=one_line(image.name),
            class_="small" if is_small else None,
            width=scale * image.width,
            height=scale * image.height,
        )
        figures.append(element("figure", element("figcaption", f"{one_line(image.name, 100)}{step}"), picture))
    return element("div", *figures, class_="pictures") if figures else None


def _texts(record: RunRecord) -> Markup:
    parts = []
    for name, text in record.texts.items():
        parts.append(element("p", f"{one_line(name, 100)}, step {text.step:,}", class_="faint"))
        parts.append(element("pre", "\n".join(several_lines(text.text, _MAX_TEXT_CHARS, 100))))
    return join_markup(*parts)


def _machine(record: RunRecord) -> Markup | None:
    fingerprint = record.run_info.get("fingerprint")
    if not isinstance(fingerprint, dict):
        return None
    known = {name: value for name, value in fingerprint.items() if isinstance(value, str | int | float)}
    shown = [f"{one_line(name, 40)}: {one_line(value, 80)}" for name, value in list(known.items())[:40]]
    created = one_line(record.run_info.get("created", ""), 40)
    run_id = one_line(record.run_info.get("run_id", ""), 40)
    return element("p", f"run {run_id}, created {created}; ", ", ".join(shown), class_="faint")


def _section(heading: str, contents: Markup | None) -> Markup | None:
    return join_markup(element("h2", heading), contents) if contents else None


def _plot_grid(plots: Iterable[Markup | None]) -> Markup | None:
    drawn = [plot for plot in plots if plot is not None]
    return element("div", *drawn, class_="plots") if drawn else None


def _table(rows: Sequence[Sequence[str]]) -> Markup:
    headings, *body = rows
    top = element("tr", *(element("th", cell) for cell in headings))
    lines = [element("tr", *(element("td", cell) for cell in row)) for row in body]
    return element("div", element("table", top, *lines), class_="scroll")


def _list(lines: Sequence[str]) -> Markup | None:
    return element("ul", *(element("li", line) for line in lines)) if lines else None


def _footer() -> Markup:
    return element("footer", f"lockstep {__version__}, read from the run folder alone")
