"""A run on the terminal: how far it is, its numbers, where each rank's time goes, what stands out, what happened."""

import time
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.observe.curve import Curve
from lockstep.observe.findings import findings
from lockstep.observe.live.follower import Follower, View
from lockstep.observe.record import Record
from lockstep.observe.report.plots import thinned
from lockstep.observe.report.words import happenings, slowest, throughput_words, title
from lockstep.observe.timing import RankTimes
from lockstep.observe.wording import duration, number, one_line, seconds, share

_REFRESH_S = 0.5
_BAR = 48  # characters
_MOST_NUMBERS, _MOST_RANKS, _MOST_HAPPENINGS = 10, 8, 4
_LEVELS = "▁▂▃▄▅▆▇█"
_LOOKS = {  # told apart without colours, too
    "data": ("▒", "yellow"),
    "compute": ("█", "blue"),
    "exchange": ("░", "magenta"),
    "update": ("▓", "green"),
    "rest": ("·", "white"),
}


def watch_on_terminal(follower: Follower, console: Console) -> int:
    """Until the run ends; its exit code. Where the console is no terminal, a line whenever the run has come further."""
    if not console.is_terminal:
        return _watch_in_lines(follower, console)
    view = follower.look()
    with Live(picture(view), console=console, auto_refresh=False) as live:
        while (code := follower.exit_code(view, time.monotonic())) is None:
            time.sleep(_REFRESH_S)
            view = follower.look()
            live.update(picture(view), refresh=True)
    return code


def _watch_in_lines(follower: Follower, console: Console) -> int:
    told = ""
    while True:
        view = follower.look()
        if (line := status_line(view)) != told:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            told = line
        if (code := follower.exit_code(view, time.monotonic())) is not None:
            return code
        time.sleep(_REFRESH_S)


def status_line(view: View) -> str:
    parts = [view.state.words]
    for name, curve in _told(view.record):
        if curve.last is not None:
            parts.append(f"{one_line(name, 40)} {number(curve.last.mean)}")
    if (rate := throughput_words(view.record)) is not None:
        parts.append(rate)
    return "  ".join(parts)


def picture(view: View) -> RenderableType:
    record = view.record
    parts: list[RenderableType] = [Text(f"{record.path}  {title(record) if record.start else ''}", style="bold")]
    parts.append(Text(view.state.words, style="green" if view.state.standing == "ended" else ""))
    if record.total_steps:
        parts.append(_progress(record))
    parts += [part for part in (_numbers(record), _ranks(record)) if part is not None]
    parts += [Text(finding.text, style="yellow") for finding in findings(record)]
    parts += [Text(line, style="dim") for line in happenings(record)[-_MOST_HAPPENINGS:]]
    return Group(*parts)


def _progress(record: Record) -> RenderableType:
    total = record.total_steps or 1
    told = [share(min(1.0, record.step / total))]
    if (rate := throughput_words(record)) is not None:
        told.append(rate)
    ranks = record.ranks.times()
    if ranks and ranks[0].steps_per_s > 0 and record.step < total:
        told.append(f"{duration((total - record.step) / ranks[0].steps_per_s)} to go")
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=total, completed=min(record.step, total), width=_BAR), Text("  ".join(told)))
    return row


def _numbers(record: Record) -> RenderableType | None:
    rows = list(_told(record))[:_MOST_NUMBERS]
    if not rows:
        return None
    grid = Table.grid(padding=(0, 2))
    for name, curve in rows:
        last = curve.last
        grid.add_row(
            Text(one_line(name, 40)), Text("" if last is None else number(last.mean), style="bold"), Text(sparks(curve))
        )
    return grid


def _told(record: Record) -> Iterator[tuple[str, Curve]]:
    """What a watcher asks for: losses, test metrics, a search's best."""
    for name, curve in record.curves.items():
        if name in ("loss", "train_loss") or name.startswith(("test/", "best/")):
            yield name, curve


def sparks(curve: Curve, width: int = 32) -> str:
    """A curve in a line of text."""
    values = [point.mean for point in thinned(curve.points(), width)]
    if len(values) < 2:
        return ""
    low, span = min(values), max(values) - min(values)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(top * (value - low) / span) if span else 0] for value in values)


def _ranks(record: Record) -> RenderableType | None:
    ranks = record.ranks.times()
    if not ranks:
        return None
    grid = Table.grid(padding=(0, 2))
    shown = slowest(ranks, _MOST_RANKS)
    longest = max(each.step_s for each in shown) or 1.0
    for each in shown:
        grid.add_row(Text(f"rank {each.rank}"), phase_bar(each, longest), Text(seconds(each.step_s)))
    if len(ranks) > len(shown):
        grid.add_row(Text(""), Text(f"and {len(ranks) - len(shown)} quicker ones", style="dim"), Text(""))
    return Group(grid, _key())


def phase_bar(rank: RankTimes, longest_s: float) -> Text:
    """As long as its step, against the longest; each phase in its own character."""
    bar, drawn, so_far = Text(), 0, 0.0
    for phase, (character, colour) in _LOOKS.items():
        so_far += rank.phases[phase]
        until = round(_BAR * so_far / longest_s)
        bar.append(character * (until - drawn), style=colour)
        drawn = until
    return bar


def _key() -> Text:
    key = Text()
    for phase, (character, colour) in _LOOKS.items():
        key.append(f"{character} ", style=colour)
        key.append(f"{'waiting for gradients' if phase == 'exchange' else phase}   ", style="dim")
    return key
