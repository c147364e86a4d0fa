"""The report of one run as text: what it is, how it went, where the time went, what stands out."""

import time
from collections.abc import Iterable, Iterator, Sequence

from lockstep.config.plurals import count_noun
from lockstep.events.jsonl import parse_count
from lockstep.observe.run_findings import verdict_lines
from lockstep.observe.run_record import Incident, Restart, RunRecord
from lockstep.observe.run_status import RunStatus
from lockstep.observe.step_timing import PHASE_LABELS, RankTimes
from lockstep.observe.text_format import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    format_table,
    one_line,
)

_MAX_HISTORY = 12  # restarts and incidents, the newest
_MAX_RANKS = 16  # in a table
_SEARCH_TIMES = {"evaluate_s": "evaluating", "evolve_s": "evolving", "train_s": "training the network"}

TIMING_HEADINGS = ("rank", "lanes", *PHASE_LABELS.values(), "step", "saving", "evaluating", "peak memory")


def report_lines(record: RunRecord, status: RunStatus) -> list[str]:
    """Return the whole report of a run."""
    lines = [f"{record.path}: {run_title(record)}", f"  {status.text}", *_indented(run_summary(record))]
    sections = {
        "How it went": [*_metric_table(record), *history_lines(record)],
        "Where the time went": _timing_lines(record),
        "Verdict": verdict_lines(record),
    }
    for heading, section in sections.items():
        if section:
            lines += ["", heading, *_indented(section)]
    return lines


def run_title(record: RunRecord) -> str:
    """Say in a few words what a run trains or searches for."""
    start = record.start
    parts = [one_line(start.get("recipe", "a search" if record.is_search else "a custom loop"), 60)]
    if (parameters := parse_count(start.get("parameters"))) is not None:
        parts.append(count_noun(parameters, "parameter"))
    if record.is_search:
        parts.append(count_noun(parse_count(start.get("genes")) or 0, "gene"))
        parts.append(f"{count_noun(parse_count(start.get('population')) or 0, 'design')} per generation")
        parts.append("guided by a network" if start.get("guided") is True else "evolution only")
    return ", ".join(parts)


def run_summary(record: RunRecord) -> Iterator[str]:
    """Yield lines on processes and batch, start and duration, checkpoints, and the digest."""
    if record.start:
        yield ", ".join(_setup(record))
    if record.began_t is not None and record.last_t is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", _utc(record.began_t))
        took = format_duration(max(0.0, record.last_t - record.began_t))
        yield f"started {began}, {took} from first to last event, {count_noun(record.attempt, 'attempt')}"
    stats = record.checkpoints
    if stats.num:
        best = "" if stats.best_step is None else f", best at step {stats.best_step:,}"
        yield (
            f"{count_noun(stats.num, 'checkpoint')}: newest at step {stats.newest_step:,} "
            f"({format_bytes(stats.num_bytes)}){best}; each save blocked training for "
            f"{format_seconds(stats.stall_s / stats.num)}"
        )
    if record.digest is not None:
        yield f"digest {one_line(record.digest, 64)}"


def throughput_text(record: RunRecord) -> str | None:
    """Return samples per second, if known."""
    rate = record.samples_per_s
    return None if rate is None else f"{format_number(rate)} samples/s"


def history_lines(record: RunRecord) -> list[str]:
    """Return a line for each of the newest restarts and incidents, in order of time."""
    history: list[Restart | Incident] = [*record.restarts, *record.incidents]
    history.sort(key=lambda entry: entry.t)
    num_omitted = max(0, record.num_restarts + len(record.incidents) - _MAX_HISTORY)
    lines = [f"… {num_omitted} earlier"] if num_omitted else []
    return lines + [describe_restart_or_incident(entry) for entry in history[-_MAX_HISTORY:]]


def describe_restart_or_incident(entry: Restart | Incident) -> str:
    """Describe a restart or an incident in one line, with its time of day."""
    clock = time.strftime("%H:%M:%S", _utc(entry.t))
    if isinstance(entry, Incident):
        return f"{clock}  {one_line(entry.text, 200)}"
    processes = "" if entry.num_processes is None else f" on {count_noun(entry.num_processes, 'process')}"
    cause = f" after {one_line(entry.cause, 120)}" if entry.cause else ""
    lost = f", repeating at least {count_noun(entry.num_lost, 'step')}" if entry.num_lost else ""
    return f"{clock}  attempt {entry.attempt}{processes}{cause}: from step {entry.step:,}{lost}"


def timing_cells(rank: RankTimes) -> tuple[str, ...]:
    """Return the cells of a rank under `TIMING_HEADINGS`."""
    return (
        str(rank.rank),
        str(rank.num_lanes),
        *(format_seconds(rank.phases[phase]) for phase in PHASE_LABELS),
        format_seconds(rank.step_s),
        format_percent(rank.saving),
        format_percent(rank.evaluating),
        "" if rank.peak_bytes is None else format_bytes(rank.peak_bytes),
    )


def slowest_ranks(ranks: Sequence[RankTimes], max_ranks: int) -> list[RankTimes]:
    """Return the ranks that work longest before they wait, in order of rank."""
    chosen = sorted(ranks, key=lambda each: each.own_s, reverse=True)[:max_ranks]
    return sorted(chosen, key=lambda each: each.rank)


def communication_lines(ranks: Sequence[RankTimes]) -> list[str]:
    """Return a line per rank about the gradients it sends, and how much of that overlapped with compute."""
    return [
        f"gradients, rank {each.rank}: {format_bytes(each.sent_bytes)} sent per step, "
        f"{format_seconds(each.travel_s)} in transit, {format_percent(each.hidden)} of it during the backward pass"
        for each in slowest_ranks(ranks, _MAX_RANKS)
        if each.travel_s and each.hidden is not None
    ]


def _setup(record: RunRecord) -> Iterator[str]:
    start = record.start
    backend = f" ({one_line(start['backend'], 20)})" if isinstance(start.get("backend"), str) else ""
    processes = count_noun(parse_count(start.get("processes")) or 1, "process")
    yield f"{processes} on {one_line(start.get('device', 'an unknown device'), 20)}{backend}"
    batch, lanes = parse_count(start.get("effective_batch")), parse_count(start.get("lanes"))
    if batch and lanes:
        yield f"batch of {batch:,} in {count_noun(lanes, 'lane')}"
    if isinstance(start.get("precision"), str):
        yield one_line(start["precision"], 20)
    if isinstance(start.get("parallel"), str):
        yield f"parallel: {one_line(start['parallel'], 60)}"
    if (rate := throughput_text(record)) is not None:
        yield rate


def _metric_table(record: RunRecord) -> list[str]:
    """Return each metric's last value and its extremes, with their steps."""
    rows = [("", "last", "lowest", "at", "highest", "at")]
    for name, curve in record.curves.items():
        last, lowest, highest = curve.last, curve.lowest(), curve.highest()
        if last is not None and lowest is not None and highest is not None:
            extremes = (format_number(lowest.low), f"{lowest.step:,}", format_number(highest.high), f"{highest.step:,}")
            rows.append((one_line(name, 40), format_number(last.mean), *extremes))
    return format_table(rows) if len(rows) > 1 else []


def _timing_lines(record: RunRecord) -> list[str]:
    ranks = record.ranks.times()
    if not ranks:
        return _search_timing(record) if record.is_search else []
    shown = slowest_ranks(ranks, _MAX_RANKS)
    num_omitted = len(ranks) - len(shown)
    return [
        f"medians over {count_noun(ranks[0].num_timed, 'timed step')}",
        *format_table([TIMING_HEADINGS, *map(timing_cells, shown)]),
        *([f"… and {count_noun(num_omitted, 'faster rank')}"] if num_omitted else []),
        *communication_lines(ranks),
    ]


def _search_timing(record: RunRecord) -> list[str]:
    """Return what a generation takes on average."""
    parts = []
    for name, activity in _SEARCH_TIMES.items():
        if name in record.curves and (points := record.curves[name].points()):
            parts.append(f"{activity} {format_seconds(sum(point.mean for point in points) / len(points))}")
    processes = count_noun(parse_count(record.start.get("processes")) or 1, "process")
    return [f"per generation on {processes}: {', '.join(parts)}"] if parts else []


def _utc(t: float) -> time.struct_time:
    return time.gmtime(min(max(t, 0.0), 4e9))


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
