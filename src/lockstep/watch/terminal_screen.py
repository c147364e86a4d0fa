"""Draw a run on the terminal: progress, metrics, each rank's time, findings and history."""

import time
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.config.plurals import count_noun
from lockstep.observe.curve import Curve
from lockstep.observe.run_findings import run_findings
from lockstep.observe.run_record import RunRecord
from lockstep.observe.step_timing import PHASE_LABELS, RankTimes
from lockstep.observe.text_format import (
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    one_line,
)
from lockstep.report.svg_plots import downsample
from lockstep.report.text_report import history_lines, run_title, slowest_ranks, throughput_text
from lockstep.terminal_text import escape_controls
from lockstep.watch.run_follower import RunFollower, RunView

_REFRESH_S = 0.5
_BAR_WIDTH = 48  # characters
_MAX_METRICS, _MAX_RANKS, _MAX_HISTORY = 10, 8, 4
_SPARKS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {  # a different character for each, so that phases can be told apart without colours
    "data": ("▒", "yellow"),
    "compute": ("█", "blue"),
    "exchange": ("░", "magenta"),
    "update": ("▓", "green"),
    "rest": ("·", "white"),
}


def watch_on_terminal(follower: RunFollower, console: Console) -> int:
    """Show a run until it ends, and return the exit code. If the console is not a terminal, print a line per change."""
    if not console.is_terminal:
        return _watch_in_lines(follower, console)
    view = follower.poll()
    with Live(render_run(view), console=console, auto_refresh=False) as live:
        while (code := follower.exit_code(view, time.monotonic())) is None:
            time.sleep(_REFRESH_S)
            view = follower.poll()
            live.update(render_run(view), refresh=True)
    return code


def status_line(view: RunView) -> str:
    """Return the status, the headline metrics and the throughput of a run in one line."""
    parts = [view.status.text]
    for name, curve in _headline_curves(view.record):
        if curve.last is not None:
            parts.append(f"{one_line(name, 40)} {format_number(curve.last.mean)}")
    if (rate := throughput_text(view.record)) is not None:
        parts.append(rate)
    return "  ".join(parts)


def render_run(view: RunView) -> RenderableType:
    """Draw the whole screen."""
    record = view.record
    parts: list[RenderableType] = [_line(f"{record.path}  {run_title(record) if record.start else ''}", "bold")]
    parts.append(_line(view.status.text, "green" if view.status.state == "ended" else ""))
    if record.total_steps:
        parts.append(_progress(record))
    parts += [part for part in (_metrics(record), _ranks(record)) if part is not None]
    parts += [_line(finding.text, "yellow") for finding in run_findings(record)]
    parts += [_line(line, "dim") for line in history_lines(record)[-_MAX_HISTORY:]]
    return Group(*parts)


def sparkline(curve: Curve, width: int = 32) -> str:
    """Draw a curve in one line of text."""
    values = [point.mean for point in downsample(curve.points(), width)]
    if len(values) < 2:
        return ""
    low, span = min(values), max(values) - min(values)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(top * (value - low) / span) if span else 0] for value in values)


def phase_bar(rank: RankTimes, longest_s: float) -> Text:
    """Draw a rank's step as a bar of its phases, in proportion to the longest step of all ranks."""
    bar, drawn, so_far_s = Text(), 0, 0.0
    for phase, (character, colour) in _PHASE_STYLES.items():
        so_far_s += rank.phases[phase]
        end = round(_BAR_WIDTH * so_far_s / longest_s)
        bar.append(character * (end - drawn), style=colour)
        drawn = end
    return bar


def _watch_in_lines(follower: RunFollower, console: Console) -> int:
    last_line = ""
    while True:
        view = follower.poll()
        if (line := status_line(view)) != last_line:
            console.print(_line(line), soft_wrap=True)
            last_line = line
        if (code := follower.exit_code(view, time.monotonic())) is not None:
            return code
        time.sleep(_REFRESH_S)


def _line(text: str, style: str = "") -> Text:
    """Return a text from a run folder as rich draws it: as it is, with neither markup nor control characters."""
    return Text(escape_controls(text), style=style)


def _progress(record: RunRecord) -> RenderableType:
    total = record.total_steps or 1
    parts = [format_percent(min(1.0, record.step / total))]
    if (rate := throughput_text(record)) is not None:
        parts.append(rate)
    ranks = record.ranks.times()
    if ranks and ranks[0].steps_per_s > 0 and record.step < total:
        parts.append(f"{format_duration((total - record.step) / ranks[0].steps_per_s)} to go")
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=total, completed=min(record.step, total), width=_BAR_WIDTH), Text("  ".join(parts)))
    return row


def _metrics(record: RunRecord) -> RenderableType | None:
    curves = list(_headline_curves(record))[:_MAX_METRICS]
    if not curves:
        return None
    grid = Table.grid(padding=(0, 2))
    for name, curve in curves:
        value = "" if curve.last is None else format_number(curve.last.mean)
        grid.add_row(Text(one_line(name, 40)), Text(value, style="bold"), Text(sparkline(curve)))
    return grid


def _headline_curves(record: RunRecord) -> Iterator[tuple[str, Curve]]:
    """Yield the losses, test metrics and best values of a search."""
    for name, curve in record.curves.items():
        if name in ("loss", "train_loss") or name.startswith(("test/", "best/")):
            yield name, curve


def _ranks(record: RunRecord) -> RenderableType | None:
    ranks = record.ranks.times()
    if not ranks:
        return None
    grid = Table.grid(padding=(0, 2))
    shown = slowest_ranks(ranks, _MAX_RANKS)
    longest_s = max(each.step_s for each in shown) or 1.0
    for each in shown:
        grid.add_row(Text(f"rank {each.rank}"), phase_bar(each, longest_s), Text(format_seconds(each.step_s)))
    if len(ranks) > len(shown):
        omitted = f"and {count_noun(len(ranks) - len(shown), 'faster rank')}"
        grid.add_row(Text(""), Text(omitted, style="dim"), Text(""))
    return Group(grid, _legend())


def _legend() -> Text:
    legend = Text()
    for phase, (character, colour) in _PHASE_STYLES.items():
        legend.append(f"{character} ", style=colour)
        legend.append(f"{PHASE_LABELS[phase]}   ", style="dim")
    return legend
