"""A report for programs: plain values that JSON can hold."""

from collections.abc import Sequence
from typing import Any

from lockstep.events.event import plain
from lockstep.observe.findings import findings
from lockstep.observe.record import Record
from lockstep.observe.report.comparison import Row
from lockstep.observe.state import State
from lockstep.observe.timing import RankTimes, find_straggler

_FROM_START = (
    "recipe",
    "parameters",
    "processes",
    "device",
    "backend",
    "effective_batch",
    "lanes",
    "precision",
    "parallel",
    "genes",
    "population",
    "objectives",
)


def as_values(records: Sequence[Record], states: Sequence[State], rows: Sequence[Row]) -> dict[str, Any]:
    runs = [_run(record, state) for record, state in zip(records, states, strict=True)]
    values: dict[str, Any] = {"runs": runs}
    if len(records) > 1:
        values["scaling"] = [_row(row) for row in rows]
    return dict(plain(values))


def _run(record: Record, state: State) -> dict[str, Any]:
    ranks = record.ranks.times()
    straggler = find_straggler(ranks)
    return {
        "path": str(record.path),
        "run_id": record.facts.get("run_id"),
        "state": state.standing,
        "step": record.step,
        "total_steps": record.total_steps,
        "attempts": record.attempt,
        "num_restarts": record.num_restarts,
        **{name: record.start[name] for name in _FROM_START if name in record.start},
        "samples_per_s": record.samples_per_s,
        "numbers": {name: values for name in record.curves if (values := _curve(record, name)) is not None},
        "saves": vars(record.saves),
        "restarts": [restart._asdict() for restart in record.restarts],
        "incidents": [incident._asdict() for incident in record.incidents],
        "times": [_times(each) for each in ranks],
        "straggler": None if straggler is None else straggler._asdict(),
        "findings": [finding._asdict() for finding in findings(record)],
        "digest": record.digest,
    }


def _curve(record: Record, name: str) -> dict[str, Any] | None:
    curve = record.curves[name]
    last, lowest, highest = curve.last, curve.lowest(), curve.highest()
    if last is None or lowest is None or highest is None:
        return None
    return {"last": last.mean, "step": last.step, "lowest": lowest.low, "highest": highest.high}


def _times(rank: RankTimes) -> dict[str, Any]:
    derived = {"step_s": rank.step_s, "hidden": rank.hidden, "training_per_s": rank.training_per_s}
    return {**rank._asdict(), **derived}


def _row(row: Row) -> dict[str, Any]:
    return {
        "path": str(row.record.path),
        "processes": row.processes,
        "per_s": None if row.rate is None else row.rate.per_s,
        "unit": None if row.rate is None else row.rate.unit,
        "speed_up": row.speed_up,
        "possible": row.possible,
        "efficiency": row.efficiency,
        "digest": row.record.digest,
    }
