"""Compare runs: how throughput scales with processes, and whether the final bits are equal."""

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.config.plurals import count_noun
from lockstep.events.jsonl import parse_count, parse_number
from lockstep.observe.run_record import RunRecord
from lockstep.observe.text_format import format_number, format_percent, format_table, one_line

_COMPARABLE = {"recipe": "recipes", "device": "devices", "effective_batch": "batches", "lanes": "lanes"}


class Throughput(NamedTuple):
    """Samples, or designs of a search, per second."""

    per_s: float
    unit: str


class ComparisonRow(NamedTuple):
    """One run, compared with the run on the fewest processes."""

    record: RunRecord
    processes: int
    throughput: Throughput | None
    speed_up: float | None
    max_speed_up: float | None  # that the lanes allow
    efficiency: float | None  # the speed-up, divided by the ratio of the numbers of processes


def compare_runs(records: Sequence[RunRecord]) -> list[ComparisonRow]:
    """Return a row for each run, in order of processes; the first is the baseline of the others."""
    ordered = sorted(records, key=lambda record: (_processes(record), str(record.path)))
    return [_compare(record, ordered[0]) for record in ordered]


def throughput_of(record: RunRecord) -> Throughput | None:
    """Return samples per second while training, or designs per second while they are evaluated."""
    if not record.is_search:
        return None if record.samples_per_s is None else Throughput(record.samples_per_s, "samples/s")
    evaluated, evaluate_s = (record.curves.get(name) for name in ("evaluated", "evaluate_s"))
    if evaluated is None or evaluate_s is None:
        return None
    num, seconds = (sum(point.mean for point in curve.points()) for curve in (evaluated, evaluate_s))
    return Throughput(num / seconds, "designs/s") if seconds > 0 else None


def comparison_lines(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the comparison as text."""
    return [*format_table(comparison_cells(rows)), "", *comparison_notes(rows)]


def comparison_cells(rows: Sequence[ComparisonRow]) -> list[tuple[str, ...]]:
    """Return the cells of the table, with its headings as the first row."""
    unit = next((row.throughput.unit for row in rows if row.throughput is not None), "samples/s")
    headings = ("run", "processes", unit, "speed-up", "lanes allow", "efficiency", "digest")
    return [headings, *map(_cells, rows)]


def comparison_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Say whether the runs did the same work and whether they ended with the same bits."""
    notes = []
    for name, plural in _COMPARABLE.items():
        values = {one_line(row.record.start.get(name, "none"), 60) for row in rows}
        if len(values) > 1:
            notes.append(f"not the same work: the runs have different {plural} ({', '.join(sorted(values))})")
    finished = [row.record for row in rows if row.record.digest is not None]
    digests = {record.digest for record in finished}
    if len(finished) < 2:
        notes.append("digests: fewer than two of the runs have finished")
    elif len(digests) == 1:
        notes.append(f"digests: equal, {len(finished)} runs ended with the same bits")
    else:
        steps = sorted({record.step for record in finished})
        reason = f"; they made {', '.join(map(str, steps))} steps" if len(steps) > 1 else ""
        notes.append(
            f"digests: {count_noun(len(digests), 'different digest')} in {len(finished)} finished runs{reason}"
        )
    if unmeasured := [one_line(row.record.name, 60) for row in rows if row.throughput is None]:
        notes.append(f"no step has been timed in {', '.join(unmeasured)}")
    return notes


def _compare(record: RunRecord, baseline: RunRecord) -> ComparisonRow:
    throughput, usual = throughput_of(record), throughput_of(baseline)
    speed_up = None
    if throughput is not None and usual is not None and usual.per_s and throughput.unit == usual.unit:
        speed_up = throughput.per_s / usual.per_s
    bound, baseline_bound = (parse_number(each.start.get("speed_up_bound")) for each in (record, baseline))
    return ComparisonRow(
        record,
        _processes(record),
        throughput,
        speed_up,
        max_speed_up=bound / baseline_bound if bound and baseline_bound else None,
        efficiency=None if speed_up is None else speed_up / (_processes(record) / _processes(baseline)),
    )


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    return (
        one_line(str(row.record.path), 60),
        str(row.processes),
        "" if row.throughput is None else format_number(row.throughput.per_s),
        _ratio(row.speed_up),
        _ratio(row.max_speed_up),
        "" if row.efficiency is None else format_percent(row.efficiency),
        "not finished" if row.record.digest is None else one_line(row.record.digest[:12]),
    )


def _processes(record: RunRecord) -> int:
    return parse_count(record.start.get("processes")) or 1


def _ratio(value: float | None) -> str:
    return "" if value is None else f"×{value:.2f}"
