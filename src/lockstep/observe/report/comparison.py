"""Several runs side by side: how their speed grows with the number of processes, and whether their bits are equal."""

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.observe.curve import count_in, number_in
from lockstep.observe.record import Record
from lockstep.observe.wording import number, one_line, share, table, times


class Rate(NamedTuple):
    per_s: float
    unit: str


class Row(NamedTuple):
    record: Record
    processes: int
    rate: Rate | None
    speed_up: float | None  # against the run with the fewest processes
    possible: float | None  # by its lanes, against the same run
    efficiency: float | None  # the speed-up, over how many times more processes there are


def compare(records: Sequence[Record]) -> list[Row]:
    """By the number of processes; the first is what the others are measured against."""
    ordered = sorted(records, key=lambda record: (_processes(record), str(record.path)))
    first, first_rate = ordered[0], rate_of(ordered[0])
    rows = []
    for record in ordered:
        rate = rate_of(record)
        is_measured = rate is not None and first_rate is not None and first_rate.per_s and rate.unit == first_rate.unit
        speed_up = rate.per_s / first_rate.per_s if is_measured and rate and first_rate else None
        more = _processes(record) / _processes(first)
        bounds = [number_in(each.start.get("speed_up_bound")) for each in (record, first)]
        possible = bounds[0] / bounds[1] if bounds[0] and bounds[1] else None
        efficiency = None if speed_up is None else speed_up / more
        rows.append(Row(record, _processes(record), rate, speed_up, possible, efficiency))
    return rows


def rate_of(record: Record) -> Rate | None:
    """Samples a second while training; of a search, designs while they are evaluated."""
    if not record.is_search:
        return None if record.samples_per_s is None else Rate(record.samples_per_s, "samples/s")
    evaluated, spent = (record.curves.get(name) for name in ("evaluated", "evaluate_s"))
    if evaluated is None or spent is None:
        return None
    num, seconds = (sum(point.mean for point in curve.points()) for curve in (evaluated, spent))
    return Rate(num / seconds, "designs/s") if seconds > 0 else None


def comparison_lines(rows: Sequence[Row]) -> list[str]:
    return [*table(cells(rows)), "", *notes(rows)]


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Of a table, with its heads."""
    unit = next((row.rate.unit for row in rows if row.rate is not None), "samples/s")
    heads = ("run", "processes", unit, "speed-up", "lanes allow", "efficiency", "digest")
    return [heads, *map(_cells, rows)]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        one_line(str(row.record.path), 60),
        str(row.processes),
        "" if row.rate is None else number(row.rate.per_s),
        _ratio(row.speed_up),
        _ratio(row.possible),
        "" if row.efficiency is None else share(row.efficiency),
        "not at its end" if row.record.digest is None else one_line(row.record.digest[:12]),
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """Are the bits equal? Is it the same work at all?"""
    lines = []
    for name, what in (
        ("recipe", "recipes"),
        ("device", "devices"),
        ("effective_batch", "batches"),
        ("lanes", "lanes"),
    ):
        values = {one_line(row.record.start.get(name, "none"), 60) for row in rows}
        if len(values) > 1:
            lines.append(f"not the same work: {what} {', '.join(sorted(values))}")
    digests = {row.record.digest for row in rows if row.record.digest is not None}
    ended = [row.record for row in rows if row.record.digest is not None]
    if len(ended) < 2:
        lines.append("digests: fewer than two of the runs are at their end")
    elif len(digests) == 1:
        lines.append(f"digests: equal, {len(ended)} runs ended with the same bits")
    else:
        steps = {record.step for record in ended}
        why = f" (they made {', '.join(map(str, sorted(steps)))} steps)" if len(steps) > 1 else ""
        lines.append(f"digests: {times(len(digests), 'different one')} at the end of {len(ended)} runs{why}")
    if unmeasured := [one_line(row.record.name, 60) for row in rows if row.rate is None]:
        lines.append(f"no step was timed in {', '.join(unmeasured)}")
    return lines


def _processes(record: Record) -> int:
    return count_in(record.start.get("processes")) or 1


def _ratio(value: float | None) -> str:
    return "" if value is None else f"×{value:.2f}"
